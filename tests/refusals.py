"""Tests of what is refused, a line each."""

from inspect import signature

import pytest


def refuses(message, call, /, *arguments, raised=ValueError, **options):
    """Check that a call is an error of this type, in one line, which the message matches."""
    with pytest.raises(raised, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def refused(*cases, by=None, error=ValueError, start=""):
    """A test for each case, `(*arguments, message)`: `by` refuses the arguments, or the only one, a function, refuses.

    Parameters that are not given are fixtures; messages begin with `start`.
    """

    @pytest.mark.parametrize("case", cases, ids=[case[-1] for case in cases])
    def test(case, request):
        call, *arguments = case[:-1] if by is None else (by, *case[:-1])
        given = signature(call).bind_partial(*arguments).arguments
        needed = [each for name, each in signature(call).parameters.items() if name not in given]
        fixtures = {each.name: request.getfixturevalue(each.name) for each in needed if each.default is each.empty}
        refuses(start + case[-1], call, *arguments, raised=error, **fixtures)

    return test
