"""Arguments and options shared by several commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from facts.cli.choices import ESTIMATORS, FORMS, REFITS, SEARCHES, completed, explained, networks_after

if TYPE_CHECKING:
    from facts.moments.memory import MemoryPolicy

METHOD, DATA, MACHINE, MEMORY = "Method", "Data", "Machine", "Memory"  # panels of the help

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="[bold]timm/NAME[/], [bold]transformers/OWNER/NAME[/], or a folder with a network of transformers: "
        "a language model, or an image classifier.",
        autocompletion=networks_after,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER|random",
        help="A checkpoint, a folder with the checkpoints of many networks, or random ones, to try things out. "
        "Default: the published weights.",
    ),
]
NumClasses = Annotated[int | None, typer.Option(min=1, help="Classes of a timm network with your own classifier.")]
Images = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FOLDER|TEXT",
        rich_help_panel=DATA,
        help="Images: a folder with a folder for each class, or with [bold]train[/] and [bold]val[/] of such; without "
        "these, half of the images are kept for evaluation. Folders named by ImageNet's synsets have its labels; "
        "if they are not the network's classes, the network calibrates on labels that it draws itself. Or a data set "
        "of Hugging Face: [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/], the last two if wanted, or a folder by "
        "`save_to_disk`.\n\n"
        "Language models: a text file, or [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/].",
    ),
]
EvaluationText = Annotated[
    str | None,
    typer.Option(metavar="TEXT", rich_help_panel=DATA, help="For language models: the text to measure perplexity on."),
]
NumCalibration = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=DATA,
        help="Size of the calibration set; default: up to 512 images or 256 windows of text.",
    ),
]
NumSensitivity = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=DATA,
        help="Images or windows of text that a search compares outputs on; default: up to 512 or 16.",
    ),
]
CutMix = Annotated[
    bool,
    typer.Option(
        "--cutmix",
        rich_help_panel=DATA,
        help="Mix the images to calibrate and to search on: a rectangle of each shows another one, and labels are the "
        "shares of pixels.",
    ),
]
SequenceLength = Annotated[
    int | None, typer.Option(min=2, rich_help_panel=DATA, help="Tokens in a window of text; default: 2048.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=DATA, help="Default: 64 images or 1 window of text.")
]
Seed = Annotated[int, typer.Option(rich_help_panel=DATA, help="Seed of the choice of calibration data.")]
NumWorkers = Annotated[int, typer.Option(min=0, rich_help_panel=MACHINE, help="Processes that read images.")]
Device = Annotated[
    str | None,
    typer.Option(rich_help_panel=MACHINE, help="cpu, cuda, cuda:1, ...; default: the GPU, if there is one."),
]
Precision = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(rich_help_panel=MACHINE, help="Precision of networks; all that decides ranks is float64."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=MACHINE,
        help="Folder for intermediate results: another budget or search on the same network and data takes a fraction "
        "of the time. It grows to gigabytes, and may be deleted.",
    ),
]
Moments = Annotated[
    Literal["auto", "device", "host"],
    typer.Option(
        rich_help_panel=MEMORY,
        help="Where moments grow: on the device, in main memory, or on the device until half of its memory is taken.",
    ),
]
CheckpointBlocks = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        rich_help_panel=MEMORY,
        help="Compute activations within blocks twice instead of keeping them: half of the memory, a fifth more time. "
        "[bold]auto[/]: on a CPU.",
    ),
]
LayersAtOnce = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=MEMORY,
        help="Layers whose moments are in memory at a time; each such group takes a data pass. Default: all.",
    ),
]
Convolutions = Annotated[
    bool | None,
    typer.Option(
        rich_help_panel=METHOD,
        help="Compress 1x1 convolutions too. By default, only if the network has no linear layer.",
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:FUNCTION",
        help="For a folder with a network of your own class: your function that builds the dense network.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of words, for other programs.")]
FormName = Annotated[
    Literal[*FORMS] | None,  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="How a low-rank layer is stored; default: pivoted, in half precision plain.\n\n" + explained(FORMS),
    ),
]
EstimatorName = Annotated[
    Literal[*ESTIMATORS],  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="Method that weighs the directions of each layer, by:\n\n" + explained(ESTIMATORS),
        autocompletion=lambda incomplete: completed(incomplete, ESTIMATORS),
    ),
]
RefitName = Annotated[
    Literal[*REFITS] | None,  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="Fit layers anew to what the compressed ones before them give, in one data pass each, or for each block, "
        "by:\n\n" + explained(REFITS),
    ),
]
SearchName = Annotated[
    Literal[*SEARCHES],  # type: ignore[valid-type]
    typer.Option(
        metavar="NAME",
        rich_help_panel=METHOD,
        help="Method that chooses the rank of each layer, by:\n\n" + explained(SEARCHES),
        autocompletion=lambda incomplete: completed(incomplete, SEARCHES),
    ),
]


def memory_policy(
    moments: Moments, checkpoint_blocks: CheckpointBlocks, layers_at_once: LayersAtOnce
) -> "MemoryPolicy":
    """The policy that these options choose."""
    from facts.moments.memory import MemoryPolicy

    blocks: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}
    return MemoryPolicy(moments=moments, checkpoint_blocks=blocks[checkpoint_blocks], layers_at_once=layers_at_once)
