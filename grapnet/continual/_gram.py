"""Gram statistics of features, and the readouts solved from them."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grapnet.core._errors import CheckpointError, GrapNetError


class SymmetricSum:
    """Σ h hᵀ as n(n+1)/2 numbers in two rectangles (LAPACK's rectangular full packed format).

    The square falls into two blocks on the diagonal and one below it. The lower half of the first
    block and the upper half of the second fill one rectangle, so adding a batch is three matrix
    products and no index. The numbers are stored in `dtype`; additions and results are float64.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.size = size
        self._cut = first = (size + 1) // 2
        self._below = torch.zeros(size - first, first, dtype=dtype, device=device)
        self._halves = torch.zeros(first + 1 - size % 2, first, dtype=dtype, device=device)

    @property
    def numbers(self) -> int:
        """The number of stored numbers."""
        return self._below.numel() + self._halves.numel()

    @property
    def last(self) -> float:
        """The last number on the diagonal."""
        return float((self._second if self.size > 1 else self._first)[-1, -1])

    @property
    def last_column(self) -> Tensor:
        """The last column of the matrix, [n]."""
        if self.size == 1:
            return self._halves[0].double()
        return torch.cat([self._below[-1], self._second[:, -1]]).double()

    def add(self, h: Tensor, sign: int = 1) -> None:
        """Adds or subtracts the outer products of the rows of `h` [batch, n]."""
        first, second = h.split([self._cut, self.size - self._cut], dim=1)
        self._below.add_(second.t() @ first, alpha=sign)
        self._first.add_((first.t() @ first).tril_(), alpha=sign)
        self._second.add_((second.t() @ second).triu_(), alpha=sign)

    def add_sum(self, other: "SymmetricSum") -> None:
        """Adds another sum of the same size."""
        self._below.add_(other._below.to(self._below.device))
        self._halves.add_(other._halves.to(self._halves.device))

    def square(self) -> Tensor:
        """Returns the whole matrix, [n, n]."""
        first = self._first.tril()
        second = self._second.triu()
        cut = self._cut
        found = self._below.new_empty(self.size, self.size, dtype=torch.float64)
        found[:cut, :cut] = first + first.tril(-1).t()
        found[cut:, cut:] = second + second.triu(1).t()
        found[cut:, :cut] = self._below
        found[:cut, cut:] = self._below.t()
        return found

    def rearranged(self, source: Tensor) -> "SymmetricSum":
        """Returns the sum for other rows: `source` has the current row of each, -1 for a row of
        zeros.
        """
        known = (source >= 0).double()
        square = (
            self.square()[source.clamp(min=0)][:, source.clamp(min=0)]
            .mul_(known)
            .mul_(known[:, None])
        )
        found = SymmetricSum(len(source), square.device, self._below.dtype)
        cut = found._cut
        found._below.copy_(square[cut:, :cut])
        found._first.add_(square[:cut, :cut].tril())
        found._second.add_(square[cut:, cut:].triu())
        return found

    def copied(self) -> "SymmetricSum":
        """Returns an independent copy."""
        found = SymmetricSum(0, self._below.device)
        found.size = self.size
        found._cut = self._cut
        found._below = self._below.clone()
        found._halves = self._halves.clone()
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the two rectangles."""
        return {"below": self._below, "halves": self._halves}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what `state_dict` returned for a sum of the same size."""
        self._below.copy_(state["below"])
        self._halves.copy_(state["halves"])

    @property
    def _first(self) -> Tensor:
        """The first block, of which the lower half counts."""
        return self._halves if self.size % 2 else self._halves[1:]

    @property
    def _second(self) -> Tensor:
        """The second block, of which the upper half counts."""
        return self._halves[:-1, 1:] if self.size % 2 else self._halves[:-1]


# added to a unit diagonal, one after the other until the matrix has a root
JITTER = (0.0, 1e-12, 1e-10, 1e-8)


class Samples(NamedTuple):
    """A batch of features with a constant 1 appended, and their targets."""

    features: Tensor  # [n, n_features + 1] float64, the last column is 1
    labels: Tensor | None  # [n] int64, or None where targets were given
    given: Tensor | None  # [n, n_outputs] float64 targets
    n_outputs: int

    @classmethod
    def of(cls, h: Tensor, y: Tensor, n_features: int, n_outputs: int) -> "Samples":
        """Returns features [..., n_features] with labels [...] or targets [..., n_outputs].

        Raises:
            ValueError: shapes do not fit, a label is out of range, or a number is not
                finite.
        """
        if not h.dim() or h.shape[-1] != n_features:
            raise ValueError(f"features are of shape [..., {n_features}], got {list(h.shape)}")
        count = h.shape[:-1].numel()
        features = h.double().reshape(count, n_features)
        labels = None
        given = None
        if y.shape == h.shape[:-1] and not y.is_floating_point():
            labels = y.reshape(count).long()
            outside = labels[(labels < 0) | (labels >= n_outputs)]
            if len(outside):
                raise ValueError(f"labels are 0 to {n_outputs - 1}, got {outside[:5].tolist()}")
        elif y.shape == (*h.shape[:-1], n_outputs):
            given = y.double().reshape(count, n_outputs)
        else:
            raise ValueError(
                f"features of shape {list(h.shape)} go with whole-number labels"
                f" {list(h.shape[:-1])} or targets [..., {n_outputs}], got y of shape"
                f" {list(y.shape)} and {y.dtype}"
            )
        if not all(bool(part.isfinite().all()) for part in (features, given) if part is not None):
            raise ValueError("features or targets contain numbers that are not finite")
        return cls(
            torch.cat([features, features.new_ones(count, 1)], dim=1), labels, given, n_outputs
        )

    def targets(self) -> Tensor:
        """Returns the targets [n, n_outputs], one-hot where labels were given."""
        if self.labels is None:
            assert self.given is not None
            return self.given
        found = self.features.new_zeros(len(self.labels), self.n_outputs)
        return found.scatter_(1, self.labels[:, None], 1.0)


class Solution(NamedTuple):
    """A linear readout h ↦ W h + b, shaped like `nn.Linear`, in float64."""

    weight: Tensor  # [n_outputs, n_features]
    bias: Tensor  # [n_outputs]

    def __call__(self, h: Tensor) -> Tensor:
        """Returns the outputs for features [..., n_features], in their dtype."""
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
    """Returns the coordinates [n_features + 1, n_outputs] that minimize squared error plus ridge,
    the bias in the last row.

    Outputs with the same free coordinates share one factorisation.

    Args:
        gram: Σ [h, 1] [h, 1]ᵀ.
        cross: Σ [h, 1] yᵀ.
        ridge: the penalty on the weights; the bias has none.
        standardize: multiply it by the variance of each feature.
        free: which coordinates to solve for, bool of the shape of `cross`; all by default.
        fixed: the values of the others, 0 by default; their contribution is subtracted from the
            targets.

    Raises:
        GrapNetError: there are no samples, or the matrix cannot be factorized.
    """
    free = torch.ones_like(cross, dtype=torch.bool) if free is None else free
    found = torch.zeros_like(cross) if fixed is None else torch.where(free, 0.0, fixed)
    for part in _systems(gram, cross, ridge, free, found, standardize=standardize):
        found[part.rows[:, None], part.columns] = solve_positive(part.matrix, part.right)
    return found


class _System(NamedTuple):
    """The normal equations of outputs that have the same free coordinates."""

    rows: Tensor  # [n] of these coordinates, ascending
    columns: Tensor  # [m] of the outputs
    matrix: Tensor  # [n, n] the Gram matrix with the penalty on its diagonal
    right: Tensor  # [n, m] what it is to give


def _systems(
    gram: Tensor, cross: Tensor, ridge: float, free: Tensor, held: Tensor, *, standardize: bool
) -> list[_System]:
    """Returns one system for every group of outputs with the same free coordinates, if any.

    Args:
        gram: Σ [h, 1] [h, 1]ᵀ.
        cross: Σ [h, 1] yᵀ.
        ridge: the penalty on the weights; the bias has none.
        free: which coordinates to solve for, bool of the shape of `cross`.
        held: the values of the others, 0 where coordinates are free.
        standardize: multiply the penalty by the variance of each feature.

    Raises:
        GrapNetError: there are no samples.
    """
    if round(float(gram[-1, -1])) < 1:
        raise GrapNetError("there are no samples to solve for; add samples first")
    if not cross.numel():
        return []
    penalty = torch.full_like(gram[0], ridge)
    if standardize:
        variance, mean_square = _variances(gram)
        penalty[:-1] *= torch.where(variance > 1e-12 * mean_square, variance, 1.0)
    penalty[-1] = 0.0
    patterns, group = free.unique(dim=1, return_inverse=True)
    found = []
    for number, pattern in enumerate(patterns.t()):
        rows = pattern.nonzero().squeeze(1)
        if not len(rows):
            continue
        columns = (group == number).nonzero().squeeze(1)
        matrix = gram[rows][:, rows]
        matrix.diagonal().add_(penalty[rows])
        right = cross[rows][:, columns] - gram[rows] @ held[:, columns]
        found.append(_System(rows, columns, matrix, right))
    return found


def weakest_features(
    gram: Tensor,
    cross: Tensor,
    ridge: float,
    count: int,
    *,
    steps: int = 8,
    standardize: bool = False,
    free: Tensor | None = None,
    fixed: Tensor | None = None,
    candidates: Tensor | None = None,
) -> Tensor:
    """Returns the features, ascending, whose removal makes the ridge loss grow least.

    The loss is that of a readout solved again without them. When feature i leaves, it grows by
    Σ w_io² / [(gram + ridge)⁻¹]_ii over the outputs o, which is exact for one feature. They leave
    in `steps`, and weights and inverse are those without them after each. With as many steps as
    features every choice is the best single one.

    Args:
        gram: Σ [h, 1] [h, 1]ᵀ.
        cross: Σ [h, 1] yᵀ.
        ridge: the penalty on the weights; the bias has none.
        count: how many features leave.
        steps: in how many steps.
        standardize: multiply the ridge by the variance of each feature.
        free: which coordinates are solved for, bool of the shape of `cross`; all by default.
        fixed: the values of the others, 0 by default.
        candidates: which features may leave, [n_features] bool; all by default.

    Raises:
        ValueError: there are fewer candidates than `count`, or `steps` is not positive.
        GrapNetError: there are no samples, or the matrix cannot be factorized.

    """
    n_features = len(gram) - 1
    leaves = torch.zeros(n_features, dtype=torch.bool, device=gram.device)
    if candidates is None:
        candidates = ~leaves
    if not 0 <= count <= int(candidates.sum()):
        raise ValueError(
            f"count lies between 0 and the {int(candidates.sum())} features that may leave, got"
            f" {count}"
        )
    if steps < 1:
        raise ValueError(f"steps are at least 1, got {steps}")
    free = torch.ones_like(cross, dtype=torch.bool) if free is None else free
    held = torch.zeros_like(cross) if fixed is None else torch.where(free, 0.0, fixed)
    parts = []
    for system in _systems(gram, cross, ridge, free, held, standardize=standardize):
        identity = torch.eye(len(system.rows), dtype=gram.dtype, device=gram.device)
        inverse = solve_positive(system.matrix, identity)
        parts.append(_Solved(system.rows, inverse, inverse @ system.right))
    at_a_time = -(-count // steps)
    left = count
    while left > 0:
        growth = torch.zeros(n_features + 1, dtype=gram.dtype, device=gram.device)
        for part in parts:
            growth[part.rows] += part.growth()
        possible = torch.where(candidates & ~leaves, growth[:-1], torch.inf)
        out = possible.argsort(stable=True)[: min(left, at_a_time)]
        leaves[out] = True
        parts = [part.without(leaves) for part in parts]
        left -= len(out)
    return leaves.nonzero().squeeze(1)


class _Solved(NamedTuple):
    """A solved system, from which coordinates can leave without another factorization."""

    rows: Tensor  # [n]
    inverse: Tensor  # [n, n] of the system's matrix
    weights: Tensor  # [n, m]

    def growth(self) -> Tensor:
        """Returns by how much the loss grows if one coordinate leaves, [n]."""
        return self.weights.square().sum(1) / self.inverse.diagonal()

    def without(self, leaves: Tensor) -> "_Solved":
        """Returns the solution without some features, [n_features] bool."""
        bias = leaves.new_zeros(1)
        gone = torch.cat([leaves, bias])[self.rows]
        if not bool(gone.any()):
            return self
        # Block inversion: the inverse without some rows is its Schur complement.
        right = torch.cat([self.inverse[gone][:, ~gone], self.weights[gone]], 1)
        share = torch.linalg.solve(self.inverse[gone][:, gone], right)
        lost = self.inverse[~gone][:, gone] @ share
        stay = int((~gone).sum())
        return _Solved(
            self.rows[~gone],
            self.inverse[~gone][:, ~gone] - lost[:, :stay],
            self.weights[~gone] - lost[:, stay:],
        )


def nearest_class_mean(statistics: "GramStatistics", *, standardize: bool = False) -> Solution:
    """Returns the linear readout whose largest output is the class with the nearest mean; -inf for
    a class without samples.

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
        priors: use the class frequencies; otherwise all classes are equally likely.
    """
    means, counts = _class_means(statistics)
    gram = statistics.gram()[:-1, :-1]
    total = counts.sum()
    within = (gram - (means * counts[:, None]).t() @ means) / total
    level = within.diagonal().mean() if len(within) else within.new_zeros(())
    within.mul_(1 - shrinkage).diagonal().add_(shrinkage * level)
    weight = solve_positive(within, means.t()).t().contiguous()
    bias = -0.5 * (weight * means).sum(1)
    bias = bias + (counts / total).log() if priors else bias
    return Solution(weight, torch.where(counts > 0, bias, -torch.inf))


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solves a symmetric positive system by Cholesky, with its diagonal scaled to 1.

    If the matrix is singular in float64, as little as needed is added to that diagonal, with a
    RuntimeWarning.

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
            f"the Gram matrix cannot be factorized even with {JITTER[-1]:g} on its diagonal;"
            " choose a larger ridge"
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
        raise GrapNetError("there are no samples; add samples first")
    return statistics.cross()[:-1].t() / counts.clamp(min=1)[:, None], counts


class GramStatistics:
    """Accumulates Σ h hᵀ and Σ h yᵀ in float64, with a constant 1 appended to the features for the
    bias.

    Everything is a sum over samples, so order and batching do not matter, and samples are removed
    by subtraction. No sample is stored.

    Args:
        n_features: the length of a feature vector.
        n_outputs: the number of targets or classes.
        per_class: keep one Σ h hᵀ per class, so that `forget` needs no samples. It accepts labels
            only, and stores as many times the numbers.
        device: the device of the sums.
        dtype: the dtype of the stored sums; float32 halves the bytes, and removal is then exact to
            float32 only.

    Examples:
        >>> statistics = GramStatistics(2, 2)
        >>> statistics.add(
        ...     torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1, 1])
        ... )
        >>> weight, bias = statistics.solve(ridge=1e-9)
        >>> (
        ...     (torch.tensor([3.0, 0.0]).double() @ weight.T + bias).argmax().item(),
        ...     statistics.numbers,
        ... )
        (1, 12)
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        *,
        per_class: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.n_features = n_features
        self.n_outputs = n_outputs
        self.per_class = per_class
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device
        # [n_features] int64, samples that a feature has missed; None if none has
        self.lacking: Tensor | None = None
        self.only_labels = True  # whether every sample so far belongs to one of the classes
        self._sums: dict[int, SymmetricSum] = {} if per_class else {0: self._sum()}
        self._cross = None if per_class else self._zeros(n_features + 1, n_outputs)  # Σ [h, 1] yᵀ

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(round(part.last) for part in self._sums.values())

    @property
    def numbers(self) -> int:
        """The number of stored numbers; a symmetric matrix counts once."""
        stored = [self._cross, self.lacking]
        return sum(s.numbers for s in self._sums.values()) + sum(
            x.numel() for x in stored if x is not None
        )

    @property
    def bytes(self) -> int:
        """The number of stored bytes."""
        late = 0 if self.lacking is None else self.lacking.numel()
        return self.dtype.itemsize * (self.numbers - late) + 8 * late

    @property
    def class_counts(self) -> Tensor:
        """The number of samples per class, [n_outputs] int64; raises GrapNetError if some had no
        label.
        """
        if not self.only_labels:
            raise GrapNetError(
                "these statistics contain samples without a class, so classes cannot be counted"
            )
        return self.cross()[-1].round().long()

    def gram(self) -> Tensor:
        """Returns `Σ [h, 1] [h, 1]ᵀ`, [n_features + 1, n_features + 1]."""
        total = SymmetricSum(self.n_features + 1, self.device)
        # in this order, so that a class that was forgotten leaves no trace
        for label in sorted(self._sums):
            total.add_sum(self._sums[label])
        return total.square()

    def cross(self) -> Tensor:
        """Returns `Σ [h, 1] yᵀ`, [n_features + 1, n_outputs]."""
        if self._cross is not None:
            return self._cross.to(torch.float64, copy=True)
        found = self._zeros(self.n_features + 1, self.n_outputs).double()
        for label, part in self._sums.items():
            found[:, label] = part.last_column
        return found

    @torch.inference_mode(False)
    def add(self, h: Tensor, y: Tensor) -> None:
        """Adds samples.

        Args:
            h: features, [..., n_features].
            y: labels [...], used as one-hot targets, or targets [..., n_outputs].

        Raises:
            ValueError: shapes do not fit, a label is out of range, or a number is not
                finite; nothing happened.
        """
        found = self._samples(h, y)
        self._accumulate(found, 1)
        self.only_labels &= found.labels is not None

    @torch.inference_mode(False)
    def remove(self, h: Tensor, y: Tensor) -> None:
        """Removes samples that were added before; the result equals never adding them, to rounding.

        Raises:
            ValueError: as for `add`, or there are more samples than were added; nothing changes.
        """
        found = self._samples(h, y)
        if self.lacking is not None:
            raise GrapNetError(
                "some features were added after samples, so samples cannot be removed"
            )
        present = self.count
        short = present < len(found.features)
        if found.labels is not None and self.only_labels:
            short |= bool(
                (self.class_counts < found.labels.bincount(minlength=self.n_outputs)).any()
            )
        if short:
            count = len(found.features)
            raise ValueError(f"cannot remove {count} samples; there are {present}")
        self._accumulate(found, -1)
        self._drop_empty()

    def forget(self, label: int) -> None:
        """Removes a class; the sums are bit-identical to those of the same features without it.

        Features that a net computes depend in their last digits on what else is in a batch.

        Raises:
            GrapNetError: the statistics are not per class.
        """
        if not self.per_class:
            raise GrapNetError(
                "these statistics are not per class: use per_class=True, or remove()"
            )
        self._sums.pop(label, None)

    @torch.inference_mode(False)
    def merge(self, other: "GramStatistics") -> None:
        """Adds all samples of other statistics with the same features and outputs."""
        mine, theirs = ((s.n_features, s.n_outputs, s.per_class) for s in (self, other))
        if mine != theirs:
            raise ValueError(
                f"statistics of (features, outputs, per_class) {mine} cannot be merged with"
                f" {theirs}"
            )
        lacking = [s.lacking.to(self.device) for s in (self, other) if s.lacking is not None]
        self.lacking = torch.stack(lacking).sum(0) if lacking else None
        for label, part in other._sums.items():
            self._sums.setdefault(label, self._sum()).add_sum(part)
        if self._cross is not None and other._cross is not None:
            self._cross += other._cross.to(self.device)
        self.only_labels &= other.only_labels

    def solve(self, ridge: float = 1.0, *, standardize: bool = False) -> Solution:
        """Returns the weights [n_outputs, n_features] and biases [n_outputs] of ridge regression,
        in float64.

        They minimize Σ |W h + b - y|² + ridge · |W|²; the bias is free. A late feature counts as 0
        before.

        Args:
            ridge: the penalty; it does not grow with the number of samples.
            standardize: penalise the weights as if every feature were divided by its standard
                deviation.

        Raises:
            GrapNetError: nothing was seen yet.
        """
        found = ridge_solution(self.gram(), self.cross(), ridge, standardize=standardize)
        return Solution(found[:-1].t().contiguous(), found[-1])

    def weakest(
        self, count: int, *, ridge: float = 1.0, standardize: bool = False, steps: int = 8
    ) -> Tensor:
        """Returns the positions of the features, ascending, whose removal makes the loss of `solve`
        grow least.

        The loss is that of a readout solved again without them: a feature whose work others can do
        leaves before one with a smaller weight. Nothing changes; `rearranged` removes features.

        Args:
            count: how many features.
            ridge: the penalty of `solve`.
            standardize: that of `solve`.
            steps: in how many steps they are chosen; after each, the others are judged as solved
                without those of the steps before.

        Raises:
            ValueError: `count` or `steps` is out of range.
            GrapNetError: nothing was seen yet.

        Examples:
            >>> h = torch.tensor([[1.0, 0.0, 0.1], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
            >>> statistics = GramStatistics(3, 1)
            >>> statistics.add(h, h[:, :1] - h[:, 1:2])  # the last feature is not needed
            >>> statistics.weakest(1, ridge=1e-3)
            tensor([2])
        """
        gram = self.gram()
        cross = self.cross()
        return weakest_features(gram, cross, ridge, count, steps=steps, standardize=standardize)

    def rearranged(self, features: Tensor, outputs: Tensor | None = None) -> "GramStatistics":
        """Returns the statistics of other features and outputs, each given by its current position,
        or -1 for a new one.

        Removing a feature is exact. A new feature counts as 0 so far, and `lacking` counts the
        samples that it missed; a new output had the target 0. Removing an output removes its class
        if statistics are per class; otherwise its samples stay, without a class.
        """
        features = features.to(self.device, torch.int64)
        if outputs is None:
            places = torch.arange(self.n_outputs, device="cpu")
        else:
            places = outputs.to("cpu", torch.int64)
        found = self.empty(len(features), len(places))
        rows = torch.cat([features, features.new_tensor([self.n_features])])
        if self._cross is None:
            found._sums = {
                n: self._sums[c].rearranged(rows)
                for n, c in enumerate(places.tolist())
                if c in self._sums
            }
        else:
            found._sums = {0: self._sums[0].rearranged(rows)}
            columns = places.to(self.device)
            known = ((rows >= 0)[:, None] & (columns >= 0)).double()
            found._cross = self._cross[rows.clamp(min=0)][:, columns.clamp(min=0)].mul_(known)
        stays = torch.zeros(self.n_outputs, dtype=torch.bool, device="cpu")
        stays[places[places >= 0]] = True
        lost = (
            not self.per_class
            and self.only_labels
            and bool((self.cross()[-1].cpu()[~stays] > 0.5).any())
        )
        found.only_labels = self.only_labels and not lost
        if self.lacking is None:
            missed = torch.zeros_like(features)
        else:
            missed = self.lacking[features.clamp(min=0)]
        missed = torch.where(features < 0, found.count, missed)
        found.lacking = missed if bool((missed > 0).any()) else None
        return found

    @torch.inference_mode(False)
    def copied(self) -> "GramStatistics":
        """Returns an independent copy."""
        found = self.empty(self.n_features, self.n_outputs)
        found._sums = {label: part.copied() for label, part in self._sums.items()}
        found._cross = None if self._cross is None else self._cross.clone()
        found.lacking = None if self.lacking is None else self.lacking.clone()
        found.only_labels = self.only_labels
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        copied = self.copied()
        return {
            "sizes": [self.n_features, self.n_outputs],
            "per_class": self.per_class,
            "only_labels": self.only_labels,
            "sums": {label: part.state_dict() for label, part in copied._sums.items()},
            "cross": copied._cross,
            "lacking": copied.lacking,
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            CheckpointError: it is the state of statistics of other sizes; nothing changes.
        """
        mine = ([self.n_features, self.n_outputs], self.per_class)
        if (state["sizes"], state["per_class"]) != mine:
            raise CheckpointError(
                f"the state is of (sizes, per_class) {(state['sizes'], state['per_class'])}, not"
                f" {mine}"
            )
        sums = {}
        for label, part in state["sums"].items():
            sums[label] = self._sum()
            sums[label].load_state_dict(part)
        cross = state["cross"]
        if cross is not None:
            cross = cross.to(self.device, self.dtype, copy=True)
        lacking = state["lacking"]
        if lacking is not None:
            lacking = lacking.to(self.device, copy=True)
        self._sums = sums
        self._cross = cross
        self.lacking = lacking
        self.only_labels = state["only_labels"]

    def _samples(self, h: Tensor, y: Tensor) -> Samples:
        return Samples.of(
            h.detach().to(self.device), y.detach().to(self.device), self.n_features, self.n_outputs
        )

    def _accumulate(self, found: Samples, sign: int) -> None:
        if self._cross is not None:
            self._sums[0].add(found.features, sign)
            self._cross.add_(found.features.t() @ found.targets(), alpha=sign)
            return
        if found.labels is None:
            raise ValueError("statistics with per_class=True take labels, not targets")
        for label in found.labels.unique().tolist():
            self._sums.setdefault(label, self._sum()).add(
                found.features[found.labels == label], sign
            )

    def _drop_empty(self) -> None:
        """Sets the sums to exactly 0 if no sample is left."""
        if self.per_class:
            self._sums = {label: part for label, part in self._sums.items() if round(part.last) > 0}
        elif self.count == 0:
            self._sums = {0: self._sum()}
            self._cross = self._zeros(self.n_features + 1, self.n_outputs)
            self.only_labels = True

    def _sum(self) -> SymmetricSum:
        return SymmetricSum(self.n_features + 1, self.device, self.dtype)

    def empty(self, n_features: int, n_outputs: int) -> "GramStatistics":
        """Returns empty statistics for other features and outputs, with the same options."""
        return GramStatistics(
            n_features, n_outputs, per_class=self.per_class, device=self.device, dtype=self.dtype
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        sizes = f"{self.n_features} features, {self.n_outputs} outputs"
        return f"GramStatistics({sizes}, {self.count:,} samples, {self.numbers:,} numbers)"
