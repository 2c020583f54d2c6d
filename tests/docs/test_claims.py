"""Claims of the pages about measurements: each is a sentence of a page, and a condition on the records."""

import re
from collections.abc import Callable
from itertools import product

import measurements
import numpy as np
import pandas as pd
import pytest
from measurements import (
    BASES,
    BOTH,
    DENSE,
    HALVES,
    TINY,
    TOKENS,
    TOME,
    UNITS,
    at,
    distance,
    error_of,
    lead_over,
    on_all_photos,
    table,
)
from measurements import kept_parameters as kept

from tests.docs.pages import ROOT, committed, maker
from tests.docs.readings import (
    BOTH_AT_HALF,
    FAST,
    HALF,
    IN_FLOAT32,
    IN_OPENVINO,
    INT8,
    LAYERS,
    OTHERS,
    PLACE,
    PLAIN,
    RANKS,
    SIZES,
    changed_by_int8,
    columns,
    data_passes,
    encoder,
    errors_ahead,
    fisher,
    gain_in_int8,
    in_int8,
    latency,
    lead,
    level_methods,
    minutes,
    on_cpu,
    on_gpu,
    over_cors,
    points,
    recovered_by,
    speeds_on_gpu,
    spent,
    tokens_alone_are_level,
    top1,
    top1_in_int8,
    verdict_on,
)

README: dict[str, Callable[[], bool]] = {
    "Standard errors are below two points.": lambda: all(
        sum(at("photos/tokens", row, column, half, of="standard_error") ** 2 for half in HALVES) ** 0.5 / 2 < 2
        for row in (DENSE, BOTH, TOME, UNITS)
        for column in columns(80, 70, 60, 50)
    ),
    "the default loses about one point on the DeiT-Tiny, and two and a half on the ViT-Tiny": lambda: (
        [round(2 * lost) / 2 for lost in points(DENSE, BOTH, 50)] == [1, 2.5]
    ),
    "on the test half, none and two.": lambda: [*map(round, points(DENSE, BOTH, 50, halves=["top1"]))] == [0, 2],
    "The default's outputs are at most half as far from the original's as ToMe's, by KL divergence.": lambda: all(
        distance(BOTH, each) / distance(TOME, each) <= 0.5 for each in HALF
    ),
    "on the test half, it is level with ToMe down to half of the FLOPs, and leads by far below.": lambda: (
        max(abs(errors_ahead(TOME, each, ["top1"])) for each in columns(80, 70, 60, 50)) < 2
        and min(points(BOTH, TOME, 40, 30, halves=["top1"])) > 10
    ),
    "FACTS leads SVD-LLM and plain truncation, and CoRS leads uniform ranks.": lambda: (
        {verdict_on(f"{row} leads {other}") for row, other in (("FACTS", "SVD-LLM"), ("FACTS", "plain truncation"))}
        == {"yes"}
        == {verdict_on("CoRS leads uniform ranks")}
    ),
    "FACTS is not ahead of Shampoo² there; finetuned, FACTS with CoRS does not lead pruning.": lambda: (
        lead("fisher_estimators", "FACTS", "Shampoo²") < 1
        and lead("photos/baselines", "FACTS", "Shampoo²") < 0
        and verdict_on("FACTS + CoRS leads pruning, finetuned") == "no"
    ),
    "Merging saves FLOPs, not parameters.": lambda: all(kept(TOME, each) == 1 for each in HALF),
    "Large networks get faster on CPUs;": lambda: all(
        on_cpu(row, plan) < (1 / 1.5 if row in IN_FLOAT32 else 0.75)
        for row, plan in product(table("benchmarks/amd_epyc/runtimes").row, ("layers", "units", "units and tokens"))
    ),
    "Tokens alone match its top-1 down to there": tokens_alone_are_level,
    "below, narrower units help, too.": lambda: min(points(BOTH, TOKENS, 40, 30)) > 0,
    "at half of the FLOPs, the DeiT-Tiny is a third faster, the ViT-Tiny a half": lambda: (
        1.3 < in_int8("float32", f"DeiT-Tiny, {PLACE}", "speedup") < 1.4
        and 1.4 < in_int8("float32", f"ViT-Tiny, {PLACE}", "speedup") < 1.6
    ),
    "a DeiT-B with random weights takes 54 to 58 percent of the time.": lambda: (
        {54, 58} <= {round(100 * on_cpu(row, "units and tokens")) for row in IN_FLOAT32} <= {*range(54, 59)}
    ),
    "units alone are narrowed then, and cost more accuracy.": lambda: min(points(BOTH, UNITS, 80, 70, 60, 50)) > 0,
    "units with tokens took three to eight times as long as the original.": lambda: (
        {3, 8} <= {round(on_gpu(each)) for each in FAST} <= {*range(3, 9)}
    ),
    'Units alone (`parts="units"`) are faster there': lambda: max(on_gpu(each, units=True) for each in FAST) < 1,
    "but lose over twenty points at half of the FLOPs": lambda: min(points(DENSE, UNITS, 50)) > 20,
}

