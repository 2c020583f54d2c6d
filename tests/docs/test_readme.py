"""The README does what it says."""

import runpy

import pytest

from tests.docs.pages import run, section_of, write_files

# What a reader would look at, before and after.
BEFORE = """
torch.save((images, result.model.eval()(images)), "seen.pt")
torch.save(model.state_dict(), "dense.pt")
before, after = result.summary.before, result.summary.after
assert after.flops < 0.6 * before.flops and after.params < 0.6 * before.params
"""
AFTER = """
import torch

images, outputs = torch.load("seen.pt")
assert torch.equal(model(images), outputs)
"""


@pytest.mark.system
def test_a_network_is_compressed_saved_and_loaded_in_another_process(tmp_path, monkeypatch, capsys):
    write_files(section_of("README.md", "Compress your own network"), tmp_path)
    for name, look in (("compress_mine.py", BEFORE), ("load_mine.py", AFTER)):
        with open(tmp_path / name, "a") as file:
            file.write(look)
    monkeypatch.chdir(tmp_path)
    summary = runpy.run_path("compress_mine.py")["result"].summary
    printed = capsys.readouterr().out
    assert "FLOPs" in printed and "blocks with fewer tokens (tokens" in printed
    run("python load_mine.py", tmp_path)
    assert summary.after.flops < 0.6 * summary.before.flops
