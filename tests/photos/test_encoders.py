"""Two published networks without their heads, compressed from photos without labels, and the same ones with heads.

Writes `results/photos/encoders` in half an hour.
"""

import copy
import itertools

import pytest

import facts
from facts.tasks.classification.base import evaluate_features
from tests.photos.data import NETWORKS, Table, load_all, load_network

pytestmark = pytest.mark.external

RATIOS = (0.8, 0.7, 0.5)
COLUMNS = {
    "network": "", "ratio": ".1f", "parts": "", "outputs": "", "error": ".3f", "cosine": ".3f", "nearest": ".1f",
    "probe": ".1f",
}  # fmt: skip
TEXT = (
    "# Encoders: two published networks without their heads\n\n"
    "Compressed by `facts.compress` with its defaults from 1,000 photos without labels, without training: without the "
    "head, by the features, and with it, by the classes, whose head was taken off afterwards. On 650 other photos: the "
    "mean relative squared error and cosine to the original's features; top-1 in percent (standard error up to 2.0) by "
    "the nearest of the 1,000 photos, one of each class, and by a linear classifier fitted to them. Written by "
    "`tests/photos/test_encoders.py`."
)


@pytest.mark.filterwarnings("ignore:The number of unique classes")  # one photo of each, for the probe
@pytest.mark.parametrize("network", NETWORKS)
def test_encoders_are_compressed_without_labels(network, tmp_path):
    dense, reference, validation = load_all(network)
    images, table = [images for images, _ in reference], Table("photos/encoders", COLUMNS, TEXT, resume=True)

    def add(ratio, parts, outputs, compressed):
        original = load_network(network)
        for each in (compressed, original):
            each.reset_classifier(0)
        found = evaluate_features(compressed, original, reference, validation)
        table.add(network, ratio, parts, outputs, *(values.mean().item() for values in found.values()))

    if table.lacks(network, 1.0):
        add(1.0, "original", "", load_network(network))
    for parts, outputs in itertools.product(("units", "layers"), ("features", "classes")):
        model = copy.deepcopy(dense)
        if outputs == "features":
            model.reset_classifier(0)
        prepared = facts.prepare(model, images, parts=parts, held_out=(), execution=facts.Execution(cache=tmp_path))
        for ratio in RATIOS:
            if table.lacks(network, ratio, parts, outputs):
                add(ratio, parts, outputs, facts.compress(prepared, ratio=ratio).model.eval())
    error = {tuple(row[1:4]): row[4] for row in table.rows if row[0] == network}
    for ratio in RATIOS[1:]:
        assert error[ratio, "units", "features"] < error[ratio, "layers", "features"]
