"""Random views of images."""

import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resized_crop

from facts.finetuning import inputs as views
from facts.finetuning.inputs import Inputs, random_views
from facts.moments.losses import kl_divergence


def test_whole_images_are_themselves_or_their_mirror_images(monkeypatch):
    monkeypatch.setattr(views, "SMALLEST_AREA", 1.0)
    monkeypatch.setattr(views, "ASPECT", 1.0)
    images = torch.rand(64, 3, 9, 7, dtype=torch.float64)
    seen = random_views(images)
    flipped = [not torch.allclose(one, other, atol=1e-12) for one, other in zip(images, seen, strict=True)]
    expected = torch.stack([one.flip(-1) if flip else one for one, flip in zip(images, flipped, strict=True)])
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
    assert 16 < sum(flipped) < 48


def test_crops_are_those_of_torchvision(monkeypatch):
    """Whose sides are whole pixels: the middle quarter of an image of 8 x 8."""
    draws = torch.tensor([1.0, 0.5, 0.9, 0.5, 0.5], dtype=torch.float64)[:, None]
    monkeypatch.setattr(views, "SMALLEST_AREA", 0.25)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: draws)
    images = torch.arange(64.0, dtype=torch.float64).reshape(1, 1, 8, 8).square().expand(1, 3, 8, 8)
    ours = random_views(images)
    theirs = resized_crop(images, 2, 2, 4, 4, [8, 8], InterpolationMode.BILINEAR, antialias=False)
    # Beyond the crop's border ours sees the image, theirs repeats the last pixel.
    torch.testing.assert_close(ours[..., 1:-1, 1:-1], theirs[..., 1:-1, 1:-1])


def test_each_epoch_has_views_of_its_own_and_a_second_reading_the_same():
    images = torch.rand(12, 3, 8, 8)
    training_data = Inputs([(images, None)], kl_divergence, 4, 0.3, views=True)
    first, again, other = (
        torch.cat([part for part, _ in training_data.training(None, epoch, seed=5)]) for epoch in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)
    assert torch.cat([part for part, _ in training_data.training(None, 0, seed=5)[1:]]).equal(first[4:])
