"""How far a result is from what is right: by rounding, or by another result's values."""

import torch

# Rounding is below RIGHT, another result's values are above WRONG: tests must not take one for the other.
RIGHT, WRONG = 1e-5, 1e-2


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the error relative to the norm of `expected`; infinite for NaN."""
    return float(((result - expected).norm() / expected.norm()).nan_to_num(float("inf")))
