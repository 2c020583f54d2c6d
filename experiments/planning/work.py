"""Work of a cell, in forward passes of one sample; a forward and backward pass is worth three.

A part that is not registered here, such as a method of your own, counts as no work.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol, cast

from experiments.methods import LowRank, Pruned, Staged
from experiments.planning.network import Network
from experiments.rivals.refit.memvit import MemViTResidual
from experiments.rivals.search.aafm import AAFMSearch
from experiments.rivals.search.ars import ARSSearch
from experiments.rivals.search.asvd_plus import ASVDPlusSearch
from experiments.rivals.search.dobi_svd import DobiSVDSearch
from experiments.rivals.search.flora import FLORASearch
from facts.analysis import CrossMoments, FisherSimilarity, Throughput, TokenCoupling
from facts.finetuning import Finetuning, Recovery
from facts.finetuning.recovery import NUM_EPOCHS
from facts.pruning.methods.disp_llm import DISP
from facts.pruning.methods.isomorphic import Isomorphic
from facts.pruning.methods.nvit import NViT
from facts.refit.methods.blockwise import Blockwise
from facts.refit.methods.mpifa import MPIFA
from facts.refit.methods.svd_llm import SVDLLMUpdate
from facts.search.methods.asvd import ASVDSearch
from facts.search.methods.comcat import ComCatSearch
from facts.search.methods.cors import CoRS
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.flar import FLARSearch

BACKWARD = 3  # a forward and a backward pass
TAUGHT = 4  # these, and the teacher's forward pass
SUFFIX = 0.5  # of a network, on average, that runs when one layer has changed
FLAR_RANKS = 5  # of a layer that the binary searches meet, at all thresholds together
MIXTURE = 1.6  # of a layer with factors of full rank, in dense layers: 1 + the shorter side over the longer
PROJECTED = 4  # a training pass whose layers' outputs are projected, without gradients of weights
SMALL = 0.5  # of a network, on average, that runs with ranks drawn at random
COMPONENTS = 1.3  # of a layer as all its components, in dense layers, on average over a transformer's block
LAYERS_OF_A_BLOCK = 4  # of a transformer
TIMED_CALLS = 10  # of a network, in each turn
SINGLE = 8  # samples of a batch, in whose time a sample alone runs


class Sizes(Protocol):
    """Numbers of samples of a task."""

    num_calibration: int
    num_sensitivity: int
    num_analysed: tuple[int, int]
    epoch_size: int
    batch_size: int


@dataclass(frozen=True)
class Subject:
    """The sizes of a network and of its task, and the share of its pass that one of its classifier takes, if any."""

    network: Network
    task: Sizes
    classifier_share: float = 0.0


@singledispatch
def passes(part: Any, subject: Subject) -> float:
    """Forward passes of one sample that a part of a cell is worth."""
    return 0.0


@passes.register
def _(part: CoRS | ASVDSearch | AAFMSearch, subject: Subject) -> float:
    return subject.task.num_sensitivity * len(subject.network.layers) * len(part.ratios) * SUFFIX


@passes.register
def _(part: ASVDPlusSearch, subject: Subject) -> float:
    trials = subject.task.num_sensitivity * (1 + part.num_trials * SMALL)
    return passes(ASVDSearch(ratios=part.ratios), subject) + trials


@passes.register
def _(part: FLARSearch, subject: Subject) -> float:
    return subject.task.num_sensitivity * len(subject.network.layers) * FLAR_RANKS * SUFFIX


@passes.register
def _(part: CoRSFisher, subject: Subject) -> float:
    return subject.task.num_sensitivity * BACKWARD if part.profile == "exact" else 0


@passes.register
def _(part: ComCatSearch, subject: Subject) -> float:
    return part.num_epochs * subject.task.num_calibration * BACKWARD * MIXTURE


@passes.register
def _(part: DobiSVDSearch, subject: Subject) -> float:
    """Eigendecompositions not included."""
    return (part.num_epochs + 0.5) * subject.task.num_calibration * PROJECTED


@passes.register
def _(part: FLORASearch, subject: Subject) -> float:
    training = part.num_epochs * subject.task.num_calibration * (1 + BACKWARD * SMALL)
    return training + part.num_generations * subject.task.num_sensitivity * (1 + part.population * SMALL)


@passes.register
def _(part: ARSSearch, subject: Subject) -> float:
    return part.num_epochs * subject.task.num_calibration * BACKWARD * COMPONENTS


@passes.register
def _(part: Blockwise, subject: Subject) -> float:
    """Gradients included, which some estimators do not need."""
    return subject.task.num_calibration * BACKWARD * len(subject.network.layers) / LAYERS_OF_A_BLOCK


@passes.register
def _(part: SVDLLMUpdate, subject: Subject) -> float:
    """Of two networks, as for the next ones."""
    return subject.task.num_calibration * 2 * len(subject.network.layers) / LAYERS_OF_A_BLOCK


@passes.register
def _(part: MPIFA | MemViTResidual, subject: Subject) -> float:
    return subject.task.num_calibration * 2 * len(subject.network.layers)


@passes.register
def _(part: Finetuning, subject: Subject) -> float:
    return part.num_epochs * subject.task.epoch_size * TAUGHT


@passes.register
def _(part: Recovery, subject: Subject) -> float:
    return (part.epochs or NUM_EPOCHS) * subject.task.num_calibration * TAUGHT


@passes.register
def _(part: DISP, subject: Subject) -> float:
    return part.num_steps * subject.task.batch_size * BACKWARD


@passes.register
def _(part: NViT, subject: Subject) -> float:
    return part.num_steps * part.steps_between * subject.task.batch_size * BACKWARD


@passes.register
def _(part: Isomorphic, subject: Subject) -> float:
    return part.num_batches * subject.task.batch_size * BACKWARD


@passes.register
def _(part: TokenCoupling, subject: Subject) -> float:
    return subject.task.num_analysed[1] * BACKWARD


@passes.register
def _(part: FisherSimilarity, subject: Subject) -> float:
    """Factors of some samples, and of others the Fisher's products with the probes."""
    factors, held_out = subject.task.num_analysed
    return factors * BACKWARD + held_out * (BACKWARD + part.num_probes * subject.network.probe_passes)


@passes.register
def _(part: CrossMoments, subject: Subject) -> float:
    """The products of each sample, and of each token, with the probes; the latter cost as much as two passes."""
    held_out = subject.task.num_analysed[1]
    return held_out * (BACKWARD + part.num_probes * (subject.network.probe_passes + 2))


@passes.register
def _(part: Throughput, subject: Subject) -> float:
    """Batches and single samples take turns; single ones take the time of several in a batch."""
    num_calls = (2 + len(part.variants)) * part.timing.num_turns * TIMED_CALLS
    return num_calls * (part.batch_size + SINGLE)


@passes.register
def _(part: LowRank, subject: Subject) -> float:
    return passes(part.search, subject) + passes(part.refit, subject)


@passes.register
def _(part: Pruned, subject: Subject) -> float:
    return passes(part.pruner, subject)


@passes.register
def _(part: Staged, subject: Subject) -> float:
    """The classifier is compressed by its own data, which takes little beside its retraining."""
    stages = part.stages
    retraining = passes(stages.retraining, Subject(subject.network, cast(Sizes, stages.task)))
    return passes(stages.training, subject) + subject.classifier_share * retraining
