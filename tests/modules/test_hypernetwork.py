import torch

from facts.modules.hypernetwork import rounded, seeded_hypernetwork


def test_a_seed_determines_it_and_leaves_other_draws_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second, other = (seeded_hypernetwork([4, 2], seed)() for seed in (1, 1, 2))
    assert torch.rand(2).equal(expected)
    assert all(one.equal(two) for one, two in zip(first, second, strict=True))
    assert not first[0].equal(other[0])


def test_a_rounded_mask_has_the_gradient_of_the_soft_one():
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(50, dtype=torch.float64)
    soft = logits.sigmoid()
    mask = rounded(soft)
    torch.testing.assert_close(mask, (logits > 0).double())
    (through,) = torch.autograd.grad((mask * weights).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((soft * weights).sum(), logits)
    assert through.equal(expected)
