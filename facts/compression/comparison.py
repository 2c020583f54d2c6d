"""Comparison of a compressed network with its original: their outputs on held-out samples, their time, their FLOPs."""

import logging
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from facts.calibration.outputs import Distance, distance
from facts.calibration.prepared_model import PreparedModel
from facts.cost.count import Size
from facts.cost.timing import batch_seconds
from facts.modules.linear_calls import copy_with, stand_in
from facts.modules.networks import tensors_of
from facts.moments.data_pass import within_memory
from facts.moments.losses import DIVERGENCES
from facts.result import CompressionResult
from facts.utils.batches import batch_size, has_row_per_sample, in_parts, to_device
from facts.utils.progress import stage

log = logging.getLogger(__name__)

NUM_TIMED = 16  # samples in the batch on which both networks are timed


def compared(result: CompressionResult, precision: torch.dtype, halve_batches: bool = True) -> Distance | None:
    """Compare the outputs; None without an original or held-out samples."""
    if result.original is None or result.output_error is None or result.held_out is None:
        return None
    networks = result.original, result.model
    found = within_memory(partial(distance, *networks, result.held_out, result.output_error, precision), halve_batches)
    if found is None:
        log.warning("the data are too few to hold some out: the distance of the outputs from the original's is unknown")
    elif found.share is None and result.output_error in DIVERGENCES:
        log.warning("the original's outputs hardly depend on its inputs: a distance from them is meaningless")
    return found


def with_distance(
    result: CompressionResult, prepared: PreparedModel, allowed_error: float | None = None
) -> CompressionResult:
    """Add the comparison to a result's summary."""
    execution = prepared.execution
    with stage("comparison"):
        found = compared(result, execution.precision, execution.memory.halve_batches)
    return result.with_summary(distance=found, allowed_error=allowed_error)


def with_latency(result: CompressionResult, prepared: PreparedModel) -> CompressionResult:
    """Time both networks in turns on a few samples, unless a bounded latency has been measured already."""
    if result.summary.latency:
        return result
    inputs, execution = prepared.first_inputs, prepared.execution
    if has_row_per_sample(inputs):
        inputs = tree_map_only(Tensor, lambda tensor: tensor[:NUM_TIMED], inputs)
    inputs = to_device(inputs, prepared.device)
    networks = {"dense": prepared.model, "measured": stand_in(result.model)}

    def timed(num_parts: int) -> dict[str, float]:
        part, _ = next(in_parts((inputs, None), num_parts))
        times = batch_seconds(networks, part, replace(execution.timing, min_seconds=0.0), execution.precision)
        return {name: timing.median for name, timing in times.items()} | {"samples": batch_size(part)}

    with stage("latency"):
        return result.with_summary(latency=within_memory(timed, execution.memory.halve_batches))


def rounded(result: CompressionResult, dtype: torch.dtype, original: torch.dtype | None = None) -> CompressionResult:
    """Round the weights to `dtype`. The network still computes in its own type, and is stored without further loss.

    Weights that already have this type are left as they are. The size of the original is that in the type `original`
    (default: `dtype`); without the original network, it stays as it is.
    """
    if original and result.original:
        result = result.with_summary(sizes=(Size.of(result.original, original), result.summary.sizes[1]))
    if all(tensor.dtype == dtype for tensor in result.model.parameters() if tensor.is_floating_point()):
        return result
    model = copy_with(result.model)
    for tensor in tensors_of(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)
    before = result.summary.sizes[0] if result.original is None else Size.of(result.original, original or dtype)
    result = replace(result, model=model).with_summary(sizes=(before, Size.of(model, dtype)))
    if found := result.summary.distance and compared(result, torch.float32):
        course = result.summary.recovery
        if course and not course.gained_nothing:
            course = replace(course, after=found.mean)
        result = result.with_summary(distance=found, recovery=course)
    return result
