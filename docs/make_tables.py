"""Fills in the tables of the pages, for `make docs`: those of methods from docstrings, the others from `results/`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and NAME is a function of this file. Where a page
tells results, decimals stand only in these tables; `tests/docs/test_claims.py` checks what the prose says.
"""

import re
from collections.abc import Iterable
from itertools import product
from math import isnan
from pathlib import Path

from measurements import (
    BASES,
    BOTH,
    DENSE,
    HALVES,
    ROOT,
    TINY,
    TOKENS,
    TOME,
    UNITS,
    Lead,
    ahead,
    at,
    distance,
    kept_parameters,
    lead_over,
    lead_over_closest,
    on_all_photos,
    read,
    table,
)

from experiments.record import ERRORS_APART
from facts.utils.files import replacing
from facts.utils.options import describe_methods

PAGES = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
OF_RESULTS = {"README.md": r"\n## Results\n(.*?)\n## ", "results.md": "(.*)"}
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
NO_PROSE = re.compile(rf"{TABLE.pattern}|```.*?```|`[^`]*`|\]\(.*?\)", re.DOTALL)

FORMATS = "float32", "int8, OpenVINO", "int8, ONNX Runtime"
NOISY = 10  # percent
PLANS_ON_GPU = "", ", ranks in steps of 16", ", units, heads of two widths"

Rows = Iterable[tuple[str, ...]]


# The tables of methods.


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


# Published networks.


def photos() -> Rows:
    yield "top-1", "dense", "80 %", "70 %", "60 %", "50 %", "parameters at 50 %"
    for network in TINY:
        columns = [f"{network}, {ratio} %" for ratio in (80, 70, 60, 50)]
        for title, row in {"units and tokens": BOTH, "tokens": TOKENS, "tokens by ToMe": TOME, "units": UNITS}.items():
            values = [on_all_photos(DENSE, columns[0]), *(on_all_photos(row, column) for column in columns)]
            kept = f"{100 * kept_parameters(row, columns[-1]):.0f} %"
            yield f"{network}, {title}", *(f"{value:.1f}" for value in values), kept


def differences() -> Rows:
    ratios = (80, 70, 60, 50, 40, 30)
    yield "points of top-1", *(f"{ratio} %" for ratio in ratios)
    for network in TINY:
        for title, other, halves in (
            ("dense", DENSE, HALVES),
            ("ToMe", TOME, HALVES),
            ("ToMe, test half", TOME, ["top1"]),
        ):
            values = (ahead(BOTH, other, f"{network}, {ratio} %", halves) for ratio in ratios)
            yield f"{network}, from {title}", *(f"{value:+.1f} ± {error:.1f}" for value, error in values)


def distances() -> Rows:
    ratios = (80, 70, 60, 50, 40, 30)
    yield "KL divergence", *(f"{ratio} %" for ratio in ratios)
    for network in TINY:
        for title, row in {"units and tokens": BOTH, "tokens": TOKENS, "ToMe": TOME}.items():
            yield f"{network}, {title}", *(f"{distance(row, f'{network}, {ratio} %'):.4f}" for ratio in ratios)


def halves() -> Rows:
    ratios = (80, 70, 60, 50, 40)
    yield "top-1", "dense", *(f"{ratio} %" for ratio in ratios)
    for network in TINY:
        for title, metric in {"tuning half": "chosen", "test half": "top1"}.items():
            places = [(DENSE, f"{network}, 80 %"), *((BOTH, f"{network}, {ratio} %") for ratio in ratios)]
            yield f"{network}, {title}", *(f"{at('photos/tokens', *place, metric):.1f}" for place in places)


def sizes() -> Rows:
    ratios = (80, 70, 60, 50, 40, 30)
    yield "parameters that remain [%]", *(f"{ratio} %" for ratio in ratios)
    for network in TINY:
        for title, row in {"units and tokens": BOTH, "units": UNITS}.items():
            kept = (100 * kept_parameters(row, f"{network}, {ratio} %") for ratio in ratios)
            yield f"{network}, {title}", *(f"{percent:.0f}" for percent in kept)


