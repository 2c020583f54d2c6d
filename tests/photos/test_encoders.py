"""Two published networks without their heads, compressed from photos without labels, beside those with heads.

`pytest tests/photos/test_encoders.py --write-results` measures for half an hour and writes `results/photos/encoders`;
what is written there already is not measured again.
"""

import itertools

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import cosine_similarity

import facts
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
    "mean relative squared error and cosine to the original's features; top-1 in percent (standard error up to 2.0) of "
    "the nearest of the 1,000 photos, one of each class, by cosine, and of a linear classifier fitted to them. Written "
    "by `tests/photos/test_encoders.py`."
)


@torch.inference_mode()
def features_of(network, batches):
    """Features `[N, D]` and labels `[N]`."""
    found = [(network.forward_head(network.forward_features(images), pre_logits=True), y) for images, y in batches]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def judged(network, original, reference, validation):
    """Error and cosine to the original's features; top-1 of the nearest reference photo, and of a linear probe."""
    (known, classes), (features, labels) = features_of(network, reference), features_of(network, validation)
    expected, _ = features_of(original, validation)
    error = ((features - expected).square().sum(1) / expected.square().sum(1)).mean().item()
    cosine = cosine_similarity(features, expected).mean().item()
    nearest = KNeighborsClassifier(1, metric="cosine")
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    top1 = (100 * each.fit(known, classes).score(features, labels) for each in (nearest, probe))
    return [error, cosine, *top1]


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
