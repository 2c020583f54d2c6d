"""The sensitivity profile against a full pass of the whole network, with a new SVD, for each layer and ratio."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from experiments.benchmark.results import show
from facts.calibration.prepare import Calibration
from facts.calibration.selection import select_layers
from facts.cost.timing import TimingPolicy
from facts.decomposition.layers import decompose_layer
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.lowrank import LowRankLinear
from facts.moments.collect import LayerMoments, collect_moments
from facts.moments.losses import kl_divergence
from facts.search.base import Profile
from facts.search.methods.cors import CoRS
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.measured import Sensitivity


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="deit_small_patch16_224", help="any timm model")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--layers", type=int, default=8, help="about how many layers, evenly spread")
    command.add_argument("--images", nargs="+", type=int, default=[16], help="one table for each number")


def run(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = timm.create_model(args.model).to(device).eval()
    size = model.pretrained_cfg["input_size"]
    every = select_layers(model).layers
    step = max(1, len(every) // args.layers)
    layers = dict(list(every.items())[step // 2 :: step])
    estimator = ESTIMATORS["facts"]()
    labelled = [(torch.randn(8, *size, device=device), torch.randint(0, 1000, (8,), device=device))]
    moments = collect_moments(model, layers, labelled, estimator.moments)
    for num_images in args.images:
        images = torch.randn(num_images, *size, device=device).split(args.batch_size)
        problem = partial(
            AllocationProblem,
            Calibration(model, layers, rows={}),
            estimator,
            bounds={"params": 0.5},
            sensitivity=[(x, None) for x in images],
        )
        profiles: dict[str, Profile] = {}

        def plain(problem: Any = problem, images: Any = images, profiles: Any = profiles) -> None:
            ranks = problem(decompositions={}).ranks_of_ratios(CoRS().ratios)
            profiles["plain"] = plain_profile(model, layers, estimator, moments, images, ranks)

        def reusing(problem: Any = problem, profiles: Any = profiles) -> None:
            decompositions = {name: decompose_layer(name, layers[name], estimator, moments[name]) for name in layers}
            ready = problem(decompositions=decompositions)
            profiles["reusing"] = Sensitivity(ready).profile(ready.ranks_of_ratios(CoRS().ratios))

        policy = TimingPolicy(num_turns=args.repeats, min_seconds=0)
        times = policy.times({"plain": plain, "reusing": reusing})
        show(
            "sensitivity profile",
            f"{args.model}, {len(layers)} of {len(every)} layers, {num_images} images in batches of {args.batch_size}, "
            f"{device.type}, {torch.get_num_threads()} threads",
            times,
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
    """Straightforward version: for each layer and rank decompose, replace, run the whole network, compare."""
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


def largest_difference(profiles: dict[str, Profile]) -> float:
    plain, reusing = profiles.values()
    return max(abs(reusing[name][rank] / error - 1) for name in plain for rank, error in plain[name].items())
