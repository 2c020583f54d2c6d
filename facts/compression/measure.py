"""Measurement of a network on its target device."""

from dataclasses import replace

import torch
from torch import nn

from facts.calibration.prepare import Execution
from facts.calibration.prepare import prepare
from facts.parts.layers import LayerNames
from facts.compression.compress import default_form
from facts.cost.count import meta_input
from facts.cost.device_times import DeviceTimes, LayerTimes, precision_name
from facts.modules.forms import FORMS, FormName, refuse_unknown_form
from facts.modules.networks import noise
from facts.utils.processors import device_name


def measure(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    batch_size: int = 1,
    name: str | None = None,
    form: FormName | None = None,
    layers: LayerNames = None,
    precision: torch.dtype = torch.float32,
    num_turns: int = 7,
) -> DeviceTimes:
    """Measure the latency of a network on this device, on noise: dense, and with its layers at several ranks.

    `facts.Budget` takes the result, or its file, as `device_times`. `input_shape` is one image `[C, H, W]`, or any
    shape with its batch axis; weights do not matter. `form` and `precision` must be the same in `facts.compress`; the
    time of a layer that was not measured is predicted from its size. Raises `ValueError` for arguments out of range.
    """
    if batch_size < 1 or num_turns < 1:
        raise ValueError(f"batch_size and num_turns must be at least 1, got {batch_size} and {num_turns}")
    form = form or default_form(model, precision)
    refuse_unknown_form(form)
    prepared = prepare(model, layers=layers, execution=Execution(precision), input_shape=input_shape)
    device = next(model.parameters()).device
    batch = noise(model, (batch_size, *meta_input(model, input_shape).shape[1:]), device)
    table = replace(prepared, first_inputs=batch).latency_table(num_turns, FORMS[form])
    return DeviceTimes(
        device=device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        precision=precision_name(model, precision),
        form=form,
        network=name or type(model).__name__,
        flops=prepared.cost.flops,
        params=prepared.cost.params,
        batch_size=batch_size,
        dense=table.dense,
        layers=[
            LayerTimes(
                **shape._asdict(), dense=times[None], by_rank={rank: times[rank] for rank in times if rank is not None}
            )
            for shape, times in table.times.items()
        ],
    )
