"""Arguments and options shared by several commands. Nothing here imports PyTorch, so help and completion are quick."""

import os
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import filter as matching
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from facts.utils.options import describe_methods, meant

TIMM, TORCHVISION, TRANSFORMERS = "timm/", "torchvision/", "transformers/"
MOST_WORKERS = 128
MINUTES: dict[str, Any] = {"metavar": "MINUTES", "min": 0.01, "max": 1e5}  # infinity is none
ESTIMATORS, SEARCHES = (
    {name: method.summary for name, method in describe_methods(f"facts.{kind}.methods").items()}
    for kind in ("estimators", "search")
)
PARTS = {
    "layers": "each linear layer on its own",
    "units": "attention's products and hidden units, which leaves narrower layers",
    "tokens": "tokens of blocks with global attention, merged where they are alike",
    "units,tokens": "units, and tokens too",
    "layers,tokens": "layers, and tokens too",
}
FORMS = {
    "plain": "two factors",
    "pivoted": "some rows or columns, and the others' coefficients on them: higher ranks for the same cost",
}


def networks_after(incomplete: str) -> list[str]:
    """Complete a network's name from the names in timm, published weights included, and torchvision."""
    if not incomplete.startswith((TIMM, TORCHVISION)):
        return [kind for kind in (TIMM, TORCHVISION, TRANSFORMERS) if kind.startswith(incomplete)]
    known = [full for name, tags in models().items() for full in (name, *(f"{name}.{tag}" for tag in tags))]
    return sorted(name for name in known if name.startswith(incomplete))


def models(part: str = "") -> dict[str, list[str]]:
    """Names of networks that contain `part`, and the tags of timm's published weights for each, the default first."""
    import timm

    from facts.models.builders import classifiers

    found: dict[str, list[str]] = {name: [] for name in timm.list_models(f"*{part.removeprefix(TIMM)}*")}
    for full in timm.list_pretrained():
        name, _, tag = full.partition(".")
        if name in found:
            is_default = tag == timm.models.get_pretrained_cfg_value(name, "tag")
            found[name].insert(0 if is_default else len(found[name]), tag)
    others = matching(classifiers(), f"*{part.removeprefix(TORCHVISION)}*")
    return {f"{TIMM}{name}": tags for name, tags in found.items()} | {f"{TORCHVISION}{name}": [] for name in others}


def one_of(choices: Mapping[str, str], name: str) -> str:
    """Return a name among the choices. Another one is a usage error that says which is meant."""
    if name in choices:
        return name
    near = "".join(f": did you mean {each}?" for each in get_close_matches(name, choices, 1))
    raise typer.BadParameter(f"{name!r} is not one of {', '.join(choices)}{near}")


def all_chosen(values: str, choices: Mapping[str, str]) -> list[str]:
    """Split a comma-separated list into its names, each once. An unknown name is a usage error."""
    names = dict.fromkeys(value.strip() for value in values.split(","))
    for name in names:
        one_of(choices, name)
    return list(names)


def fraction_of(value: str) -> float:
    """Read a fraction in (0, 1]. Anything else, such as a percentage, is a usage error that says what to write."""
    with suppress(ValueError):
        if 0 < (fraction := float(value)) <= 1:
            return fraction
    raise typer.BadParameter(f"{value} is not a fraction in (0, 1]{meant(value) or ': write one, such as 0.5 for 50%'}")


def completed(incomplete: str, choices: Mapping[str, str]) -> list[tuple[str, str]]:
    """Complete a choice, or the last entry of a comma-separated list, with explanations."""
    before, comma, last = incomplete.rpartition(",")
    return [(before + comma + name, text) for name, text in choices.items() if name.startswith(last)]


def at_home(value: Any) -> Any:
    """Expand `~` in paths, which a shell leaves alone in `--out=~/half`."""
    if isinstance(value, list):
        return [*map(at_home, value)]
    return value and type(value)(os.path.expanduser(value))


def existing(value: str | None) -> str | None:
    """Expand `~` in the name of data. Raises `FileNotFoundError`, before PyTorch is loaded, if there are none."""
    from facts.utils.hub import HUB

    if value and not value.startswith(HUB) and not os.path.exists(at_home(value)):
        raise FileNotFoundError(f"there is no file or folder {value}: give an existing one, or {HUB}OWNER/DATASET")
    return at_home(value)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, callback=at_home, **settings)


