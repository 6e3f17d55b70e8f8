"""The journal: commits as receipts, and the way back."""

import json
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import time as now
from typing import Any, Literal, NamedTuple, SupportsIndex, overload
from uuid import uuid4

import torch
from torch import Tensor

from ._change import Change
from ._errors import HistoryError
from ._index_map import IndexMap
from ._transition import Topology

# Bytes that the Python objects and tensors of a commit take beside the content of its tensors.
_OBJECTS = 10_000
_PLAIN = (str, int, float, bool, type(None))

Kind = Literal["edit", "undo", "redo", "trial", "end"]


@dataclass(frozen=True)
class Joint:
    """Says that a commit is one part of a transaction over several nets.

    Attributes:
        name: what the parts of one transaction share, and no other commit has.
        part: which of them this is, from 0.
        parts: how many nets the transaction changed.
    """

    name: str
    part: int
    parts: int

    @classmethod
    def of(cls, parts: int, name: str | None = None) -> "list[Joint | None]":
        """Returns what the parts of a transaction carry, of one without a name yet if none is
        given.

        A transaction over a single net is a commit like any other, which carries None.
        """
        if parts <= 1:
            return [None] * parts
        name = name or uuid4().hex  # from the system, so that no generator of torch moves
        return [cls(name, part, parts) for part in range(parts)]


