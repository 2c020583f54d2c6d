"""`facts list`."""

import json
from collections.abc import Mapping
from fnmatch import filter as matching
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from facts.cli import options
from facts.cli.options import ESTIMATORS, FORMS, SEARCHES, TIMM, TORCHVISION

METHODS = {"estimators": ESTIMATORS, "searches": SEARCHES, "forms": FORMS}


def list_choices(
    kind: Annotated[
        Literal["models", "estimators", "searches", "forms"],
        typer.Argument(metavar="KIND", help="One of these."),
    ],
    part: Annotated[
        str, typer.Argument(metavar="PART", help="Only names that contain this; for models, `*` matches anything.")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """List the available models, estimators, searches, or forms.

    [bold]Examples[/]

        facts list models vit_tiny
        facts list estimators
        facts list searches --json

    The models are torchvision's, and timm's with the tags of their published weights: timm/NAME.TAG; without a tag, the
    first is used. Language models and image classifiers at huggingface.co are called transformers/OWNER/NAME.
    """
    found: Mapping[str, str | list[str]]
    found = models(part) if kind == "models" else {name: text for name, text in METHODS[kind].items() if part in name}
    if not found:
        raise ValueError(f"none of the {kind} has {part!r} in its name: give a shorter part, or none")
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("name", "published weights" if kind == "models" else "method", box=None)
    table.columns[0].no_wrap = True
    for name, text in found.items():
        table.add_row(name, text if isinstance(text, str) else ", ".join(text))
    Console().print(table)


def models(part: str) -> dict[str, list[str]]:
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
