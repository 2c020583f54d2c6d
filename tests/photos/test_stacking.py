"""Two published networks and real photos: units at several ratios, in float32, bfloat16 and int8.

Writes `results/photos/stacking` in half an hour.
"""

from functools import partial

import pytest
import torch

import facts
from facts.cost.timing import TimingPolicy
from facts.saving.export import onnx_call, openvino_call, openvino_formats
from facts.utils.distributed import device_name
from tests.photos.data import NETWORKS, Table, load_all, top1

pytestmark = pytest.mark.external

RATIOS, BATCH, TURNS = (1.0, 0.8, 0.7, 0.5), 16, 9
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
ONNX = "int8, ONNX Runtime"
COLUMNS = {
    "network": "", "ratio": ".1f", "format": "", "MB": ".2f", "top1": ".1f", "ms": ".1f", "ms for one": ".2f",
    "speed-up": ".2f",
}  # fmt: skip
TEXT = (
    "# Units and int8 on published networks\n\n"
    "Ratio is the fraction of the linear layers' FLOPs that remains, by `facts.compress` with its defaults on 1,000 "
    "photos, without training (1: the original). OpenVINO runs the float32 file in the floating-point formats that the "
    "CPU has, and what `facts.export_openvino` writes in int8, calibrated on 300 of these photos; ONNX Runtime what "
    "`facts.export_onnx` writes. MB is the size of the files. Top-1 in "
    f"percent on 650 other photos (standard error up to 2.0). Milliseconds for {BATCH} photos and for one on "
    f"{{threads}} threads of {{device}}: all files of a network took turns; the medians of {TURNS} turns are shown; "
    f"the speed-up is over the original in float32, for {BATCH} photos. Written by `tests/photos/test_stacking.py`."
)


def test_int8_stacks_on_units(tmp_path):
    text = TEXT.format(threads=torch.get_num_threads(), device=device_name(torch.device("cpu")))
    table, policy = Table("photos/stacking", COLUMNS, text, resume=True), TimingPolicy(num_turns=TURNS)
    for network in sorted(filter(table.lacks, NETWORKS)):
        (model, calibration, validation), calls, sizes = load_all(network), {}, {}
        photos = validation[0][0][:BATCH]
        prepared = facts.prepare(
            model, calibration, parts="units", held_out=(), execution=facts.Execution(cache=tmp_path)
        )
        for ratio in RATIOS:
            smaller = model if ratio == 1 else facts.compress(prepared, ratio=ratio).model.eval()
            for name in (*openvino_formats(), "int8"):
                kind = "int8" if name == "int8" else "float32"
                file = tmp_path / f"{network}_{ratio}_{kind}.xml"
                if not file.exists():
                    facts.export_openvino(smaller, photos[:1], file, int8=calibration if kind == "int8" else None)
                calls[ratio, name] = openvino_call(file, PRECISIONS[name])
                sizes[ratio, name] = sum(path.stat().st_size for path in (file, file.with_suffix(".bin"))) / 1e6
            facts.export_onnx(smaller, photos[:1], file := tmp_path / f"{network}_{ratio}.onnx", int8=calibration)
            calls[ratio, ONNX], sizes[ratio, ONNX] = onnx_call(file), file.stat().st_size / 1e6
        many, one = (
            policy.times({key: partial(call, images) for key, call in calls.items()}) for images in (photos, photos[:1])
        )
        for key, call in calls.items():
            speed_up = 1 / many[key].ratio(many[1.0, "float32"])
            times = 1000 * many[key].median, 1000 * one[key].median
            table.add(network, *key, sizes[key], top1(call, validation), *times, speed_up)
    found = table.frame.set_index(["network", "ratio", "format"]).top1
    for network in NETWORKS:
        assert found[network, 0.7, "int8"] > found[network, 0.7, "float32"] - 1