RESULTS: dict[str, Callable[[], bool]] = {
    "With FACTS and CoRS, the small networks lose less than two points at 50 %": lambda: all(
        top1("classification_50", "Baseline", network) - top1("classification_50", "FACTS + CoRS", network) < 2
        for network in BASES
    ),
    "so leads are small; at 40 %, they are larger.": lambda: all(
        lead("classification_40", row, other) > lead("classification_50", row, other)
        for row, other in (("FACTS", "SVD-LLM"), ("FACTS + CoRS", "FACTS"))
    ),
    "not finetuned, is level with the finetuned DISP-LLM.": lambda: (
        at("structured_pruning", "FACTS + CoRS", "DeiT-B", "top1", of="behind") < 2
    ),
    "DISP-LLM is ahead of FACTS with CoRS after its one epoch, which lowers accuracy": lambda: (
        top1("structured_pruning", "DISP-LLM, finetuned 5 epochs", "DeiT-B")
        > top1("structured_pruning", "FACTS + CoRS, finetuned 1 epoch", "DeiT-B")
        < top1("structured_pruning", "FACTS + CoRS", "DeiT-B")
    ),
    "More than 64 photos do not change top-1 measurably on the 650": lambda: all(
        abs(on_all_photos(number, network, SIZES) - on_all_photos("64", network, SIZES))
        < 2 * error_of(number, "64", network, name=SIZES)
        for number in ("125", "250", "500", "1,000")
        for network in TINY
    ),
    "on the test half alone, 250 and 500 are lower than 125 for the DeiT-Tiny": lambda: all(
        at(SIZES, number, "DeiT-Tiny", "top1", of="behind") > 2 for number in ("250", "500")
    ),
    "Its outputs are a third closer to the original's with 250 or more than with 64.": lambda: all(
        0.6 < at(SIZES, number, "DeiT-Tiny", "distance") / at(SIZES, "64", "DeiT-Tiny", "distance") < 0.7
        for number in ("250", "500", "1,000")
    ),
    "On the test half, no lead over ToMe down to half of the FLOPs exceeds two standard errors": lambda: all(
        abs(errors_ahead(TOME, each, ["top1"])) < 2 for each in columns(80, 70, 60, 50)
    ),
    "below, the default is far ahead.": lambda: min(points(BOTH, TOME, 40, 30, halves=["top1"])) > 10,
    "Tokens alone are level with the default in top-1 down to half": tokens_alone_are_level,
    "and keep more than units alone at every ratio": lambda: min(points(TOKENS, UNITS, 80, 70, 60, 50, 40, 30)) > 0,
    "low-rank layers keep less than units from 70 % down": lambda: all(
        at("photos/units", LAYERS, each, "top1", of="behind") > 2 for each in columns(70, 60, 50)
    ),
    "Both the default and ToMe, which was not tuned, lose more on the tuning half.": lambda: all(
        np.mean(points(DENSE, row, 80, 70, 60, 50, halves=["chosen"]))
        > np.mean(points(DENSE, row, 80, 70, 60, 50, halves=["top1"]))
        for row in (BOTH, TOME)
    ),
    "the default leads ToMe by two points there in the mean, and by half a point on the test half": lambda: (
        [round(2 * np.mean(points(BOTH, TOME, 80, 70, 60, 50, halves=[half]))) for half in ("chosen", "top1")] == [4, 1]
    ),
    "by two points for the DeiT-Tiny and by seven for the ViT-Tiny": lambda: (
        [round(at("photos/tokens", DENSE, each, "chosen") - top1("photos/tokens", DENSE, each)) for each in HALF]
        == [2, 7]
    ),
    "raise layers by over twenty points and units by eight and eleven, on the test half": lambda: (
        all(20 < recovered_by("pivoted", network) < 30 for network in TINY)
        and [round(recovered_by("units", network)) for network in TINY] == [8, 11]
    ),
    "Units with tokens gain nothing:": lambda: all(
        round(recovered_by("units and tokens", network)) == 0 for network in TINY
    ),
    "CoRS helps every estimator": lambda: all(float(c) > float(u) for _, u, c in [*maker["baselines"]()][1:]),
    "with it, FACTS and Shampoo² are level.": lambda: all(
        abs(value) <= 2 * error for value, error in [lead_over("photos/baselines", "FACTS + CoRS", ["Shampoo² + CoRS"])]
    ),
    "leads CoRS by five points on the ViT-Tiny, and is level with it on the DeiT-Tiny.": lambda: (
        round(lead("photos/baselines", "FACTS + LEMS", "FACTS + CoRS", ["ViT-Tiny"])) == 5
        and max(
            at("photos/baselines", f"FACTS + {search}", "DeiT-Tiny", "top1", of="behind") for search in ("LEMS", "CoRS")
        )
        <= 2
    ),
    "With only sixteen photos for the search, CoRS-Fisher is thirteen points behind CoRS.": lambda: (
        round(lead("photos/baselines", "FACTS + CoRS", "FACTS + CoRS-Fisher")) == 13
    ),
    "a fraction of a point ahead on both halves, and quicker.": lambda: (
        at("photos/search_methods", "CoRS", BOTH_AT_HALF, "top1", of="behind") < 2
        and all(0 < over_cors(BOTH_AT_HALF, half) < 1 for half in HALVES)
        and over_cors(BOTH_AT_HALF, "search_minutes") < 0
    ),
    "by eight points on the test half and five on the tuning half, in three times the time; at 80 %": lambda: (
        [round(over_cors("ViT-Tiny, layers at 70 %", half)) for half in HALVES] == [-8, -5]
        and round(minutes("CoRS") / minutes("CoRS-Fisher, exact")) == 3
        and at("photos/search_methods", "CoRS", "ViT-Tiny, layers at 80 %", "top1", of="behind") < 2
    ),
    "the closest estimator, Shampoo², has the highest top-1": lambda: all(
        fisher("Shampoo²", metric) > max(fisher(row, metric) for row in ("FACTS", *OTHERS))
        for metric in ("cosine", "top1")
    ),
    "but KFAC-reduce is closer than KFAC-expand and far behind it": lambda: (
        fisher("KFAC-reduce", "cosine") > fisher("KFAC-expand", "cosine")
        and fisher("KFAC-expand", "top1") - fisher("KFAC-reduce", "top1") > 30
    ),
    "FACTS, the second closest, is three points behind Shampoo²": lambda: (
        fisher("FACTS", "cosine") > max(fisher(row, "cosine") for row in OTHERS)
        and round(fisher("Shampoo²", "top1") - fisher("FACTS", "top1")) == 3
    ),
    "over both networks, with 250 photos, four points, nearly three errors.": lambda: all(
        round(value) == -4 and 2.5 < -value / error < 3
        for value, error in [lead_over("photos/baselines", "FACTS", ["Shampoo²"])]
    ),
    "behind Shampoo², about one standard error;": lambda: round(fisher("FACTS", "top1", of="behind")) == 1,
    "drops, are five times what FACTS keeps": lambda: round(at("photos/cross_moments", "FACTS", "cross_operator")) == 5,
    "a DeiT-Tiny without its classifier keeps its nearest-neighbour accuracy, within the standard error;": lambda: (
        abs(encoder("Dense") - encoder("Units and tokens")) < encoder("Dense", of="standard_error")
    ),
    "with units alone it loses nearly half": lambda: 0.4 < 1 - encoder("Units") / encoder("Dense") < 0.5,
    "with standard errors below one point": lambda: all(
        table(f"classification_{ratio}").query("metric == 'top1'").standard_error.max() < 1 for ratio in RANKS
    ),
    "FACTS and SVD-LLM lead plain truncation, FW-SVD and ASVD at every ratio, except on the small ConvNeXt-B": lambda: (
        all(
            min(top1(f"classification_{ratio}", row, network) for row in ("FACTS", "SVD-LLM"))
            > max(top1(f"classification_{ratio}", row, network) for row in PLAIN)
            for ratio in RANKS
            for network in ("DeiT-B", "Swin-B", "MambaVision-B")
        )
    ),
    "where all lie within two points": lambda: all(
        np.ptp([top1(f"classification_{ratio}", row, "ConvNeXt-B") for row in ("FACTS", "SVD-LLM", *PLAIN)]) < 2
        for ratio in RANKS
    ),
    "by the mean over networks, seven are level, five of them FACTS with different searches": lambda: (
        len(level_methods()) == 7 and sum(method.startswith("FACTS + ") for method in level_methods()) == 5
    ),
    "Units and pivoted layers are within half a point at 70 and 50 %": lambda: all(
        abs(lead("units", UNITS, LAYERS, [f"{network}, {ratio} %"])) <= 0.5
        for network in BASES[:3]
        for ratio in (70, 50)
    ),
    "at 40 %, units lead on the small DeiT-B and Swin-B": lambda: all(
        lead("units", UNITS, LAYERS, [f"{network}, 40 %"]) > 0.5 for network in BASES[:2]
    ),
    "With units and tokens, the small DeiT-B segmenter loses over a point.": lambda: (
        lead("beyond_segmentation", "Baseline", "FACTS + CoRS, units and tokens", ["UPerNet, DeiT-B"], "miou") > 1
    ),
    "No lead here exceeds two standard errors": lambda: all(
        abs(value) <= 2 * error
        for name, metric in (("detection", "box_map"), ("segmentation", "miou"), ("llm", "perplexity"))
        for value, error in [lead_over(name, "FACTS", ["SVD-LLM"], metric=metric)]
    ),
    "Finetuned FACTS exceeds the dense detector and segmenter": lambda: (
        lead("detection", "FACTS, finetuned 1 epoch", "Baseline", metric="box_map")
        > 0
        < lead("segmentation", "FACTS, finetuned 10,000 iterations", "Baseline", metric="miou")
    ),
    "with other ranks they are slower than the dense network": lambda: max(speeds_on_gpu("50% of the FLOPs")) < 1,
    "with heads of one width, units saved three tenths of the time": lambda: all(
        0.65 < 1 / speed < 0.75 for speed in speeds_on_gpu("50% of the FLOPs, units")
    ),
    "and pivoted ones even then.": lambda: max(speeds_on_gpu("50% of the FLOPs, pivoted, in such steps")) < 1,
    "one image at a time, in half precision, even they took longer.": lambda: all(
        latency(kind, "50% of the FLOPs, units") > latency(kind, "original") for kind in ("bfloat16", "float16")
    ),
    "On a GPU with TF32 or in half precision, units with tokens were slower": lambda: min(map(on_gpu, FAST)) > 1,
    "units with tokens saved a third of the time, and units alone more.": lambda: (
        0.6 < on_gpu("float32 (highest)") < 0.7
        and on_gpu("float32 (highest)", units=True) < on_gpu("float32 (highest)")
    ),
    "On this CPU, units save the DeiT-B over a third of the time in every format, and so do units with": lambda: all(
        on_cpu(row, plan) < 0.66
        for row, plan in product(table("benchmarks/amd_epyc/runtimes").row, ("units", "units and tokens"))
        if (row, plan) != ("OpenVINO, int8", "units and tokens")
    ),
    "but for OpenVINO's int8, in which they save a quarter.": lambda: (
        round(4 * on_cpu("OpenVINO, int8", "units and tokens")) == 3
    ),
    "of 70 % of DeiT-B's latency was met within three points in one run.": lambda: all(
        abs(at("benchmarks/intel_r_xeon_r_processor_2_50ghz/latency", "DeiT-B", of=f"measured{again} [%]") - 70) < 3
        for again in ("", " again")
    ),
    "in about five minutes on two cores: two for the data pass, three for the search.": lambda: all(
        [round(spent(stage, each) / 60) for stage in ("calibration", "search")] == [2, 3] for each in HALF
    ),
    "For layers, the data pass of FACTS takes up to twice as long as a forward and backward pass": lambda: (
        max(data_passes("data pass of FACTS", "nvidia_h200")) < 2
    ),
    "methods at once, up to five times as long on CPUs": lambda: (
        max(data_passes("data pass of all ten estimators")) < 5
    ),
}

