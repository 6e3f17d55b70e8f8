"""Replay memories."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


def require_examples(x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
    """Raises ValueError unless inputs and logits have one row for each class number in y [n]."""
    parts = [x, y] if logits is None else [x, y, logits]
    if y.dim() != 1 or any(len(part) != len(y) for part in parts):
        shapes = [list(part.shape) for part in parts]
        raise ValueError(f"an example is one row of x, y [n] and logits, got {shapes}")


class Batch(NamedTuple):
    """Inputs [batch, ...], class numbers [batch], and the logits that were stored with them, if
    any.
    """

    x: Tensor
    y: Tensor
    logits: Tensor | None = None


class Memory(Protocol):
    """The protocol of a memory."""

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offers rows; the memory decides which to keep."""
        ...

    def sample(self, n: int) -> Batch | None:
        """Returns up to `n` of the stored rows; None if there are none."""
        ...


class ReservoirMemory:
    """Keeps a uniform sample of all offered rows (reservoir sampling, Vitter's algorithm R).

    Storing and sampling have separate generators, and every offered row takes the same number of
    draws. The content therefore depends only on the seed and on the rows in their order, not on
    sampling or batching.

    Args:
        capacity: the largest number of rows.
        seed: the seed of both generators.

    Examples:
        >>> memory = ReservoirMemory(3, seed=0)
        >>> memory.add(torch.arange(10.0).unsqueeze(1), torch.arange(10))
        >>> len(memory), memory.offered, memory.numbers, memory.bytes
        (3, 10, 3, 36)
    """

    _draws = 1  # of a row that is offered

    def __init__(self, capacity: int, *, seed: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is at least 1, got {capacity}")
        self.capacity = capacity
        # [capacity, ...] each, of which the first len(self) rows count
        self._stored: Batch | None = None
        self._labels: list[int] = []  # of the stored rows
        self._counts: Counter[int] = Counter()  # of these labels
        self._offered: Counter[int] = Counter()  # rows, by class
        self._storing = _generator(seed, 0)
        self._sampling = _generator(seed, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, stored={len(self)},"
            f" offered={self.offered})"
        )

    @property
    def offered(self) -> int:
        """The number of rows offered so far."""
        return self._offered.total()

    @property
    def counts(self) -> dict[int, int]:
        """The number of stored rows by class."""
        return dict(sorted((+self._counts).items()))

    @property
    def content(self) -> Batch | None:
        """Everything that is stored, as a view; None if empty."""
        return None if self._stored is None else _each(self._stored, lambda part: part[: len(self)])

    @property
    def numbers(self) -> int:
        """The number of stored numbers in inputs and logits, without labels."""
        content = self.content
        if content is None:
            return 0
        return sum(p.numel() for p in (content.x, content.logits) if p is not None)

    @property
    def bytes(self) -> int:
        """The number of bytes of the stored rows, labels included."""
        return sum(part.nbytes for part in self.content or () if part is not None)

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offers rows one by one; which are kept is random.

        Args:
            x: inputs [batch, ...]; copies are kept, on the device and in the dtype of the first
                ones.
            y: class numbers [batch].
            logits: [batch, n_classes], for DER; with every call or with none.

        Raises:
            ValueError: the parts do not fit each other or what is stored; nothing was stored or
                drawn.
        """
        require_examples(x, y, logits)
        rows = _each(Batch(x, y, logits), Tensor.detach)
        if self._stored is not None and _shapes(rows) != _shapes(self._stored):
            raise ValueError(
                f"the memory keeps rows of {_shapes(self._stored)}, got {_shapes(rows)}"
            )
        if self._stored is None:
            self._stored = _each(rows, lambda part: part.new_empty(self.capacity, *part.shape[1:]))
        chances = torch.rand(
            len(y), self._draws, dtype=torch.float64, generator=self._storing, device="cpu"
        )
        written: dict[int, int] = {}  # place -> row; a later row takes the place of an earlier one
        for row, (label, drawn) in enumerate(zip(y.tolist(), chances.tolist(), strict=True)):
            self._offered[label] += 1
            place = len(self) if len(self) < self.capacity else self._place(label, drawn)
            if place is not None:
                self._counts.subtract(self._labels[place : place + 1])
                self._counts[label] += 1
                self._labels[place : place + 1] = [label]
                written[place] = row
        places = torch.tensor(list(written), dtype=torch.long)
        taken = torch.tensor([*written.values()]).long()
        for stored, given in zip(self._stored, rows, strict=True):
            if stored is not None and given is not None:
                stored[places.to(stored.device)] = given[taken.to(given.device)].to(stored)

    def sample(self, n: int) -> Batch | None:
        """Returns `n` different stored rows, or all if there are fewer; None if the memory is
        empty.
        """
        if not len(self) or self._stored is None:
            return None
        rows = torch.randperm(len(self), generator=self._sampling, device="cpu")[:n].to(
            self._stored.y.device
        )
        return _each(self._stored, lambda part: part[rows])

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the rows and of the generators; a memory that loads them continues bit
        for bit.
        """
        parts = {} if self.content is None else self.content._asdict()
        return {
            "capacity": self.capacity,
            "offered": dict(self._offered),
            "content": {name: part.clone() for name, part in parts.items() if part is not None},
            "storing": self._storing.get_state(),
            "sampling": self._sampling.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: the capacity differs; nothing changes.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"the state is that of a memory of capacity {state['capacity']}, and this one has"
                f" {self.capacity}"
            )
        self._storing.set_state(state["storing"])
        self._sampling.set_state(state["sampling"])
        self._offered = Counter(state["offered"])
        self._stored = None
        self._labels = []
        if state["content"]:
            content = Batch(**state["content"])
            self._stored = _each(content, lambda part: _with_room(part, self.capacity))
            self._labels = content.y.tolist()
        self._counts = Counter(self._labels)

    def _place(self, label: int, drawn: list[float]) -> int | None:
        """Returns the position that an offered row takes in a full memory, if any."""
        place = int(drawn[0] * self.offered)
        return place if place < self.capacity else None


class BalancedMemory(ReservoirMemory):
    """Keeps a uniform sample of every class, of equal sizes if enough rows of each were offered.

    When it is full, a row of a class with at least two rows fewer than the largest replaces a
    random row of the largest classes; any other row competes within its class (Chrysakis and Moens,
    2020). If every class was offered as many rows as its share, counts differ by at most one.

    Examples:
        >>> memory = BalancedMemory(7, seed=0)
        >>> memory.add(torch.zeros(90, 1), torch.tensor([0] * 60 + [1] * 20 + [2] * 10))
        >>> sorted(memory.counts.values())
        [2, 2, 3]
    """

    _draws = 2

    def _place(self, label: int, drawn: list[float]) -> int | None:
        counts = self._counts
        most = max(self._counts.values())
        if counts[label] < most - 1:
            given_up = {other for other, count in counts.items() if count == most}
        elif drawn[0] * self._offered[label] < counts[label]:
            given_up = {label}
        else:
            return None
        places = [place for place, other in enumerate(self._labels) if other in given_up]
        return places[int(drawn[1] * len(places))]


def _generator(seed: int, purpose: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, purpose]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def _each(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    return Batch(
        function(batch.x),
        function(batch.y),
        None if batch.logits is None else function(batch.logits),
    )


def _with_room(part: Tensor, capacity: int) -> Tensor:
    """Returns a copy with room for `capacity` rows."""
    room = part.new_empty(capacity, *part.shape[1:])
    room[: len(part)] = part
    return room


def _shapes(batch: Batch) -> str:
    """Returns the shapes of one row, as in "x [64], y []"."""
    shapes = {
        name: list(part.shape[1:]) for name, part in batch._asdict().items() if part is not None
    }
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
