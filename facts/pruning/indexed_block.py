"""A transformer block that reads some features of the residual stream and adds to others, without projections."""

import copy
from collections.abc import Mapping

from timm.models.vision_transformer import Block
from torch import Tensor, nn

from facts.pruning.slicing import slice_linear


class IndexedBlock(nn.Module):
    """`block` cut down to the features `kept`, by the names of `PLACES`; the stream `[N, T, d]` keeps its width.

    Norms see the whole stream, as in DISP-LLM: selection comes after them.
    """

    PLACES = ("attn_in", "attn_out", "mlp_in", "mlp_hidden", "mlp_out")

    def __init__(self, block: Block, kept: Mapping[str, Tensor]):
        super().__init__()
        block = copy.deepcopy(block)
        slice_linear(block.attn.qkv, inputs=kept["attn_in"])
        slice_linear(block.attn.proj, outputs=kept["attn_out"])
        slice_linear(block.mlp.fc1, inputs=kept["mlp_in"], outputs=kept["mlp_hidden"])
        slice_linear(block.mlp.fc2, inputs=kept["mlp_hidden"], outputs=kept["mlp_out"])
        self.norm1, self.attn, self.drop_path1 = block.norm1, block.attn, block.drop_path1
        self.norm2, self.mlp, self.drop_path2 = block.norm2, block.mlp, block.drop_path2
        for place in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            self.register_buffer(place, kept[place])

    def forward(self, x: Tensor) -> Tensor:
        attended = self.drop_path1(self.attn(self.norm1(x)[..., self.attn_in]))
        x = x.index_add(-1, self.attn_out, attended.to(x.dtype))
        processed = self.drop_path2(self.mlp(self.norm2(x)[..., self.mlp_in]))
        return x.index_add(-1, self.mlp_out, processed.to(x.dtype))
