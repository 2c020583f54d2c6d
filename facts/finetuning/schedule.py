"""Learning rates over the steps of a training."""

from typing import Any

from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

from facts.finetuning.recipe import Finetuning


def schedule_of(
    recipe: Finetuning, optimizer: Optimizer, total_steps: int, steps_per_epoch: int, initialize: bool = False
) -> Scheduler:
    """The recipe's schedule over so many steps, which rises at first, from the rates at its initialisation."""
    warm_up: dict[str, Any] = {
        "warmup_t": min(recipe.num_warmups, total_steps // 5),
        "warmup_prefix": False,
        "t_in_epochs": False,
        "initialize": initialize,
    }
    match recipe.schedule:
        case "steps":
            decays = [epoch * steps_per_epoch + 1 for epoch in recipe.decay_epochs]  # timm's apply a step early
            return MultiStepLRScheduler(optimizer, decays, decay_rate=0.1, **warm_up)
        case "linear":
            return PolyLRScheduler(optimizer, total_steps, power=1.0, lr_min=recipe.min_learning_rate, **warm_up)
        case "cosine":
            return CosineLRScheduler(optimizer, total_steps, lr_min=recipe.min_learning_rate, **warm_up)