CHOOSING: dict[str, Callable[[], bool]] = {
    "int8 in OpenVINO: more than twice as fast as its float32, within half a point": lambda: all(
        in_int8(INT8[0], f"{network}, dense", "speedup") > 2
        and abs(top1_in_int8(INT8[0], network) - top1_in_int8("float32", network)) < 0.5
        for network in TINY
    ),
    "int8 with units and tokens at 50 %: twice as fast as OpenVINO's float32, up to two points lower": lambda: all(
        1.8 < in_int8(INT8[1], f"{network}, {PLACE}", "speedup") < 2.2
        and top1_in_int8("float32", network) - top1_in_int8(INT8[1], network, PLACE) < 2
        for network in TINY
    ),
    "int8 alone gains a third": lambda: all(
        1.25 < in_int8(INT8[1], f"{network}, dense", "speedup") < 1.4 for network in TINY
    ),
    "units and tokens at 50 %: a third to a half faster, at most two and a half points lower": lambda: all(
        1.33 < in_int8("float32", f"{network}, {PLACE}", "speedup") < 1.5
        and top1_in_int8("float32", network) - top1_in_int8("float32", network, PLACE) < 2.5
        for network in TINY
    ),
    "int8: under a third of float32's bytes": lambda: all(
        in_int8(INT8[0], f"{network}, dense", "megabytes") < in_int8("float32", f"{network}, dense", "megabytes") / 3
        for network in TINY
    ),
    "Int8 costs less than narrower units, and saves more": lambda: (
        in_int8(*IN_OPENVINO, "exported_top1") > in_int8("float32", "DeiT-Tiny, units at 80 %", "exported_top1")
        and in_int8(*IN_OPENVINO, "speedup")
        > max(in_int8("float32", f"DeiT-Tiny, units at {ratio} %", "speedup") for ratio in (80, 70))
    ),
    "a dense DeiT-Tiny is more than twice as fast in OpenVINO's int8 as in its float32.": lambda: (
        in_int8(*IN_OPENVINO, "speedup") > 2
    ),
    "at half of the FLOPs they make a DeiT-B over one and a half times as fast.": lambda: all(
        1 / on_cpu(row, "units") > 1.5 for row in ("ONNX Runtime, int8", "OpenVINO, int8")
    ),
    "In int8, units at 80 and 70 % change its speed by less than a tenth": lambda: all(
        0.9 < gain_in_int8(row, "DeiT-Tiny", f"units at {ratio} %") < 1.1 for row in INT8 for ratio in (80, 70)
    ),
    "Merged tokens make ONNX Runtime's int8 about one and a half times as fast": lambda: all(
        1.4 < gain_in_int8(INT8[1], network) < 1.6 for network in TINY
    ),
    "in OpenVINO's, they help the ViT-Tiny and hurt the DeiT-Tiny.": lambda: (
        gain_in_int8(INT8[0], "ViT-Tiny") > 1 > gain_in_int8(INT8[0], "DeiT-Tiny")
    ),
    "Their int8 files are larger than the dense network's": lambda: all(
        in_int8(row, f"{network}, {PLACE}", "megabytes") > in_int8(row, f"{network}, dense", "megabytes")
        for row, network in product(INT8, TINY)
    ),
    "At half of the FLOPs, int8 costs units with tokens at most two points": lambda: all(
        in_int8("float32", f"{network}, {PLACE}", "exported_top1") - 2
        <= in_int8(row, f"{network}, {PLACE}", "exported_top1")
        for row, network in product(INT8, TINY)
    ),
    "and changes four to six percent of their predictions": lambda: (
        (min(changed_by_int8(PLACE)), max(changed_by_int8(PLACE))) == (4, 6)
    ),
    "of the dense networks', one to five.": lambda: (
        (min(changed_by_int8("dense")), max(changed_by_int8("dense"))) == (1, 5)
    ),
    "at half of the FLOPs, a DeiT-Tiny with units and tokens keeps its nearest-neighbour accuracy": lambda: (
        abs(encoder("Dense") - encoder("Units and tokens")) < 2
    ),
}

