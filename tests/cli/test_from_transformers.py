"""The commands on networks of transformers: image classifiers and language models, and data sets of Hugging Face."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from experiments.mini.language import new_tokenizer
from facts.cli import inputs
from facts.tasks import ImageFolder
from facts.utils.hub import constants
from tests.cli.conftest import VIT, saved
from tests.networks import make_causal_lm, make_image_classifier

transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")
pytest.importorskip("tokenizers", reason="the extra `llm` is not installed: make install-llm")
datasets = pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")

CLASSES = ("fox", "cat", "dog")  # not in the order of the folders
NUM_TOKENS = 280  # 256 of them bytes
SIZES = ("--sequence-length", 16, "--num-calibration", 4, "--batch-size", 2)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A network as transformers saves one, with names of its classes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    names = dict(enumerate(CLASSES))
    model = make_image_classifier(id2label=names, label2id={name: label for label, name in names.items()})
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture
def dataset(photos):
    """The photos as a data set with columns of images and classes, in the order of the network's classes."""
    return datasets.load_dataset("imagefolder", data_dir=str(photos), split="train")


@pytest.mark.system
def test_an_image_classifier_is_compressed_and_evaluated(run, classifier, photos, tmp_path):
    """Accuracy is that of transformers, and labels are the network's."""
    run("compress", classifier, "--data", photos, "--num-workers", 0, "--out", tmp_path / "small")
    manifest = saved(tmp_path / "small")
    assert (tmp_path / "small" / "preprocessor_config.json").is_file()
    for network, which, cost in ((tmp_path / "small", "compressed", "after"), (classifier, "original", "before")):
        options = ("--data", photos, "--num-workers", 0, "--unseen", "--json")
        found = json.loads(run("evaluate", network, *options).stdout)
        assert found["top1"] == manifest["metrics"]["top1"][which]
        assert found["flops"] == manifest["summary"][cost]["flops"]
    files = ImageFolder(root=photos).validation_images.names
    images = [Image.open(photos / name).convert("RGB") for name in files]
    labels = torch.tensor([CLASSES.index(name.split("/")[0]) for name in files])
    model = transformers.AutoModelForImageClassification.from_pretrained(classifier).eval()
    pixels = transformers.AutoImageProcessor.from_pretrained(classifier)(images, return_tensors="pt")
    expected = 100 * (model(**pixels).logits.argmax(dim=-1) == labels).double().mean().item()
    assert found["top1"] == pytest.approx(expected) and 0 < expected < 100


def test_the_configuration_decides_the_kind(monkeypatch):
    for configuration, kind in (
        ({"architectures": ["SwinForImageClassification"], "model_type": "swin"}, "ImageClassifier"),
        ({"architectures": ["ViTModel"], "model_type": "vit"}, "ImageEncoder"),
        ({"architectures": ["CLIPModel"], "model_type": "clip"}, "ImageEncoder"),
        ({"model_type": "vit"}, "ImageClassifier"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "CausalLM"),
        ({"model_type": "gpt2"}, "CausalLM"),
    ):
        monkeypatch.setattr(inputs, "published_configuration", lambda tag, found=configuration: found)
        recipe = inputs._recipe("transformers/a/b", None, None)
        assert (type(recipe).__name__, recipe.tag, recipe.weights) == (kind, "a/b", "pretrained")


def test_data_at_the_hub(run, dataset, monkeypatch):
    """With a network of timm, whose classes have no names."""

    def load_dataset(repository, configuration, split):
        assert repository == "a/b" and (configuration, split) in ((None, None), ("plain", "train"))
        return dataset if split else datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # not asked
    assert "top1" in run("evaluate", *VIT, "--data", "hub:a/b/plain/train").stdout
    assert len(ImageFolder(root="hub:a/b/plain/train").validation_images) == 6
    assert len(ImageFolder(root="hub:a/b").validation_images) == 5


