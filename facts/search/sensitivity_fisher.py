"""Sensitivity to second order: KL(original ‖ compressed) = ½ vec(ΔW)ᵀ F vec(ΔW), without running a compressed network.

The discarded part of a layer is a sum over components j: ΔW_r = Σ_{j >= r} u_j v_jᵀ, so one pass serves all ranks.
Legend: N samples, T tokens, n = d_in, m = d_out, k = min(m, n) components.
"""

from collections import defaultdict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass, within_memory
from facts.moments.losses import Loss, on_drawn_targets, on_given_labels
from facts.search.base import AllocationProblem
from facts.utils.batches import Batches
from facts.utils.cache import calibration_key, content_key

Labels = Literal["sampled", "given"]


def kronecker_profile(problem: AllocationProblem, name: str) -> Tensor:
    """Errors `[k + 1]` of a part at ranks 0 .. k in float64: half the discarded energy, with A ⊗ B as the Fisher."""
    return 0.5 * _tail_sums(problem.energies(name))


def exact_profiles(problem: AllocationProblem, labels: Labels, seed: int) -> dict[str, Tensor]:
    """Errors `[k + 1]` of every part at ranks 0 .. k in float64, with the Fisher of the sensitivity data.

    With c_j the slope of a sample's loss along component j (`Part.slopes`), summed over the linears of a part, the
    error at rank r is ½ mean (Σ_{j >= r} c_j)². `sampled` draws labels from class logits (true Fisher), or noise for
    features (Gauss-Newton); `given` uses the labels of the data (empirical Fisher).
    """
    batches = problem.sensitivity_batches()
    if problem.cache:
        file = f"fisher-{labels}-{content_key(calibration_key(batches), seed)}"
        tensors = problem.cache.load(file)
        if tensors:
            return {name: tensors[name] for name in problem.parts}
    loss = problem.prepared.loss
    loss = on_drawn_targets(loss, seed) if labels == "sampled" else on_given_labels(loss)
    memory = problem.prepared.execution.memory
    profiles = within_memory(lambda num_parts: _measured(problem, batches, loss, num_parts), memory.halve_batches)
    if problem.cache:
        problem.cache.save(file, profiles)
    return profiles


def _measured(problem: AllocationProblem, batches: Batches, loss: Loss, num_parts: int) -> dict[str, Tensor]:
    """The mean over samples of ½ (Σ_{j >= r} c_j)² for every part, on the CPU."""
    prepared, decompositions = problem.prepared, problem.decompositions
    execution, linears = prepared.execution, prepared.linears
    totals = {
        name: torch.zeros(part.largest + 1, dtype=torch.float64, device=problem.device)
        for name, part in problem.parts.items()
    }
    waiting: dict[str, list[Tensor]] = defaultdict(list)  # slopes of a unit's heads in this batch

    def add(name: str, batch: LayerBatch) -> None:
        part = prepared.part_of[name]
        of_calls = [part.slopes(call, decompositions[name]) for call in batch.calls]
        waiting[part.name].append(torch.stack(of_calls).sum(dim=0))
        if len(waiting[part.name]) == len(part.linears):
            slopes = torch.stack(waiting.pop(part.name)).sum(dim=0)
            totals[part.name] += 0.5 * _tail_sums(slopes.double()).square().sum(dim=0)

    data_pass = DataPass(prepared.rewritten, linears, add, loss, execution.precision, True, num_parts)
    num_samples = data_pass.run(batches, "Fisher profile", totals.values())
    return {name: total.cpu() / num_samples for name, total in totals.items()}


def _tail_sums(values: Tensor) -> Tensor:
    """Σ_{j >= r} of the last axis `[..., k]`, for r = 0 .. k: `[..., k + 1]`."""
    return F.pad(values.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))
