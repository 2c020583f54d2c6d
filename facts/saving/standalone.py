"""Load the network of a folder without facts: copy this text to `load.py`, and call `load("the folder")`."""

import json
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import pad


def padded(heads, widths, layer, inputs, output):
    """Pad queries, keys and values to one width with zeros."""
    parts = [part.unflatten(-1, (heads, -1)) for part in output.split([heads * width for width in widths], -1)]
    return torch.cat([pad(part, (0, max(widths) - part.shape[-1])).flatten(-2) for part in parts], -1)


def leading(heads, width, layer, inputs):
    """Drop the padding of the values."""
    return inputs[0].unflatten(-1, (heads, -1))[..., :width].flatten(-2)


def merged(x, sizes, places, kept, original, protected, directions):
    """Merge the tokens `[N, n, D]` that lose least, until `kept` of `original` ones remain; those have `places`."""
    here, free, whole = (count - protected for count in (places.shape[1], kept, original))
    number = protected + max(1, (2 * here * free + whole) // (2 * whole))  # images of other sizes keep the same share
    while (excess := x.shape[1] - number) > 0:
        features = x.float() @ directions.float().T
        (a, b), (s, t) = ((each[:, protected::2], each[:, protected + 1 :: 2]) for each in (features, sizes))
        loss, into = (torch.cdist(a, b) ** 2 * (s[..., None] * t[:, None] / (s[..., None] + t[:, None]))).min(-1)
        left = loss.argsort(dim=-1, stable=True)[:, : min(excess, (x.shape[1] - protected) // 2)]
        left, into = protected + 2 * left, protected + 1 + 2 * into.gather(1, left)
        sums = torch.cat([x.float() * sizes[..., None], sizes[..., None]], -1)
        rows = [each[..., None].expand(-1, -1, sums.shape[-1]) for each in (into, left)]
        sums = sums.scatter_add(1, rows[0], sums.gather(1, rows[1]))
        stays = torch.ones_like(sizes, dtype=torch.bool).scatter(1, left, False)
        position = stays.cumsum(1) - 1
        places = position.scatter(1, left, position.gather(1, into)).gather(1, places)
        sums = sums[stays].unflatten(0, (len(x), -1))
        x, sizes = (sums[..., :-1] / sums[..., -1:]).to(x.dtype), sums[..., -1]
    return x, sizes, places


class Merging(nn.Sequential):
    """Blocks, some of which merge tokens between attention and MLP; attention counts each as often as its size."""

    def __init__(self, tokens, blocks):
        super().__init__(*blocks)
        self.tokens = tokens

    def forward(self, x):
        sizes = torch.ones(x.shape[:2], device=x.device)
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        for name, block in self.named_children():
            x = x + block.ls1(block.attn(block.norm1(x), attn_mask=sizes.log().to(x.dtype)[:, None, None]))
            if name in self.tokens:
                x, sizes, places = merged(x, sizes, places, *self.tokens[name])
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def load(folder):
    """Build the network by its name in timm, with layers as wide as their weights, and blocks that merge tokens."""
    made = json.loads(Path(folder, "compression.json").read_text())
    network = timm.create_model(made["recipe"]["tag"], **made["recipe"]["arguments"])
    saved = load_file(Path(folder, "model.safetensors"))
    weights = {name.replace(".linear.", "."): weight for name, weight in saved.items()}
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Linear):
            d_out, d_in = weights[f"{name}.weight"].shape
            network.set_submodule(name, nn.Linear(d_in, d_out, bias=f"{name}.bias" in weights))
    for attention in [module for module in network.modules() if hasattr(module, "qkv")]:
        heads, outputs = attention.num_heads, attention.proj.in_features // attention.num_heads
        scores = (attention.qkv.out_features // heads - outputs) // 2
        width = max(scores, outputs)
        attention.head_dim, attention.attn_dim, attention.scale = width, heads * width, width**-0.5
        if scores != outputs:
            attention.qkv.register_forward_hook(partial(padded, heads, (scores, scores, outputs)))
            attention.proj.register_forward_pre_hook(partial(leading, heads, outputs))
    directions = {name: weights.pop(f"{name}.directions") for name in made["described"]}
    if directions:
        tokens = {
            name.split(".")[1]: (made["plan"][name], about["tokens"], about["protected"], directions[name])
            for name, about in made["described"].items()
        }
        network.blocks = Merging(tokens, network.blocks)
    network.load_state_dict(weights, assign=True)
    return network.eval()
