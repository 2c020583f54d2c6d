"""Digits in colour, light on a dark disc: parts of scenes, and the first training data of their backbones."""

import numpy as np
import torch
import torch.nn.functional as F

SIDE = 32
DIAMETERS = range(24, SIDE + 1)
MARGIN = 0.1  # of the diameter, around the digit
NOISE = 0.04


def draw_ground(draw: np.random.Generator) -> np.ndarray:
    """A dark colour, `[3]` values of 0 to 1."""
    return draw.uniform(0, 0.2, 3)


def draw_disc(draw: np.random.Generator, digit: np.ndarray, ground: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A digit `[8, 8]` on a disc of any size and place in a square `[32, 32, 3]`, and the pixels `[32, 32]` of it."""
    diameter = int(draw.choice(DIAMETERS))
    top, left = draw.integers(0, SIDE - diameter + 1, 2)
    dark, light = draw.uniform(0.25, 0.4, 3), draw.uniform(0.85, 1, 3)
    disc, ink = _disc(diameter), _enlarged(digit, diameter)[..., None]
    image, mask = np.ones((SIDE, SIDE, 3)) * ground, np.zeros((SIDE, SIDE), bool)
    place = np.s_[top : top + diameter, left : left + diameter]
    image[place][disc] = (dark + ink * (light - dark))[disc]
    mask[place] = disc
    return image, mask


def photographed(draw: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """The bytes of an image of values of 0 to 1, with some noise."""
    return (255 * (image + draw.normal(0, NOISE, image.shape)).clip(0, 1)).astype(np.uint8)


def _disc(diameter: int) -> np.ndarray:
    squares = (np.arange(diameter) - (diameter - 1) / 2) ** 2
    return squares[:, None] + squares <= (diameter / 2) ** 2


def _enlarged(digit: np.ndarray, diameter: int) -> np.ndarray:
    """The digit in the middle of a square that holds its disc."""
    margin = round(MARGIN * diameter)
    side = diameter - 2 * margin
    image = F.interpolate(torch.from_numpy(digit)[None, None], size=(side, side), mode="bilinear")
    return np.pad(image[0, 0].numpy(), margin)
