"""Samples that are held out: nothing but the comparison with the original depends on them."""

import logging
from operator import length_hint

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import facts
from facts.calibration.data import as_batches, divide, num_held_out
from facts.moments.losses import kl_divergence
from tests.networks import image_batches, make_model

SIZES = [16] * 10


def parts(data, model=None):
    batches = as_batches(data, model or nn.Identity())
    return divide(batches, next(iter(batches)))


def with_noise_in(data):
    """The same data, but for the samples that are held out, which are noise with other labels."""
    _, held_out = parts(data)
    noise = {image.sum().item() for images, _ in held_out for image in images}
    changed = []
    for images, labels in data:
        chosen = torch.tensor([image.sum().item() in noise for image in images])
        images, labels = images.clone(), labels.clone()
        images[chosen] = torch.randn_like(images[chosen])
        labels[chosen] = 3 - labels[chosen]
        changed.append((images, labels))
    return changed


def same_weights(first, other):
    return all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(("num_samples", "expected"), [(3, 0), (4, 1), (100, 25), (128, 32), (200, 32), (5000, 500)])
def test_a_tenth_but_at_least_32_and_no_more_than_a_quarter(num_samples, expected):
    assert num_held_out(num_samples) == expected
    numbers = torch.arange(num_samples)
    for size in (1, 7, 64):
        rest, held_out = (torch.cat([each for each, _ in part] or [numbers[:0]]) for part in parts(numbers.split(size)))
        assert sorted([*rest.tolist(), *held_out.tolist()]) == numbers.tolist()
        assert abs(len(held_out) - expected) <= 2  # the last batch may be smaller
        assert len({*held_out.diff().tolist()}) <= 2  # evenly spread


def test_each_process_finds_the_same_samples():
    whole = parts(image_batches([4, 4, 4, 3]))
    for part in whole:
        shares = [list(part.shard(rank, 2)) for rank in range(2)]
        alone = [images.sum().item() for images, _ in part]
        assert sorted(alone) == sorted(images.sum().item() for share in shares for images, _ in share)


def test_batches_that_cannot_be_divided_are_held_out_whole():
    data = [(torch.randn(16, 3), [{"boxes": torch.randn(number, 4)}]) for number in range(9)]
    rest, held_out = parts(data)
    assert len(list(rest)) == 7 and len(list(held_out)) == 2


def test_data_of_unknown_length():
    class Stream:
        def __iter__(self):
            return iter(image_batches(SIZES))

    assert length_hint(Stream()) == 0
    assert sum(len(images) for images, _ in parts(Stream())[1]) == 32


def test_a_compression_does_not_depend_on_them():
    data = image_batches(SIZES)
    results = [facts.compress(make_model(), each, ratio=0.5) for each in (data, with_noise_in(data))]
    plain, noisy = results
    assert plain.plan == noisy.plan and same_weights(plain.model, noisy.model)
    assert plain.summary.distance.mean != noisy.summary.distance.mean
    assert plain.summary.distance.num_samples == noisy.summary.distance.num_samples == 32
    taught = [facts.recover(plain, each, epochs=1, views=False) for each in (data, with_noise_in(data))]
    assert same_weights(taught[0].model, taught[1].model)
    assert taught[0].summary.recovery.before == plain.summary.distance.mean


def test_the_distance_is_theirs_with_its_standard_error(caplog):
    data = image_batches(SIZES)
    result = facts.compress(make_model(), data, ratio=0.9)
    assert result.summary.seconds["comparison"] > 0 and "information is lost" not in caplog.text
    images = torch.cat([images for images, _ in parts(data)[1]])
    with torch.no_grad():
        pairs = zip(*(model.eval()(images).split(1) for model in (make_model(), result.model)), strict=True)
        errors = torch.stack([kl_divergence(*pair) for pair in pairs]).double()
    found = result.summary.distance
    assert found.mean == pytest.approx(errors.mean().item())
    assert found.standard_error == pytest.approx(errors.std().item() / len(errors) ** 0.5)
    assert f"{found.mean:.4g} ± {found.standard_error:.2g} from the original's, mean over 32 held-out samples" in str(
        result
    )
    assert f"the search's sum over layers was {result.summary.predicted:.4g}" in str(result)


def test_too_few_to_tell(caplog):
    with caplog.at_level(logging.WARNING):
        assert facts.compress(make_model(), image_batches([3])).summary.distance is None
    assert "too few to hold some out" in caplog.text
    result = facts.compress(make_model(), image_batches([8]))
    assert result.summary.distance.num_samples == 2 and "too few samples to tell" in str(result)
    recovered = facts.recover(result, image_batches([3]), epochs=1)
    assert recovered.summary.distance is None and "too few samples to hold some out" in str(recovered)


def test_data_that_change_from_pass_to_pass(caplog):
    images, labels = image_batches([160])[0]
    order = torch.Generator().manual_seed(0)
    shuffled = DataLoader(TensorDataset(images, labels), 16, shuffle=True, generator=order)
    with caplog.at_level(logging.WARNING):
        facts.compress(make_model(), shuffled)
    assert "the data differ from pass to pass" in caplog.text


def test_outputs_that_do_not_depend_on_the_inputs(caplog):
    model = make_model()
    nn.init.zeros_(model.head.weight)
    with caplog.at_level(logging.WARNING):
        result = facts.compress(model, image_batches(SIZES))
    assert "hardly depend on its inputs" in caplog.text and result.summary.distance.share is None


def test_prepared_with_data_of_its_own():
    data = image_batches(SIZES)
    prepared = facts.prepare(make_model(), data[:8], held_out=data[8:])
    assert sum(len(images) for images, _ in prepared.data) == 128
    assert facts.compress(prepared).summary.distance.num_samples == 32
