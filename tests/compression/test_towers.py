"""The vision tower of a language model, and encoders in pairs: compressed within the whole, or by themselves."""

import pytest
import torch
from torch import nn

import facts
from tests.networks import UNIFORM, image_batches, make_vit

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4}
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE_TOKEN, TOWER = 63, "model.vision_tower"
OPTIONS = {"parts": "units", "ratio": 0.5, "search": "uniform"}


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


class Cropped(nn.Module):
    """A network of the user's own, whose tower sees less than the inputs, and runs twice."""

    def __init__(self):
        super().__init__()
        self.tower, self.head = make_vit(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.tower(x[..., :16, :16]) + self.tower(x[..., -16:, -16:]))


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


def test_a_tower_is_compressed_by_itself_and_put_back(texts, tmp_path):
    model = make_llava()
    inputs = facts.tower_inputs(model, TOWER, texts)
    assert all(torch.equal(found, text["pixel_values"]) for found, text in zip(inputs, texts, strict=True))
    tower = facts.compress(model.model.vision_tower, inputs, **OPTIONS)
    whole = facts.put_back(tower, model, TOWER)
    assert whole.plan == {f"{TOWER}.{name}": rank for name, rank in tower.plan.items()}
    assert whole.summary.before.params - whole.summary.after.params == (
        tower.summary.before.params - tower.summary.after.params
    )
    features = tower.model(texts[0]["pixel_values"]).last_hidden_state
    assert torch.equal(whole.model.model.vision_tower(texts[0]["pixel_values"]).last_hidden_state, features)
    assert torch.equal(whole.model.lm_head.weight, model.lm_head.weight)
    assert whole.model.lm_head.weight is not model.lm_head.weight
    assert torch.equal(reloaded(whole, tmp_path)(**texts[0]).logits, whole.model(**texts[0]).logits)
    assert facts.recover(whole, texts, epochs=1).summary.recovery.after > 0


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


def test_inputs_are_those_of_the_first_call_and_nothing_behind_it_runs():
    model = Cropped()
    images = image_batches([2, 1], shape=(3, 20, 20))
    model.head.register_forward_pre_hook(lambda *_: pytest.fail("behind the tower"))
    inputs = facts.tower_inputs(model, "tower", images)
    for _ in range(2):
        assert all(torch.equal(found, x[..., :16, :16]) for found, (x, _) in zip(inputs, images, strict=True))
    assert not model.tower._forward_pre_hooks


def test_errors(texts):
    model = Cropped()
    with pytest.raises(ValueError, match=r"Cropped has no submodule 'towers', only tower, head"):
        facts.tower_inputs(model, "towers", [])
    llava = make_llava()
    with pytest.raises(ValueError, match="vision_tower does not run on these data"):
        next(iter(facts.tower_inputs(llava, TOWER, [texts[0]["input_ids"][:, :2]])))
    prepared = facts.prepare(model.tower, input_shape=(3, 16, 16))
    result = facts.compress(prepared, estimator="pela", ratio=0.5, **UNIFORM)
    with pytest.raises(ValueError, match="was not made from tower of this Cropped"):
        facts.put_back(result, Cropped(), "tower")
    model.again = model.tower.blocks[0].mlp.fc1
    with pytest.raises(ValueError, match=r'tower shares again.weight: .* with layers="tower.\*"'):
        facts.put_back(result, model, "tower")
    with pytest.raises(ValueError, match=r"no linear layer or 1x1 convolution is called vision\.\*; Cropped has tower"):
        facts.prepare(model, image_batches([2], shape=(3, 20, 20)), layers="vision.*")
