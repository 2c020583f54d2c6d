"""Budgets as fractions of the layers' cost, as limits of the whole network, and as an error of the outputs."""

import logging
import math

import pytest

import facts
from facts import Budget
from tests.networks import image_batches, make_vit
from tests.refusals import refused, refuses

OPTIONS = {"estimator": "svd_llm", "search": "uniform", "form": "plain"}


def test_a_half_unless_something_else_is_bounded():
    assert Budget.of() == Budget(ratios={"flops": 0.5})
    assert Budget.of(cost="params") == Budget(ratios={"params": 0.5})
    assert Budget.of(bounds={"params": 0.6}) == Budget(ratios={"params": 0.6})
    limited = Budget(latency_ms=100)
    assert limited.with_ratios(None) == limited and limited.limits == {"latency": 0.1}
    both = limited.with_ratios(0.3, "flops", {"params": 0.6})
    assert both == Budget(ratios={"flops": 0.3, "params": 0.6}, latency_ms=100)
    assert Budget(error=0.1).with_ratios(None).ratios == {}


IMAGES = image_batches([16, 16], shape=(3, 16, 16))


def compress(error, data=IMAGES, **options):
    return facts.compress(make_vit(depth=1), data, budget=Budget(error=error), **options)


test_refusals = refused(
    (lambda: Budget.of(0.5, bounds={"flops": 0.6}), "flops is bounded twice, by ratio=0.5 and by 0.6"),
    (lambda: Budget.of(0.5, "bytes"), "cost must be one of flops, params, latency, got 'bytes'"),
    (lambda: Budget.of(True), r"must lie in \(0, 1\], got True for flops"),
    (lambda: Budget(flops=1e9).with_ratios(0.5), "flops is bounded twice, by a ratio and by a limit"),
    (lambda: Budget(error=math.nan), "the error of a budget must be a positive number, got nan"),
    (lambda: Budget(error=0.1).with_ratios(0.5), "a bound on the error replaces all others"),
    (lambda: compress(0.1, cost="latency"), 'choose cost="flops" or "params", not latency'),
    (lambda: compress(0.1, image_batches([3], shape=(3, 16, 16))), "there are too few: give at least 4 samples"),
    (lambda: compress(1e-12, **OPTIONS), r"even with 99% of the flops, on .* an error of more than 1e-12"),
    (
        lambda: compress(0.1, None, estimator="pela"),
        "error compares outputs on calibration data: give some, or a ratio",
    ),
)


def test_limits_that_cannot_be_met(model, batches):
    message = r"params of 5 cannot be met: of the network's \d+, only \d+ belong to"
    refuses(message, facts.compress, model, batches, budget=Budget(params=5))
    refuses("cannot be met; allow more than that", facts.compress, model, batches, budget=Budget(latency_ms=1e-6))
    message = r"the network's FLOPs are unknown: give calibration data, facts\.prepare"
    refuses(message, facts.compress, model, estimator="pela", budget=Budget(flops=1000))


@pytest.mark.parametrize("name", ["flops", "params"])
@pytest.mark.parametrize("share", [0.6, 0.999])
def test_limits_of_the_whole_network_are_kept_and_used_up(model, batches, name, share):
    """One rank more, in any layer, would be too much."""
    whole = getattr(facts.count_cost(model, (3, 8, 8)), name)
    allowed = round(share * whole)
    costs = facts.compress(model, batches, search="cors", budget=Budget(**{name: allowed})).summary
    before, after = getattr(costs.before, name), getattr(costs.after, name)
    assert after <= allowed
    rest = whole - (before - (after - costs.spent[name]))  # outside the layers
    assert 0 <= costs.budget[name] - (allowed - rest) + 1 <= 1.001


def test_the_smallest_hundredth_within_an_error_is_found(caplog):
    """Compared with one hundredth less; all 32 samples fit both comparisons. One data pass serves all ratios."""
    model = make_vit(depth=1)

    def distance_at(ratio):
        return facts.compress(model, IMAGES, ratio=ratio, **OPTIONS).summary.distance.mean

    error = distance_at(0.5) * 1.001
    caplog.clear()
    with caplog.at_level(logging.INFO):
        result = facts.compress(model, IMAGES, budget=Budget(error=error), **OPTIONS)
    assert sum("data pass" in message for message in caplog.messages) == 1
    found = result.summary.bounds["flops"]
    assert result.summary.distance.mean == pytest.approx(distance_at(found))
    assert result.summary.distance.mean <= error and found <= 0.5
    assert distance_at(round(found - 0.01, 2)) > error


def test_ratios_without_a_plan_are_too_small():
    """CoRS has no rank below a tenth of each layer; the bisection goes on above."""
    assert compress(10.0, search="cors", estimator="svd_llm").summary.bounds["flops"] < 0.5
