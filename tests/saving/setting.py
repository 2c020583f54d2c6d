"""Small networks, compressed, and what loading must give back."""

import timm
import torch

import facts
from experiments.mini.train import mini_recipe
from facts.models import TimmModel
from tests.networks import image_batches

TINY = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5}
UNIT_BATCHES = image_batches([16] * 4, num_classes=10, shape=(3, 32, 32), dtype=torch.float32)


def from_recipe(**arguments):
    return TimmModel(tag="vit_tiny_patch16_224", arguments={**TINY, **arguments}, weights="random").build(), (3, 32, 32)


def swin(tag="swin_tiny_patch4_window7_224"):
    """In half precision."""
    sizes = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 5}
    return TimmModel(tag=tag, arguments=sizes, weights="random").build().bfloat16(), (3, 64, 64)


def from_timm():
    """Not built by a recipe: found by the name that timm leaves in the model."""
    return timm.create_model("test_vit", num_classes=7).eval(), (3, 160, 160)


def mini_mambavision():
    return mini_recipe("mambavision_b").build(), (1, 32, 32)


def compressed(model, shape, layers=None, **options):
    torch.manual_seed(0)
    return facts.compress(facts.prepare(model, input_shape=shape, layers=layers), estimator="pela", **options)


def reloaded(result, folder, **options):
    facts.save_compressed(result, folder)
    return facts.load_compressed(folder, **options)


def compressed_units(search, parts="units"):
    """Half of the units of two blocks, whose weights are large enough that outputs depend on them."""
    torch.manual_seed(0)
    model, _ = from_recipe(patch_size=8, num_heads=3, num_classes=10)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= 5
                module.bias.normal_(std=0.1)
    return facts.compress(model, UNIT_BATCHES, parts=parts, search=search, ratio=0.5)


def assert_same(loaded, result, shape):
    images = torch.randn(2, *shape).to(next(result.model.parameters()).dtype)
    assert loaded.model(images).equal(result.model.eval()(images))
    types = [{name: t.dtype for name, t in each.model.state_dict().items()} for each in (loaded, result)]
    assert types[0] == types[1]
    assert (loaded.plan, loaded.summary, loaded.skipped) == (result.plan, result.summary, result.skipped)
    assert not any(module.training for module in loaded.model.modules())
