"""Losses over the classes seen so far, and the objectives of replay that are made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from .memories import Batch

Classes = Tensor | Sequence[int]
# inputs [batch, ...] -> logits [batch, n_classes]; any nn.Module
Model = Callable[[Tensor], Tensor]


def seen_class_cross_entropy(
    logits: Tensor, targets: Tensor, seen: Classes, *, reduction: str = "mean"
) -> Tensor:
    """Returns the cross-entropy of a softmax over the columns of the classes seen so far.

    Args:
        logits: [batch, n_classes].
        targets: class numbers [batch].
        seen: class numbers, in any order; the other columns get no gradient.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: a target is not among the seen classes, or these are no classes of the logits.

    Examples:
        >>> logits = torch.tensor([[0.0, 9.0, 0.0]])
        >>> seen_class_cross_entropy(
        ...     logits, torch.tensor([0]), [2, 0]
        ... ).item()  # log 2: column 1 takes no part
        0.6931471824645996
    """
    columns, places = _among(logits, targets, seen)
    return cross_entropy(logits.index_select(1, columns), places, reduction=reduction)


def logit_adjusted_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    seen: Classes,
    counts: Tensor,
    *,
    tau: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Returns the cross-entropy over the seen classes after adding tau · log(class frequency) to
    their logits.

    Trained so, the plain logits answer for classes that are equally frequent (Menon et al., 2021).
    A class that was counted 0 times takes no part; tau = 0 is `seen_class_cross_entropy`.

    Args:
        logits: [batch, n_classes].
        targets: class numbers [batch].
        seen: class numbers, in any order.
        counts: how often each class is trained on, [n_classes]; only their ratios matter.
        tau: how much of the adjustment is made.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: as `seen_class_cross_entropy`; or `counts` has another length, a negative entry,
            or a 0 for a class that is among the targets.
    """
    columns, places = _among(logits, targets, seen)
    if counts.shape != logits.shape[1:]:
        raise ValueError(
            f"counts holds one number a class, [{logits.shape[1]}], got {list(counts.shape)}"
        )
    given = counts.to(logits)[columns]
    if bool((given < 0).any()) or (tau != 0 and bool((given[places] == 0).any())):
        raise ValueError(
            "counts are at least 0, and above 0 for the classes of the targets, got"
            f" {counts.tolist()}"
        )
    adjusted = logits.index_select(1, columns) + torch.xlogy(tau, given / given.sum())
    return cross_entropy(adjusted, places, reduction=reduction)


