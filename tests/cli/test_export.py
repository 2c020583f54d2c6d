"""`facts export`: a file, and its time beside the original's."""

import sys

import numpy as np
import onnxruntime
import pytest


@pytest.mark.system
def test_a_file_and_both_times(run, compressed, tmp_path):
    _, folder = compressed
    out = tmp_path / "vit.onnx"
    result = run("export", folder, "--out", out, "--batch-size", 2)
    row = next(line for line in result.stdout.splitlines() if line.startswith("latency of 2"))
    before, after, share = (float(word.strip("%")) for word in row.split()[3:] if word != "ms")
    assert before > 0 and after > 0 and share > 0
    assert "[torch.onnx]" not in result.stdout and list(tmp_path.iterdir()) == [out]
    images = np.zeros((3, 3, 160, 160), np.float32)
    assert onnxruntime.InferenceSession(out).run(None, {"input": images})[0].shape == (3, 3)


@pytest.mark.system
def test_the_original_by_its_function(run, compressed, tmp_path):
    architecture = "tests.networks:make_three_classes"
    result = run("export", compressed[1], "--out", tmp_path / "vit.onnx", "--architecture", architecture)
    assert "latency of 1" in result.stdout


def test_what_is_missing_is_told_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = run("export", tmp_path / "absent", "--out", tmp_path / "vit.onnx", code=1)
    assert "ONNX export needs onnxruntime: pip install -e '.[export]'" in result.output


def test_a_folder_that_is_none(run, tmp_path):
    result = run("export", tmp_path / "absent", "--out", tmp_path / "vit.onnx", code=1)
    assert "is no folder: give one that save_compressed wrote" in result.output
