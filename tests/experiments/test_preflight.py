"""What the doctor finds before a run: what is fine, what is not, and what to do."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from experiments.planning.estimate import Estimate
from experiments.preflight import (
    Finding,
    checkpoints,
    compiler,
    data,
    device,
    disk,
    extras,
    memory,
    of_cells,
    of_machine,
    show_findings,
    tracking,
)


def only(findings):
    (finding,) = findings
    return finding


def test_the_embedded_default_is_fine(cell_config, capsys):
    columns = [[cell_config("estimator=facts"), cell_config("estimator=none")], [cell_config("model=swin_b")]]
    findings = [*of_machine(cell_config()), *of_cells(columns)]
    assert {finding.level for finding in findings} == {"fine"}
    whats = ["packages", "device", "tracking", "data of classification", "weights of deit_b", "weights of swin_b"]
    assert [finding.what for finding in findings] == [*whats, "memory", "disk"]


def test_packages_that_a_cell_needs_are_looked_for(cell_config, monkeypatch):
    configs = [cell_config("analysis=token_coupling"), cell_config("search=cors", "search.solver=highs")]
    configs.append(cell_config("pruning=isomorphic", "estimator=none"))
    found = list(extras(configs))
    assert [finding.what for finding in found] == [
        f"packages of the extra {extra}" for extra in ("analysis", "highs", "pruning")
    ]
    assert {finding.level for finding in found} == {"fine"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [(finding.level, finding.advice) for finding in extras(configs)] == [
        ("problem", "pip install -e '.[analysis]'"),
        ("problem", "pip install -e '.[highs]'"),
        ("problem", "pip install -e '.[pruning]'"),
    ]
    assert not list(extras([cell_config()]))


def test_a_gpu_that_is_not_there_and_memory_that_is_too_small(cell_config, monkeypatch):
    sizes = {"disk": 0, "passes": 0, "flops": 0, "double": 0, "batch_size": 64}
    small, large = (Estimate("", 0, moments=size, batch=size, **sizes) for size in (10**6, 2 * 10**10))
    huge = replace(large, batch=10**18)
    assert device(cell_config()).level == memory(cell_config(), small).level == "fine"
    tight = memory(cell_config(), huge)
    assert tight.level == "warning" and "batch_size" in tight.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = device(cell_config("hardware=cuda"))
    assert missing.level == "problem" and "hardware=cpu" in missing.advice

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 10**9, 24 * 10**9))
    assert device(cell_config("hardware=cuda")).detail == "GPU"
    assert "batches in parts, here 2," in memory(cell_config("hardware=cuda"), large).detail
    assert "parts" not in memory(cell_config("hardware=cuda"), huge).detail


def test_a_compiler_is_looked_for_where_something_is_compiled(cell_config, monkeypatch):
    assert not list(compiler(cell_config()))
    compiled = cell_config("hardware.compile=true")
    monkeypatch.setenv("CXX", "sh")
    assert only(compiler(compiled)).level == "fine"
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = only(compiler(compiled))
    assert (missing.level, missing.detail) == ("problem", "no no-such-compiler")


def test_checkpoints_are_here_or_fetched_or_missing(cell_config, tmp_path):
    here = only(checkpoints([cell_config()]))
    assert here.level == "fine" and "mini_deit.safetensors, sha256 " in here.detail
    for name in ("deit_b", "mambavision_b"):
        fetched = only(checkpoints([cell_config("profile=paper", f"model={name}")]))
        assert fetched.level in ("fine", "warning")  # where this machine has fetched it before
    missing = only(checkpoints([cell_config("profile=paper", f"model.paper.weights={tmp_path / 'none.pth'}")]))
    assert missing.level == "problem" and "none.pth" in missing.detail
    folder = cell_config("profile=paper", "model=mambavision_b", f"checkpoints={tmp_path}")
    missing = only(checkpoints([folder]))
    assert missing.level == "problem" and f"{tmp_path / 'MambaVision-B-1K.pth.tar'}" in missing.detail
    (tmp_path / "MambaVision-B-1K.pth.tar").write_bytes(b"")
    assert "MambaVision-B-1K.pth.tar, sha256 e3b0c44" in only(checkpoints([folder])).detail
    random = only(checkpoints([cell_config("model.mini.weights=random")]))
    assert random.level == "warning"


def test_data_are_counted_or_said_to_be_missing(cell_config, tmp_path):
    assert "3,000 test images" in only(data([cell_config()])).detail
    missing = only(data([cell_config("profile=paper", f"task.paper.root={tmp_path}")]))
    assert missing.level == "problem" and str(tmp_path) in missing.detail


def test_room_on_the_disk(cell_config, tmp_path):
    assert disk(cell_config(), needed=1e3).level == "fine"
    full = disk(cell_config(), needed=1e18)
    assert full.level == "problem" and "results" in full.advice
    (tmp_path / "file").write_text("")
    assert disk(cell_config(f"results={tmp_path / 'file'}"), needed=0).level == "problem"


def test_what_the_cache_holds_already_needs_no_room(cell_config, tmp_path):
    cached = tmp_path / "results/mini/cache/key/moments"
    cached.parent.mkdir(parents=True)
    with cached.open("wb") as file:
        file.truncate(10**12)  # a sparse file of a terabyte
    assert disk(cell_config(), needed=10**12).level == "fine"
    assert disk(cell_config(), needed=10**18).level == "problem"


@pytest.mark.parametrize(("key", "level"), [(None, "problem"), ("k" * 40, "fine")])
def test_online_tracking_needs_an_account(cell_config, monkeypatch, key, level):
    import wandb

    monkeypatch.setattr(type(wandb.api), "api_key", key)
    assert tracking(cell_config("tracking=online")).level == level
    assert tracking(cell_config("tracking=offline")).level == "fine"


def test_findings_are_printed_as_they_come_and_as_they_are(capsys):
    printed = []

    def found():
        yield Finding("a[b]", "warning", "[red] text " + 40 * "long ", "do [this]")
        printed.append(capsys.readouterr().out)
        yield Finding("disk", "problem", "full")

    assert show_findings(found(), Console(width=60))
    (first,) = printed
    assert first.splitlines() == ["warning  a[b]: [red] text " + 40 * "long ", "         to do: do [this]"]
    assert capsys.readouterr().out == "problem  disk: full\n"
    assert not show_findings([Finding("disk", "warning", "narrow")], Console())
