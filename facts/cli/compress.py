"""`facts compress`, `pareto`, `cut`, `recover` and `push`: from a network to a folder, or between folders."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import facts
from facts.cli import options
from facts.cli.options import BUDGET, ESTIMATORS, METHOD, SEARCHES, option

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import pandas
    import torch


COSTS_SHOWN = {"flops": ("GFLOPs", 1e9), "params": ("parameters [M]", 1e6), "latency_ms": ("latency [ms]", 1.0)}
METRICS_SHOWN = {"top1": "top-1 accuracy [%]", "agreement": "agreement with the original [%]"}


def compress(
    model: options.Model,
    data: options.Images,
    out: options.Out,
    ratio: options.Ratio = None,
    flops: options.Flops = None,
    params: options.Params = None,
    latency_ms: Annotated[float | None, option(BUDGET, "Milliseconds of a batch on this device.")] = None,
    error: Annotated[
        float | None, option(BUDGET, "Instead: the smallest network with this mean KL divergence of outputs: 0.05.")
    ] = None,
    estimator: options.EstimatorName = None,
    search: options.SearchName = None,
    parts: options.PartsName = None,
    form: options.FormName = None,
    recover: Annotated[
        float | None, option(METHOD, "How long the original teaches the result, without labels.", **options.MINUTES)
    ] = None,
    convolutions: options.Convolutions = None,
    elastic: Annotated[bool, option(METHOD, "Save a folder that `facts cut` cuts to any budget.", "--elastic")] = False,
    evaluate: Annotated[bool, typer.Option(help="Measure both networks on data that did not calibrate.")] = True,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    evaluation_text: options.EvaluationText = None,
    num_calibration: options.NumCalibration = None,
    sequence_length: options.SequenceLength = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    num_workers: options.NumWorkers = 2,
    device: options.Device = None,
    precision: options.Precision = "float32",
    cache: options.Cache = None,
) -> None:
    """Compress a network to a budget, measure it, and save it in a folder.

    [bold]Examples[/]

        facts compress timm/deit_small_patch16_224 --data photos --ratio 0.5 --out deit_half
        facts compress timm/deit_small_patch16_224 --data photos --ratio 0.5 --recover 30 --out deit_half
        facts compress timm/swin_tiny_patch4_window7_224 --data photos --search cors --flops 6e9 --out swin
        facts compress timm/deit_small_patch16_224 --data photos --error 0.1 --out deit_close
        facts compress timm/deit_tiny_patch16_224 --data photos --latency-ms 20 --out deit
        facts compress timm/resnet50 --data photos --convolutions --params 16e6 --out resnet_16m
        facts compress timm/deit_small_patch16_224 --data photos --elastic --out deit
        facts compress transformers/Qwen/Qwen3-0.6B --data train.txt --evaluation-text test.txt --out qwen

    `--recover` brings the outputs closer to the original's. `--cache FOLDER` makes a second run quick,
    and lets a killed one resume. `README.md` in the folder shows costs and metrics, `facts evaluate --unseen`
    measures it again on the same images, and `facts.load_compressed` loads it in Python.
    """
    import torch

    from facts.calibration.data import Data
    from facts.cli.inputs import batches_of, build, stored_type, task_of
    from facts.compression.comparison import rounded
    from facts.compression.compress import default_parts
    from facts.finetuning.recovery import TOO_FEW
    from facts.utils.files import ScratchFolder
    from facts.utils.progress import stopwatch

    _check_target(out, cache)
    if elastic:
        _refuse_one_network(search, recover)
    budget = facts.Budget(flops=flops, params=params, latency_ms=latency_ms, error=error)
    budget = budget.with_ratios(ratio)
    scratch = ScratchFolder() if elastic and not cache else None
    kept = scratch.path if scratch else cache  # `save_elastic` needs moments and errors again
    execution = facts.Execution(getattr(torch, precision), cache=kept)
    layers: dict[bool | None, Any] = {None: None, True: "all", False: "linear"}
    network = build(model, weights, num_classes, device)
    of_original = stored_type(network)
    stored = torch.float32 if elastic else of_original
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers, "seed": seed}
    task = task_of(network, data, evaluation_text, num_calibration, **reading)
    calibration, sensitivity = batches_of(task, network)
    if recover and sum(Data.of(calibration, network).sizes) < 2:
        raise ValueError(TOO_FEW)
    with stopwatch():
        prepared = facts.prepare(
            network,
            calibration,
            layers=layers[convolutions],
            execution=execution,
            input_shape=task.input_shape(network),
            parts=parts or default_parts(calibration, budget, "flops", estimator, search, form, convolutions),
        )
        methods: dict[str, Any] = {"estimator": estimator, "search": search, "form": form}
        result = facts.compress(prepared, **methods, budget=budget, sensitivity=sensitivity)
    if recover is not None:
        result = facts.recover(result, calibration, minutes=recover, seed=seed, cache=cache)
    result = rounded(result, stored, of_original)
    if elastic:
        _save_elastic(result, out)
    else:
        _save_compressed(result, out, stored)
    again = f"facts evaluate {out} --data {evaluation_text or data}"
    if evaluate:  # now that it is saved, since this may fail
        _evaluate(task, result, network, None if elastic else out, execution.precision, again)
    else:
        print("not evaluated: --no-evaluate")
    warn_if_nothing_gained(result)


def _evaluate(
    task: Any,
    result: "facts.CompressionResult",
    network: Any,
    out: Path | None,
    precision: "torch.dtype",
    again: str,
) -> None:
    """Print the metrics of a saved result beside the original's, and add them to the folder `out`."""
    from facts.cli.inputs import compared, nothing_to_evaluate
    from facts.saving.save import write_metrics

    if reason := nothing_to_evaluate(task):
        print(f"not evaluated: {reason}")
        return
    try:
        metrics, table = compared(task, result, network, precision)
        if out:
            write_metrics(out, metrics)
        print(f"\n{table}")
    except (KeyboardInterrupt, OSError, RuntimeError, ValueError) as error:  # the network is saved and complete
        unseen = "" if getattr(task, "whole", True) else " --unseen"  # a text has no unseen part either
        print(f"not evaluated ({str(error) or 'interrupted'}): try `{again}{unseen}`")


