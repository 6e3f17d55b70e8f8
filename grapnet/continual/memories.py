"""What streams, memories and measurements accept: examples, classes, whole numbers."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

# that torch can count with
_WHOLE = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def require_examples(x: Any, y: Any, logits: Any = None) -> None:
    """Raises where inputs, class numbers and logits are not tensors of one row an example.

    Raises:
        TypeError: one is no tensor, or y does not hold whole numbers.
        ValueError: y has another shape than [n], or the others have not as many rows.
    """
    parts = {"x": x, "y": y} if logits is None else {"x": x, "y": y, "logits": logits}
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{name} is a tensor, got {type(part).__name__}; torch.as_tensor({name}) makes one"
            )
    if y.dtype not in _WHOLE:
        raise TypeError(
            f"y holds class numbers, which are whole, got {y.dtype}; y.long() makes them so"
        )
    if y.dim() != 1:
        hint = "; of one-hot rows take y.argmax(1)" if y.dim() == 2 else ""
        raise ValueError(f"y is [n], one class number an example, got {list(y.shape)}{hint}")
    if any(part.dim() == 0 or len(part) != len(y) for part in parts.values()):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
        raise ValueError(f"an example is one row of each part, got {shapes}")


def class_groups(tasks: Any) -> list[tuple[int, ...]]:
    """Returns the classes of every task as plain numbers.

    Raises:
        TypeError: they are not groups of whole numbers.
        ValueError: there is no task, one has no classes, or a number is negative.
    """
    try:
        groups = [tuple(operator.index(number) for number in group) for group in tasks]
    except TypeError:
        raise TypeError(
            "the classes of tasks come in groups, such as [(0, 1), (2, 3)] or stream.classes, got"
            f" {tasks!r}"
        ) from None
    if (
        not groups
        or not all(groups)
        or any(not 0 <= number < 2**63 for group in groups for number in group)
    ):
        raise ValueError(
            f"every task has classes, which are numbers from 0 to 2^63 - 1, got {groups}"
        )
    return groups


def whole(number: Any, what: str, least: int = 1) -> int:
    """Returns a whole number as Python has it; raises ValueError for anything else."""
    try:
        found = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = None
    if found is None or found < least:
        raise ValueError(f"{what} is a whole number, at least {least}, got {number!r}")
    return found


class Batch(NamedTuple):
    """Inputs [batch, ...], class numbers [batch], and the logits that were stored with them, if
    any.
    """

    x: Tensor
    y: Tensor
    logits: Tensor | None = None


class Memory(Protocol):
    """What a training loop asks of a memory."""

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offers rows; the memory decides which it keeps."""
        ...

    def sample(self, n: int) -> Batch | None:
        """Returns up to `n` of the rows it keeps; None while there is none."""
        ...


