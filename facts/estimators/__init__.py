"""Estimators: from moments to Kronecker factors, one file per method."""

from torch import Tensor

from facts.estimators.base import Estimator, KroneckerFactors, see_data
from facts.moments import Moment
from facts.moments.batch import LayerBatch, split_samples
from facts.moments.collect import LayerMoments
from facts.moments.statistics import Counts
from facts.utils.options import Methods, by_name

ESTIMATORS = Methods("facts.estimators.methods", Estimator)  # type: ignore[type-abstract]

__all__ = ["ESTIMATORS", "Estimator", "KroneckerFactors", "estimate_factors"]


def estimate_factors(
    estimator: str | Estimator, inputs: Tensor, output_grads: Tensor, weight: Tensor | None = None
) -> KroneckerFactors:
    """Compute the Kronecker factors of one batch, without a model and before shrinkage.

    `inputs [N, T, d_in]` and `output_grads [N, T, d_out]`, the gradients of each sample's own loss; further axes in the
    middle count as tokens. Raises `ValueError` if shapes disagree, including that of `weight [d_out, d_in]`.
    """
    estimator = by_name(estimator, ESTIMATORS, "estimator")
    d_in, d_out = inputs.shape[-1], output_grads.shape[-1]
    if inputs.shape[:-1] != output_grads.shape[:-1]:
        raise ValueError(
            f"inputs {list(inputs.shape)} and output_grads {list(output_grads.shape)} may differ only in the last axis"
        )
    if weight is not None and weight.shape != (d_out, d_in):
        raise ValueError(f"the weight must be [d_out, d_in] = [{d_out}, {d_in}], got {list(weight.shape)}")
    batch = LayerBatch(
        split_samples(inputs, len(inputs), "inputs"), split_samples(output_grads, len(inputs), "output_grads")
    )

    def collect(moments: tuple[Moment, ...]) -> dict[str, LayerMoments]:
        totals = {}
        for moment in (Counts(), *moments):
            total = moment.init_state("layer", batch.x, d_in, d_out)
            moment.add(total, batch)
            totals[moment] = moment.finalize(total)
        return {"layer": LayerMoments(totals)}

    estimator, moments = see_data(estimator, collect)
    return estimator.factors(moments["layer"])


def __getattr__(name: str) -> type[Estimator]:
    """Find a method by its class, as in `facts.estimators.FACTS`."""
    return ESTIMATORS.of_class(name)
