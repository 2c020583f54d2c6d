"""Samples that are held out, on which nothing but the comparison with the original depends; and that comparison."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import facts
from facts.calibration.data import Data, num_held_out
from facts.calibration.outputs import distance
from facts.moments.losses import binary_kl_divergence, kl_divergence, squared_error
from tests.networks import UNIFORM, image_batches, make_model, same_weights
from tests.toys import Net

SIZES = [16] * 10


def parts(data, model=None):
    return Data.of(data, model or nn.Identity()).divided()


def with_noise_in(data):
    """The same data, but for the samples that are held out, which are noise with other labels."""
    _, held_out = parts(data)
    noise = {image.sum().item() for images, _ in held_out for image in images}
    changed = []
    for images, labels in data:
        chosen = torch.tensor([image.sum().item() in noise for image in images])
        images = torch.where(chosen[:, None, None, None], torch.randn_like(images), images)
        changed.append((images, torch.where(chosen, 3 - labels, labels)))
    return changed


@pytest.mark.parametrize(("num_samples", "expected"), [(3, 0), (4, 1), (100, 25), (128, 32), (200, 32), (5000, 500)])
def test_a_tenth_but_at_least_32_and_no_more_than_a_quarter(num_samples, expected):
    assert num_held_out(num_samples) == expected
    numbers = torch.arange(num_samples)
    for size in (1, 7, 64):
        rest, held_out = (torch.cat([each for each, _ in part] or [numbers[:0]]) for part in parts(numbers.split(size)))
        assert sorted([*rest.tolist(), *held_out.tolist()]) == numbers.tolist()
        assert abs(len(held_out) - expected) <= 2  # the last batch may be smaller
        assert len({*held_out.diff().tolist()}) <= 2  # evenly spread


def test_batches_that_cannot_be_divided_are_held_out_whole():
    rest, held_out = parts([(torch.randn(16, 3), [{"boxes": torch.randn(number, 4)}]) for number in range(9)])
    assert len(list(rest)) == 7 and len(list(held_out)) == 2


def test_a_compression_does_not_depend_on_them():
    data = image_batches(SIZES)
    plain, noisy = (facts.compress(make_model(), each, ratio=0.5) for each in (data, with_noise_in(data)))
    assert plain.plan == noisy.plan and same_weights(plain.model, noisy.model)
    assert plain.summary.distance.mean != noisy.summary.distance.mean
    assert plain.summary.distance.num_samples == noisy.summary.distance.num_samples == 32
    taught = [facts.recover(plain, each, epochs=1, views=False) for each in (data, with_noise_in(data))]
    assert same_weights(taught[0].model, taught[1].model)
    assert taught[0].summary.recovery.before == plain.summary.distance.mean


def test_the_distance_is_theirs_with_its_standard_error(caplog):
    data = image_batches(SIZES)
    result = facts.compress(make_model(), data, ratio=0.9)
    assert result.summary.seconds["comparison"] > 0 and "held-out samples" not in caplog.text
    images = torch.cat([images for images, _ in parts(data)[1]])
    pairs = zip(*(model.eval()(images).split(1) for model in (make_model(), result.model)), strict=True)
    errors = torch.stack([kl_divergence(*pair) for pair in pairs]).double()
    found = result.summary.distance
    assert found.mean == pytest.approx(errors.mean().item())
    assert found.standard_error == pytest.approx(errors.std().item() / len(errors) ** 0.5)
    assert (
        f"on 32 held-out samples, the outputs lose {found.share:.1%} of the original's information "
        f"(mean distance {found.mean:.4g} ± {found.standard_error:.2g})"
    ) in str(result)
    assert f"{result.summary.predicted:.4g}" not in str(result)  # a sum over layers means little beside it


def test_too_few_to_tell(caplog):
    assert facts.compress(make_model(), image_batches([3])).summary.distance is None
    assert "too few to hold some out" in caplog.text
    result = facts.compress(make_model(), image_batches([8]))
    assert result.summary.distance.num_samples == 2 and "too few samples to tell" in str(result)
    recovered = facts.recover(result, image_batches([3]), epochs=1)
    assert recovered.summary.distance is None and "too few samples to hold some out" in str(recovered)


class Augmented(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, number):
        return torch.rand(3), number


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("order", [{}, {"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}])
def test_orders_and_random_transforms_are_the_same_in_every_pass(order, workers):
    loader, alone = DataLoader(Augmented(), 16, **order, **workers), DataLoader(Augmented(), 16, **order)
    first, again, others = ([*parts(each)[0]] for each in (loader, loader, alone))
    for batch, same, other in zip(first, again, others, strict=True):
        assert batch[0].equal(same[0]) and batch[1].equal(same[1]) and batch[1].equal(other[1])


def compare(original, changed, error, sizes=(5, 1, 6)):
    """The distance of networks with given outputs, by the index of each sample."""
    indices = [(part, None) for part in torch.arange(sum(sizes)).split(list(sizes))]
    networks = (Net(lambda net, index: net.outputs[index], outputs=nn.Parameter(each)) for each in (original, changed))
    return distance(*networks, indices, error, torch.float32)


@pytest.mark.parametrize("shape", [(12, 5), (12, 3, 5)])
def test_information_in_class_logits(shape, monkeypatch):
    """Compared with loops over samples; in chunks as for language models too."""
    monkeypatch.setattr("facts.moments.losses.CHUNK", 10)
    original, changed = (3 * torch.randn(shape, dtype=torch.float64) for _ in range(2))
    rows, others = (logits.reshape(-1, 5).softmax(dim=1) for logits in (original, changed))
    mean = rows.mean(dim=0)
    error = sum(row @ (row / other).log() for row, other in zip(rows, others, strict=True))
    information = sum(row @ (row / mean).log() for row in rows)
    found = compare(original, changed, kl_divergence)
    assert (found.mean, found.share) == pytest.approx((error.item() / 12, (error / information).item()))
    assert found.num_samples == 12


def test_outputs_that_do_not_depend_on_the_input_lose_everything():
    original = 3 * torch.randn(12, 5, dtype=torch.float64)
    constant = original.softmax(dim=1).mean(dim=0).log().expand(12, 5)
    assert compare(original, constant, kl_divergence).share == pytest.approx(1)
    assert compare(original, original, kl_divergence).share == pytest.approx(0)
    chances = original.sigmoid().mean(dim=0).logit().expand(12, 5)
    assert compare(original, chances, binary_kl_divergence).share == pytest.approx(1)
    assert compare(original, 0 * original, squared_error).share == 1
    original[:3] = 0
    assert compare(original, 2 * original, squared_error).mean == 9 / 12
    assert compare(original, original + 1 * (original == 0), squared_error).mean == 3 / 12
    assert compare(original, original, lambda first, second: (first - second).sum()).share is None


def test_outputs_that_become_nan_are_an_error_whatever_compares_them():
    original = torch.randn(12, 5)
    changed = original.clone()
    original[2, 0] = changed[2, 0] = -torch.inf  # as the original's are
    assert compare(original, changed, lambda first, second: (first - second)[:, 1].sum()).mean == 0
    changed[3, 0] = torch.nan
    with pytest.raises(ValueError, match="gives NaN or infinity where the original's outputs are finite: try form="):
        compare(original, changed, lambda first, second: (first - second)[:, 1].sum())


def test_samples_whose_outputs_are_nan_in_the_original_do_not_count(caplog):
    original, changed = torch.randn(2, 12, 5)
    original[3] = changed[3] = torch.nan
    found, others = compare(original, changed, kl_divergence), torch.arange(12) != 3
    assert found.num_samples == 11 and "1 of 12 samples, whose outputs are NaN in the original" in caplog.text
    expected = compare(original[others], changed[others], kl_divergence, (11,))
    assert (found.mean, found.share) == pytest.approx((expected.mean, expected.share))


def test_a_budget_that_is_too_small(caplog):
    untrained = facts.compress(make_model(), image_batches(SIZES), estimator="pela", ratio=0.3, **UNIFORM).summary
    assert untrained.distance.share > 1 and not untrained.is_far and "hardly vary: is it trained?" in str(untrained)
    model = make_model()
    for parameter in model.parameters():
        parameter.data *= 4
    result = facts.compress(model, image_batches(SIZES), estimator="pela", ratio=0.3, **UNIFORM)
    assert result.summary.distance.is_too_far
    options = (
        "try the form pivoted, the parts units and tokens, the search cors_fisher, ten minutes of recovery, "
        "or a larger budget"
    )
    assert f"); {options}" in caplog.text and f"the outputs are far off: {options}" in str(result)
    assert facts.compress(make_model(), estimator="pela").summary.distance is None  # nothing to compare on
