"""Losses for the backward pass, and distances between the outputs of two networks."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from facts.modules.networks import autocast, evaluating, problem_of, run
from facts.moments.statistics import at_least_tiny
from facts.utils.batches import described, tensors_in, to_device
from facts.utils.cache import content_key, name_of

log = logging.getLogger(__name__)

NOTHING = -100  # the label that cross-entropy ignores
NUM_SAMPLES = 512  # on which the scales of features are measured
LEAST_SCALE = 1e-3  # of the root mean square of all features: one that hardly varies would otherwise dominate
CHUNK = 2**26  # logits: half a gigabyte in float64

OutputKind = Literal["classes", "features"] | tuple[str, ...]
"""Class logits; features (all tensors of the outputs); or features (the tensors with these names)."""

Loss = Callable[[Any, Any], Tensor]
"""From outputs and targets to the sum of the samples' losses, each of which depends only on its own sample."""

OutputError = Callable[[Any, Any], Tensor]
"""From the outputs of the original and of a changed network to the sum of the samples' errors."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ over samples of the cross-entropy of each, for logits `[N, C]`, or `[N, T, C]` summed over tokens.

    Targets are class indices (-100 is ignored), or probabilities in the shape of the logits; for a language model,
    the next tokens (`next_tokens`). Raises `ValueError` for outputs and targets that do not suit cross-entropy.
    """
    if not _suit_cross_entropy(logits, targets):
        raise ValueError(
            f"no loss can be inferred from outputs and targets that are {described(logits)} and {described(targets)}: "
            "cross-entropy takes logits [N, C] or [N, T, C] of at least two classes, with labels [N] or [N, T], or "
            "probabilities. Give loss=, a function of outputs and targets: the sum of the samples' losses"
        )
    if targets.is_floating_point():
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(0, -2), reduction="sum")
    labels = targets.flatten().long()
    refuse_unfit_labels(labels, logits.shape[-1])
    return F.cross_entropy(logits.flatten(0, -2), labels, reduction="sum")


def _suit_cross_entropy(logits: Any, targets: Any) -> bool:
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor) or is_one(logits):
        return False
    if not targets.is_floating_point():
        return targets.shape == logits.shape[:-1]
    if targets.shape != logits.shape or (targets < 0).any():
        return False
    sums = targets.double().sum(dim=-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-2)  # bfloat16's error


def refuse_unfit_labels(labels: Tensor, num_classes: int) -> None:
    """Raises `ValueError` for labels of other classes."""
    if ((labels != NOTHING) & ((labels < 0) | (labels >= num_classes))).any():
        raise ValueError(
            f"labels from {labels.min()} to {labels.max()} do not fit a network of {num_classes} classes: they must "
            f"lie in 0 .. {num_classes - 1}, or be {NOTHING} if nothing is to be predicted"
        )


def summed_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ ½ (output - target)², the loss of Gaussians with unit variance."""
    return 0.5 * (outputs.flatten() - _as_one_output(targets, outputs)).square().sum()


def summed_binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ of the binary cross-entropies of all logits. Raises `ValueError` for labels outside of 0 to 1."""
    labels = _as_one_output(targets, logits)
    if ((labels < 0) | (labels > 1)).any():
        raise ValueError(
            f"labels of yes or no must lie in 0 .. 1, got {labels.min():g} to {labels.max():g}: with one output, give "
            "floats for squared errors, or else loss="
        )
    return F.binary_cross_entropy_with_logits(logits.flatten(), labels, reduction="sum")


def _as_one_output(targets: Tensor, outputs: Tensor) -> Tensor:
    """Flatten targets. Raises `ValueError` unless there is one for each output."""
    if targets.numel() != outputs.numel():
        fault = f"labels that are {described(targets)} do not fit outputs that are {described(outputs)}"
        raise ValueError(f"{fault}: give one for each output, or inputs alone")
    return targets.flatten().to(outputs)


