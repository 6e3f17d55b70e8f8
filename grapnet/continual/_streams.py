"""Class-incremental streams: the same images in the same batches for every method, and one loop
over them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._losses import Objective
from ._memories import Batch, Memory, require_examples


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        number: 0 for the first task.
        classes: its classes.
        seen: the classes of the tasks up to this one.
        rows: its rows of the data, in order.
        batch: the batch size; the last batch may be smaller.
    """

    number: int
    classes: tuple[int, ...]
    seen: tuple[int, ...]
    rows: Tensor
    batch: int
    _x: Tensor = field(repr=False)
    _y: Tensor = field(repr=False)

    @property
    def batches(self) -> Iterator[Batch]:
        """An iterator over the batches."""
        return (Batch(self._x[rows], self._y[rows]) for rows in self.rows.split(self.batch))

    @property
    def content(self) -> Batch:
        """All of it in one batch, in order."""
        return Batch(self._x[self.rows], self._y[self.rows])

    def __len__(self) -> int:
        """Returns the number of batches."""
        return -(-len(self.rows) // self.batch)

    def __repr__(self) -> str:
        of = (
            f"classes={self.classes}, seen={self.seen}, samples={len(self.rows)},"
            f" batch={self.batch}"
        )
        return f"Task(number={self.number}, {of})"


class TaskStream(Sequence[Task]):
    """A class-incremental stream of tasks, each with its own classes, shown once.

    The images of a class depend on the seed and the class, their order on the seed and the task.
    Every method therefore gets the same batches, and `stream[3:]` continues a run that stopped
    after three tasks.

    Args:
        x: inputs [n, ...].
        y: class numbers [n].
        tasks: the classes of every task, or how many tasks share the classes of `y` in ascending
            order.
        batch: rows of a batch.
        seed: the seed of the subset and the order.
        per_class: the number of rows per class; all by default.

    Raises:
        ValueError: x and y have different numbers of rows, or a class occurs twice or has fewer
            rows than `per_class`.

    Examples:
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 4
        >>> stream = TaskStream(x, y, tasks=[(0, 1), (3, 2)], batch=8, seed=0, per_class=6)
        >>> [(task.number, task.classes, task.seen, len(task)) for task in stream]
        [(0, (0, 1), (0, 1), 2), (1, (3, 2), (0, 1, 3, 2), 2)]
        >>> stream
        TaskStream(tasks=2, classes=4, samples=24, batch=8)
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        tasks: Sequence[Sequence[int]] | int,
        batch: int,
        seed: int,
        per_class: int | None = None,
    ) -> None:
        require_examples(x, y)
        self._x = x
        self._y = y
        labels = y.cpu().numpy()
        groups = tasks
        if isinstance(groups, int):
            groups = _divided(np.unique(labels).tolist(), groups)
        self.classes = [tuple(map(int, group)) for group in groups]
        seen = [number for group in self.classes for number in group]
        if len(set(seen)) < len(seen):
            raise ValueError(f"a class occurs twice in the stream, got {self.classes}")
        self._used = {number: _subset(labels, number, seed, per_class) for number in seen}
        self._tasks = []
        for number, classes in enumerate(self.classes):
            rows = np.random.default_rng([seed, 1, number]).permutation(
                np.concatenate([self._used[c] for c in classes])
            )
            upto = tuple(c for group in self.classes[: number + 1] for c in group)
            self._tasks.append(
                Task(number, classes, upto, torch.from_numpy(rows).to(x.device), batch, x, y)
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        samples = sum(map(len, self._used.values()))
        return (
            f"TaskStream(tasks={len(self)}, classes={len(self._used)}, samples={samples},"
            f" batch={self[0].batch})"
        )

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        return self._tasks[index]

    @property
    def left_out(self) -> Batch:
        """The rows that `per_class` excludes, for choosing settings."""
        of_stream = np.flatnonzero(np.isin(self._y.cpu().numpy(), list(self._used)))
        left = np.setdiff1d(of_stream, np.concatenate(list(self._used.values())))
        rows = torch.from_numpy(left).to(self._x.device)
        return Batch(self._x[rows], self._y[rows])


class Step(NamedTuple):
    """One update of a run: its number from 0 on, its task, and its loss (detached, still on its
    device).
    """

    number: int
    task: Task
    loss: Tensor


class Run(NamedTuple):
    """The cost of a run over a stream: the number of updates, and the seconds of every task.

    The seconds of a task include `before_task` and exclude `after_task`.
    """

    updates: int
    seconds: list[float]


def train_on_stream(
    model: nn.Module | Callable[[Tensor], Tensor],
    stream: Iterable[Task],
    objective: Objective,
    memory: Memory | None,
    optimizer: Optimizer,
    *,
    replay_batch: int = 64,
    updates_per_batch: int = 1,
    before_task: Callable[[Task], object] | None = None,
    after_step: Callable[[Step], object] | None = None,
    after_task: Callable[[Task], object] | None = None,
) -> Run:
    """Trains a model in one pass over a stream, with replay.

    Every update draws its own replay batch. A batch enters the memory after its updates; if
    `objective.keeps_logits`, with its logits before them. The mode of the model (`train`, `eval`)
    is not changed.

    Args:
        model: maps inputs to logits [batch, n_classes].
        stream: a `TaskStream`, or the remaining tasks of one.
        objective: the objective of an update, such as `ExperienceReplay()`.
        memory: the replay memory; None replays nothing.
        optimizer: the optimizer; `optimizer.state.clear()` in a hook resets a plain one.
        replay_batch: rows of a replayed batch.
        updates_per_batch: the number of updates per batch.
        before_task: called before the first batch of a task, for example to grow.
        after_step: called after every update, for schedulers and rules.
        after_task: called after the last batch of a task, for example to freeze and evaluate.

    Raises:
        ValueError: the objective needs stored logits and there is no memory.
    """
    if memory is None and getattr(objective, "keeps_logits", False):
        raise ValueError(
            f"{type(objective).__name__} needs logits stored in a memory; pass a memory, or use"
            " ExperienceReplay()"
        )
    number = 0
    seconds = []
    for task in stream:
        start = time.perf_counter()
        if before_task is not None:
            before_task(task)
        for current in task.batches:
            kept = None
            if memory is not None and getattr(objective, "keeps_logits", False):
                with torch.no_grad():
                    kept = model(current.x)
            for _ in range(updates_per_batch):
                replay = None if memory is None else memory.sample(replay_batch)
                optimizer.zero_grad()
                loss = objective(model, current, replay, task.seen)
                loss.backward()
                optimizer.step()
                if after_step is not None:
                    after_step(Step(number, task, loss.detach()))
                number += 1
            if memory is not None:
                memory.add(current.x, current.y, kept)
        seconds.append(time.perf_counter() - start)
        if after_task is not None:
            after_task(task)
    return Run(number, seconds)


def _divided(classes: list[int], tasks: int) -> list[list[int]]:
    if tasks < 1 or not classes or len(classes) % tasks:
        raise ValueError(
            f"{len(classes)} classes do not make {tasks} tasks of the same size; name the classes"
            " of each"
        )
    each = len(classes) // tasks
    return [classes[first : first + each] for first in range(0, len(classes), each)]


def _subset(labels: np.ndarray, number: int, seed: int, per_class: int | None) -> np.ndarray:
    """Returns the rows of a class that the stream uses."""
    rows = np.flatnonzero(labels == number)
    if len(rows) < (per_class or 1):
        raise ValueError(
            f"class {number} has {len(rows)} rows, fewer than the {per_class or 1} of the stream"
        )
    if per_class is None:
        return rows
    return np.random.default_rng([seed, 0, number]).permutation(rows)[:per_class]
