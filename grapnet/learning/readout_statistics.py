"""GramStatistics: all that a linear readout needs to know of a stream, whatever made the
features.
"""

from typing import Any

import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError, GrapNetError

from .readout_samples import Samples
from .readout_solve import Solution, ridge_solution
from .readout_sums import SymmetricSum


class GramStatistics:
    """Streams Σ h hᵀ and Σ h yᵀ, computed in float64, with a constant 1 behind the features for the
    bias.

    Everything in it is a sum over samples, so neither their order nor how they were batched
    matters, and samples leave by subtraction. No sample is stored.

    Args:
        n_features: how many numbers a feature vector has.
        n_outputs: how many targets a sample has, or how many classes there are.
        per_class: keep Σ h hᵀ apart for every class seen, so that `forget` can let one go without
            its samples; takes labels only, and as many times the numbers as there are classes.
        device: where to keep the sums.
        dtype: what to keep them in; float32 halves the bytes, and then what leaves is exact to
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
        if min(n_features, n_outputs) < 0:
            raise ValueError(
                f"how many features and outputs there are is not negative, got {n_features},"
                f" {n_outputs}"
            )
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"sums are kept in torch.float64 or torch.float32, got {dtype}")
        self.n_features, self.n_outputs, self.per_class, self.dtype = (
            n_features,
            n_outputs,
            per_class,
            dtype,
        )
        self.device = torch.empty(0, device=device).device
        # [n_features] int64, samples that a feature has missed; None if none has
        self.lacking: Tensor | None = None
        self.only_labels = True  # whether every sample so far belongs to one of the classes
        self._sums: dict[int, SymmetricSum] = {} if per_class else {0: self._sum()}
        self._cross = None if per_class else self._zeros(n_features + 1, n_outputs)  # Σ [h, 1] yᵀ

    @property
    def count(self) -> int:
        """How many samples are in it."""
        return sum(round(part.last) for part in self._sums.values())

    @property
    def numbers(self) -> int:
        """How many numbers are stored: of a symmetric matrix, the ones on and above the
        diagonal.
        """
        stored = [self._cross, self.lacking]
        return sum(s.numbers for s in self._sums.values()) + sum(
            x.numel() for x in stored if x is not None
        )

    @property
    def bytes(self) -> int:
        """How many bytes they take."""
        late = 0 if self.lacking is None else self.lacking.numel()
        return self.dtype.itemsize * (self.numbers - late) + 8 * late

    @property
    def class_counts(self) -> Tensor:
        """How many samples of every class are in it, [n_outputs] int64; raises GrapNetError if some
        had no label.
        """
        if not self.only_labels:
            raise GrapNetError(
                "these statistics hold samples that belong to no class, so classes cannot be"
                " counted"
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
        """Takes samples in.

        Args:
            h: features, [..., n_features].
            y: labels [...], which stand for one-hot targets, or targets [..., n_outputs].

        Raises:
            ValueError: shapes do not fit, a label is none of the outputs, or a number is not
                finite; nothing happened.
        """
        found = self._samples(h, y)
        self._accumulate(found, 1)
        self.only_labels &= found.labels is not None

    @torch.inference_mode(False)
    def remove(self, h: Tensor, y: Tensor) -> None:
        """Takes samples out that were added before; the rest is what it would be without them, to
        rounding.

        Raises:
            ValueError: as `add` does, or there are more samples than were added; nothing happened.
        """
        found = self._samples(h, y)
        if self.lacking is not None:
            raise GrapNetError(
                "some features came later than some samples, so no sample can be taken out any more"
            )
        present = self.count
        short = present < len(found.features)
        if found.labels is not None and self.only_labels:
            short |= bool(
                (self.class_counts < found.labels.bincount(minlength=self.n_outputs)).any()
            )
        if short:
            count = len(found.features)
            raise ValueError(
                f"cannot take out {count} samples that were not all added; {present} are in it"
            )
        self._accumulate(found, -1)
        self._drop_empty()

    def forget(self, label: int) -> None:
        """Lets a class go: what is left is, bit for bit, what it would be if the class had never
        been seen.

        Raises:
            GrapNetError: the classes are not kept apart.
        """
        if not self.per_class:
            raise GrapNetError(
                "these statistics do not keep classes apart: make them with per_class=True, or"
                " remove()"
            )
        if not 0 <= label < self.n_outputs:
            raise ValueError(f"classes are 0 to {self.n_outputs - 1}, got {label}")
        self._sums.pop(label, None)

    @torch.inference_mode(False)
    def merge(self, other: "GramStatistics") -> None:
        """Adds all samples of other statistics, as of another process, about the same features and
        outputs.
        """
        mine, theirs = ((s.n_features, s.n_outputs, s.per_class) for s in (self, other))
        if mine != theirs:
            raise ValueError(
                f"statistics of (features, outputs, per_class) {mine} cannot take in those of"
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
        """Returns the weights [n_outputs, n_features] and biases [n_outputs] that ridge regression
        gives, in float64.

        They minimise Σ |W h + b - y|² + ridge · |W|²; the bias is free. A feature that came late
        counts as 0 before.

        Args:
            ridge: the penalty; it does not grow with the number of samples.
            standardize: penalise the weights as if every feature were divided by its standard
                deviation.

        Raises:
            GrapNetError: nothing was seen yet.
        """
        found = ridge_solution(self.gram(), self.cross(), ridge, standardize=standardize)
        return Solution(found[:-1].t().contiguous(), found[-1])

    def rearranged(self, features: Tensor, outputs: Tensor | None = None) -> "GramStatistics":
        """Returns the statistics of other features and outputs: each by its present place, or -1 if
        it is unknown.

        A feature that leaves, leaves exactly. One that is unknown has been 0 so far, and `lacking`
        says so; an output that is unknown had the target 0. An output that leaves takes along its
        class where classes are kept apart; elsewhere its samples stay, as samples of no class.
        """
        features = features.to(self.device, torch.int64)
        places = (
            torch.arange(self.n_outputs, device="cpu")
            if outputs is None
            else outputs.to("cpu", torch.int64)
        )
        found = self._like(len(features), len(places))
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
        missed = (
            torch.zeros_like(features)
            if self.lacking is None
            else self.lacking[features.clamp(min=0)]
        )
        missed = torch.where(features < 0, found.count, missed)
        found.lacking = missed if bool((missed > 0).any()) else None
        return found

    @torch.inference_mode(False)
    def copied(self) -> "GramStatistics":
        """Returns an independent copy."""
        found = self._like(self.n_features, self.n_outputs)
        found._sums = {label: part.copied() for label, part in self._sums.items()}
        found._cross = None if self._cross is None else self._cross.clone()
        found.lacking = None if self.lacking is None else self.lacking.clone()
        found.only_labels = self.only_labels
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        sums = {label: part.state_dict() for label, part in self._sums.items()}
        copied = self.copied()
        sizes = [self.n_features, self.n_outputs]
        return {
            "sizes": sizes,
            "per_class": self.per_class,
            "only_labels": self.only_labels,
            "sums": sums,
            "cross": copied._cross,
            "lacking": copied.lacking,
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            CheckpointError: it is not the state of such statistics; nothing was changed.
        """
        wanted = {"sizes", "per_class", "only_labels", "sums", "cross", "lacking"}
        if (
            not isinstance(state, dict)
            or state.keys() != wanted
            or not isinstance(state["sums"], dict)
        ):
            raise CheckpointError(f"the state of Gram statistics holds {', '.join(sorted(wanted))}")
        mine = ([self.n_features, self.n_outputs], self.per_class)
        if (state["sizes"], state["per_class"]) != mine:
            raise CheckpointError(
                f"the state is of (sizes, per_class) {(state['sizes'], state['per_class'])}, not"
                f" {mine}"
            )
        labels = range(self.n_outputs if self.per_class else 1)
        if any(label not in labels for label in state["sums"]) or not isinstance(
            state["only_labels"], bool
        ):
            raise CheckpointError(
                "the state of Gram statistics names a class that does not exist, or lacks a flag"
            )
        sums = {label: self._sum() for label in state["sums"]}
        for label, part in state["sums"].items():
            sums[label].load_state_dict(part)
        if not self.per_class and 0 not in sums:
            raise CheckpointError("the state of Gram statistics lacks its sum")
        shapes = {"cross": (self._cross, self.dtype), "lacking": (state["lacking"], torch.int64)}
        for name, (like, dtype) in shapes.items():
            shape = (
                None
                if like is None
                else [self.n_features]
                if name == "lacking"
                else list(like.shape)
            )
            _require_tensor(name, state[name], shape, dtype)
        self._sums, self.only_labels = sums, state["only_labels"]
        self._cross, self.lacking = (
            x if x is None else x.to(self.device, copy=True) for x in map(state.get, shapes)
        )

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
            raise ValueError(
                "these statistics keep classes apart, so they take labels, not targets"
            )
        for label in found.labels.unique().tolist():
            self._sums.setdefault(label, self._sum()).add(
                found.features[found.labels == label], sign
            )

    def _drop_empty(self) -> None:
        """Leaves no rounding behind where no sample is left."""
        if self.per_class:
            self._sums = {label: part for label, part in self._sums.items() if round(part.last) > 0}
        elif self.count == 0:
            self._sums, self._cross = (
                {0: self._sum()},
                self._zeros(self.n_features + 1, self.n_outputs),
            )
            self.only_labels = True

    def _sum(self) -> SymmetricSum:
        return SymmetricSum(self.n_features + 1, self.device, self.dtype)

    def _like(self, n_features: int, n_outputs: int) -> "GramStatistics":
        return GramStatistics(
            n_features, n_outputs, per_class=self.per_class, device=self.device, dtype=self.dtype
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        sizes = f"{self.n_features} features, {self.n_outputs} outputs"
        return f"GramStatistics({sizes}, {self.count:,} samples, {self.numbers:,} numbers)"


def _require_tensor(name: str, found: Any, shape: list[int] | None, dtype: torch.dtype) -> None:
    if shape is None and found is None:
        return
    fits = isinstance(found, Tensor) and list(found.shape) == shape and found.dtype == dtype
    if not (fits and bool(torch.isfinite(found).all())):
        raise CheckpointError(
            f"{name} in the state of Gram statistics is not a finite {dtype} tensor of shape"
            f" {shape}"
        )
