"""Finetuning of a compressed network by distillation from the original."""

from facts.finetuning.recipe import Finetuning
from facts.finetuning.stages import Stages, train_in_stages
from facts.finetuning.training import Outcome, finetune

__all__ = ["Finetuning", "Outcome", "Stages", "finetune", "train_in_stages"]
