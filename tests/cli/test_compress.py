"""`facts compress` from a name, a folder and a budget to a folder; and what it refuses before any work."""

import json

import pytest
import torch

import facts
from tests.cli.conftest import VIT
from tests.cli.pictures import write_images


def saved(folder):
    return json.loads((folder / "compression.json").read_text())


def test_the_result_is_printed_measured_and_saved(compressed):
    result, folder = compressed
    assert "layers low-rank" in result.output
    assert "compressed" in result.output and "top1" in result.output
    assert f"saved to {folder}" in result.output
    description = saved(folder)
    assert 0.35 < description["summary"]["spent"]["flops"] / description["summary"]["budget"]["flops"] * 0.4 <= 0.4
    assert {*description["metrics"]["top1"]} == {"original", "compressed"}
    assert facts.load_compressed(folder).model(torch.zeros(1, 3, 160, 160)).shape == (1, 3)


@pytest.mark.parametrize(("option", "value", "figure"), [("--flops", 4e7, "flops"), ("--params", 2e5, "params")])
def test_budgets_of_the_whole_network(run, photos, tmp_path, option, value, figure):
    run("compress", *VIT, "--data", photos, option, value, "--out", tmp_path / "vit", "--no-evaluate")
    assert 0.8 * value < saved(tmp_path / "vit")["summary"]["after"][figure] <= value


def test_method_and_data_are_those_that_were_asked_for(run, photos, tmp_path):
    options = ["--estimator", "svd_llm", "--search", "memvit", "--num-calibration", 3, "--batch-size", 2, "--seed", 4]
    result = run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit", "--no-evaluate")
    summary = saved(tmp_path / "vit")["summary"]
    assert summary["estimator"].startswith("SVDLLM(") and summary["search"].startswith("MemViTSearch(")
    assert "not evaluated: --no-evaluate" in result.output


def test_layers_are_refitted(run, photos, tmp_path):
    options = ["--estimator", "svd_llm", "--search", "uniform", "--num-calibration", 4, "--refit", "mpifa"]
    result = run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit", "--no-evaluate")
    assert saved(tmp_path / "vit")["summary"]["refit"] == "MPIFA(original_share=0.25, ridge=0.001)"
    assert "refitted by MPIFA(" in result.output


def test_a_search_looks_at_as_many_images_as_it_is_given(run, photos, tmp_path, monkeypatch):
    seen = []
    compress = facts.compress

    def noting(*args, sensitivity, **options):
        seen.append(sum(len(images) for images, _ in sensitivity))
        return compress(*args, sensitivity=sensitivity, **options)

    monkeypatch.setattr(facts, "compress", noting)
    options = ["--search", "uniform", "--num-sensitivity", 2, "--num-calibration", 3, "--no-evaluate"]
    run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit")
    assert seen == [2]


def test_images_are_mixed(run, photos, tmp_path, monkeypatch):
    """Those to calibrate on and those of searches; what is measured afterwards is not."""
    given, compress = [], facts.compress

    def noting(*args, calibration, sensitivity, **options):
        given.extend([calibration, sensitivity])
        return compress(*args, calibration=calibration, sensitivity=sensitivity, **options)

    monkeypatch.setattr(facts, "compress", noting)
    options = ["--cutmix", "--num-calibration", 5, "--num-sensitivity", 3, "--search", "uniform", "--seed", 2]
    result = run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit")
    assert "top1" in result.output
    for mixed, size in zip(given, (5, 3), strict=True):
        ((images, targets),) = mixed
        ((plain, labels),) = mixed.data
        assert images.shape == plain.shape and not images.equal(plain)
        assert targets.shape == (size, 3) and mixed.seed == 2
        others = targets.scatter(1, labels[:, None], 0.0).amax(dim=1)
        assert (others > 0).equal(labels != labels.roll(1))


def test_images_whose_classes_are_not_the_networks_are_mixed_alone(run, photos, tmp_path):
    network = ("timm/test_vit", "--weights", "random", "--num-workers", 0)
    result = run("compress", *network, "--data", photos, "--cutmix", "--out", tmp_path / "vit")
    assert "not evaluated: the 3 classes" in result.output


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ([], facts.MemoryPolicy(checkpoint_blocks="auto")),
        (
            ["--moments", "host", "--checkpoint-blocks", "on", "--layers-at-once", 3],
            facts.MemoryPolicy(moments="host", checkpoint_blocks=True, layers_at_once=3),
        ),
    ],
)
def test_memory_is_used_as_the_options_say(run, photos, tmp_path, monkeypatch, options, policy):
    given, compress = [], facts.compress

    def noting(*args, memory, **named):
        given.append(memory)
        return compress(*args, memory=memory, **named)

    monkeypatch.setattr(facts, "compress", noting)
    run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit", "--no-evaluate", "--search", "uniform")
    assert given == [policy]