class Objective(Protocol):
    """What one update minimises; any function of this signature will do.

    One whose `keeps_logits` is true has the model's logits stored beside what goes into the memory.
    """

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss of the batch that arrived and of one from the memory, which is None
        while that is empty.
        """
        ...


Loss = Literal["seen", "adjusted"]


@dataclass(frozen=True)
class ExperienceReplay:
    """CE(current) + weight · CE(replay) over the seen classes: the paper's objective.

    Both batches go through the model together, in one call. The adjusted loss counts the classes of
    the two batches, those of the replayed one `weight` times: the frequencies that this very step
    trains on.

    Attributes:
        weight: λ of the paper.
        loss: "seen" is `seen_class_cross_entropy`, "adjusted" is `logit_adjusted_cross_entropy`.
        tau: of the adjusted loss.
    """

    weight: float = 1.0
    loss: Loss = "seen"
    tau: float = 1.0

    def __post_init__(self) -> None:
        _require_settings(self.loss, self.tau, weight=self.weight)

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        return _entropies(self, _logits(model, current, replay), current, replay, seen, self.weight)


@dataclass(frozen=True)
class DER:
    """CE(current) + alpha · MSE(logits, stored logits): dark experience replay (Buzzega et al.,
    2020).

    The squared differences are averaged over the batch and over all logits, as in the authors'
    program; their formula sums over the logits, which is a larger alpha. `loss` and `tau` are those
    of `ExperienceReplay`.
    """

    alpha: float
    loss: Loss = "seen"
    tau: float = 1.0
    keeps_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_settings(self.loss, self.tau, alpha=self.alpha)

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        logits = _logits(model, current, replay)
        loss = _entropies(self, logits, current, None, seen, 0.0)
        return (
            loss if replay is None else loss + self.alpha * _drift(logits[len(current.y) :], replay)
        )


@dataclass(frozen=True)
class DERpp:
    """CE(current) + alpha · MSE(logits, stored logits) + beta · CE(replay): DER++ (Buzzega et al.,
    2020).

    One replayed batch serves both terms, so that every method can be given the same samples; the
    authors draw a second one, and the expectation is the same. `loss` and `tau` are those of
    `ExperienceReplay`.
    """

    alpha: float
    beta: float
    loss: Loss = "seen"
    tau: float = 1.0
    keeps_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_settings(self.loss, self.tau, alpha=self.alpha, beta=self.beta)

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        logits = _logits(model, current, replay)
        loss = _entropies(self, logits, current, replay, seen, self.beta)
        return (
            loss if replay is None else loss + self.alpha * _drift(logits[len(current.y) :], replay)
        )


@dataclass(frozen=True)
class ERACE:
    """CE of the current batch over its own classes + weight · CE(replay) over all seen ones (Caccia
    et al., 2022).

    So what arrives does not push down the logits of the classes before it. The adjusted loss counts
    the classes of each batch by itself. `loss` and `tau` are those of `ExperienceReplay`.
    """

    weight: float = 1.0
    loss: Loss = "seen"
    tau: float = 1.0

    def __post_init__(self) -> None:
        _require_settings(self.loss, self.tau, weight=self.weight)

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        logits, n = _logits(model, current, replay), len(current.y)
        _among(logits, current.y, seen)
        loss = _entropies(self, logits[:n], current, None, current.y.unique(), 0.0)
        return (
            loss
            if replay is None
            else loss + self.weight * _entropies(self, logits[n:], replay, None, seen, 0.0)
        )


def _among(logits: Tensor, targets: Tensor, seen: Classes) -> tuple[Tensor, Tensor]:
    """Returns the columns of the seen classes, and for every target its place among them."""
    classes = [int(number) for number in (seen.tolist() if isinstance(seen, Tensor) else seen)]
    if (
        not classes
        or len(set(classes)) < len(classes)
        or min(classes) < 0
        or max(classes) >= logits.shape[1]
    ):
        raise ValueError(
            f"seen names different classes, each from 0 to {logits.shape[1] - 1}, got {classes}"
        )
    columns = torch.tensor(classes, device=logits.device)
    places = (targets.unsqueeze(1) == columns).int().argmax(1)  # [batch]
    if not torch.equal(columns[places], targets):
        unknown = sorted(set(targets.tolist()) - set(classes))
        raise ValueError(f"targets {unknown} are not among the seen classes {classes}")
    return columns, places


def _logits(model: Model, current: Batch, replay: Batch | None) -> Tensor:
    """Returns the logits of both batches, the current one first."""
    return model(current.x if replay is None else torch.cat([current.x, replay.x]))


def _entropies(
    settings: ExperienceReplay | DER | DERpp | ERACE,
    logits: Tensor,
    current: Batch,
    replay: Batch | None,
    seen: Classes,
    weight: float,
) -> Tensor:
    """Returns CE(current) + weight · CE(replay), each a mean over its batch, from the logits of
    both.
    """
    targets, n = current.y, len(current.y)
    shares = logits.new_full((n,), 1 / n)  # of every row in the sum: [batch]
    if replay is not None and weight > 0:
        targets = torch.cat([targets, replay.y])
        shares = torch.cat([shares, shares.new_full((len(replay.y),), weight / len(replay.y))])
    logits = logits[: len(targets)]
    if settings.loss == "seen":
        losses = seen_class_cross_entropy(logits, targets, seen, reduction="none")
    else:
        counts = shares.new_zeros(logits.shape[1]).index_add(0, targets, shares)
        losses = logit_adjusted_cross_entropy(
            logits, targets, seen, counts, tau=settings.tau, reduction="none"
        )
    return (shares * losses).sum()


def _drift(logits: Tensor, replay: Batch) -> Tensor:
    """Returns the mean square by which logits differ from the stored ones."""
    if replay.logits is None:
        raise ValueError(
            "the replayed batch has no stored logits; give them to the memory: memory.add(x, y,"
            " logits)"
        )
    return mse_loss(logits, replay.logits)


def _require_settings(loss: str, tau: float, **weights: float) -> None:
    if loss not in ("seen", "adjusted"):
        raise ValueError(f'loss is "seen" or "adjusted", got {loss!r}')
    for name, weight in {"tau": tau, **weights}.items():
        if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
            raise ValueError(f"{name} is a finite number, at least 0, got {weight!r}")
