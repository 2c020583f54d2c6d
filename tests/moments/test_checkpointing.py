"""Moments with and without checkpointed blocks: the same, in less memory."""

from functools import partial

import pytest
import torch
from torch import nn

from experiments.plan import kept_bytes
from facts.calibration.execution import Execution
from facts.calibration.selection import select_layers
from facts.compression.compress import compress
from facts.moments import (
    GradGram,
    GroupGradients,
    InputGram,
    MeanInputGram,
    SampleGradGrams,
    SummedGradGram,
    collect_moments,
)
from facts.moments.capture import capturing
from facts.moments.checkpointing import blocks_of
from facts.moments.data_pass import DataPass
from facts.moments.losses import next_tokens, summed_cross_entropy
from facts.moments.memory import MemoryPolicy
from facts.search import CoRSFisher
from tests.by_sample import BY_SAMPLE
from tests.live_bytes import LiveBytes
from tests.networks import (
    InPlaceBlock,
    Runs,
    image_batches,
    make_causal_lm,
    make_convnext,
    make_in_place,
    make_model,
    make_sharing,
    make_swin,
    make_vit,
    relative_error,
)

MOMENTS = (
    InputGram(),
    GradGram(),
    MeanInputGram(),
    SummedGradGram(),
    SampleGradGrams(),
    GroupGradients(group_size=2),
    *BY_SAMPLE["facts"].moments,
)
CHECKPOINTED = MemoryPolicy(checkpoint_blocks=True)
IMAGES, LARGER_IMAGES = image_batches([3, 3, 1]), image_batches([3, 2], shape=(3, 16, 16))


def tensors_of(model, batches, names=None, **options):
    """Every tensor of every moment of every layer."""
    layers = select_layers(model, names).layers
    collected = collect_moments(model, layers, batches, MOMENTS, **options)
    tensors = {}
    for name in layers:
        for moment in MOMENTS:
            total = collected[name][moment]
            for i, tensor in enumerate(total.chunks() if isinstance(moment, GroupGradients) else total):
                tensors[name, moment, i] = tensor.clone()
    return tensors


def assert_same(model, batches, names=None, **options):
    kept = tensors_of(model, batches, names, **options)
    again = tensors_of(model, batches, names, memory=CHECKPOINTED, **options)
    assert kept.keys() == again.keys()
    for place, tensor in kept.items():
        assert tensor.any()
        torch.testing.assert_close(again[place], tensor, rtol=1e-12, atol=0, msg=lambda text, at=place: f"{at}: {text}")


def residual_in_place(block, x):
    x += torch.tanh(block(x))
    return x


def unused_once(block, x):
    block(2 * x)  # which the loss never sees
    return block(x)


def by_keyword(block, x):
    return block(x=x)


class Bare(nn.Sequential):
    """A block that keeps nothing for the backward pass where the graph begins in it."""

    def __init__(self):
        super().__init__(nn.Linear(12, 12))


@pytest.mark.parametrize(
    "make",
    [
        make_sharing,
        partial(make_sharing, unused_once),
        partial(make_sharing, by_keyword),
        partial(make_sharing, residual_in_place),
        make_in_place,
        partial(make_in_place, InPlaceBlock, residual_in_place),
    ],
)
def test_moments_of_small_stacks_are_the_same(make):
    assert_same(make(), IMAGES)


@pytest.mark.parametrize("make", [make_in_place, partial(make_in_place, Bare)])
def test_a_graph_that_begins_in_a_block_is_no_exception(make):
    model = make()
    assert_same(model, IMAGES, [name for name in select_layers(model).layers if name.startswith("blocks")])


def test_a_block_that_changes_its_input_for_others_to_see_still_does():
    def step(block, x):
        block(x)
        return x

    assert_same(make_in_place(InPlaceBlock, step), IMAGES)


@pytest.mark.parametrize("make", [make_swin, make_vit])
def test_moments_of_image_networks_are_the_same(make):
    assert_same(make(), LARGER_IMAGES)


def test_moments_of_convolutional_blocks_are_the_same():
    assert_same(make_convnext(), image_batches([2], shape=(3, 32, 32)))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_moments_of_language_models_are_the_same(kind, dtype, precision):
    ids = torch.randint(64, (5, 12))
    batches = [(part, next_tokens(part)) for part in ids.split(2)]
    assert_same(make_causal_lm(kind, dtype), batches, precision=precision)


@pytest.mark.parametrize("make", [make_sharing, partial(make_sharing, unused_once), make_in_place])
def test_moments_under_autocast_are_the_same(make):
    assert_same(make().float(), image_batches([3, 1], dtype=torch.float32), precision=torch.bfloat16)


def test_batches_in_parts_give_the_moments_of_whole_ones():
    model = make_vit()
    whole = tensors_of(model, LARGER_IMAGES)

    def refuse(module, args):
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.blocks[1].mlp.register_forward_pre_hook(refuse)
    parts = tensors_of(model, LARGER_IMAGES, memory=CHECKPOINTED)
    assert all(relative_error(parts[place], tensor) < 1e-12 for place, tensor in whole.items())


