"""Plans of units and tokens: the program finds the best, measuring chooses, and budgets hold."""

import itertools
import math

import pytest

import facts
from facts.cost.timing import TimingPolicy
from facts.search import CoRSFisher, token_program
from facts.search.token_program import Limits, TokenProgram
from tests.merging import batches, vit
from tests.refusals import refuses


@pytest.fixture(scope="module")
def prepared():
    return facts.prepare(vit(), batches(), parts=("units", "tokens"))


def test_the_program_finds_the_plan_of_brute_force(prepared):
    """Three blocks, five counts, and one width per part at a price: every plan is tried."""
    tokens = facts.prepare(vit(), batches(), parts="tokens")
    problem = facts.search.AllocationProblem(tokens, facts.estimators.PELA(), {}, {"flops": 0.6})
    counts, curve = (15, 12, 8, 4), (0.1, 0.3, 1.0, 2.0)
    weight = dict(zip(tokens.parts, (3.0, 1.0, 0.2), strict=True))
    errors = {name: {n: weight[name] * e for n, e in zip(counts, curve, strict=True)} for name in tokens.parts}
    program = TokenProgram(problem, errors)
    offered = [*program.cumulative["blocks.0.tokens"]]

    def total(plan, price):
        return program.error(plan) + price * problem.spent(plan)[0] / problem.budget[0]

    for price in (0.1, 1.0, 5.0):
        found = program.tokens_at(price)
        plans = (
            {name: None if n == before else n for name, n, before in zip(tokens.parts, each, (17, *each), strict=False)}
            for each in itertools.combinations_with_replacement(offered, 3)
        )
        assert total(found, price) == pytest.approx(min(total(plan, price) for plan in plans))


def test_the_plan_with_the_least_measured_error_is_taken(prepared, monkeypatch):
    """Or one as good with fewer merges. Measuring one that is worse stops early, and none is measured twice."""
    errors, plans, summed_error = [], [], token_program.summed_error

    def noted(problem, plan, samples, most):
        assert plan not in plans
        plans.append(plan)
        errors.append(summed_error(problem, plan, samples, math.inf))
        return summed_error(problem, plan, samples, most)

    monkeypatch.setattr(token_program, "summed_error", noted)
    monkeypatch.setattr(token_program, "WITH_WIDTHS", [*token_program.WITH_WIDTHS, Limits(0.6, 0.1)])
    monkeypatch.setattr(token_program, "refined", lambda problem, chain, plan, *_: plan)
    found = facts.compress(prepared, ratio=0.6)
    as_good = [plan for plan, error in zip(plans, errors, strict=True) if error <= 1.03 * min(errors)]
    fewest = min(as_good, key=lambda plan: sum(bool(n) for name, n in plan.items() if name.endswith("tokens")))
    assert len({*errors}) > 1 and found.plan == fewest


def test_tokens_save_no_parameters(prepared):
    found = facts.compress(prepared, cost="params", ratio=0.6)
    assert found.summary.after.params < found.summary.before.params
    assert not any(count for name, count in found.plan.items() if name.endswith("tokens"))


def test_a_merge_takes_time_of_its_own(prepared):
    table = prepared.latency_table(2)
    table.__dict__["merge"] = 0.5
    plan = {"blocks.0.tokens": 12, "blocks.1.tokens": 12}
    assert [table.seconds(name, 12, plan) for name in plan] == [0.5, 0.0]
    assert prepared.latency_table(2).merge >= 0


def test_what_does_not_go_together_is_refused(prepared):
    for search in ("memvit", CoRSFisher(profile="kronecker")):
        message = r"cannot choose tokens: take search=cors_fisher \(profile=exact\), cors or uniform"
        refuses(message, facts.compress, prepared, search=search, ratio=0.5)
    tokens = facts.prepare(vit(), batches(), parts="tokens")
    refuses("tokens alone are chosen by FLOPs", facts.compress, tokens, cost="params", ratio=0.5)
    message = "SVDLLM has no metric of tokens, only keys: take search=uniform, or take"
    refuses(message, facts.compress, prepared, estimator="svd_llm", ratio=0.5)


def test_the_budget_is_kept_and_the_summary_says_what_is_left(prepared):
    result = facts.compress(prepared, ratio=0.6)
    assert 0 < result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert "blocks with fewer tokens" in repr(result) and "the compressed parts keep" in repr(result)
    part = next(part for part in result.problem.parts.values() if part.shortens)
    assert result.summary.tokens[part.name] == 17


@pytest.mark.system
def test_a_bounded_latency_is_measured():
    model, data = vit(depth=1, embed_dim=192), batches()  # large enough that overhead is little
    execution = facts.Execution(timing=TimingPolicy(num_turns=5, min_seconds=0.05))
    prepared = facts.prepare(model, data, parts=("units", "tokens"), execution=execution)
    latency = facts.compress(prepared, cost="latency", ratio=0.9).summary.latency
    assert latency["predicted"] <= latency["allowed"] < latency["dense"] and latency["measured"] > 0
