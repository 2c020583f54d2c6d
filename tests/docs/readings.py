"""What claims of the pages read from the records: leads and their errors, shares, times and speed-ups."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import measurements
import pandas as pd
from measurements import (
    BOTH,
    HALVES,
    TINY,
    TOKENS,
    ahead,
    at,
    table,
)

from tests.docs.pages import maker

RANKS = (60, 50, 40)
PLAIN, OTHERS = ("PELA", "FW-SVD", "ASVD"), ("FW-SVD", "GFWSVD", "KFAC-reduce", "KFAC-expand")
HALF = [f"{network}, 50 %" for network in TINY]
FAST = ("float32 (TF32)", "bfloat16", "float16")
SIZES = "photos/calibration_size"
BOTH_AT_HALF = "ViT-Tiny, units and tokens at 50 %"
LAYERS, PLACE = "Layers, pivoted: FACTS + CoRS-Fisher", "units and tokens at 50 %"
IN_FLOAT32 = [f"{runtime}, float32" for runtime in ("PyTorch", "PyTorch compiled", "ONNX Runtime", "OpenVINO")]
INT8 = "int8, OpenVINO", "int8, ONNX Runtime"
IN_OPENVINO = INT8[0], "DeiT-Tiny, dense"
fisher = partial(at, "photos/fisher_estimators")
encoder = partial(at, "photos/encoders", "DeiT-Tiny, 50 %", "nearest_top1")
in_int8 = partial(at, "photos/int8")
minutes = partial(at, "photos/search_methods", "ViT-Tiny, layers at 70 %", "search_minutes")


def lead(name: str, row: str, other: str, columns: Sequence[str] = (), metric: str = "top1") -> float:
    """Average over columns how far one row is ahead of another."""
    lines = table(name).query("metric == @metric").pivot(index="row", columns="column", values="ours")
    return float((lines.loc[row] - lines.loc[other])[list(columns) or list(lines.columns)].mean())


def top1(name: str, row: str, column: str) -> float:
    return at(name, row, column, "top1")


def errors_ahead(other: str, column: str, halves: Sequence[str] = HALVES) -> float:
    """By how many standard errors units and tokens lead another row."""
    difference, error = ahead(BOTH, other, column, halves)
    return difference / error if difference else 0.0  # both are 0 if all outcomes are the same


def tokens_alone_are_level() -> bool:
    return all(abs(errors_ahead(TOKENS, each)) <= 2 for each in columns(80, 70, 60, 50))


def points(row: str, other: str, *ratios: int, halves: Sequence[str] = HALVES) -> list[float]:
    """How far a row is ahead of another, by network."""
    return [ahead(row, other, column, halves)[0] for column in columns(*ratios)]


def columns(*ratios: int) -> list[str]:
    return [f"{network}, {ratio} %" for network in TINY for ratio in ratios]


def on_cpu(runtime: str, plan: str) -> float:
    """The share of the time that remains."""
    return at("benchmarks/amd_epyc/runtimes", runtime, f"DeiT-B, {plan}", "remaining_time")


def on_gpu(runtime: str, units: bool = False) -> float:
    """The share of the time that remains, by a plan of so many FLOPs by the full rule."""
    plan = "0.504" if units else "0.501"
    return at("benchmarks/nvidia_h200/units_and_tokens", f"PyTorch, {runtime}", plan, of="remaining time")


def verdict_on(claim: str) -> str:
    """The last column of the paper's claims."""
    return next(cells[-1] for cells in maker["paper_claims"]() if cells[0] == claim)


def speeds_on_gpu(plan: str) -> list[float]:
    formats = "float32", "bfloat16", "float16"
    return [at("benchmarks/nvidia_h200/throughput", f"PyTorch, {kind}", plan, of="speed-up") for kind in formats]


def latency(kind: str, network: str) -> float:
    return at("benchmarks/nvidia_h200/throughput", f"PyTorch, {kind}", network, of="latency of one image [ms]")


def over_cors(column: str, metric: str = "top1") -> float:
    """How far CoRS-Fisher is ahead of CoRS on a published network."""
    return lead("photos/search_methods", "CoRS-Fisher, exact", "CoRS", [column], metric)


def spent(stage: str, column: str) -> float:
    return measurements.record_of(BOTH, column)["seconds"][stage]


def recovered_by(what: str, network: str) -> float:
    row = f"FACTS + CoRS-Fisher, {what}"
    return lead("photos/beyond", f"{row}, recovered", row, [f"{network}, 50 %"])


def gain_in_int8(row: str, network: str, which: str = PLACE) -> float:
    """The speed in int8 over that of the dense network in int8."""
    return in_int8(row, f"{network}, {which}", "speedup") / in_int8(row, f"{network}, dense", "speedup")


def top1_in_int8(row: str, network: str, which: str = "dense") -> float:
    return in_int8(row, f"{network}, {which}", "exported_top1")


def changed_by_int8(which: str) -> list[int]:
    """Percent of predictions that int8 changes, by runtime and network."""
    return [round(100 - in_int8(row, f"{network}, {which}", "agreement")) for row, network in product(INT8, TINY)]


def level_methods() -> list[str]:
    return list(table("mini/figures/baselines").query("level == True").method)


def data_passes(title: str, *gpus: str) -> list[float]:
    """Times of a data pass relative to one forward and backward pass, on all CPUs and networks."""
    machines = "amd_epyc", "intel_r_xeon_r_processor_2_50ghz", *gpus
    lines = pd.concat([table(f"benchmarks/{machine}/data_pass") for machine in machines])
    return list(lines[lines["pass"] == title]["ratio of time"])
