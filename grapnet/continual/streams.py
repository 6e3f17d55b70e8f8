"""Class-incremental streams: the same images in the same batches for every method, and one loop
over them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .losses import Objective
from .memories import Batch, Memory, class_groups, require_examples, whole


@dataclass(frozen=True, eq=False)
class Task:
    """Some classes of a stream, once through.

    Attributes:
        number: 0 for the first task.
        classes: the classes that it brings.
        seen: the classes of the tasks up to this one.
        rows: which rows of the stream's data it shows, in their order.
        batch: how many at a time; the last ones may be fewer.
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
        """The batches, one after the other; every use begins afresh."""
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
    """A class-incremental stream: task after task, each with classes of its own, shown once.

    Which images of a class are used depends on the seed and the class; their order depends on the
    seed and the task. Nothing else is drawn, so every method gets the same batches, and
    `stream[3:]` is what a run that stopped after three tasks goes on with.

    Args:
        x: inputs [n, ...].
        y: class numbers [n].
        tasks: the classes of every task, or how many tasks share the classes of `y` in ascending
            order.
        batch: rows of a batch.
        seed: of the subset and the order.
        per_class: how many rows of every class are used; all of them without.

    Raises:
        TypeError: x or y is no tensor, y holds other than whole numbers, or tasks are not groups of
            them.
        ValueError: a class comes twice, or has fewer rows than asked for.

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
        batch, seed = whole(batch, "batch"), whole(seed, "seed", least=0)
        per_class = None if per_class is None else whole(per_class, "per_class")
        self._x, self._y, labels = x, y, y.cpu().numpy()
        groups = (
            _divided(np.unique(labels).tolist(), int(tasks))
            if isinstance(tasks, Integral)
            else tasks
        )
        self.classes = class_groups(groups)
        seen = [number for group in self.classes for number in group]
        if len(set(seen)) < len(seen):
            raise ValueError(f"no class comes twice in a stream, got {self.classes}")
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
        """The rows of its classes that `per_class` leaves out, to choose settings on."""
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
    """What a run over a stream took: updates in all, and the seconds of every task.

    The seconds of a task count `before_task`, so growth is in them, and leave `after_task` out, so
    evaluation is not.
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

    Every update draws its own replayed batch. A batch goes into the memory after its updates, so it
    is never replayed beside itself; logits are stored where `objective.keeps_logits`, as they are
    before these updates. The mode of the model (`train`, `eval`) is the caller's.

    Args:
        model: maps inputs to logits [batch, n_classes].
        stream: a `TaskStream`, or the tasks of one that are left.
        objective: what an update minimises, such as `ExperienceReplay()`.
        memory: what is replayed from; None replays nothing.
        optimizer: of the model's parameters; `optimizer.state.clear()` in a hook renews a plain
            one.
        replay_batch: rows of a replayed batch.
        updates_per_batch: how many updates every batch of the stream gets.
        before_task: called before the first batch of a task: the place to grow.
        after_step: called after every update: the place for schedulers and rules.
        after_task: called after the last batch of a task: the place to freeze and to evaluate.

    Raises:
        TypeError: a single task, the class of an objective, or something that is no memory was
            given.
        ValueError: the objective compares with stored logits, and there is no memory; or a number
            is too small.
    """
    _require_parts(stream, objective, memory)
    replay_batch, updates_per_batch = (
        whole(replay_batch, "replay_batch"),
        whole(updates_per_batch, "updates_per_batch"),
    )
    number, seconds = 0, []
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


def _require_parts(stream: Any, objective: Any, memory: Any) -> None:
    """Raises for what is easily given in the place of something else, and for an objective without
    its memory.
    """
    if isinstance(stream, Task):
        raise TypeError(
            "a run goes over a stream, or over a list of tasks: [task]; got a single task"
        )
    if isinstance(objective, type):
        raise TypeError(
            f"an objective is an object, {objective.__name__}(…) with its settings, not the class"
        )
    if memory is not None and not (hasattr(memory, "sample") and hasattr(memory, "add")):
        raise TypeError(
            "a memory has add and sample, as ReservoirMemory(200, seed=0), or is None; got"
            f" {memory!r}"
        )
    if memory is None and getattr(objective, "keeps_logits", False):
        raise ValueError(
            f"{type(objective).__name__} compares with logits that a memory has stored, and without"
            " one it would train without that term; give a memory, or train with"
            " ExperienceReplay()"
        )


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
    return (
        rows
        if per_class is None
        else np.random.default_rng([seed, 0, number]).permutation(rows)[:per_class]
    )
