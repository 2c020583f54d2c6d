"""`facts compress` from a name, a folder and a budget to a folder, with its options; and `facts pareto`."""

import json
import re
from unittest.mock import Mock

import pandas as pd
import pytest
from PIL import Image

import facts
from facts.cli import inputs
from facts.tasks import ImageFolder
from tests.cli.conftest import VIT, saved, write_images
from tests.networks import make_model

QUICK = ("--estimator", "pela", "--search", "uniform")


def test_options_reach_the_library(run, photos, tmp_path, monkeypatch):
    for name in ("prepare", "compress"):
        monkeypatch.setattr(facts, name, Mock(wraps=getattr(facts, name)))
    options = ["--estimator", "svd_llm", "--search", "memvit", "--params", 7e4, "--num-calibration", 5]
    options += ["--seed", 2, "--batch-size", 5, "--cache", tmp_path / "cache"]
    assert "top1" in run("compress", *VIT, "--data", photos, *options, "--out", tmp_path / "vit").output
    summary = saved(tmp_path / "vit")["summary"]
    assert summary["estimator"].startswith("SVDLLM(") and summary["search"].startswith("MemViTSearch(")
    assert 0.8 * 7e4 < summary["after"]["params"] <= 7e4
    (_, [(_, targets)]), given = facts.prepare.call_args
    given |= facts.compress.call_args.kwargs
    assert given["budget"] == facts.Budget(params=7e4)
    assert given["execution"] == facts.Execution(cache=tmp_path / "cache")
    assert len(targets) == 5 and given["sensitivity"] is None


def test_what_cannot_be_printed_is_saved(run, compressed, photos, tmp_path, monkeypatch):
    failing = Mock(side_effect=ValueError("this terminal prints nothing"))
    monkeypatch.setattr(facts.CompressionResult, "__str__", failing)
    for name, *options in (["compress", *VIT], ["recover", compressed[1], "--weights", "random", "--minutes", 0.01]):
        run(name, *options, "--data", photos, "--num-workers", 0, "--out", tmp_path / name, code=1)
        assert facts.load_compressed(tmp_path / name)


@pytest.mark.system
def test_the_original_teaches_the_result(run, photos, tmp_path, caplog):
    options = ("--recover", 0.05, "--parts", "layers", "--cache", tmp_path / "cache", "--out", tmp_path / "vit")
    result = run("compress", *VIT, "--data", photos, *options)
    course = saved(tmp_path / "vit")["summary"]["recovery"]
    assert course["seconds"] <= 6 and course["after"] <= course["before"]
    assert " samples in " in result.output and " samples in " in (tmp_path / "vit" / "README.md").read_text()
    assert ("recovery gained nothing" in caplog.text) == (course["after"] >= course["before"])
    assert list((tmp_path / "cache").glob("finetuning-*"))


@pytest.mark.parametrize("error", [ValueError("no room"), KeyboardInterrupt()])
def test_a_result_is_saved_before_an_evaluation_that_fails(run, photos, tmp_path, monkeypatch, error):
    monkeypatch.setattr(inputs, "measured", Mock(side_effect=error))
    result = run("compress", *VIT, *QUICK, "--data", photos, "--out", tmp_path / "vit")
    assert f"saved to {tmp_path / 'vit'}" in result.output
    advice = f"try `facts evaluate {tmp_path / 'vit'} --data {photos} --unseen`"
    assert f"not evaluated ({str(error) or 'interrupted'}): {advice}" in result.output
    assert facts.load_compressed(tmp_path / "vit").plan


def test_an_interruption_says_what_is_kept(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "compress", Mock(side_effect=KeyboardInterrupt))
    result = run("compress", *VIT, *QUICK, "--data", photos, "--out", "vit", code=130)
    assert "interrupted: nothing is kept, but with `--cache FOLDER`" in result.output
    assert not (tmp_path / "vit").exists()


@pytest.mark.parametrize(("broken", "code"), [(2, 0), (3, 1)])
def test_a_tenth_of_the_images_may_be_broken_which_is_seen_first(run, tmp_path, caplog, broken, code):
    photos = write_images(tmp_path / "photos", number=10)  # 15 of them to calibrate on, 15 to evaluate on
    task = ImageFolder(root=photos)
    for name in (task.training_images.names[0], *task.validation_images.names[: broken - 1]):
        (photos / name).write_bytes(b"no image")
    result = run("compress", *VIT, *QUICK, "--data", photos, "--out", tmp_path / "vit", code=code)
    assert "cannot be decoded and is left out" in caplog.text
    if code:
        assert "2 of 15 images cannot be decoded" in result.output and "at most one in 10 may be" in result.output
        assert not (tmp_path / "vit").exists()


def test_images_without_classes_are_all_calibrated_on_and_measured_by_agreement(run, tmp_path, caplog):
    photos, out = write_images(tmp_path, ("photos",), number=20) / "photos", tmp_path / "vit"
    result = run("compress", *VIT, *QUICK, "--recover", 0.01, "--data", photos, "--out", out)
    assert f"{photos} has no class folders and no labels: the network's own" in caplog.text
    (line,) = (line for line in result.output.splitlines() if line.startswith("agreement "))
    assert "5 samples" in result.output and line.split()[1] == "100"  # a quarter of 20, not of 10
    assert saved(out)["metrics"]["agreement"]["compressed"] == float(line.split()[4])  # 100 ± 0, then it
    again = json.loads(run("evaluate", out, "--data", photos, *VIT[1:3], "--json").output)
    assert {"agreement", "flops"} <= again.keys() and again["num_samples"] == 20
    refused = run("evaluate", out, "--data", photos, *VIT[1:3], "--unseen", code=1)
    assert "may have calibrated the network: leave out --unseen" in refused.output


