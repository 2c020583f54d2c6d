"""The cross-token map against one Gram matrix after another, and its memory at full size."""

import argparse
import resource
import time

import torch
from torch import Tensor

from experiments.benchmark.results import show
from facts.analysis import TokenStore, cross_token_coupling
from facts.cost.timing import TimingPolicy
from facts.moments.batch import LayerBatch


def add_arguments(command: argparse.ArgumentParser) -> None:
    for name, size in (("samples", 2000), ("plain-samples", 50), ("tokens", 197), ("features", 768)):
        command.add_argument(f"--{name}", type=int, default=size)


def run(args: argparse.Namespace) -> None:
    small, large = (filled_store(num_samples, args) for num_samples in (args.plain_samples, args.samples))
    variants = {"every pair alone": lambda: pairwise_map(small), "in blocks": lambda: cross_token_coupling(small)}
    times = TimingPolicy(num_turns=args.repeats, min_seconds=0).times(variants)
    sizes = f"{args.tokens} tokens of {args.features} features"
    show("cross-token map", f"{sizes}, {args.plain_samples} samples, {torch.get_num_threads()} threads", times)
    start = time.perf_counter()
    cross_token_coupling(large)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{sizes}, {args.samples} samples: {time.perf_counter() - start:.0f} s, peak memory {peak:.2f} GiB")


def filled_store(num_samples: int, args: argparse.Namespace) -> TokenStore:
    store = TokenStore()
    for size in map(len, torch.arange(num_samples).split(50)):
        x, g = (torch.randn(size, args.tokens, args.features) for _ in range(2))
        store.add(LayerBatch(x, g))
    return store


def pairwise_map(store: TokenStore) -> Tensor:
    """Straightforward version: all tokens in memory, two Gram matrices and their product for every pair."""
    tokens = list(zip(*(store.read(kind, 0, store.num_tokens) for kind in ("inputs", "grads")), strict=True))
    norms = [[((x @ y.T) * (g @ h.T)).norm() for y, h in tokens] for x, g in tokens]
    return torch.tensor(norms) / torch.tensor(norms).diagonal().mean()
