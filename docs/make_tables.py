"""Fills in the pages: `make docs` writes tables of methods from docstrings, and results from the records in `results/`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A number stands behind the expression that gives it,
`<!--= at("pivoted", "FACTS", "40 %") -->83.0<!--/-->`, and keeps its decimals. `<!--? EXPRESSION -->` is a claim, which
must be true. On the pages of results, every number with decimals is one of these.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from math import ceil, floor
from pathlib import Path

import pandas as pd

from facts.utils.files import replacing
from facts.utils.options import describe_methods

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
OF_RESULTS = {"README.md": r"\n## Results\n(.*?)\n## ", "results.md": "(.*)"}
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--= (.+?) -->)(.*?)(?=<!--/-->)", re.DOTALL)
CLAIM = re.compile(r"<!--\? (.+?) -->", re.DOTALL)
FILLED = re.compile(rf"{TABLE.pattern}|{NUMBER.pattern}<!--/-->|<!--.*?-->|`[^`]*`|\]\(.*?\)", re.DOTALL)

RATIOS = (80, 70, 60, 50)
PHOTOS = {"ViT-Tiny": "vit_tiny", "DeiT-Tiny": "deit_tiny"}
LAYERS, UNITS = "Layers, pivoted: FACTS + CoRS-Fisher", "Units: FACTS + CoRS-Fisher"
BOTH = "Units and tokens: FACTS + CoRS-Fisher"
NETWORKS = {
    "uniform ranks": "",
    "in steps of 16 (`search.rank_multiple=16`)": ", ranks in steps of 16",
    "pivoted too": ", pivoted, in such steps",
    "units": ", units",
}

Rows = Iterable[tuple[str, ...]]


@lru_cache
def read(path: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / path)


def table(name: str) -> pd.DataFrame:
    """A CSV of `results/`: `pivoted` for `mini/tables/pivoted`, `photos/units` for `photos/tables/units`."""
    folder, _, file = name.rpartition("/")
    return read(f"results/{folder}/{file}.csv" if "/" in folder else f"results/{folder or 'mini'}/tables/{file}.csv")


def at(name: str, *words: str, of: str = "ours") -> float:
    """The value in the only line of a CSV that holds all words, such as row, column and metric."""
    lines = table(name)
    found = lines[[set(words) <= {str(cell) for cell in line} for line in lines.to_numpy()]][of].dropna()
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of {name}, not one, have {of} and {', '.join(words)}")
    return float(found.iloc[0])


def wide(name: str, of: str = "ours", metric: str = "top1") -> pd.DataFrame:
    """A metric of a table, by row and column."""
    return table(name).query("metric == @metric").pivot(index="row", columns="column", values=of)


def at_most(value: float) -> float:
    """A bound in one decimal, rounded up."""
    return ceil(round(10 * value, 6)) / 10


def at_least(value: float) -> float:
    """A bound in one decimal, rounded down."""
    return floor(round(10 * value, 6)) / 10


def estimators() -> Rows:
    yield "`estimator`", "what it keeps of the data", "input side A", "output side B"
    for name, method in describe_methods("facts.estimators.methods").items():
        sides = dict(line.split(" = ", 1) for line in method.details.splitlines())
        yield f"`{name}`", method.summary, sides["A"], sides["B"]


def searches() -> Rows:
    yield "`search`", "where a layer's rank comes from"
    for name, method in describe_methods("facts.search.methods").items():
        details = f". {' '.join(method.details.split())}" if method.details else ""
        yield f"`{name}`", f"{method.summary}{details}"


def photos() -> Rows:
    yield "top-1", "dense", *(f"0.{ratio // 10}" for ratio in RATIOS)
    methods = {"units and tokens": ("tokens", BOTH), "tokens, by ToMe": ("tokens", "Tokens: ToMe")}
    methods |= {"units": ("units", UNITS), "layers": ("units", LAYERS)}
    for network in PHOTOS:
        for title, (name, row) in methods.items():
            columns = [f"{network}, {ratio} %" for ratio in RATIOS]
            values = [at(f"photos/{name}", row, column, "top1") for column in columns]
            dense = at("photos/units", "Dense", columns[0], "top1")
            yield f"{network}, {title}", *(f"{value:.1f}" for value in (dense, *values))


def digits() -> Rows:
    networks = ("DeiT-B", "Swin-B", "ConvNeXt-B", "MambaVision-B")
    yield "top-1", *networks
    for row in ("Baseline", "PELA", "SVD-LLM", "FACTS", "FACTS + CoRS"):
        yield row, *(f"{at('classification_50', row, network, 'top1'):.1f}" for network in networks)


def tokens() -> Rows:
    ratios = (*RATIOS, 40, 30)
    yield "", *(f"0.{ratio // 10}" for ratio in ratios)
    rows = {"units and tokens": BOTH, "units and tokens, uniform": "Units and tokens: FACTS, uniform"}
    rows |= {"tokens": "Tokens: FACTS + CoRS-Fisher", "tokens, uniform": "Tokens: FACTS, uniform"}
    rows |= {"tokens, ToMe": "Tokens: ToMe", "units": UNITS}
    for network in ("DeiT-Tiny", "ViT-Tiny"):
        columns = [f"{network}, {ratio} %" for ratio in ratios]
        dense = at("photos/tokens", "Dense", columns[0], "top1")
        for title, row in rows.items():
            places = [("photos/tokens", row, column) for column in columns]
            values = [f"{at(*place, 'top1'):.1f} ({at(*place, 'distance'):.2g})" for place in places]
            yield f"{network} ({dense:.1f}), {title}", *values


def recovered() -> Rows:
    yield "ratio", *(f"{network}, {kind}" for network in PHOTOS for kind in ("pivoted", "recovered"))
    name, method = "photos/earlier/beyond", "FACTS + CoRS-Fisher, pivoted"
    yield "dense", *(cell for key in PHOTOS.values() for cell in (f"{at(name, key, 'dense', of='top1'):.1f}", ""))
    for ratio in ("0.8", "0.7", "0.6", "0.5"):
        places = [(key, kind) for key in PHOTOS.values() for kind in (method, f"{method}, recovered")]
        yield ratio, *(f"{at(name, key, ratio, kind, of='top1'):.1f}" for key, kind in places)


def baselines() -> Rows:
    means = table("photos/earlier/baselines").query("metric == 'top1'").groupby("row").ours.mean()
    names = ("PELA", "KFAC-reduce", "ASVD", "FW-SVD", "GFWSVD", "FLAR", "SVD-LLM", "KFAC-expand", "FACTS", "Shampoo²")
    yield "", *names
    yield "uniform ranks", *(f"{means[name]:.1f}" for name in names)
    yield "CoRS", *(f"{means[f'{name} + CoRS']:.1f}" for name in names)


def fisher() -> Rows:
    names = ("FW-SVD", "GFWSVD", "Shampoo²", "KFAC-reduce", "KFAC-expand", "FACTS")
    yield "", *names
    yield "cosine", *(f"{at('photos/earlier/fisher_estimators', name, of='cosine'):.3f}" for name in names)
    yield "top-1", *(f"{at('photos/earlier/fisher_estimators', name, of='top1'):.1f}" for name in names)


def speed_on(machine: str, runtimes: dict[str, str]) -> Rows:
    yield "DeiT-B", *runtimes
    for title, ending in NETWORKS.items():
        places = [(runtime, f"50% of the FLOPs{ending}") for runtime in runtimes.values()]
        values = [at(f"benchmarks/{machine}/throughput", *place, of="speed-up") for place in places]
        yield title, *(f"{value:.2f}" for value in values)


def speed() -> Rows:
    runtimes = {"PyTorch": "PyTorch, float32", "compiled": "PyTorch compiled, float32"}
    runtimes |= {"ONNX Runtime": "ONNX Runtime, float32", "ONNX, int8": "ONNX Runtime, int8"}
    runtimes |= {"OpenVINO": "OpenVINO, float32", "OpenVINO, int8": "OpenVINO, int8"}
    return speed_on("amd_epyc", runtimes)


def speed_on_gpu() -> Rows:
    runtimes = {"TF32": "PyTorch, float32"} | {name: f"PyTorch, {name}" for name in ("bfloat16", "float16")}
    return speed_on("nvidia_h200", runtimes)


TABLES = {
    each.__name__: each
    for each in (estimators, searches, photos, digits, tokens, recovered, baselines, fisher, speed, speed_on_gpu)
}


def markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count("|") - 1), *lines[1:]]) + "\n"


def render(page: str) -> str:
    """The page with its tables and numbers as docstrings and records have them."""
    names = {"at": at, "at_least": at_least, "at_most": at_most, "table": table, "wide": wide}

    def number(match: re.Match) -> str:
        decimals = len(match[3].partition(".")[2])
        return f"{match[1]}{eval(f'({match[2]})', names):,.{decimals}f}"

    for match in CLAIM.finditer(page):
        if not eval(f"({match[1]})", names):
            raise ValueError(f"the records contradict {match[0]}: correct the sentence before it")
    page = TABLE.sub(lambda match: match[1] + markdown(TABLES[match[2]]()), page)
    return NUMBER.sub(number, page)


def loose_numbers(path: Path) -> list[str]:
    """Numbers with decimals on a page of results that come from no record."""
    text = re.search(OF_RESULTS.get(path.name, "$^"), path.read_text(), re.DOTALL)
    return re.findall(r"[\d,]*\d\.\d+", FILLED.sub("", text[1])) if text else []


if __name__ == "__main__":
    for page in PAGES:
        text = render(page.read_text())
        with replacing(page) as path:
            path.write_text(text)
        if loose := loose_numbers(page):
            raise SystemExit(f"{page.name}: no record gives {', '.join(loose)}: write <!--= at(...) --> before each")
