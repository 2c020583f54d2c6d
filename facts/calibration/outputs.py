"""Kinds of outputs, class logits or features; checks of a network and its data; and distances between outputs."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.calibration.data import Batch, Data
from facts.cost.probe import Probe
from facts.modules.linear_calls import stand_in
from facts.modules.networks import (
    autocast,
    evaluating,
    is_encoder,
    is_transformers,
    precision_of,
    problem_of,
    reads_tokens,
    run,
)
from facts.moments.losses import (
    DECLARED,
    DIVERGENCES,
    NOTHING,
    NUM_SAMPLES,
    Loss,
    OutputError,
    OutputKind,
    SampledTargets,
    SquaredError,
    binary_kl_divergence,
    default_loss,
    error_of,
    in_chunks,
    loss_of_labels,
    output_tensors,
    refuse_unfit_labels,
    squared_error,
    summed_cross_entropy,
)
from facts.utils.batches import (
    batch_size,
    described,
    first_sample,
    has_row_per_sample,
    in_parts,
    reading,
    to_device,
)
from facts.utils.numerics import mean_and_error
from facts.utils.options import first_line

log = logging.getLogger(__name__)

TOO_FAR = 0.2  # a share; a ViT-Tiny lost 14 points of accuracy at a share of 0.13, and 41 points at 0.38
ENOUGH = 8  # samples; with fewer the standard error is itself a guess
LITTLE = 1e-3  # nats per sample: an untrained network's outputs held 3e-4
LEAST_INFORMATION = 1e-9  # nats per sample: a hundred times what rounding logits to float32 adds


def output_kind(model: nn.Module, probe: Probe) -> OutputKind:
    """Decide: class logits if `num_classes` is above one, or, without it, if transformers or a linear layer makes them.

    Logits are a tensor `[N, C]` or `[N, T, C]` with more than one class. All other outputs are features.
    """
    if (problem := problem_of(model)) in DECLARED:
        return "features" if problem == "regression" else "classes"
    num_classes, outputs = getattr(model, "num_classes", None), probe.outputs
    if isinstance(num_classes, int):
        return "classes" if num_classes > 1 else "features"
    by_classifier = is_transformers(model) or probe.makers
    are_logits = isinstance(outputs, Tensor) and outputs.ndim in (2, 3) and outputs.shape[-1] > 1 and by_classifier
    return "classes" if are_logits else "features"


def loss_and_error(
    model: nn.Module,
    probe: Probe,
    data: Data | None,
    few: Data | None,
    loss: Loss | None,
    output_error: OutputError | None,
    outputs: Any,
) -> tuple[Any, Loss, OutputError]:
    """How outputs are read (None, `classes`, `features`, or features by name), their loss, and their distance.

    Each that is given stays. Raises `ValueError` if they do not suit the outputs or the labels. The scales of features
    are those of a `few` samples.
    """
    (inputs, targets), kind = (data and data.first) or (None, None), outputs
    own_loss = None if isinstance(loss, SampledTargets) else loss
    if outputs not in (None, "classes", "features"):
        kind = (outputs,) if isinstance(outputs, str) else tuple(outputs or ())
    elif outputs is None and loss is None and inputs is not None and (targets is None or is_encoder(model)):
        kind = output_kind(model, probe)  # labels say nothing about features
        log.info("the outputs of %s are read as %s", type(model).__name__, kind)
    loss = loss or default_loss(kind, model, few, targets, probe.outputs, probe.precision)
    output_error = output_error or error_of(loss, model, few, probe.precision)
    if data is not None:
        if loss is summed_cross_entropy:
            refuse_ignored_labels(data, probe.outputs)
        refuse_unfit_functions(model, inputs, probe.outputs, targets, own_loss, output_error)
    return kind, loss, output_error


def default_error(model: nn.Module, data: Data) -> OutputError:
    """Choose the distance between outputs as `facts.prepare` does without a loss, from the first batch."""
    inputs, targets = data.first or (None, None)
    precision = precision_of(model)
    probe = Probe.of(model, inputs, precision=precision)
    has_labels = targets is not None and not is_encoder(model)  # labels say nothing about features
    if not has_labels and output_kind(model, probe) == "features":
        return squared_error
    loss = loss_of_labels(probe.outputs, targets, problem_of(model))
    return error_of(loss, model, data.few_samples(NUM_SAMPLES), precision)


def refuse_unfit_network(model: nn.Module) -> None:
    """Raises `ValueError` for anything but a network with floating-point weights that can have gradients."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got a {kind}")
    if scripted := [type(each).__name__ for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]:
        raise ValueError(f"{scripted[0]} is TorchScript: give the module that it was traced or scripted from")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError(f"{kind} has lazy layers without weights yet: run it once, on one batch")
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        made = "nothing made under torch.inference_mode() has gradients"
        raise ValueError(f"{made}: build the network, and call this, outside of it (torch.no_grad() is fine)")
    if any(parameter.is_mps for parameter in model.parameters()):
        raise ValueError("an Apple GPU (MPS) cannot compute in float64, which decides ranks: use the CPU, model.cpu()")
    advice = "if the network is quantised or sharded, compress it first and quantise the result"
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter.data):  # torchao's, DTensor
            raise ValueError(f"{name} of {kind} is a {type(parameter.data).__name__}, no plain tensor: {advice}")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(f"{kind} has no weights in floating point: {advice}")


