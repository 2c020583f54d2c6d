"""Finetuning of a compressed network by distillation from the original, with or without labels."""

from facts.finetuning.recipe import Finetuning
from facts.finetuning.recovery import Recovery, recover
from facts.finetuning.training import Outcome, Stages, finetune, train_in_stages

__all__ = ["Finetuning", "Outcome", "Recovery", "Stages", "finetune", "recover", "train_in_stages"]
