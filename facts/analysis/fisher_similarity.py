"""How near an estimator's Kronecker product comes to the empirical Fisher of held-out samples, layer by layer."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from facts.analysis.base import Analysis, Findings, Subject, groups_within
from facts.analysis.similarity import cosine, probe_terms
from facts.estimators import KroneckerFactors
from facts.estimators.base import see_data
from facts.moments import FisherProducts, LayerMoments
from facts.moments.products import make_probes
from facts.whitening import shrink

MAX_VALUES = 2**30  # products held at once: 4 GiB in float32


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FisherSimilarity(Analysis):
    """Operator cosine similarity from `num_probes` Gaussian probes, the same for every estimator.

    `factors: raw` are the estimator's own, `shrunk` those that the decomposition works with. Metrics: `cosine`, the
    mean over layers, and `cosine_error`, its standard error. Values: the same by layer.
    """

    num_probes: Annotated[int, Field(ge=2)] = 32
    factors: Literal["raw", "shrunk"] = "raw"
    seed: int = 0

    needs_factors: ClassVar[bool] = True

    def run(self, subject: Subject) -> Findings:
        if subject.estimator is None:
            raise ValueError("Fisher similarity is that of an estimator: choose one, or leave the analysis out")
        estimator, moments = see_data(subject.estimator, lambda wanted: subject.collect(subject.calibration, wanted))
        wanted = FisherProducts(self.num_probes, self.seed)
        terms = {}
        for group in groups_within(subject.layers, MAX_VALUES // self.num_probes):
            for name, held_out in subject.collect(subject.held_out, (wanted,), group).items():
                (products,) = held_out[wanted]
                probes = make_probes(*products.shape, self.seed).to(products)
                factors = self._factors(estimator, moments[name])
                terms[name] = probe_terms(products, probes, factors)
        layers = {name: cosine([layer]) for name, layer in terms.items()}
        mean = cosine(terms.values())
        return Findings(
            {"cosine": mean.value, "cosine_error": mean.standard_error},
            {name: {"cosine": e.value, "cosine_error": e.standard_error} for name, e in layers.items()},
        )

    def _factors(self, estimator, moments: LayerMoments) -> KroneckerFactors:
        factors = estimator.factors(moments)
        if self.factors == "raw":
            return factors
        row, col = estimator.shrinkage(moments)
        return KroneckerFactors(
            A=None if factors.A is None else shrink(factors.A, col),
            B=None if factors.B is None else shrink(factors.B, row),
        )
