"""Comparison of a compressed network with its original on held-out samples."""

import logging
from dataclasses import replace
from functools import partial

import torch

from facts.calibration.distance import Distance, distance
from facts.calibration.prepare import Calibration
from facts.moments.data_pass import within_memory
from facts.moments.losses import kl_divergence
from facts.result import CompressionResult
from facts.utils.stopwatch import stage, stopwatch

log = logging.getLogger(__name__)


def compared(result: CompressionResult, precision: torch.dtype, halve_batches: bool = True) -> Distance | None:
    """Compare the outputs; None without an original or held-out samples."""
    if result.original is None or result.output_error is None or result.held_out is None:
        return None
    networks = result.original, result.model
    found = within_memory(partial(distance, *networks, result.held_out, result.output_error, precision), halve_batches)
    if found is None:
        log.warning("the data are too few to hold some out: the distance of the outputs from the original's is unknown")
    elif found.share is None and result.output_error is kl_divergence:
        log.warning("the original's outputs hardly depend on its inputs: a distance from them is meaningless")
    return found


def with_distance(result: CompressionResult, calibration: Calibration) -> CompressionResult:
    """Add the comparison to a result's summary."""
    execution = calibration.execution
    with stopwatch() as seconds, stage("comparison"):
        found = compared(result, execution.precision, execution.memory.halve_batches)
    return replace(result, summary=replace(result.summary, distance=found, seconds=dict(seconds)))
