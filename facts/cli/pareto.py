"""`facts pareto`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from facts.cli import options
from facts.cli.options import ESTIMATORS, FORMS, SEARCHES, all_chosen, completed, option

COLUMNS = {"flops": "flops", "params": "params", "latency": "latency_ms"}


def several(choices: Mapping[str, str], explanation: str) -> Any:
    """An option for a comma-separated list of choices."""
    return option(
        None,
        f"Any of {', '.join(choices)}. {explanation}",
        metavar="NAME,NAME",
        autocompletion=lambda incomplete: completed(incomplete, choices),
    )


def pareto(
    model: options.Model,
    data: options.Images,
    out: Annotated[Path, option(None, "Where the table and the figure go.", metavar="FOLDER")],
    estimators: Annotated[str, several(ESTIMATORS, "`facts compress --help` explains them.")] = "facts,svd_llm,pela",
    searches: Annotated[str, several(SEARCHES, "They choose the ranks.")] = "cors_fisher",
    forms: Annotated[str | None, several(FORMS, "They set how low-rank layers are stored.")] = None,
    parts: options.PartsName = None,
    ratios: Annotated[
        str, typer.Option(metavar="RATIO,RATIO", help="Fractions of the compressed layers' cost that remain.")
    ] = "0.3,0.5,0.7",
    cost: Annotated[
        Literal["flops", "params", "latency"],
        typer.Option(help="The cost that the ratios bound and the figure shows; latency is of the whole network."),
    ] = "flops",
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    evaluation_text: options.EvaluationText = None,
    num_calibration: options.NumCalibration = None,
    num_sensitivity: options.NumSensitivity = None,
    sequence_length: options.SequenceLength = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    num_workers: options.NumWorkers = 2,
    device: options.Device = None,
    precision: options.Precision = "float32",
    moments: options.Moments = "auto",
    checkpoint_blocks: options.CheckpointBlocks = "auto",
    layers_at_once: options.LayersAtOnce = None,
    cache: options.Cache = None,
) -> None:
    """Compare methods: accuracy against FLOPs, parameters or latency, all from one pass over the calibration data.

    [bold]Examples[/]

        facts pareto timm/deit_small_patch16_224 --data photos --out deit_curves
        facts pareto timm/deit_small_patch16_224 --data photos --searches uniform,cors --out deit_curves
        facts pareto timm/swin_tiny_patch4_window7_224 --data photos --cost latency --ratios 0.7,0.8 --out swin

    FOLDER gets `pareto.csv`, `pareto.png` and `pareto.svg`. Each point is written as soon as it is measured: after an
    interruption, or with more methods, the same command continues where it stopped. Its cache is `FOLDER/cache`, unless
    `--cache` names another folder.
    """
    names, allocations = all_chosen(estimators, ESTIMATORS), all_chosen(searches, SEARCHES)
    kinds = all_chosen(forms, FORMS) if forms else None
    try:
        fractions = [float(part) for part in ratios.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--ratios takes comma-separated numbers such as 0.3,0.5: {error}") from error

    from rich.console import Console

    from facts.cli.data import batches_of, measured, nothing_to_evaluate, task_of
    from facts.cli.drawing import draw, table, with_best
    from facts.cli.models import build
    from facts.compression.pareto import pareto as compare
    from facts.utils.files import writable_folder

    writable_folder(out)
    network = build(model, weights, num_classes, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers, "seed": seed}
    task = task_of(network, data, evaluation_text, num_calibration, num_sensitivity, **reading)
    if reason := nothing_to_evaluate(task, network):
        raise ValueError(f"there is nothing to compare by: {reason}")
    execution = options.execution_of(precision, moments, checkpoint_blocks, layers_at_once, cache or out / "cache")
    calibration, sensitivity = batches_of(task, network, num_sensitivity)
    points = compare(
        network,
        calibration,
        lambda each: measured(task, each, network, execution.precision),
        estimators=names,
        searches=allocations,
        parts=parts or "layers",
        forms=kinds,  # type: ignore[arg-type]  # names that were checked
        ratios=fractions,
        cost=cost,
        execution=execution,
        sensitivity=sensitivity,
        file=out / "pareto.csv",
        evaluation_key=task.content_key(network),
    )
    if len(points) < 2:
        raise ValueError("no method produced a compressed network: see the errors above")
    metric = next(name for name in ("perplexity", "top1", "cosine") if name in points)
    points = with_best(points, COLUMNS[cost], metric)
    Console().print(table(points, COLUMNS[cost], metric))
    draw(points, COLUMNS[cost], metric, pictures := [out / "pareto.png", out / "pareto.svg"])
    print(f"saved {', '.join(map(str, [out / 'pareto.csv', *pictures]))}")
