"""Losses over the classes seen so far, and the objectives of replay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from ._memories import Batch

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
        ValueError: a target is not among the seen classes, or a seen class has no logit.

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

    The plain logits then correspond to equally frequent classes (Menon et al., 2021). A class with
    count 0 is ignored; tau = 0 is `seen_class_cross_entropy`.

    Args:
        logits: [batch, n_classes].
        targets: class numbers [batch].
        seen: class numbers, in any order.
        counts: the frequency of each class, [n_classes]; only ratios matter.
        tau: the strength of the adjustment.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: as `seen_class_cross_entropy`; or `counts` has a negative entry, or a 0 for a
            class that is among the targets.
    """
    columns, places = _among(logits, targets, seen)
    given = counts.to(logits)[columns]
    if bool((given < 0).any()) or (tau != 0 and bool((given[places] == 0).any())):
        raise ValueError(
            "counts are at least 0, and above 0 for the classes of the targets, got"
            f" {counts.tolist()}"
        )
    adjusted = logits.index_select(1, columns) + torch.xlogy(tau, given / given.sum())
    return cross_entropy(adjusted, places, reduction=reduction)


class Objective(Protocol):
    """What one update minimizes; any function with this signature works.

    If `keeps_logits` is true, the loop stores the logits of the model with the rows in the memory.
    """

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss of the current batch and of a replayed one, which is None while the
        memory is empty.
        """
        ...


Loss = Literal["seen", "adjusted"]


@dataclass(frozen=True)
class ExperienceReplay:
    """CE(current) + weight · CE(replay) over the seen classes: the paper's objective.

    Both batches go through the model in one call. The adjusted loss counts the classes of both
    batches, those of the replayed one `weight` times.

    Attributes:
        weight: λ of the paper.
        loss: "seen" is `seen_class_cross_entropy`, "adjusted" is `logit_adjusted_cross_entropy`.
        tau: of the adjusted loss.
    """

    weight: float = 1.0
    loss: Loss = "seen"
    tau: float = 1.0

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

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        without = DERpp(self.alpha, 0.0, self.loss, self.tau)
        return without(model, current, replay, seen)


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

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        logits = _logits(model, current, replay)
        loss = _entropies(self, logits, current, replay, seen, self.beta)
        if replay is None:
            return loss
        if replay.logits is None:
            raise ValueError(
                "the replayed batch has no stored logits; store them with memory.add(x, y, logits)"
            )
        return loss + self.alpha * mse_loss(logits[len(current.y) :], replay.logits)


@dataclass(frozen=True)
class ERACE:
    """CE of the current batch over its own classes + weight · CE(replay) over all seen ones (Caccia
    et al., 2022).

    The current batch does not push down the logits of earlier classes. The adjusted loss counts the
    classes of each batch separately. `loss` and `tau` are those of `ExperienceReplay`.
    """

    weight: float = 1.0
    loss: Loss = "seen"
    tau: float = 1.0

    def __call__(
        self, model: Model, current: Batch, replay: Batch | None, seen: Sequence[int]
    ) -> Tensor:
        """Returns the loss."""
        logits = _logits(model, current, replay)
        n = len(current.y)
        _among(logits, current.y, seen)
        loss = _entropies(self, logits[:n], current, None, current.y.unique(), 0.0)
        if replay is None:
            return loss
        return loss + self.weight * _entropies(self, logits[n:], replay, None, seen, 0.0)


def _among(logits: Tensor, targets: Tensor, seen: Classes) -> tuple[Tensor, Tensor]:
    """Returns the columns of the seen classes, and the position of every target among them."""
    if isinstance(seen, Tensor):
        seen = seen.tolist()
    classes = [int(number) for number in seen]
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
    settings: ExperienceReplay | DERpp | ERACE,
    logits: Tensor,
    current: Batch,
    replay: Batch | None,
    seen: Classes,
    weight: float,
) -> Tensor:
    """Returns CE(current) + weight · CE(replay), each a mean over its batch, from the logits of
    both.
    """
    targets = current.y
    n = len(current.y)
    shares = logits.new_full((n,), 1 / n)  # of every row in the sum: [batch]
    if replay is not None and weight > 0:
        targets = torch.cat([targets, replay.y])
        shares = torch.cat([shares, shares.new_full((len(replay.y),), weight / len(replay.y))])
    logits = logits[: len(targets)]
    if settings.loss not in ("seen", "adjusted"):
        raise ValueError(f'loss is "seen" or "adjusted", got {settings.loss!r}')
    if settings.loss == "seen":
        losses = seen_class_cross_entropy(logits, targets, seen, reduction="none")
    else:
        counts = shares.new_zeros(logits.shape[1]).index_add(0, targets, shares)
        losses = logit_adjusted_cross_entropy(
            logits, targets, seen, counts, tau=settings.tau, reduction="none"
        )
    return (shares * losses).sum()