def option(panel: str | None, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


def place(panel: str | None, help: str, metavar: str) -> Any:
    return option(panel, help, metavar=metavar, callback=at_home)


def method(choices: Mapping[str, str], text: str) -> Any:
    """An option for one of some methods, which its help explains one per line."""
    explained = "\n\n".join([text, *(f"[bold]{name}[/]: {each}" for name, each in choices.items())])
    known: dict[str, Any] = {"autocompletion": lambda incomplete: completed(incomplete, choices)}
    return option(METHOD, explained, metavar="NAME", parser=partial(one_of, choices), **known)


def several(choices: Mapping[str, str], explanation: str) -> Any:
    """An option for a comma-separated list of choices."""
    text = f"Any of {', '.join(choices)}. {explanation}"
    return option(None, text, metavar="NAME,NAME", autocompletion=lambda incomplete: completed(incomplete, choices))


METHOD, DATA, MACHINE = "Method", "Data", "Machine"  # panels of the help
BUDGET = "Budget: half of the compressed parts' FLOPs by default; several budgets must all hold"

Model = Annotated[
    str,
    argument(
        "MODEL",
        "[bold]timm/NAME[/], [bold]torchvision/NAME[/], [bold]transformers/OWNER/NAME[/], or a folder with a "
        "transformers network: a language model, an image classifier or encoder.",
        autocompletion=networks_after,
    ),
]
Ratio = Annotated[
    float | None,
    option(BUDGET, "The fraction of the compressed parts' FLOPs that remains.", metavar="FRACTION", parser=fraction_of),
]
Flops = Annotated[float | None, option(BUDGET, "FLOPs of the whole network for one input: 4.6e9.")]
Params = Annotated[float | None, option(BUDGET, "Parameters of the whole network: 11e6.")]
Weights = Annotated[
    str | None,
    option(None, "A checkpoint, or a folder of them; default: the published one.", metavar="FILE|FOLDER|random"),
]
NumClasses = Annotated[
    int | None, option(None, "Classes of your own timm or torchvision network; 0: timm's without a classifier.", min=0)
]
Json = Annotated[bool, option(None, "Print JSON, for other programs.", "--json")]
Folder = Annotated[str, argument("FOLDER", "The folder that `facts compress` wrote, or OWNER/NAME on Hugging Face.")]
Out = Annotated[Path, place(None, "A new or empty folder, or one with an older result.", "FOLDER")]

Images = Annotated[
    str,
    option(
        DATA,
        "Images: a folder of class folders, or one with [bold]train[/] and [bold]val[/] folders of them; without "
        "these, `facts compress` keeps half of each class for evaluation. Class folders are named after ImageNet's "
        "synsets or the network's classes, or are in their order. With other classes or none, all images calibrate, on "
        "labels that the network draws, and the result is judged by its agreement with the original. Or a folder "
        "with [bold]labels.csv[/], whose columns are `file` and `label`, the network's own index. Or a Hugging Face "
        "data set: [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/] (the last two are optional), or a folder "
        "by `save_to_disk`.\n\nLanguage models: a text file, or [bold]hub:OWNER/DATASET/CONFIGURATION/SPLIT[/].",
        "--data",
        metavar="FOLDER|TEXT",
        callback=existing,
    ),
]
EvaluationText = Annotated[
    str | None,
    option(DATA, "For language models: the text to measure perplexity on.", metavar="TEXT", callback=existing),
]
NumCalibration = Annotated[
    int | None, option(DATA, "Images or windows to calibrate on; default: up to 512 or 256.", min=1)
]
SequenceLength = Annotated[int | None, option(DATA, "Tokens in a window of text; default: 2048.", min=2)]
BatchSize = Annotated[int | None, option(DATA, "Default: 64 images or 1 window of text.", min=1)]
Seed = Annotated[int, option(DATA, "Seed for choosing calibration data.", min=0, max=2**32 - 1)]

NumWorkers = Annotated[int, option(MACHINE, "Processes that read images.", min=0, max=MOST_WORKERS)]
Device = Annotated[str | None, option(MACHINE, "cpu, cuda, cuda:1, ...; default: the GPU, if there is one.")]
Precision = Annotated[
    Literal["float32", "bfloat16"], option(MACHINE, "Precision of networks; all that decides ranks is float64.")
]
Cache = Annotated[
    Path | None, place(MACHINE, "Folder for gigabytes of intermediate results, which speed up the next run.", "FOLDER")
]

Convolutions = Annotated[
    bool | None, option(METHOD, "Compress 1x1 convolutions too; default: only if there is no linear layer.")
]
PartsName = Annotated[
    Literal[*PARTS] | None,  # type: ignore[valid-type]
    method(
        PARTS,
        "What is compressed; default: units,tokens (units if parameters are bounded), or layers if a method is named.",
    ),
]
FormName = Annotated[
    Literal[*FORMS] | None,  # type: ignore[valid-type]
    method(FORMS, "How a low-rank layer is stored; default: pivoted, in half precision plain."),
]
EstimatorName = Annotated[
    Literal[*ESTIMATORS] | None,  # type: ignore[valid-type]
    method(ESTIMATORS, "Method that weights the directions of each part; default: facts."),
]
SearchName = Annotated[
    Literal[*SEARCHES] | None,  # type: ignore[valid-type]
    method(SEARCHES, "Method that chooses the rank of each part; default: cors_fisher."),
]
