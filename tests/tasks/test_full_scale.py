"""The path of `profile=paper`, from the files of ImageNet to records, on made-up pictures and a tiny network."""

import json

import pytest
from hydra import compose, initialize_config_dir

from experiments.config import CONF, instantiate
from experiments.grid import GridCell
from experiments.workers import run_cells, share_data_pass

pytestmark = pytest.mark.system

SIZES = {"num_calibration": 24, "num_sensitivity": 10, "batch_size": 8, "num_workers": 0}
NETWORK = "{img_size: 32, depth: 1, num_classes: 1000, pretrained_cfg_overlay: {input_size: [3, 32, 32]}}"


@pytest.fixture
def place(tmp_path):
    """A function from a layout's folder to a cell that calibrates, searches and evaluates on it."""

    def make(root):
        overrides = ["profile=paper", "tracking=off", f"results={tmp_path / root.name}", f"imagenet={root}"]
        overrides += [f"task.paper.{field}={size}" for field, size in SIZES.items()]
        overrides += ["model.paper.tag=vit_tiny_patch16_224", "model.paper.weights=random"]
        overrides += [f"+model.paper.arguments={NETWORK}"]
        with initialize_config_dir(CONF, version_base="1.3"):
            return GridCell("demo", "FACTS + CoRS", "ViT", compose("config", [*overrides, "search=cors"]))

    return make


def test_both_layouts_go_through_calibration_search_and_evaluation_alike(root, parquet, place, tmp_path):
    found = []
    for images in (root, parquet):
        cell = place(images)
        assert "1,000 classes" in instantiate(cell.config.task.paper).inspect()
        share_data_pass([cell])
        run_cells([cell])
        assert cell.status == "done"
        (saved,) = (tmp_path / images.name / "paper/images").glob("*.json")
        chosen = json.loads(saved.read_text())
        assert {use: len(part["indices"]) for use, part in chosen.items()} == {"sensitivity": 10, "calibration": 24}
        found.append((cell.record.plan, cell.record.metrics["top1"], chosen))
    assert found[0] == found[1]
