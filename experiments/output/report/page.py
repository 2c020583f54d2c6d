"""The report on a results folder: `report.html`, a single file that loads nothing, and the short `report.md`."""

import io
import re
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from PIL import Image

from experiments.config import Experiment
from experiments.output.report.charts import pareto_charts
from experiments.output.report.results import Result, gaps_of, provenance, read_page, read_result, timings
from experiments.output.report.verdict import verdict
from experiments.output.tables import (
    DEVIATIONS,
    ERRORS,
    Entry,
    Properties,
    arrange,
    as_text,
    in_paper,
)
from facts.utils.files import replacing

MINUS = "\N{MINUS SIGN}"


def write_report(experiments: Iterable[Experiment], properties: Mapping[str, Properties], folder: Path) -> None:
    """Write both files to `folder`, including results from its sibling `photos`; `properties` are by table name."""
    results = [read_result(experiment, properties.get(experiment.name, {}), folder) for experiment in experiments]
    loader, escaping = PackageLoader("experiments.output.report"), select_autoescape()
    environment = Environment(
        loader=loader, autoescape=escaping, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for function in (gaps_of, parts, pareto_charts, picture, plans_of, provenance, table_of, timings):
        environment.globals[function.__name__] = function
    environment.filters |= {"code": code, "metric": metric_title}
    distinct = {record.fingerprint: record for result in results for record in result.records.values()}
    records = sorted(distinct.values(), key=lambda record: record.time)
    compared = any(entry.difference is not None for result in results for entry in result.entries.values())
    is_drawn = any(entry.deviation is not None for result in results for entry in result.entries.values())
    errors = " ".join([ERRORS, *[DEVIATIONS.format("several")] * is_drawn])
    content = {"profile": folder.name, "results": results, "records": records, "compared": compared, "errors": errors}
    photos = folder.with_name("photos")
    content["verdict"] = verdict(parts(results).get("Tables of the paper", []), photos / "rivals.csv", compared)
    content["pages"] = {path.stem: read_page(path) for path in sorted(photos.glob("*.md"))}
    content["pictures"] = sorted(photos.glob("*.png"))
    for name in ("report.md", "report.html"):
        page = environment.get_template(name).render(content)
        with replacing(folder / name) as path:
            path.write_text(page, encoding="utf-8")


def parts(results: list[Result]) -> dict[str, list[Result]]:
    """Group the experiments under headings, the paper's tables first."""
    headings = "Tables of the paper", "Tables beyond the paper", "Figures", "Ablations"
    chosen: dict[str, list[Result]] = {heading: [] for heading in headings}
    for result in results:
        published = in_paper(result.entries.values())
        table = "Ablations" if result.experiment.figure == "ablation" else headings[not published]
        chosen[table if result.experiment.metrics else "Figures"].append(result)
    return {heading: members for heading, members in chosen.items() if members}


def table_of(result: Result) -> pd.DataFrame:
    """Arrange an experiment's entries as cells of HTML, each with its exact value to sort by."""
    experiment = result.experiment

    def show(entry: Entry | None, source: str) -> str:
        if source == "ours" and entry and entry.status != "done":
            return Markup('<a class="{0}" href="#missing"><data value="">{0}</data></a>').format(entry.status)
        value = getattr(entry, source, None)
        if entry is None or value is None:
            return ""
        text = "+" * (source == "difference" and value > 0) + as_text(entry, source).replace("-", MINUS)
        shown, sign, error = text.partition(" ±")
        kind = "ranked" if source == "ours" and entry.metric == experiment.ranked_by else source
        cell = Markup('<data class="{}" value="{}">{}</data><small>{}</small>')
        return cell.format(kind, value, shown, sign + error)

    return arrange(experiment, result.entries.values(), result.properties, show)


def plans_of(result: Result) -> dict[str, pd.DataFrame]:
    """Show the ranks that searches gave to layers, by network and method, as bars if the full ranks are known."""
    plans: dict[str, dict[str, dict[str, Markup]]] = defaultdict(dict)
    for (row, column), record in result.records.items():
        if record.plan and not record.config["search"]["_target_"].endswith(".Uniform"):
            full = {layer: round(points[-1][0] / points[-1][1]) for layer, points in record.profile.items()}
            bars = plans[column][row] = {}
            for layer, rank in record.plan.items():
                whole = full.get(layer)
                bars[layer] = _bar(rank / whole, f"{rank}/{whole}") if rank and whole else _bar(1, str(rank or "dense"))
    return {column: pd.DataFrame(bars, dtype=object).rename_axis("layer").fillna("") for column, bars in plans.items()}


def _bar(share: float, text: str) -> Markup:
    return Markup('<data class="bar" value="{0:.4f}" style="--share:{0:.4f}">{1}</data>').format(share, text)


def picture(path: Path) -> str:
    """Encode a PNG in a URL, as lossless WebP: a third of the bytes."""
    file = io.BytesIO()
    Image.open(path).save(file, "WEBP", lossless=True)
    return f"data:image/webp;base64,{b64encode(file.getvalue()).decode()}"


def code(text: str) -> Markup:
    """Mark up text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def metric_title(title: str) -> Markup:
    """Mark up `^` and `_` as in TeX: mAP^b_50."""
    raised = re.sub(r"\^(\w)", r"<sup>\1</sup>", str(escape(title)))
    return Markup(re.sub(r"_(\w+)", r"<sub>\1</sub>", raised))
