"""`facts cut`."""

from typing import Annotated

from facts.cli import options
from facts.cli.options import option

BUDGET = "Budget: half of the parts' FLOPs by default; several budgets must all hold"


def cut(
    folder: options.Folder,
    out: options.Out,
    ratio: Annotated[float | None, option(BUDGET, "The fraction of the compressed parts' FLOPs that remains.")] = None,
    flops: Annotated[float | None, option(BUDGET, "FLOPs of the whole network for one input: 4.6e9.")] = None,
    params: Annotated[float | None, option(BUDGET, "Parameters of the whole network: 11e6.")] = None,
    latency_ms: Annotated[float | None, option(BUDGET, "Milliseconds of one input here.")] = None,
    architecture: options.Architecture = None,
) -> None:
    """Cut a folder that `facts compress --elastic` wrote to a budget, in seconds and without data.

    [bold]Examples[/]

        facts compress timm/deit_small_patch16_224 --data photos --elastic --out deit
        facts cut deit --ratio 0.6 --out deit_60
        facts cut deit --params 12e6 --out deit_12m
    """
    from pathlib import Path

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
