"""Linear readouts from Gram statistics: ridge regression, nearest class mean, linear
discriminant.
"""

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grapnet.core.errors import GrapNetError

if TYPE_CHECKING:
    from .readout_statistics import GramStatistics

# added to a unit diagonal, one after the other until the matrix has a root
JITTER = (
    0.0,
    1e-12,
    1e-10,
    1e-8,
)


class Solution(NamedTuple):
    """A linear readout h ↦ W h + b, shaped like `nn.Linear`, in float64."""

    weight: Tensor  # [n_outputs, n_features]
    bias: Tensor  # [n_outputs]

    def __call__(self, h: Tensor) -> Tensor:
        """Returns what it says to features [..., n_features], in their dtype."""
        return (h.to(self.weight) @ self.weight.t() + self.bias).to(h.dtype)


def ridge_solution(
    gram: Tensor,
    cross: Tensor,
    ridge: float,
    *,
    standardize: bool = False,
    free: Tensor | None = None,
    fixed: Tensor | None = None,
) -> Tensor:
    """Returns the coordinates [n_features + 1, n_outputs] that minimise squared error plus ridge,
    the bias row last.

    Outputs with the same free coordinates share one factorisation.

    Args:
        gram: Σ [h, 1] [h, 1]ᵀ.
        cross: Σ [h, 1] yᵀ.
        ridge: the penalty on the weights; the bias has none.
        standardize: multiply it by the variance of each feature.
        free: which coordinates to solve for, bool of the shape of `cross`; all by default.
        fixed: the values of the others, 0 by default; what they explain is taken from the targets
            first.

    Raises:
        GrapNetError: there are no samples, or no root of the matrix can be found.
    """
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge is a number from 0, got {ridge!r}")
    if round(float(gram[-1, -1])) < 1:
        raise GrapNetError("nothing was seen yet, so there is nothing to solve; add samples first")
    penalty = torch.full_like(gram[0], ridge)
    if standardize:
        variance, mean_square = _variances(gram)
        penalty[:-1] *= torch.where(variance > 1e-12 * mean_square, variance, 1.0)
    penalty[-1] = 0.0
    free = torch.ones_like(cross, dtype=torch.bool) if free is None else free
    found = torch.zeros_like(cross) if fixed is None else torch.where(free, 0.0, fixed)
    if not cross.numel():
        return found
    patterns, group = free.unique(dim=1, return_inverse=True)
    for number, pattern in enumerate(patterns.t()):
        rows, columns = pattern.nonzero().squeeze(1), (group == number).nonzero().squeeze(1)
        if len(rows):
            system = gram[rows][:, rows]
            system.diagonal().add_(penalty[rows])
            rest = cross[rows][:, columns] - gram[rows] @ found[:, columns]
            found[rows[:, None], columns] = solve_positive(system, rest)
    return found


def nearest_class_mean(statistics: "GramStatistics", *, standardize: bool = False) -> Solution:
    """Returns the linear readout that is largest for the class whose mean is nearest; -inf for a
    class without samples.

    Args:
        statistics: of samples with labels.
        standardize: measure distances with every feature divided by its standard deviation.
    """
    means, counts = _class_means(statistics)
    scale = torch.ones_like(means[0])
    if standardize:
        variance, mean_square = _variances(statistics.gram())
        scale = torch.where(variance > 1e-12 * mean_square, 1 / variance, 0.0)
    weight = means * scale
    return Solution(weight, torch.where(counts > 0, -0.5 * (weight * means).sum(1), -torch.inf))


def linear_discriminant(
    statistics: "GramStatistics", shrinkage: float = 1e-4, *, priors: bool = True
) -> Solution:
    """Returns the linear discriminant of classes with one shared covariance; -inf for a class
    without samples.

    Args:
        statistics: of samples with labels.
        shrinkage: the share, 0 to 1, of a multiple of the identity with the same trace in the
            covariance.
        priors: count how frequent the classes were; otherwise all are equally likely.
    """
    if not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage lies between 0 and 1, got {shrinkage!r}")
    means, counts = _class_means(statistics)
    gram, total = statistics.gram()[:-1, :-1], counts.sum()
    within = (gram - (means * counts[:, None]).t() @ means) / total
    level = within.diagonal().mean() if len(within) else within.new_zeros(())
    within.mul_(1 - shrinkage).diagonal().add_(shrinkage * level)
    weight = solve_positive(within, means.t()).t().contiguous()
    bias = -0.5 * (weight * means).sum(1)
    bias = bias + (counts / total).log() if priors else bias
    return Solution(weight, torch.where(counts > 0, bias, -torch.inf))


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solves a symmetric positive system by Cholesky, with its diagonal scaled to 1.

    A matrix without a root in float64 gets as little added to that diagonal as helps, and a
    RuntimeWarning says so.

    Raises:
        GrapNetError: nothing in `JITTER` helps.
    """
    diagonal = matrix.diagonal()
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    scaled = matrix * scale * scale[:, None]
    limit = len(matrix) * torch.finfo(matrix.dtype).eps
    for jitter in JITTER:
        system = scaled.clone()
        system.diagonal().add_(jitter)
        root, failed = torch.linalg.cholesky_ex(system)
        if not int(failed) and (len(root) == 0 or float(root.diagonal().min()) ** 2 > limit):
            break
    else:
        raise GrapNetError(
            f"the Gram matrix has no root even with {JITTER[-1]:g} on its diagonal; choose a larger"
            " ridge"
        )
    if jitter:
        warnings.warn(
            f"the Gram matrix is singular in float64: {jitter:g} of its diagonal was added. Choose"
            " a larger ridge",
            RuntimeWarning,
            stacklevel=2,
        )
    return torch.cholesky_solve(right * scale[:, None], root) * scale[:, None]


def _variances(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the variance and the mean square of every feature."""
    count = gram[-1, -1]
    mean_square = gram.diagonal()[:-1] / count
    return mean_square - (gram[-1, :-1] / count) ** 2, mean_square


def _class_means(statistics: "GramStatistics") -> tuple[Tensor, Tensor]:
    """Returns the mean of every class [n_outputs, n_features], 0 where it has no samples, and the
    counts as floats.
    """
    counts = statistics.class_counts.double()
    if not bool(counts.any()):
        raise GrapNetError("nothing was seen yet, so no class has a mean; add samples first")
    return statistics.cross()[:-1].t() / counts.clamp(min=1)[:, None], counts
