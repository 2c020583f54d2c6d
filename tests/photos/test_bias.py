"""Two published networks and real photos: what a fitted bias is worth to each estimator.

Writes `results/photos/bias` in an hour.
"""

import pytest

import facts
from facts.calibration.prepare import prepare
from facts.compression.compress import compress_prepared
from facts.estimators import ESTIMATORS
from facts.search import SEARCHES
from facts.search.budget import Budget
from tests.photos.data import NETWORKS, Table, load_all, top1

pytestmark = pytest.mark.external

RATIO = 0.7
# PELA sees no data; GFWSVD reads each sample's gradients again in every iteration.
METHODS = [name for name in ESTIMATORS if name not in ("pela", "gfwsvd")]
COLUMNS = {"network": "", "estimator": "", "kept": ".1f", "fitted": ".1f"}
TEXT = (
    "# Fitted biases on two published networks\n\n"
    "Top-1 in percent on 650 validation photos (standard error up to 2.0) at 0.7 of the linear layers' FLOPs, with "
    "uniform ranks and pivoted layers; factors from 1,000 other photos. A fitted bias takes up the mean of what "
    "truncation takes from its layer's outputs, and the factors are centred by it. Written by "
    "`tests/photos/test_bias.py`."
)


def test_fitted_biases_help_where_activations_alone_decide(tmp_path):
    table = Table("photos/bias", COLUMNS, TEXT)
    for network in NETWORKS:
        model, calibration, validation = load_all(network)
        figures = {}
        for fit_bias in (False, True):
            cached = facts.Execution(cache=tmp_path / f"{network}-{fit_bias}")
            prepared = prepare(model, calibration, execution=cached, fit_bias=fit_bias)
            prepared.collect(ESTIMATORS[name]() for name in METHODS)
            for name in METHODS:
                budget, search = Budget.of(RATIO, "flops"), SEARCHES["uniform"]()
                result = compress_prepared(prepared, ESTIMATORS[name](), search, budget, "pivoted")
                figures[name, fit_bias] = top1(result.model.eval(), validation)
        for name in METHODS:
            table.add(network, name, figures[name, False], figures[name, True])
    activations = table.frame[table.frame.estimator.isin(["svd_llm", "flar"])]
    assert (activations.fitted > activations.kept).all(), activations
