"""The profile `photos`: its experiments without any data, a cell on photos made up, and one on real ones."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

from experiments.cell import cells_of
from experiments.photos import Photos
from experiments.runner import run_cell
from tests.cli.conftest import write_images
from tests.refusals import refuses

DATA = Path(__file__).parents[3] / "shared" / "data"
PHOTOS = DATA / "imagenet_photos"


def write_labels(root: Path, lines: list[str]) -> Path:
    (root / "labels.csv").write_text("\n".join(["file,label,synset", *lines]))
    return root


def made_up(root: Path, **numbers: int) -> Path:
    """Write noise as so many photos of each part, in classes 0, 1, ..., and their labels."""
    for part, number in numbers.items():
        write_images(root, (part,), number)
    lines = [f"{part}/{label}.png,{label},n{label:08}" for part, number in numbers.items() for label in range(number)]
    return write_labels(root, lines)


@pytest.mark.system
def test_every_experiment_of_photos_composes_without_data(chosen):
    """The many rows of `baselines` compose in tests of `mini`."""
    found = chosen("profile=photos", "experiment=all")
    names = {"units", "unit_defaults", "tokens", "beyond", "baselines", "encoders", "int8"}
    assert names < {each.name for each in found} == {each.name for each in chosen("profile=photos")}
    cells = [cell for each in found if each.name != "baselines" for cell in cells_of(each)]
    for cell in cells:
        cell.check()
    assert {cell.config.model.name for cell in cells} == {"deit_tiny", "vit_tiny"}
    assert all(isinstance(cell.task, Photos) for cell in cells)


def test_a_cell_is_chosen_by_one_half_and_judged_by_the_other(make_cell, tmp_path):
    few = ["task.photos.num_calibration=8", "task.photos.num_sensitivity=8", "ratio=0.5"]
    network = ["model=deit_tiny", "model.photos.tag=tiny_vit", "model.photos.weights=random"]
    cell = make_cell("profile=photos", f"photos={made_up(tmp_path, calibration=8, validation=5)}", *few, *network)
    record = run_cell(cell)
    assert {"top1", "chosen", "distance", "chosen_distance"} <= record.metrics.keys()
    assert [len(f"{int(record.outcomes[half], 16):b}") - 1 for half in ("chosen", "top1")] == [3, 2]
    assert record.metrics["distance"] > 0
    _, judging = cell.task.analysis(cell.model)
    assert [label for _, labels in judging for label in labels.tolist()] == [1, 3]


def test_each_draw_calibrates_on_other_photos(tmp_path):
    root = made_up(tmp_path, calibration=12, validation=1)
    draws = [Photos(root=root, num_calibration=6, num_sensitivity=4, seed=seed).chosen_indices() for seed in (0, 1)]
    assert {*draws[0]["calibration"]} != {*draws[1]["calibration"]}
    for draw in draws:
        assert {*draw["sensitivity"]}.isdisjoint(draw["calibration"]) and len(draw["sensitivity"]) == 4
    everything = Photos(root=root, num_calibration=12, num_sensitivity=4).chosen_indices()
    assert sorted(everything["calibration"]) == [*range(12)]
    assert everything["sensitivity"] == everything["calibration"][:4] != [0, 1, 2, 3]


@pytest.mark.external
@pytest.mark.skipif(not PHOTOS.exists(), reason=f"no photos in {PHOTOS}")
def test_units_of_a_published_network_keep_it_useful_on_real_photos(make_cell, tmp_path):
    few, lines = [], (PHOTOS / "labels.csv").read_text().splitlines()
    for part in ("calibration", "validation"):
        (tmp_path / part).symlink_to(PHOTOS / part)
        few += [line for line in lines if line.startswith(f"{part}/")][:64]
    own = ["profile=photos", f"photos={write_labels(tmp_path, few)}", f"checkpoints={DATA}", "model=deit_tiny"]
    own += ["task.photos.num_calibration=64", "task.photos.num_sensitivity=40"]
    methods = ["estimator=none"], ["search=cors_fisher", "parts=units", "ratio=0.8"]
    dense, units = (run_cell(make_cell(*own, *method)).metrics for method in methods)
    assert dense["top1"] > 65 and dense["distance"] == 0
    assert units["top1"] > dense["top1"] - 25 and units["gflops"] < 0.85 * dense["gflops"]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "no photos at {root}: set photos= to a folder with calibration/"),
        (["calibration/0.png,0,"], "labels.csv names no photo in validation/: set photos= to a folder with"),
        (["calibration/0.png,0,", "validation/0.png,0,"], "has 1 photos for this use, and 8 are asked for"),
    ],
)
def test_what_a_folder_lacks_is_said_in_one_line(tmp_path, lines, message):
    few = {"root": made_up(tmp_path, calibration=8, validation=1), "num_calibration": 8, "num_sensitivity": 8}
    assert Photos(**few).inspect().startswith("8 images to calibrate on, 1 to evaluate on")
    (tmp_path / "labels.csv").unlink() if lines is None else write_labels(tmp_path, lines)
    refuses(re.escape(message.format(root=tmp_path)), Photos(**few).inspect, raised=(OSError, ValueError))


@pytest.mark.external
@pytest.mark.skipif(not PHOTOS.exists(), reason=f"no photos in {PHOTOS}")
def test_the_list_beside_the_records_is_that_of_the_photos():
    lines = (Path(__file__).parents[2] / "results/photos/photos.sha256").read_text().splitlines()
    listed = dict(reversed(line.split("  ")) for line in lines)
    found = [path for path in PHOTOS.rglob("*") if path.is_file()]
    assert listed == {str(path.relative_to(PHOTOS)): sha256(path.read_bytes()).hexdigest() for path in found}