class ReservoirMemory:
    """Keeps a uniform sample of all rows that were offered (reservoir sampling, Vitter's algorithm
    R).

    Storing and sampling draw from generators of their own, and every offered row takes the same
    number of draws. So what is stored depends on the seed and on the rows in their order, whatever
    is sampled in between and however the rows come in batches.

    Args:
        capacity: how many rows are kept.
        seed: of both generators.

    Examples:
        >>> memory = ReservoirMemory(3, seed=0)
        >>> memory.add(torch.arange(10.0).unsqueeze(1), torch.arange(10))
        >>> len(memory), memory.offered, memory.numbers, memory.bytes
        (3, 10, 3, 36)
    """

    _draws = 1  # of a row that is offered

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.capacity, seed = whole(capacity, "capacity"), whole(seed, "seed", least=0)
        # [capacity, ...] each, of which the first len(self) rows count
        self._stored: Batch | None = None
        self._labels: list[int] = []  # of the stored rows
        self._counts: Counter[int] = Counter()  # of these labels
        self._offered: Counter[int] = Counter()  # rows, by class
        self._storing, self._sampling = _generator(seed, 0), _generator(seed, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, stored={len(self)},"
            f" offered={self.offered})"
        )

    @property
    def offered(self) -> int:
        """How many rows were offered so far."""
        return self._offered.total()

    @property
    def counts(self) -> dict[int, int]:
        """How many rows of every class are stored, by class number."""
        return dict(sorted((+self._counts).items()))

    @property
    def content(self) -> Batch | None:
        """All that is stored, as a view; None while that is nothing."""
        return None if self._stored is None else _each(self._stored, lambda part: part[: len(self)])

    @property
    def numbers(self) -> int:
        """How many numbers the stored inputs and logits are; labels are not counted."""
        content = self.content
        return (
            0
            if content is None
            else sum(p.numel() for p in (content.x, content.logits) if p is not None)
        )

    @property
    def bytes(self) -> int:
        """How many bytes the stored rows take, labels included."""
        return sum(part.nbytes for part in self.content or () if part is not None)

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offers rows one after the other; whether one is kept, and in whose place, is drawn.

        Args:
            x: inputs [batch, ...]; copies are kept, on the device and in the dtype of the first
                ones.
            y: class numbers [batch].
            logits: [batch, n_classes], for DER; with every call or with none.

        Raises:
            TypeError: a part is no tensor, or y holds other than whole numbers.
            ValueError: the parts do not fit each other or what is stored.

        After an error nothing was stored or drawn.
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
        places, taken = (
            torch.tensor(list(written), dtype=torch.long),
            torch.tensor([*written.values()]).long(),
        )
        for stored, given in zip(self._stored, rows, strict=True):
            if stored is not None and given is not None:
                stored[places.to(stored.device)] = given[taken.to(given.device)].to(stored)

    def sample(self, n: int) -> Batch | None:
        """Returns `n` different stored rows, or all of them where there are fewer; None while the
        memory is empty.
        """
        n = whole(n, "n, the rows of a sample,", least=0)
        if not len(self) or self._stored is None:
            return None
        rows = torch.randperm(len(self), generator=self._sampling, device="cpu")[:n].to(
            self._stored.y.device
        )
        return _each(self._stored, lambda part: part[rows])

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the rows and of the generators: a memory that loads them goes on bit
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
            ValueError: it is the state of a memory of another capacity, or is damaged; nothing was
                changed.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"the state is that of a memory of capacity {state['capacity']}, and this one has"
                f" {self.capacity}"
            )
        content = Batch(**state["content"]) if state["content"] else None
        size = 0 if content is None else len(content.y)
        if size > self.capacity or any(
            len(part) != size for part in content or () if part is not None
        ):
            raise ValueError(f"the stored parts are not of one length up to {self.capacity}")
        storing, sampling = (torch.Generator() for _ in range(2))
        storing.set_state(state["storing"])
        sampling.set_state(state["sampling"])
        self._offered = Counter(state["offered"])
        self._storing, self._sampling = storing, sampling
        self._labels = [] if content is None else content.y.tolist()
        self._counts = Counter(self._labels)
        self._stored = (
            None
            if content is None
            else _each(content, lambda part: _with_room(part, self.capacity))
        )

    def _place(self, label: int, drawn: list[float]) -> int | None:
        """Returns which place of a full memory the row just offered takes, if any."""
        place = int(drawn[0] * self.offered)
        return place if place < self.capacity else None


class BalancedMemory(ReservoirMemory):
    """Keeps a uniform sample of every class, all of the same size as far as each was offered often
    enough.

    Once it is full, a class that stores at least two rows fewer than the largest takes the place of
    a random row of the largest ones; any other row competes with its own class (Chrysakis and
    Moens, 2020). So once every class was offered as many rows as its share, their counts differ by
    at most one.

    Examples:
        >>> memory = BalancedMemory(7, seed=0)
        >>> memory.add(torch.zeros(90, 1), torch.tensor([0] * 60 + [1] * 20 + [2] * 10))
        >>> sorted(memory.counts.values())
        [2, 2, 3]
    """

    _draws = 2

    def _place(self, label: int, drawn: list[float]) -> int | None:
        counts, most = self._counts, max(self._counts.values())
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
