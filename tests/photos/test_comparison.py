"""Two published networks and real photos: estimators, forms of layers, and regularised gradients.

`pytest tests/photos/test_comparison.py --write-results` measures all of it, in an hour or two, and writes
`results/photos/`; without the option, only what the tests ask about is measured.
"""

import pandas as pd
import pytest

import facts
from facts import pareto
from facts.estimators import ESTIMATORS, FACTS
from facts.search import CoRS, CoRSFisher
from facts.utils.cache import content_key
from facts.utils.files import replacing
from tests.photos.data import BATCH, NETWORKS, RESULTS, load_network, load_photos, top1

pytestmark = pytest.mark.external

ASKED = {"estimators": ["facts"], "searches": ["uniform"], "forms": ["plain", "pivoted"], "ratios": [0.7]}
REGULARIZATIONS = [FACTS(grad_clip=clip, normalize=by) for clip in (None, "median") for by in ("none", "batch")]
ALL = (
    {
        "estimators": ["facts"],
        "searches": ["uniform", CoRSFisher()],
        "forms": ["plain", "pivoted"],
        "ratios": [0.8, 0.7, 0.6],
    },
    {"estimators": REGULARIZATIONS, "searches": ["uniform"], "forms": ["plain"], "ratios": [0.8, 0.7]},
    {
        "estimators": ["facts"],
        "searches": [CoRS()],
        "forms": ["plain", "pivoted"],
        "ratios": [0.8, 0.7, 0.6],
        "num_compared": 80,  # photos: each is compared 240 times
    },
    # GFWSVD reads each sample's gradients anew in every iteration: an hour.
    {
        "estimators": [name for name in ESTIMATORS if name != "gfwsvd"],
        "searches": ["uniform"],
        "forms": ["plain"],
        "ratios": [0.8, 0.7],
    },
)
PIVOTED_GAIN = 10.0  # in points, at a ratio of 0.7 with uniform ranks


@pytest.fixture(scope="module", params=NETWORKS)
def points(request, tmp_path_factory):
    """Top-1 on 650 photos of the dense network and of each point, factors from 1,000 others.

    For the tests alone on half of the former, from a quarter of the latter.
    """
    network, everything = request.param, request.config.getoption("--write-results")
    folder = RESULTS / "photos" if everything else tmp_path_factory.mktemp("photos")
    model = load_network(network)
    calibration = load_photos("calibration", resize=True, every=1 if everything else 4, network=network)
    validation = load_photos("validation", resize=False, every=1 if everything else 2, network=network)
    cache = tmp_path_factory.mktemp("cache")

    def measured(num_compared=None, **grid):
        return pareto(
            model,
            calibration,
            lambda compressed: {"top1": top1(compressed.eval(), validation)},
            sensitivity=calibration[: num_compared // BATCH] if num_compared else None,
            file=folder / f"{network}.csv",
            evaluation_key=content_key(*validation),
            execution=facts.Execution(cache=cache),
            **grid,
        )

    table = pd.concat(measured(**grid) for grid in (ALL if everything else [ASKED]))
    table = table.drop_duplicates(["estimator", "search", "form", "ratio"])
    text = (
        f"# {NETWORKS[network][0]} and ImageNet photos\n\n"
        "Top-1 in percent on 650 validation photos (standard error up to 2.0), by the fraction of the linear layers' "
        "FLOPs that remains; factors from 1,000 other photos. Written by `tests/photos/test_comparison.py`."
    )
    columns = ["estimator", "search", "form", "ratio", "flops", "params", "top1"]
    formats = ("", "", "", ".1f", ".4g", ".4g", ".1f")
    with replacing(folder / f"{network}.md") as path:
        path.write_text(f"{text}\n\n{table[columns].to_markdown(index=False, floatfmt=formats)}\n")
    return table


def test_dense_accuracy_is_that_of_the_published_network(points):
    assert points.top1[points.estimator == "original"].item() > 78


def test_pivoted_layers_gain_ten_points_at_the_same_flops(points):
    asked = points[(points.estimator == "facts") & (points.search == "uniform") & (points.ratio == 0.7)]
    plain, pivoted = (asked[asked.form == form].squeeze() for form in ("plain", "pivoted"))
    assert pivoted.top1 >= plain.top1 + PIVOTED_GAIN
    assert pivoted.flops == pytest.approx(plain.flops, rel=0.01)
