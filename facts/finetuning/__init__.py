"""Finetuning of a compressed network by distillation from the original, with or without labels."""

from facts.finetuning.recipe import Finetuning
from facts.finetuning.recovery import Recovery, recover
from facts.finetuning.training import Outcome, finetune

__all__ = ["Finetuning", "Outcome", "Recovery", "finetune", "recover"]
