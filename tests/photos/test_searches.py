"""On a published ViT-Tiny and real photos: does each rank search help as it should?

`pytest tests/photos/test_searches.py --write-results` writes `results/vit_tiny/searches`.
"""

import pytest

import facts
from facts.search import CoRS, CoRSFisher
from tests.photos.data import BATCH, load_photos, top1, write_table

pytestmark = pytest.mark.external

MEASURED, PREDICTED = 40, 480  # photos that CoRS compares outputs on (512 in the paper), and that CoRS-Fisher sees
SEARCHES = {
    "uniform": ("uniform", 0),
    "CoRS": (CoRS(), MEASURED),
    "CoRS-Fisher, Kronecker": (CoRSFisher(profile="kronecker"), PREDICTED),
    "CoRS-Fisher, exact": (CoRSFisher(profile="exact"), PREDICTED),
}
RATIOS = (0.8, 0.7)
GAIN = 5.0  # points
COLUMNS = {
    "ratio": ".1f", "search": "", "top1": ".2f", "search_seconds": ".1f", "sensitivity_photos": "",
    "share_of_budget": ".4f",
}  # fmt: skip
TEXT = (
    "# Rank searches on a published ViT-Tiny and ImageNet photos\n\n"
    "FACTS from 500 photos, top-1 in percent on 650 validation photos, the dense network's being {dense:.1f}. The "
    "ratio is that of the linear layers' FLOPs. The time is that of the search alone. Written by "
    "`tests/photos/test_searches.py`."
)


def test_each_search_gains_five_points_and_more_on_uniform_ranks(vit):
    """Sensitivities come from calibration photos that the factors have not seen."""
    model, calibration, validation, cache = vit
    others = load_photos("calibration", start=1, every=2)
    settings, rows = {"form": "plain", "execution": facts.Execution(cache=cache)}, []
    for ratio in RATIOS:
        for name, (search, photos) in SEARCHES.items():
            seen = others[: photos // BATCH] or None
            result = facts.compress(model, calibration, search=search, ratio=ratio, sensitivity=seen, **settings)
            seconds, (spent, budget) = result.summary.seconds["search"], (result.summary.spent, result.summary.budget)
            assert spent["flops"] <= budget["flops"]
            rows.append(
                (ratio, name, top1(result.model, validation), seconds, photos, spent["flops"] / budget["flops"])
            )
    table = write_table(rows, COLUMNS, "vit_tiny/searches", TEXT.format(dense=top1(model, validation)))
    found = table.set_index(["ratio", "search"]).top1
    for ratio in RATIOS:
        assert found[ratio].drop("uniform").min() >= found[ratio, "uniform"] + GAIN, found
