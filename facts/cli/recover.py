"""`facts recover`."""

from typing import Annotated

import typer

from facts.cli import options


def recover(
    folder: options.Folder,
    data: options.Images,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train.")],
    out: options.Out,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="The original's weights; default: the published ones.")
    ] = None,
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

    With `--cache FOLDER`, the same command continues after an interruption. `facts evaluate` measures the result.
    """
    import facts
    from facts.cli.data import task_of
    from facts.cli.models import load_result, original_of
    from facts.compression.comparison import rounded
    from facts.saving.save import target_folder

    target_folder(out)
    result, dtype = load_result(folder)
    original = original_of(result.model, weights, device)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers, "seed": seed}
    calibration = task_of(original, data, None, num_calibration, **reading).calibration(original)
    result = facts.recover(result, calibration, minutes=minutes, original=original, seed=seed, cache=cache)
    result = rounded(result, dtype)
    print(result)
    facts.save_compressed(result, out, dtype=dtype)
    print(f"\nsaved to {out}")
