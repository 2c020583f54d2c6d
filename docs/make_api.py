"""Writes `docs/api.md`, the public names and their docstrings: `make docs`."""

from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

from griffe import Alias, Extension, GriffeLoader, Module
from griffe2md import prepare_context, prepare_env

from facts.utils.files import replacing

PACKAGES = ("facts", "facts.estimators", "facts.search", "facts.moments", "facts.models", "facts.tasks")
PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """# Public names

What Python code outside the package may rely on. Made of the docstrings by `make docs`.
"""
LAYOUT = {
    "docstring_style": None,
    "filters": ["!^_"],
    "heading_level": 3,
    "inherited_members": False,
    "line_length": 120,
    "members_order": "source",
    "show_bases": False,
    "show_if_no_docstring": False,
    "show_root_members_full_path": False,
    "show_object_full_path": False,
    "show_signature_annotations": True,
    "summary": False,
}


class PydanticDataclasses(Extension):
    """A pydantic dataclass has a signature as the standard library's has."""

    def on_module_members(self, *, mod: Module, **_):
        imported = mod.members.get("dataclass")
        if imported and imported.target_path == "pydantic.dataclasses.dataclass":
            imported.target_path = "dataclasses.dataclass"


def public_names() -> Iterator[tuple[str, list[str]]]:
    """Each package with the classes and functions that it offers and no package before it did."""
    seen = set()
    for package in PACKAGES:
        module = import_module(package)
        things = {name: getattr(module, name) for name in module.__all__}
        new = [name for name, thing in things.items() if (isclass(thing) or isfunction(thing)) and thing not in seen]
        seen |= {things[name] for name in new}
        yield package, new


def offer_methods(package: Module, names: list[str]) -> None:
    """Add the methods that a package finds in its files: its source does not name them."""
    for name in names:
        if name not in package.members:
            thing = getattr(import_module(package.path), name)
            package.set_member(name, Alias(name, f"{thing.__module__}.{thing.__name__}"))


def render() -> str:
    """The page."""
    loader = GriffeLoader()
    loader.extensions.add(PydanticDataclasses())
    loader.load("facts")
    for package, names in public_names():
        offer_methods(loader.modules_collection[package], names)
    loader.resolve_aliases()
    templates = prepare_env()  # compiled once for all names
    parts = [INTRODUCTION]
    for package, names in public_names():
        parts.append(f"## {package}\n\n{loader.modules_collection[package].docstring.value}\n")
        for name in names:
            thing = loader.modules_collection[f"{package}.{name}"]
            template = templates.get_template(f"{thing.kind.value}.md.jinja")
            parts.append(template.render(**prepare_context(thing, LAYOUT)))
    return "\n".join(parts)


if __name__ == "__main__":
    with replacing(PAGE) as path:
        path.write_text(render())
