"""What a continual learner is measured by: accuracies after every task, forgetting, and drift of
old coordinates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grapnet.execution.evaluating import evaluating

from .memories import class_groups, require_examples, whole

# tasks at either end of the table that stands for a matrix, where it has more than twice as many
SHOWN = 5


class Evaluation(NamedTuple):
    """Shares of right answers, from 0 to 1.

    Attributes:
        overall: over the images of all evaluated tasks, with an argmax over the seen classes: it
            knows no task.
        seen: the same for the images of every task.
        local: for the images of every task, with an argmax within its classes: it is told the task.
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
    """Returns how often a model is right on the images of these tasks.

    A module is put in `eval` mode for it and back into its own. Where several logits are largest,
    the first class as listed wins.

    Args:
        model: maps inputs to logits [batch, n_classes].
        x: inputs [n, ...]; those of other classes are left out.
        y: class numbers [n].
        tasks: the classes of every task.
        seen: the classes among which it answers; those of all the tasks without.
        batch: how many images go through the model at a time.

    Raises:
        TypeError: x or y is no tensor, y holds other than whole numbers, or tasks are not groups of
            them.
        ValueError: a task has no images, or a class that was not seen or that the model has no
            logit for.
    """
    require_examples(x, y)
    groups = class_groups(tasks)
    evaluated = [number for classes in groups for number in classes]
    (seen,) = [evaluated] if seen is None else class_groups([seen])
    if not set(evaluated) <= set(seen):
        raise ValueError(f"tasks have classes among the seen ones, {list(seen)}, got {groups}")
    places = [torch.isin(y, torch.tensor(classes, device=y.device)) for classes in groups]
    for classes, rows in zip(groups, places, strict=True):
        if not bool(rows.any()):
            raise ValueError(f"there is no image of the classes {list(classes)}")
    logits = _logits(model, x, whole(batch, "batch"))
    if logits.dim() != 2 or logits.shape[1] <= max(seen):
        raise ValueError(
            f"class {max(seen)} needs logits [n, {max(seen) + 1}] or more, got {list(logits.shape)}"
        )
    right, local = [], []
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
        """Appends what was measured after the next task, on the tasks up to it."""
        if not isinstance(row, Evaluation):
            raise TypeError(f"a row is what evaluate(…) returns after a task, got {row!r}")
        if len(row.seen) != len(self.rows) + 1 or len(row.local) != len(row.seen):
            raise ValueError(
                f"this matrix has {len(self.rows)} rows, so the next is of {len(self.rows) + 1}"
                f" tasks, got one of {len(row.seen)} (seen) and {len(row.local)} (local). Add a row"
                " after every task; a run that goes on brings the earlier ones back first:"
                " gn.save(…, matrix=matrix), gn.restore(path, matrix=matrix)"
            )
        self.rows.append(row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows as plain data."""
        return {"rows": [row._asdict() for row in self.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the rows of `state_dict()`, in place of its own; what is no such state changes
        nothing.
        """
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
        return fmean(
            max(row.seen[n] for row in self.rows[n:-1]) - final[n] for n in range(len(final) - 1)
        )

    def table(self, kind: Literal["seen", "local"] = "seen") -> Tensor:
        """Returns the accuracies [tasks, tasks], float64; NaN for tasks that were still to come."""
        if kind not in ("seen", "local"):
            raise ValueError(f'a table is of "seen" or "local" accuracies, got {kind!r}')
        table = torch.full((len(self.rows), len(self.rows)), float("nan"), dtype=torch.float64)
        for n, row in enumerate(self.rows):
            table[n, : n + 1] = torch.tensor(getattr(row, kind), dtype=torch.float64)
        return table

    def __repr__(self) -> str:
        numbers = list(range(len(self.rows)))
        gap = len(numbers) > 2 * SHOWN
        shown = [*numbers[:SHOWN], *numbers[-SHOWN:]] if gap else numbers
        lines = [_line("task", [str(n) for n in shown], "all", gap)]
        for place in shown:
            row = self.rows[place]
            cells = [f"{100 * row.seen[n]:.1f}" if n <= place else "" for n in shown]
            lines.append(_line(f"after {place}", cells, f"{100 * row.overall:.1f}", gap))
        lines[SHOWN + 1 : SHOWN + 1] = ["  …"] if gap else []
        return (
            "\n".join(["AccuracyMatrix(seen-class accuracy in per cent", *lines, ")"])
            if shown
            else "AccuracyMatrix()"
        )

    @property
    def _last(self) -> Evaluation:
        if not self.rows:
            raise ValueError("no task was evaluated yet; add the evaluation after each")
        return self.rows[-1]


class Drift(NamedTuple):
    """How far coordinates moved: the largest and the mean absolute change, and how many they
    are.
    """

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
        ValueError: there are none, or not as many of them.

    Examples:
        >>> structural_drift(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        Drift(largest=0.5, mean=0.25, coordinates=2)
    """
    then, since = (
        [given] if isinstance(given, Tensor) else list(given) for given in (before, after)
    )
    for part in (*then, *since):
        if not isinstance(part, Tensor):
            raise TypeError(f"coordinates are a tensor, or several, got a {type(part).__name__}")
    shapes = [[list(part.shape) for part in parts] for parts in (then, since)]
    if shapes[0] != shapes[1] or not sum(part.numel() for part in then):
        raise ValueError(
            f"drift compares the same coordinates, got {shapes[0]} before and {shapes[1]} after"
        )
    pairs = zip(then, since, strict=True)
    change = torch.cat(
        [(b.detach().double() - a.detach().double()).abs().flatten().cpu() for a, b in pairs]
    )
    return Drift(float(change.max()), float(change.mean()), len(change))


def _logits(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor, batch: int) -> Tensor:
    with evaluating(model) if isinstance(model, nn.Module) else torch.no_grad():
        return torch.cat([model(part) for part in x.split(batch)])


def _line(title: str, cells: list[str], last: str, gap: bool) -> str:
    """Returns a line of the table that stands for a matrix, with a gap in its middle where tasks
    are left out.
    """
    middle = ["…" if cells[SHOWN] else ""] if gap else []
    return f"  {title:<8}" + "".join(
        f"{cell:>7}" for cell in (*cells[:SHOWN], *middle, *cells[SHOWN:], last)
    )


def _answers(logits: Tensor, classes: Sequence[int]) -> Tensor:
    columns = torch.tensor(list(classes), device=logits.device)
    return columns[logits[:, columns].argmax(1)]
