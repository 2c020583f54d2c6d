"""The 1,797 handwritten digits that scikit-learn brings."""

from typing import Any

from facts.utils.extras import needing


def load_digits() -> Any:
    """Images `[1797, 8, 8]` of values from 0 to 16, and their `target`. Needs the extra `experiments`."""
    with needing("experiments", "the embedded data set"):
        from sklearn.datasets import load_digits
    return load_digits()
