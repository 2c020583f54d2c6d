"""Summary of a finished compression."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from facts.calibration.prepare import Calibration
from facts.compression.allocation import AllocatedNetwork
from facts.cost.count import CostName, Size
from facts.parts import Plan
from facts.estimators.base import Estimator
from facts.modules.forms import FormName
from facts.modules.lowrank import LowRankLayer
from facts.modules.pivots import relative_error
from facts.result import Summary
from facts.search.base import Search
from facts.search.problem import AllocationProblem


def summarize(
    calibration: Calibration,
    problem: AllocationProblem,
    allocated: AllocatedNetwork,
    plan: Plan,
    bounds: Mapping[CostName, float],
    rounds: Sequence[float],
    estimator: Estimator,
    search: Search,
    form: FormName,
    seconds: dict[str, float],
) -> Summary:
    """Summarise a compression to a plan; `problem` is the one that the last round solved."""
    result, decompositions = allocated.result, allocated.decompositions
    proof = asdict(result.solution) if result.solution else None
    return Summary(
        before=calibration.cost,
        after=calibration.cost_after(allocated.model, plan, problem.form),
        repaired={name: d.num_repaired for name, d in decompositions.items() if d.num_repaired},
        seconds=seconds,
        estimator=repr(estimator),
        search=repr(search),
        form=form if result.plan.keys() - calibration.units.keys() else "plain",
        parts="units" if calibration.units else "layers",
        widths={name: unit.width for name, unit in calibration.units.items()},
        fit_bias=calibration.fit_bias,
        rounding=_rounding(allocated),
        bounds=dict(bounds),
        rounds=tuple(rounds),
        spent=dict(zip(problem.bounds, problem.spent(result.plan), strict=True)),
        budget=dict(zip(problem.bounds, problem.budget, strict=True)),
        latency=allocated.latency,
        predicted=result.predicted if problem.calibration is calibration else None,
        sizes=(Size.of(calibration.model), Size.of(allocated.model)),
        solution=proof and {name: value for name, value in proof.items() if name not in ("choices", "cost")},
        profile={
            name: [
                [rank, rank / max(1, calibration.parts[name].full_rank(problem.form)), errors[rank]]
                for rank in sorted(filter(None, errors))
            ]
            for name, errors in result.profile.items()
        },
    )


def _rounding(allocated: AllocatedNetwork) -> float:
    """Largest relative error that its data type causes in a low-rank layer's weight."""
    errors = [0.0]
    for name, layer in allocated.model.named_modules():
        if not (isinstance(layer, LowRankLayer) and allocated.result.plan.get(name)):
            continue
        factors = (*layer.factors(), *allocated.decompositions[name].truncate(layer.rank))
        left, right, *exact = (factor.detach().to(factors[0].device).double() for factor in factors)
        errors.append(relative_error(left @ right, exact[0] @ exact[1]))
    return max(errors)
