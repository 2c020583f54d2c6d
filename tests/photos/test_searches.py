"""On a published ViT-Tiny and real photos: does each rank search help as it should?

Writes `results/vit_tiny/searches`.
"""

import pytest

import facts
from facts.search import CoRS, CoRSFisher
from tests.photos.data import BATCH, Table, load_photos, top1

pytestmark = pytest.mark.external

MEASURED, PREDICTED = 40, 480  # photos that CoRS compares outputs on (512 in the paper), and that CoRS-Fisher sees
SEARCHES = {
    "uniform": ("uniform", 0),
    "CoRS": (CoRS(), MEASURED),
    "CoRS-Fisher, Kronecker": (CoRSFisher(profile="kronecker"), PREDICTED),
    "CoRS-Fisher, exact": (CoRSFisher(profile="exact"), PREDICTED),
}
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
    table = Table("vit_tiny/searches", COLUMNS, TEXT.format(dense=top1(model, validation)))
    settings = {"form": "plain", "execution": facts.Execution(cache=cache)}
    for ratio in (0.8, 0.7):
        for name, (search, photos) in SEARCHES.items():
            seen = others[: photos // BATCH] or None
            result = facts.compress(model, calibration, search=search, ratio=ratio, sensitivity=seen, **settings)
            share = result.summary.spent["flops"] / result.summary.budget["flops"]
            table.add(ratio, name, top1(result.model, validation), result.summary.seconds["search"], photos, share)
        found = table.frame.set_index(["ratio", "search"]).top1[ratio]
        assert found.drop("uniform").min() >= found["uniform"] + 5, found
