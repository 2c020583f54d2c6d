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


def merged(x, scores, sizes, places, kept, original, p, directions):
    """Merge the tokens `[N, n, D]` that lose least, until `kept` of `original` remain; the last `p` are never merged.

    The attention that tokens receive by these `scores [N, heads, n, n]` weighs them; originals have their `places`.
    """
    here, free, whole, now = (count - p for count in (places.shape[1], kept, original, x.shape[1]))
    leaving = now - max(1, (2 * here * free + whole) // (2 * whole))  # images of other sizes keep the same share
    if leaving <= 0:
        return x, sizes, places
    attention, order = scores.float().softmax(-1), torch.arange(now + p, device=x.device)
    received = attention.mean((1, 2)) * (attention[:, :, now:] if p else attention).mean((1, 2))
    weights, features = sizes * received**0.25, x.float() @ directions.float().T
    loss = torch.cdist(features, features) ** 2 / (1 / weights[..., None] + 1 / weights[:, None])
    loss[:, order, order] = loss[:, now:] = loss[:, :, now:] = torch.inf
    least, nearest = loss.min(-1)
    pair = nearest.gather(1, nearest) == order
    late = torch.where(pair, least, 2 * least).masked_fill(pair & (nearest > order), 1e28)
    stay = late.argsort(dim=-1, stable=True)[:, leaving:]
    into = loss.gather(2, stay[:, None].expand(-1, now + p, -1)).argmin(-1)
    into = into.scatter(1, stay, order[leaving:].expand_as(stay) - leaving)
    members = torch.nn.functional.one_hot(into, now + p - leaving).mT.float()
    shares = members * weights[:, None]
    x = (shares / shares.sum(-1, keepdim=True)).to(x.dtype) @ x
    return x, (members @ sizes[..., None])[..., 0], into.gather(1, places)


class Merging(nn.Sequential):
    """Blocks, some of which merge tokens between attention and MLP; attention counts each as often as its size."""

    def __init__(self, tokens, fixed, blocks):
        super().__init__(*blocks)
        self.tokens, self.fixed = tokens, fixed

    def forward(self, x):
        sizes = torch.ones(x.shape[:2], device=x.device)
        fixed = [place % x.shape[1] for place in self.fixed]
        order = torch.tensor([*({*range(x.shape[1])} - {*fixed}), *fixed], device=x.device)
        x, places = x[:, order], order.argsort().expand(len(x), -1)
        for name, block in self.named_children():
            inputs, attn = block.norm1(x), block.attn
            x = x + block.ls1(attn(inputs, attn_mask=sizes.log().to(x.dtype)[:, None, None]))
            if name in self.tokens:
                query, key, _ = attn.qkv(inputs).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
                scores = attn.q_norm(query) * attn.scale @ attn.k_norm(key).mT
                x, sizes, places = merged(x, scores, sizes, places, *self.tokens[name])
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
        about = next(iter(made["described"].values()))
        network.blocks = Merging(tokens, about["fixed"] or range(about["protected"]), network.blocks)
    network.load_state_dict(weights, assign=True)
    return network.eval()
