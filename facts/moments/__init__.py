"""Moments: sums over samples and tokens, collected in one data pass for all estimators."""

from facts.moments.collect import LayerMoments as LayerMoments
from facts.moments.collect import collect_moments as collect_moments
from facts.moments.statistics import GradGram as GradGram
from facts.moments.statistics import GradWeightedInputGram as GradWeightedInputGram
from facts.moments.statistics import GroupGradients as GroupGradients
from facts.moments.statistics import InputFourthMoment as InputFourthMoment
from facts.moments.statistics import InputGram as InputGram
from facts.moments.statistics import InputMagnitude as InputMagnitude
from facts.moments.statistics import InputSum as InputSum
from facts.moments.statistics import InputWeightedGradGram as InputWeightedGradGram
from facts.moments.statistics import LiteralShrunkGram as LiteralShrunkGram
from facts.moments.statistics import MeanInputGram as MeanInputGram
from facts.moments.statistics import Moment as Moment
from facts.moments.statistics import SampleGradEnergy as SampleGradEnergy
from facts.moments.statistics import SampleGradGrams as SampleGradGrams
from facts.moments.statistics import SummedGradGram as SummedGradGram
from facts.moments.statistics import TokenPowerStep as TokenPowerStep
