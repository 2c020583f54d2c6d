"""Draws `docs/claims.png`: the lead of each claim of the paper, there, on small networks and on photos."""

import re
from collections import Counter
from collections.abc import Iterable
from textwrap import fill

from make_tables import paper_claims
from matplotlib.figure import Figure
from measurements import ROOT

from experiments.output.figures import BLACK, BLUE, GREY, VERMILION, one_legend
from experiments.record import ERRORS_APART
from facts.utils.files import replacing

CHARACTERS_OF_CLAIM = 38  # per line
VERDICTS = {"yes": "hold", "level": "are level", "undecided": "undecided", "no": "fail"}
SOURCES = {"paper": (BLACK, "none", -0.25), "small networks": (BLUE, BLUE, 0.0), "photos": (VERMILION, VERMILION, 0.25)}


def _counted(claims: Iterable[tuple[str, ...]]) -> str:
    counts = Counter(cells[-1].partition(";")[0] for cells in claims)
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items())


def draw_claims(rows: Iterable[tuple[str, ...]]) -> None:
    """Draw a table of leads, with the verdicts of its last column at the right."""
    head, *claims = rows
    figure = Figure(figsize=(6.9, 0.8 + 0.36 * len(claims)), layout="constrained")
    axes = figure.subplots()
    for source, (color, fill_color, shift) in SOURCES.items():
        for place, cells in enumerate(claims):
            if cell := cells[head.index(source)]:
                value, *error = map(float, re.findall(r"[+-]?[\d.]+", cell))
                style = {"color": color, "markerfacecolor": fill_color, "markersize": 4, "elinewidth": 0.8}
                errors = ERRORS_APART * error[0] if error else None
                axes.errorbar(value, place + shift, xerr=errors, fmt="o", label=source, **style)
    axes.axvline(0, color=BLACK, linewidth=0.5)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-20, 80)
    axes.set_xticks([-10, -1, 0, 1, 10], ["−10", "−1", "0", "+1", "+10"])
    axes.set_xlabel("lead in points, or in the metric named, ± two standard errors; logarithmic beyond ±1", fontsize=8)
    axes.set_yticks(range(len(claims)), [fill(cells[0], CHARACTERS_OF_CLAIM) for cells in claims], fontsize=7)
    axes.set_ylim(len(claims) - 0.4, -0.6)
    axes.grid(alpha=0.4, linestyle="--")
    for place, cells in enumerate(claims):
        verdict = cells[-1].replace("; ", "\n")
        axes.text(1.01, place, verdict, transform=axes.get_yaxis_transform(), fontsize=6, va="center", color=GREY)
    one_legend(axes, loc="upper left")
    figure.suptitle(
        f"Of {len(claims)} claims of the paper, on small networks {_counted(claims)}", fontsize=9, weight="bold"
    )
    with replacing(ROOT / "docs" / "claims.png") as path:
        figure.savefig(path, format="png", dpi=160)


if __name__ == "__main__":
    draw_claims(paper_claims())
