"""Patterns of layers: the vision tower of a language model, and one encoder of a pair."""

import pytest
import torch

import facts
from tests.networks import make_vit

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4}
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE_TOKEN, TOWER = 63, "model.vision_tower"


def make_llava():
    """Its features are those before the last layer of the tower, as in the published networks."""
    transformers = pytest.importorskip("transformers")
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def make_pair():
    """An image and a text encoder in one network: CLIP."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("clip", vision_config=VISION, text_config=TEXT)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(IMAGE_TOKEN, (3, 8, 20), generator=generator)
    ids[..., 2:18] = IMAGE_TOKEN
    images = torch.randn(3, 8, 3, 16, 16, generator=generator)
    return [{"input_ids": text, "pixel_values": image} for text, image in zip(ids, images, strict=True)]


def reloaded(result, folder):
    facts.save_compressed(result, folder)
    return facts.load_compressed(folder).model


def test_a_pattern_takes_the_layers_of_a_tower_that_reach_the_loss(texts, tmp_path):
    model = make_llava()
    result = facts.compress(model, texts, layers=f"{TOWER}.*", ratio=0.5)
    assert result.plan.keys() == {
        f"{TOWER}.encoder.layers.{layer}.{unit}"
        for layer in (0, 1)
        for unit in ("self_attn.scores", "self_attn.outputs", "mlp")
    }
    assert result.skipped[f"{TOWER}.encoder.layers.2.mlp.fc1"] == "the loss does not depend on it"
    assert result.skipped["model.language_model.layers.0.mlp.up_proj"] == "not among the layers named"
    logits = result.model(**texts[0]).logits
    assert not torch.equal(logits, model(**texts[0]).logits)
    assert torch.equal(reloaded(result, tmp_path)(**texts[0]).logits, logits)


def test_one_encoder_of_a_pair(tmp_path):
    model = make_pair()
    ids = torch.arange(8 * 6).reshape(8, 6) % 64
    data = [{"input_ids": ids, "pixel_values": torch.randn(8, 3, 16, 16)} for _ in range(3)]
    prepared = facts.prepare(model, data, layers="vision_model.*", outputs="image_embeds", parts="units")
    result = facts.compress(prepared, ratio=0.5, search="uniform")
    assert all(name.startswith("vision_model.") for name in result.plan)
    found, original, loaded = (each(**data[0]) for each in (result.model, model, reloaded(result, tmp_path)))
    assert torch.equal(found.text_embeds, original.text_embeds)
    assert not torch.equal(found.image_embeds, original.image_embeds)
    assert torch.equal(loaded.image_embeds, found.image_embeds)


def test_a_pattern_without_a_match():
    with pytest.raises(ValueError, match=r"no linear layer or 1x1 convolution is called vision\.\*; Vision"):
        facts.prepare(make_vit(), input_shape=(3, 16, 16), layers="vision.*")
