"""Folders of images of noise."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(folder: Path, classes=("cat", "dog", "fox"), number=4, seed=0) -> Path:
    """Images of noise, `number` a class."""
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder
