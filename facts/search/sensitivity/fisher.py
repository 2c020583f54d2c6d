"""Sensitivity to second order: KL(original ‖ compressed) = ½ vec(ΔW)ᵀ F vec(ΔW), without running a compressed network.

The discarded part of a layer is a sum over components j: ΔW_r = Σ_{j >= r} u_j v_jᵀ, so one pass serves all ranks.
Legend: N samples, T tokens, n = d_in, m = d_out, k = min(m, n) components.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass, within_memory
from facts.moments.losses import Loss, on_drawn_targets, on_given_labels
from facts.search.problem import AllocationProblem
from facts.utils.cache import calibration_key, content_key

Labels = Literal["sampled", "given"]


def kronecker_profile(problem: AllocationProblem, name: str) -> Tensor:
    """Errors `[k + 1]` of a part at ranks 0 .. k in float64: half the discarded energy, with A ⊗ B as the Fisher."""
    return 0.5 * _tail_sums(problem.energies(name))


def exact_profiles(problem: AllocationProblem, labels: Labels, seed: int) -> dict[str, Tensor]:
    """Errors `[k + 1]` of every part at ranks 0 .. k in float64, with the Fisher of the sensitivity data.

    With c_j = Σ_t (g_t · u_j)(v_j · x_t), the slope of a sample's loss along component j, summed over the heads of a
    unit, the error at rank r is ½ mean (Σ_{j >= r} c_j)². If a bias is fitted, x_t is relative to the mean input, whose
    output the bias keeps. `sampled` draws labels from class logits (true Fisher), or noise for features (Gauss-Newton);
    `given` uses the labels of the data (empirical Fisher).
    """
    batches = problem.sensitivity_batches()
    if problem.cache:
        file = f"fisher-{labels}-{content_key(calibration_key(batches), seed)}"
        tensors = problem.cache.load(file)
        if tensors:
            return {name: tensors[name] for name in problem.parts}
    loss = problem.calibration.loss
    loss = on_drawn_targets(loss, seed) if labels == "sampled" else on_given_labels(loss)
    memory = problem.calibration.execution.memory
    profiles = within_memory(lambda num_parts: _measured(problem, batches, loss, num_parts), memory.halve_batches)
    if problem.cache:
        problem.cache.save(file, profiles)
    return profiles


def _measured(
    problem: AllocationProblem, batches: Iterable[tuple[Any, Any]], loss: Loss, num_parts: int
) -> dict[str, Tensor]:
    """The mean over samples of ½ (Σ_{j >= r} c_j)² for every part, on the CPU."""
    decompositions, calls, execution = problem.decompositions, problem.calibration.calls, problem.calibration.execution
    part_of = {call: name for name, part in problem.parts.items() for call in part.calls}
    totals = {
        name: torch.zeros(len(decompositions[part.calls[0]].energies) + 1, dtype=torch.float64, device=problem.device)
        for name, part in problem.parts.items()
    }
    waiting: dict[str, list[Tensor]] = defaultdict(list)  # slopes of a unit's heads in this batch

    def add(name: str, batch: LayerBatch) -> None:
        decomposition, x = decompositions[name], batch.x
        left, right = decomposition.left.to(x), decomposition.right.to(x)
        if decomposition.mean is not None:
            x = x - decomposition.mean.to(x)
        part = part_of[name]
        waiting[part].append((_projected(batch.g, left) * (x @ right.T)).sum(dim=1))
        if len(waiting[part]) == len(problem.parts[part].calls):
            slopes = torch.stack(waiting.pop(part)).sum(dim=0)
            totals[part] += 0.5 * _tail_sums(slopes.double()).square().sum(dim=0)

    blocks = execution.memory.blocks(problem.network, calls.values())
    data_pass = DataPass(problem.network, calls, add, loss, execution.precision, True, num_parts, blocks)
    num_samples = data_pass.run(batches, "Fisher profile", totals.values())
    return {name: total.cpu() / num_samples for name, total in totals.items()}


def _projected(g: Tensor, left: Tensor) -> Tensor:
    """Compute `G left`, `[N, T, k]`; with one `left` per head, `[h, m, k]`, a token's heads are adjacent along T."""
    if left.ndim == 2:
        return g @ left
    return torch.einsum("nthm,hmk->nthk", g.unflatten(1, (-1, len(left))), left).flatten(1, 2)


def _tail_sums(values: Tensor) -> Tensor:
    """Σ_{j >= r} of the last axis `[..., k]`, for r = 0 .. k: `[..., k + 1]`."""
    return F.pad(values.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))
