"""Networks of timm without their classifier: compressed from images, and compared by their features."""

import json
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity, normalize

import facts
from facts.models import TimmModel
from facts.tasks import ImageFolder
from facts.tasks.classification.base import NUM_NEIGHBORS, TEMPERATURE, evaluate_features, features_of
from tests.cli.conftest import saved, write_images

NAMES = ("relative_error", "cosine", "nearest_top1", "probe_top1")


@pytest.fixture
def encoder(tmp_path):
    """Arguments that name it, with the weights of a network with a classifier."""
    save_file(timm.create_model("tiny_vit", num_classes=3).state_dict(), tmp_path / "own.safetensors")
    return "timm/tiny_vit", "--num-classes", 0, "--weights", tmp_path / "own.safetensors"


@pytest.mark.system
def test_it_is_compressed_saved_and_evaluated(run, encoder, photos, tmp_path):
    folder, data = tmp_path / "half", ("--data", photos, "--num-workers", 0)
    printed = run("compress", *encoder, *data, "--search", "uniform", "--ratio", 0.6, "--out", folder).output
    description = saved(folder)
    assert all(name in printed for name in NAMES)
    found = json.loads(run("evaluate", folder, *encoder[3:], *data, "--json").stdout)
    for name in NAMES:
        assert found[name] == pytest.approx(description["metrics"][name]["compressed"], rel=1e-4)
    assert description["metrics"]["cosine"]["original"] == pytest.approx(1, abs=1e-6)
    assert description["metrics"]["relative_error"]["original"] == 0
    original = timm.create_model("tiny_vit", num_classes=3, checkpoint_path=str(encoder[-1]))
    original.reset_classifier(0)
    batches = ImageFolder(root=photos, num_workers=0).for_features(original.eval())[1]
    images = torch.cat([images for images, _ in batches])
    expected, features = original(images), facts.load_compressed(folder).model(images)
    error = (features - expected).square().sum(1) / expected.square().sum(1)
    assert found["relative_error"] == pytest.approx(error.mean().item(), rel=1e-3)
    assert found["cosine"] == pytest.approx(cosine_similarity(features, expected).mean().item(), rel=1e-4)
    assert found["num_samples"] == 6 and found["cosine"] > 0.5


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.system
@pytest.mark.parametrize("in_pair", [False, True])
def test_an_encoder_of_transformers_alone_and_in_a_pair(run, in_pair, photos, tmp_path):
    """A pair with a text encoder stands for its image encoder."""
    transformers = pytest.importorskip("transformers")
    images = {"image_size": 32, "patch_size": 8, **SIZES}
    torch.manual_seed(0)
    if in_pair:
        whole = transformers.CLIPModel(transformers.CLIPConfig(text_config=SIZES, vision_config=images)).eval()
        model = whole.vision_model
    else:
        whole = model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**images)).eval()
    whole.save_pretrained(tmp_path / "tiny")
    model.image_processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    model.image_processor.save_pretrained(tmp_path / "tiny")
    data = ("--data", photos, "--num-workers", 0)
    run("compress", tmp_path / "tiny", *data, "--ratio", 0.6, "--no-evaluate", "--out", tmp_path / "half")
    weights = tmp_path / "tiny" / "model.safetensors"
    found = json.loads(run("evaluate", tmp_path / "half", "--weights", weights, *data, "--json").stdout)
    ((images, _),) = ImageFolder(root=photos, num_workers=0).for_features(model)[1]
    small = facts.load_compressed(tmp_path / "half").model
    similar = cosine_similarity(small(images).pooler_output, model(images).pooler_output)
    assert found["num_samples"] == len(images) == 6
    assert found["cosine"] == pytest.approx(similar.mean().item(), rel=1e-4)
    recovered = facts.recover(facts.load_compressed(tmp_path / "half"), [images], original=model, epochs=1)
    assert recovered.summary.recovery
    recipe = replace(facts.models.ImageEncoder.of(whole), weights=str(weights))
    assert type(recipe.build()) is type(whole)  # from Python, a pair is itself


def test_nearest_neighbours_against_a_sum_of_weights(photos):
    """And a probe that separates what is separable: the features of images that it was fitted to."""
    model = timm.create_model("tiny_vit", num_classes=0).eval()
    reference, evaluation = ImageFolder(root=photos, num_workers=0, batch_size=4).for_features(model)
    (known, classes), (features, labels) = (features_of(model, each) for each in (reference, evaluation))
    assert len(known) == len(features) == 6 < NUM_NEIGHBORS
    votes = torch.zeros(6, 3, dtype=torch.float64)
    weights = (normalize(features) @ normalize(known).T / TEMPERATURE).exp()
    votes.index_add_(1, classes, weights)
    right = evaluate_features(model, model, reference, evaluation)["nearest_top1"]
    assert torch.equal(right, 100.0 * (votes.argmax(1) == labels).double())
    assert evaluate_features(model, model, reference, reference)["probe_top1"].mean() == 100
    one = [(images, torch.zeros_like(labels)) for images, labels in reference]  # of one class
    assert evaluate_features(model, model, one, one).keys() == {"relative_error", "cosine"}


def test_images_without_classes_give_distances_alone(run, encoder, tmp_path):
    (photos := tmp_path / "photos").mkdir()
    for path in write_images(tmp_path / "classes").glob("*/*"):
        path.rename(photos / f"{path.parent.name}{path.name}")
    found = json.loads(run("evaluate", *encoder, "--data", photos, "--num-workers", 0, "--json").stdout)
    assert found["relative_error"] == 0 and not {"nearest_top1", "probe_top1"} & found.keys()


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_checkpoint_without_its_classifiers(name):
    """A distilled network has two, and Swin's is part of a head."""
    with torch.device("meta"):
        encoder, whole = timm.create_model(name, num_classes=0), timm.create_model(name)
        assert TimmModel(tag=name).renamed(whole.state_dict(), encoder).keys() == encoder.state_dict().keys()
