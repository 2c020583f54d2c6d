"""The live display of long work on a terminal."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_hidden = False


def hide_displays() -> None:
    """Show no display from now on: one terminal has no room for those of several processes."""
    global _hidden
    _hidden = True


def new_display() -> Progress | None:
    """Make a display that leaves nothing behind; None without a terminal. Each row has a field `note`."""
    console = Console(stderr=True)
    if _hidden or not console.is_terminal:
        return None
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # it may be a file
    )
