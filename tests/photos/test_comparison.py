"""Two published networks and real photos: estimators, forms of layers, and regularised gradients.

Writes `results/photos/vit_tiny` and `deit_tiny` in an hour or two.
"""

import pandas as pd
import pytest

import facts
from facts import pareto
from facts.estimators import ESTIMATORS, FACTS
from facts.search import CoRS, CoRSFisher
from facts.utils.cache import content_key
from tests.photos.data import BATCH, NETWORKS, RESULTS, load_all, top1, write_page

pytestmark = pytest.mark.external

REGULARIZATIONS = [FACTS(grad_clip=clip, normalize=by) for clip in (None, "median") for by in ("none", "batch")]
FORMS, PLAIN = {"estimators": ["facts"], "forms": ["plain", "pivoted"], "ratios": [0.8, 0.7, 0.6]}, {"forms": ["plain"]}
GRIDS = (
    {**FORMS, "searches": ["uniform", CoRSFisher()]},
    {**PLAIN, "estimators": REGULARIZATIONS, "searches": ["uniform"], "ratios": [0.8, 0.7]},
    {**FORMS, "searches": [CoRS()], "num_compared": 80},  # photos: each is compared 240 times
    # GFWSVD reads each sample's gradients again in every iteration: an hour.
    {
        **PLAIN,
        "estimators": [name for name in ESTIMATORS if name != "gfwsvd"],
        "searches": ["uniform"],
        "ratios": [0.8, 0.7],
    },
)
COLUMNS = {
    "estimator": "", "search": "", "form": "", "ratio": ".1f", "flops": ".4g", "params": ".4g", "top1": ".1f"
}  # fmt: skip
TEXT = (
    "# {} and ImageNet photos\n\n"
    "Top-1 in percent on 650 validation photos (standard error up to 2.0), by the fraction of the linear layers' "
    "FLOPs that remains; factors from 1,000 other photos. Written by `tests/photos/test_comparison.py`."
)


@pytest.mark.parametrize("network", NETWORKS)
def test_pivoted_layers_gain_ten_points_at_the_same_flops(network, tmp_path):
    model, calibration, validation = load_all(network)

    def measured(num_compared=None, **grid):
        return pareto(
            model,
            calibration,
            lambda compressed: {"top1": top1(compressed.eval(), validation)},
            sensitivity=calibration[: num_compared // BATCH] if num_compared else None,
            file=RESULTS / "photos" / f"{network}.csv",
            evaluation_key=content_key(*validation),
            execution=facts.Execution(cache=tmp_path),
            **grid,
        )

    table = pd.concat(measured(**grid) for grid in GRIDS)
    table = table.drop_duplicates(["estimator", "search", "form", "ratio"])
    write_page(table, COLUMNS, f"photos/{network}", TEXT.format(NETWORKS[network][0]))
    asked = table[(table.estimator == "facts") & (table.search == "uniform") & (table.ratio == 0.7)]
    plain, pivoted = (asked[asked.form == form].squeeze() for form in ("plain", "pivoted"))
    assert pivoted.top1 >= plain.top1 + 10
    assert pivoted.flops == pytest.approx(plain.flops, rel=0.01)
