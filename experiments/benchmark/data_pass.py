"""The data passes of FACTS, on layers and on units, and of all ten estimators, against plain forward and backward."""

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

import facts
from experiments.benchmark.setting import Setting, add_precision, add_setting, write_results
from facts.cost.timing import TimingPolicy
from facts.estimators import ESTIMATORS
from facts.modules.modes import autocast
from facts.moments.collect import MomentPass
from facts.moments.losses import summed_cross_entropy
from facts.moments.statistics import InputSum

DATA_PASSES: dict[str, tuple[str, list[str]]] = {
    "data pass of FACTS": ("layers", ["facts"]),
    "data pass of FACTS, units": ("units", ["facts"]),
    "data pass of all ten estimators": ("layers", list(ESTIMATORS)),
}
PLAIN = "forward + backward"
PASSES = (PLAIN, *DATA_PASSES)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_precision(command)
    add_setting(command, ["deit_b", "swin_b", "convnext_b", "mambavision_b"])


def run(args: argparse.Namespace) -> None:
    rows = []
    for name in args.models:
        setting = Setting(name, args)
        memory = {what: in_own_process(args.device, peak_memory, setting, what) for what in PASSES}
        seconds = median_seconds(setting, args.repeats)
        rows += [
            {
                "model": setting.title,
                "pass": what,
                "seconds per 1,000 images": 1000 * seconds[what] / args.batch_size,
                "ratio of time": seconds[what] / seconds[PLAIN],
                "peak memory [GiB]": memory[what],
                "ratio of memory": memory[what] / memory[PLAIN],
            }
            for what in PASSES
        ]
        write_results("data_pass", pd.DataFrame(rows), text(args), args)  # immediately: the next model takes minutes


def median_seconds(setting: Setting, repeats: int) -> dict[str, float]:
    """Time every pass; a function of its own frees its sums before the next model's."""
    with passes(setting) as variants:
        times = TimingPolicy(num_turns=repeats, min_seconds=0).times(variants)
        return {name: timing.median for name, timing in times.items()}


def text(args: argparse.Namespace) -> str:
    kind = "of tensors on the GPU" if args.device.startswith("cuda") else "of the whole process, libraries included"
    return (
        f"Random weights and images; medians of {args.repeats} rounds in which the passes took turns. Peak memory is "
        f"that {kind}, over two batches, with each pass in its own process."
    )


@contextmanager
def passes(setting: Setting, names: Iterable[str] = PASSES) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield passes over the same batch, to call repeatedly; their sums stay allocated, as in a run of many batches."""
    model, batch = setting.build()
    calls: dict[str, Callable[[], None]] = {PLAIN: partial(plain_pass, model, *batch, setting.dtype)}
    for name in set(names) & set(DATA_PASSES):
        parts, estimators = DATA_PASSES[name]
        prepared = facts.prepare(model, [batch], parts=parts, held_out=())
        methods = (prepared.suited(ESTIMATORS[each]()) for each in estimators)
        moments = dict.fromkeys(moment for method in methods for moment in method.moments)
        if prepared.append_one:
            moments[InputSum()] = None
        run = MomentPass(
            prepared.rewritten,
            prepared.linears,
            list(moments),
            summed_cross_entropy,
            setting.dtype,
            append_one=prepared.append_one,
        )
        calls[name] = partial(run.accumulate, [batch])
    yield {name: calls[name] for name in names}


def plain_pass(model: nn.Module, images: Tensor, labels: Tensor, precision: torch.dtype) -> None:
    """Forward and backward with weight gradients: the cost of an optimiser's step without the update."""
    model.zero_grad(set_to_none=True)
    with autocast(images.device, precision):
        loss = summed_cross_entropy(model(images), labels)
    loss.backward()


def in_own_process(device: str, function: Callable[..., float], *arguments: Setting | str) -> float:
    """Run a function in a new process that does nothing else; return its result.

    A forked process cannot use a GPU; a spawned one inherits this one's peak of main memory.
    """
    context = multiprocessing.get_context("spawn" if device.startswith("cuda") else "forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by every process
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def peak_memory(setting: Setting, what: str) -> float:
    """Measure the peak memory in GiB over two batches; the second is added to existing sums."""
    with passes(setting, [what]) as variants:
        for _ in range(2):
            variants[what]()
    if setting.options.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(setting.options.device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
