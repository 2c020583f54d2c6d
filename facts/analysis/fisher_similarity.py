"""Similarity of an estimator's Kronecker product to the empirical Fisher of held-out samples, layer by layer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from facts.analysis.base import Analysis, Findings, Subject, groups_within
from facts.analysis.similarity import cosine, probe_terms
from facts.estimators import Estimator, KroneckerFactors
from facts.estimators.base import see_data
from facts.estimators.whitening import square_root
from facts.moments import FisherProducts, LayerMoments
from facts.moments.gradients import make_probes
from facts.utils.options import options

MAX_VALUES = 2**30  # in the products held at once: 4 GiB in float32, and as much for their probes


@options
class FisherSimilarity(Analysis):
    """Operator cosine similarity from `num_probes` Gaussian probes, the same for every estimator.

    `factors: raw` takes the estimator's own factors; `shrunk` those of the decomposition, shrunk and repaired. Metrics:
    `cosine`, the mean over layers, and `cosine_error`, its standard error. Values: the same by layer.
    """

    num_probes: Annotated[int, Field(ge=2)] = 32
    factors: Literal["raw", "shrunk"] = "raw"
    seed: int = 0

    needs_factors: ClassVar[bool] = True

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:
        if estimator is None:
            raise ValueError("Fisher similarity needs an estimator: choose one, or leave the analysis out")

    def run(self, subject: Subject) -> Findings:
        self.check(subject.model, subject.estimator)
        assert subject.estimator is not None
        estimator, moments = see_data(subject.estimator, subject.calibration.moments)
        wanted = FisherProducts(self.num_probes, self.seed)
        terms = {}
        for group in groups_within(subject.layers, MAX_VALUES // self.num_probes):
            for name, held_out in subject.held_out.moments((wanted,), group).items():
                (products,) = held_out[wanted]
                d_out, d_in = products.shape[1:]
                probes = make_probes(self.num_probes, d_out, d_in, self.seed).to(products)
                factors = self._factors(estimator, moments[name])
                try:
                    terms[name] = probe_terms(products, probes, factors)
                except ValueError as error:
                    raise ValueError(f"layer {name}: {error}; leave it out") from error
        mean, layers = cosine(terms.values()), {name: cosine([layer]) for name, layer in terms.items()}
        return Findings(
            {"cosine": mean.value, "cosine_error": mean.standard_error},
            {name: {"cosine": e.value, "cosine_error": e.standard_error} for name, e in layers.items()},
        )

    def _factors(self, estimator: Estimator, moments: LayerMoments) -> KroneckerFactors:
        factors = estimator.factors(moments)
        if self.factors == "raw":
            return factors
        row, col = estimator.shrinkage(moments)
        roots = square_root(factors.A, col, factors.repair).matrix, square_root(factors.B, row, factors.repair).matrix
        A, B = (None if root is None else root @ root.T for root in roots)
        return KroneckerFactors(A=A, B=B)