def _save_elastic(result: "facts.CompressionResult", out: Path) -> None:
    from facts.utils.progress import progress_of

    with progress_of("saving"):
        facts.save_elastic(result, out)
    print(result)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"\nsaved to {out}: the original and what every budget needs, {size:.4g} MB in float32")
    print(f"above is one cut of it; `facts cut {out} --ratio 0.6 --out FOLDER` makes another, without data")


def _save_compressed(result: "facts.CompressionResult", out: Path, dtype: "torch.dtype") -> None:
    import torch

    facts.save_compressed(result, out, dtype=dtype)
    print(result)
    half = ", in half precision: `.float()` computes with it in float32" * (dtype != torch.float32)
    print(f"\nsaved to {out}{half}")


def warn_if_nothing_gained(result: "facts.CompressionResult") -> None:
    course = result.summary.recovery
    if course and course.gained_nothing:
        log.warning("recovery gained nothing on the held-out samples: give it more minutes or images")


def _check_target(out: Path, cache: Path | None = None) -> None:
    """Say if an older result will be replaced. Raises `OSError` or `ValueError` for a folder that cannot be used."""
    from facts.saving.manifest import MANIFEST
    from facts.saving.save import target_folder

    target = target_folder(out)
    if cache and cache.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"--cache {cache} lies in --out {out}, which holds one network alone: give another folder")
    if (target / MANIFEST).exists():
        log.warning("%s holds an older result, which will be replaced", out)


def _refuse_one_network(search: str | None, recover: float | None) -> None:
    if recover:
        raise ValueError("--elastic serves every budget: leave out --recover, or use `facts recover` on cuts")
    if search not in (None, "cors", "cors_fisher"):
        raise ValueError(f"{search} gives no errors for other budgets: use --search cors_fisher or cors with --elastic")


