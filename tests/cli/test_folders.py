"""`facts evaluate`, `recover`, `export` and `benchmark` on folders that `facts compress` wrote."""

import json
import re
from importlib.util import find_spec

import pytest
import timm
import torch
from safetensors.torch import save_file

import facts
from facts.cli import inputs
from facts.models import TimmModel
from tests.cli.conftest import VIT, saved
from tests.networks import image_batches, make_model


class TestEvaluate:
    def test_metrics_are_those_measured_when_the_network_was_made(self, run, compressed, photos):
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

    def test_what_is_infinite_is_null_in_json(self, run, compressed, photos, monkeypatch):
        monkeypatch.setattr(inputs, "measured", lambda *_: {"perplexity": torch.inf})
        found = run("evaluate", compressed[1], "--data", photos, "--num-workers", 0, "--json").stdout
        assert json.loads(found)["perplexity"] is None

    def test_refusals(self, run, compressed, photos, caplog):
        result = run("evaluate", compressed[1], "--weights", "random", "--data", photos, code=1)
        assert "has weights and classes of its own" in result.output
        result = run("compress", compressed[1], "--data", photos, "--out", compressed[1], code=1)
        assert f"{compressed[1]} holds an older result, which will be replaced" in caplog.text
        assert "is compressed already: name the network it was made from" in result.output


class TestOtherInputs:
    """Networks for other images than the published ones."""

    @pytest.mark.system
    def test_images_are_those_of_the_saved_network(self, run, photos, tmp_path):
        arguments, shape = {"img_size": (64, 32), "in_chans": 1, "num_classes": 3}, (1, 64, 32)
        model = TimmModel(tag="tiny_vit", weights="random", arguments=arguments).build()
        facts.save_compressed(facts.compress(model, estimator="pela", ratio=0.5), tmp_path / "vit")
        found = run("evaluate", tmp_path / "vit", "--data", photos, "--num-workers", 0, "--json").stdout
        flops = facts.count_cost(facts.load_compressed(tmp_path / "vit").model, shape).flops
        assert json.loads(found)["flops"] == flops
        run("export", tmp_path / "vit", "--out", tmp_path / "vit.pt2")
        assert torch.export.load(tmp_path / "vit.pt2").module()(torch.randn(2, *shape)).shape == (2, 3)

    def test_a_network_of_your_own_is_loaded_with_its_images(self, tmp_path):
        result = facts.compress(make_model(torch.float32), image_batches([4], dtype=torch.float32), ratio=0.7)
        facts.save_compressed(result, tmp_path / "own")
        assert facts.load_compressed(tmp_path / "own", make_model()).model.pretrained_cfg == {"input_size": (3, 8, 8)}


class TestRecover:
    MINUTES = ("--num-workers", 0, "--minutes", 0.01)

    @pytest.mark.system
    def test_the_original_is_rebuilt_of_the_weights_that_were_compressed(self, run, photos, tmp_path, monkeypatch):
        own, other = (tmp_path / f"{name}.safetensors" for name in ("own", "other"))
        for file in (own, other):
            save_file(timm.create_model("tiny_vit", num_classes=3).half().state_dict(), file)
        network, small = (VIT[0], "--num-classes", 3, "--weights", own), tmp_path / "small"
        options = ("--data", photos, "--num-workers", 0, "--no-evaluate", "--form", "pivoted")
        assert "weights, float16" in run("compress", *network, *options, "--out", small).output
        assert facts.load_compressed(small).model.head.weight.dtype == torch.float16
        recover = ("recover", small, "--data", photos, *self.MINUTES, "--out", tmp_path / "better")
        for options, message in (
            ((), "weights (own.safetensors) are not published: give them as --weights FILE"),
            (("--weights", other), "was made from other weights (own.safetensors): give those as"),
        ):
            assert message in run(*recover, *options, code=1).output
        better = run(*recover, "--weights", own).output
        assert "held-out samples" in better
        description = saved(small)
        assert saved(tmp_path / "better")["summary"]["sizes"] == description["summary"]["sizes"]
        description |= {"base_model": {**description["base_model"], "repository": "a/b"}, "checksum": None}
        (small / "compression.json").write_text(json.dumps(description))
        monkeypatch.setattr(inputs, "fetch", {"a/b": own}.__getitem__)
        assert " samples in " in run(*recover).output