def refuse_unfit_functions(
    model: nn.Module, inputs: Any, outputs: Any, targets: Any, loss: Loss | None, output_error: OutputError
) -> None:
    """Raises `ValueError` if `output_error` cannot compare outputs of the first sample, or if `loss` is a mean."""
    with torch.no_grad():
        try:
            itself = float(output_error(outputs, outputs))
        except Exception as error:  # from anybody's code, on any input
            raise ValueError(
                f"{getattr(output_error, '__name__', 'output_error')} cannot compare the outputs of "
                f"{type(model).__name__}, {described(outputs)} ({first_line(error)}): give facts.prepare(..., "
                "output_error=), a function of the original's and the changed outputs, summed over samples"
            ) from error
        if not math.isfinite(itself):
            unfit = any(isinstance(leaf, Tensor) and not leaf.isfinite().all() for leaf in tree_leaves(inputs))
            cause = "the inputs hold NaN or infinity, leave such samples out" if unfit else "check that they are finite"
            raise ValueError(f"the first outputs have an error of {itself} from themselves: {cause}")
        if loss and isinstance(targets, Tensor) and isinstance(outputs, Tensor) and outputs.shape[:1] == (1,):
            target = to_device(targets[:1], outputs.device)
            losses = [loss(torch.cat([outputs] * n), torch.cat([target] * n)) for n in (1, 2)]
            if not all(isinstance(each, Tensor) and each.numel() == 1 for each in losses):
                raise ValueError(
                    f"the loss must be one number in a tensor, the samples' sum: got {described(losses[1])}"
                )
            once, twice = (each.item() for each in losses)
            if math.isfinite(once) and not math.isclose(twice, 2 * once, rel_tol=0.1):
                raise ValueError(
                    f"the loss must be a sum over samples: it is {once:.4g} for one, and {twice:.4g} for the same one "
                    'twice. Give reduction="sum" instead of a mean, or leave loss out if it is cross-entropy'
                )


