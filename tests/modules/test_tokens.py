"""Blocks that merge tokens take and give plain tensors: copies, hooks, reruns and several calls change nothing."""

import copy
import io
import logging
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import transformers
from torch.utils.checkpoint import checkpoint

import facts
from experiments.compose import CONF
from experiments.record import published_records
from facts.modules import tokens
from facts.modules.merging import _kept, by_ward, in_order
from facts.parts import part_at
from facts.parts.base import Description
from tests.merging import SIZES, batches, vit
from tests.moments.test_launches import Launches


@pytest.fixture(scope="module")
def merged():
    return facts.compress(vit(depth=4), batches(), parts="tokens", search="uniform", ratio=0.6).model


def inputs():
    return batches()[0][0]


def hooked(model, hook):
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    "copied", [lambda out: out.clone(), lambda out: out.double() + 0, lambda out: out.flip(0).flip(0), lambda out: out]
)
def test_a_copy_between_blocks_changes_nothing(merged, copied):
    assert torch.equal(hooked(merged, lambda module, args, out: copied(out))(inputs()), merged(inputs()))


def test_backward_hooks_and_compiled_blocks_change_nothing(merged):
    model, compiled = copy.deepcopy(merged), copy.deepcopy(merged)
    for block in model.blocks:
        block.register_full_backward_hook(lambda *_: None)
    for block in (compiled.blocks[0], compiled.blocks[2]):  # the others run as they are
        block.compile(backend="eager", fullgraph=True)
    assert torch.equal(model(inputs()), merged(inputs()))
    with torch.no_grad():
        assert torch.allclose(compiled(inputs()), merged(inputs()), atol=1e-10)


def test_an_edit_in_place_counts_as_a_new_tensor_does(merged):
    steer = torch.randn(48).double()
    in_place = hooked(merged, lambda module, args, out: out.add_(steer))
    assert torch.equal(in_place(inputs()), hooked(merged, lambda module, args, out: out + steer)(inputs()))
    assert not torch.allclose(in_place(inputs()), merged(inputs()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_have_the_same_gradients(merged, use_reentrant):
    grads = []
    for checkpointed in (False, True):
        model = copy.deepcopy(merged).train()
        x = model.pos_drop(model._pos_embed(model.patch_embed(inputs().requires_grad_())))
        others = x.detach().flip(1).requires_grad_()  # another sequence, at the same time
        for block in model.blocks:
            run = partial(checkpoint, block, use_reentrant=use_reentrant) if checkpointed else block
            x, others = run(x), run(others)
        (x.square().sum() + others.square().sum()).backward()
        grads.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(*grads, strict=True))


def test_two_sequences_may_take_turns_in_each_block(merged):
    one, other = inputs().split(4)

    def embedded(x):
        return merged._pos_embed(merged.patch_embed(x))

    sequences, alone = [embedded(one), embedded(other)], [embedded(one), embedded(other)]
    for block in merged.blocks:
        sequences = [block(each) for each in sequences]
    for place in (0, 1):
        for block in merged.blocks:
            alone[place] = block(alone[place])
        assert torch.equal(sequences[place], alone[place])


def test_outputs_of_blocks_are_plain_tensors(merged):
    kept, file = {}, io.BytesIO()
    merged.blocks[1].register_forward_hook(lambda module, args, out: kept.update(features=out))
    with torch.no_grad():
        merged(inputs())
    torch.save(kept, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["features"].equal(kept["features"])
    assert type(kept["features"]) is torch.Tensor and not vars(kept["features"])
    assert not merged.blocks[1].tokens.state.left  # nothing is left behind a pass


def test_a_changed_block_keeps_the_name_of_its_class(merged):
    block = type(merged.blocks[1])
    assert (block.__name__, block.__module__) == ("Block", "timm.models.vision_transformer")
    assert isinstance(merged.blocks[1], tokens.MergedBlock)


def test_attention_maps_come_with_advice(caplog):
    model = transformers.ViTModel(transformers.ViTConfig(**SIZES)).eval()
    model.set_attn_implementation("eager")
    batch = torch.randn(8, 3, 32, 32)
    merged = facts.compress(facts.prepare(model, [batch, batch], parts="tokens"), ratio=0.6, search="uniform").model
    tokens._warn_of_maps.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert len({each.shape for each in merged(batch, output_attentions=True).attentions}) > 1
    assert "compress with parts='units'" in caplog.text


def kernels_of(model, x):
    with torch.no_grad(), Launches() as kernels:
        model(x)
        first = kernels.number
        model(x)  # constants are kept from the first pass
    return kernels.number - first


@pytest.mark.parametrize("kept", [185, 60])
def test_a_merge_is_a_few_dozen_kernels(kept):
    model, x = timm.create_model("deit_tiny_patch16_224", depth=3).eval(), torch.randn(2, 3, 224, 224)
    dense = kernels_of(model, x)
    assert dense == 35
    merged = copy.deepcopy(model)
    described = Description(tokens=197, protected=1, size=192, entry="norm2", num_directions=48)
    part = part_at(merged, "blocks.1.tokens", "tokens", {"blocks.1.tokens": described})
    part.put(merged, kept)
    behind = 3  # places are taken and restored, and the bias is expanded
    assert kernels_of(merged, x) - dense - behind <= 34
    block = merged.blocks[1]
    block.tokens.load_state_dict({"directions": torch.zeros(48, 192)})  # nothing reads these tokens
    assert kernels_of(merged, x) - dense - behind <= 7
    part.put(merged, 197)
    assert kernels_of(merged, x) == dense  # blocks that merge nothing compute nothing


def test_the_default_at_half_takes_at_most_two_and_a_half_times_the_kernels():
    """By the plans of the published table."""
    model, x = timm.create_model("deit_tiny_patch16_224").eval(), torch.randn(1, 3, 224, 224)
    dense, numbers = kernels_of(model, x), []
    for record in published_records("tokens", Path(CONF).parent / "results/photos"):
        if (record.config["parts"], record.config["ratio"]) == ("units,tokens", 0.5):
            merged = copy.deepcopy(model)
            for name, count in record.plan.items():
                if name.endswith(".tokens") and count:
                    described = Description(tokens=197, protected=1, size=192, entry="norm2", num_directions=48)
                    part_at(merged, name, "tokens", {name: described}).put(merged, count)
            if record.plan["blocks.11.tokens"]:  # nothing reads the tokens behind it
                merged.blocks[11].tokens.load_state_dict({"directions": torch.zeros(48, 192)})
            numbers.append(kernels_of(merged, x))
    assert len(numbers) == 2 and max(numbers) <= 2.5 * dense


def test_a_network_that_was_evaluated_first_can_be_trained(merged):
    model = copy.deepcopy(merged)
    _kept.cache_clear()
    with torch.inference_mode():
        model(inputs())
    model(inputs()).sum().backward()
    assert all(block.mlp.fc1.weight.grad is not None for block in model.blocks)


def test_tokens_that_nothing_reads_are_not_compared():
    """Behind the last attention, a classifier reads the class token alone."""
    network = facts.compress(vit(), batches(), parts="tokens", search="uniform", ratio=0.6).model
    merges = [block.tokens for block in network.blocks]
    assert [merge.rule for merge in merges] == [by_ward, by_ward, in_order]
    outputs = network(inputs())
    merges[-1].rule = by_ward
    assert torch.allclose(outputs, network(inputs()), rtol=0, atol=1e-10)
