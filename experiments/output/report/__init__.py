"""One page on what was measured, with what, and how far it lies from the paper: `report.html`, in short `report.md`.

Both are made of the results folder and the experiments alone, whatever was run last; `python -m experiments.report`
writes them anew.
"""

from collections.abc import Iterable
from pathlib import Path

from experiments.config import Experiment
from experiments.output.report.experiment_result import Properties, read_result
from experiments.output.report.markdown import markdown
from experiments.output.report.page import page
from facts.utils.files import replacing


def write_report(experiments: Iterable[Experiment], properties: dict[str, Properties], folder: Path) -> None:
    """`report.html` and `report.md` in `folder`; `properties` are those that an experiment's table shows, by name."""
    results = [read_result(experiment, properties.get(experiment.name, {}), folder) for experiment in experiments]
    for name, text in (("report.md", markdown(results, folder.name)), ("report.html", page(results, folder.name))):
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8")
