"""Report on the measurements, their provenance and their distance from the paper: `report.html`, in short `report.md`.

Both are made from the results folder and the experiments alone; `python -m experiments.report` writes them again.
"""

from collections.abc import Iterable
from pathlib import Path

from experiments.config import Experiment
from experiments.output.report.experiment_result import Properties, read_result
from experiments.output.report.markdown import markdown
from experiments.output.report.page import page
from facts.utils.files import replacing


def write_report(experiments: Iterable[Experiment], properties: dict[str, Properties], folder: Path) -> None:
    """Write `report.html` and `report.md` in `folder`; `properties` are those of an experiment's table, by name."""
    results = [read_result(experiment, properties.get(experiment.name, {}), folder) for experiment in experiments]
    for name, text in (("report.md", markdown(results, folder.name)), ("report.html", page(results, folder.name))):
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8")
