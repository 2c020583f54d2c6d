"""Cells that prune, finetune and time."""

import pytest

from experiments.runner import open_cell, run_cell

PRUNING = ["pruning=isomorphic", "estimator=none", "cost=params", "ratio=0.7"]


@pytest.mark.system
def test_a_cell_prunes_finetunes_and_times(cell_config):
    timing = ["analysis=throughput", "hardware.timing.num_turns=2", "hardware.timing.min_seconds=0"]
    pruned = run_cell(open_cell(cell_config(*PRUNING, *timing)))
    dense = run_cell(open_cell(cell_config("estimator=none")))
    assert pruned.metrics["mparams"] <= 0.7 * dense.metrics["mparams"]
    assert pruned.metrics["top1"] < dense.metrics["top1"]
    assert {"speedup", "latency_ms", "dense_throughput", "compressed_throughput"} <= pruned.metrics.keys()
    tuned = run_cell(open_cell(cell_config(*PRUNING, "finetuning=pruned")))
    assert tuned.metrics["top1"] > pruned.metrics["top1"]
    assert set(tuned.seconds) == {"pruning", "finetuning", "evaluation"}
    minutes = (tuned.seconds["pruning"] + tuned.seconds["finetuning"]) / 60
    assert tuned.values["total_minutes"] == pytest.approx(minutes)


@pytest.fixture
def fingerprint(cell_config):
    return lambda *overrides: open_cell(cell_config(*overrides)).fingerprint


def test_what_a_cell_is_known_by(fingerprint):
    kinds = [
        [*PRUNING],
        [*PRUNING, "ratio=0.6"],
        [*PRUNING, "pruning.mini.heads=0.5"],
        [*PRUNING, "finetuning=pruned"],
        [*PRUNING, "finetuning=low_rank"],
        ["estimator=none"],
        ["estimator=none", "analysis=throughput"],
        ["estimator=none", "analysis=throughput", "hardware.num_threads=2"],
        ["estimator=none", "finetuning=low_rank"],
    ]
    assert len({fingerprint(*kind) for kind in kinds}) == len(kinds)


def test_threads_matter_to_what_is_timed_alone(fingerprint):
    assert fingerprint(*PRUNING) == fingerprint(*PRUNING, "hardware.num_threads=2")
    assert fingerprint("ratio=0.5") == fingerprint("ratio=0.5", "hardware.num_threads=2")
    assert fingerprint("cost=latency") != fingerprint("cost=latency", "hardware.num_threads=2")
    assert fingerprint("finetuning=pruned") == fingerprint("finetuning=pruned", "finetuning.mini.save_every=7")


def test_pruning_stands_in_for_an_estimator(cell_config):
    with pytest.raises(ValueError, match="estimator=none"):
        open_cell(cell_config("pruning=isomorphic"))