PAGES = {"README.md": README, "docs/results.md": RESULTS, "docs/choosing.md": CHOOSING}
CLAIMS = [(page, *claim) for page, claims in PAGES.items() for claim in claims.items()]


@pytest.mark.parametrize(("page", "sentence", "holds"), CLAIMS)
def test_a_claim_stands_on_its_page_and_holds(page, sentence, holds, monkeypatch):
    """On the page without marks and the addresses of links."""
    monkeypatch.setattr(measurements, "text", committed)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text().replace("**", ""))
    assert sentence in " ".join(text.split()), "the page says it no longer: change or remove the claim"
    assert holds(), "the records contradict this sentence: correct it, and the claim"


@pytest.mark.parametrize(("page", "sentence", "holds"), CLAIMS)
def test_other_records_would_contradict_a_claim(page, sentence, holds, monkeypatch):
    """With numbers drawn at random in place of all measurements."""
    generator = np.random.default_rng(0)
    measured, record_of = measurements.read, measurements.record_of
    monkeypatch.setattr(measurements, "text", committed)

    def drawn(path: str) -> pd.DataFrame:
        lines = measured(path)
        for name in set(lines.select_dtypes("number")) - {"ratio", "full-rule FLOPs"}:
            lines[name] = generator.normal(scale=100, size=len(lines))
        if "level" in lines:
            lines["level"] = generator.random(len(lines)) < 0.5
        return lines

    def drawn_record(row: str, column: str, name: str = "photos/tokens") -> dict:
        seconds = dict.fromkeys(("calibration", "search"), generator.uniform(1, 999))
        return record_of(row, column, name) | {"metrics": {"mparams": generator.uniform(1, 9)}, "seconds": seconds}

    monkeypatch.setattr(measurements, "record_of", drawn_record)
    monkeypatch.setattr(measurements, "read", drawn)
    assert not all(holds() for _ in range(10)), "no measurement could contradict this condition"