def numbers_of_photos() -> Rows:
    numbers = [*dict.fromkeys(table("photos/calibration_size").row)]
    yield "top-1 at 50 %", *(f"{number} photos" for number in numbers)
    for network in TINY:
        yield network, *(f"{on_all_photos(each, network, 'photos/calibration_size'):.1f}" for each in numbers)


def recovered() -> Rows:
    yield "top-1 at 50 %", *(f"{network}{what}" for network in TINY for what in ("", ", recovered"))
    for title in ("pivoted", "units", "units and tokens"):
        rows = [f"FACTS + CoRS-Fisher, {title}{what}" for what in ("", ", recovered")]
        places = product([f"{network}, 50 %" for network in TINY], rows)
        values = (at("photos/beyond", *place, "top1") for place in places)
        yield f"layers, {title}" if title == "pivoted" else title, *(f"{value:.1f}" for value in values)


def baselines() -> Rows:
    """Rows in the order of their sums."""
    yield "mean top-1 on photos", "uniform ranks", "CoRS"
    means = table("photos/baselines").query("metric == 'top1'").groupby("row").ours.mean()
    both = {row: (means[row], means[f"{row} + CoRS"]) for row in means.index if f"{row} + CoRS" in means.index}
    for row, values in sorted(both.items(), key=lambda item: -sum(item[1])):
        yield row, *(f"{value:.1f}" for value in values)


def int8() -> Rows:
    yield "top-1", "float32", "OpenVINO int8", "agreement", "ONNX Runtime int8", "agreement", "MB", "in OpenVINO int8"
    for column in dict.fromkeys(table("photos/int8").column):
        top1, agreement, size = (
            [at("photos/int8", row, column, metric) for row in FORMATS]
            for metric in ("exported_top1", "agreement", "megabytes")
        )
        values = top1[0], top1[1], agreement[1], top1[2], agreement[2]
        yield column, *(f"{value:.1f}" for value in (*values, *size[:2]))


def int8_speed() -> Rows:
    yield "speed-up", "OpenVINO float32", "OpenVINO int8", "ONNX Runtime int8"
    for column in dict.fromkeys(table("photos/int8").column):
        yield column, *(f"{at('photos/int8', row, column, 'speedup'):.2f}" for row in FORMATS)


# Small networks, next to the paper.


def paper_claims() -> Rows:
    """Give the lead of each claim in points: in the paper, on the small networks and on photos."""
    yield "claim", "paper", "small networks", "paper, 40 %", "small, 40 %", "photos", "does it hold?"
    for title, row in {"SVD-LLM": "SVD-LLM", "GFWSVD": "GFWSVD", "plain truncation": "PELA"}.items():
        yield _claim(f"FACTS leads {title}", *_everywhere("FACTS", row))
    yield _claim("CoRS leads uniform ranks", *_everywhere("FACTS + CoRS", "FACTS"))
    leads = _leads("search_methods", "CoRS", ["uniform", "ASVD", "FLAR-SVD", "MemViT", "ComCat"])
    others = [f"FACTS + {name}" for name in ("ASVD's search", "FLAR's search", "MemViT's search", "ComCat")]
    photos = lead_over("photos/baselines", "FACTS + CoRS", others)
    yield _claim("CoRS leads every other search of the paper", *leads, photos)
    others = ["Shampoo²", "KFAC-expand", "KFAC-reduce", "GFWSVD", "FW-SVD"]
    photos = lead_over("photos/baselines", "FACTS", others)
    yield _claim("FACTS leads every other estimator", *_leads("fisher_estimators", "FACTS", others), photos)
    closest = [lead_over_closest(name, of) for name, of in (("", "paper"), ("", "ours"), ("photos/", "ours"))]
    yield _claim("FACTS leads the estimator closest to the Fisher", *closest)
    leads = _leads("contributions", "+ sensitivity interpolation", ["+ ILP search"], BASES[:2])
    yield _claim("Interpolated sensitivities are level", *leads, level=True)
    leads = _leads("calibration_size", "FACTS + CoRS (1024)", ["FACTS + CoRS (8192)"], BASES)
    yield _claim("An eighth of the calibration images is enough", *leads, level=True)
    for title, row, ending in (
        ("without training", "FACTS + CoRS", ""),
        ("finetuned", "FACTS + CoRS, finetuned 1 epoch", ", finetuned 5 epochs"),
    ):
        others = [f"{name}{ending}" for name in ("Isomorphic", "DISP-LLM")]
        yield _claim(f"FACTS + CoRS leads pruning, {title}", *_leads("structured_pruning", row, others))
    for title, name, metric in (("box mAP", "detection", "box_map"), ("mIoU", "segmentation", "miou")):
        yield _claim(f"FACTS leads SVD-LLM in {title}", *_leads(name, "FACTS", ["SVD-LLM"], metric=metric))
    for title, row, other, metric in (
        ("perplexity", "SVD-LLM", "FACTS", "perplexity"),  # of which less is better
        ("zero-shot accuracy", "FACTS", "SVD-LLM", "accuracy"),
    ):
        yield _claim(f"FACTS leads SVD-LLM in {title}, uniform ranks", *_leads("llm", row, [other], metric=metric))


