"""`facts evaluate`, `recover`, `export` and `benchmark` on folders that `facts compress` wrote; encoders of images."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity, normalize

import facts
from facts.cli import inputs
from facts.models import TimmModel
from facts.tasks import ImageFolder
from facts.tasks.classification.base import NUM_NEIGHBORS, TEMPERATURE, evaluate_features, features_of
from tests.cli.conftest import VIT, saved, write_images

TINY = VIT[0], "--num-classes", 3
NAMES = ("relative_error", "cosine", "nearest_top1", "probe_top1")
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
INT8 = "--int8 is for ONNX and OpenVINO, calibrated on images: give a folder of them as --data"


def write_weights(path, dtype=torch.float16):
    save_file(timm.create_model("tiny_vit", num_classes=3).to(dtype).state_dict(), path)
    return path


def test_metrics_are_those_measured_when_the_network_was_made(run, compressed, photos):
    _, folder = compressed
    description, options = saved(folder), ("--data", photos, "--num-workers", 0, "--unseen")
    printed = (run("evaluate", *network, *options, "--json").stdout for network in ([folder], VIT))
    after, before = map(json.loads, printed)
    for found, which, cost in ((after, "compressed", "after"), (before, "original", "before")):
        for name in ("top1", "top1_standard_error"):
            assert found[name] == description["metrics"][name][which]
        assert {name: found[name] for name in ("flops", "params")} == description["summary"][cost]
    lines = run("evaluate", folder, *options).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["top1", "num_samples", "flops", "params"]
    assert lines[0].endswith(f"{after['top1']:.4g} ± {after['top1_standard_error']:.2g}")


def test_what_is_infinite_is_null_in_json(run, compressed, photos, monkeypatch):
    monkeypatch.setattr(inputs, "measured", lambda *_: {"perplexity": torch.inf})
    found = run("evaluate", compressed[1], "--data", photos, "--num-workers", 0, "--json").stdout
    assert json.loads(found)["perplexity"] is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate vit --weights random --data photos", "has weights and classes of its own"),
        ("compress vit --data photos --out vit", "is compressed already: name the network it was made from"),
        ("export vit --out a.foo", "a.foo must end in .onnx or .xml or .pt2"),
        ("export vit --out vit.pt2 --int8 --data photos", INT8),
        ("export vit --out a.onnx --int8", INT8),
        ("export vit --out a.xml --data photos", INT8),
        ("benchmark timm/tiny_vit --batch-size 1000000000000", "inputs fits no memory: give a smaller --batch-size"),
    ],
)
def test_refusals(run, compressed, photos, caplog, monkeypatch, tmp_path, command, message):
    monkeypatch.chdir(tmp_path)
    words = [{"vit": compressed[1], "photos": photos}.get(word, word) for word in command.split()]
    assert message in run(*words, code=1).output
    assert (f"{compressed[1]} holds an older result, which will be replaced" in caplog.text) == (words[-1] == words[1])


@pytest.mark.system
def test_images_are_those_of_the_saved_network(run, photos, tmp_path):
    """Other images than the published network's."""
    arguments, shape = {"img_size": (64, 32), "in_chans": 1, "num_classes": 3}, (1, 64, 32)
    model = TimmModel(tag="tiny_vit", weights="random", arguments=arguments).build()
    facts.save_compressed(facts.compress(model, estimator="pela", ratio=0.5), tmp_path / "vit")
    found = json.loads(run("evaluate", tmp_path / "vit", "--data", photos, "--num-workers", 0, "--json").stdout)
    assert found["flops"] == facts.count_cost(facts.load_compressed(tmp_path / "vit").model, shape).flops
    run("export", tmp_path / "vit", "--out", tmp_path / "vit.pt2")
    assert torch.export.load(tmp_path / "vit.pt2").module()(torch.randn(2, *shape)).shape == (2, 3)


