"""Merging tokens by themselves: which of them, in which order, and their means and sizes."""

import pytest
import torch
import torch.nn.functional as F

from facts.modules.merging import as_published, by_ward, schedule


def agglomerated(features, weights, number, fixed=()):
    """Ward's clustering by the letter: the cheapest of all pairs merges, until `number` clusters are left."""
    clusters = [[each] for each in range(len(features))]

    def merged(cluster):
        return weights[cluster].sum(), (weights[cluster] / weights[cluster].sum()) @ features[cluster]

    while len(clusters) > number:
        best = None
        for place, one in enumerate(clusters):
            for other in clusters[:place]:
                (v, a), (w, b) = merged(one), merged(other)
                cost = (v * w / (v + w) * (a - b).square().sum()).item()
                if not {*one, *other} & {*fixed} and (best is None or cost < best[0]):
                    best = cost, one, other
        _, one, other = best
        clusters.remove(one)
        clusters[clusters.index(other)] = sorted([*one, *other])
    return {tuple(cluster) for cluster in clusters}


def clusters_of(places):
    return {tuple((places == place).nonzero().flatten().tolist()) for place in places.unique()}


@pytest.mark.parametrize("fixed", [(), (0,), (4, 11)])
def test_one_pair_in_each_pass_is_wards_clustering(fixed):
    features, sizes, weights = torch.randn(3, 12, 4), torch.randint(1, 4, (3, 12)).float(), torch.rand(3, 12) + 0.5
    for number in (11, 8, 4):
        found = by_ward(features, sizes, sizes / weights, [1] * (12 - number), fixed)
        means, counts = found.merged(features, sizes / weights)
        for sample in range(3):
            expected = agglomerated(features[sample].double(), weights[sample].double(), number, fixed)
            assert clusters_of(found.places[sample]) == expected
            for place in range(number):  # weighted means, counts of originals, and one of them
                members = (found.places[sample] == place).nonzero().flatten()
                mean = weights[sample, members] @ features[sample, members] / weights[sample, members].sum()
                assert torch.allclose(means[sample, place], mean, atol=1e-5)
                assert torch.allclose(counts[sample, place], sizes[sample, members].sum())
                assert found.kept[sample, place] in members


@pytest.mark.parametrize("passes", [[9], [4, 5], [3, 3, 3], [18], [0, 19]])
def test_exactly_so_many_tokens_leave_and_fixed_ones_stay(passes):
    """However few pairs are each other's nearest: the last features lie on a line at growing distances."""
    features = torch.cat([torch.randn(3, 22, 5), (1.1 ** torch.arange(22.0))[None, :, None].expand(1, 22, 5)])
    found = by_ward(features, torch.ones(4, 22), torch.ones(4, 22), passes, (0, 7))
    number = 22 - sum(passes)
    assert all(sorted(row.unique().tolist()) == [*range(number)] for row in found.places)
    assert (found.places[:, [0, 7]] == torch.tensor([number - 2, number - 1])).all()
    _, sizes = found.merged(features, torch.ones(4, 22))
    assert (sizes[:, -2:] == 1).all() and (sizes.sum(dim=1) == 22).all()


def test_reciprocal_pairs_of_one_pass_are_those_of_brute_force():
    torch.manual_seed(1)
    features = torch.randn(40, 11, 5)
    found = by_ward(features, torch.ones(40, 11), torch.ones(40, 11), [2])
    gaps = torch.cdist(features.double(), features.double()) + torch.eye(11) * 1e9
    for sample in range(40):
        nearest = gaps[sample].argmin(dim=1).tolist()
        pairs = sorted((gaps[sample, a, b].item(), b, a) for a, b in enumerate(nearest) if nearest[b] == a and b < a)
        if len(pairs) > 1:
            merged = {tuple(pair[1:]) for pair in pairs[:2]}
            assert clusters_of(found.places[sample]) == merged | {
                (each,) for each in range(11) if not any(each in pair for pair in merged)
            }


def test_equal_tokens_merge_first_whatever_else_is_in_the_batch():
    features = torch.randn(3, 9, 4)
    features[0], features[1, 6:] = 1, features[1, :3]
    found = by_ward(features, torch.ones(3, 9), torch.ones(3, 9), [2, 1])
    for sample in range(3):
        alone = by_ward(features[sample, None], torch.ones(1, 9), torch.ones(1, 9), [2, 1])
        assert found.places[sample].equal(alone.places[0])
    assert clusters_of(found.places[1]) == {(0, 6), (1, 7), (2, 8), (3,), (4,), (5,)}


@pytest.mark.parametrize("passes", [[39], [20, 20], [50, 51]])
def test_larger_steps_take_more_passes(passes):
    assert schedule(196, sum(passes)) == passes


def test_nearest_pairs_of_alternate_tokens_are_those_of_brute_force():
    torch.manual_seed(1)
    keys, sizes = torch.randn(3, 11, 5), torch.randint(1, 4, (3, 11)).float()
    found = as_published(keys, sizes, 8, (0,))
    for sample in range(3):
        best = []
        for a in range(1, 11, 2):
            best.append(max((F.cosine_similarity(*keys[sample, [a, b]], dim=0).item(), b, a) for b in range(2, 11, 2)))
        groups = [{a, b} for _, b, a in sorted(best, reverse=True)[:3]]
        for a in range(11):
            for b in range(a):
                together = any({a, b} <= set().union(*(g for g in groups if g & group)) for group in groups)
                assert (found.places[sample, a] == found.places[sample, b]) == together
    assert (found.places[:, 0] == 7).all()  # the fixed one ends up last


def test_means_can_be_differentiated():
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    found = by_ward(torch.randn(2, 9, 4), torch.ones(2, 9), torch.ones(2, 9), [3])
    assert torch.autograd.gradcheck(lambda x: found.merged(x, torch.ones(2, 9))[0], x)
