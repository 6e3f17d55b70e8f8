"""Metrics of continual learning: accuracies after every task, forgetting, and drift of old
coordinates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grapnet.core._evaluating import evaluating

from ._memories import require_examples


class Evaluation(NamedTuple):
    """Accuracies, from 0 to 1.

    Attributes:
        overall: over all evaluated images, with an argmax over the seen classes.
        seen: the same by task.
        local: by task, with an argmax over the classes of the task.
    """

    overall: float
    seen: list[float]
    local: list[float]


def evaluate(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    tasks: Sequence[Sequence[int]],
    seen: Sequence[int] | None = None,
    *,
    batch: int = 4096,
) -> Evaluation:
    """Returns the accuracies of a model on these tasks.

    A module is in `eval` mode meanwhile. Of equal logits, the first class as listed wins.

    Args:
        model: maps inputs to logits [batch, n_classes].
        x: inputs [n, ...]; those of other classes are ignored.
        y: class numbers [n].
        tasks: the classes of every task.
        seen: the classes to predict among; those of all tasks by default.
        batch: the batch size.

    Raises:
        ValueError: a task has no images, or a class that is not seen.
    """
    require_examples(x, y)
    groups = [tuple(classes) for classes in tasks]
    evaluated = [number for classes in groups for number in classes]
    seen = evaluated if seen is None else seen
    if not set(evaluated) <= set(seen):
        raise ValueError(f"tasks have classes among the seen ones, {list(seen)}, got {groups}")
    places = [torch.isin(y, torch.tensor(classes, device=y.device)) for classes in groups]
    for classes, rows in zip(groups, places, strict=True):
        if not bool(rows.any()):
            raise ValueError(f"there is no image of the classes {list(classes)}")
    logits = _logits(model, x, batch)
    right = []
    local = []
    for classes, rows in zip(groups, places, strict=True):
        right.append((_answers(logits[rows], seen) == y[rows]).double())
        local.append(float((_answers(logits[rows], classes) == y[rows]).double().mean()))
    return Evaluation(float(torch.cat(right).mean()), [float(hits.mean()) for hits in right], local)


@dataclass
class AccuracyMatrix:
    """Accuracies after every task: row = task just learnt, column = task evaluated.

    Examples:
        >>> matrix = AccuracyMatrix()
        >>> matrix.add(Evaluation(0.9, [0.9], [0.9]))
        >>> matrix.add(Evaluation(0.7, [0.6, 0.8], [0.8, 0.9]))
        >>> matrix.forgetting, matrix.seen_class, matrix.task_local
        (0.30000000000000004, 0.7, 0.8500000000000001)
        >>> matrix
        AccuracyMatrix(seen-class accuracy in per cent
          task          0      1    all
          after 0    90.0          90.0
          after 1    60.0   80.0   70.0
        )
    """

    rows: list[Evaluation] = field(default_factory=list)

    def add(self, row: Evaluation) -> None:
        """Appends the evaluation after the next task."""
        if len(row.seen) != len(self.rows) + 1 or len(row.local) != len(row.seen):
            raise ValueError(
                f"the next row is about {len(self.rows) + 1} tasks, got {len(row.seen)} (seen) and"
                f" {len(row.local)} (local); to resume, restore the earlier rows"
            )
        self.rows.append(row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows as plain data."""
        return {"rows": [row._asdict() for row in self.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the rows by those of `state_dict()`; an invalid state changes nothing."""
        loaded = AccuracyMatrix()
        for row in state["rows"]:
            loaded.add(Evaluation(**row))
        self.rows[:] = loaded.rows

    @property
    def seen_class(self) -> float:
        """The seen-class accuracy after the last task."""
        return self._last.overall

    @property
    def task_local(self) -> float:
        """The mean of the tasks' local accuracies after the last task."""
        return fmean(self._last.local)

    @property
    def forgetting(self) -> float:
        """The mean, over all tasks but the last, of its best earlier seen-class accuracy minus its
        final one.
        """
        if len(self.rows) < 2:
            return 0.0
        final = self._last.seen
        lost = []
        for n in range(len(final) - 1):
            best = max(row.seen[n] for row in self.rows[n:-1])
            lost.append(best - final[n])
        return fmean(lost)

    def table(self, kind: Literal["seen", "local"] = "seen") -> Tensor:
        """Returns the accuracies [tasks, tasks], float64; NaN for future tasks."""
        table = torch.full((len(self.rows), len(self.rows)), float("nan"), dtype=torch.float64)
        for n, row in enumerate(self.rows):
            table[n, : n + 1] = torch.tensor(getattr(row, kind), dtype=torch.float64)
        return table

    def __repr__(self) -> str:
        if not self.rows:
            return "AccuracyMatrix()"
        lines = [_line("task", [*map(str, range(len(self.rows)))], "all")]
        for place, row in enumerate(self.rows):
            cells = [f"{100 * accuracy:.1f}" for accuracy in row.seen]
            cells += [""] * (len(self.rows) - len(cells))
            lines.append(_line(f"after {place}", cells, f"{100 * row.overall:.1f}"))
        return "\n".join(["AccuracyMatrix(seen-class accuracy in per cent", *lines, ")"])

    @property
    def _last(self) -> Evaluation:
        if not self.rows:
            raise ValueError("no task was evaluated yet; add the evaluation after each")
        return self.rows[-1]


class Drift(NamedTuple):
    """The largest and the mean absolute change of coordinates, and their number."""

    largest: float
    mean: float
    coordinates: int


def structural_drift(before: Tensor | Iterable[Tensor], after: Tensor | Iterable[Tensor]) -> Drift:
    """Returns how far the coordinates of old nodes moved since their task ended; exactly 0 for
    frozen ones.

    Args:
        before: copies of the coordinates, such as `[nodes.incoming().weights.detach().clone(), …]`.
        after: the same coordinates in the same order.

    Raises:
        ValueError: there are none, or their numbers differ.

    Examples:
        >>> structural_drift(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        Drift(largest=0.5, mean=0.25, coordinates=2)
    """
    then = _as_list(before)
    since = _as_list(after)
    shapes_then = [list(part.shape) for part in then]
    shapes_since = [list(part.shape) for part in since]
    if shapes_then != shapes_since or not sum(part.numel() for part in then):
        raise ValueError(
            f"drift compares the same coordinates, got {shapes_then} before and"
            f" {shapes_since} after"
        )
    changes = []
    for a, b in zip(then, since, strict=True):
        moved = b.detach().double() - a.detach().double()
        changes.append(moved.abs().flatten().cpu())
    change = torch.cat(changes)
    return Drift(float(change.max()), float(change.mean()), len(change))


def _as_list(given: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return list(given)


def _logits(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, batch: int) -> Tensor:
    mode = evaluating(model) if isinstance(model, nn.Module) else nullcontext()
    with mode, torch.no_grad():
        return torch.cat([model(part) for part in x.split(batch)])


def _line(title: str, cells: list[str], last: str) -> str:
    """Returns a line of a printed matrix."""
    return f"  {title:<8}" + "".join(f"{cell:>7}" for cell in (*cells, last))


def _answers(logits: Tensor, classes: Sequence[int]) -> Tensor:
    columns = torch.tensor(list(classes), device=logits.device)
    return columns[logits[:, columns].argmax(1)]
