"""Merging tokens by themselves: which of them, in which order, and their means and sizes."""

import math
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F

from facts.modules.merging import THIRD, as_published, by_ward, in_order


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
def test_one_token_at_a_time_is_wards_clustering(fixed):
    features, sizes, weights = torch.randn(3, 12, 4), torch.randint(1, 4, (3, 12)).float(), torch.rand(3, 12) + 0.5
    means, counts, masses, at = features, sizes, weights, fixed
    places = torch.arange(12).expand(3, -1)
    for number in range(11, 3, -1):
        found = by_ward(means, counts, counts / masses, number, at)
        (means, counts), (_, masses) = (found.merged(means, each / masses) for each in (counts, masses))
        masses = found.members.sum(dim=-1)
        places, at = found.places.gather(1, places), tuple(range(number - len(fixed), number))
        for sample in range(3):
            expected = agglomerated(features[sample].double(), weights[sample].double(), number, fixed)
            assert clusters_of(places[sample]) == expected
            for place in range(number):  # weighted means, and counts of originals
                members = (places[sample] == place).nonzero().flatten()
                mean = weights[sample, members] @ features[sample, members] / weights[sample, members].sum()
                assert torch.allclose(means[sample, place], mean, atol=1e-5)
                assert torch.allclose(counts[sample, place], sizes[sample, members].sum())


@pytest.mark.parametrize("leaving", [1, 9, 18, 19])
def test_exactly_so_many_tokens_leave_and_fixed_ones_stay(leaving):
    """However few pairs are each other's nearest: the last features lie on a line at growing distances."""
    features = torch.cat([torch.randn(3, 22, 5), (1.1 ** torch.arange(22.0))[None, :, None].expand(1, 22, 5)])
    found = by_ward(features, torch.ones(4, 22), torch.ones(4, 22), number := 22 - leaving, (0, 7))
    assert all(sorted(row.unique().tolist()) == [*range(number)] for row in found.places)
    assert found.places.gather(1, found.kept).equal(torch.arange(number).expand(4, -1))
    assert (found.places[:, [0, 7]] == torch.tensor([number - 2, number - 1])).all()
    _, sizes = found.merged(features, torch.ones(4, 22))
    assert (sizes[:, -2:] == 1).all() and (sizes.sum(dim=1) == 22).all()


@pytest.mark.parametrize("number", [15, 9, 4])
def test_the_tokens_that_leave_and_where_they_go_are_those_of_brute_force(number):
    torch.manual_seed(1)
    features, weights = torch.randn(20, 16, 5), torch.rand(20, 16) + 0.5
    found = by_ward(features, weights, torch.ones(20, 16), number, (3,))
    for sample in range(20):
        costs = torch.full((16, 16), math.inf, dtype=torch.float64)
        for a, b in permutations({*range(16)} - {3}, 2):
            v, w = weights[sample, [a, b]].double()
            costs[a, b] = v * w / (v + w) * (features[sample, a] - features[sample, b]).double().square().sum()
        nearest = costs.argmin(dim=1).tolist()
        leaving = []
        for a in {*range(16)} - {3}:
            is_pair = nearest[nearest[a]] == a
            stays = is_pair and a < nearest[a]
            leaving.append((math.inf if stays else costs[a, nearest[a]].item() * (1 if is_pair else THIRD), a))
        gone = [a for _, a in sorted(leaving)[: 16 - number]]
        stay = [a for a in range(16) if a not in gone]
        expected = {a: {a} for a in stay}
        for a in gone:
            expected[min(stay, key=lambda b: costs[a, b])].add(a)
        assert clusters_of(found.places[sample]) == {tuple(sorted(each)) for each in expected.values()}


def test_equal_tokens_merge_first_whatever_else_is_in_the_batch():
    features = torch.randn(3, 9, 4)
    features[0], features[1, 6:] = 1, features[1, :3]
    found = by_ward(features, torch.ones(3, 9), torch.ones(3, 9), 6)
    for sample in range(3):
        alone = by_ward(features[sample, None], torch.ones(1, 9), torch.ones(1, 9), 6)
        assert found.places[sample].equal(alone.places[0])
    assert clusters_of(found.places[1]) == {(0, 6), (1, 7), (2, 8), (3,), (4,), (5,)}


def test_tokens_that_nothing_reads_are_left_out():
    x = torch.randn(2, 6, 4)
    found = in_order(torch.ones(2, 6), 3, (0, 5))
    assert found.places.tolist() == [[1, 0, 0, 0, 0, 2]] * 2
    assert found.merged(x, torch.ones(2, 6))[0].equal(x[:, [1, 0, 5]])


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
    found = by_ward(torch.randn(2, 9, 4), torch.ones(2, 9), torch.ones(2, 9), 6)
    assert torch.autograd.gradcheck(lambda x: found.merged(x, torch.ones(2, 9))[0], x)
