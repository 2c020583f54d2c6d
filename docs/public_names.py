"""The public names, and extensions of Griffe, which reads the source, that show them on `docs/api.md`."""

from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction

from griffe import Alias, Class, ExprCall, ExprKeyword, ExprName, Extension, Module

from facts.utils.options import Methods

OPTIONS = "facts.utils.options.options"
PACKAGES = ("facts", "facts.estimators", "facts.search", "facts.moments", "facts.models", "facts.tasks")


def public_names() -> Iterator[tuple[str, list[str]]]:
    """Yield each package with its public classes and functions, each listed under the first package that has it."""
    seen = set()
    for package in PACKAGES:
        module = import_module(package)
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        methods = [
            method for each in list(vars(module).values()) if isinstance(each, Methods) for method in each.values()
        ]
        things = {name: getattr(module, name) for name in names} | {method.__name__: method for method in methods}
        new = [name for name, thing in things.items() if (isclass(thing) or isfunction(thing)) and thing not in seen]
        seen |= {things[name] for name in new}
        yield package, new


class PydanticDataclasses(Extension):
    """Give pydantic dataclasses and classes under `@options` the signatures of the standard library's dataclasses."""

    def on_module_members(self, *, mod: Module, **_):
        imported = mod.members.get("dataclass")
        if imported and imported.target_path == "pydantic.dataclasses.dataclass":
            imported.target_path = "dataclasses.dataclass"

    def on_class_members(self, *, cls: Class, **_):
        for decorator in cls.decorators:
            if getattr(decorator.value, "canonical_path", None) == OPTIONS:
                name = ExprName("dataclass", parent="dataclasses")
                decorator.value = ExprCall(name, [ExprKeyword("kw_only", "True", function=name)])


class FoundMethods(Extension):
    """Add the methods that a package finds in its files, which its source does not name."""

    def on_module_members(self, *, mod: Module, **_):
        for name in dict(public_names()).get(mod.path, ()):
            if name not in mod.members:
                thing = getattr(import_module(mod.path), name)
                mod.set_member(name, Alias(name, f"{thing.__module__}.{thing.__name__}"))