@pytest.mark.system
def test_the_original_teaches_the_result(run, photos, tmp_path):
    out = tmp_path / "vit"
    result = run("compress", *VIT, "--data", photos, "--recover", 0.3, "--out", out, "--cache", tmp_path / "cache")
    course = saved(out)["summary"]["recovery"]
    assert course["seconds"] <= 18 and course["after"] <= course["before"]
    assert "recovered from" in result.output and "recovered from" in (out / "README.md").read_text()
    assert "recovered from" in run("inspect", out).output
    assert list((tmp_path / "cache").glob("finetuning-*"))
    result = run("compress", *VIT, "--data", photos, "--recover", 0, "--out", tmp_path / "other", code=2)
    assert "--recover" in result.output


def test_convolutions_are_compressed_where_asked_for(run, photos, tmp_path):
    network = ("timm/test_byobnet", "--weights", "random", "--num-workers", 0)
    run("compress", *network, "--data", photos, "--convolutions", "--out", tmp_path / "net", "--no-evaluate")
    assert any(name.endswith(".linear") for name in saved(tmp_path / "net")["plan"])


def test_the_cache_spares_the_data_pass(run, photos, tmp_path):
    for name in ("first", "second"):
        options = ("--cache", tmp_path / "cache", "--out", tmp_path / name, "--no-evaluate")
        run("compress", *VIT, "--data", photos, *options)
    first, second = (saved(tmp_path / name) for name in ("first", "second"))
    assert first["fingerprint"] == second["fingerprint"]
    assert "calibration" in first["summary"]["seconds"] and "calibration" not in second["summary"]["seconds"]


def test_classes_that_are_not_the_networks_leave_it_unevaluated(run, photos, tmp_path):
    network = ("timm/test_vit", "--weights", "random", "--num-workers", 0)
    result = run("compress", *network, "--data", photos, "--out", tmp_path / "vit")
    assert "not evaluated: the 3 classes" in result.output
    assert "the network's 1000 classes" in result.output
    assert saved(tmp_path / "vit")["metrics"] in (None, {})


def test_an_older_result_is_replaced_and_anything_else_refused(run, photos, compressed, tmp_path):
    out = tmp_path / "vit"
    for ratio in (0.6, 0.3):
        run("compress", *VIT, "--data", photos, "--ratio", ratio, "--out", out, "--no-evaluate")
        assert saved(out)["summary"]["bounds"] == {"flops": ratio}
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").touch()
    result = run("compress", *VIT, "--data", photos, "--out", tmp_path / "letters", code=1)
    assert "letters holds something else than a compressed network" in result.output
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["love.txt"]
    result = run("compress", *VIT, "--data", photos, "--out", tmp_path / "letters" / "love.txt", code=1)
    assert "cannot write to the folder" in result.output


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (["timm/test_vt"], "timm knows no network 'test_vt': is it test_vit"),
        (["timm/qqqqqq"], "timm.list_models() has them"),
        (["resnet50"], "there is no network 'resnet50': name one as timm/NAME"),
        (["timm/vit_tiny_patch16_18x2", "--device", "tpu"], "there is no device 'tpu' here"),
        (["timm/test_vit", "--weights", "nowhere.safetensors"], "no checkpoint 'nowhere.safetensors'"),
        (["transformers/gpt2", "--num-classes", "3"], "--num-classes is for networks of timm, not for"),
    ],
)
def test_networks_that_are_not_there(run, photos, tmp_path, network, message):
    result = run("compress", *network, "--data", photos, "--out", tmp_path / "vit", code=1)
    assert message in result.output


def test_a_compressed_network_is_not_compressed_again(run, photos, compressed, tmp_path):
    result = run("compress", compressed[1], "--data", photos, "--out", tmp_path / "vit", code=1)
    assert "is compressed already: name the network that it was made of" in result.output


def test_data_that_are_not_there(run, tmp_path):
    result = run("compress", *VIT, "--data", tmp_path / "nowhere", "--out", tmp_path / "vit", code=1)
    assert "give one that holds a folder of images for each class" in result.output


def test_a_budget_that_cannot_be_met(run, photos, tmp_path):
    result = run("compress", *VIT, "--data", photos, "--params", 100, "--out", tmp_path / "vit", code=1)
    assert "params of 100 cannot be met" in result.output


def test_images_that_cannot_be_decoded_are_named(run, tmp_path, caplog):
    photos = write_images(tmp_path / "photos")
    (photos / "dog" / "1.png").write_bytes(b"no image")
    run("compress", *VIT, "--data", photos, "--out", tmp_path / "vit")
    assert "dog/1.png cannot be decoded and is left out" in caplog.text
