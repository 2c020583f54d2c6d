"""The result of a compression: the network, its plan, and a readable summary."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import PositiveInt
from tabulate import tabulate
from torch import Tensor, nn

from facts.calibration.data import Data
from facts.calibration.outputs import Distance
from facts.cost.count import Cost, CostName, Size, count_flops
from facts.modules.forms import FormName
from facts.moments.losses import OutputError
from facts.parts import Plan
from facts.search.base import AllocationProblem, Search

STANDARD_ERROR = "_standard_error"  # the ending of a metric's
NUM_SHOWN = 3  # skipped layers that are named for each reason
SLOWER = 1.02  # times the original's latency: less is the error of the measurement
MOST_SPENT = 0.9  # of a budget; what remains of less needs a reason
KINDS_SHOWN = {"units narrower": "widths", "blocks with fewer tokens": "tokens", "layers low-rank": "ranks"}


@dataclass(frozen=True)
class RecoverySummary:
    """Mean distance of the outputs from the original's on held-out samples, before and after a recovery.

    The network was trained on `num_samples` others, and `num_to_choose` more chose the best epoch (0: unknown).
    `seconds` includes the `seconds_before` of an interrupted run. The distances are None if there were too few samples
    to hold some out, which are `num_held_back`.
    """

    before: float | None
    after: float | None
    num_samples: int
    num_held_back: int
    epochs: int
    seconds: float
    seconds_before: float = 0.0
    num_to_choose: int = 0

    @property
    def gained_nothing(self) -> bool:
        """Whether the held-out samples show no gain."""
        return self.before is not None and self.after is not None and self.before <= self.after

    def __str__(self) -> str:
        earlier = f", {self.seconds_before / 60:.1f} of them in an earlier run" if self.seconds_before else ""
        taken = f"{self.seconds / 60:.1f} min" if self.seconds >= 60 else f"{self.seconds:.0f} s"
        chosen = f", the best epoch chosen by {self.num_to_choose:,} others" if self.num_to_choose else ""
        text = f"recovered from {self.num_samples:,} samples in {taken}{earlier}{chosen}"
        if self.before is None or self.after is None:
            return f"{text}; too few samples to hold some out and measure the gain"
        if self.gained_nothing:
            text = text.replace("recovered", "nothing gained")
        if self.before == self.after:
            return f"{text}: no epoch came closer to the original, so no weight is changed"
        far = f"{self.before:.4g} before, {self.after:.4g} after"
        return f"{text}: mean distance from the original {far}, on {self.num_held_back:,} held-out samples"


@dataclass(frozen=True)
class Summary:
    """A compression at a glance: what the network costs, how it was made, and how far its outputs are.

    Costs are those of the whole network:
    - `before` and `after`: by the paper's rule; `full_flops`: both by the full rule, with attention's own products,
      None if unknown
    - `sizes` of the weights before and after
    - `bounds`: by bounded cost, the fraction of the compressed parts' cost that may remain; `spent` and `budget` are
      in the unit of that cost, for these parts only
    - `latency`: seconds, `dense` and `measured`, on a batch of `samples`; if latency is bounded, on the first
      calibration batch, with the seconds `allowed` and `predicted`
    - `input_shape` of the one sample that FLOPs are counted for, None if it is not a tensor

    How it was made:
    - `estimator`, `search`: the methods with their options
    - `parts`: what was truncated; `widths`: each unit's original width; `tokens`: of each block that merges them, the
      original number
    - `form` of the low-rank layers (`plain` if there are none)
    - `rounding`: the largest relative error that a layer's data type causes in its weight
    - `repaired`: by layer, the number of Kronecker factors that were not positive definite
    - `solution`: the solver's status, error, bound and gap, if the search used one
    - `profile`: the sensitivity profile: for each layer, ranks, their fractions of the full rank, and errors
    - `seconds`: by stage, such as reading, calibration, decomposition and search

    Distances of the outputs from the original's:
    - `predicted` by the search, if it predicts one
    - `distance` on held-out samples, after the last step; `allowed_error`: the largest that the budget allowed, None
      for other budgets
    - `recovery`: its outcome, None without one.
    """

    before: Cost
    after: Cost
    full_flops: tuple[int, int] | None = None
    sizes: tuple[Size, Size] = (Size(), Size())
    bounds: dict[CostName, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    input_shape: tuple[PositiveInt, ...] | None = None
    estimator: str = ""
    search: str = ""
    parts: str = "layers"
    widths: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    form: FormName = "plain"
    rounding: float = 0.0
    repaired: dict[str, int] = field(default_factory=dict)
    solution: dict[str, Any] | None = None
    profile: dict[str, list[list[float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    predicted: float | None = None
    distance: Distance | None = None
    allowed_error: float | None = None
    recovery: RecoverySummary | None = None

    def __str__(self) -> str:
        lines = [self._costs(), "", f"method: {self.method}", *map(self._kept, self.bounds)]
        if self.full_flops and self.full_flops[0] != self.before.flops:
            before, after = (f"{flops / 1e9:.4g} G" for flops in self.full_flops)
            lines.append(
                "FLOPs are two for a multiplication and an addition, and leave out attention's own products: "
                f"{before} and {after} with them"
            )
        if self.is_slower:
            units = ' or parts="units"' if "tokens" in self.parts else ""
            lines.append(f"slower than the original, as measured on this device: try torch.compile{units}")
        if self.recovery:
            lines.append(str(self.recovery))
        if self.distance:
            lines.append(str(self.distance))
        elif self.predicted is not None:
            far = f"{self.predicted:.4g}, but a measured one can be several times as large"
            lines.append(f"predicted mean distance of the outputs from the original's: {far}")
        if self.is_far:
            lines.append(f"the outputs are far off: {self.advice}")
        seconds = [f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items() if seconds >= 0.05]
        return "\n".join([*lines, *([f"took: {', '.join(seconds)}"] if seconds else [])])

    @property
    def method(self) -> str:
        """How it was made, in one line."""
        units = " and ".join(kind for kind, names in (("units", self.widths), ("tokens", self.tokens)) if names)
        form = "" if self.form == "plain" else self.form
        return ", ".join(filter(None, [self.estimator, self.search, units, form]))

    @property
    def is_far(self) -> bool:
        """Whether the outputs are so far from the original's that the budget is too small for the network."""
        return self.distance is not None and self.distance.is_too_far

    @property
    def is_slower(self) -> bool:
        """Whether the network took longer than the original where it was compressed."""
        latency = self.latency
        return {"dense", "measured"} <= latency.keys() and latency["measured"] > SLOWER * latency["dense"]

    @property
    def advice(self) -> str:
        """Options, not used yet, that may bring the outputs closer to the original's for the same budget."""
        options = ["or a larger budget"]
        if self.recovery is None:
            options.insert(0, "ten minutes of recovery")
        if self.search.startswith("Uniform("):
            options.insert(0, "the search cors_fisher")
        if self.parts == "layers":
            options.insert(0, "the parts units and tokens")
        if self.form == "plain" and self.parts == "layers":
            options.insert(0, "the form pivoted")
        return f"try {', '.join(options).removeprefix('or ')}"

    def kind_of(self, name: str) -> str:
        """Say what a rank in the plan does to a part."""
        return next(kind for kind, names in KINDS_SHOWN.items() if name in getattr(self, names, [name]))

    def _costs(self) -> str:
        original, compressed = self.sizes
        types = f"{original.types} before, {compressed.types} after"
        stored = original.types if original.types == compressed.types else types
        timed = f", batch of {self.latency['samples']:.0f}" if "samples" in self.latency else ""
        lines = [
            ("FLOPs", *_scale(self.before.flops, "G", 1e9), self.before.flops, self.after.flops),
            ("parameters", *_scale(self.before.params, "M", 1e6), self.before.params, self.after.params),
            (f"latency{timed}", "ms", 1e-3, self.latency.get("dense"), self.latency.get("measured")),
            (f"weights, {stored}", "MB", 1e6, original.num_bytes, compressed.num_bytes),
        ]
        rows = [
            (name, f"{before / unit:.4g} {symbol}", f"{after / unit:.4g} {symbol}", f"{after / before:.1%}")
            for name, symbol, unit, before, after in lines
            if before and after
        ]
        return tabulate(rows, headers=("", "original", "compressed", "remaining"), colalign=("left", *["right"] * 3))

    def _kept(self, cost: CostName) -> str:
        """Describe the fraction of a bounded cost that remains, and the fraction that was allowed."""
        allowed, spent, budget = min(1.0, self.bounds[cost]), self.spent.get(cost), self.budget.get(cost)
        if cost == "latency" or not spent or not budget:  # files from elsewhere may lack the last two
            return f"allowed {allowed:.1%} of the {cost}"
        what = {"flops": "FLOPs", "params": "parameters"}[cost]
        kept = f"the compressed parts keep {allowed * spent / budget:.1%} of their {what}"
        if self.allowed_error is not None:
            return f"{kept}, the smallest found with an error of at most {self.allowed_error:g} on the held-out samples"
        kept = f"{kept}, of {allowed:.1%} allowed"
        if len(self.bounds) == 1 and self.solution and spent < MOST_SPENT * budget:
            return f"{kept}: no larger plan that fits is predicted to be closer; more samples may tell"
        return kept


