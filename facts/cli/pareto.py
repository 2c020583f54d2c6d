"""`facts pareto`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from facts.cli import options
from facts.cli.options import ESTIMATORS, SEARCHES, all_chosen, option, several


def pareto(
    model: options.Model,
    data: options.Images,
    out: Annotated[Path, option(None, "Where the table and the plot go.", metavar="FOLDER", callback=options.at_home)],
    estimators: Annotated[str, several(ESTIMATORS, "`facts compress --help` explains them.")] = "facts,svd_llm,pela",
    searches: Annotated[str, several(SEARCHES, "They choose the ranks.")] = "cors_fisher",
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
    """Compare methods: accuracy against FLOPs, parameters or latency, all from one pass over the calibration data.

    [bold]Examples[/]

        facts pareto timm/deit_small_patch16_224 --data photos --out deit_curves
        facts pareto timm/swin_tiny_patch4_window7_224 --data photos --cost latency --ratios 0.7,0.8 --out swin

    FOLDER gets `pareto.csv`, written after each point, and `pareto.png`. `--cache` keeps what a killed run computed.
    """
    methods: dict[str, Any] = {
        "estimators": all_chosen(estimators, ESTIMATORS),
        "searches": all_chosen(searches, SEARCHES),
    }
    fractions = options.numbers_of(ratios)

    import facts
    from facts.cli.inputs import batches_of, build, measured, nothing_to_evaluate, task_of
    from facts.utils.files import replacing, writable_folder

    writable_folder(out)
    network = build(model, weights, num_classes, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers}
    task = task_of(network, data, evaluation_text, num_calibration, **reading)
    if reason := nothing_to_evaluate(task, network):
        raise ValueError(f"there is nothing to compare by: {reason}")
    calibration, sensitivity = batches_of(task, network, None)
    prepared = facts.prepare(network, calibration, parts=parts or "layers", execution=facts.Execution(cache=cache))
    shared: dict[str, Any] = {"ratios": fractions, "cost": cost, "sensitivity": sensitivity, "file": out / "pareto.csv"}
    points = facts.pareto(
        prepared, lambda each: measured(task, each, network, prepared.execution.precision), **methods, **shared
    )
    column = {"latency": "latency_ms"}.get(cost, cost)
    metric = next(name for name in ("perplexity", "top1", "cosine") if name in points)
    groups = points[1:].groupby(["estimator", "search"], sort=False)
    axes = points[:1].plot.scatter(column, metric, color="black", label="original", figsize=(6, 4))
    for method, own in groups:
        own.sort_values(column).plot(column, metric, marker="o", ylabel=metric, label=", ".join(method), ax=axes)
    with replacing(out / "pareto.png") as path:
        axes.figure.savefig(path, format="png", dpi=200, bbox_inches="tight")
    print(points[["estimator", "search", "form", "ratio", column, metric]].to_string(index=False))
    print(f"saved {out / 'pareto.csv'} and {out / 'pareto.png'}")
