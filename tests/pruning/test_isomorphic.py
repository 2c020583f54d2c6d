"""Isomorphic pruning, which goes through torch-pruning."""

import torch

from facts.pruning import Isomorphic
from tests.pruning.problems import make_problem, make_vit


def test_useless_structures_go_first():
    model = make_vit(mlp_ratio=2, qkv_bias=True)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[:, 8:16] = 0  # head 1 has no effect
        model.blocks[1].attn.proj.weight[:, :8] = 0  # head 0
        for block in model.blocks:
            block.mlp.fc2.weight[:, :20] = 0
            block.mlp.fc1.bias.copy_(torch.arange(48) / 100)  # they tell which units are left
            block.attn.qkv.bias.copy_(torch.arange(72) / 100)
    pruned = Isomorphic(head_dims=0.1, round_to=1).prune(make_problem(model, ratio=0.53))
    for block, heads in zip(pruned.blocks, ([0, 2], [1, 2]), strict=True):
        rows = (block.attn.qkv.bias.detach() * 100).round().int()
        assert sorted({row % 24 // 8 for row in rows.tolist()}) == heads
        units = (block.mlp.fc1.bias.detach() * 100).round().int()
        assert len(units) <= 28 and units.min() >= 20
