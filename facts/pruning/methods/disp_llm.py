"""DISP-LLM: dimension-independent pruning, for vision transformers (Gao et al., 2024)."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from facts.modules.networks import frozen, hooked
from facts.pruning.base import Pruner, PruningProblem, check_vit, removal_order, slice_parameter, update_sizes
from facts.utils.options import Count, NotNegative, Positive, Seed, options
from facts.utils.progress import with_progress

PLACES = ("attn_in", "attn_out", "mlp_in", "mlp_hidden", "mlp_out")
Gate = tuple[int, str]  # number of its block, and place
HIDDEN_SIZE = 32  # as in the published implementations


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
        orders = removal_order(logits)
        most = sum(map(len, logits.values())) - len(logits)

        def pruned(amount: int) -> nn.Module:
            return indexed(model, {gate: order >= amount for gate, order in orders.items()})

        return problem.first_fit(pruned, most)

    def _train(self, problem: PruningProblem, model: VisionTransformer) -> dict[Gate, Tensor]:
        """Train the hypernetwork; return the logits of the gates' features."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(self.seed)
        masks = {gate: torch.ones(width, device=device) for gate, width in gate_widths(model).items()}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            network = HyperNetwork(gate_widths(model)).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        dense = remaining_weights(model, masks)
        target = target_share(problem, int(dense))
        with frozen(model), gated(model, masks):
            for _, batch in zip(with_progress(range(self.num_steps), "DISP"), problem.endless(), strict=False):
                for gate, logits in network().items():
                    masks[gate] = draw(logits, self.offset, self.temperature, generator)
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


class IndexedBlock(nn.Module):
    """`block` reduced to the features `kept` at each of `PLACES`; the residual stream and norms keep their width."""

    def __init__(self, block: Block, kept: Mapping[str, Tensor]):
        super().__init__()
        block = copy.deepcopy(block)
        self.norm1, self.attn, self.drop_path1 = block.norm1, block.attn, block.drop_path1
        self.norm2, self.mlp, self.drop_path2 = block.norm2, block.mlp, block.drop_path2
        for layer, place in ((block.attn.qkv, "attn_in"), (block.mlp.fc1, "mlp_in"), (block.mlp.fc2, "mlp_hidden")):
            slice_parameter(layer, "weight", 1, kept[place])
        for layer, place in ((block.attn.proj, "attn_out"), (block.mlp.fc1, "mlp_hidden"), (block.mlp.fc2, "mlp_out")):
            slice_parameter(layer, "weight", 0, kept[place])
            slice_parameter(layer, "bias", 0, kept[place])
        update_sizes(self)
        for place in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            self.register_buffer(place, kept[place])

    def forward(self, x: Tensor) -> Tensor:
        attended = self.drop_path1(self.attn(self.norm1(x)[..., self.attn_in]))
        x = x.index_add(-1, self.attn_out, attended.to(x.dtype))
        processed = self.drop_path2(self.mlp(self.norm2(x)[..., self.mlp_in]))
        return x.index_add(-1, self.mlp_out, processed.to(x.dtype))


def indexed(model: nn.Module, masks: Mapping[Gate, Tensor]) -> nn.Module:
    """Copy a vision transformer; each block keeps the features in the masks of its gates."""
    copied = copy.deepcopy(model)
    for number, block in enumerate(model.blocks):
        kept = {place: masks[number, place].nonzero().squeeze(1) for place in PLACES}
        copied.blocks[number] = IndexedBlock(block, kept)
    return copied


def gate_widths(model: VisionTransformer) -> dict[Gate, int]:
    """Widths of the gates: hidden units of the MLP, and the embedding's features elsewhere."""
    widths = dict.fromkeys(itertools.product(range(len(model.blocks)), PLACES), model.embed_dim)
    return widths | {(number, "mlp_hidden"): block.mlp.fc1.out_features for number, block in enumerate(model.blocks)}


def remaining_weights(model: VisionTransformer, masks: Mapping[Gate, Tensor]) -> Tensor:
    """Number of entries that the masks leave in the blocks' matrices, as a differentiable tensor."""
    total = masks[0, PLACES[0]].new_zeros(())
    for number, block in enumerate(model.blocks):
        attn_in, attn_out, mlp_in, hidden, mlp_out = (masks[number, place].sum() for place in PLACES)
        total = total + attn_in * block.attn.qkv.out_features + attn_out * block.attn.proj.in_features
        total = total + hidden * (mlp_in + mlp_out)
    return total


@contextmanager
def gated(model: VisionTransformer, masks: Mapping[Gate, Tensor]) -> Iterator[None]:
    """Multiply every gate by its mask within the block; `masks` may be replaced before each pass."""

    def multiply_input(gate: Gate, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict) -> tuple[tuple, dict]:
        return (args[0] * masks[gate], *args[1:]), kwargs

    def multiply_output(gate: Gate, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * masks[gate]

    before, after = [], []
    for number, block in enumerate(model.blocks):
        for place, module in (("attn_in", block.attn), ("mlp_in", block.mlp), ("mlp_hidden", block.mlp.fc2)):
            before.append((module, partial(multiply_input, (number, place))))
        for place, module in (("attn_out", block.attn), ("mlp_out", block.mlp)):
            after.append((module, partial(multiply_output, (number, place))))
    with hooked(after, before):
        yield


def draw(logits: Tensor, offset: float, temperature: float, generator: torch.Generator) -> Tensor:
    """Draw a mask of zeros and ones with the gradient of a Gumbel-sigmoid (straight through)."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(logits)
    soft = ((logits + offset + uniform.logit()) / temperature).sigmoid()
    return (soft > 0.5).to(soft) + soft - soft.detach()


class HyperNetwork(nn.Module):
    """Logits of the gates with these `widths`, computed from fixed random inputs by a bidirectional GRU."""

    def __init__(self, widths: Mapping[Gate, int]):
        super().__init__()
        self.gates = tuple(widths)
        self.register_buffer("inputs", torch.randn(len(widths), HIDDEN_SIZE))
        self.gru = nn.GRU(HIDDEN_SIZE, 2 * HIDDEN_SIZE, bidirectional=True)
        self.norm = nn.LayerNorm(4 * HIDDEN_SIZE)
        self.heads = nn.ModuleList(nn.Linear(4 * HIDDEN_SIZE, width, bias=False) for width in widths.values())

    def forward(self) -> dict[Gate, Tensor]:
        states = F.gelu(self.norm(self.gru(self.inputs)[0]))
        return {gate: head(state) for gate, head, state in zip(self.gates, self.heads, states, strict=True)}
