"""The report as one HTML file that loads nothing."""

import re
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.output.report.charts import pareto_charts, sensitivity_charts
from experiments.output.report.experiment_result import ExperimentResult, distinct
from experiments.output.report.plans import full_ranks, plan_tables
from experiments.output.report.provenance import Provenance, seconds_by_estimator, seconds_by_experiment
from experiments.output.tables import LEVEL, Entry, in_paper, is_level, ours_as_text
from experiments.output.tables import number as rounded

SOURCES = ("ours", "paper", "difference")
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Group:
    """A metric's columns under one heading: ours, the paper's and their difference, if known."""

    metric: str
    title: str
    sources: list[str]


def page(results: list[ExperimentResult], profile: str) -> str:
    """Render the whole document."""
    records = distinct(results)
    environment = Environment(
        loader=PackageLoader("experiments.output.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["level"] = LEVEL
    environment.tests["level"] = is_level
    environment.filters |= {
        "number": number,
        "shown": shown,
        "code": code,
        "metric": metric_title,
        "embedded": embedded,
    }
    full = full_ranks(records)
    return environment.get_template("page.html").render(
        profile=profile,
        parts=parts(results),
        results=results,
        counts=Counter(cell.status for result in results for cell in result.cells.values()),
        compared=any(result.compared for result in results),
        groups={result.experiment.name: groups(result) for result in results},
        plans={result.experiment.name: plan_tables(result, full) for result in results},
        pareto=pareto_charts(results),
        sensitivities=sensitivity_charts(results),
        num_records=len(records),
        num_unread=len({e.fingerprint for o in results for e in o.cells.values() if e.fingerprint}) - len(records),
        provenance=Provenance.of(records) if records else None,
        timings=[seconds_by_experiment(results), seconds_by_estimator(records)] if records else [],
    )


def parts(results: list[ExperimentResult]) -> dict[str, list[ExperimentResult]]:
    """Group the experiments under headings, the paper's tables first."""
    tables = [result for result in results if result.experiment.metrics]
    chosen = {
        "Tables of the paper": [result for result in tables if is_of_the_paper(result)],
        "Tables beyond the paper": [result for result in tables if not is_of_the_paper(result)],
        "Figures": [result for result in results if not result.experiment.metrics],
    }
    return {heading: members for heading, members in chosen.items() if members}


def is_of_the_paper(result: ExperimentResult) -> bool:
    return result.experiment.published_in == "paper" and in_paper(result.entries.values())


def groups(result: ExperimentResult) -> list[Group]:
    """The headings under each of a table's columns; without a value of the paper there is no column for it."""
    found = []
    for metric, title in result.experiment.metrics.items():
        entries = [entry for (_, _, name), entry in result.entries.items() if name == metric]
        known = [source for source in SOURCES if any(getattr(entry, source) is not None for entry in entries)]
        found.append(Group(metric, title, ["ours", *(source for source in known if source != "ours")]))
    return found


def number(value: float | None) -> str:
    return rounded(value).replace("-", MINUS)


def shown(entry: Entry | None) -> str:
    """A table's view of one of its own entries."""
    return ours_as_text(entry).replace("-", MINUS)


def code(text: str) -> Markup:
    """Mark up text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def metric_title(title: str) -> Markup:
    """Mark up `^` and `_` as in TeX: mAP^b_50."""
    raised = re.sub(r"\^(\w)", r"<sup>\1</sup>", str(escape(title)))
    return Markup(re.sub(r"_(\w+)", r"<sub>\1</sub>", raised))


def embedded(figure: Path) -> str:
    """A PNG as a data URL."""
    return f"data:image/png;base64,{b64encode(figure.read_bytes()).decode()}"
