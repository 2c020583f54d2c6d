"""The experiment `flar_paper`: its rows are what FLAR-SVD's code computes, its costs those of FLAR-SVD's README."""

import pytest
import torch
from omegaconf import OmegaConf

import facts
from experiments.cell import Cell
from experiments.instantiation import instantiate
from experiments.paper import paper_values
from experiments.rivals.refit.randomized_svd import RandomizedSVD
from facts.compression.budget import Budget
from facts.compression.compress import compress_prepared
from facts.estimators import ASVD, FLAR, FWSVD, PELA, SVDLLM
from facts.refit import Blockwise
from facts.search import ASVDSearch, FLARSearch, Uniform

MEASURED = ASVDSearch(ratios=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
METHODS = {
    "PELA": (PELA(), Uniform(), None),
    "FW-SVD": (FWSVD(exponent=0.5, gradients="batch"), MEASURED, RandomizedSVD()),
    "ASVD": (ASVD(statistic="max", alpha=1.0), MEASURED, RandomizedSVD()),
    "SVD-LLM, blockwise": (SVDLLM(), Uniform(), Blockwise()),
    "SVD-LLM, one-shot": (SVDLLM(), Uniform(), None),
    "FLAR-SVD": (FLAR(covariance_shrinkage="literal"), FLARSearch(), None),
}
COLUMNS = {
    "ConvNeXt-B": ("convnext_base.fb_in22k_ft_in1k", 0.5, 128),
    "DeiT-B": ("deit_base_patch16_224.fb_in1k", 0.5, 128),
    "Swin-L": ("swin_large_patch4_window7_224.ms_in22k_ft_in1k", 0.6, 64),
    "DeiT-III-L": ("deit3_large_patch16_224.fb_in22k_ft_in1k", 0.5, 64),
    "MambaVision-B": ("B", 0.55, 128),
}


@pytest.fixture
def experiment(cell_config):
    return cell_config("experiment=flar_paper").experiment


@pytest.fixture
def config_of(cell_config, experiment):
    """A function from row, column and profile to the cell's configuration."""

    def config_of(row, column, profile="mini"):
        mini = experiment.mini if profile == "mini" else []
        overrides = [*experiment.overrides, *experiment.columns[column], *mini, *experiment.rows[row]]
        return cell_config(f"profile={profile}", *overrides)

    return config_of


def test_rows_and_columns_are_those_of_the_readme(experiment):
    assert [*experiment.rows] == ["Baseline", *METHODS] and [*experiment.columns] == [*COLUMNS]
    assert {(row, column) for row, column, _ in paper_values("flar_paper")} == {
        (row, column) for row in experiment.rows for column in experiment.columns
    }


@pytest.mark.parametrize("profile", ["mini", "paper"])
@pytest.mark.parametrize("row", METHODS)
def test_every_row_is_the_method_as_their_code_has_it(config_of, row, profile):
    method = Cell.of(config_of(row, "DeiT-B", profile)).method
    assert (method.estimator, method.search, method.refit) == METHODS[row]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_is_a_network_with_its_ratio_and_batches(config_of, column):
    name, ratio, batch_size = COLUMNS[column]
    mini, paper = (Cell.of(config_of("PELA", column, profile)) for profile in ("mini", "paper"))
    assert name in (getattr(paper.recipe, "tag", None), getattr(paper.recipe, "variant", None))
    data = (paper.task.batch_size, paper.task.num_calibration, paper.task.num_sensitivity, paper.task.augmentation)
    assert data == (batch_size, 4096, 512, "train_cutmix")
    assert mini.task.num_calibration == 1024
    assert mini.method.budget.ratios == paper.method.budget.ratios == {"params": ratio}


@pytest.mark.parametrize("column", COLUMNS)
def test_dense_networks_and_uniform_ranks_cost_what_the_readme_says(config_of, column):
    """To its last digit: all but the GFLOPs of the dense MambaVision, 30.0 there and 29.94 by our count."""
    config, published = config_of("PELA", column, "paper"), paper_values("flar_paper")
    with torch.device("meta"):
        model = instantiate(OmegaConf.merge(config.model.paper, {"weights": "random"})).build()
    calibration = facts.prepare(model, input_shape=(3, 224, 224))
    budget = Budget.of(config.ratio, config.cost)
    small = compress_prepared(calibration, PELA(), Uniform(), budget, "plain").model
    for rows, network in ((("Baseline",), model), (("PELA", "SVD-LLM, blockwise", "SVD-LLM, one-shot"), small)):
        cost = facts.count_cost(network, (3, 224, 224))
        for row in rows:
            gflops = 30.0 if (row, column) == ("Baseline", "MambaVision-B") else round(cost.flops / 1e9, 1)
            assert published[row, column, "gflops"] == gflops
            assert published[row, column, "mparams"] == round(cost.params / 1e6, 1)
