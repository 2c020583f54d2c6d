import pytest
import torch
from torch import nn

import facts
from facts.estimators import ESTIMATORS, GFWSVD
from facts.moments import GradGram, InputGram, collect_moments
from facts.moments.losses import summed_cross_entropy
from tests.by_sample import BY_SAMPLE, assert_same_factors, factors_of
from tests.networks import Runs, image_batches, make_causal_lm, make_vit, relative_error

EVERY = {name: estimator() for name, estimator in ESTIMATORS.items()}
EXACT = 1e-12  # sums over float64 in another order


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 5]])
def test_splitting_batches_changes_nothing(model, sizes):
    estimators = {**BY_SAMPLE, "gfwsvd in groups": GFWSVD(group_size=2)}
    assert_same_factors(*(factors_of(model, image_batches(each), estimators) for each in (sizes, [3, 3, 1])))


def test_one_pass_serves_every_estimator(model, batches):
    """The model runs once a batch, whatever is asked for, and each estimator gets what it gets alone."""
    runs = Runs(model)
    together = factors_of(model, batches, EVERY)
    assert runs.number == len(batches)
    for name, estimator in EVERY.items():
        alone = factors_of(model, batches, {name: estimator})
        assert_same_factors({place: together[place] for place in alone}, alone)


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


@pytest.mark.parametrize("name", ["facts", "kfac_expand", "kfac_reduce", "shampoo2"])
def test_gradients_that_are_zero_in_most_samples_are_clipped_to_zero(name):
    x, g = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    g[:3] = 0
    factors = facts.estimate_factors(name, x, g)
    assert not factors.B.any()
    assert factors.A.isfinite().all()


def text_batches():
    tokens = torch.randint(64, (5, 9), generator=torch.Generator().manual_seed(0))
    return [(part, facts.next_tokens(part)) for part in tokens.split([3, 2])]


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda: make_vit(depth=1), image_batches([3, 2], shape=(3, 16, 16))),
        (lambda: make_causal_lm("llama"), text_batches()),
    ],
    ids=["heads", "groups of heads"],
)
def test_heads_in_one_call_have_the_moments_of_heads_in_turn(make, batches):
    prepared = facts.prepare(make(), batches, held_out=(), parts="units")
    wanted = dict.fromkeys(moment for estimator in EVERY.values() for moment in estimator.moments)
    together = prepared.moments(wanted)
    for name in (name for name in prepared.linears if ".heads." in name):
        alone = prepared.moments(wanted, [name])[name]
        for moment in wanted:
            for ours, theirs in zip(together[name][moment], alone[moment], strict=True):
                assert relative_error(ours, theirs) < EXACT, (name, moment)
