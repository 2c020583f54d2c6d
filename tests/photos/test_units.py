"""Two published networks and real photos: units against layers, and the choice of the defaults of units.

`pytest tests/photos/test_units.py --write-results` measures for four hours and writes `results/photos/units`,
`units_recovered` and `results/defaults/units`; what is written there already is not measured again.
"""

import itertools

import pandas as pd
import pytest
import torch

import facts
from facts.compression.rounds import FIRST, PAYS_BELOW
from facts.estimators import FACTS
from facts.estimators.base import PLAIN_SHARE_OF_UNITS, ROW_OF_UNITS
from facts.moments.losses import kl_divergence
from facts.utils.files import replacing
from tests.photos.data import NETWORKS, RESULTS, load_network, load_photos, rows_of, top1, write_page, write_table

pytestmark = pytest.mark.external

RATIOS = (0.8, 0.7, 0.6, 0.5)
LAYERS, ONE_ROUND, UNITS = "layers, pivoted", "units, in one round", "units"
METHODS = {
    LAYERS: ("layers", None),
    ONE_ROUND: ("units", ()),
    UNITS: ("units", None),  # with the default's second round at 0.6 and 0.5
}
RECOVERED = "{}, recovered"
RECOVERY = 10.0  # minutes
LEAST_GAINED = {0.7: 0.0, 0.6: 8.0, 0.5: 20.0}  # points of top-1, by units over layers
FILE = "photos/units"
COLUMNS = {
    "network": "", "ratio": ".1f", "method": "", "chosen": ".1f", "judged": ".1f", "distance": ".3f"
}  # fmt: skip
TEXT = (
    "# Units on two published networks\n\n"
    "Top-1 in percent on validation photos, without any training, by the fraction of the linear layers' FLOPs that "
    "remains: on the half by which defaults are chosen, and on the other, 325 photos each (standard error up to 2.8); "
    "the mean distance of the outputs from the original's on the other half. FACTS and CoRS-Fisher from 1,000 more "
    "photos. Written by `tests/photos/test_units.py`."
)
RECOVERED_FILE = "photos/units_recovered"
RECOVERED_COLUMNS = {
    "network": "", "ratio": ".1f", "method": "", "before": ".1f", "judged": ".1f", "distance": ".3f", "minutes": ".1f"
}  # fmt: skip
RECOVERED_TEXT = (
    "# Recovered units on a published network\n\n"
    "As in `units`, then recovered without labels from the same photos for {minutes:.0f} minutes on {threads} threads "
    "of a machine that did other work too. Written by `tests/photos/test_units.py`."
)

CHOICES = [  # shrinkage of B, plain share of A, rounds: one after the other
    *((row, PLAIN_SHARE_OF_UNITS, ()) for row in (0.7, 0.3, 0.1)),
    *((ROW_OF_UNITS, share, ()) for share in (0.0, 1.0)),
    (ROW_OF_UNITS, PLAIN_SHARE_OF_UNITS, (FIRST,)),
]
CHOICES_FILE = "defaults/units"
CHOICES_COLUMNS = ["network", "shrinkage_row", "plain_share", "num_rounds", "ratio", "top1", "distance"]
CHOICES_TEXT = (
    "# Defaults of units\n\n"
    "FACTS and CoRS-Fisher on units from 1,000 photos, without training: top-1 in percent, and the mean distance of "
    "the outputs from the original's, on the 325 validation photos by which defaults are chosen (standard error of "
    "top-1 up to 2.8). Measured when moments of products were of all features, not of those of a head; the default's "
    "numbers with the latter, in `photos/units`, differ by at most 2.5 points. The rule: the `shrinkage_row`, then the "
    "`plain_share`, of the highest mean top-1 over both networks and all ratios; then the second round at those ratios "
    "at which it lowers the mean distance. Written by `tests/photos/test_units.py`."
)


def prepare(model, calibration, parts, cache):
    return facts.prepare(model, calibration, parts=parts, held_out=(), execution=facts.Execution(cache=cache))


@torch.inference_mode()
def distance(original, network, batches):
    """The mean KL divergence of the outputs from the original's."""
    found = [kl_divergence(original(images), network(images)).item() for images, _ in batches]
    return sum(found) / sum(len(images) for images, _ in batches)


