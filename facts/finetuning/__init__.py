"""What a compressed network lost is taught to it again by the network that it came from."""

from facts.finetuning.recipe import Finetuning
from facts.finetuning.stages import Stages, train_in_stages
from facts.finetuning.training import Outcome, finetune

__all__ = ["Finetuning", "Outcome", "Stages", "finetune", "train_in_stages"]
