"""`facts pareto`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from facts.cli import options
from facts.cli.options import ESTIMATORS, SEARCHES, all_chosen, option, several


def pareto(
    model: options.Model,
    data: options.Images,
    out: Annotated[Path, option(None, "Where the table and the plot go.", metavar="FOLDER", callback=options.at_home)],
    estimators: Annotated[
        str | None, several(ESTIMATORS, "`facts compress --help` explains them. Default: facts.")
    ] = None,
    searches: Annotated[
        str | None, several(SEARCHES, "They choose the ranks. Default: as for `facts compress`.")
    ] = None,
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
        "estimators": all_chosen(estimators or "facts", ESTIMATORS),
        "searches": all_chosen(searches, SEARCHES) if searches else [],
    }
    fractions = options.numbers_of(ratios)

    import facts
    from facts.cli.inputs import batches_of, build, measured, nothing_to_evaluate, task_of
    from facts.compression.compress import default_parts
    from facts.utils.files import replacing, writable_folder

    writable_folder(out, keep=False)
    network = build(model, weights, num_classes, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers}
    task = task_of(network, data, evaluation_text, num_calibration, **reading)
    if reason := nothing_to_evaluate(task):
        raise ValueError(f"there is nothing to compare by: {reason}")
    calibration, sensitivity = batches_of(task, network, None)
    parts = parts or default_parts(calibration, facts.Budget.of(cost=cost), cost, estimators, searches)
    prepared = facts.prepare(network, calibration, parts=parts, execution=facts.Execution(cache=cache))
    shared: dict[str, Any] = {"ratios": fractions, "cost": cost, "sensitivity": sensitivity, "file": out / "pareto.csv"}
    points = facts.pareto(
        prepared,
        lambda each: measured(task, each, network, prepared.execution.precision, prepared.held_out),
        **methods,
        **shared,
    )
    column = {"latency": "latency_ms"}.get(cost, cost)
    metric = next(name for name in ("perplexity", "top1", "agreement", "cosine") if name in points)
    bars = f"{metric}_standard_error"
    look = {"x": column, "y": metric, "yerr": bars if bars in points else None, "capsize": 3, "ylabel": metric}
    axes = points[:1].plot(**look, marker="o", color="black", label="original", figsize=(6, 4))
    for method, own in points[1:].groupby(["estimator", "search"], sort=False):
        own.sort_values(column).plot(**look, marker="o", label=", ".join(method), ax=axes)
    with replacing(out / "pareto.png") as path:
        axes.figure.savefig(path, format="png", dpi=200, bbox_inches="tight")
    print(points.filter(["estimator", "search", "form", "ratio", column, metric, bars]).to_string(index=False))
    print(f"saved {out / 'pareto.csv'} and {out / 'pareto.png'}")
