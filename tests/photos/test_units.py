"""Two published networks and real photos: units against layers, and what a second round is worth.

`pytest tests/photos/test_units.py --write-results` measures for an hour and writes `results/photos/units`; what is
written there already is not measured again.
"""

import itertools

import pandas as pd
import pytest
import torch

import facts
from facts.moments.losses import kl_divergence
from tests.photos.data import NETWORKS, RESULTS, load_network, load_photos, top1, write_table

pytestmark = pytest.mark.external

RATIOS = (0.8, 0.7, 0.6, 0.5)
LAYERS, ONE_ROUND, UNITS = "layers, pivoted", "units, in one round", "units"
METHODS = {
    LAYERS: ("layers", None),
    ONE_ROUND: ("units", ()),
    UNITS: ("units", None),  # with the default's second round at 0.6 and 0.5
}
LEAST_GAINED = {0.7: 0.0, 0.6: 8.0, 0.5: 20.0}  # points of top-1, by units over layers
FILE = "photos/units"
COLUMNS = {
    "network": "", "ratio": ".1f", "method": "", "chosen": ".1f", "judged": ".1f", "distance": ".3f", "minutes": ".1f"
}  # fmt: skip
TEXT = (
    "# Units on two published networks\n\n"
    "Top-1 in percent on validation photos, without any training, by the fraction of the linear layers' FLOPs that "
    "remains: on the half by which defaults are chosen, and on the other, 325 photos each (standard error up to 2.8); "
    "the mean distance of the outputs from the original's on the other half. FACTS and CoRS-Fisher from 1,000 more "
    "photos. Minutes are those of all work on {threads} threads, less what the cache held. Written by "
    "`tests/photos/test_units.py`."
)


@torch.inference_mode()
def distance(original, network, batches):
    """The mean KL divergence of the outputs from the original's."""
    found = [kl_divergence(original(images), network(images)).item() for images, _ in batches]
    return sum(found) / sum(len(images) for images, _ in batches)


@pytest.mark.parametrize("network", NETWORKS)
def test_units_keep_more_than_layers_of_the_same_flops(network, tmp_path):
    model, calibration = load_network(network), load_photos("calibration", network=network)
    chosen, judged = (load_photos("validation", start, 2, network) for start in (0, 1))
    file = RESULTS / f"{FILE}.csv"
    rows = pd.read_csv(file).values.tolist() if file.exists() else []

    def add(ratio, method, compressed, minutes=0.0):
        found = top1(compressed, chosen), top1(compressed, judged), distance(model, compressed, judged)
        rows.append([network, ratio, method, *found, minutes])
        write_table(rows, COLUMNS, FILE, TEXT.format(threads=torch.get_num_threads()))

    if [network, 1.0, "dense"] not in [row[:3] for row in rows]:
        add(1.0, "dense", model)
    prepared = {
        parts: facts.prepare(model, calibration, parts=parts, held_out=(), execution=facts.Execution(cache=tmp_path))
        for parts in ("layers", "units")
    }
    for method, ratio in itertools.product(METHODS, RATIOS):
        parts, rounds = METHODS[method]
        if [network, ratio, method] not in [row[:3] for row in rows]:
            result = facts.compress(prepared[parts], ratio=ratio, budget=facts.Budget(rounds=rounds))
            add(ratio, method, result.model.eval(), sum(result.summary.seconds.values()) / 60)
    points = {(ratio, method): top1 for name, ratio, method, _, top1, *_ in rows if name == network}
    gained = {ratio: points[ratio, UNITS] - points[ratio, LAYERS] for ratio in LEAST_GAINED}
    assert all(gained[ratio] >= least for ratio, least in LEAST_GAINED.items()), points
