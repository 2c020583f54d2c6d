import itertools
from dataclasses import replace

import pytest
import torch

import facts
from facts.search import AllocationProblem
from facts.search.refinement import _as_plan, _measured, _Moves, _place_of_least, refined
from facts.search.token_program import TokenProgram, summed_error
from tests.merging import batches, vit


@pytest.fixture(scope="module")
def problem():
    prepared = facts.prepare(vit(depth=4), batches(), parts="tokens")
    decompositions = prepared.decompositions(facts.estimators.FACTS())
    return AllocationProblem(prepared, facts.estimators.FACTS(), decompositions, {"flops": 0.6})


@pytest.fixture
def samples():
    return [(batch, []) for batch in batches()]


def test_it_is_within_the_budget_and_never_worse(problem, samples):
    plan = problem.at_common_ratio(TokenProgram(problem, {}).constant)
    before = summed_error(problem, plan, samples, torch.inf)
    found = refined(problem, list(problem.parts.values()), plan, samples, 6)
    assert found != plan and problem.fits(found) and summed_error(problem, found, samples, torch.inf) < before


def test_the_smallest_merge_goes_for_more_in_one_other_block(problem):
    chain, counts = list(problem.parts.values()), dict(zip(problem.parts, (16, 12, 12, 6), strict=True))
    plan = _as_plan(chain, counts)
    problem = replace(problem, bounds={"flops": problem.spent(plan)[0] / problem.dense[0]})
    moves = _Moves(problem, chain, plan, 6)
    (found,) = moves.with_fewer_merges(counts)
    assert [*found.values()] == [17, 11, 11, 6] and problem.fits(_as_plan(chain, found))
    assert not moves.with_fewer_merges(dict.fromkeys(counts, 17))


def test_a_move_gives_back_as_many_tokens_as_the_budget_allows(problem):
    """The last step of all may be cheaper than the one before: a block that merges nothing needs no product."""
    chain, names = list(problem.parts.values()), [*problem.parts]
    counts = dict(zip(names, (16, 14, 8, 6), strict=True))
    plan = _as_plan(chain, counts)
    moves = _Moves(replace(problem, bounds={"flops": problem.spent(plan)[0] / problem.dense[0]}), chain, plan, 4)
    for cheaper, dearer, step in itertools.product(names, names, range(1, 9)):
        fewer = moves.changed(counts, cheaper, -step)
        others = (moves.changed(fewer, dearer, more) for more in range(step, 0, -1))
        largest = next((each for each in others if moves.problem.fits(plan | _as_plan(chain, each))), None)
        assert cheaper == dearer or moves.moved(counts, cheaper, dearer, step) == largest


def test_outputs_that_are_not_numbers_change_no_plan(problem, samples):
    plan = problem.at_common_ratio(TokenProgram(problem, {}).constant)
    for batch, originals in samples:
        originals.append(problem.model(batch[0]) * torch.nan)
    assert refined(problem, list(problem.parts.values()), plan, samples, 6) == plan


def test_kept_outputs_do_not_change_what_is_measured(problem, samples):
    chain, counts = list(problem.parts.values()), dict(zip(problem.parts, (15, 15, 8, 6), strict=True))
    variants = [counts, counts | {"blocks.2.tokens": 9}, counts | {"blocks.3.tokens": 3}, dict.fromkeys(counts, 9)]
    for batch, originals in samples:
        originals.append(problem.model(batch[0]))
    found = _measured(problem, problem.prepared.apply(counts, problem.decompositions), chain, variants, samples)
    assert found == pytest.approx([summed_error(problem, each, samples, torch.inf) for each in variants], rel=1e-6)


def test_blocks_that_merge_nothing_follow_a_change(problem):
    chain, counts = list(problem.parts.values()), dict(zip(problem.parts, (12, 12, 12, 6), strict=True))
    moves = _Moves(problem, chain, problem.at_common_ratio(TokenProgram(problem, {}).constant), 6)
    changes = {(0, 3): (15, 15, 15, 6), (1, -2): (12, 10, 10, 6), (0, -9): (6, 6, 6, 6), (3, -9): (12, 12, 12, 2)}
    for (place, by), expected in changes.items():
        assert tuple(moves.changed(counts, chain[place].name, by).values()) == expected


def test_the_most_promising_pairs_are_measured_alone_and_together(problem):
    """Each keeps the budget and the number of merging blocks; the first two pairs share no block."""
    chain, names = list(problem.parts.values()), [*problem.parts]
    counts = dict(zip(names, (14, 12, 8, 6), strict=True))
    plan = dict(counts)
    moves = _Moves(replace(problem, bounds={"flops": problem.spent(plan)[0] / problem.dense[0]}), chain, plan, 4)
    gains = {(names[0], -1): -1.0, (names[1], 1): 3.0, (names[2], -1): -0.5, (names[3], 1): 2.0}
    pairs = {pair: both for pair, both in moves.pairs(counts, 1).items() if {(pair[0], -1), (pair[1], 1)} <= {*gains}}
    alone, second, *together = moves.promising(counts, 1, pairs, gains)
    assert alone == counts | {names[1]: 13, names[2]: 7} and second[names[1]] == 13 and second[names[0]] == 13
    assert together == [counts | {names[1]: 13, names[2]: 7, names[0]: 13, names[3]: 7}]
    assert all(moves.problem.fits(each) for each in (alone, second, *together))


def test_all_samples_decide_between_the_first_and_the_two_best_on_a_half():
    first, second = [{}], [{}]  # halves of the samples
    errors = {0: (5.0, 5.0), 1: (6.0, 0.0), 2: (4.0, 4.5), 3: (4.5, 3.0)}

    def measured(variants, samples):
        return [sum(errors[each][sample is second[0]] for sample in samples) for each in variants]

    assert _place_of_least(measured, [0, 1, 2, 3], [first[0], second[0]]) == 3  # 1 is not measured on the second half
    assert _place_of_least(measured, [0, 2], [first[0]]) == 1
    assert _place_of_least(measured, [0, 1], [first[0]]) == 0
    assert _place_of_least(measured, [0], [first[0], second[0]]) == 0
