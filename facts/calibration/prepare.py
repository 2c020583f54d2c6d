"""`facts.prepare`: probe a network, select its layers, find its parts, and bind its data and loss to it."""

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.calibration.data import NO_DATA, Data
from facts.calibration.outputs import loss_and_error, refuse_unfit_network, refuse_unreadable
from facts.calibration.prepared_model import DEFAULT_EXECUTION, Execution, PreparedModel
from facts.cost.count import meta_input
from facts.cost.probe import Probe
from facts.modules.forms import FormName, default_form, form_named
from facts.modules.linear_calls import unwrapped
from facts.modules.networks import autocast, frozen, hooked, noise, run
from facts.moments.losses import NUM_SAMPLES, Loss, OutputError, SampledTargets
from facts.parts import find, kinds_of, rewritten
from facts.parts.layers import EXCLUDED_NAMES, NOT_REACHED, LayerNames, Selection, is_pattern, select_layers
from facts.utils.batches import first_sample, has_row_per_sample, tensors_in, to_device
from facts.utils.progress import stage

log = logging.getLogger(__name__)


@stage("preparation")
def prepare(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    layers: LayerNames = None,
    excluded_names: Iterable[str] = EXCLUDED_NAMES,
    loss: Loss | None = None,
    output_error: OutputError | None = None,
    outputs: str | Collection[str] | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    input_shape: tuple[int, ...] | None = None,
    parts: str | Collection[str] = "layers",
    form: FormName | None = None,
    protected: int | None = None,
) -> PreparedModel:
    """Select the layers of a network, and bind its data, loss and settings to it.

    `facts.compress` takes the result in place of the network; most arguments are the same. `held_out` are data on which
    the result is compared with the original (default: a tenth of `data`, at least 32 samples but at most a quarter;
    moments and searches do not see them). A layer whose name contains one of `excluded_names` is left alone
    unless `layers` names it; a pattern such as `vision_tower.*` takes those worth compressing. `parts` are what is
    truncated: `layers`, `units`, which are attention's products and hidden units (layers in no unit stay layers),
    `tokens`, another name in `facts.parts.KINDS`, or several of them. Low-rank layers are stored in a `form` (default:
    `default_form`). FLOPs are counted for `input_shape`, one image `[C, H, W]` or a shape with its batch axis (default:
    that of the data). The first `protected` tokens are never merged (default: those that do not depend on the data,
    wherever they stand).

    `outputs` says how outputs are read if there is no loss of your own: as logits of `classes`; as `features`, all
    tensors of the outputs; or as features, one or several tensors by name. By default they are classes if there
    are labels and timm's `num_classes` is not 0, or if the network says so (`facts.calibration.outputs`). One output
    with labels has squared errors if they are floats, and binary cross-entropy if they are integers or booleans.
    Features are compared by their relative squared error, and the Fisher is their Gauss-Newton matrix. Raises
    `ValueError` for unknown layers and outputs.
    """
    parts = parts if isinstance(parts, str) else ",".join(parts)
    _refuse_unfit_arguments(model, data, parts, loss, outputs)
    _refuse_unfit_settings(execution, protected, input_shape)
    model, precision = unwrapped(model), execution.precision
    given, work, compared = _read(model, data, held_out)
    inputs, targets = (given and given.first) or (None, None)
    example = _example(model, inputs, input_shape)
    shape_alone = inputs is None and example is not None
    first_inputs = noise(model, example.shape, next(model.parameters()).device) if shape_alone else inputs
    sample = first_inputs if (kinds := kinds_of(parts)) else inputs
    for kind in kinds:
        sample = kind.sample(sample)
    probe = Probe.of(model, sample, example, precision, work or ())
    for each in (given, None if held_out is None else compared):
        if each:
            refuse_unreadable(model, each, precision, probe.sample)
    few, own_loss = work and work.few_samples(NUM_SAMPLES), None if isinstance(loss, SampledTargets) else loss
    kind, loss, output_error = loss_and_error(model, probe, given, few, loss, output_error, outputs)
    selection = select_layers(model, layers, excluded_names=excluded_names, probe=probe)
    may_miss = is_pattern(layers) or (isinstance(layers, str | None) and (own_loss or isinstance(kind, tuple)))
    if may_miss and has_row_per_sample(inputs):
        selection = selection.without(_unused(selection, probe, loss, targets), NOT_REACHED)
    bound_form = form_named(form or default_form(model, precision), precision)
    found, reasons = find(selection, parts, probe, bound_form, protected)
    return PreparedModel(
        model=selection.model,
        rewritten=rewritten(selection.model, found),
        parts=found,
        kinds=parts,
        form=bound_form,
        data=work,
        held_out=compared,
        loss=loss,
        output_error=output_error,
        execution=execution,
        skipped=selection.skipped | reasons,
        flops=probe.flops,
        first_inputs=first_inputs,
        example=None if probe.flops is None else example,
        draws_labels=own_loss is None,
        output_signature=tuple(tensor.detach().bfloat16() for tensor in tensors_in(probe.outputs)),
    )


