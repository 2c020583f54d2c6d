"""Costs of a batch of the data pass beside its arithmetic: launches of kernels, of some 20 µs each."""

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import facts
from facts.estimators import FACTS
from facts.moments import batch as of_layer
from tests.networks import image_batches

NO_KERNELS = ("new_empty", "promote_types", "scalar_tensor", "lift_fresh", "alias", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts operations, but neither views nor those on counts of samples, which are in main memory, in float64."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        is_view = operation.is_view or operation.overloadpacket.__name__ in NO_KERNELS
        on_host = any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in tree_iter(args))
        self.number += not (is_view or on_host)
        return operation(*args, **(kwargs or {}))


@pytest.mark.system
@pytest.mark.parametrize(("parts", "most"), [("layers", 2300), ("units", 3200)])
def test_a_batch_launches_few_kernels(parts, most, monkeypatch):
    """In a DeiT-B an eighth as wide: the number does not depend on the width."""
    monkeypatch.setattr(of_layer, "MIN_BLOCKED_SIZE", 64)
    network = timm.models.VisionTransformer(img_size=16, num_classes=4, embed_dim=96, depth=12, num_heads=12)
    batches = image_batches([2, 2], shape=(3, 16, 16), dtype=torch.float32)
    prepared = facts.prepare(network, batches, held_out=(), parts=parts)
    wanted = prepared.resolve_defaults(FACTS()).moments
    numbers = []
    for data in (batches[:1], batches):
        with Launches() as launches:
            prepared.on(data).moments(wanted)
        numbers.append(launches.number)
    assert numbers[1] - numbers[0] <= most
