"""Work of cells, as estimated without running them, against the operations that PyTorch counts while they run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.mini.digits import Digits
from experiments.planning.estimate import estimate
from experiments.runner import open_cell, run_cell

pytestmark = pytest.mark.system

CELLS = {
    "dense": ["estimator=none"],
    "uniform": ["estimator=facts"],
    "CoRS": ["estimator=svd_llm", "search=cors", "task.mini.num_sensitivity=16"],
    "CoRS-Fisher": ["estimator=facts", "search=cors_fisher"],
    "ASVD's search": ["estimator=svd_llm", "search=asvd", "task.mini.num_sensitivity=16"],
    "ASVD+'s search": ["estimator=svd_llm", "search=asvd_plus", "task.mini.num_sensitivity=16"],
    "FLAR's search": ["estimator=flar", "search=flar", "task.mini.num_sensitivity=16"],
    "ComCat": ["estimator=svd_llm", "search=comcat", "search.num_epochs=2"],
    "AAFM's search": ["estimator=svd_llm", "search=aafm", "task.mini.num_sensitivity=16"],
    "ARS": ["estimator=svd_llm", "search=ars", "search.num_epochs=2"],
    "Dobi-SVD": ["estimator=svd_llm", "search=dobi_svd", "search.num_epochs=2", "task.mini.num_calibration=512"],
    "FLORA": ["estimator=svd_llm", "search=flora", "search.num_epochs=2", "search.num_generations=2"],
    "blockwise": ["estimator=facts", "refit=blockwise"],
    "SVD-LLM's update": ["estimator=svd_llm", "refit=svd_llm"],
    "MPIFA": ["estimator=svd_llm", "refit=mpifa"],
    "MemViT's residual": ["estimator=svd_llm", "refit=memvit"],
    "recovered": ["estimator=svd_llm", "finetuning=recovery", "finetuning.mini.epochs=2"],
    "finetuned": ["estimator=svd_llm", "finetuning=low_rank", "task.mini.num_training=256"],
    "isomorphic": ["estimator=none", "pruning=isomorphic", "pruning.mini.num_batches=2"],
    "DISP-LLM": ["estimator=none", "pruning=disp_llm", "pruning.mini.num_steps=4"],
}


@pytest.mark.parametrize("overrides", CELLS.values(), ids=CELLS)
def test_a_cells_work_is_estimated(cell_config, monkeypatch, overrides):
    """Within a factor of 1.5: a compressed network's passes count as the original's, and searches end early."""
    monkeypatch.setattr(Digits, "num_evaluation", 64)
    assert 1 / 1.5 < estimated_by_counted(cell_config("ratio=0.8", *overrides)) < 1.5


@pytest.mark.parametrize("name", ["fisher_similarity", "cross_moments"])
def test_the_work_of_an_analysis_is_estimated(cell_config, name):
    """With the evaluation, whose images it takes; within the same factor."""
    few = [f"task.mini.{part}_per_class=2" for part in ("num_factors", "num_held_out")]
    assert 1 / 1.5 < estimated_by_counted(cell_config(f"analysis={name}", *few)) < 1.5


def estimated_by_counted(config) -> float:
    need = estimate([config])
    in_place = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * total[0] * total[1] * left[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run_cell(open_cell(config))
    return need.passes * need.flops / counter.get_total_flops()
