"""Decoding of images from files, whatever they hold."""

import warnings
from io import BytesIO

from PIL import Image

LONGEST = 100  # times the shorter side; a strip that is resized by its shorter side would take gigabytes


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB; grey of 16 bits keeps its shades. Raises `ValueError` for what is no usable image.

    That is a broken file, one of more pixels than Pillow takes for harmless, a strip more than 100 times as long as it
    is wide, and pixels of unknown range, in floating point or 32 bits.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(BytesIO(data))
        if max(image.size) > LONGEST * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are a strip")
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # these have 16 bits
            raise ValueError("the range of its pixels is not known")
        if image.mode.startswith("I"):  # Pillow's own conversion would make white of all but the darkest
            image = image.convert("I").point(lambda value: value / 257).convert("L")
        return image.convert("RGB")
    except Exception as error:  # Pillow's errors differ by format
        raise ValueError(f"no usable image: {error}") from error
