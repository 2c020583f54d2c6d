"""Merging tokens by themselves: which pairs, in which order, and their means and sums."""

import torch

from facts.modules.tokens import Assignment, Tokens


def test_the_increase_is_wards():
    """Σ ‖R (x - mean)‖² within groups grows by as much as the distance of the merged pair, in any order of merging."""
    torch.manual_seed(0)
    x, directions = torch.randn(1, 12, 6), torch.randn(4, 6)
    tokens, spread_before = Tokens.of(x), 0.0
    for number in (9, 7, 4, 2):
        tokens = tokens.merged(tokens.passes(number, 1, directions))
        means = tokens.x[0][tokens.places[0]]
        within = ((x[0] - means) @ directions.T).square().sum().item()
        assert within > spread_before and tokens.x.shape[1] == number
        assert torch.allclose(means[0], x[0, 0])  # the protected token
        assert tokens.sizes.sum() == 12
        spread_before = within
    one = Tokens.of(x)
    merged = one.merged(one.passes(11, 1, directions))
    a, b = x[0, merged.places[0] == merged.sizes[0].argmax()]
    means = merged.x[0][merged.places[0]]
    expected = 0.5 * ((a - b) @ directions.T).square().sum()
    assert torch.allclose(((x[0] - means) @ directions.T).square().sum(), expected, rtol=1e-5)


def test_nearest_pairs_are_those_of_brute_force():
    torch.manual_seed(1)
    x, sizes, directions = torch.randn(3, 11, 5), torch.randint(1, 4, (3, 11)).float(), torch.randn(5, 5)
    found = Assignment.nearest(x @ directions.T, sizes, 3, 1)
    for sample in range(3):
        best = []
        for a in range(1, 11, 2):
            costs = []
            for b in range(2, 11, 2):
                s, t = sizes[sample, a].item(), sizes[sample, b].item()
                gap = directions @ (x[sample, a] - x[sample, b])
                costs.append((s * t / (s + t) * gap.square().sum().item(), b))
            best.append((*min(costs), a))
        chosen = sorted(best)[:3]
        groups = {a: b for _, b, a in chosen}
        expected = sorted({*range(11)} - {*groups})
        assert found.places[sample].tolist() == [expected.index(groups.get(token, token)) for token in range(11)]


def test_equal_tokens_are_taken_in_the_order_of_positions():
    found = Assignment.nearest(torch.ones(2, 9, 4), torch.ones(2, 9), 2, 1)
    assert found.places.tolist() == [[0, 1, 1, 1, 2, 3, 4, 5, 6]] * 2


def test_several_tokens_can_go_into_one():
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    found = Assignment.nearest(torch.ones(2, 9, 4), torch.ones(2, 9), 3, 1)
    merged, summed = found.merged(x), found.summed(x)
    assert merged[:, 1].allclose(x[:, [1, 2, 3, 5]].mean(1)) and summed[:, 1].allclose(x[:, [1, 2, 3, 5]].sum(1))
    assert merged[:, [0, 2, 3, 4, 5]].equal(x[:, [0, 4, 6, 7, 8]]) and found.sizes.tolist() == [[1, 4, 1, 1, 1, 1]] * 2
    assert torch.autograd.gradcheck(found.merged, x)
