"""Networks of torchvision: prepared, published and saved as torchvision has them."""

import pytest
import timm.data
import torch
from PIL import Image
from torchvision import models

import facts
from facts.models import TorchvisionModel
from tests.saving.setting import assert_same, compressed


def on_meta(tag):
    with torch.device("meta"):
        return TorchvisionModel(tag=tag).architecture()


@pytest.mark.parametrize("tag", ["resnet50", "swin_v2_t", "efficientnet_b3"])
def test_images_are_prepared_as_torchvision_does(tag):
    image = Image.effect_noise((300, 420), 90).convert("RGB")
    ours = timm.data.create_transform(**timm.data.resolve_model_data_config(on_meta(tag)))(image)
    torch.testing.assert_close(ours, models.get_model_weights(tag).DEFAULT.transforms()(image))


def test_published_weights_and_a_saved_network(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    recipe = TorchvisionModel(tag="squeezenet1_1")
    assert recipe.checkpoint() is None
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / recipe.published.url.rpartition("/")[2]
    torch.save(models.squeezenet1_1().state_dict(), file)
    result = compressed(recipe.build(), (3, 64, 64), layers="all")
    facts.save_compressed(result, tmp_path / "saved")
    loaded = facts.load_compressed(tmp_path / "saved")
    assert_same(loaded, result, (3, 64, 64))
    assert loaded.model.provenance["source"] == file.name and "repository" not in loaded.model.provenance