def test_every_layer_of_a_block_is_handed_over_once_and_the_network_is_as_it_was():
    model, (images, labels) = make_sharing(), IMAGES[0]
    handed = []
    with capturing(
        model, select_layers(model).layers, lambda name, x, g: handed.append(name), blocks=model.blocks
    ) as capture:
        assert all("forward" in vars(block) for block in model.blocks)
        capture.start_batch(len(images))
        summed_cross_entropy(model(images), labels).backward()
        assert not capture.calls
        capture.finish_batch()
    assert sorted(handed) == sorted(select_layers(model).layers)
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


def test_blocks_behind_the_first_layer_run_twice_and_those_before_it_once():
    """A block is used twice, and each use runs again, in the backward pass or after it; but not before the graph."""
    model = make_sharing(unused_once)
    layers = {name: layer for name, layer in select_layers(model).layers.items() if name != "blocks.0.layer"}
    for names, expected in ((layers, 4), (["blocks.1.layer", "blocks.2.layer"], 2)):
        runs = Runs(model.blocks[0].layer)
        collect_moments(model, layers, IMAGES[:1], [GradGram()], memory=CHECKPOINTED, only=names)
        assert runs.number == expected


def test_a_pass_without_gradients_runs_every_block_once():
    model = make_sharing()
    runs = Runs(model.blocks[0]), Runs(model.blocks[0].layer)
    collect_moments(model, select_layers(model).layers, IMAGES[:1], [InputGram()], memory=CHECKPOINTED)
    assert [each.number for each in runs] == [1, 1]


def test_a_fisher_profile_checkpoints_blocks_too(no_comparison):
    """Each of which then runs twice for each of two batches; the estimator needs no data."""
    model, plans, num_runs = make_vit(), [], []
    runs = [Runs(block.mlp) for block in model.blocks]
    for memory in (MemoryPolicy(), CHECKPOINTED):
        settings = {"estimator": "pela", "search": CoRSFisher(labels="given"), "ratio": 0.6}
        plans.append(compress(model, LARGER_IMAGES, execution=Execution(memory=memory), **settings).plan)
        num_runs.append([block.number for block in runs])
    assert plans[0] == plans[1]
    assert num_runs == [[2] * 3, [2 + 4] * 3]


def peak_bytes(model, batches, blocks):
    with LiveBytes() as live:
        data_pass = DataPass(
            model,
            select_layers(model).layers,
            lambda *_: None,
            summed_cross_entropy,
            torch.float32,
            True,
            blocks=blocks,
        )
        data_pass.run(batches)
    return live.peak


def test_less_memory_is_taken_and_as_much_as_estimated():
    """Of twelve blocks one keeps its activations at a time; what one step of a block takes comes on top of that."""
    model, batches = make_vit(depth=12), LARGER_IMAGES[:1]
    layers, estimates, peaks = select_layers(model).layers, {}, {}
    for blocks in ((), tuple(blocks_of(model, layers.values()))):
        estimates[len(blocks)] = kept_bytes(model, layers.values(), batches[0][0], blocks)
        peaks[len(blocks)] = peak_bytes(model, batches, blocks)
    assert peaks[12] < 0.25 * peaks[0]
    for number, estimate in estimates.items():
        assert estimate <= peaks[number] < 1.5 * estimate


class TestBlocks:
    def names(self, model, layers):
        blocks = blocks_of(model, [model.get_submodule(name) for name in layers])
        return [name for name, module in model.named_modules() if module in blocks]

    def test_of_a_transformer(self):
        model = make_vit()
        assert self.names(model, select_layers(model).layers) == ["blocks.0", "blocks.1", "blocks.2"]
        assert self.names(model, ["blocks.1.mlp.fc1", "head"]) == ["blocks.1"]

    def test_those_within_others_are_left_out(self):
        inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        model = nn.ModuleList([nn.Sequential(inner, nn.Linear(4, 4)), nn.Linear(4, 4)])
        assert self.names(model, ["0.0.0"]) == ["0.0"]
        assert self.names(model, ["0.0.0", "0.1"]) == ["0"]

    def test_of_a_layer_that_several_share(self):
        model = make_sharing()
        assert self.names(model, ["stem"]) == ["blocks.0", "blocks.1", "blocks.2"]

    @pytest.mark.parametrize("moment", [InputGram(), GradGram()])
    def test_a_network_without_any_says_so_where_gradients_are_needed(self, moment):
        model = make_model()
        collect = partial(collect_moments, model, select_layers(model).layers, IMAGES, [moment], memory=CHECKPOINTED)
        if not moment.needs_grads:
            assert collect()
            return
        with pytest.raises(
            ValueError, match=r"EveryShape has no blocks.*6 layers.*MemoryPolicy\(checkpoint_blocks=False\)"
        ):
            collect()
