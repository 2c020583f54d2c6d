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
    tuned = run_cell(open_cell(cell_config(*PRUNING, "finetuning=pruned", "finetuning.mini.num_epochs=1")))
    assert tuned.metrics["top1"] > pruned.metrics["top1"]
    assert set(tuned.seconds) == {"pruning", "finetuning", "evaluation"}
    minutes = (tuned.seconds["pruning"] + tuned.seconds["finetuning"]) / 60
    assert tuned.values["total_minutes"] == pytest.approx(minutes)
    with pytest.raises(ValueError, match="estimator=none"):
        open_cell(cell_config("pruning=isomorphic"))


def test_fingerprints_of_cells_that_prune_finetune_or_time(cell_config):
    kinds = [
        [*PRUNING],
        [*PRUNING, "ratio=0.6"],
        [*PRUNING, "pruning.mini.heads=0.5"],
        [*PRUNING, "finetuning=pruned"],
        ["estimator=none"],
        ["estimator=none", "analysis=throughput"],
        ["estimator=none", "analysis=throughput", "hardware.num_threads=2"],
        ["estimator=none", "finetuning=low_rank"],
        ["cost=latency"],
        ["cost=latency", "hardware.num_threads=2"],
    ]
    same = [*PRUNING, "hardware.num_threads=2"], [*PRUNING, "finetuning=pruned", "finetuning.mini.save_every=7"]
    found = {open_cell(cell_config(*kind)).fingerprint for kind in kinds}
    assert len(found) == len(kinds)
    assert {open_cell(cell_config(*overrides)).fingerprint for overrides in same} < found
