"""The type of the steps of recovery."""

import pytest
import torch

from facts.finetuning import Recovery
from facts.finetuning.recovery import fast_precision
from tests.networks import make_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_processor_with_instructions_for_bfloat16_uses_them(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert fast_precision(CPU) == expected
    assert Recovery().finetuning(make_model(torch.float32)).precision == expected
    assert Recovery(precision="float32").finetuning(make_model(torch.float32)).precision == "float32"
    assert Recovery(precision="float32").finetuning(make_model(torch.float16)).precision == "float16"


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_uses_bfloat16_if_it_need_not_emulate_it(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported or including_emulation)
    assert fast_precision(GPU) == ("bfloat16" if supported else "float32")


def test_an_old_pytorch_says_nothing_about_the_processor(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert fast_precision(CPU) == "float32"
