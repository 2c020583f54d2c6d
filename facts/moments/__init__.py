"""What the data pass collects: sums over samples and tokens, one pass for the union of what estimators need."""

from facts.moments.collect import LayerMoments, collect_moments
from facts.moments.gradients import GroupGradients
from facts.moments.power import TokenPowerStep
from facts.moments.products import FisherProducts, TokenLocalProducts
from facts.moments.statistics import (
    GradGram,
    GradWeightedInputGram,
    InputFourthMoment,
    InputGram,
    InputMagnitude,
    InputWeightedGradGram,
    LiteralShrunkGram,
    MeanInputGram,
    Moment,
    SampleGradEnergy,
    SampleGradGrams,
    SummedGradGram,
)

__all__ = [
    "FisherProducts",
    "GradGram",
    "GradWeightedInputGram",
    "GroupGradients",
    "InputFourthMoment",
    "InputGram",
    "InputMagnitude",
    "InputWeightedGradGram",
    "LayerMoments",
    "LiteralShrunkGram",
    "MeanInputGram",
    "Moment",
    "SampleGradEnergy",
    "SampleGradGrams",
    "SummedGradGram",
    "TokenLocalProducts",
    "TokenPowerStep",
    "collect_moments",
]
