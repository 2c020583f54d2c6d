"""Arguments and options shared by several commands."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from facts.cli.choices import ESTIMATORS, SEARCHES, completed, explained, networks_after

METHOD, DATA, MACHINE = "Method", "Data", "Machine"  # panels of the help

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="[bold]timm/NAME[/], [bold]transformers/OWNER/NAME[/], or a folder with a language model of transformers.",
        autocompletion=networks_after,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER|random",
        help="A checkpoint, a folder with the checkpoints of many networks, or random ones, to try things out. "
        "Without it, those published.",
    ),
]
NumClasses = Annotated[int | None, typer.Option(min=1, help="Of a timm network with a classifier of your own.")]
Images = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FOLDER|TEXT",
        rich_help_panel=DATA,
        help="Images: a folder with a folder for each class, or with [bold]train[/] and [bold]val[/] of such; without "
        "these, half of the images are kept for evaluation. Folders called by ImageNet's synsets have its labels; "
        "where they are not the network's classes, it calibrates on labels that it draws itself.\n\n"
        "Language models: a text file, or [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/].",
    ),
]
EvaluationText = Annotated[
    str | None,
    typer.Option(metavar="TEXT", rich_help_panel=DATA, help="Of a language model: the text that tells its perplexity."),
]
NumCalibration = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=DATA,
        help="How much to calibrate on; without it, 512 images or 256 windows of text, if there are as many.",
    ),
]
SequenceLength = Annotated[
    int | None, typer.Option(min=2, rich_help_panel=DATA, help="Tokens in a window of text; without it, 2048.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=DATA, help="Without it, 64 images or 1 window of text.")
]
Seed = Annotated[int, typer.Option(rich_help_panel=DATA, help="Draws what to calibrate on.")]
NumWorkers = Annotated[int, typer.Option(min=0, rich_help_panel=MACHINE, help="Processes that read images.")]
Device = Annotated[
    str | None,
    typer.Option(rich_help_panel=MACHINE, help="cpu, cuda, cuda:1, ...; without it, the GPU, if there is one."),
]
Precision = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(rich_help_panel=MACHINE, help="What networks run in; all that decides ranks is float64."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=MACHINE,
        help="Keeps what was computed: another budget or search on the same network and data takes a fraction of the "
        "time. It grows to gigabytes, and may be deleted.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of words, for other programs.")]
EstimatorName = Annotated[
    Literal[*ESTIMATORS],  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="What of the data says which directions matter:\n\n" + explained(ESTIMATORS),
        autocompletion=lambda incomplete: completed(incomplete, ESTIMATORS),
    ),
]
SearchName = Annotated[
    Literal[*SEARCHES],  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="What says how much each layer keeps:\n\n" + explained(SEARCHES),
        autocompletion=lambda incomplete: completed(incomplete, SEARCHES),
    ),
]
