"""Writes the tables of methods in `docs/methods.md`, from the docstrings of the methods' files: `make docs`."""

import re
from pathlib import Path

from facts.utils.files import replacing
from facts.utils.options import describe_methods

PAGE = Path(__file__).with_name("methods.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def estimators() -> list[tuple[str, ...]]:
    rows = [("`estimator`", "what it keeps of the data", "input side A", "output side B")]
    for name, method in describe_methods("facts.estimators.methods").items():
        sides = dict(line.split(" = ", 1) for line in method.details.splitlines())
        rows.append((f"`{name}`", method.summary, sides["A"], sides["B"]))
    return rows


def searches() -> list[tuple[str, ...]]:
    rows = [("`search`", "where a layer's rank comes from")]
    for name, method in describe_methods("facts.search.methods").items():
        details = f". {' '.join(method.details.split())}" if method.details else ""
        rows.append((f"`{name}`", f"{method.summary}{details}"))
    return rows


TABLES = {"estimators": estimators, "searches": searches}


def markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def render(page: str) -> str:
    """The page with its tables as the docstrings have them."""
    return MARKED.sub(lambda match: match[1] + markdown(TABLES[match[2]]()), page)


if __name__ == "__main__":
    text = render(PAGE.read_text())
    with replacing(PAGE) as path:
        path.write_text(text)
