"""Image classifiers of transformers, on the batches that its data sets, collators and loaders make."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import facts
from facts.calibration.data import Batches
from facts.modules.networks import run
from tests.networks import make_image_classifier

transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")
datasets = pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")

PIXELS = np.random.default_rng(0).normal(size=(12, 3, 32, 32)).astype(np.float32)
LABELS = [index % 5 for index in range(12)]
SAMPLES = [
    {"pixel_values": torch.from_numpy(pixels), "labels": label} for pixels, label in zip(PIXELS, LABELS, strict=True)
]


def pictures():
    """A data set with images and labels, which a processor turns into tensors when they are read."""
    from PIL import Image

    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)) for _ in LABELS]
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    data = datasets.Dataset.from_dict({"image": images, "label": LABELS})
    data.set_transform(lambda rows: {**processor(rows["image"], return_tensors="pt"), "label": rows["label"]})
    return data


def trainer_loader():
    arguments = transformers.TrainingArguments("unused", per_device_train_batch_size=4, use_cpu=True, report_to=[])
    return transformers.Trainer(make_image_classifier(), arguments, train_dataset=SAMPLES).get_train_dataloader()


LOADERS = {
    "default_data_collator": lambda: DataLoader(
        SAMPLES, batch_size=4, collate_fn=transformers.default_data_collator, shuffle=True
    ),
    "set_transform": lambda: DataLoader(pictures(), batch_size=4, shuffle=True),
    "trainer": trainer_loader,
    "processor": lambda: [transformers.BatchFeature({"pixel_values": PIXELS, "labels": np.array(LABELS)})],
    "pairs": lambda: [(transformers.BatchFeature({"pixel_values": PIXELS}), torch.tensor(LABELS))],
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_inputs_by_name_and_labels_the_same_in_every_pass(name):
    batches = Batches(LOADERS[name](), make_image_classifier())
    first, second = ([(inputs, labels) for inputs, labels in batches] for _ in range(2))
    assert sorted(torch.cat([labels for _, labels in first]).tolist()) == sorted(LABELS)
    for (inputs, labels), (same_inputs, same_labels) in zip(first, second, strict=True):
        assert type(inputs) is dict and inputs.keys() == {"pixel_values"}
        images = inputs["pixel_values"]
        assert images.shape[1:] == (3, 32, 32) and images.dtype == torch.float32
        assert images.equal(same_inputs["pixel_values"]) and labels.equal(same_labels)


def test_inputs_by_name_are_compressed_as_pairs_are():
    """Pairs of tensors need nothing of transformers but the logits."""
    images = torch.from_numpy(PIXELS)
    by_name, in_pairs, others = (
        facts.compress(make_image_classifier(), [batch])
        for batch in (
            {"pixel_values": PIXELS, "labels": np.array(LABELS)},
            (images, torch.tensor(LABELS)),
            (images, torch.tensor(LABELS).flip(0)),
        )
    )
    with torch.no_grad():
        found, expected, other = (run(result.model, images) for result in (by_name, in_pairs, others))
    assert by_name.plan == in_pairs.plan and by_name.summary.before == in_pairs.summary.before
    assert found.equal(expected) and not found.equal(other)


def test_samples_in_place_of_batches():
    for data in (pictures(), SAMPLES):
        with pytest.raises(ValueError, match=r"single samples: give batches of them, DataLoader\(dataset, batch_size"):
            facts.compress(make_image_classifier(), data)
