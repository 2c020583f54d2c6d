"""Two published networks and real photos: what a fitted bias is worth to each estimator.

`pytest tests/photos/test_bias.py --write-results` measures for an hour and writes `results/photos/bias`.
"""

import pandas as pd
import pytest

import facts
from facts.calibration.prepare import prepare
from facts.compression.budget import Budget
from facts.compression.compress import compress_prepared
from facts.estimators import ESTIMATORS
from facts.search import SEARCHES
from tests.photos.data import NETWORKS, RESULTS, load_network, load_photos, top1, write_table

pytestmark = pytest.mark.external

RATIO = 0.7
# PELA sees no data; GFWSVD reads each sample's gradients anew in every iteration.
METHODS = [name for name in ESTIMATORS if name not in ("pela", "gfwsvd")]
TEXT = (
    "# Fitted biases on two published networks\n\n"
    "Top-1 in percent on 650 validation photos (standard error up to 2.0) at 0.7 of the linear layers' FLOPs, with "
    "uniform ranks and pivoted layers; factors from 1,000 other photos. A fitted bias takes up the mean of what "
    "truncation takes from its layer's outputs, and the factors are centred by it. Written by "
    "`tests/photos/test_bias.py`."
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rows = []
    for network in NETWORKS:
        model = load_network(network)
        calibration = load_photos("calibration", resize=True, network=network)
        validation = load_photos("validation", resize=False, network=network)
        figures = {}
        for fit_bias in (False, True):
            prepared = prepare(
                model, calibration, fit_bias=fit_bias, execution=facts.Execution(cache=tmp_path_factory.mktemp("cache"))
            )
            prepared.collect(ESTIMATORS[name]() for name in METHODS)
            for name in METHODS:
                budget, search = Budget.of(RATIO, "flops"), SEARCHES["uniform"]()
                result = compress_prepared(prepared, ESTIMATORS[name](), search, budget, "pivoted")
                figures[name, fit_bias] = top1(result.model.eval(), validation)
        rows += [[network, name, figures[name, False], figures[name, True]] for name in METHODS]
    return pd.DataFrame(rows, columns=["network", "estimator", "kept", "fitted"])


def test_fitted_biases_help_where_activations_alone_decide(table):
    write_table(table, RESULTS / "photos" / "bias", TEXT, ("", "", ".1f", ".1f"))
    assert len(table) == len(NETWORKS) * len(METHODS)
    gains = table.assign(gain=table.fitted - table.kept).groupby("estimator").gain
    assert (gains.min()[["svd_llm", "flar"]] > 0).all(), gains.min()
