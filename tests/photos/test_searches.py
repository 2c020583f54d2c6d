"""On a published ViT-Tiny and real photos: does each rank search help as it should?

`pytest tests/photos --write-results` writes the table to `results/vit_tiny/`.
"""

import pandas as pd
import pytest

import facts
from facts.search import CoRS, CoRSFisher
from tests.photos.data import BATCH, load_photos, top1, write_table

pytestmark = pytest.mark.external

SEARCHES = {
    "uniform": "uniform",
    "CoRS": CoRS(),
    "CoRS-Fisher, Kronecker": CoRSFisher(profile="kronecker"),
    "CoRS-Fisher, exact": CoRSFisher(profile="exact"),
}
SEARCH_RATIOS = (0.8, 0.7)
MEASURED, PREDICTED = 40, 480  # photos that CoRS compares outputs on (512 in the paper), and that CoRS-Fisher sees
SEARCH_GAIN = 5.0


@pytest.fixture(scope="module")
def searches(setting, results):
    """Top-1 of FACTS by ratio and search. Sensitivities come from calibration photos that the factors have not seen."""
    others = load_photos("calibration", resize=True, start=1, every=2)
    rows = []
    for ratio in SEARCH_RATIOS:
        for name, search in SEARCHES.items():
            num_photos = 0 if name == "uniform" else MEASURED if name == "CoRS" else PREDICTED
            result = facts.compress(
                setting.model,
                setting.calibration,
                search=search,
                form="plain",
                ratio=ratio,
                sensitivity=others[: num_photos // BATCH] or None,
                execution=facts.Execution(cache=setting.cache),
            )
            seconds, (spent, budget) = result.summary.seconds["search"], (result.summary.spent, result.summary.budget)
            assert spent["flops"] <= budget["flops"]
            figure = top1(result.model, setting.validation)
            rows.append((ratio, name, figure, seconds, num_photos, spent["flops"] / budget["flops"]))
    columns = ["ratio", "search", "top1", "search_seconds", "sensitivity_photos", "share_of_budget"]
    table = pd.DataFrame(rows, columns=columns)
    text = (
        "# Rank searches on a published ViT-Tiny and ImageNet photos\n\n"
        "FACTS from 500 photos, top-1 in percent on 650 validation photos, the dense network's being "
        f"{top1(setting.model, setting.validation):.1f}. The ratio is that of the linear layers' FLOPs. The time is "
        "that of the search alone. Written by `tests/photos/test_searches.py`."
    )
    write_table(table, results / "searches", text, (".1f", "", ".2f", ".1f", "", ".4f"))
    return table.set_index(["ratio", "search"]).top1


@pytest.mark.parametrize("ratio", SEARCH_RATIOS)
@pytest.mark.parametrize("search", [name for name in SEARCHES if name != "uniform"])
def test_each_search_gains_five_points_and_more_on_uniform_ranks(searches, ratio, search):
    assert searches[ratio, search] >= searches[ratio, "uniform"] + SEARCH_GAIN, searches
