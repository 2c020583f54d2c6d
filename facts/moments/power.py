"""Further token-wise power iterations, from factors instead of the identity (paper, theorem 4.2).

Legend: T tokens, n = d_in, m = d_out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from facts.moments.batch import add_symmetric, mirror
from facts.moments.statistics import ClippedGradMoment, Normalize, of_unit_trace


@dataclass(frozen=True, kw_only=True)
class TokenPowerStep(ClippedGradMoment):
    """Σ (g_tᵀ B g_t) x_t x_tᵀ `[n, n]` and Σ (x_tᵀ A x_t) g_t g_tᵀ `[m, m]` for A and B of the previous step, and tr A.

    `iteration` distinguishes the steps: `previous`, by layer, follows from the data and the other fields.
    """

    iteration: int
    previous: Mapping[str, tuple[Tensor, Tensor]] = field(compare=False, repr=False)
    normalize: Normalize = "none"

    def shapes(self, d_in, d_out):
        return (d_in, d_in), (d_out, d_out), ()

    def init_state(self, layer, like, d_in, d_out, file):
        A, B = (factor.to(like) for factor in self.previous[layer])
        return like.new_zeros(d_in, d_in), like.new_zeros(d_out, d_out), A, B

    def add(self, total, batch):
        inputs, grads, A, B = total
        weights = self.weights(batch)[:, None]
        of_inputs = weights * ((batch.x @ A) * batch.x).sum(dim=-1)
        of_grads = weights * ((batch.g @ B) * batch.g).sum(dim=-1)
        if self.normalize == "batch":
            of_grads = of_unit_trace(of_grads, batch.x_energy)
        add_symmetric(inputs, batch.x, batch.x, of_grads)
        add_symmetric(grads, batch.g, batch.g, of_inputs)

    def num_held(self, d_in, d_out):
        return 2 * (d_in**2 + d_out**2)

    def reducible(self, total):
        return total[:2]

    def finalize(self, total):
        inputs, grads, A, _ = total
        return mirror(inputs), mirror(grads), A.trace()