def refuse_ignored_labels(data: Data, outputs: Any) -> None:
    """Raises `ValueError` if cross-entropy ignores all labels of some batches; warns if it does so for most samples.

    Loaders are read until a label counts; only lists are read to the end, and their labels compared with `outputs`.
    """
    counted, num_samples = 0, 0
    for inputs, targets in data:
        if not isinstance(targets, Tensor) or targets.is_floating_point() or not targets.ndim:
            return
        if len(targets) != batch_size(inputs):
            raise ValueError(f"a batch of {batch_size(inputs)} samples has {len(targets)} labels: give one for each")
        counted += int((targets != NOTHING).reshape(len(targets), -1).any(dim=1).sum())
        num_samples += len(targets)
        if isinstance(outputs, Tensor) and outputs.ndim == 2:
            refuse_unfit_labels(targets, outputs.shape[-1])
        if counted and not data.in_memory:
            return
    if not counted:
        raise ValueError(
            f"none of the {num_samples} samples has a label that counts, all are {NOTHING}, which is "
            "ignored: give labels from 0 on, or inputs alone, for which labels are drawn from the network"
        )
    if counted < num_samples / 2:
        log.warning("only %d of %d samples have a label that counts (not %d)", counted, num_samples, NOTHING)


def refuse_not_finite(original: Any, changed: Any) -> None:
    """Raises `ValueError` for outputs of a changed network that are not finite where the original's are."""
    for expected, found in zip(tree_leaves(original), tree_leaves(changed), strict=True):
        if isinstance(expected, Tensor) and (expected.isfinite() & ~found.isfinite()).any():
            raise ValueError(
                "the compressed network gives NaN or infinity where the original's outputs are finite: try "
                'form="plain", or float32 if the network or precision is half'
            )


def refuse_unreadable(model: nn.Module, data: Data, precision: torch.dtype, read: Any = None) -> None:
    """Raises `ValueError` if the network cannot read the first batch, or in a list one of another shape but texts.

    Inputs of the shapes of `read` are known to be read.
    """
    device, tried, model = next(model.parameters()).device, {described(read)}, stand_in(model)
    has_shapes = data.in_memory and not reads_tokens(model)
    with torch.no_grad(), evaluating(model), autocast(device, precision):
        for inputs, _ in data if has_shapes else data[:1]:
            sample = first_sample(inputs) if has_row_per_sample(inputs) else inputs
            if (kind := described(sample)) not in tried:
                tried.add(kind)
                with reading(model, inputs, "the first sample"):
                    run(model, tree_map_only(Tensor, torch.clone, to_device(sample, device)))


@dataclass(frozen=True)
class Distance:
    """Mean error of the outputs over `num_samples`, and the `share` of the original outputs' information that is lost.

    A share of 1 is the error of constant outputs (KL divergence) or zeros (squared error). It is None for other
    errors, and if the original's outputs hardly depend on its inputs. `standard_error` is None for a single sample.
    """

    mean: float
    share: float | None
    num_samples: int
    standard_error: float | None = None

    @property
    def hardly_varies(self) -> bool:
        """Whether the original's outputs hold so little information that losing it means nothing."""
        return self.share is not None and self.mean < LITTLE * self.share

    @property
    def is_too_far(self) -> bool:
        """Whether the budget is too small for the network, as far as the distance shows."""
        is_far = self.share is not None and not self.share <= TOO_FAR  # also true for NaN
        return is_far and self.num_samples >= ENOUGH and not self.hardly_varies

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        on, far = f"on {self.num_samples:,} held-out samples", f"mean distance {self.mean:.4g}{error}"
        few = "; too few samples to tell" if self.num_samples < ENOUGH else ""
        few += "; the original's own outputs hardly vary: is it trained?" if self.hardly_varies else ""
        if self.share is None:
            return f"{on}, the outputs have a {far} from the original's{few}"
        if not self.share <= 1:  # also true for NaN
            return f"{on}, the outputs are further from the original's than constant ones ({far}){few}"
        return f"{on}, the outputs lose {self.share:.1%} of the original's information ({far}){few}"


