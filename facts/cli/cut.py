"""`facts cut`."""

from pathlib import Path
from typing import Annotated

from facts.cli import options
from facts.cli.options import BUDGET, option


def cut(
    folder: options.Folder,
    out: options.Out,
    ratio: options.Ratio = None,
    flops: options.Flops = None,
    params: options.Params = None,
    latency_ms: Annotated[float | None, option(BUDGET, "Milliseconds of one input here.")] = None,
    architecture: options.Architecture = None,
) -> None:
    """Cut a folder that `facts compress --elastic` wrote to a budget, without data.

    [bold]Examples[/]

        facts compress timm/deit_small_patch16_224 --data photos --elastic --out deit
        facts cut deit --ratio 0.6 --out deit_60
        facts cut deit --params 12e6 --out deit_12m
    """
    import facts
    from facts.saving.save import target_folder
    from facts.search.budget import DEFAULT_RATIO

    target_folder(out)
    if out.resolve() == Path(folder).resolve():
        raise ValueError("a cut would overwrite the folder that serves every budget: give another --out")
    if all(each is None for each in (ratio, flops, params, latency_ms)):
        ratio = DEFAULT_RATIO
    result = facts.load_compressed(
        folder, ratio=ratio, flops=flops, params=params, latency_ms=latency_ms, architecture=architecture
    )
    facts.save_compressed(result, out)
    print(f"{result}\n\nsaved to {out}")
