"""Order in which units are removed, whatever group they belong to."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")


def turns_to_go(scores: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """Turn of each unit of each group, from 0: the smallest score first; the largest of each group never."""
    staying = [score.index_fill(0, score.argmax(), float("inf")) for score in scores.values()]
    order = torch.cat(staying).argsort(stable=True)
    turns = torch.empty_like(order)
    turns[order] = torch.arange(len(order), device=order.device)
    return dict(zip(scores, turns.split([len(score) for score in staying]), strict=True))