def _read(
    model: nn.Module, data: Iterable[Any] | None, held_out: Iterable[Any] | None
) -> tuple[Data | None, Data | None, Data]:
    """All samples given, those to work with, and those held out."""
    given = None if data is None else Data.of(data, model)
    if held_out is not None:
        is_none = isinstance(held_out, list | tuple) and not held_out
        return given, given, NO_DATA if is_none else Data.of(held_out, model, "held-out")
    return (None, None, NO_DATA) if given is None else (given, *given.divided())


def _example(model: nn.Module, inputs: Any, input_shape: tuple[int, ...] | None) -> Any:
    """One input on the meta device: of the shape given, or else the first sample of the inputs; None without both."""
    if input_shape:
        return meta_input(model, input_shape)
    if inputs is None or not has_row_per_sample(inputs):
        return None
    return tree_map_only(Tensor, lambda each: each.to("meta"), first_sample(inputs))


def _refuse_unfit_arguments(model: nn.Module, data: object, parts: str, loss: object, outputs: object) -> None:
    """Raise `ValueError` for arguments of `prepare` that exclude each other or are out of range."""
    refuse_unfit_network(model)
    if data is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device, without values: load its weights first")
    kinds_of(parts)
    if loss is not None and not callable(loss):
        raise ValueError(f"loss is a function of the outputs and targets, summed over samples, got {loss!r}")
    if loss is not None and outputs is not None:
        raise ValueError("outputs= says how outputs are read without a loss of your own: give it or loss=, not both")


def _refuse_unfit_settings(execution: object, protected: object, input_shape: object) -> None:
    """Raise `ValueError` for settings of `prepare` of another type or out of range."""
    if not isinstance(execution, Execution):
        raise ValueError(f'execution= takes facts.Execution(cache="folder", ...), got {execution!r}')
    if protected is not None and (not isinstance(protected, int) or protected < 0):
        raise ValueError(f"protected is the number of tokens at the front that stay, got {protected!r}")
    sizes = input_shape if isinstance(input_shape, Sequence) else []
    if input_shape is not None and not (sizes and all(isinstance(size, int) and size > 0 for size in sizes)):
        raise ValueError(f"input_shape is an image's, (3, 224, 224), or one with its batch axis, got {input_shape!r}")


def _unused(selection: Selection, probe: Probe, loss: Loss, targets: Any) -> list[str]:
    """List the selected layers on which the loss of the first sample does not depend, such as an unused pooler."""
    model, marks = selection.model, dict[str, Tensor]()
    device = next(model.parameters()).device

    def mark(name: str, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        marks.setdefault(name, torch.zeros((), device=device, requires_grad=True))
        return output + marks[name].to(output)

    hooks = [(layer, partial(mark, name)) for name, layer in selection.layers.items()]
    with frozen(model), torch.enable_grad(), autocast(device, probe.precision), hooked(hooks):
        value = loss(run(model, probe.sample), to_device(first_sample(targets), device))
        if not value.requires_grad:  # as of a network that computes under torch.no_grad()
            return list(marks)
        grads = torch.autograd.grad(value, list(marks.values()), allow_unused=True)
    return [name for name, grad in zip(marks, grads, strict=True) if grad is None]
