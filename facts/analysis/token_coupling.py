"""Two structures that estimators keep or drop, at one layer: coupling between tokens, and within each token."""

from statistics import fmean

from torch import nn

from facts.analysis.base import Analysis, Findings, Subject
from facts.analysis.cross_token import cross_token_coupling
from facts.analysis.dependence import distance_correlations, load_dcorr
from facts.analysis.token_store import collect_tokens
from facts.calibration.selection import select_layers
from facts.estimators import Estimator
from facts.utils.options import options


@options
class TokenCoupling(Analysis):
    """Cross-token coupling and activation-gradient dependence of `layer` on the held-out samples.

    Metrics: `off_diagonal`, the mean coupling of two different tokens in units of the mean diagonal, and
    `distance_correlation`, the mean over tokens. Values: the map `coupling` `[T, T]`, and by token
    `distance_correlation` and `p_value` (None if a token never varies).
    """

    layer: str

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:
        select_layers(model, [self.layer])
        load_dcorr()

    def run(self, subject: Subject) -> Findings:
        self.check(subject.model, subject.estimator)
        selection, held_out = select_layers(subject.model, [self.layer]), subject.held_out
        precision = held_out.execution.precision
        stores = collect_tokens(
            selection.model, selection.layers, held_out.data or (), loss=held_out.loss, precision=precision
        )
        store = stores[self.layer]
        correlations, p_values = distance_correlations(store)
        coupling = cross_token_coupling(store)
        varying = [value for value in correlations if value is not None]
        metrics = {"distance_correlation": fmean(varying)} if varying else {}
        if (num_pairs := store.num_tokens * (store.num_tokens - 1)) > 0:
            metrics["off_diagonal"] = (coupling.sum() - coupling.trace()).item() / num_pairs
        values = {
            "layer": self.layer,
            "num_samples": store.num_samples,
            "coupling": [[float(f"{value:.6g}") for value in row] for row in coupling.tolist()],
            "distance_correlation": correlations,
            "p_value": p_values,
        }
        return Findings(metrics, values)
