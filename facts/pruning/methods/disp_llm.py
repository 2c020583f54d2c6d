"""DISP-LLM: dimension-independent pruning, for vision transformers (Gao et al., 2024)."""

import math

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.modules.hypernetwork import seeded_hypernetwork
from facts.modules.modes import frozen
from facts.pruning.base import Pruner, PruningProblem, removal_order
from facts.pruning.gates import draw, gate_widths, gated, indexed, remaining_weights
from facts.pruning.vit import check_vit
from facts.utils.options import Count, NotNegative, Positive, Seed, options
from facts.utils.progress import with_progress


@options
class DISP(Pruner):
    """Each block reads and writes its own selection of features, learned by a hypernetwork; the weights stay fixed.

    The gates (input and output of attention and MLP, and the hidden units) are drawn from a straight-through
    Gumbel-sigmoid at `temperature`; `offset` opens them at first. The loss is the task's plus `penalty` |log(share /
    target)|, where the share is what remains of the blocks' matrices. After `num_steps` batches, the features with the
    smallest logits of all gates are removed. All defaults except `num_steps` come from the published code.
    """

    num_steps: Count = 10_000
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.05
    penalty: Positive = 16.0
    temperature: Positive = 0.4
    offset: float = 3.0
    seed: Seed = 0

    def narrowed(self, problem: PruningProblem, model: nn.Module) -> nn.Module:
        logits = self._train(problem, check_vit(model))
        orders = removal_order(dict(enumerate(logits))).values()
        most = sum(map(len, logits)) - len(logits)
        return problem.first_fit(lambda amount: indexed(model, [order >= amount for order in orders]), most)

    def _train(self, problem: PruningProblem, model: VisionTransformer) -> list[Tensor]:
        """Train the hypernetwork; return the logits of the gates' features."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(self.seed)
        masks = [torch.ones(width, device=device) for width in gate_widths(model)]
        network = seeded_hypernetwork(gate_widths(model), self.seed).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        dense = remaining_weights(model, masks)
        target = target_share(problem, int(dense))
        with frozen(model), gated(model, masks):
            for _, batch in zip(with_progress(range(self.num_steps), "DISP"), problem.endless(), strict=False):
                masks[:] = [draw(logits, self.offset, self.temperature, generator) for logits in network()]
                share = remaining_weights(model, masks) / dense
                distance = (share.clamp(min=1e-6).log() - math.log(target)).abs()
                loss = problem.mean_loss(model, batch) + self.penalty * distance
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return network()


def target_share(problem: PruningProblem, num_weights: int) -> float:
    """Share of the blocks' matrices, `num_weights` in all, that may remain. Raises `ValueError` if none may remain."""
    cost = num_weights * (2 * problem.num_tokens if problem.cost == "flops" else 1)
    if cost <= problem.dense - problem.budget:
        raise ValueError(
            f"DISP prunes the blocks' matrices, which take {cost} of {problem.dense} {problem.cost}; use a ratio above "
            f"{1 - cost / problem.dense:.3f}"
        )
    return 1 - (problem.dense - problem.budget) / cost
