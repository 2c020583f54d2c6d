"""The names of the package, each of which is imported at its first use."""

from inspect import signature

import facts


def test_names_are_those_of_the_stub_and_can_be_imported():
    for name in ("Budget", "Execution", "compress", "prepare", "pareto", "recover", "search", "estimators"):
        assert name in facts.__all__
    for name in facts.__all__:
        assert getattr(facts, name).__name__.rpartition(".")[2] == name


def test_the_arguments_of_compress_fit_on_a_screen():
    arguments = signature(facts.compress).parameters
    assert len(arguments) <= 15
    assert all(f"| `{name}` |" in facts.compress.__doc__ for name in arguments)
