import pytest
import torch
from torch import nn

from facts.calibration.selection import select_layers
from facts.estimators import ASVD, ESTIMATORS, FACTS, FLAR, GFWSVD, KFACExpand
from facts.moments import GradGram, GroupGradients, InputGram, collect_moments
from facts.moments.losses import summed_cross_entropy
from tests.by_sample import BY_SAMPLE
from tests.networks import Runs, image_batches, make_model, relative_error

# Sums over float64 in another order. Power iteration: a last step of 1e-8.
EXACT, ITERATED = 1e-12, 1e-7

EVERY = {name: estimator() for name, estimator in ESTIMATORS.items()}


def tolerance_of(name):
    return ITERATED if "gfwsvd" in name else EXACT


def factors_of(model, batches, estimator, **options):
    moments = collect_moments(model, select_layers(model).layers, batches, estimator.moments, **options)
    return {name: estimator.factors(values) for name, values in moments.items()}


def factors_of_all(model, batches, estimators=EVERY):
    """Of every estimator, from one pass over the union of their moments."""
    wanted = [moment for estimator in estimators.values() for moment in estimator.moments]
    moments = collect_moments(model, select_layers(model).layers, batches, wanted)
    return {
        name: {layer: each.factors(values) for layer, values in moments.items()} for name, each in estimators.items()
    }


def assert_same(first, second, tolerance):
    assert first.keys() == second.keys()
    for name in first:
        for side in ("A", "B"):
            left, right = getattr(first[name], side), getattr(second[name], side)
            assert (left is None) == (right is None)
            if left is not None:
                assert relative_error(left, right) < tolerance, (name, side)


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 5]])
def test_splitting_batches_changes_nothing(model, sizes):
    estimators = {**BY_SAMPLE, "gfwsvd in groups": GFWSVD(group_size=2)}
    expected, found = (factors_of_all(model, image_batches(each), estimators) for each in ([3, 3, 1], sizes))
    for name in estimators:
        assert_same(found[name], expected[name], tolerance_of(name))


@pytest.mark.parametrize(
    "estimator",
    [
        ASVD(),
        ASVD(statistic="max"),
        FLAR(covariance_shrinkage="literal"),
        FACTS(grad_clip=None),
        FACTS(normalize="none"),
        KFACExpand(),
    ],
)
def test_what_is_defined_by_batch_depends_on_batches(model, estimator):
    whole, split = (factors_of(model, image_batches(sizes), estimator) for sizes in ([6], [3, 3]))
    sides = [side for side in "AB" if getattr(whole["tokens"], side) is not None]
    assert any(relative_error(*(getattr(each["tokens"], side) for each in (split, whole))) > 1e-3 for side in sides)


def test_permuting_samples_changes_nothing(model):
    """Within one batch, and one group of GFWSVD, as the order is part of both."""
    ((images, labels),) = image_batches([7])
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    expected, found = (factors_of_all(model, [batch]) for batch in ((images, labels), (images[order], labels[order])))
    for name in EVERY:
        assert_same(found[name], expected[name], tolerance_of(name))


def test_one_pass_serves_every_estimator(model, batches):
    """The model runs once a batch, whatever is asked for, and each estimator gets what it gets alone."""
    runs = Runs(model)
    together = factors_of_all(model, batches)
    assert runs.number == len(batches)
    for name, estimator in EVERY.items():
        assert_same(together[name], factors_of(model, batches, estimator), tolerance_of(name))


def test_bfloat16_pass_is_near_the_float32_one():
    """bfloat16 keeps 8 bits: 0.4 % a rounding, a few of which stand between the images and a factor."""
    model, batches = make_model(torch.float32), image_batches([4, 4], dtype=torch.float32)
    exact = factors_of(model, batches, ESTIMATORS["facts"]())
    rounded = factors_of(model, batches, ESTIMATORS["facts"](), precision=torch.bfloat16)
    assert {values.A.dtype for values in rounded.values()} == {torch.float32}
    assert_same(rounded, exact, 0.03)
    assert relative_error(rounded["tokens"].A, exact["tokens"].A) > 1e-6


class HalfUsed(nn.Module):
    """The second call of `layer` has no influence on the loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        used = self.layer(x)
        self.layer(2 * x)
        return used.mean(dim=1)


def test_a_call_without_influence_has_gradient_zero():
    model = HalfUsed().double()
    x, labels = torch.randn(3, 4, 12, dtype=torch.float64), torch.tensor([0, 1, 2])
    layers = {"layer": model.layer}
    moments = collect_moments(model, layers, [(x, labels)], [InputGram(), GradGram()])["layer"]
    flat = x.flatten(0, 1)
    assert moments.num_tokens == 24
    assert relative_error(moments[InputGram()][0], 5 * flat.T @ flat) < EXACT
    outputs = model.layer(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(summed_cross_entropy(outputs.mean(dim=1), labels), outputs)
    assert relative_error(moments[GradGram()][0], g.flatten(0, 1).T @ g.flatten(0, 1)) < EXACT


def test_temporary_gradients_live_as_long_as_the_moments(model, batches):
    moment = GroupGradients(group_size=2)
    moments = collect_moments(model, select_layers(model).layers, batches, [moment])
    path = moments["tokens"][moment].path
    assert path.stat().st_size == 4 * 10 * 12 * 8  # 4 groups of [10, 12] in float64
    kept = moments["tokens"]
    del moments
    assert path.exists()
    del kept
    assert not path.exists()