@pytest.mark.system
def test_the_original_is_rebuilt_of_the_weights_that_were_compressed(run, photos, tmp_path, monkeypatch):
    own, other = (write_weights(tmp_path / f"{name}.safetensors") for name in ("own", "other"))
    small, data = tmp_path / "small", ("--data", photos, "--num-workers", 0)
    options = ("--weights", own, *data, "--no-evaluate", "--form", "pivoted", "--out", small)
    assert "weights, float16" in run("compress", *TINY, *options).output
    assert facts.load_compressed(small).model.head.weight.dtype == torch.float16
    recover = ("recover", small, *data, "--minutes", 0.01, "--out", tmp_path / "better")
    for options, message in (
        ((), "weights (own.safetensors) are not published: give them as --weights FILE"),
        (("--weights", other), "was made from other weights (own.safetensors): give those as"),
    ):
        assert message in run(*recover, *options, code=1).output
    assert "held-out samples" in run(*recover, "--weights", own).output
    description = saved(small)
    assert saved(tmp_path / "better")["summary"]["sizes"] == description["summary"]["sizes"]
    description |= {"base_model": {**description["base_model"], "repository": "a/b"}, "checksum": None}
    (small / "compression.json").write_text(json.dumps(description))
    monkeypatch.setattr(inputs, "fetch", {"a/b": own}.__getitem__)
    assert " samples in " in run(*recover).output


@pytest.mark.system
@pytest.mark.parametrize(("files", "options"), [(["vit.onnx"], ["--int8"]), (["vit.bin", "vit.xml"], [])])
def test_a_network_is_exported(run, compressed, photos, tmp_path, files, options):
    """In int8 by ONNX Runtime; calibrating for OpenVINO takes long, and is tested in tests/saving."""
    if "vit.xml" in files and not find_spec("openvino"):
        pytest.skip("the extra `openvino` is not installed")
    data = ("--data", photos) if options else ()
    printed = run("export", compressed[1], "--out", tmp_path / files[-1], *options, *data).stdout
    in_int8 = re.findall(r"outputs in int8: (\S+)", printed)
    assert f"saved to {tmp_path / files[-1]}" in printed and "[torch.onnx]" not in printed
    assert all(0 < float(error) < 0.1 for error in in_int8) and len(in_int8) == bool(data)
    assert sorted(path.name for path in tmp_path.iterdir()) == files


@pytest.mark.system
def test_speeds_are_relative_to_the_first(run, compressed):
    networks = ("timm/tiny_vit", compressed[1])
    printed = run("benchmark", *networks, "--runtime", "PyTorch, float32", "--batch-size", 2).stdout
    rows = [line.split() for line in printed.splitlines() if "float32" in line]
    assert [row[0] for row in rows] == [*map(str, networks)]
    assert float(rows[0][-1]) == 1 and float(rows[1][-1]) > 0


