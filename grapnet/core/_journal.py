"""The journal: the commits of a graph, and what undo needs."""

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

from ._change import Change, Pairs
from ._errors import HistoryError
from ._grid_map import CellMap
from ._index_map import IndexMap
from ._transition import Topology

# Bytes that the Python objects and tensors of a commit take beside the content of its tensors.
_OBJECTS = 10_000
_PLAIN = (str, int, float, bool, type(None))

Kind = Literal["edit", "undo", "redo", "trial", "end"]


@dataclass(frozen=True)
class Joint:
    """Marks a commit as one part of a transaction over several nets.

    Attributes:
        name: an identifier that the parts of one transaction share.
        part: the number of this part, from 0.
        parts: the number of nets that the transaction changed.
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
    """The record of one commit: what changed, why, and how every changed vector moved.

    Attributes:
        version: the graph's version after it.
        reason: why, as given to the edit.
        by: the rule or person that edited, if given.
        operations: the operations of the edit, as plain data.
        change: the resolved change.
        parameters: how the coordinates of each changed Parameter moved, by its name in the net.
            Emptied, like the values inside `change`, when the journal drops what undo needs.
        assigned: the places, before the commit, of the assigned coordinates that each Parameter has
            before and after it, ascending; of Parameters with several dimensions, in the vector of
            their cells. Emptied like `parameters`.
        undoes: the version of the commit that this one reverts, for undo, redo and the end of a
            trial.
        joint: the part of a transaction over several nets, or None.
        time: when, in seconds since 1970.
        wirings: the new topology of each changed transition; only for followers, while they
            prepare.
        view: what a forward pass reads after it; only for followers, while they prepare.
        decision: whether it took effect; only for followers, while they prepare.
        is_staged: whether what it computes waits outside of the memory of the model, see
            `grapnet.core._staging`; for followers, while they prepare.
        outlined: the counts of a commit of which the journal or the file keeps no details.
        kind: "edit", "undo", "redo", or "trial" and the "end" of one; for followers, while they
            prepare.
    """

    version: int
    reason: str
    change: Change
    by: str | None = None
    operations: tuple[dict[str, Any], ...] = ()
    parameters: dict[str, CellMap] = field(default_factory=dict)
    assigned: dict[str, Tensor] = field(default_factory=dict)
    undoes: int | None = None
    joint: Joint | None = None
    wirings: dict[int, Topology] = field(default_factory=dict)
    view: Any = None
    decision: Any = None
    time: float = field(default_factory=now)
    outlined: dict[str, int] | None = None
    kind: Kind = "edit"
    is_staged: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of nodes, relations and blocks added and removed, and of coordinates frozen,
        unfrozen and assigned.
        """
        if self.outlined is not None:
            return self.outlined
        return self.change.counts()

    @property
    def ends_trial(self) -> bool:
        """True for the commit that reverts a trial and restores the version before it."""
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
        """Returns the commit without the values that undo needs."""
        return replace(self, change=self.change.without_values(), parameters={}, assigned={})

    @property
    def has_details(self) -> bool:
        """False after the journal has dropped which nodes and relations it changed."""
        change = self.change
        parts = (change.layers, change.transitions, change.tensors)
        return any(parts) or change.depth is not None

    @property
    def frozen_or_unfrozen(self) -> str | None:
        """ "frozen" or "unfrozen" if its operations only freeze or only unfreeze; else None."""
        asked = {operation.get("operation") for operation in self.operations}
        if ("freeze" in asked) == ("unfreeze" in asked):
            return None
        if "freeze" in asked:
            return "frozen"
        return "unfrozen"

    def __repr__(self) -> str:
        listed = []
        for name, count in self.counts.items():
            if name == "coordinates_frozen_or_unfrozen" and self.frozen_or_unfrozen:
                name = f"coordinates_{self.frozen_or_unfrozen}"
            if count:
                listed.append(f"{name} {count}")
        counts = ", ".join(listed)
        by = f", by {self.by}" if self.by else ""
        joint = f", part {self.joint.part + 1} of {self.joint.parts}" if self.joint else ""
        return (
            f"Commit(version={self.version}, {self.reason!r}{by}{joint}: {counts or 'names only'})"
        )


