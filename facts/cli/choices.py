"""Choices on the command line, in words. Nothing here waits for PyTorch, so help and completion do not."""

from collections.abc import Mapping

import typer

from facts.utils.registry import describe_methods

TIMM, TRANSFORMERS = "timm/", "transformers/"
ESTIMATORS = {name: method.summary for name, method in describe_methods("facts.estimators.methods").items()}
SEARCHES = {name: method.summary for name, method in describe_methods("facts.search.methods").items()}


def networks_after(incomplete: str) -> list[str]:
    """timm's names, those of its published weights too, that go on after what was typed; else the kinds of names."""
    if not incomplete.startswith(TIMM):
        return [kind for kind in (TIMM, TRANSFORMERS) if kind.startswith(incomplete)]
    import timm

    known = {*timm.list_models(), *timm.list_pretrained()}
    return sorted(name for tag in known if (name := f"{TIMM}{tag}").startswith(incomplete))


def explained(choices: Mapping[str, str]) -> str:
    """A list for the help, a choice a line."""
    return "\n\n".join(f"[bold]{name}[/]: {text}" for name, text in choices.items())


def chosen(value: str, choices: Mapping[str, str]) -> str:
    """The name itself. A usage error lists the choices where it is none of them."""
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(choices)}")
    return value


def all_chosen(values: str, choices: Mapping[str, str]) -> list[str]:
    """The names of a list with commas, each once."""
    return list(dict.fromkeys(chosen(value.strip(), choices) for value in values.split(",")))


def completed(incomplete: str, choices: Mapping[str, str]) -> list[tuple[str, str]]:
    """The choices, with their explanations, that go on after what was typed; in a list, after its last comma."""
    before, comma, last = incomplete.rpartition(",")
    return [(before + comma + name, text) for name, text in choices.items() if name.startswith(last)]
