"""Gates on the features that a vision transformer's blocks read and write, and blocks reduced to the open gates."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from facts.modules.hypernetwork import rounded
from facts.pruning.vit import slice_parameter, update_sizes

PLACES = ("attn_in", "attn_out", "mlp_in", "mlp_hidden", "mlp_out")


class IndexedBlock(nn.Module):
    """`block` reduced to the features `kept` at each of `PLACES`; the residual stream and norms keep their width."""

    def __init__(self, block: Block, kept: Mapping[str, Tensor]):
        super().__init__()
        block = copy.deepcopy(block)
        self.norm1, self.attn, self.drop_path1 = block.norm1, block.attn, block.drop_path1
        self.norm2, self.mlp, self.drop_path2 = block.norm2, block.mlp, block.drop_path2
        for layer, name, axis, place in (
            (block.attn.qkv, "weight", 1, "attn_in"),
            (block.attn.proj, "weight", 0, "attn_out"),
            (block.attn.proj, "bias", 0, "attn_out"),
            (block.mlp.fc1, "weight", 1, "mlp_in"),
            (block.mlp.fc1, "weight", 0, "mlp_hidden"),
            (block.mlp.fc1, "bias", 0, "mlp_hidden"),
            (block.mlp.fc2, "weight", 1, "mlp_hidden"),
            (block.mlp.fc2, "weight", 0, "mlp_out"),
            (block.mlp.fc2, "bias", 0, "mlp_out"),
        ):
            slice_parameter(layer, name, axis, kept[place])
        update_sizes(self)
        for place in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            self.register_buffer(place, kept[place])

    def forward(self, x: Tensor) -> Tensor:
        attended = self.drop_path1(self.attn(self.norm1(x)[..., self.attn_in]))
        x = x.index_add(-1, self.attn_out, attended.to(x.dtype))
        processed = self.drop_path2(self.mlp(self.norm2(x)[..., self.mlp_in]))
        return x.index_add(-1, self.mlp_out, processed.to(x.dtype))


def indexed(model: nn.Module, masks: Sequence[Tensor]) -> nn.Module:
    """Copy a vision transformer; each block keeps the features in the masks of its gates."""
    copied = copy.deepcopy(model)
    for number, (block, gates) in enumerate(zip(model.blocks, _by_block(masks), strict=True)):
        kept = {place: gate.nonzero().squeeze(1) for place, gate in zip(PLACES, gates, strict=True)}
        copied.blocks[number] = IndexedBlock(block, kept)
    return copied


def gate_widths(model: VisionTransformer) -> list[int]:
    """Widths of the gates, block by block, each block's in the order of `PLACES`."""
    d = model.embed_dim
    return [width for block in model.blocks for width in (d, d, d, block.mlp.fc1.out_features, d)]


def remaining_weights(model: VisionTransformer, masks: Sequence[Tensor]) -> Tensor:
    """Number of entries that the masks leave in the blocks' matrices, as a differentiable tensor."""
    total = masks[0].new_zeros(())
    for block, gates in zip(model.blocks, _by_block(masks), strict=True):
        attn_in, attn_out, mlp_in, hidden, mlp_out = (gate.sum() for gate in gates)
        total = total + attn_in * block.attn.qkv.out_features + attn_out * block.attn.proj.in_features
        total = total + hidden * (mlp_in + mlp_out)
    return total


@contextmanager
def gated(model: VisionTransformer, masks: list[Tensor]) -> Iterator[None]:
    """Multiply every gate by its mask within the block; `masks` may be replaced before each pass."""

    def multiply_input(number: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * masks[number], *args[1:])

    def multiply_output(number: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * masks[number]

    with ExitStack() as stack:
        for number, block in enumerate(model.blocks):
            first = number * len(PLACES)
            for place, module in ((0, block.attn), (2, block.mlp), (3, block.mlp.fc2)):
                stack.callback(module.register_forward_pre_hook(partial(multiply_input, first + place)).remove)
            for place, module in ((1, block.attn), (4, block.mlp)):
                stack.callback(module.register_forward_hook(partial(multiply_output, first + place)).remove)
        yield


def draw(logits: Tensor, offset: float, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw a mask of zeros and ones with the gradient of a Gumbel-sigmoid (straight through)."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(logits)
    return rounded(((logits + offset + uniform.logit()) / temperature).sigmoid())


def _by_block(gates: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [gates[start : start + len(PLACES)] for start in range(0, len(gates), len(PLACES))]
