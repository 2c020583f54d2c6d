"""Moments with and without checkpointed blocks: the same, in less memory."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from facts.moments import GradGram, GroupGradients, InputGram, MeanInputGram, SampleGradGrams, collect_moments
from facts.moments.collect import MemoryPolicy
from facts.moments.data_pass import DataPass, blocks_of
from facts.moments.losses import next_tokens, summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import (
    InPlaceBlock,
    Runs,
    image_batches,
    make_causal_lm,
    make_convnext,
    make_in_place,
    make_model,
    make_sharing,
    make_vit,
)


class LiveBytes(TorchDispatchMode):
    """Within the block, `peak` is the largest sum of bytes of tensors that were made there and lived at one time."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.made[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.made = {place: made for place, made in self.made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.made.values()))
        return result


MOMENTS = (InputGram(), GradGram(), MeanInputGram(), SampleGradGrams(), GroupGradients(group_size=2))
CHECKPOINTED = MemoryPolicy(checkpoint_blocks=True)
IMAGES, LARGER_IMAGES = image_batches([3, 3, 1]), image_batches([3, 2], shape=(3, 16, 16))
SINGLE = image_batches([3, 1], dtype=torch.float32)
TEXTS = [(ids, next_tokens(ids)) for ids in torch.randint(64, (5, 12)).split(2)]


def residual_in_place(block, x):
    x += torch.tanh(block(x))
    return x


def unused_once(block, x):
    block(2 * x)  # which the loss never sees
    return block(x)


def changes_its_input(block, x):
    block(x)
    return x


@pytest.mark.parametrize(
    ("make", "batches", "precision"),
    [
        (partial(make_sharing, unused_once), IMAGES, torch.float32),
        (partial(make_sharing, residual_in_place), IMAGES, torch.float32),
        (partial(make_in_place, InPlaceBlock, residual_in_place), IMAGES, torch.float32),
        (partial(make_in_place, InPlaceBlock, changes_its_input), IMAGES, torch.float32),
        (make_vit, LARGER_IMAGES, torch.float32),
        (make_convnext, image_batches([2], shape=(3, 32, 32)), torch.float32),
        (lambda: make_sharing(unused_once).float(), SINGLE, torch.bfloat16),
        (lambda: make_in_place().float(), SINGLE, torch.bfloat16),
        (partial(make_causal_lm, "llama", torch.float32), TEXTS, torch.bfloat16),
    ],
)
def test_moments_are_the_same(make, batches, precision):
    model = make()
    assert_same(model, batches, select_layers(model).layers, precision)


def test_a_graph_that_begins_in_a_block_is_no_exception():
    model = make_in_place()
    layers = {name: layer for name, layer in select_layers(model).layers.items() if name.startswith("blocks")}
    assert_same(model, IMAGES, layers, torch.float32)


def assert_same(model, batches, layers, precision):
    kept, again = (
        collect_moments(model, layers, batches, MOMENTS, precision=precision, memory=memory)
        for memory in (MemoryPolicy(), CHECKPOINTED)
    )
    for name in layers:
        for moment in MOMENTS:
            pair = (totals[name][moment] for totals in (kept, again))
            for expected, found in zip(*pair, strict=True):
                assert expected.any()
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_blocks_behind_the_first_layer_run_twice_and_those_before_it_once():
    """A block is used twice, and each use runs again, in the backward pass or after it; but not before the graph."""
    model = make_sharing(unused_once)
    layers = {name: layer for name, layer in select_layers(model).layers.items() if name != "blocks.0.layer"}
    for names, expected in ((layers, 4), (["blocks.1.layer", "blocks.2.layer"], 2)):
        runs = Runs(model.blocks[0].layer)
        collect_moments(model, layers, IMAGES[:1], [GradGram()], memory=CHECKPOINTED, only=names)
        assert runs.number == expected
    runs = Runs(model.blocks[0].layer)
    collect_moments(model, layers, IMAGES[:1], [InputGram()], memory=CHECKPOINTED)  # needs no backward pass
    assert runs.number == 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_less_memory_is_taken():
    """One of twelve blocks keeps its activations at a time."""
    model, peaks = make_vit(depth=12), {}
    layers = select_layers(model).layers
    for blocks in ((), tuple(blocks_of(model, layers.values()))):
        with LiveBytes() as live:
            data_pass = DataPass(
                model, layers, lambda *_: None, summed_cross_entropy, torch.float32, True, blocks=blocks
            )
            data_pass.run(LARGER_IMAGES[:1], "images")
        peaks[len(blocks)] = live.peak
    assert peaks[12] < 0.25 * peaks[0]


NESTED = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), nn.Linear(4, 4)])


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (make_vit(), ["blocks.1.mlp.fc1", "head"], ["blocks.1"]),
        (make_sharing(), ["stem"], ["blocks.0", "blocks.1", "blocks.2"]),  # they share it
        (NESTED, ["0.0.0"], ["0.0"]),
        (NESTED, ["0.0.0", "0.1"], ["0"]),  # without the one within it
    ],
)
def test_blocks_of_layers(model, layers, expected):
    blocks = blocks_of(model, [model.get_submodule(name) for name in layers])
    assert [name for name, module in model.named_modules() if module in blocks] == expected


def test_a_network_without_blocks_says_so_where_gradients_are_needed():
    model = make_model()
    collect = partial(collect_moments, model, select_layers(model).layers, IMAGES, memory=CHECKPOINTED)
    assert collect([InputGram()])
    with pytest.raises(ValueError, match=r"EveryShape has no blocks.*6 layers.*checkpoint_blocks=False\)"):
        collect([GradGram()])