def _scale(value: int | None, symbol: str, unit: float) -> tuple[str, float]:
    """The unit of a count, or a thousandth of it for small networks, with its symbol."""
    return (symbol, unit) if (value or 0) >= unit / 100 else ({"G": "M", "M": "k"}[symbol], unit / 1000)


def count_costs(
    problem: AllocationProblem, plan: Plan, model: nn.Module, original: Size | None = None
) -> dict[str, Any]:
    """Count the costs in the summary of a problem's network and the `model` that a plan makes of it, except latency.

    `original` is the size of the network as it is stored, if its tensors have other types.
    """
    prepared, example = problem.prepared, problem.prepared.example
    networks = prepared.model, model
    return {
        "before": prepared.cost,
        "after": prepared.cost_after(model, plan),
        "full_flops": None if example is None else tuple(count_flops(each, example, "full") for each in networks),
        "sizes": (original or Size.of(prepared.model), Size.of(model)),
        "bounds": dict(problem.bounds),
        "spent": dict(zip(problem.bounds, problem.spent(plan), strict=True)),
        "budget": dict(zip(problem.bounds, problem.budget, strict=True)),
        "input_shape": tuple(example.shape) if isinstance(example, Tensor) else None,
    }


@dataclass(frozen=True, repr=False)
class CompressionResult:
    """A compressed network, each layer's rank (None if dense), the summary, and why other layers were skipped.

    `original` is the network it was made from, `output_error` the distance between outputs, `held_out` the data
    on which they are compared, and `problem` the one that `search` solved, without decompositions. A loaded result has
    none of them.
    """

    model: nn.Module
    plan: Plan
    summary: Summary
    skipped: dict[str, str] = field(default_factory=dict)
    original: nn.Module | None = None
    output_error: OutputError | None = None
    held_out: Data | None = None
    problem: AllocationProblem | None = None
    search: Search | None = None

    def with_summary(self, **fields: Any) -> Self:
        """The same result with other fields of its summary."""
        return replace(self, summary=replace(self.summary, **fields))

    def __repr__(self) -> str:
        kinds = defaultdict[str, list[int | None]](list)
        for name, rank in self.plan.items():
            kinds[self.summary.kind_of(name)].append(rank)
        made = []
        for kind, all_ranks in kinds.items():
            ranks = [rank for rank in all_ranks if rank is not None]
            values = f" ({KINDS_SHOWN[kind]} {min(ranks)} to {max(ranks)})" if ranks else ""
            made.append(f"{len(ranks)} of {len(all_ranks)} {kind}{values}")
        lines = [f"{type(self.model).__name__}: {', '.join(made)}", "", str(self.summary)]
        alike = defaultdict(list)
        for name, reason in self.skipped.items():
            alike["compressed as layers" if name in self.plan else "left dense", reason].append(name)
        if kept := [name for name, rank in self.plan.items() if rank is None and any(self.plan.values())]:
            alike["left whole", "the search kept them"] = kept
        for (outcome, reason), names in alike.items():
            shown = ", ".join(names[:NUM_SHOWN])
            others = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
            lines.append(f"{outcome}: {shown}{others} ({reason})")
        return "\n".join(lines)
