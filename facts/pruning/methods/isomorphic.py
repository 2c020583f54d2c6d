"""Isomorphic pruning, with torch-pruning's own pruner (Fang et al., 2024)."""

import copy
from functools import partial
from itertools import islice
from typing import Annotated

from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from facts.pruning.base import TOKENS, Pruner, PruningProblem, check_vit, update_sizes
from facts.utils.options import Count, Share, needing, options

STEPS = 1000  # the search for the pruned fraction tries multiples of 1 / STEPS
MOST = 950  # largest multiple: torch-pruning refuses to empty a layer


@options
class Isomorphic(Pruner):
    """The units with the least first-order Taylor importance are removed, ranked within each kind of structure.

    A search finds the fraction that meets the budget. This fraction of the embedding and of all hidden units is pruned,
    `heads` times the fraction of all heads, and `head_dims` times the fraction of every head's dimensions. Widths are
    multiples of `round_to`. Importance comes from the first `num_batches` batches. Defaults are the original script's.
    """

    heads: Share = 1.0
    head_dims: Annotated[float, Field(gt=0, le=1)] = 0.5  # at 0 torch-pruning would prune no heads either
    round_to: Count = 2
    num_batches: Count = 50

    def narrowed(self, problem: PruningProblem, model: nn.Module) -> nn.Module:
        network = check_vit(model).requires_grad_(True)
        with needing("pruning", "isomorphic pruning"):
            import torch_pruning  # noqa: F401 - fails before the work
        for batch in islice(problem.batches, self.num_batches):
            problem.mean_loss(network, batch).backward()
        return problem.first_fit(partial(self._pruned, network, problem.input_shape), MOST)

    def _pruned(self, original: VisionTransformer, input_shape: tuple[int, ...], amount: int) -> VisionTransformer:
        """Prune `amount` of `STEPS` from a copy of a network with gradients."""
        import torch_pruning

        fraction = amount / STEPS
        model = copy.deepcopy(original)
        for parameter, source in zip(model.parameters(), original.parameters(), strict=True):
            parameter.grad = source.grad  # copies have none
        attentions, tokens = [block.attn for block in model.blocks], [getattr(model, name, None) for name in TOKENS]
        pruner = torch_pruning.BasePruner(
            model,
            next(model.parameters()).new_zeros(1, *input_shape[-3:]),
            torch_pruning.importance.GroupTaylorImportance(),
            global_pruning=True,
            isomorphic=True,
            pruning_ratio=fraction,
            pruning_ratio_dict={attention.qkv: self.head_dims * fraction for attention in attentions},
            head_pruning_ratio=self.heads * fraction,
            num_heads={attention.qkv: attention.num_heads for attention in attentions},
            prune_num_heads=True,
            round_to=self.round_to,
            ignored_layers=[getattr(model, name) for name in ("head", "head_dist") if hasattr(model, name)],
            unwrapped_parameters=[(token, token.ndim - 1) for token in tokens if token is not None],
            in_channel_groups={},  # the default is one dictionary for all pruners, which keeps their layers alive
            out_channel_groups={},
        )
        pruner.step()
        for attention in attentions:
            if attention.qkv.out_features < 3 * attention.attn_dim:  # otherwise left whole: no head would remain
                attention.num_heads = pruner.num_heads[attention.qkv]
                attention.attn_dim = attention.proj.in_features
                attention.head_dim = attention.attn_dim // attention.num_heads
                attention.scale = attention.head_dim**-0.5
        update_sizes(model)
        model.zero_grad()
        return model
