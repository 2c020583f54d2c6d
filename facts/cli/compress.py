"""`facts compress`."""

from pathlib import Path
from typing import Annotated

import typer

from facts.cli import options

BUDGET = "Budget: half of the layers' FLOPs by default; several must all hold"


def compress(
    model: options.Model,
    data: options.Images,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="A new or empty folder for the result, or an older result's."),
    ],
    ratio: Annotated[
        float | None,
        typer.Option(rich_help_panel=BUDGET, help="The fraction of the compressed layers' FLOPs that remains."),
    ] = None,
    flops: Annotated[
        float | None, typer.Option(rich_help_panel=BUDGET, help="FLOPs of the whole network for one input: 4.6e9.")
    ] = None,
    params: Annotated[
        float | None, typer.Option(rich_help_panel=BUDGET, help="Parameters of the whole network: 11e6.")
    ] = None,
    latency_ms: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=BUDGET,
            help="Milliseconds of the whole network for one batch, on this machine or on that of `--device-times`.",
        ),
    ] = None,
    device_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=BUDGET,
            help="What `facts measure` wrote on the device that the network is for: latency is predicted for it.",
        ),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=BUDGET,
            help="Instead: the smallest network whose outputs are this close to the original's, such as 0.05; of "
            "classes or tokens the KL divergence, mean over samples.",
        ),
    ] = None,
    estimator: options.EstimatorName = "facts",
    search: options.SearchName = "cors_fisher",
    form: options.FormName = None,
    fit_bias: Annotated[
        bool,
        typer.Option(
            "--fit-bias", rich_help_panel=options.METHOD, help="Let biases take up the mean of what is taken away."
        ),
    ] = False,
    refit: options.RefitName = None,
    recover: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            min=0.01,
            rich_help_panel=options.METHOD,
            help="Let the original teach the result for this many minutes, on the same data, without labels.",
        ),
    ] = None,
    convolutions: options.Convolutions = None,
    evaluate: Annotated[
        bool, typer.Option(help="Measure the original and the result on data that calibration did not use.")
    ] = True,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    evaluation_text: options.EvaluationText = None,
    num_calibration: options.NumCalibration = None,
    num_sensitivity: options.NumSensitivity = None,
    cutmix: options.CutMix = False,
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
    """Compress a network to a budget, measure it, and save it in a folder.

    [bold]Examples[/]

        facts compress timm/deit_small_patch16_224 --data photos --ratio 0.5 --out deit_half
        facts compress timm/deit_small_patch16_224 --data photos --ratio 0.5 --recover 30 --out deit_half
        facts compress timm/swin_tiny_patch4_window7_224 --data photos --search cors --flops 6e9 --out swin
        facts compress timm/deit_small_patch16_224 --data photos --error 0.1 --out deit_close
        facts compress timm/deit_tiny_patch16_224 --data photos --latency-ms 20 --device-times board.json --out deit
        facts compress timm/resnet50 --data photos --convolutions --params 16e6 --out resnet_16m
        facts compress transformers/Qwen/Qwen3-0.6B --data train.txt --evaluation-text test.txt --out qwen

    `--recover` brings the outputs closer to the original's. `--cache FOLDER` makes a second run quick,
    and lets one that was killed continue. `facts inspect` shows what is in the folder, and `facts.load_compressed`
    loads it in Python.
    """
    import torch
    from tabulate import tabulate

    import facts
    from facts.cli.data import batches_of, data_to_calibrate_on, measured, nothing_to_evaluate
    from facts.cli.folders import for_result
    from facts.cli.models import build
    from facts.saving.manifest import Metrics

    for_result(out)
    times = device_times and facts.DeviceTimes.read(device_times)
    recovery = None if recover is None else facts.Recovery(minutes=recover, seed=seed)
    network = build(model, weights, num_classes, device)
    task = data_to_calibrate_on(
        network,
        data,
        evaluation_text,
        num_calibration,
        num_sensitivity,
        sequence_length=sequence_length,
        batch_size=batch_size,
        num_workers=num_workers,
        seed=seed,
    )
    kind = getattr(torch, precision)
    result = facts.compress(
        network,
        **batches_of(task, network, num_sensitivity, cutmix),
        estimator=estimator,
        search=search,
        form=form,
        fit_bias=fit_bias,
        refit=refit,
        recover=recovery,
        ratio=ratio,
        flops=flops,
        params=params,
        latency_ms=latency_ms,
        error=error,
        device_times=times,
        convolutions=convolutions,
        precision=kind,
        memory=options.memory_policy(moments, checkpoint_blocks, layers_at_once),
        input_shape=task.input_shape(network),
        cache=cache,
    )
    print(result)
    reason = nothing_to_evaluate(task, network) if evaluate else "--no-evaluate"
    metrics: Metrics = {}
    if reason is None:
        before, after = (measured(task, each, kind) for each in (network, result.model))
        metrics.update({name: {"original": before[name], "compressed": after[name]} for name in before})
        rows = [(name, *both.values()) for name, both in metrics.items()]
        print(f"\n{tabulate(rows, headers=('', 'original', 'compressed'), floatfmt='.4g')}")
    else:
        print(f"\nnot evaluated: {reason}")
    facts.save_compressed(result, out, metrics)
    print(f"\nsaved to {out}")