@pytest.mark.parametrize("network", NETWORKS)
def test_units_keep_more_than_layers_of_the_same_flops(network, tmp_path):
    model, calibration = load_network(network), load_photos("calibration", network=network)
    chosen, judged = (load_photos("validation", start, 2, network) for start in (0, 1))
    rows = rows_of(FILE)

    def add(ratio, method, compressed):
        found = top1(compressed, chosen), top1(compressed, judged), distance(model, compressed, judged)
        rows.append([network, ratio, method, *found])
        write_table(rows, COLUMNS, FILE, TEXT)

    if [network, 1.0, "dense"] not in [row[:3] for row in rows]:
        add(1.0, "dense", model)
    prepared = {parts: prepare(model, calibration, parts, tmp_path) for parts in ("layers", "units")}
    for method, ratio in itertools.product(METHODS, RATIOS):
        parts, rounds = METHODS[method]
        is_same = method == ONE_ROUND and ratio > PAYS_BELOW  # as the default
        if not is_same and [network, ratio, method] not in [row[:3] for row in rows]:
            result = facts.compress(prepared[parts], ratio=ratio, budget=facts.Budget(rounds=rounds))
            add(ratio, method, result.model.eval())
    points = {(ratio, method): top1 for name, ratio, method, _, top1, _ in rows if name == network}
    gained = {ratio: points[ratio, UNITS] - points[ratio, LAYERS] for ratio in LEAST_GAINED}
    assert all(gained[ratio] >= least for ratio, least in LEAST_GAINED.items()), points


def test_recovered_units_stay_ahead_of_recovered_layers(tmp_path):
    network = "deit_tiny"
    model, calibration = load_network(network), load_photos("calibration", network=network)
    judged, rows = load_photos("validation", 1, 2, network), rows_of(RECOVERED_FILE)
    for ratio, method in itertools.product(reversed(RATIOS), (UNITS, LAYERS)):
        if [network, ratio, RECOVERED.format(method)] not in [row[:3] for row in rows]:
            prepared = prepare(model, calibration, METHODS[method][0], tmp_path)
            result = facts.recover(facts.compress(prepared, ratio=ratio), calibration, minutes=RECOVERY)
            found = result.model.eval()
            before = next(row[4] for row in rows_of(FILE) if row[:3] == [network, ratio, method])
            minutes = result.summary.seconds["recovery"] / 60
            row = [before, top1(found, judged), distance(model, found, judged), minutes]
            rows.append([network, ratio, RECOVERED.format(method), *row])
            text = RECOVERED_TEXT.format(minutes=RECOVERY, threads=torch.get_num_threads())
            write_table(rows, RECOVERED_COLUMNS, RECOVERED_FILE, text)
    points = {(ratio, method): top1 for _, ratio, method, _, top1, *_ in rows}
    gained = [points[ratio, RECOVERED.format(UNITS)] - points[ratio, RECOVERED.format(LAYERS)] for ratio in (0.6, 0.5)]
    assert min(gained) > 0, points


@pytest.mark.parametrize("network", NETWORKS)
def test_choices_by_which_the_defaults_are_made(network, tmp_path):
    model, calibration = load_network(network), load_photos("calibration", network=network)
    photos, rows = load_photos("validation", 0, 2, network), rows_of(CHOICES_FILE)
    prepared = prepare(model, calibration, "units", tmp_path)
    for (row, share, rounds), ratio in itertools.product(CHOICES, RATIOS):
        choice = [network, row, share, len(rounds) + 1, ratio]
        if choice not in [row[:5] for row in rows] and ratio < min(rounds, default=1):
            estimator, budget = FACTS(shrinkage_row=row, plain_share=share), facts.Budget(rounds=rounds)
            found = facts.compress(prepared, estimator=estimator, ratio=ratio, budget=budget).model.eval()
            rows.append([*choice, top1(found, photos), distance(model, found, photos)])
            write_choices(pd.DataFrame(rows, columns=CHOICES_COLUMNS))


def write_choices(table):
    """The long table, and a page with a column for each ratio."""
    with replacing(RESULTS / f"{CHOICES_FILE}.csv") as path:
        table.to_csv(path, index=False)
    wide = table.pivot(index=CHOICES_COLUMNS[:4], columns="ratio", values=["top1", "distance"]).sort_index(axis=1)
    wide.columns = [f"{metric}, {ratio}" for metric, ratio in wide.columns]
    formats = {name: ".1f" for name in CHOICES_COLUMNS[:4]}
    formats |= {name: ".1f" if name.startswith("top1") else ".3f" for name in wide.columns}
    write_page(wide.reset_index().astype(object).fillna(""), formats, CHOICES_FILE, CHOICES_TEXT)