def pareto(
    model: options.Model,
    data: options.Images,
    out: Annotated[Path, options.place(None, "Where the table and the plot go.", "FOLDER")],
    estimators: Annotated[str | None, options.several(ESTIMATORS, "Default: facts.")] = None,
    searches: Annotated[str | None, options.several(SEARCHES, "Default: that of `facts compress`.")] = None,
    ratios: Annotated[str, option(None, "Remaining fractions of the cost.", metavar="RATIO,RATIO")] = "0.3,0.5,0.7",
    cost: Annotated[Literal["flops", "params", "latency"], option(None, "What the ratios bound.")] = "flops",
    parts: options.PartsName = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    evaluation_text: options.EvaluationText = None,
    num_calibration: options.NumCalibration = None,
    sequence_length: options.SequenceLength = None,
    batch_size: options.BatchSize = None,
    num_workers: options.NumWorkers = 2,
    device: options.Device = None,
    cache: options.Cache = None,
) -> None:
    """Draw accuracy against FLOPs, parameters or latency, of one method or several, from one pass over the data.

    [bold]Examples[/]

        facts pareto timm/deit_small_patch16_224 --data photos --out deit_curves
        facts pareto timm/deit_small_patch16_224 --data photos --estimators facts,svd_llm,pela --out methods
        facts pareto timm/swin_tiny_patch4_window7_224 --data photos --cost latency --ratios 0.7,0.8 --out swin

    Each point is what `facts compress` makes with the same options: methods that are named compress layers. FOLDER gets
    `pareto.csv`, written after each point, and `pareto.png`, whose bars are standard errors over the images. `--cache`
    keeps what a killed run computed.
    """
    methods: dict[str, Any] = {
        "estimators": options.all_chosen(estimators or "facts", ESTIMATORS),
        "searches": options.all_chosen(searches, SEARCHES) if searches else [],
    }
    fractions = [options.fraction_of(ratio) for ratio in ratios.split(",")]

    from facts.cli.inputs import batches_of, build, measured, nothing_to_evaluate, task_of
    from facts.compression.compress import default_parts
    from facts.result import STANDARD_ERROR
    from facts.utils.files import writable_folder

    writable_folder(out, keep=False)
    network = build(model, weights, num_classes, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers}
    task = task_of(network, data, evaluation_text, num_calibration, **reading)
    if reason := nothing_to_evaluate(task):
        raise ValueError(f"there is nothing to compare by: {reason}")
    calibration, sensitivity = batches_of(task, network)
    parts = parts or default_parts(calibration, facts.Budget.of(cost=cost), cost, estimators, searches)
    prepared = facts.prepare(network, calibration, parts=parts, execution=facts.Execution(cache=cache))
    points = facts.pareto(
        prepared,
        lambda each: measured(task, each, network, prepared.execution.precision, prepared.held_out),
        ratios=fractions,
        file=out / "pareto.csv",
        cost=cost,
        sensitivity=sensitivity,
        **methods,
    )
    metric = next(name for name in ("perplexity", "top1", "agreement", "cosine") if name in points)
    bars = metric + STANDARD_ERROR
    column = {"latency": "latency_ms"}.get(cost, cost)
    _draw(points, column, metric, bars if bars in points else None, out / "pareto.png")
    print(points.filter(["estimator", "search", "form", "ratio", column, metric, bars]).to_string(index=False))
    print(f"saved {out / 'pareto.csv'} and {out / 'pareto.png'}")


def _draw(points: "pandas.DataFrame", column: str, metric: str, bars: str | None, file: Path) -> None:
    """Plot a metric against a cost, one curve per method and a point for the original, which comes first."""
    from facts.utils.files import replacing

    xlabel, unit = COSTS_SHOWN[column]
    points = points.assign(**{column: points[column] / unit})
    look: dict[str, Any] = {"x": column, "y": metric, "yerr": bars, "capsize": 3, "marker": "o"}
    look |= {"xlabel": xlabel, "ylabel": METRICS_SHOWN.get(metric, metric)}
    axes = points[:1].plot(**look, color="black", label="original", figsize=(6, 4))
    for method, own in points[1:].groupby(["estimator", "search"], sort=False):
        own.sort_values(column).plot(**look, label=", ".join(method), ax=axes)
    with replacing(file) as path:
        axes.figure.savefig(path, format="png", dpi=200, bbox_inches="tight")