def distance(
    original: nn.Module,
    changed: nn.Module,
    batches: Iterable[Batch],
    output_error: OutputError,
    precision: torch.dtype,
    num_parts: int = 1,
    originals: list[Any] | None = None,
) -> Distance | None:
    """Compare the outputs of two networks on batches, shared by all processes; None if there are no batches.

    `precision` is the autocast type; each batch is divided into `num_parts`. `originals` are the original's outputs, if
    an earlier call has computed them; an empty list is filled. Raises `ValueError` for an error that is not finite.
    """
    original, changed = stand_in(original), stand_in(changed)
    device, information, num_zero = next(changed.parameters()).device, _Information(), 0
    own: list[tuple[float, int]] = []  # error and number of samples: one each if outputs can be divided
    with torch.inference_mode(), evaluating(original), evaluating(changed), autocast(device, precision):
        parts = (part for inputs, _ in batches for part, _ in in_parts((inputs, None), num_parts))
        for number, part in enumerate(parts):
            part = to_device(part, device)
            with reading(original, part):
                if originals is not None and number == len(originals):
                    originals.append(run(original, part))
                expected = run(original, part) if originals is None else originals[number]
            found = run(changed, part)
            refuse_not_finite(expected, found)
            samples = list(_by_sample((expected, found), batch_size(part)))
            own += [(output_error(*outputs).item(), size) for outputs, size in samples]
            if output_error in DIVERGENCES:
                of_each = output_error is binary_kl_divergence
                information.add((_as_pairs(expected),) if of_each else in_chunks(expected))
            elif isinstance(output_error, SquaredError):
                kept = (output_tensors(outputs[0], output_error.names) for outputs, _ in samples)
                num_zero += sum(not any(each.any() for each in tensors) for tensors in kept)
    errors, sizes = torch.tensor(own, dtype=torch.float64).reshape(-1, 2).T
    if not len(sizes):
        return None
    unknown = errors.isnan()  # as the original's outputs are, or they would have been refused
    if unknown.any() and not unknown.all():
        log.warning("%d of %d samples, whose outputs are NaN in the original, do not count", unknown.sum(), len(sizes))
        errors, sizes = errors[~unknown], sizes[~unknown]
    if num_zero:
        log.warning("outputs of %d samples are all zeros: their error is 1 if they change, or else 0", num_zero)
    (mean, standard_error), num_samples = mean_and_error(errors, sizes), int(sizes.sum())
    share = mean if isinstance(output_error, SquaredError) else None
    if output_error in DIVERGENCES and (known := information.total()) > LEAST_INFORMATION * num_samples:
        share = errors.sum().item() / known
    if not math.isfinite(mean):
        raise ValueError(f"the error of the outputs of {num_samples} samples is {mean}: check that they are finite")
    return Distance(mean, share, num_samples, standard_error)


def _by_sample(outputs: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Divide outputs by sample if all tensors have a row for each of `size` samples; otherwise keep them whole."""
    if all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf in tree_leaves(outputs)):
        for row in range(size):
            yield tree_map_only(Tensor, lambda tensor: tensor[row : row + 1], outputs), 1  # noqa: B023
    else:
        yield outputs, size


def _as_pairs(logits: Tensor) -> Tensor:
    """Logits of yes `[N, ...]` as those of no and yes `[N, C, 2]`."""
    return F.pad(logits.reshape(len(logits), -1, 1), (1, 0))


class _Information:
    """Information in class logits: the sum over rows of their KL divergence from the mean distribution of all rows."""

    def __init__(self) -> None:
        self.distributions: Tensor | None = None  # sum over all rows, `[C]`, or `[C, 2]` of yes and no
        self.known = self.num_rows = 0.0

    def add(self, parts: Iterable[Tensor]) -> None:
        for part in parts:
            logs = part[~part.isnan().flatten(1).any(dim=1)].double().log_softmax(dim=-1)
            total = logs.exp().sum(dim=0).cpu()
            self.distributions = total if self.distributions is None else self.distributions + total
            self.known += (logs.exp() * logs).sum().item()
            self.num_rows += len(logs)

    def total(self) -> float:
        assert self.distributions is not None
        mean = self.distributions / self.num_rows
        return (self.known - self.num_rows * torch.special.xlogy(mean, mean).sum()).item()