class TestExport:
    @pytest.mark.system
    @pytest.mark.parametrize(("files", "options"), [(["vit.onnx"], ["--int8"]), (["vit.bin", "vit.xml"], [])])
    def test_a_file(self, run, compressed, photos, tmp_path, files, options):
        """In int8 by ONNX Runtime; calibrating for OpenVINO takes long, and is tested in tests/saving."""
        if "vit.xml" in files and not find_spec("openvino"):
            pytest.skip("the extra `openvino` is not installed")
        data = ("--data", photos) if "--int8" in options else ()
        result = run("export", compressed[1], "--out", tmp_path / files[-1], *options, *data)
        in_int8 = re.findall(r"outputs in int8: (\S+)", result.stdout)
        assert f"saved to {tmp_path / files[-1]}" in result.stdout and "[torch.onnx]" not in result.stdout
        assert all(0 < float(error) < 0.1 for error in in_int8) and len(in_int8) == bool(data)
        assert sorted(path.name for path in tmp_path.iterdir()) == files

    def test_refusals(self, run, compressed, photos, tmp_path):
        int8 = "--int8 is for ONNX and OpenVINO, calibrated on images: give a folder of them as --data"
        for name, options, message in (
            ("a.foo", [], "a.foo must end in .onnx or .xml or .pt2"),
            ("vit.pt2", ["--int8", "--data", photos], int8),
            ("a.onnx", ["--int8"], int8),
            ("a.xml", ["--data", photos], int8),
        ):
            assert message in run("export", compressed[1], "--out", tmp_path / name, *options, code=1).output


class TestBenchmark:
    def test_a_batch_that_fits_no_memory(self, run):
        message = "a batch of 1,000,000,000,000 inputs fits no memory: give a smaller --batch-size"
        assert message in run("benchmark", "timm/tiny_vit", "--batch-size", 10**12, code=1).output

    @pytest.mark.system
    def test_speeds_relative_to_the_first(self, run, compressed):
        network = "timm/tiny_vit"
        options = ("--runtime", "PyTorch, float32", "--batch-size", 2)
        lines = [line.split() for line in run("benchmark", network, compressed[1], *options).stdout.splitlines()]
        rows = {line[0]: float(line[-1]) for line in lines if "float32" in line}
        assert [*rows] == [network, str(compressed[1])]
        assert rows[network] == 1 and rows[str(compressed[1])] > 0


@pytest.mark.system
def test_one_folder_is_cut_to_any_budget(run, photos, tmp_path):
    data = ("--data", photos, "--num-calibration", 4, "--parts", "units")
    made = run("compress", *VIT, *data, "--elastic", "--no-evaluate", "--out", tmp_path / "any").output
    assert re.search(r"what every budget needs, \S+ MB", made) and f"`facts cut {tmp_path / 'any'} --ratio 0.6" in made
    params = 0.8 * facts.load_compressed(tmp_path / "any").summary.before.params
    for number, options in enumerate([(), ("--params", params)]):
        assert "saved to" in run("cut", tmp_path / "any", *options, "--out", tmp_path / str(number)).output
    half, fewer = (facts.load_compressed(tmp_path / str(number)).summary for number in range(2))
    assert half.parts == "units" and [*half.bounds.values()] == [0.5] and fewer.after.params <= params
    save_file(timm.create_model("tiny_vit", num_classes=3).half().state_dict(), tmp_path / "own.safetensors")
    own = (VIT[0], "--num-classes", 3, "--weights", tmp_path / "own.safetensors", "--num-workers", 0)
    run("compress", *own, *data, "--elastic", "--no-evaluate", "--out", tmp_path / "own")
    printed = run("cut", tmp_path / "own", "--out", tmp_path / "cut").output
    assert "weights, float16 " in printed and "in half precision: `.float()` computes" in printed
    assert facts.load_compressed(tmp_path / "cut").model.head.weight.dtype == torch.float16
    for options, message in (
        (("--recover", 1), "leave out --recover, or use `facts recover` on cuts"),
        (("--search", "uniform"), "uniform gives no errors for other budgets"),
    ):
        assert message in run("compress", *VIT, *data, "--elastic", *options, "--out", tmp_path / "no", code=1).output
    for arguments, message in (
        (("cut", tmp_path / "any", "--out", tmp_path / "any"), "a cut would overwrite the folder"),
        (
            ("cut", tmp_path / "any", "--out", tmp_path / "no", "--ratio", 0.001),
            "too little: the folder needs at least",
        ),
        (("push", tmp_path / "any", "me/any"), "push a cut of it"),
    ):
        assert message in run(*arguments, code=1).output
