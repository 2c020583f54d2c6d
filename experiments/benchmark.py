"""Speed against the plain way, in one run: `python -m experiments.benchmark calibration`, or `search`, or `coupling`.

Variants take turns, A B C A B C, and medians are compared, so that a busy machine slows all of them alike.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from facts.analysis import TokenStore, cross_token_coupling
from facts.compression import decompose_layer
from facts.cost import count_params
from facts.estimators import ESTIMATORS, Estimator
from facts.files import ScratchFolder
from facts.layers import select_layers
from facts.losses import kl_divergence, summed_cross_entropy
from facts.lowrank import LowRankLinear
from facts.moments.batch import LayerBatch
from facts.moments.collect import LayerMoments, MomentPass, collect_moments
from facts.search import AllocationProblem, CoRS
from facts.search.base import Profile
from facts.search.sensitivity import Sensitivity


def interleaved(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every variant, `repeats` times in turn, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in track(range(repeats + 1), "rounds"):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def plain_pass(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward with weight gradients: what an optimiser's step would cost without the update."""
    for images, labels in batches:
        model.zero_grad(set_to_none=True)
        summed_cross_entropy(model(images), labels).backward()


def moment_pass(model: nn.Module, estimators: list[Estimator], folder: Path) -> MomentPass:
    """A data pass for some estimators, its sums allocated once for all rounds, as a run does for its many batches."""
    moments = list(dict.fromkeys(moment for estimator in estimators for moment in estimator.moments))
    return MomentPass(model, select_layers(model), moments, summed_cross_entropy, torch.float32, folder)


