"""The report in short, for a terminal."""

import pandas as pd

from experiments.output.report.experiment_result import ExperimentResult, distinct
from experiments.output.report.provenance import Provenance, seconds_by_estimator


def markdown(results: list[ExperimentResult], profile: str) -> str:
    lines = [
        f"# Results, profile `{profile}`",
        "",
        "All of it on one page, with charts: [report.html](report.html)",
        "",
    ]
    for result in results:
        experiment = result.experiment
        files = {"table": f"tables/{experiment.name}.md"} if experiment.metrics else {}
        if experiment.figure:
            files["figure"] = f"figures/{experiment.name}.png"
        lines.append(f"- {experiment.title}: {', '.join(f'[{kind}]({file})' for kind, file in files.items())}")
    records = distinct(results)
    if not records:
        return "\n".join([*lines, "", "No record of a cell is here.", ""])
    provenance = Provenance.of(records)
    lines += ["", "## With what", "", f"{len(records)} cells, the last one on {provenance.time}."]
    lines += ["", f"Commit: {', '.join(provenance.commits)}.", ""]
    facts = {**provenance.machine, **provenance.versions}
    lines += [pd.DataFrame(facts.items(), columns=["what", "value"]).to_markdown(index=False)]
    lines += ["", "## How long, and what had to be repaired", ""]
    lines += ["Seconds are sums over cells; a repaired factor is one that was not positive definite.", ""]
    lines += [seconds_by_estimator(records).to_markdown(index=False, floatfmt=".1f"), ""]
    return "\n".join(lines)
