"""Two published networks without their heads, compressed from photos without labels, and the same ones with heads.

`pytest tests/photos/test_encoders.py --write-results` measures for half an hour and writes `results/photos/encoders`;
what is written there already is not measured again.
"""

import itertools

import pytest

import facts
from facts.tasks.classification.encoder import judge_features
from tests.photos.data import NETWORKS, load_network, load_photos, rows_of, write_table

pytestmark = pytest.mark.external

RATIOS, PARTS = (0.8, 0.7, 0.5), ("units", "layers")
FILE = "photos/encoders"
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


def judged(network, original, reference, validation):
    """Means of relative error, cosine, and top-1 by the nearest photo and by a linear probe."""
    for each in (network, original):
        each.reset_classifier(0)
    return [found.mean().item() for found in judge_features(network, original, reference, validation).values()]


@pytest.mark.filterwarnings("ignore:The number of unique classes")  # one photo of each, for the probe
@pytest.mark.parametrize("network", NETWORKS)
def test_encoders_are_compressed_without_labels(network, tmp_path):
    reference, validation = (load_photos(split, network=network) for split in ("calibration", "validation"))
    images, rows = [images for images, _ in reference], rows_of(FILE)

    def add(*row_and_network):
        *row, compressed = row_and_network
        rows.append([network, *row, *judged(compressed, load_network(network), reference, validation)])
        write_table(rows, COLUMNS, FILE, TEXT)

    if [network, 1.0] not in [row[:2] for row in rows]:
        add(1.0, "original", "", load_network(network))
    for parts, outputs in itertools.product(PARTS, ("features", "classes")):
        left = [ratio for ratio in RATIOS if [network, ratio, parts, outputs] not in [row[:4] for row in rows]]
        if not left:
            continue
        model = load_network(network)
        if outputs == "features":
            model.reset_classifier(0)
        prepared = facts.prepare(model, images, parts=parts, held_out=(), execution=facts.Execution(cache=tmp_path))
        for ratio in left:
            add(ratio, parts, outputs, facts.compress(prepared, ratio=ratio).model.eval())
    error = {tuple(row[1:4]): row[4] for row in rows if row[0] == network}
    for ratio in RATIOS[1:]:
        assert error[ratio, "units", "features"] < error[ratio, "layers", "features"]
