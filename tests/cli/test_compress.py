"""`facts compress` from a name, a folder and a budget to a folder, with its options; and `facts pareto`."""

import pandas as pd
import pytest
import torch
from PIL import Image

import facts
from tests.cli.conftest import VIT, saved
from tests.cli.pictures import write_images


def test_the_result_is_printed_measured_and_saved(compressed):
    result, folder = compressed
    assert "units narrower" in result.output and "top1" in result.output
    assert f"saved to {folder}" in result.output
    description = saved(folder)
    costs = description["summary"]["costs"]
    assert 0.35 < costs["spent"]["flops"] / costs["budget"]["flops"] * 0.4 <= 0.4
    assert {*description["metrics"]["top1"]} == {"original", "compressed"}
    assert facts.load_compressed(folder).model(torch.zeros(1, 3, 160, 160)).shape == (1, 3)


def test_options_reach_the_library(run, photos, tmp_path, monkeypatch):
    given, functions = {}, {name: getattr(facts, name) for name in ("prepare", "compress")}

    def noting(name):
        def call(model, *args, **options):
            given.update(options, **({"calibration": args[0]} if args else {}))
            return functions[name](model, *args, **options)

        return call

    for name in functions:
        monkeypatch.setattr(facts, name, noting(name))
    options = ["--estimator", "svd_llm", "--search", "memvit", "--fit-bias", "--params", 2e5, "--num-calibration", 5]
    options += ["--num-sensitivity", 3, "--seed", 2, "--batch-size", 5, "--cache", tmp_path / "cache"]
    options += ["--moments", "host", "--checkpoint-blocks", "on", "--layers-at-once", 12]
    result = run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit")
    assert "top1" in result.output
    costs, method, _ = saved(tmp_path / "vit")["summary"].values()
    assert method["estimator"].startswith("SVDLLM(") and method["search"].startswith("MemViTSearch(")
    assert method["fit_bias"] and 0.8 * 2e5 < costs["after"]["params"] <= 2e5
    assert given["budget"] == facts.Budget(params=2e5)
    memory = facts.MemoryPolicy(moments="host", checkpoint_blocks=True, layers_at_once=12)
    assert given["execution"] == facts.Execution(memory=memory, cache=tmp_path / "cache")
    for given_batches, size in ((given["calibration"], 5), (given["sensitivity"], 3)):
        ((_, targets),) = given_batches
        assert len(targets) == size


@pytest.mark.system
def test_the_original_teaches_the_result(run, photos, tmp_path):
    out = tmp_path / "vit"
    options = ("--recover", 0.05, "--parts", "layers", "--cache", tmp_path / "cache")
    result = run("compress", *VIT, "--data", photos, *options, "--out", out)
    course = saved(out)["summary"]["quality"]["recovery"]
    assert course["seconds"] <= 6 and course["after"] <= course["before"]
    assert "recovered from" in result.output and "recovered from" in (out / "README.md").read_text()
    assert list((tmp_path / "cache").glob("finetuning-*"))


def test_a_result_is_saved_before_an_evaluation_that_fails(run, tmp_path):
    for part in ("train", "val"):
        write_images(tmp_path / "photos" / part)
    for name in "012":
        (tmp_path / "photos" / "val" / "cat" / f"{name}.png").write_bytes(b"no image")
    methods = ("--estimator", "pela", "--search", "uniform")
    result = run("compress", *VIT, *methods, "--data", tmp_path / "photos", "--out", tmp_path / "vit", code=1)
    assert "3 of 12 images cannot be decoded" in result.output and f"saved to {tmp_path / 'vit'}" in result.output
    assert facts.load_compressed(tmp_path / "vit").plan


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (["timm/deit_tiny"], [], "there is no network 'timm/deit_tiny': is it deit_tiny_distilled_patch16_224"),
        (["timm/qqqqqq"], [], "there is no network 'timm/qqqqqq': `facts list models` lists them"),
        (["torchvision/resnt50"], [], "there is no network 'torchvision/resnt50': is it resnet50"),
        (["torchvision/resnet18", "--num-classes", "3"], [], "published weights of resnet18 are for 1,000 classes"),
        (["resnet50"], [], "there is no network 'resnet50': name one as timm/NAME, torchvision/NAME"),
        (["timm/vit_tiny_patch16_18x2", "--device", "tpu"], [], "there is no device 'tpu' here"),
        (["timm/test_vit", "--weights", "nowhere.safetensors"], [], "no checkpoint 'nowhere.safetensors'"),
        (["transformers/gpt2", "--num-classes", "3"], [], "--num-classes is for networks of timm and torchvision"),
        (VIT, ["--data", "nowhere"], "give one that holds a folder of images for each class"),
        (VIT, ["--out", "."], "holds something other than a compressed network: give a new or empty folder"),
        (VIT, ["--out", "love.txt"], "cannot write to the folder"),
    ],
)
def test_refusals(run, photos, tmp_path, monkeypatch, network, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "love.txt").touch()
    assert message in run("compress", *network, "--data", photos, "--out", "vit", *options, code=1).output
    assert {path.name for path in tmp_path.iterdir()} <= {"love.txt", "vit"}


def test_table_and_plot(run, photos, tmp_path):
    some = ("--estimators", "pela", "--searches", "cors_fisher,uniform", "--ratios", "0.4,0.6")
    result = run("pareto", *VIT, "--data", photos, *some, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.search) == ["original", "cors_fisher", "cors_fisher", "uniform", "uniform"]
    assert points.flops[1] < points.flops[2] < points.flops[0] and points.top1.between(0, 100).all()
    with Image.open(tmp_path / "pareto.png") as picture:
        assert picture.width > 800
    assert [line.split()[1] for line in result.stdout.splitlines()[1:6]] == list(points.search)