def _leads(name: str, row: str, others: list[str], columns: Iterable[str] = (), metric: str = "top1") -> list[Lead]:
    return [lead_over(name, row, others, columns, metric, of) for of in ("paper", "ours")]


def _everywhere(row: str, other: str) -> tuple[Lead, ...]:
    """A lead in the paper, on the small networks and on photos, and at 40 % in the paper and on the small networks."""
    leads, at_40 = (_leads(f"classification_{ratio}", row, [other], BASES) for ratio in (50, 40))
    return *leads, lead_over("photos/baselines", row, [other]), *at_40


def _claim(
    title: str,
    paper: Lead,
    small: Lead,
    photos: Lead | None = None,
    paper_at_40: Lead | None = None,
    at_40: Lead | None = None,
    level: bool = False,
) -> tuple[str, ...]:
    """Judge leads by two standard errors; a claim that two methods are `level` needs none.

    Where two errors are more than the paper's lead, nothing could be seen of it: that is undecided.
    """

    def verdict(value: float, error: float) -> str:
        if isnan(error):
            return "error not known"
        if abs(value) <= ERRORS_APART * error:
            return "yes" if level else "level" if ERRORS_APART * error < abs(paper[0]) else "undecided"
        return "yes" if not level and (value > 0) == (paper[0] > 0) else "no"

    def written(value: float, error: float) -> str:
        digits = 2 if abs(value) < 1 else 1
        return f"{value:+.{digits}f}" + ("" if isnan(error) else f" ± {error:.{digits}f}")

    on_small = verdict(*small)
    others = {place: verdict(*each) for place, each in {"at 40 %": at_40, "photos": photos}.items() if each}
    verdicts = [on_small, *(f"{place}: {each}" for place, each in others.items() if each != on_small)]
    published = [f"{each[0]:+.1f}" if each else "" for each in (paper, paper_at_40)]
    first, second, last = (written(*each) if each else "" for each in (small, at_40, photos))
    return title, published[0], first, published[1], second, last, "; ".join(verdicts)


def digits() -> Rows:
    yield "top-1 at 50 %", *(f"small {network}" for network in BASES)
    for row in ("Baseline", "PELA", "SVD-LLM", "GFWSVD", "FACTS", "FACTS + CoRS"):
        yield row, *(f"{at('classification_50', row, network, 'top1'):.1f}" for network in BASES)


def tasks() -> Rows:
    yield "small networks", "Swin-B, box mAP", "Swin-B, mIoU", "DeiT-B, mIoU", "language, perplexity"
    places = [("detection", "Mask R-CNN, Swin-B", "box_map")]
    places += [("segmentation", f"UPerNet, {network}", "miou") for network in ("Swin-B", "DeiT-B")]
    for title, row, language in (
        ("dense", "Baseline", "Baseline"),
        ("SVD-LLM + CoRS", "SVD-LLM", "SVD-LLM + CoRS"),
        ("FACTS + CoRS", "FACTS", "FACTS + CoRS"),
    ):
        values = [at(name, row, column, metric) for name, column, metric in places]
        yield title, *(f"{value:.1f}" for value in (*values, at("llm", language, "perplexity")))
    values = [at(f"beyond_{name}", "FACTS + CoRS, units", column, metric) for name, column, metric in places]
    yield "FACTS + CoRS, units", *(f"{value:.1f}" for value in values), ""