def calibration(args: argparse.Namespace) -> None:
    """The data pass of FACTS, and of all ten estimators, as ratios to a plain forward and backward pass."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = timm.create_model(args.model).to(device).eval()
    size = model.pretrained_cfg["input_size"]
    batches = [
        (torch.randn(args.batch_size, *size, device=device), torch.randint(0, 1000, (args.batch_size,), device=device))
        for _ in range(args.batches)
    ]
    facts = [ESTIMATORS["facts"]()]
    every = [estimator() for estimator in ESTIMATORS.values()]
    scratch = ScratchFolder()
    passes = {
        "FACTS": moment_pass(model, facts, scratch.path),
        "all ten estimators": moment_pass(model, every, scratch.path),
    }
    variants = {
        "forward + backward": lambda: plain_pass(model, batches),
        **{name: partial(data_pass.accumulate, batches) for name, data_pass in passes.items()},
    }
    for precision in args.matmul_precisions:
        torch.set_float32_matmul_precision(precision)
        show(
            "data pass",
            f"{args.model} ({count_params(model) / 1e6:.0f} M), {args.batches} batches of {args.batch_size}, "
            f"{device.type}, {torch.get_num_threads()} threads, matmul precision {precision}",
            interleaved(variants, args.repeats),
        )


def show(what: str, title: str, seconds: dict[str, list[float]]) -> None:
    """A table of the variants; ratios are to the first of them."""
    table = Table(title=title)
    for heading in (what, "median [s]", "fastest [s]", "ratio of medians"):
        table.add_column(heading, justify="left" if heading == what else "right")
    plain = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:.2f}", f"{min(values):.2f}", f"{median / plain:.2f}")
    Console().print(table)


def search(args: argparse.Namespace) -> None:
    """The sensitivity profile, against a full pass of the whole network, decomposed anew, for each layer and ratio."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = timm.create_model(args.model).to(device).eval()
    size = model.pretrained_cfg["input_size"]
    every = select_layers(model)
    step = max(1, len(every) // args.layers)
    layers = dict(list(every.items())[step // 2 :: step])
    estimator = ESTIMATORS["facts"]()
    labelled = [(torch.randn(8, *size, device=device), torch.randint(0, 1000, (8,), device=device))]
    moments = collect_moments(model, layers, labelled, estimator.moments)
    for num_images in args.images:
        images = torch.randn(num_images, *size, device=device).split(args.batch_size)
        problem = partial(
            AllocationProblem,
            model=model,
            layers=layers,
            bounds={"params": 0.5},
            sensitivity=[(x, None) for x in images],
        )
        profiles: dict[str, Profile] = {}

        def plain(problem=problem, images=images, profiles=profiles) -> None:
            ranks = problem(decompositions={}).ranks_of_ratios(CoRS().ratios)
            profiles["plain"] = plain_profile(model, layers, estimator, moments, images, ranks)

        def reusing(problem=problem, profiles=profiles) -> None:
            decompositions = {name: decompose_layer(name, layers[name], estimator, moments[name]) for name in layers}
            ready = problem(decompositions=decompositions)
            profiles["reusing"] = Sensitivity(ready).profile(ready.ranks_of_ratios(CoRS().ratios))

        seconds = interleaved({"plain": plain, "reusing": reusing}, args.repeats)
        show(
            "sensitivity profile",
            f"{args.model}, {len(layers)} of {len(every)} layers, {num_images} images in batches of {args.batch_size}, "
            f"{device.type}, {torch.get_num_threads()} threads",
            seconds,
        )
        print(f"Largest relative difference of the results: {largest_difference(profiles):.1e}")


@torch.no_grad()
def plain_profile(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    estimator: Estimator,
    moments: dict[str, LayerMoments],
    images: Sequence[Tensor],
    ranks: dict[str, list[int]],
) -> Profile:
    """What one would write first: for each layer and rank decompose, replace, run the whole network, compare."""
    originals = [model(x) for x in images]
    num_images = sum(map(len, images))
    profile: Profile = {}
    for name, layer in layers.items():
        profile[name] = {}
        for rank in ranks[name]:
            factors = decompose_layer(name, layer, estimator, moments[name]).truncate(rank)
            model.set_submodule(name, LowRankLinear(*factors, layer.bias))
            errors = [kl_divergence(original, model(x)) for x, original in zip(images, originals, strict=True)]
            model.set_submodule(name, layer)
            profile[name][rank] = sum(error.item() for error in errors) / num_images
    return profile


def coupling(args: argparse.Namespace) -> None:
    """The cross-token map, against one Gram matrix after another, and the memory that it takes at full size."""
    small, large = (filled_store(num_samples, args) for num_samples in (args.plain_samples, args.samples))
    variants = {"every pair alone": lambda: pairwise_map(small), "in blocks": lambda: cross_token_coupling(small)}
    seconds = interleaved(variants, args.repeats)
    sizes = f"{args.tokens} tokens of {args.features} features"
    show("cross-token map", f"{sizes}, {args.plain_samples} samples, {torch.get_num_threads()} threads", seconds)
    start = time.perf_counter()
    cross_token_coupling(large)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{sizes}, {args.samples} samples: {time.perf_counter() - start:.0f} s, peak memory {peak:.2f} GiB")


def filled_store(num_samples: int, args: argparse.Namespace) -> TokenStore:
    store = TokenStore()
    for size in map(len, torch.arange(num_samples).split(50)):
        store.add(LayerBatch(*(torch.randn(size, args.tokens, args.features) for _ in range(2))))
    return store


def pairwise_map(store: TokenStore) -> Tensor:
    """What one would write first: all tokens in memory, two Gram matrices and their product for every pair."""
    tokens = list(zip(*(store.read(kind, 0, store.num_tokens) for kind in ("inputs", "grads")), strict=True))
    norms = [[((x @ y.T) * (g @ h.T)).norm() for y, h in tokens] for x, g in tokens]
    return torch.tensor(norms) / torch.tensor(norms).diagonal().mean()


def largest_difference(profiles: dict[str, Profile]) -> float:
    plain, reusing = profiles.values()
    return max(abs(reusing[name][rank] / error - 1) for name in plain for rank, error in plain[name].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for run in (calibration, search, coupling):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        default = "deit_base_distilled_patch16_224" if run is calibration else "deit_small_patch16_224"
        command.add_argument("--repeats", type=int, default=3)
        command.set_defaults(run=run)
        if run is coupling:
            for name, size in (("samples", 2000), ("plain-samples", 50), ("tokens", 197), ("features", 768)):
                command.add_argument(f"--{name}", type=int, default=size)
            continue
        command.add_argument("--model", default=default, help="any timm model")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--batch-size", type=int, default=16)
        if run is calibration:
            precisions = ["highest", "high", "medium"]
            command.add_argument("--batches", type=int, default=1)
            command.add_argument("--matmul-precisions", nargs="+", default=["highest"], choices=precisions)
        else:
            command.add_argument("--layers", type=int, default=8, help="about how many layers, evenly spread")
            command.add_argument("--images", nargs="+", type=int, default=[16], help="one table for each number")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
