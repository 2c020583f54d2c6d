"""Loaders give data in many forms, those of transformers too; all of them mean the same to the network."""

import tempfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import facts
from facts.calibration.data import Data
from facts.modules.networks import run
from facts.moments.losses import SampledLabels, summed_cross_entropy
from tests.devices.pretended import pretended_cuda
from tests.networks import image_batches, make_causal_lm, make_image_classifier, make_model, same_weights
from tests.refusals import refused, refuses

TOKENS = torch.arange(24).reshape(3, 8)
GOOD = torch.ones(4, 3, 8, 8)
QUICK = {"search": "uniform", "ratio": 0.6}
PIXELS = np.random.default_rng(0).normal(size=(12, 3, 32, 32)).astype(np.float32)
LABELS = [index % 5 for index in range(12)]
SAMPLES = [{"pixel_values": each, "labels": y} for each, y in zip(torch.from_numpy(PIXELS), LABELS, strict=True)]


@pytest.fixture
def model():
    return make_model(torch.float32)


def test_data_without_labels_get_drawn_ones(model):
    """A loader of images alone, and one of tuples with nothing else in them."""
    batches = image_batches([4, 4], dtype=torch.float32)
    drawn = facts.compress(model, batches, loss=SampledLabels(summed_cross_entropy)).model
    images = [images for images, _ in batches]
    for data, expected in ((images, True), ([(batch,) for batch in images], True), (batches, False)):
        assert same_weights(facts.compress(model, data).model, drawn) == expected


UNREADABLE = (
    ((1, 2, 3), r"must be \(inputs, targets\), .*, got a tuple of 3$"),
    ((["a cat", "a dog"], torch.tensor([0, 1])), r"hold no tensor, but list: give \(inputs, targets\)"),
    ({"text": ["a cat"], "label": torch.tensor([0])}, "hold no tensor, but dict of text: list: give"),
    ({"text": ["a cat"], "image": torch.ones(1, 3, 8, 8)}, r"dict of text: list, image: float32 \[1, 3, 8, 8\] \("),
    ({"image": torch.ones(4, 3, 8, 8)}, r"dict of image: float32 \[4, 3, 8, 8\] \(.*\): .* or a mapping if"),
    (torch.ones(4, 1, 8, 8), r"cannot read the first sample of float32 \[4, 1, 8, 8\] \(.*in the type of the"),
)
test_what_the_network_cannot_read = refused(*UNREADABLE, by=lambda batch, model: facts.compress(model, [batch, batch]))
test_nor_later = refused(*UNREADABLE, by=lambda batch, model: facts.compress(model, [GOOD, batch, batch]))
FOLLOW = "the targets of a language model are the tokens that follow"
test_texts_are_not_padded_and_targets_follow = refused(
    ([{"input_ids": TOKENS, "attention_mask": TOKENS % 8 < 5}], "padded, .*: cut them into windows of one length"),
    ([(TOKENS, TOKENS)], FOLLOW),
    ([(TOKENS, torch.ones_like(TOKENS))], FOLLOW),
    (TOKENS.flatten(), r"tokens must come as windows \[N, T\], not as int64 \[24\]"),
    by=lambda data: facts.compress(make_causal_lm(), data),
)
SINGLE = r"single samples: give batches of them, DataLoader\(dataset, batch_size"
test_samples_in_place_of_batches = refused(
    (lambda transformers: facts.compress(make_image_classifier(), pictures(transformers)), SINGLE),
    (lambda: facts.compress(make_image_classifier(), SAMPLES), SINGLE),
)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, data: facts.compress(model, data, **QUICK),
        lambda model, data: facts.compress(facts.prepare(model, [GOOD], held_out=data), **QUICK),
        lambda model, data: facts.compress(model, [GOOD], sensitivity=data, search="cors"),
        lambda model, data: facts.recover(facts.compress(model, [GOOD], **QUICK), data, epochs=1),
    ],
)
def test_so_is_a_later_batch_of_any_data(use, model):
    odd = [GOOD, torch.ones(4, 3, 12, 12)]
    for data in (odd, DataLoader(odd, batch_size=None)):  # a list is looked through beforehand
        refuses(r"EveryShape cannot read .* of float32 \[\d, 3, 12, 12\] \(", use, model, data)


def test_every_form_of_tokens():
    model = make_causal_lm()
    for more in (None, {}, {"labels": TOKENS, "attention_mask": TOKENS >= 0}):
        ((tokens, targets),) = Data.of([TOKENS if more is None else {"input_ids": TOKENS, **more}], model)
        assert tokens.equal(TOKENS) and targets.equal(facts.next_tokens(TOKENS))
    ((_, targets),) = Data.of([{"input_ids": TOKENS, "labels": TOKENS.masked_fill(TOKENS % 8 < 3, -100)}], model)
    assert targets[0].tolist() == [-100, -100, 3, 4, 5, 6, 7, -100]