# Speed.


def speed() -> Rows:
    yield "DeiT-B at 50 %", "layers", "in steps of 16", "units", "units and tokens"
    on_cpu = "benchmarks/amd_epyc/runtimes"
    columns = dict.fromkeys(table(on_cpu).column)
    for runtime in dict.fromkeys(table(on_cpu).row):
        yield f"CPU, {runtime}", *(f"{1 / at(on_cpu, runtime, each, 'remaining_time'):.2f}" for each in columns)
    on_gpu = "benchmarks/nvidia_h200/throughput"
    for title, name in {"TF32": "float32", "bfloat16": "bfloat16", "float16": "float16"}.items():
        runtime = "PyTorch, float32 (TF32)" if title == "TF32" else f"PyTorch, {name}"
        remaining, low, high = (
            at("benchmarks/nvidia_h200/units_and_tokens", runtime, "0.501", of=of)
            for of in ("remaining time", "lower quartile", "upper quartile")
        )
        speeds = []
        for kind in PLANS_ON_GPU:
            speed, spread = (
                at(on_gpu, f"PyTorch, {name}", f"50% of the FLOPs{kind}", of=of)
                for of in ("speed-up", "interquartile range [%]")
            )
            speeds.append(f"{_about(spread)}{speed:.2f}")
        yield f"GPU, {title}", *speeds, f"{_about(100 * (high - low) / remaining)}{1 / remaining:.2f} †"


def _about(spread: float) -> str:
    """Mark medians with a large interquartile range."""
    return "≈ " if spread > NOISY else ""


# The map of the paper.

IN_PAPER = {
    "Table 1": "classification_50",
    "Table 2": "fisher_estimators",
    "Table 3": "search_methods",
    "Table 4": "structured_pruning",
    "Table 5": "model_sizes",
    "Table 6": "detection",
    "Table 7": "segmentation",
    "Table 8": "classification_40",
    "Table 9": "classification_60",
    "Table 10": "calibration_size",
    "Table 11": "llm",
    "Table 12": "contributions",
    "Figure 1": "motivation",
    "Figure 2": "throughput",
    "Figure 3": "motivation_architectures",
    "Figure 4": "motivation_layers",
    "Figure 5": "throughput_sparse_memvit",
    "Figure 6": "llm_moments",
    "Figure 7": "sensitivity_interpolation",
}


def paper_map() -> Rows:
    yield "paper", "experiment", "small networks", "photos", "full scale"
    for place, name in IN_PAPER.items():
        kind = f"{place.partition(' ')[0].lower()}s"
        states = (_link(f"results/{profile}/{kind}/{name}") for profile in ("mini", "photos", "paper"))
        yield place, f"`{name}`", *states


def _link(path: str) -> str:
    ending = "md" if "/tables/" in path else "png"
    try:
        read(f"{path}.csv")
    except FileNotFoundError:
        return "no"
    return f"[yes](../{path}.{ending})"


def markdown(rows: Rows) -> str:
    """Write a table whose columns of numbers are right-aligned."""
    head, *lines = rows
    number = re.compile(r"[+-]?(≈ )?[\d.]*( %| †| ± .*)?")
    right = [all(number.fullmatch(line[column]) for line in lines) for column in range(len(head))]
    rule = "".join("---:|" if each else "---|" for each in right)
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return "\n".join([first, f"|{rule}", *others]) + "\n"


def render(page: str) -> str:
    """The page with its tables as docstrings and records have them."""
    return TABLE.sub(lambda match: match[1] + markdown(globals()[match[2]]()), page)


def loose_numbers(path: Path) -> list[str]:
    """Numbers with decimals in the prose that tells results."""
    prose = re.search(OF_RESULTS.get(path.name, "$^"), path.read_text(), re.DOTALL)
    return re.findall(r"[\d,]*\d\.\d+", NO_PROSE.sub("", prose[1])) if prose else []


if __name__ == "__main__":
    for page in PAGES:
        rendered = render(page.read_text())
        with replacing(page) as path:
            path.write_text(rendered)
        if loose := loose_numbers(page):
            raise SystemExit(f"{page.name}: {', '.join(loose)}: decimals belong in a table of docs/make_tables.py")
