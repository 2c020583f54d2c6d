"""Image classifiers of transformers that are rebuilt from the saved folder alone."""

import json

import pytest
import torch

import facts
from facts.models import ImageClassifier
from facts.modules.networks import run
from tests.networks import make_image_classifier
from tests.saving.setting import compressed

transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")

IMAGES = torch.randn(2, 3, 32, 32)


@torch.no_grad()
def assert_same(loaded, model):
    assert type(loaded) is type(model)
    assert run(loaded, IMAGES).equal(run(model, IMAGES))


def test_the_folder_is_enough(tmp_path):
    model = make_image_classifier("swin", attention_probs_dropout_prob=0.25)
    model.image_processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    result = compressed(model, IMAGES.shape[1:])
    facts.save_compressed(result, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}
    loaded = facts.load_compressed(tmp_path)
    assert_same(loaded.model, result.model)
    settings = loaded.model.config.to_diff_dict()
    assert {**settings, **model.config.to_diff_dict()} == settings
    assert loaded.model.image_processor.to_dict() == model.image_processor.to_dict()
    facts.save_compressed(loaded, tmp_path / "again")
    assert_same(facts.load_compressed(tmp_path / "again").model, result.model)


def test_classes_have_any_names_and_number(tmp_path):
    names = {0: "and/or", 1: "C:\\", 2: "__auto_map", **{index: f"https://{index}" for index in range(3, 21_841)}}
    model = make_image_classifier(id2label=names, label2id={name: index for index, name in names.items()})
    facts.save_compressed(compressed(model, IMAGES.shape[1:]), tmp_path)
    loaded = facts.load_compressed(tmp_path).model
    assert loaded.config.id2label == names and loaded.config.label2id["and/or"] == 0


def test_from_a_file_and_the_weights_of_another_network(tmp_path):
    model = make_image_classifier("swin")
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    settings, weights = json.loads((tmp_path / "config.json").read_text()), str(tmp_path / "model.safetensors")
    built = ImageClassifier(configuration=settings, weights=weights).build()
    assert_same(built, model)
    assert list(built.image_processor.image_mean) == [0.1, 0.2, 0.3]
    other = make_image_classifier("swin", num_labels=7).config.to_diff_dict()
    with pytest.raises(ValueError, match=r"does not fit this SwinForImageClassification: 2 tensors differ.*classifier"):
        ImageClassifier(configuration=other, weights=weights).build()