@dataclass(frozen=True, eq=False)
class Commit:
    """The receipt of one commit: what happened, why, and how every touched vector moved.

    Attributes:
        version: the graph's version after it.
        reason: why, in the words of whoever edited.
        by: which rule or person edited, when said.
        operations: what was asked for, as plain data.
        change: what was done.
        parameters: how the coordinates of each touched Parameter moved, by the Parameter's name in
            the net. Emptied, like the values inside `change`, once the journal no longer keeps what
            undo needs.
        undoes: the version of the commit that this one takes back, for undo, redo and the end of a
            trial.
        joint: which part it is of a transaction over several nets; None for one of its own.
        time: when, in seconds since 1970.
        wirings: the topology that each moved transition is about to have; only followers see it,
            while they prepare.
        view: what a forward pass will read after it; only followers see it, while they prepare.
        decision: whether it took effect; only followers see it, while they prepare.
        outlined: the counts of a commit of which the journal or the file keeps no details.
        kind: "edit", "undo", "redo", or "trial" and the "end" of one; for followers, while they
            prepare.
    """

    version: int
    reason: str
    change: Change
    by: str | None = None
    operations: tuple[dict[str, Any], ...] = ()
    parameters: dict[str, IndexMap] = field(default_factory=dict)
    undoes: int | None = None
    joint: Joint | None = None
    wirings: dict[int, Topology] = field(default_factory=dict)
    view: Any = None
    decision: Any = None
    time: float = field(default_factory=now)
    outlined: dict[str, int] | None = None
    kind: Kind = "edit"

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes and relations came and went, and how many coordinates were frozen or
        released.
        """
        if self.outlined is not None:
            return self.outlined
        return self.change.counts()

    @property
    def ends_trial(self) -> bool:
        """True for the commit that takes a trial back and restores the version of before it."""
        return self.kind == "end"

    @property
    def nodes(self) -> dict[int, IndexMap]:
        """How the rows of each touched layer moved."""
        return {number: change.index for number, change in self.change.layers.items()}

    @property
    def relations(self) -> dict[int, IndexMap]:
        """How the relations of each touched transition moved."""
        return {t: change.index for t, change in self.change.transitions.items()}

    def summary(self) -> "Commit":
        """Returns the commit as it is kept for ever, without the values that undo needs."""
        return replace(self, change=self.change.without_values(), parameters={})

    @property
    def has_details(self) -> bool:
        """False once the journal no longer keeps which nodes and relations it was about."""
        return bool(self.change.layers or self.change.transitions)

    @property
    def turned(self) -> str | None:
        """What became of the coordinates that it turned, frozen or unfrozen, where its operations
        tell; else None.
        """
        asked = {operation.get("operation") for operation in self.operations}
        ways = {"freeze": "frozen", "unfreeze": "unfrozen"}
        told = [ways[operation] for operation in ways if operation in asked]
        return told[0] if len(told) == 1 else None

    def __repr__(self) -> str:
        way = {"coordinates_turned": f"coordinates_{self.turned or 'turned'}"}
        counts = ", ".join(
            f"{way.get(name, name)} {count}" for name, count in self.counts.items() if count
        )
        by = f", by {self.by}" if self.by else ""
        joint = f", part {self.joint.part + 1} of {self.joint.parts}" if self.joint else ""
        return (
            f"Commit(version={self.version}, {self.reason!r}{by}{joint}: {counts or 'names only'})"
        )


class Outlines:
    """The outline of every commit, in columns: about 150 bytes a commit.

    A row holds the version, the time in microseconds, the version that it undoes (0 for none), the
    counts, and where its text ends. The text is JSON: the reason, the author, the kinds of
    operations with the remarks, and the part of a joint transaction.
    """

    COUNTS = (
        "nodes_added",
        "nodes_removed",
        "relations_added",
        "relations_removed",
        "coordinates_turned",
    )
    WIDTH = 3 + len(COUNTS) + 1

    def __init__(self) -> None:
        self.numbers = array("q")  # [commits * WIDTH]
        self.text = bytearray()

    def __len__(self) -> int:
        return len(self.numbers) // self.WIDTH

    def row(self, commit: Commit) -> tuple[list[int], bytes]:
        """Returns the numbers and the text of the next row, without writing it."""
        # Remarks are the words of whoever edited and stay; of other operations the kind does.
        operations: list[str | dict[str, Any]] = []
        for operation in commit.operations:
            kind = operation["operation"]
            if kind == "remark":
                operations.append({k: v for k, v in operation.items() if type(v) in _PLAIN})
            elif kind not in operations:
                operations.append(kind)
        joint = None
        if commit.joint is not None:
            joint = [commit.joint.name, commit.joint.part, commit.joint.parts]
        by = None
        if commit.by is not None:
            by = str(commit.by)
        words = [str(commit.reason), by, operations, joint]
        text = json.dumps(words, separators=(",", ":")).encode()
        counts = commit.counts
        numbers = [commit.version, round(commit.time * 1e6), commit.undoes or 0]
        numbers += [counts[name] for name in self.COUNTS]
        numbers.append(len(self.text) + len(text))
        return numbers, text

    def write(self, place: int, numbers: list[int], text: bytes) -> None:
        """Writes the last row; writing it again, also after half of it, changes nothing."""
        del self.numbers[place * self.WIDTH :]
        self.numbers.extend(numbers)
        del self.text[numbers[-1] - len(text) :]
        self.text += text

    def append(self, commit: Commit) -> None:
        """Adds the row of a commit."""
        self.write(len(self), *self.row(commit))

    def version(self, place: int) -> int:
        """Returns the version of a commit."""
        return self.numbers[place * self.WIDTH]

    def find(self, version: int) -> int:
        """Returns the place of the first commit that leads to `version` or a later one."""
        return bisect_left(range(len(self)), version, key=self.version)

    def commit(self, place: int) -> Commit:
        """Returns the commit of one row, without details."""
        row = self.numbers[place * self.WIDTH : (place + 1) * self.WIDTH]
        start = 0
        if place > 0:
            start = self.numbers[place * self.WIDTH - 1]
        reason, by, kept, joint = json.loads(self.text[start : row[-1]])
        operations = [{"operation": o} if isinstance(o, str) else o for o in kept]
        return Commit(
            row[0],
            reason,
            Change({}, {}),
            by,
            tuple(operations),
            undoes=row[2] or None,
            joint=joint and Joint(*joint),
            time=row[1] / 1e6,
            outlined=dict(zip(self.COUNTS, row[3:-1], strict=True)),
        )

    def copy(self) -> "Outlines":
        """Returns columns of its own."""
        copied = Outlines()
        copied.numbers = self.numbers[:]
        copied.text = self.text[:]
        return copied


class History(Sequence[Commit]):
    """Commits in order, each made when it is read; prints one of them a line."""

    __slots__ = ("_details", "_outlines", "_places")

    def __init__(self, outlines: Outlines, details: dict[int, Commit], places: range) -> None:
        self._outlines = outlines
        # A copy: the journal lets go of values and details that this history still has.
        self._details = dict(details)
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Commit: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Commit | History":
        if isinstance(index, slice):
            return History(self._outlines, self._details, self._places[index])
        place = self._places[index]
        return self._details.get(place) or self._outlines.commit(place)

    def __repr__(self) -> str:
        if not self:
            return "History()"
        return "\n".join(["History(", *(f"  {commit!r}" for commit in self), ")"])


@dataclass(frozen=True, eq=False)
class Diff:
    """What differs between two versions: uids of nodes, and pairs of uids of relations."""

    nodes_added: Tensor  # [n]
    nodes_removed: Tensor  # [n]
    relations_added: Tensor  # [n, 2] parent, child
    relations_removed: Tensor  # [n, 2]

    def __repr__(self) -> str:
        return (
            f"Diff(nodes +{len(self.nodes_added)} -{len(self.nodes_removed)}, "
            f"relations +{len(self.relations_added)} -{len(self.relations_removed)})"
        )


class Journal:
    """Every commit of a graph in order, and what undo and redo need of the last few.

    Which nodes and relations a commit was about is kept for the latest ones, as far as they fit
    into `detail_limit` bytes; of older commits the outline stays: version, time, reason, author,
    kinds of operations and counts. What undo and redo need is always kept.
    """

    def __init__(self, undo_limit: int = 16, detail_limit: int = 256 << 20) -> None:
        self.outlines = Outlines()
        self.details: dict[int, Commit] = {}  # by place, of commits that are more than an outline
        self.undoable: list[int] = []  # places, the next to undo last
        self.redoable: list[int] = []
        self._undo_limit, self._detail_limit = undo_limit, detail_limit
        self._with_values: set[int] = set()  # places whose commits still hold values
        self._sizes: deque[_Sized] = deque()  # of the commits with details, the oldest first

    @property
    def commits(self) -> History:
        """Every commit, the oldest first."""
        return History(self.outlines, self.details, range(len(self.outlines)))

    @property
    def undo_limit(self) -> int:
        """How many commits keep what undo needs; assignable."""
        return self._undo_limit

    @undo_limit.setter
    def undo_limit(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"undo_limit must not be negative, got {limit}")
        self._undo_limit = limit
        self._let_go()

    @property
    def detail_limit(self) -> int:
        """How many bytes of details are kept; assignable."""
        return self._detail_limit

    @detail_limit.setter
    def detail_limit(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"detail_limit must not be negative, got {limit}")
        self._detail_limit = limit
        self._let_go()

    def prepare(self, commit: Commit) -> Callable[[], None]:
        """Computes the journal with one more commit; returns what writes it, which may be run
        again after an interrupt.

        After an edit, what had been undone cannot be redone any more.
        """
        place = len(self.outlines)
        undoable = list(self.undoable)
        redoable = list(self.redoable)
        if commit.kind == "undo":
            undoable.pop()
            redoable.append(place)
        elif commit.kind == "redo":
            redoable.pop()
            undoable.append(place)
        else:
            redoable.clear()
            undoable.append(place)
        row = self.outlines.row(commit)
        entry = self._sized(place, _size(commit))

        def write() -> None:
            self.outlines.write(place, *row)
            self.details[place] = commit
            self.undoable = undoable
            self.redoable = redoable
            self._with_values.add(place)
            if not self._sizes or self._sizes[-1].place < place:
                self._sizes.append(entry)
            self._let_go()

        return write

    def next_undo(self) -> Commit:
        """Returns the commit that undo takes back."""
        return self._next(self.undoable, "undo")

    def next_redo(self) -> Commit:
        """Returns the undo that redo takes back."""
        return self._next(self.redoable, "redo")

    def reinstate(
        self,
        outlines: Outlines,
        details: dict[int, Commit],
        undoable: list[int],
        redoable: list[int],
    ) -> None:
        """Takes over the commits of a saved journal; `details` are in the order of their places."""
        self.outlines = outlines
        self.details = details
        self.undoable = undoable
        self.redoable = redoable
        self._with_values = {*undoable, *redoable}
        self._sizes = deque()
        for place, commit in details.items():
            self._sizes.append(self._sized(place, _size(commit)))
        self._let_go()

    def kept_versions(self) -> set[int]:
        """Returns the versions whose commits can still be taken back."""
        return {self.outlines.version(place) for place in (*self.undoable, *self.redoable)}

    def at(self, version: int | None) -> Commit | None:
        """Returns the commit that led to a version; None where there is none."""
        if version is None:
            return None
        place = self.outlines.find(version)
        if place == len(self.outlines) or self.outlines.version(place) != version:
            return None
        return self.details.get(place) or self.outlines.commit(place)

    def between(self, first: int, last: int) -> History:
        """Returns the commits that lead from one version to a later one."""
        places = range(self.outlines.find(first + 1), self.outlines.find(last + 1))
        return History(self.outlines, self.details, places)

    def require_details(self, commits: Iterable[Commit]) -> None:
        """Raises HistoryError when one of the commits no longer says which nodes and relations it
        was about.
        """
        for commit in commits:
            if not commit.has_details:
                raise HistoryError(
                    "the journal no longer keeps which nodes and relations version"
                    f" {commit.version} was about: net.journal.detail_limit lets it keep"
                    f" {self._detail_limit:,} bytes of that, the latest first, and a checkpoint"
                    ' keeps it only with gn.save(..., history="full")'
                )

    def diff(self, first: int, last: int) -> Diff:
        """Returns what exists at `last` and not at `first`, and the other way round."""
        if first > last:
            back = self.diff(last, first)
            return Diff(
                back.nodes_removed, back.nodes_added, back.relations_removed, back.relations_added
            )
        commits = self.between(first, last)
        self.require_details(commits)
        layers = [c for commit in commits for c in commit.change.layers.values()]
        wires = [c for commit in commits for c in commit.change.transitions.values()]
        nodes = [
            (part.uids, born) for c in layers for part, born in ((c.gone, False), (c.born, True))
        ]
        pairs = [
            ((part.parents.long() << 32) | part.children.long(), born)
            for c in wires
            for part, born in ((c.gone, False), (c.born, True))
        ]
        added, removed = _net_effect(nodes)
        came, went = (
            torch.stack([keys >> 32, keys & 0xFFFFFFFF], dim=1) for keys in _net_effect(pairs)
        )
        return Diff(added, removed, came, went)

    def last_touch(self, parent: int, child: int) -> Commit | None:
        """Returns the last commit that made or cut the relation, or None when none did."""
        for place in sorted(self.details, reverse=True):
            commit = self.details[place]
            for change in commit.change.transitions.values():
                for pairs in (change.born, change.gone):
                    if bool(((pairs.parents == parent) & (pairs.children == child)).any()):
                        return commit
        return None

    def last_touch_of_node(self, uid: int, *, removal: bool = False) -> Commit | None:
        """Returns the last commit that added or removed the node, or only one that removed it."""
        for place in sorted(self.details, reverse=True):
            commit = self.details[place]
            for change in commit.change.layers.values():
                if bool((change.gone.uids == uid).any()) or (
                    not removal and bool((change.born.uids == uid).any())
                ):
                    return commit
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        copied = Journal(self._undo_limit, self._detail_limit)
        copied.outlines = self.outlines.copy()
        copied.details = dict(self.details)
        copied.undoable = list(self.undoable)
        copied.redoable = list(self.redoable)
        copied._with_values = set(self._with_values)
        copied._sizes = deque(self._sizes)
        return copied

    def _sized(self, place: int, size: int) -> "_Sized":
        before = 0
        if self._sizes:
            before = self._sizes[-1].end
        return _Sized(place, before, before + size)

    def _let_go(self) -> None:
        """Drops values that no undo needs, and the oldest details beyond `detail_limit`."""
        del self.undoable[: max(0, len(self.undoable) - self._undo_limit)]
        del self.redoable[: max(0, len(self.redoable) - self._undo_limit)]
        kept = {*self.undoable, *self.redoable}
        for place in self._with_values - kept:
            self.details[place] = self.details[place].summary()
        self._with_values &= kept
        while self._sizes and self._sizes[-1].end - self._sizes[0].start > self._detail_limit:
            place = self._sizes[0].place
            if place in kept:
                break
            self.details.pop(place, None)
            self._sizes.popleft()

    def _next(self, stack: list[int], verb: str) -> Commit:
        if not stack:
            limit = f"the journal keeps what {verb} needs for the last {self._undo_limit} commits, "
            kept = limit + "and a checkpoint keeps it only with gn.save(..., undo=True)"
            if not len(self.outlines):
                kept = "nothing was edited"
            raise HistoryError(f"there is nothing to {verb} ({kept})")
        return self.details[stack[-1]]


class _Sized(NamedTuple):
    """Which bytes the details of a commit are, when all of them are counted one after another."""

    place: int
    start: int
    end: int


def _size(commit: Commit) -> int:
    """Returns about how many bytes the details of a commit take."""
    return _OBJECTS + commit.change.detail_bytes


def _net_effect(events: Iterable[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """Returns (keys that exist only after, keys that existed only before) from births and deaths in
    order.
    """
    parts = list(events)
    keys = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(k for k, _ in parts)])
    born = torch.cat(
        [
            torch.empty(0, dtype=torch.bool, device="cpu"),
            *(torch.full((len(k),), b, device="cpu") for k, b in parts),
        ]
    )
    keys, order = keys.sort(stable=True)
    born = born[order]
    changes = keys[1:] != keys[:-1]
    edge = torch.ones(min(len(keys), 1), dtype=torch.bool, device="cpu")
    first, last = torch.cat([edge, changes]), torch.cat([changes, edge])
    existed, exists, keys = ~born[first], born[last], keys[first]
    return keys[exists & ~existed], keys[existed & ~exists]