def test_an_encoder_and_a_decoder(transformers):
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    result = facts.compress(model, [{"input_ids": TOKENS, "labels": TOKENS}], ratio=0.7)
    assert {name.partition(".")[0] for name in result.plan} == {"encoder", "decoder"}
    assert "lm_head" in result.skipped


@pytest.mark.parametrize(
    "make",
    [
        lambda images, _: images,
        lambda images, _: images.numpy(),
        lambda images, _: np.broadcast_to(images.numpy(), images.shape),  # read-only
        TensorDataset,
    ],
)
def test_samples_that_come_without_batches(model, make):
    (images, labels), *_ = image_batches([70], dtype=torch.float32)
    batches = Data.of(make(images, labels), model)
    assert [len(part) for part, _ in batches] == [64, 6]
    assert torch.cat([part for part, _ in batches]).equal(images)


def test_workers_and_pinned_memory_feed_a_gpu(model):
    data = TensorDataset(torch.zeros(70, 3, 8, 8), torch.zeros(70))
    options = [Data.of(data, model).batches.options]
    with pretended_cuda():
        model = model.to("cuda")
        given = data, TensorDataset(*(x.to("cuda") for x in data[:]))
        options += [Data.of(each, model).batches.options for each in given]
    assert [each["pin_memory"] for each in options] == [bool(each["num_workers"]) for each in options]
    assert [each["pin_memory"] for each in options] == [False, True, False]


def test_inputs_that_ask_for_gradients_get_none():
    batches = [(images.requires_grad_(), labels) for images, labels in image_batches([8, 8])]
    result = facts.compress(make_model(), batches, search="comcat", ratio=0.5)
    facts.recover(result, batches, epochs=1, batch_size=4, views=False)
    assert all(images.grad is None and images.requires_grad for images, _ in batches)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")


def pictures(transformers):
    """A data set with images and labels, which a processor turns into tensors when they are read."""
    datasets = pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)) for _ in LABELS]
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    data = datasets.Dataset.from_dict({"image": images, "label": LABELS})
    data.set_transform(lambda rows: {**processor(rows["image"], return_tensors="pt"), "label": rows["label"]})
    return data


def trainer_loader(transformers):
    folder = tempfile.gettempdir()  # which it wants, though it writes nothing
    arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, report_to=[])
    return transformers.Trainer(make_image_classifier(), arguments, train_dataset=SAMPLES).get_train_dataloader()


LOADERS = {
    "default_data_collator": lambda library: DataLoader(SAMPLES, 4, True, collate_fn=library.default_data_collator),
    "set_transform": lambda library: DataLoader(pictures(library), 4, shuffle=True),
    "trainer": trainer_loader,
    "processor": lambda library: [library.BatchFeature({"pixel_values": PIXELS, "labels": np.array(LABELS)})],
    "pairs": lambda library: [(library.BatchFeature({"pixel_values": PIXELS}), torch.tensor(LABELS))],
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_inputs_by_name_and_labels_the_same_in_every_pass(name, transformers):
    batches = Data.of(LOADERS[name](transformers), make_image_classifier())
    first, second = ([(inputs, labels) for inputs, labels in batches] for _ in range(2))
    assert sorted(torch.cat([labels for _, labels in first]).tolist()) == sorted(LABELS)
    for (inputs, labels), (same_inputs, same_labels) in zip(first, second, strict=True):
        assert type(inputs) is dict and inputs.keys() == {"pixel_values"}
        images = inputs["pixel_values"]
        assert images.shape[1:] == (3, 32, 32) and images.dtype == torch.float32
        assert images.equal(same_inputs["pixel_values"]) and labels.equal(same_labels)


def test_inputs_by_name_are_compressed_as_pairs_are():
    """Pairs of tensors need nothing of transformers but the logits."""
    images, labels = torch.from_numpy(PIXELS), torch.tensor(LABELS)
    given = {"pixel_values": PIXELS, "labels": np.array(LABELS)}, (images, labels), (images, labels.flip(0))
    results = [facts.compress(make_image_classifier(), [batch], search="uniform") for batch in given]
    by_name, in_pairs, _ = results
    found, expected, other = (run(result.model, images) for result in results)
    assert by_name.plan == in_pairs.plan and by_name.summary.before == in_pairs.summary.before
    assert found.equal(expected) and not found.equal(other)