def test_data_without_images_or_classes(run, dataset, tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).save_to_disk(tmp_path / "texts")
    datasets.DatasetDict({"one": dataset, "two": dataset}).save_to_disk(tmp_path / "splits")
    coarse = datasets.ClassLabel(names=["x", "y"])
    both = dataset.add_column("coarse", [0, 1] * (len(dataset) // 2)).cast_column("coarse", coarse)
    both.save_to_disk(tmp_path / "both")
    assert ImageFolder(root=tmp_path / "both").classes == ["cat", "dog", "fox"]
    both.rename_column("label", "fine").save_to_disk(tmp_path / "columns")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no answer")))
    for data, message in (
        ("hub:cifar10", "images at the hub are hub:OWNER/DATASET/CONFIGURATION/SPLIT, got 'hub:cifar10'"),
        ("hub:a/b", "hub:a/b is not on this machine and could not be fetched ("),
        (tmp_path / "texts", "has 0 columns of images among text, label: give a data set with one"),
        (tmp_path / "splits", "has the splits one, two, and no images in train: name a split"),
        (tmp_path / "columns", "has several columns of classes, none of them called label: keep one"),
    ):
        assert message in run("evaluate", *VIT, "--data", data, code=1).output


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One to calibrate on, and another to evaluate on."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(" ".join(f"the number {index} comes first;" for index in range(80)))
    (folder / "test.txt").write_text(" ".join(f"then {index} is the next number," for index in range(40)))
    return folder


@pytest.fixture(scope="module")
def language_model(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = make_causal_lm(dtype=torch.float32)
    model.resize_token_embeddings(NUM_TOKENS)
    model.save_pretrained(folder)
    new_tokenizer((texts / "train.txt").read_text(), NUM_TOKENS).save_pretrained(folder)
    return folder


@pytest.mark.system
def test_compress_and_evaluate(run, language_model, texts, tmp_path):
    data = ("--data", texts / "train.txt", "--evaluation-text", texts / "test.txt")
    result = run("compress", language_model, *data, *SIZES, "--out", tmp_path / "small")
    assert "perplexity" in result.output
    metrics = json.loads((tmp_path / "small" / "compression.json").read_text())["metrics"]
    sizes = ("--sequence-length", 16, "--batch-size", 2, "--json")
    for network, which in ((tmp_path / "small", "compressed"), (language_model, "original")):
        figures = json.loads(run("evaluate", network, "--data", texts / "test.txt", *sizes).stdout)
        for name in ("perplexity", "perplexity_standard_error"):
            assert figures[name] == pytest.approx(metrics[name][which], rel=1e-5)
        assert f"{figures['num_samples']} samples " in result.output
    assert "--unseen is for images" in run("evaluate", language_model, *data[:2], "--unseen", code=1).output


def test_texts_that_are_missing_or_short(run, language_model, texts, tmp_path):
    (tmp_path / "short.txt").write_text("one two three four five six")
    (tmp_path / "other.txt").write_text("one two", encoding="utf-16")
    tokenizer = inputs.build(str(language_model), None, None, "cpu").tokenizer
    one_window = ("--sequence-length", len(tokenizer("one two three four five six")["input_ids"]))
    for text, options, message in (
        ("nowhere.txt", (), "there is no file or folder nowhere.txt: give an existing one, or hub:OWNER/DATASET"),
        (texts / "test.txt", ("--num-calibration", 1000), "needs 1016 windows of 16 tokens"),
        (tmp_path / "other.txt", (), "other.txt is no text in UTF-8 ("),
        (tmp_path / "short.txt", one_window, "the training text has 1: give a longer one"),
    ):
        arguments = ("compress", language_model, "--data", text, *SIZES, *options, "--out", tmp_path / "small")
        assert message in run(*arguments, code=1).output


def test_networks_that_are_not_whole(run, classifier, language_model, photos, texts, tmp_path, monkeypatch):
    data, other = ("--data", texts / "test.txt"), "is no language model, image classifier or image encoder"
    for text, message in (
        ("{", "config.json is damaged"),
        ('{"architecture": "vit_x", "num_classes": 3}', "name the network timm/vit_x --weights "),
        ('["ViT"]', "is not transformers', which has a model_type: give the folder of such a network"),
        ('{"architectures": ["DetrForObjectDetection"], "model_type": "detr"}', f"a transformers 'detr', {other}"),
        ((language_model / "config.json").read_text(), "no checkpoint"),
    ):
        (tmp_path / "config.json").write_text(text)
        printed = run("evaluate", tmp_path, *data, code=1).output
        assert message in printed
    assert "model.safetensors" in printed
    for name in ("config.json", "model.safetensors"):
        shutil.copy(classifier / name, tmp_path)
    message = "ViTForImageClassification has no image processor: set model.image_processor"
    assert message in run("evaluate", tmp_path, "--data", photos, code=1).output
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install -e '.[llm]'" in run("evaluate", language_model, *data, code=1).output
