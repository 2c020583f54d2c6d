"""Effects of each sample on each layer: one forward and one backward pass a sample, nothing shared with the library."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Sample:
    """Inputs `X [T, n]`, output gradients `G [T, m]`, and the weight gradient `D [m, n]` that autograd returns."""

    X: Tensor
    G: Tensor
    D: Tensor


def model_samples(model: nn.Module, batches, loss) -> dict[str, list[list[Sample]]]:
    """For each linear layer, batches of samples. The samples of a batch are passed through `model` one at a time."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    result = {name: [] for name in layers}
    for inputs, targets in batches:
        for samples in result.values():
            samples.append([])
        for k in range(len(inputs)):
            for name, sample in one_sample(model, layers, inputs[k : k + 1], targets[k : k + 1], loss).items():
                result[name][-1].append(sample)
    return result


def one_sample(model, layers, inputs, targets, loss) -> dict[str, Sample]:
    seen = {name: [] for name in layers}

    def remember(name):
        return lambda module, args, output: seen[name].append((args[0], output))

    hooks = [layer.register_forward_hook(remember(name)) for name, layer in layers.items()]
    value = loss(model(inputs), targets)
    for hook in hooks:
        hook.remove()
    result = {}
    for name, layer in layers.items():
        D, *grads = torch.autograd.grad(value, [layer.weight, *(out for _, out in seen[name])], retain_graph=True)
        X = torch.cat([x.detach().reshape(-1, layer.in_features) for x, _ in seen[name]])
        G = torch.cat([g.reshape(-1, layer.out_features) for g in grads])
        result[name] = Sample(X, G, D)
    return result


def tensor_samples(inputs: Tensor, output_grads: Tensor) -> list[Sample]:
    """The samples of `[N, ..., n]` and `[N, ..., m]`, each with its weight gradient by autograd."""
    samples = []
    for x, g in zip(inputs, output_grads, strict=True):
        weight = torch.zeros(g.shape[-1], x.shape[-1], dtype=x.dtype, requires_grad=True)
        (D,) = torch.autograd.grad((torch.nn.functional.linear(x, weight) * g).sum(), weight)
        samples.append(Sample(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), D))
    return samples