@pytest.mark.parametrize(("top1", "num_samples", "warned"), [(0.0, 20, 1), (0.0, 19, 0), (60.0, 20, 0)])
def test_an_accuracy_of_chance_is_warned_of(caplog, top1, num_samples, warned):
    model = make_model()
    model.num_classes = 4
    inputs.warn_of_chance({"top1": top1, "num_samples": num_samples}, model)
    assert caplog.text.count("are the class folders named as the network's classes?") == warned


def test_photos_of_one_class_are_warned_of(run, tmp_path, caplog):
    photos = write_images(tmp_path / "photos", ("cat",))
    (photos / "labels.csv").write_text("file,label\n" + "\n".join(f"cat/{name}.png,1" for name in range(4)))
    run("compress", *VIT, *QUICK, "--data", photos, "--no-evaluate", "--out", tmp_path / "vit")
    assert "all images are of one class" in caplog.text


@pytest.mark.parametrize("parts", ["layers", "units"])
def test_an_impossible_budget_is_refused_before_any_data_pass_with_the_least_possible_one(parts, batches, monkeypatch):
    prepared = facts.prepare(make_model(), batches, parts=parts)
    monkeypatch.setattr(type(prepared), "decompositions", lambda *_: pytest.fail("a data pass"))
    with pytest.raises(ValueError, match=r"0.001 of the flops is too little: .* at least") as error:
        facts.compress(prepared, ratio=0.001)
    monkeypatch.undo()
    costs = facts.compress(prepared, ratio=float(re.search(r"at least (\S+)", str(error.value))[1])).summary
    assert costs.spent["flops"] <= costs.budget["flops"]


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (["timm/deit_tiny"], [], "there is no network 'timm/deit_tiny': is it timm/deit_tiny_distilled_patch16_224"),
        (["timm/resnet50.foo"], [], "there is no network 'timm/resnet50.foo': is it timm/resnet50 or"),
        (["timm/qqqqqq"], [], "there is no network 'timm/qqqqqq': name one as timm/NAME or torchvision/NAME"),
        (["torchvision/resnt50"], [], "there is no network 'torchvision/resnt50': is it torchvision/resnet50"),
        (["torchvision/resnet18", "--num-classes", "3"], [], "published weights of resnet18 are for 1,000 classes"),
        (["resnet50"], [], "there is no network 'resnet50': is it timm/resnet50 or torchvision/resnet50?"),
        (["openai/clip"], [], "there is no network 'openai/clip': is it transformers/openai/clip?"),
        (["resnt"], [], "there is no network 'resnt': name one as timm/NAME or torchvision/NAME"),
        (["timm/vit_tiny_patch16_18x2", "--device", "tpu"], [], "there is no device 'tpu' here"),
        (["timm/test_vit", "--weights", "nowhere.safetensors"], [], "no checkpoint 'nowhere.safetensors'"),
        (["transformers/gpt2", "--num-classes", "3"], [], "--num-classes is for networks of timm and torchvision"),
        (VIT, ["--recover", "1", "--num-calibration", "1"], "recovery needs at least two samples"),
        (VIT, ["--data", "nowhere"], "there is no file or folder nowhere: give an existing one, or hub:OWNER/DATASET"),
        (VIT, ["--out", "."], "holds something other than a compressed network: give a new or empty folder"),
        (VIT, ["--out", "love.txt"], "cannot write to the folder"),
        (VIT, ["--cache", "vit/cache"], "--cache vit/cache lies in --out vit, which holds one network alone"),
    ],
)
def test_refusals(run, photos, tmp_path, monkeypatch, network, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "love.txt").touch()
    assert message in run("compress", *network, "--data", photos, "--out", "vit", *options, code=1).output
    assert [path.name for path in tmp_path.iterdir()] == ["love.txt"]


@pytest.mark.system
def test_table_and_plot(run, photos, tmp_path, caplog):
    some = ("--estimators", "pela", "--searches", "memvit,uniform", "--ratios", "0.4,0.6")
    result = run("pareto", *VIT, "--data", photos, *some, "--out", tmp_path)
    points = pd.read_csv(tmp_path / "pareto.csv")
    assert list(points.search) == ["original", "memvit", "memvit", "uniform", "uniform"]
    lines = [message for message in caplog.messages if " of the FLOPs, " in message]
    assert len(lines) == 5 and lines[0].startswith("original, original, ratio 1: top1 ")
    assert points.flops[1] < points.flops[2] < points.flops[0] and points.top1.between(0, 100).all()
    with Image.open(tmp_path / "pareto.png") as picture:
        assert picture.width > 800
    assert [line.split()[1] for line in result.stdout.splitlines()[1:6]] == list(points.search)
    assert result.stdout.splitlines()[0].split()[-1] == "top1_standard_error"


@pytest.mark.system
def test_a_chart_has_the_defaults_of_compress(run, photos, compressed, tmp_path):
    """Units and tokens, unless a method is named."""
    run("pareto", *VIT, "--data", photos, "--ratios", 0.4, "--out", tmp_path)
    point, alone = pd.read_csv(tmp_path / "pareto.csv").iloc[1], saved(compressed[1])
    assert "units narrower" in compressed[0].output and alone["summary"]["bounds"] == {"flops": 0.4}
    assert (point.estimator, point.search) == ("facts", "default")
    assert point.top1 == alone["metrics"]["top1"]["compressed"]
    assert (point.flops, point.params) == tuple(alone["summary"]["after"].values())