def cut(
    folder: options.Folder,
    out: options.Out,
    ratio: options.Ratio = None,
    flops: options.Flops = None,
    params: options.Params = None,
    latency_ms: Annotated[float | None, option(BUDGET, "Milliseconds of one input here.")] = None,
) -> None:
    """Cut a folder that `facts compress --elastic` wrote to a budget, without data.

    [bold]Examples[/]

        facts compress timm/deit_small_patch16_224 --data photos --elastic --out deit
        facts cut deit --ratio 0.6 --out deit_60
        facts cut deit --params 12e6 --out deit_12m
    """
    import torch

    from facts.compression.comparison import rounded
    from facts.modules.networks import HALF
    from facts.search.budget import DEFAULT_RATIO
    from facts.utils.progress import progress_of

    if out.resolve() == Path(folder).resolve():
        raise ValueError("a cut would overwrite the folder that serves every budget: give another --out")
    _check_target(out)
    if all(each is None for each in (ratio, flops, params, latency_ms)):
        ratio = DEFAULT_RATIO
    with progress_of("cut"):
        result = facts.load_compressed(folder, ratio=ratio, flops=flops, params=params, latency_ms=latency_ms)
    halves = {str(half).removeprefix("torch."): half for half in HALF}
    dtype = halves.get(result.summary.sizes[0].types, torch.float32)
    _save_compressed(rounded(result, dtype), out, dtype)


def recover(
    folder: options.Folder,
    data: options.Images,
    minutes: Annotated[float, typer.Option(help="How long to train.", **options.MINUTES)],
    out: options.Out,
    weights: Annotated[str | None, option(None, "The original's; default: the published ones.", metavar="FILE")] = None,
    num_calibration: options.NumCalibration = None,
    sequence_length: options.SequenceLength = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    num_workers: options.NumWorkers = 2,
    device: options.Device = None,
    cache: options.Cache = None,
) -> None:
    """Let the original teach a compressed network, without labels, on the images or texts that calibrated it.

    [bold]Examples[/]

        facts recover deit_half --data photos --minutes 30 --out deit_recovered
        facts recover mine_half --data photos --minutes 30 --weights mine.safetensors --out mine_recovered

    With `--cache FOLDER`, the same command continues after an interruption. `facts evaluate` measures the result. If
    held-out samples show no gain, a warning says so last, and the exit status is 0.
    """
    from facts.cli.inputs import load_result, original_of, task_of
    from facts.compression.comparison import rounded

    _check_target(out, cache)
    result, dtype = load_result(folder)
    original = original_of(result.model, weights, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers, "seed": seed}
    calibration = task_of(original, data, None, num_calibration, **reading).calibration(original)
    result = facts.recover(result, calibration, minutes=minutes, original=original, seed=seed, cache=cache)
    result = rounded(result, dtype)
    _save_compressed(result, out, dtype)
    warn_if_nothing_gained(result)


def push(
    folder: options.Folder,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Created if necessary.")],
    private: Annotated[bool, typer.Option("--private", help="Create a repository that only you can see.")] = False,
) -> None:
    """Upload a compressed network to Hugging Face, with a model card, after `hf auth login`.

    [bold]Examples[/]

        facts push deit_half me/deit-half
        facts push deit_half me/deit-half --private

    The card is rewritten, unless the one in the repository was edited. `facts.load_compressed("OWNER/NAME")` loads
    the network from there.
    """
    from facts.saving.manifest import ELASTIC, Manifest

    if (Path(folder) / ELASTIC).exists():
        raise ValueError(f"{folder} serves every budget: push a cut of it, or all of it with `hf upload`")
    result = facts.load_compressed(folder)
    metrics = Manifest.read(Path(folder)).metrics
    print(f"pushed to {facts.push_to_hub(result, repository, metrics=metrics, private=private)}")
