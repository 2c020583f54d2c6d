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


def load(folder):
    """Build the network by its name in timm, with layers as wide as their weights."""
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
    network.load_state_dict(weights, assign=True)
    return network.eval()
