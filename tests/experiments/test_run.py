"""One cell: its record, its fingerprint, what happens when it fails, and what rounding makes of it."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from experiments.compose import LAUNCHERS
from experiments.mini import CHECKPOINTS
from experiments.mini.digits import Digits
from experiments.record import read_record, read_records, write_record
from experiments.run import main
from experiments.runner import open_cell, run_cell
from facts.decomposition import truncation
from tests.experiments.conftest import SMALL
from tests.records import make_record, make_summary
from tests.refusals import refused, refuses

QUICK = ["hardware.timing.num_turns=2", "hardware.timing.min_seconds=0", "hardware.batch_size=8"]
PRUNING = ["pruning=isomorphic", "estimator=none", "cost=params", "ratio=0.7"]
DAMAGES = {
    "cut short": lambda text: text[:50],
    "a field is missing": lambda text: text.replace('"data_hash"', '"data"'),
    "no configuration": lambda text: json.dumps({**json.loads(text), "config": {}}),
    "no metrics": lambda text: json.dumps({**json.loads(text), "metrics": {}}),
    "of another cell": lambda text: json.dumps({**json.loads(text), "fingerprint": "0" * 16}),
}


@pytest.mark.system
def test_a_cell_leaves_a_record_of_what_was_run_and_what_came_out(make_cell, tmp_path, monkeypatch):
    record = run_cell(make_cell("model=deit_b", "estimator=facts", "ratio=0.5"))
    assert record.status == "done" and record.plan and all(rank >= 1 for rank in record.plan.values())
    assert {"torch", "timm", "facts"} <= set(record.versions)
    digest = hashlib.sha256((CHECKPOINTS / "mini_deit.safetensors").read_bytes()).hexdigest()
    assert record.weights == {"source": "mini_deit.safetensors", "sha256": digest}
    assert record.config["estimator"]["_target_"] == "facts.estimators.FACTS"
    assert set(record.seconds) == {"reading", "calibration", "decomposition", "search", "evaluation"}
    (path,) = (tmp_path / "results/mini/records").glob("*.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(record)))
    dense = run_cell(make_cell("estimator=none"))
    assert dense.metrics["top1"] > record.metrics["top1"] > 10 and dense.plan == {}
    assert dense.metrics["gflops"] > record.metrics["gflops"] > 0 and record.metrics["mparams"] > 0
    monkeypatch.setattr("facts.moments.collect.MomentPass.run", lambda *args: pytest.fail("a second data pass"))
    assert run_cell(make_cell("ratio=0.4")).status == "done"


def test_a_failing_cell_is_recorded_raised_and_tried_again_and_a_finished_one_is_not(make_cell, monkeypatch):
    monkeypatch.setattr(Digits, "num_evaluation", 128)
    cell = make_cell("estimator=pela")
    with monkeypatch.context() as patch:
        patch.setattr("experiments.methods.compress_prepared", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            run_cell(cell)
    assert caught.value.__notes__ == [f"see {cell.records / cell.record.fingerprint}.json"]
    assert cell.record.status == "failed" and "ZeroDivisionError" in cell.record.error
    again = run_cell(cell)
    assert again.status == "done" and again.attempt == 2
    monkeypatch.setattr("experiments.runner.measure", lambda cell: pytest.fail("measured twice"))
    assert run_cell(cell) == again


@pytest.mark.system
def test_the_fingerprint_follows_what_a_result_depends_on_and_nothing_else(make_cell, tmp_path):
    def fingerprint(*overrides):
        return make_cell(*overrides).fingerprint

    weights = shutil.copy(CHECKPOINTS / "mini_deit.safetensors", tmp_path / "copy.safetensors")
    same = ["hardware.num_threads=1", "tracking=offline", f"results={tmp_path / 'elsewhere'}"]
    same += [f"checkpoints={tmp_path}", f"model.mini.weights={weights}"]
    other = ["ratio=0.4", "estimator.shrinkage_row=0.5", "cost=params", "cost=latency", "model=swin_b"]
    other += ["task.mini.num_calibration=512", "hardware.precision=bfloat16", "model.mini.weights=random"]
    other += ["labels=sampled", "analysis=throughput", "finetuning=low_rank"]
    assert {fingerprint(override) for override in same} == {fingerprint()}
    assert len({fingerprint(), *map(fingerprint, other)}) == 1 + len(other)
    assert fingerprint("estimator=none", "ratio=0.4") == fingerprint("estimator=none", "ratio=0.6")
    assert fingerprint(*PRUNING) != fingerprint(*PRUNING, "pruning.mini.heads=0.5")
    assert fingerprint(*PRUNING) == fingerprint(*PRUNING, "hardware.num_threads=2")
    assert fingerprint("cost=latency") != fingerprint("cost=latency", "hardware.num_threads=2")
    assert fingerprint("finetuning=pruned") == fingerprint("finetuning=pruned", "finetuning.mini.save_every=7")


@pytest.mark.attack
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_set_aside(tmp_path, caplog, damage):
    record = make_record(metrics={"top1": 1.0}, summary=make_summary())
    write_record(record, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(DAMAGES[damage](path.read_text()))
    assert read_record("f", tmp_path) is None and list(read_records(tmp_path)) == []
    assert "is damaged (" in caplog.text
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("f.damaged-")
    write_record(record, tmp_path)
    assert read_record("f", tmp_path) == record


test_what_is_not_there_is_named = pytest.mark.attack(
    refused(
        (["model.mini.weights=nowhere.safetensors"], "no checkpoint 'nowhere.safetensors'"),
        (["model.mini.arguments.num_heads=7"], "timm cannot build deit_tiny.*: dim should be divisible by num_heads"),
        (["results=/dev/null"], r"cannot write to the folder .*null"),
        (["estimator=none", "analysis=fisher_similarity"], "choose one, or leave the analysis out"),
        (["model=swin_b", "analysis=token_coupling"], "no linear layer or 1x1 convolution is called blocks.4.mlp.fc2;"),
        by=lambda overrides, make_cell: run_cell(make_cell(*overrides)),
        error=(ValueError, OSError),
    )
)


def test_cells_whose_tables_show_minutes_run_alone_and_are_the_same_cells(make_cell):
    plain, shown, timed = map(make_cell, ("seed=0", "experiment=classification_50", "experiment=contributions"))
    assert [cell.runs_alone for cell in (plain, shown, timed)] == [False, False, True]
    assert plain.identity == shown.identity == timed.identity


def test_a_record_has_the_recipes_of_its_own_profile(make_cell):
    settings = make_cell("finetuning=recovery", "search=cors_fisher", "seed=3").settings
    for group in ("model", "task", "finetuning"):
        assert "mini" in settings[group] and not {"paper", "photos"} & settings[group].keys()
    assert settings["search"]["seed"] == settings["task"]["mini"]["seed"] == 3


@pytest.mark.system
def test_a_sweep_ends_with_its_runs_and_their_folder_and_a_table_is_no_cell(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = command(main, "-m", "estimator=pela", "ratio=0.4,0.5", "hydra.job.chdir=true", *SMALL, results="'.'")
    top1 = {record.config["ratio"]: record.metrics["top1"] for record in read_records(tmp_path / "mini/records")}
    for ratio in (0.4, 0.5):
        assert re.search(rf"ratio={ratio} +│ +{top1[ratio]:.4g} ", printed)
    assert "Records: mini/records" in printed
    where = command(main, "--cfg", "all", "--package", "hydra.sweep.dir", "--resolve", results="'~/mine'")
    assert where.strip() == str(Path.home() / "mine/mini/sweep")
    for override, message in (("seed=range(3,3)", "the sweep has no runs: "), ("ratio=1,2", ".*ratio=2.*: ratio is ")):
        refuses(rf"^error: {message}", command, main, "-m", override, raised=SystemExit)
    message = r"a cell has no experiment, plan: use experiments\.reproduce, which"
    refuses(message, command, main, "experiment=llm", "plan=true", raised=SystemExit)


test_a_command_line_that_cannot_be_composed_ends_with_one_line = refused(
    ("estimator=factss", r"estimator/factss is not one of asvd, .* \(did you mean facts\?\)"),
    ("estimator=math.Diagonal", r"estimator/math\.Diagonal is not one of asvd, "),
    ("estimator=nowhere.Diagonal", r"estimator/nowhere\.Diagonal is not one of asvd, "),
    ("estimator.shrinkage_raw=0.5", r"there is no field estimator\.shrinkage_raw; its group has .*shrinkage_row, "),
    ("serach=cors", r"there is no field serach; there are .* \(did you mean search\?\)"),
    ("results=~/mine", r"results=~/mine cannot be read \(.*\): quote a value with special characters twice"),
    ("hydra/launcher=gone", r"hydra/launcher/gone is not installed: pip install -e '\.\[sweep\]'"),
    ("ratio=half", r"Error merging override ratio=half: Value 'half' of type 'str' could not be converted"),
    ("ratio=0.4,0.5", r"Ambiguous value for argument 'ratio=0.4,0.5'; .*key=\[value1,value2\]"),
    by=lambda given, command, monkeypatch: monkeypatch.setitem(LAUNCHERS, "gone", "sweep") or command(main, given),
    error=SystemExit,
    start="^error: ",
)


def test_sweeps_are_read_without_asserts():
    read = "from experiments.compose import OverridesParser as O; print(O.create().parse_overrides(['a=range(0,2)']))"
    subprocess.run([sys.executable, "-O", "-c", read], check=True)


@pytest.mark.system
def test_a_record_of_a_device_holds_its_passes_and_its_throughput(make_cell):
    metrics = run_cell(make_cell("task=digits", "analysis=device", "estimator=pela", *QUICK)).metrics
    assert {"layers_pass_seconds", "units_pass_seconds"} <= metrics.keys()
    assert all(metrics[name] > 0 for name in ("plain_pass_seconds", "plain_pass_busy_seconds", "speedup"))


@pytest.mark.system
def test_a_network_is_timed_in_another_runtime_beside_the_flops_that_remain(make_cell):
    own = ["model=deit_s", "task=digits", "parts=units", "ratio=0.5", "analysis=runtime", *QUICK]
    record = run_cell(make_cell(*own, "analysis.paper.runtime='PyTorch, bfloat16'"))
    before, after = record.summary.full_flops
    assert record.metrics["remaining_flops"] == after / before < 1
    assert record.metrics["remaining_time"] == pytest.approx(1 / record.metrics["speedup"])
    assert "PyTorch, bfloat16" in record.identity["analysis"]  # set for the paper's profile, and taken over in mini
    message = "there is no runtime 'TensorRT' here: choose from PyTorch, float32; "
    refuses(message, open_cell, make_cell(*own, "analysis.paper.runtime=TensorRT"))


@pytest.mark.system
def test_a_cell_prunes_finetunes_and_times(make_cell):
    few = "task.mini.num_training=1024"
    pruned = run_cell(make_cell(*PRUNING, "analysis=throughput", *QUICK[:2]))
    dense = run_cell(make_cell("estimator=none"))
    assert pruned.metrics["mparams"] <= 0.7 * dense.metrics["mparams"]
    assert {"speedup", "latency_ms", "dense_throughput", "compressed_throughput"} <= pruned.metrics.keys()
    tuned = run_cell(make_cell(*PRUNING, few, "finetuning=pruned", "finetuning.mini.num_epochs=1"))
    assert pruned.metrics["top1"] < min(dense.metrics["top1"], tuned.metrics["top1"])
    assert set(tuned.seconds) == {"pruning", "finetuning", "evaluation"}
    assert 60 * tuned.values["total_minutes"] == pytest.approx(tuned.seconds["pruning"] + tuned.seconds["finetuning"])


@pytest.mark.system
def test_noise_of_the_size_of_rounding_in_every_factor_changes_few_predictions(make_cell, monkeypatch, tmp_path):
    """Many are near-singular: without a floor on eigenvalues, this cell differed by 11 points."""
    given = ("model=convnext_b", "estimator=gfwsvd", "ratio=0.5", "task.mini.num_calibration=512")
    expected = run_cell(make_cell(*given, f"results={tmp_path / 'plain'}")).metrics["top1"]
    plain, noisy = truncation.square_root, []

    def square_root(factor, *arguments, **options):
        if factor is not None:
            factor = factor.double() * (1 + 1e-15 * torch.randn_like(factor, dtype=torch.float64))
            noisy.append(factor)
        return plain(factor, *arguments, **options)

    monkeypatch.setattr(truncation, "square_root", square_root)
    record = run_cell(make_cell(*given))
    assert noisy and any(record.summary.repaired.values())
    assert record.metrics["top1"] == pytest.approx(expected, abs=0.2)  # points: six of 3,000 samples