def loss_of_labels(outputs: Any, targets: Any, problem: str | None = None) -> Loss:
    """Choose the loss of given labels by the outputs `[N, C]`: cross-entropy, unless there is one, `[N, 1]` or `[N]`.

    One output gets squared errors if the labels are floats, and binary cross-entropy if they are integers or booleans.
    The network's own `problem` (`problem_of`) comes first.
    """
    if problem in DECLARED:
        return DECLARED[problem]
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and is_one(outputs)):
        return summed_cross_entropy
    return summed_squared_error if targets.is_floating_point() else summed_binary_cross_entropy


DECLARED: dict[str | None, Loss] = {
    "multi_label_classification": summed_binary_cross_entropy,
    "regression": summed_squared_error,
}


def is_one(outputs: Tensor) -> bool:
    """Whether there is one output of each sample (or token), `[N, 1]` or `[N]`."""
    return outputs.ndim < 2 or outputs.shape[-1] == 1


def next_tokens(tokens: Tensor) -> Tensor:
    """Targets for unpadded tokens `[N, T]`: the next token at each position, -100 (ignored) at the last.

    Raises `ValueError` for tokens of another shape.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens must come as windows [N, T], not as {described(tokens)}")
    return F.pad(tokens[:, 1:], (0, 1), value=NOTHING)


class SampledTargets(ABC):
    """A loss on randomly drawn targets, not the given ones: every data pass draws the same for a batch's number."""

    def __init__(self, name: str, module: str, seed: int, batch_number: int = 0):
        self.name, self.seed, self.batch_number = name, seed, batch_number
        self.generators: dict[torch.device, torch.Generator] = {}
        self.__module__, self.__qualname__ = module, f"{name} with seed {seed}"

    def generator(self, outputs: Tensor) -> torch.Generator:
        """The generator of the batch on the outputs' GPU or, on another device, on the CPU; each draws on."""
        device = outputs.device if outputs.is_cuda else torch.device("cpu")
        if device not in self.generators:
            seed = int(content_key(self.seed, self.batch_number), base=16) % 2**63
            self.generators[device] = torch.Generator(device).manual_seed(seed)
        return self.generators[device]

    def drawn(self, seed: int, batch_number: int = 0) -> Self:
        """The same loss with other random draws."""
        other = copy(self)
        SampledTargets.__init__(other, self.name, self.__module__, seed, batch_number)
        return other

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Draw targets and sum the loss on them."""


class SampledLabels(SampledTargets):
    """A loss on labels drawn from the network's own class probabilities: its gradients make up the true Fisher."""

    def __init__(self, loss: Loss, seed: int = 0):
        self.loss = loss
        super().__init__(f"{getattr(loss, '__qualname__', '<unnamed>')}, labels sampled", loss.__module__, seed)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Draw labels and sum the loss on them. Raises `ValueError` for outputs that are not class logits."""
        is_tensor = isinstance(outputs, Tensor) and outputs.is_floating_point()
        of_one = self.loss in (summed_squared_error, summed_binary_cross_entropy)
        if not of_one and (not is_tensor or outputs.ndim not in (2, 3) or outputs.shape[-1] < 2):
            raise ValueError(
                f"labels can only be drawn from logits of two or more classes, not from {described(outputs)}: give "
                'loss=, a function of outputs and targets, or facts.prepare(..., outputs="features")'
            )
        generator = self.generator(outputs)
        if self.loss is summed_squared_error:
            noise = torch.randn(outputs.shape, generator=generator, device=generator.device)
            return self.loss(outputs, outputs.detach() + noise.to(outputs))
        if self.loss is summed_binary_cross_entropy:
            chances = outputs.detach().double().sigmoid().nan_to_num(0.5).to(generator.device)
            return self.loss(outputs, torch.bernoulli(chances, generator=generator).to(outputs.device))
        probabilities = (logits.double().softmax(dim=-1).to(generator.device) for logits in in_chunks(outputs.detach()))
        # Where the outputs are NaN, so will be the gradients, which tells in which layer it began.
        labels = torch.cat([torch.multinomial(each.nan_to_num(1), 1, generator=generator) for each in probabilities])
        return self.loss(outputs, labels.view(outputs.shape[:-1]).to(outputs.device))


class SampledFeatures(SampledTargets):
    """Σ over samples of Σ ε f(x) / scale, with a fresh ε of unit variance for each sample and feature.

    The mean of g gᵀ over ε is the Gauss-Newton matrix Jᵀ M J, where M holds 1 / scale² of each feature. All tensors of
    the outputs count equally, each as the mean over its values. `scales` has one tensor `[D]` for each.
    """

    def __init__(self, scales: Collection[Tensor], names: Collection[str] = ()):
        self.scales, self.names = tuple(scales), tuple(names)
        super().__init__(f"features {content_key(*self.scales, self.names)} sampled", __name__, seed=0)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        tensors = output_tensors(outputs, self.names)
        losses = []
        for values, scale in zip(map(features_last, tensors), self.scales, strict=True):
            generator = self.generator(values)
            noise = torch.randn(values.shape, generator=generator, device=generator.device).to(values)
            count = len(tensors) * values[0].numel()
            losses.append((noise / scale.to(values) * values).sum() / count**0.5)
        return torch.stack(losses).sum()


def features_last(values: Tensor) -> Tensor:
    """Turn maps `[N, D, H, W]` into `[N, H, W, D]`, and `[N]` into `[N, 1]`; other outputs have features last."""
    return values.movedim(1, -1) if values.ndim == 4 else values[:, None] if values.ndim == 1 else values


def scales_of(
    model: nn.Module, batches: Iterable[tuple[Any, Any]], names: Collection[str], precision: torch.dtype
) -> list[Tensor]:
    """Standard deviations `[D]` of the output features over samples and positions of some batches."""
    device, sums = next(model.parameters()).device, list[Tensor]()
    with torch.no_grad(), evaluating(model), autocast(device, precision):
        for inputs, _ in batches:
            tensors = output_tensors(run(model, to_device(inputs, device)), names)
            rows = [features_last(values).flatten(0, -2).double() for values in tensors]
            own = [torch.stack([torch.ones_like(row[0]) * len(row), row.sum(0), row.square().sum(0)]) for row in rows]
            sums = [total + new for total, new in zip(sums, own, strict=True)] if sums else own
    scales = []
    for count, total, squares in sums:
        scale = (squares / count - (total / count).square()).clamp(min=0).sqrt()
        least = LEAST_SCALE * (squares / count).mean().sqrt()
        scales.append(scale.clamp(min=least.clamp(min=torch.finfo(torch.float64).tiny)))
    return scales


def on_given_labels(loss: Loss) -> Loss:
    """The same loss on the labels of the data, for `SampledLabels` too. Raises `ValueError` for features."""
    if isinstance(loss, SampledTargets) and not isinstance(loss, SampledLabels):
        raise ValueError("features have no labels: choose a search that compares outputs, or cors_fisher")
    return loss.loss if isinstance(loss, SampledLabels) else loss


def on_drawn_targets(loss: Loss, seed: int) -> SampledTargets:
    return loss.drawn(seed) if isinstance(loss, SampledTargets) else SampledLabels(loss, seed)


def kl_divergence(original: Tensor, changed: Tensor) -> Tensor:
    """Σ over samples of KL(original ‖ changed) over the classes in the last axis of the logits, in float64.

    A single logit is that of one of two classes. Chunks are compared: a language model's logits take gigabytes.
    """
    parts = zip(in_chunks(original), in_chunks(changed), strict=True)
    if not changed.requires_grad:
        return torch.stack([_kl_divergence(*part) for part in parts]).sum()
    chunks = (checkpoint(_kl_divergence, *part, use_reentrant=False) for part in parts)  # otherwise all would be kept
    return torch.stack(list(chunks)).sum()


def binary_kl_divergence(original: Tensor, changed: Tensor) -> Tensor:
    """Σ over samples and logits of KL(original ‖ changed) over yes and no, of which each logit is one."""
    return kl_divergence(original.reshape(-1, 1), changed.reshape(-1, 1))


DIVERGENCES = (kl_divergence, binary_kl_divergence)


def in_chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """Divide logits `[..., C]` into rows `[n, C]` of about `CHUNK` values; a single one becomes that of two classes."""
    if is_one(logits):
        logits = F.pad(logits.reshape(-1, 1), (1, 0))
    num_classes = logits.shape[-1]
    return logits.reshape(-1, num_classes).split(max(1, CHUNK // num_classes))


def _kl_divergence(original: Tensor, changed: Tensor) -> Tensor:
    log_original, log_changed = (logits.double().log_softmax(dim=-1) for logits in (original, changed))
    return F.kl_div(log_changed, log_original, reduction="sum", log_target=True)


class SquaredError:
    """Σ over samples of ‖changed - original‖² / ‖original‖² of the outputs, in float64.

    If the original's are all zero, it is 1, or 0 if the changed ones are zero too. It is averaged over the tensors of
    the outputs, each `[N, ...]`, or over those with these `names`. With a `scale`, errors are relative to its square.
    """

    def __init__(self, names: Collection[str] = (), scale: float | None = None):
        self.names, self.scale = tuple(names), scale
        self.__qualname__ = ", ".join(["squared_error", *self.names, *([] if scale is None else [f"{scale:.9g}"])])

    def __call__(self, original: Any, changed: Any) -> Tensor:
        pairs = zip(output_tensors(original, self.names), output_tensors(changed, self.names), strict=True)
        if self.scale is not None:
            errors = [((after.double() - before.double()) / self.scale).square().sum() for before, after in pairs]
        else:
            errors = [_relative_error(*(each.double().reshape(len(each), -1) for each in pair)) for pair in pairs]
        return torch.stack(errors).mean()


def _relative_error(original: Tensor, changed: Tensor) -> Tensor:
    errors, sizes = (changed - original).square().sum(dim=1), original.square().sum(dim=1)
    return (errors / at_least_tiny(sizes.where(sizes > 0, errors.detach()))).sum()


squared_error = SquaredError()


def output_tensors(outputs: Any, names: Collection[str] = ()) -> list[Tensor]:
    """Find the tensors of real numbers among outputs, or those with these names. Raises `ValueError` without any."""
    if names:
        known = list(outputs) if isinstance(outputs, Mapping) else []
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no output is called {', '.join(unknown)}: there are {', '.join(known) or 'no names'}")
        outputs = [outputs[name] for name in names]
    found = [tensor for tensor in tensors_in(outputs) if tensor.ndim and tensor.is_floating_point()]
    if not found:
        raise ValueError(f"there is no tensor of real numbers, of samples, in outputs that are {described(outputs)}")
    return found


def default_loss(
    kind: OutputKind | None,
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]] | None,
    targets: Any,
    outputs: Any,
    precision: torch.dtype,
) -> Loss:
    """`loss_of_labels`, with labels drawn from the network if there are none; squared errors of features."""
    if kind not in (None, "classes"):
        names = kind if isinstance(kind, tuple) else ()
        return SampledFeatures(scales_of(model, batches or (), names, precision), names)
    loss = loss_of_labels(outputs, targets, problem_of(model))
    if loss is not summed_cross_entropy:
        log.info("by its outputs, the loss of %s is %s", type(model).__name__, name_of(loss, "loss"))
    return loss if targets is not None or batches is None else SampledLabels(loss)


def error_of(loss: Loss, model: nn.Module, batches: Iterable[Any] | None, precision: torch.dtype) -> OutputError:
    """The distance between outputs that suits a loss.

    Of classes it is the KL divergence, that of each if several may hold; of one value with labels the squared error
    relative to the value's variance over the data; of features and for other losses the relative squared error.
    """
    if isinstance(loss, SampledFeatures):
        return SquaredError(loss.names)
    loss = on_given_labels(loss)
    if loss is summed_squared_error:
        (scale,) = scales_of(model, batches or (), (), precision)
        return SquaredError(scale=scale.item()) if scale.numel() == 1 else squared_error
    if loss is summed_binary_cross_entropy:
        return binary_kl_divergence
    return kl_divergence if loss is summed_cross_entropy else squared_error
