"""Detection and segmentation of scikit-learn's digits in scenes, in the file layouts of COCO and ADE20K."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mmseg.datasets import BaseSegDataset
from PIL import Image
from pycocotools import mask as rle

from experiments.mini.coloured import SIDE, Split, draw_disc, draw_ground, photographed, split_indices
from experiments.mini.digits import load_digits
from facts.tasks.dense import ADE20K, Coco
from facts.tasks.dense import Split as Part
from facts.utils.files import locked
from facts.utils.options import options

SIZE = 2 * SIDE
NUM_SCENES: dict[Split, int] = {"train": 800, "test": 150}
CLASSES = ("ground", *map(str, range(10)))


@options
class DigitDetection(Coco):
    """Scenes of digits, written to `root` on first use."""

    def __post_init__(self):
        write_coco(Path(self.root))


@options
class DigitSegmentation(ADE20K):
    """Scenes of digits, written to `root` on first use; the background is a class too."""

    def __post_init__(self):
        write_ade20k(Path(self.root))

    def files(self, split: Part, pipeline: list) -> BaseSegDataset:
        folders = self._folders(split)
        return BaseSegDataset(img_suffix=".png", metainfo={"classes": CLASSES}, data_prefix=folders, pipeline=pipeline)


@dataclass(frozen=True)
class Scene:
    """An image `[H, W, 3]` of bytes, and its digits: their classes and masks `[H, W]`."""

    image: np.ndarray
    labels: list[int]
    masks: list[np.ndarray]


@cache
def scenes(split: Split) -> tuple[Scene, ...]:
    """Draw scenes with one to four digits of one split on discs, at most one in each quarter of the image."""
    draw = np.random.default_rng(split == "test")
    digits = load_digits()
    indices = split_indices(split).numpy()
    return tuple(_compose(draw, digits.images[indices] / 16, digits.target[indices]) for _ in range(NUM_SCENES[split]))


def _compose(draw: np.random.Generator, digits: np.ndarray, labels: np.ndarray) -> Scene:
    ground = draw_ground(draw)
    quarters = draw.choice(4, draw.integers(1, 5), replace=False)
    numbers = draw.choice(len(digits), len(quarters), replace=False)
    image, masks = np.ones((SIZE, SIZE, 3)) * ground, np.zeros((len(numbers), SIZE, SIZE), bool)
    for number, quarter, mask in zip(numbers, quarters, masks, strict=True):
        top, left = SIDE * np.array(divmod(quarter, 2))
        place = np.s_[top : top + SIDE, left : left + SIDE]
        image[place], mask[place] = draw_disc(draw, digits[number], ground)
    return Scene(photographed(draw, image), labels[numbers].tolist(), list(masks))


def write_coco(root: Path) -> None:
    """Write the scenes in the layout of COCO 2017, if they are missing."""
    for folder, split in _missing(root):
        name = {"train": "train2017", "test": "val2017"}[split]
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, scene in enumerate(scenes(split)):
            file = _write(scene.image, folder / name / f"{number:03}.png")
            images.append({"id": number, "file_name": file, "height": SIZE, "width": SIZE})
            for label, mask in zip(scene.labels, scene.masks, strict=True):
                encoded = rle.encode(np.asfortranarray(mask, np.uint8))
                drawn = {**encoded, "counts": encoded["counts"].decode()}
                found = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "segmentation": drawn}
                box, area = rle.toBbox(encoded).tolist(), int(mask.sum())
                annotations.append({**found, "bbox": box, "area": area, "iscrowd": 0})
        categories = [{"id": label, "name": str(label)} for label in range(10)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(content))


def write_ade20k(root: Path) -> None:
    """Write the scenes in the layout of ADE20K, if they are missing; class 0 is the background, digit d is d + 1."""
    for folder, split in _missing(root):
        name = {"train": "training", "test": "validation"}[split]
        for number, scene in enumerate(scenes(split)):
            classes = np.zeros((SIZE, SIZE), np.uint8)
            for label, mask in zip(scene.labels, scene.masks, strict=True):
                classes[mask] = label + 1
            _write(scene.image, folder / "images" / name / f"{number:03}.png")
            _write(classes, folder / "annotations" / name / f"{number:03}.png")


def _missing(root: Path) -> Iterator[tuple[Path, Split]]:
    """Yield the splits, and a folder that becomes `root` once both are written; nothing if `root` exists."""
    with locked(root.with_suffix(".lock")):
        if root.exists():
            return
        temporary = root.with_suffix(".partial")
        shutil.rmtree(temporary, ignore_errors=True)
        for split in NUM_SCENES:
            yield temporary, split
        temporary.rename(root)


def _write(pixels: np.ndarray, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path.name