class Outlines:
    """The outline of every commit, in columns: about 150 bytes per commit.

    A row holds the version, the time in microseconds, the version that it undoes (0 for none), the
    counts, and where its text ends. The text is JSON: the reason, the author, the kinds of
    operations with the remarks, and the part of a joint transaction.
    """

    COUNTS = (
        "nodes_added",
        "nodes_removed",
        "relations_added",
        "relations_removed",
        "coordinates_frozen_or_unfrozen",
        "coordinates_assigned",
        "blocks_added",
        "blocks_removed",
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

    @property
    def has_blocks(self) -> bool:
        """True if a commit has inserted or removed blocks or layers."""
        first = 3 + self.COUNTS.index("blocks_added")
        last = 3 + self.COUNTS.index("blocks_removed")
        return any(self.numbers[first :: self.WIDTH]) or any(self.numbers[last :: self.WIDTH])

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
        """Returns a copy."""
        copied = Outlines()
        copied.numbers = self.numbers[:]
        copied.text = self.text[:]
        return copied


class History(Sequence[Commit]):
    """Commits in order, each created when it is read; prints one per line."""

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

    The nodes and relations of the latest commits are kept, up to `detail_limit` bytes; older
    commits keep their outline: version, time, reason, author, kinds of operations and counts. What
    undo and redo need is always kept.
    """

    def __init__(self, undo_limit: int = 16, detail_limit: int = 256 << 20) -> None:
        self._outlines = Outlines()
        self._details: dict[int, Commit] = {}  # by place, of commits that are more than an outline
        self.undoable: list[int] = []  # places, the next to undo last
        self.redoable: list[int] = []
        self._undo_limit = undo_limit
        self._detail_limit = detail_limit
        self._with_values: set[int] = set()  # places whose commits still hold values
        self._sizes: deque[_Sized] = deque()  # of the commits with details, the oldest first
        # versions whose commits came from a file; undo checks that they fit
        self._loaded: set[int] = set()

    @property
    def commits(self) -> History:
        """Every commit, the oldest first."""
        return History(self._outlines, self._details, range(len(self._outlines)))

    @property
    def undo_limit(self) -> int:
        """The number of commits that undo can revert; assignable."""
        return self._undo_limit

    @undo_limit.setter
    def undo_limit(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"undo_limit must not be negative, got {limit}")
        self._undo_limit = limit
        self._let_go()

    @property
    def detail_limit(self) -> int:
        """The number of bytes of details to keep; assignable."""
        return self._detail_limit

    @detail_limit.setter
    def detail_limit(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"detail_limit must not be negative, got {limit}")
        self._detail_limit = limit
        self._let_go()

    def _prepare(self, commit: Commit) -> Callable[[], None]:
        """Computes the journal with one more commit; returns what writes it, which may be run
        again after an interrupt.

        After an edit, what had been undone cannot be redone any more.
        """
        place = len(self._outlines)
        undoable = list(self.undoable)
        redoable = list(self.redoable)
        # The journal of a copy may have let go of the commit that the net reverts.
        if commit.kind == "undo":
            undoable = undoable[:-1]
            redoable.append(place)
        elif commit.kind == "redo":
            redoable = redoable[:-1]
            undoable.append(place)
        else:
            redoable = []
            undoable.append(place)
        row = self._outlines.row(commit)
        entry = self._sized(place, _size(commit))

        def write() -> None:
            self._outlines.write(place, *row)
            self._details[place] = commit
            self.undoable = undoable
            self.redoable = redoable
            self._with_values.add(place)
            if not self._sizes or self._sizes[-1].place < place:
                self._sizes.append(entry)
            self._let_go()

        return write

    def _next_undo(self) -> Commit:
        """Returns the commit that undo reverts."""
        return self._next(self.undoable, "undo")

    def _next_redo(self) -> Commit:
        """Returns the undo that redo reverts."""
        return self._next(self.redoable, "redo")

    def _reinstate(
        self,
        outlines: Outlines,
        details: dict[int, Commit],
        undoable: list[int],
        redoable: list[int],
    ) -> None:
        """Takes over the commits of a saved journal; `details` are in the order of their places."""
        self._outlines = outlines
        self._details = details
        self.undoable = undoable
        self.redoable = redoable
        self._with_values = {*undoable, *redoable}
        self._loaded = self._kept_versions()
        self._sizes = deque()
        for place, commit in details.items():
            self._sizes.append(self._sized(place, _size(commit)))
        self._let_go()

    def _kept_versions(self) -> set[int]:
        """Returns the versions whose commits can still be undone."""
        return {self._outlines.version(place) for place in (*self.undoable, *self.redoable)}

    def _without_blocks(self) -> tuple[list[int], list[int]]:
        """Returns the places that undo and redo can revert one after the other before they come to
        one that inserts or removes blocks; a file has no blocks.
        """
        stacks = []
        for stack in (self.undoable, self.redoable):
            kept: list[int] = []
            for place in reversed(stack):
                if self._details[place].change.depth is not None:
                    break
                kept.insert(0, place)
            stacks.append(kept)
        return stacks[0], stacks[1]

    def _saved_versions(self) -> set[int]:
        """Returns the versions whose commits can be undone after they were saved to a file."""
        undoable, redoable = self._without_blocks()
        return {self._outlines.version(place) for place in (*undoable, *redoable)}

    def _at(self, version: int | None) -> Commit | None:
        """Returns the commit that led to a version; None where there is none."""
        if version is None:
            return None
        place = self._outlines.find(version)
        if place == len(self._outlines) or self._outlines.version(place) != version:
            return None
        return self._details.get(place) or self._outlines.commit(place)

    def _between(self, first: int, last: int) -> History:
        """Returns the commits that lead from one version to a later one."""
        places = range(self._outlines.find(first + 1), self._outlines.find(last + 1))
        return History(self._outlines, self._details, places)

    def _require_details(self, commits: Iterable[Commit]) -> None:
        """Raises HistoryError if the details of one of the commits were dropped."""
        for commit in commits:
            if not commit.has_details:
                raise HistoryError(
                    "the journal has dropped the nodes and relations that version"
                    f" {commit.version} changed: it keeps at most {self._detail_limit:,} bytes of"
                    " details (net.journal.detail_limit), and a checkpoint keeps them only with"
                    ' gn.save(..., history="full")'
                )

    def diff(self, first: int, last: int) -> Diff:
        """Returns what exists at `last` and not at `first`, and vice versa."""
        if first > last:
            back = self.diff(last, first)
            return Diff(
                back.nodes_removed, back.nodes_added, back.relations_removed, back.relations_added
            )
        commits = self._between(first, last)
        self._require_details(commits)
        nodes = []
        pairs = []
        for commit in commits:
            change = commit.change
            nodes += [(uids, False) for uids in change.gone_uids()]
            nodes += [(uids, True) for uids in change.born_uids()]
            pairs += [(_keys(part), False) for part in change.gone_relations()]
            pairs += [(_keys(part), True) for part in change.born_relations()]
        added, removed = _net_effect(nodes)
        came, went = (
            torch.stack([keys >> 32, keys & 0xFFFFFFFF], dim=1) for keys in _net_effect(pairs)
        )
        return Diff(added, removed, came, went)

    def _last_touch(self, parent: int, child: int) -> Commit | None:
        """Returns the last commit that added or cut the relation, or None."""
        for place in sorted(self._details, reverse=True):
            commit = self._details[place]
            change = commit.change
            for pairs in (*change.born_relations(), *change.gone_relations()):
                if bool(((pairs.parents == parent) & (pairs.children == child)).any()):
                    return commit
        return None

    def _last_touch_of_node(self, uid: int, *, removal: bool = False) -> Commit | None:
        """Returns the last commit that added or removed the node, or only one that removed it."""
        for place in sorted(self._details, reverse=True):
            commit = self._details[place]
            touched = commit.change.gone_uids()
            if not removal:
                touched += commit.change.born_uids()
            if any(bool((uids == uid).any()) for uids in touched):
                return commit
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        copied = Journal(self._undo_limit, self._detail_limit)
        copied._outlines = self._outlines.copy()
        copied._details = dict(self._details)
        for place in self._with_values:
            commit = self._details[place]
            if commit.change.depth is not None:
                depth = commit.change.depth.copied(memo)
                change = replace(commit.change, depth=depth)
                copied._details[place] = replace(commit, change=change)
        copied.undoable = list(self.undoable)
        copied.redoable = list(self.redoable)
        copied._with_values = set(self._with_values)
        copied._sizes = deque(self._sizes)
        copied._loaded = set(self._loaded)
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
            self._details[place] = self._details[place].summary()
        self._with_values &= kept
        while self._sizes and self._sizes[-1].end - self._sizes[0].start > self._detail_limit:
            place = self._sizes[0].place
            if place in kept:
                break
            self._details.pop(place, None)
            self._sizes.popleft()

    def _next(self, stack: list[int], verb: str) -> Commit:
        if not stack:
            limit = f"the journal keeps what {verb} needs for the last {self._undo_limit} commits, "
            kept = limit + "and a checkpoint keeps it only with gn.save(..., undo=True)"
            if not len(self._outlines):
                kept = "nothing was edited"
            raise HistoryError(f"there is nothing to {verb} ({kept})")
        return self._details[stack[-1]]


class _Sized(NamedTuple):
    """Which bytes the details of a commit are, when all of them are counted one after another."""

    place: int
    start: int
    end: int


def _size(commit: Commit) -> int:
    """Returns about how many bytes the details of a commit take."""
    return _OBJECTS + commit.change.detail_bytes


def _keys(pairs: Pairs) -> Tensor:
    """Returns one number for every relation, on the CPU."""
    return (pairs.parents.cpu().long() << 32) | pairs.children.cpu().long()


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
    first = torch.cat([edge, changes])
    last = torch.cat([changes, edge])
    existed = ~born[first]
    exists = born[last]
    keys = keys[first]
    return keys[exists & ~existed], keys[existed & ~exists]
