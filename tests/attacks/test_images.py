"""Files that are no usable image are refused in one line; odd ones come out right."""

import io

import numpy as np
import pytest
from PIL import Image

from facts.tasks.classification.images import decode

pytestmark = [pytest.mark.attack, pytest.mark.system]

GREY = np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64)
COLOURS = Image.fromarray(np.random.default_rng(0).integers(256, size=(48, 64, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bits(*size):
    return encoded(Image.new("1", size))


REFUSED = {
    "a text": (b"photo", "cannot identify"),
    "cut short": (encoded(COLOURS)[:3000], "truncated"),
    "a bomb of 400 megapixels": (bits(20_000, 20_000), "exceeds limit"),
    "a strip": (bits(60_000, 1), "60000 x 1 pixels are a strip"),
    "32 bits": (encoded(Image.fromarray(np.ones((8, 8), np.int32)), "TIFF"), "range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name):
    data, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^no usable image: .*({message})"):
        decode(data)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_shades(kind):
    """Within one step of 255, by which conversions differ in how they round."""
    shades = np.asarray(decode(encoded(Image.fromarray(GREY), kind)))
    assert shades.shape == (48, 64, 3)
    assert np.abs(shades - GREY[..., None] / 257).max() <= 1
