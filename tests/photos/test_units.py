"""Two published networks and real photos: units against layers, and the choice of the defaults of units.

Writes `results/photos/units`, `units_recovered` and `results/defaults/units` in four hours.
"""

import itertools

import pytest
import torch

import facts
from facts.compression.allocation import FIRST, PAYS_BELOW
from facts.estimators import FACTS
from facts.estimators.base import PLAIN_SHARE_OF_UNITS, ROW_OF_UNITS
from facts.moments.losses import kl_divergence
from tests.photos.data import NETWORKS, Table, load_network, load_photos, top1, write_page

pytestmark = pytest.mark.external

RATIOS = (0.8, 0.7, 0.6, 0.5)
LAYERS, ONE_ROUND, UNITS = "layers, pivoted", "units, in one round", "units"
METHODS = {
    LAYERS: ("layers", None),
    ONE_ROUND: ("units", ()),
    UNITS: ("units", None),  # with the default's second round at 0.6 and 0.5
}
RECOVERY = 10.0  # minutes
COLUMNS = {"network": "", "ratio": ".1f", "method": "", "chosen": ".1f", "judged": ".1f", "distance": ".3f"}
TEXT = (
    "# Units on two published networks\n\n"
    "Top-1 in percent on validation photos, without any training, by the fraction of the linear layers' FLOPs that "
    "remains: on the half by which defaults are chosen, and on the other, 325 photos each (standard error up to 2.8); "
    "the mean distance of the outputs from the original's on the other half. FACTS and CoRS-Fisher from 1,000 more "
    "photos. Written by `tests/photos/test_units.py`."
)
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


def load(network, start):
    """A network, the photos to calibrate on, and a half of the validation photos."""
    photos = load_photos("calibration", network=network), load_photos("validation", start, 2, network)
    return load_network(network), *photos


def prepare(model, calibration, parts, cache):
    return facts.prepare(model, calibration, parts=parts, held_out=(), execution=facts.Execution(cache=cache))


@torch.inference_mode()
def distance(original, network, batches):
    """The mean KL divergence of the outputs from the original's."""
    found = [kl_divergence(original(images), network(images)).item() for images, _ in batches]
    return sum(found) / sum(len(images) for images, _ in batches)


@pytest.mark.parametrize("network", NETWORKS)
def test_units_keep_more_than_layers_of_the_same_flops(network, tmp_path):
    model, calibration, chosen = load(network, 0)
    judged, table = load_photos("validation", 1, 2, network), Table("photos/units", COLUMNS, TEXT, resume=True)

    def add(ratio, method, compressed):
        found = top1(compressed, chosen), top1(compressed, judged), distance(model, compressed, judged)
        table.add(network, ratio, method, *found)

    if table.lacks(network, 1.0, "dense"):
        add(1.0, "dense", model)
    prepared = {parts: prepare(model, calibration, parts, tmp_path) for parts in ("layers", "units")}
    for method, ratio in itertools.product(METHODS, RATIOS):
        parts, rounds = METHODS[method]
        is_same = method == ONE_ROUND and ratio > PAYS_BELOW  # as the default
        if not is_same and table.lacks(network, ratio, method):
            result = facts.compress(prepared[parts], ratio=ratio, budget=facts.Budget(rounds=rounds))
            add(ratio, method, result.model.eval())
    found = table.frame.set_index(["network", "ratio", "method"]).judged[network]
    assert found[0.5, UNITS] >= found[0.5, LAYERS] + 20, found


def test_recovered_units_stay_ahead_of_recovered_layers(tmp_path):
    network = "deit_tiny"
    model, calibration, judged = load(network, 1)
    measured = Table("photos/units", COLUMNS, TEXT, resume=True).frame.set_index(["network", "ratio", "method"]).judged
    text = RECOVERED_TEXT.format(minutes=RECOVERY, threads=torch.get_num_threads())
    table = Table("photos/units_recovered", RECOVERED_COLUMNS, text, resume=True)
    for ratio, method in itertools.product(reversed(RATIOS), (UNITS, LAYERS)):
        if table.lacks(network, ratio, f"{method}, recovered"):
            prepared = prepare(model, calibration, METHODS[method][0], tmp_path)
            result = facts.recover(facts.compress(prepared, ratio=ratio), calibration, minutes=RECOVERY)
            found, minutes = result.model.eval(), result.summary.seconds["recovery"] / 60
            after = top1(found, judged), distance(model, found, judged)
            table.add(network, ratio, f"{method}, recovered", measured[network, ratio, method], *after, minutes)
    found = table.frame.set_index(["ratio", "method"]).judged
    assert found[0.5, f"{UNITS}, recovered"] > found[0.5, f"{LAYERS}, recovered"], found


class Choices(Table):
    """The page has a column for each ratio."""

    def write_page(self):
        wide = self.frame.pivot(index=CHOICES_COLUMNS[:4], columns="ratio", values=["top1", "distance"])
        wide = wide.sort_index(axis=1)
        wide.columns = [f"{metric}, {ratio}" for metric, ratio in wide.columns]
        formats = {name: ".1f" for name in CHOICES_COLUMNS[:4]}
        formats |= {name: ".1f" if name.startswith("top1") else ".3f" for name in wide.columns}
        write_page(wide.reset_index().astype(object).fillna(""), formats, self.file, self.text)


@pytest.mark.parametrize("network", NETWORKS)
def test_choices_by_which_the_defaults_are_made(network, tmp_path):
    model, calibration, photos = load(network, 0)
    table = Choices("defaults/units", CHOICES_COLUMNS, CHOICES_TEXT, resume=True)
    prepared = prepare(model, calibration, "units", tmp_path)
    for (row, share, rounds), ratio in itertools.product(CHOICES, RATIOS):
        choice = [network, row, share, len(rounds) + 1, ratio]
        if table.lacks(*choice) and ratio < min(rounds, default=1):
            estimator, budget = FACTS(shrinkage_row=row, plain_share=share), facts.Budget(rounds=rounds)
            found = facts.compress(prepared, estimator=estimator, ratio=ratio, budget=budget).model.eval()
            table.add(*choice, top1(found, photos), distance(model, found, photos))