@pytest.mark.system
def test_one_folder_is_cut_to_any_budget(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ("--data", photos, "--num-calibration", 4, "--parts", "units", "--elastic", "--no-evaluate")
    made = run("compress", *VIT, *data, "--out", "any").output
    assert re.search(r"what every budget needs, \S+ MB", made) and "`facts cut any --ratio 0.6" in made
    params = 0.8 * facts.load_compressed("any").summary.before.params
    for name, options in (("half", ()), ("fewer", ("--params", params))):
        assert "saved to" in run("cut", "any", *options, "--out", name).output
    half, fewer = (facts.load_compressed(name).summary for name in ("half", "fewer"))
    assert half.parts == "units" and [*half.bounds.values()] == [0.5] and fewer.after.params <= params
    run("compress", *TINY, "--weights", write_weights(tmp_path / "a.safetensors"), *data, "--out", "own")
    printed = run("cut", "own", "--out", "cut").output
    assert "weights, float16 " in printed and "in half precision: `.float()` computes" in printed
    assert facts.load_compressed("cut").model.head.weight.dtype == torch.float16
    compress = ("compress", *VIT, *data, "--out", "no")
    for words, message in (
        ((*compress, "--recover", 1), "leave out --recover, or use `facts recover` on cuts"),
        ((*compress, "--search", "uniform"), "uniform gives no errors for other budgets"),
        (("cut", "any", "--out", "any"), "a cut would overwrite the folder"),
        (("cut", "any", "--out", "no", "--ratio", 0.001), "too little: the folder needs at least"),
        (("push", "any", "me/any"), "push a cut of it"),
    ):
        assert message in run(*words, code=1).output


@pytest.fixture
def encoder(tmp_path):
    """Arguments that name it, with the weights of a network with a classifier."""
    return VIT[0], "--num-classes", 0, "--weights", write_weights(tmp_path / "own.safetensors", torch.float32)


@pytest.mark.system
def test_an_encoder_is_compressed_saved_and_evaluated(run, encoder, photos, tmp_path):
    folder, data = tmp_path / "half", ("--data", photos, "--num-workers", 0)
    printed = run("compress", *encoder, *data, "--search", "uniform", "--ratio", 0.6, "--out", folder).output
    assert all(name in printed for name in NAMES)
    found, metrics = json.loads(run("evaluate", folder, *encoder[3:], *data, "--json").stdout), saved(folder)["metrics"]
    for name in NAMES:
        assert found[name] == pytest.approx(metrics[name]["compressed"], rel=1e-4)
    assert metrics["cosine"]["original"] == pytest.approx(1, abs=1e-6) and metrics["relative_error"]["original"] == 0
    original = timm.create_model("tiny_vit", num_classes=3, checkpoint_path=str(encoder[-1]))
    original.reset_classifier(0)
    images = torch.cat([each for each, _ in ImageFolder(root=photos, num_workers=0).for_features(original.eval())[1]])
    expected, features = original(images), facts.load_compressed(folder).model(images)
    error = (features - expected).square().sum(1) / expected.square().sum(1)
    assert found["relative_error"] == pytest.approx(error.mean().item(), rel=1e-3)
    assert found["cosine"] == pytest.approx(cosine_similarity(features, expected).mean().item(), rel=1e-4)
    assert found["num_samples"] == 6 and found["cosine"] > 0.5


@pytest.mark.system
@pytest.mark.parametrize("in_pair", [False, True])
def test_an_encoder_of_transformers_alone_and_in_a_pair(run, in_pair, photos, tmp_path):
    """A pair with a text encoder stands for its image encoder."""
    transformers = pytest.importorskip("transformers")
    images = {"image_size": 32, "patch_size": 8, **SIZES}
    if in_pair:
        whole = transformers.CLIPModel(transformers.CLIPConfig(text_config=SIZES, vision_config=images)).eval()
        model = whole.vision_model
    else:
        whole = model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**images)).eval()
    whole.save_pretrained(tmp_path / "tiny")
    model.image_processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    model.image_processor.save_pretrained(tmp_path / "tiny")
    data, weights = ("--data", photos, "--num-workers", 0), tmp_path / "tiny" / "model.safetensors"
    run("compress", tmp_path / "tiny", *data, "--ratio", 0.6, "--no-evaluate", "--out", tmp_path / "half")
    found = json.loads(run("evaluate", tmp_path / "half", "--weights", weights, *data, "--json").stdout)
    ((images, _),) = ImageFolder(root=photos, num_workers=0).for_features(model)[1]
    small = facts.load_compressed(tmp_path / "half")
    similar = cosine_similarity(small.model(images).pooler_output, model(images).pooler_output)
    assert found["num_samples"] == len(images) == 6
    assert found["cosine"] == pytest.approx(similar.mean().item(), rel=1e-4)
    assert facts.recover(small, [images], original=model, epochs=1).summary.recovery
    recipe = replace(facts.models.ImageEncoder.of(whole), weights=str(weights))
    assert type(recipe.build()) is type(whole)  # from Python, a pair is itself


def test_nearest_neighbours_against_a_sum_of_weights(photos):
    """And a probe that separates what is separable: the features of images that it was fitted to."""
    model = timm.create_model("tiny_vit", num_classes=0).eval()
    reference, evaluation = ImageFolder(root=photos, num_workers=0, batch_size=4).for_features(model)
    (known, classes), (features, labels) = (features_of(model, each) for each in (reference, evaluation))
    assert len(known) == len(features) == 6 < NUM_NEIGHBORS
    votes = torch.zeros(6, 3, dtype=torch.float64)
    votes.index_add_(1, classes, (normalize(features) @ normalize(known).T / TEMPERATURE).exp())
    right = evaluate_features(model, model, reference, evaluation)["nearest_top1"]
    assert torch.equal(right, 100.0 * (votes.argmax(1) == labels).double())
    assert evaluate_features(model, model, reference, reference)["probe_top1"].mean() == 100
    one = [(images, torch.zeros_like(labels)) for images, labels in reference]  # of one class
    assert evaluate_features(model, model, one, one).keys() == {"relative_error", "cosine"}


def test_images_without_classes_give_distances_of_features_alone(run, encoder, tmp_path):
    photos = write_images(tmp_path, ("photos",), number=12) / "photos"
    found = json.loads(run("evaluate", *encoder, "--data", photos, "--num-workers", 0, "--json").stdout)
    assert found["relative_error"] == 0 and not {"nearest_top1", "probe_top1"} & found.keys()


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_checkpoint_without_its_classifiers(name):
    """A distilled network has two, and Swin's is part of a head."""
    with torch.device("meta"):
        encoder, whole = timm.create_model(name, num_classes=0), timm.create_model(name)
        assert TimmModel(tag=name).renamed(whole.state_dict(), encoder).keys() == encoder.state_dict().keys()
