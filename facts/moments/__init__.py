"""Moments: sums over samples and tokens, collected in one data pass for all estimators."""

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
    InputSum,
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
    "InputSum",
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
