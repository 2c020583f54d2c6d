"""Two published networks and real photos: units at several ratios, in float32, bfloat16 and int8.

`pytest tests/photos/test_stacking.py --write-results` measures for half an hour and writes `results/photos/stacking`; a
network that is in it already is not measured again.
"""

from functools import partial

import pandas as pd
import pytest
import torch

import facts
from facts.cost.timing import TimingPolicy
from facts.saving.export import onnx_call
from facts.saving.openvino_ir import openvino_call, openvino_formats
from facts.utils.processors import device_name
from tests.photos.data import NETWORKS, load_network, load_photos, rows_of, top1, write_table

pytestmark = pytest.mark.external

FILE, RATIOS, BATCH, TURNS = "photos/stacking", (1.0, 0.8, 0.7, 0.5), 16, 9
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
    rows, policy = rows_of(FILE), TimingPolicy(num_turns=TURNS)
    for network in sorted(NETWORKS.keys() - {row[0] for row in rows}):
        model, calibration = load_network(network), load_photos("calibration", network=network)
        validation, calls, sizes = load_photos("validation", network=network), {}, {}
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
            rows.append([network, *key, sizes[key], top1(call, validation), *times, speed_up])
        text = TEXT.format(threads=torch.get_num_threads(), device=device_name(torch.device("cpu")))
        write_table(rows, COLUMNS, FILE, text)
    found = pd.DataFrame(rows, columns=list(COLUMNS)).set_index(["network", "ratio", "format"])
    for network in NETWORKS:
        for ratio in (1.0, 0.7):
            assert found.top1[network, ratio, "int8"] > found.top1[network, ratio, "float32"] - 1
            assert found.MB[network, ratio, "int8"] < 0.4 * found.MB[network, ratio, "float32"]
