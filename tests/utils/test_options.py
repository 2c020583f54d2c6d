"""Packages that only some uses need."""

import pytest

from facts.utils.options import needing


def test_a_missing_package_is_named_with_its_extra():
    named = r"^a dream needs no_such_package: pip install -e '.\[dreams\]'$"
    with pytest.raises(ModuleNotFoundError, match=named), needing("dreams", "a dream"):
        import no_such_package  # noqa: F401
