"""Two structures that estimators keep or drop, at one layer: coupling between tokens, and within each token.

Source: the paper's supplement on the comparison of estimators.
"""

from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from facts.analysis.base import Analysis, AnalysisInputs, Findings
from facts.estimators import Estimator
from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass
from facts.parts.layers import select_layers
from facts.utils import distributed
from facts.utils.files import ScratchFolder, needing_room
from facts.utils.options import needing, options
from facts.utils.progress import with_progress

GRAM_BYTES = 2**27
MIN_SAMPLES = 21  # with fewer, hyppo permutes samples instead of using the chi-square limit


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
        _load_dcorr()

    def run(self, inputs: AnalysisInputs) -> Findings:
        selection, held_out = select_layers(inputs.prepared.model, [self.layer]), inputs.held_out
        precision = held_out.execution.precision
        store = TokenStore()
        data_pass = DataPass(
            selection.model, selection.layers, lambda _, batch: store.add(batch), held_out.loss, precision, True
        )
        with distributed.alone():
            data_pass.run(held_out.data or (), "tokens")
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


class TokenStore:
    """A layer's inputs and output gradients by token: one file per batch and kind, token axis first.

    Reading divides them by their root mean square, so that products of four stay within the range of float32.
    """

    def __init__(self):
        self.scratch = ScratchFolder()
        self.like = torch.empty(0)
        self.parts: dict[str, list[np.ndarray]] = {"inputs": [], "grads": []}
        self.energies = {"inputs": 0.0, "grads": 0.0}

    @property
    def num_tokens(self) -> int:
        return len(self.parts["inputs"][0])

    @property
    def num_samples(self) -> int:
        return sum(part.shape[1] for part in self.parts["inputs"])

    def add(self, batch: LayerBatch) -> None:
        """Append a batch. Raises `ValueError` if its number of tokens differs from that of earlier batches."""
        if self.parts["inputs"] and batch.x.shape[1] != self.num_tokens:
            raise ValueError(f"all batches must have as many tokens: {self.num_tokens} before, {batch.x.shape[1]} now")
        self.like = batch.x.new_empty(0)
        for kind, tensor in (("inputs", batch.x), ("grads", batch.g)):
            self.energies[kind] += tensor.double().square().sum().item()
            values = tensor.transpose(0, 1).contiguous().cpu().numpy()
            path = self.scratch.path / f"{kind}-{len(self.parts[kind])}"
            with needing_room(path):
                path.write_bytes(values.data)
            self.parts[kind].append(np.memmap(path, values.dtype, "r", shape=values.shape))

    def read(self, kind: str, start: int, end: int) -> Tensor:
        """Read the `inputs` or `grads` of some tokens `[end - start, N, d]`; over all tokens their mean square is 1."""
        values = torch.from_numpy(np.concatenate([part[start:end] for part in self.parts[kind]], axis=1))
        mean_square = self.energies[kind] / (self.num_tokens * self.num_samples * values.shape[2])
        return values.div_(mean_square**0.5 or 1.0).to(self.like.device)


def cross_token_coupling(store: TokenStore, max_bytes: int = GRAM_BYTES) -> Tensor:
    """Map `[T, T]` of ‖K_x^(t,s) ⊙ K_g^(t,s)‖_F divided by the mean of its diagonal, in float64 on the CPU.

    K_x^(t,s) `[N, N]` holds the inner products of token t's inputs in one sample with token s's in another, K_g those
    of the output gradients. Several rows t are computed at once: peak memory is about four times `max_bytes`.
    """
    num_tokens, num_samples = store.num_tokens, store.num_samples
    longest = max(num_samples, *(parts[0].shape[2] for parts in store.parts.values()))
    rows = max(1, max_bytes // (num_samples * longest * store.like.element_size()))
    norms = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    for start in with_progress(range(0, num_tokens, rows), "cross-token coupling"):
        end = min(start + rows, num_tokens)
        inputs, grads = (store.read(kind, start, end).flatten(0, 1) for kind in ("inputs", "grads"))
        for other in range(start, num_tokens):
            last = min(end, other + 1)  # the map is symmetric
            used = slice((last - start) * num_samples)
            products = inputs[used] @ store.read("inputs", other, other + 1)[0].T
            products *= grads[used] @ store.read("grads", other, other + 1)[0].T
            norms[start:last, other] = torch.linalg.vector_norm(products.view(last - start, -1), dim=1).cpu()
    norms += norms.triu(1).T
    diagonal = norms.diagonal().mean()
    return norms / diagonal if diagonal > 0 else norms


def distance_correlations(store: TokenStore) -> tuple[list[float | None], list[float | None]]:
    """Distance correlation of x_t and g_t over samples, and its p-value, for every token.

    hyppo's `Dcorr`: the unbiased estimate of the squared correlation (Székely and Rizzo, 2014), and the chi-square
    p-value; None for a token that never varies. Raises `ValueError` for fewer than 21 samples.
    """
    dcorr = _load_dcorr()
    if store.num_samples < MIN_SAMPLES:
        raise ValueError(f"distance correlation needs at least {MIN_SAMPLES} samples, got {store.num_samples}")
    found: list[tuple[float | None, float | None]] = []
    for token in with_progress(range(store.num_tokens), "distance correlation"):
        x, g = (store.read(kind, token, token + 1)[0].double().cpu().numpy() for kind in ("inputs", "grads"))
        varies = np.ptp(x, axis=0).any() and np.ptp(g, axis=0).any()
        correlation, p_value = map(float, dcorr().test(x, g)) if varies else (None, None)
        found.append((correlation, p_value))
    return [correlation for correlation, _ in found], [p_value for _, p_value in found]


def _load_dcorr() -> type:
    with needing("analysis", "distance correlation"):
        from hyppo.independence import Dcorr
    return Dcorr
