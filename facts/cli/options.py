"""Arguments and options shared by several commands. Nothing here imports PyTorch, so help and completion are quick."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from facts.utils.registry import describe_methods

if TYPE_CHECKING:
    from facts.calibration.execution import Execution

TIMM, TRANSFORMERS = "timm/", "transformers/"
ESTIMATORS, SEARCHES, REFITS = (
    {name: method.summary for name, method in describe_methods(f"facts.{kind}.methods").items()}
    for kind in ("estimators", "search", "refit")
)
FORMS = {
    "plain": "two factors",
    "pivoted": "some rows or columns, and the others' coefficients on them: higher ranks for the same cost",
}


def networks_after(incomplete: str) -> list[str]:
    """Complete a network's name from timm's names, published weights included; else offer the kinds of names."""
    if not incomplete.startswith(TIMM):
        return [kind for kind in (TIMM, TRANSFORMERS) if kind.startswith(incomplete)]
    import timm

    known = {*timm.list_models(), *timm.list_pretrained()}
    return sorted(name for tag in known if (name := f"{TIMM}{tag}").startswith(incomplete))


def explained(choices: Mapping[str, str]) -> str:
    """Format the choices for the help, one a line."""
    return "\n\n".join(f"[bold]{name}[/]: {text}" for name, text in choices.items())


def all_chosen(values: str, choices: Mapping[str, str]) -> list[str]:
    """Split a comma-separated list into its names, each once. An unknown name is a usage error."""
    names = dict.fromkeys(value.strip() for value in values.split(","))
    for name in names:
        if name not in choices:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(choices)}")
    return list(names)


def completed(incomplete: str, choices: Mapping[str, str]) -> list[tuple[str, str]]:
    """Complete a choice, or the last entry of a comma-separated list, with explanations."""
    before, comma, last = incomplete.rpartition(",")
    return [(before + comma + name, text) for name, text in choices.items() if name.startswith(last)]


def option(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


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
    option(
        None,
        "A checkpoint, a folder with the checkpoints of many networks, or random ones, to try things out. "
        "Default: the published weights.",
        metavar="FILE|FOLDER|random",
    ),
]
NumClasses = Annotated[int | None, option(None, "Classes of a timm network with your own classifier.", min=1)]
Architecture = Annotated[
    str | None,
    option(
        None,
        "For a folder with a network of your own class: your function that builds the dense network.",
        metavar="PACKAGE.MODULE:FUNCTION",
    ),
]
Json = Annotated[bool, option(None, "Print JSON, for other programs.", "--json")]

Images = Annotated[
    str,
    option(
        DATA,
        "Images: a folder with a folder for each class, or with [bold]train[/] and [bold]val[/] of such; without "
        "these, half of the images are kept for evaluation. Folders named by ImageNet's synsets have its labels; "
        "if they are not the network's classes, the network calibrates on labels that it draws itself. Or a data set "
        "of Hugging Face: [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/] (the last two are optional), or a folder "
        "written by `save_to_disk`.\n\n"
        "Language models: a text file, or [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/].",
        "--data",
        metavar="FOLDER|TEXT",
    ),
]
EvaluationText = Annotated[
    str | None, option(DATA, "For language models: the text to measure perplexity on.", metavar="TEXT")
]
NumCalibration = Annotated[
    int | None,
    option(DATA, "Size of the calibration set; default: up to 512 images or 256 windows of text.", min=1),
]
NumSensitivity = Annotated[
    int | None,
    option(DATA, "Images or windows of text on which a search compares outputs; default: up to 512 or 16.", min=1),
]
CutMix = Annotated[
    bool,
    option(
        DATA,
        "Mix the images to calibrate and to search on: a rectangle of each shows another one, and labels are the "
        "shares of pixels.",
        "--cutmix",
    ),
]
SequenceLength = Annotated[int | None, option(DATA, "Tokens in a window of text; default: 2048.", min=2)]
BatchSize = Annotated[int | None, option(DATA, "Default: 64 images or 1 window of text.", min=1)]
Seed = Annotated[int, option(DATA, "Seed of the choice of calibration data.")]

NumWorkers = Annotated[int, option(MACHINE, "Processes that read images.", min=0)]
Device = Annotated[str | None, option(MACHINE, "cpu, cuda, cuda:1, ...; default: the GPU, if there is one.")]
Precision = Annotated[
    Literal["float32", "bfloat16"], option(MACHINE, "Precision of networks; all that decides ranks is float64.")
]
Cache = Annotated[
    Path | None,
    option(
        MACHINE,
        "Folder for intermediate results: another budget or search on the same network and data takes a fraction "
        "of the time. It grows to gigabytes, and may be deleted.",
        metavar="FOLDER",
    ),
]
Moments = Annotated[
    Literal["auto", "device", "host"],
    option(
        MEMORY, "Where moments grow: on the device, in main memory, or on the device until half of its memory is taken."
    ),
]
CheckpointBlocks = Annotated[
    Literal["auto", "on", "off"],
    option(
        MEMORY,
        "Compute activations within blocks twice instead of keeping them: half of the memory, a fifth more time. "
        "[bold]auto[/]: on a CPU.",
    ),
]
LayersAtOnce = Annotated[
    int | None,
    option(
        MEMORY,
        "Layers whose moments are in memory at a time; each such group takes a data pass. Default: all.",
        min=1,
    ),
]

Convolutions = Annotated[
    bool | None,
    option(METHOD, "Compress 1x1 convolutions too. By default, only if the network has no linear layer."),
]
FormName = Annotated[
    Literal[*FORMS] | None,  # type: ignore[valid-type]
    option(
        METHOD,
        "How a low-rank layer is stored; default: pivoted, in half precision plain.\n\n" + explained(FORMS),
        metavar="NAME",
    ),
]
EstimatorName = Annotated[
    Literal[*ESTIMATORS],  # type: ignore[valid-type]
    option(
        METHOD,
        "Method that weighs the directions of each layer, by:\n\n" + explained(ESTIMATORS),
        metavar="NAME",
        autocompletion=lambda incomplete: completed(incomplete, ESTIMATORS),
    ),
]
RefitName = Annotated[
    Literal[*REFITS] | None,  # type: ignore[valid-type]
    option(
        METHOD,
        "Then fit the layers to the outputs of the compressed ones before them, in one data pass for each layer or "
        "block, by:\n\n" + explained(REFITS),
        metavar="NAME",
    ),
]
SearchName = Annotated[
    Literal[*SEARCHES],  # type: ignore[valid-type]
    option(
        METHOD,
        "Method that chooses the rank of each layer, by:\n\n" + explained(SEARCHES),
        metavar="NAME",
        autocompletion=lambda incomplete: completed(incomplete, SEARCHES),
    ),
]


def execution_of(
    precision: Precision,
    moments: Moments,
    checkpoint_blocks: CheckpointBlocks,
    layers_at_once: LayersAtOnce,
    cache: Path | None,
) -> "Execution":
    """The settings of passes that these options choose."""
    import torch

    from facts.calibration.execution import Execution
    from facts.moments.memory import MemoryPolicy

    blocks: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}
    memory = MemoryPolicy(moments=moments, checkpoint_blocks=blocks[checkpoint_blocks], layers_at_once=layers_at_once)
    return Execution(getattr(torch, precision), memory, cache=cache)


def layers_of(convolutions: Convolutions) -> Literal["all", "linear"] | None:
    """The argument `layers` of `facts.prepare` that `--convolutions` chooses."""
    choices: dict[bool | None, Literal["all", "linear"]] = {True: "all", False: "linear"}
    return choices.get(convolutions)
