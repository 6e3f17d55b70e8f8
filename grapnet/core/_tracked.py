"""Tracked: state that follows the commits of a net and comes back on undo."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from ._commit import settle, unsettled
from ._coordinates import Coordinates, Shift, VectorChange
from ._index_map import ascending

if TYPE_CHECKING:
    from ._graph import Graph
    from ._journal import Commit

State = TypeVar("State")
Kept = TypeVar("Kept")


class Tracked(Generic[State, Kept]):
    """State that follows the commits of a net: a follower made of three functions.

    A commit moves the state by `carry` and keeps, for as long as the commit can be taken back, what
    `take` returns. The commit that takes it back (undo, redo, the end of a trial) hands that to
    `give`. None of the three may change the state that it is given.

    Args:
        state: the state at present.
        carry: `carry(state, commit)` returns the state after the commit.
        take: `take(state, commit)` returns what has to be kept of the state before the commit; all
            of it by default.
        give: `give(present, kept, commit)` returns the state after a commit that takes another one
            back. `present` is what `carry` returned, `kept` what `take` had returned then. By
            default `kept` is the state after it, and `carry` is not called.
    """

    def __init__(
        self,
        state: State,
        *,
        carry: "Callable[[State, Commit], State]",
        take: "Callable[[State, Commit], Kept] | None" = None,
        give: "Callable[[State, Kept, Commit], State] | None" = None,
    ) -> None:
        self._carry = carry
        self._take = take
        self._give = give
        # One attribute, so that one assignment installs all of a commit: the state, what is kept
        # by the version of the commit that took it away, and the version of the trial in effect.
        self._held: tuple[State, dict[int, Kept], int | None] = (state, {}, None)

    @property
    def state(self) -> State:
        """The state at present."""
        if unsettled:
            settle()
        return self._held[0]

    @property
    def kept(self) -> dict[int, Kept]:
        """What commits have taken away, by their versions."""
        if unsettled:
            settle()
        return self._held[1]

    @property
    def in_trial(self) -> bool:
        """True while a trial is in effect."""
        return self._held[2] is not None

    def replace(self, state: State) -> None:
        """Puts another state in place; undo still gives back what was kept."""
        self._held = (state, *self._held[1:])

    def learn(self, state: State) -> None:
        """Puts a state in place that knows more than the one before it.

        What undo would give back knows less, so it is dropped. A trial drops nothing: its end
        brings back the state before it, which may then share no memory with what is written into.
        """
        _, kept, trial = self._held
        if trial is None:
            kept = {}
        self._held = (state, kept, trial)

    def remember(self, kept: dict[int, Kept]) -> None:
        """Takes over what commits have taken away in another session."""
        self._held = (self._held[0], kept, self._held[2])

    def prepare(self, graph: "Graph", commit: "Commit") -> Callable[[], None]:
        """Computes the state after a commit; returns the assignment that installs it."""
        state, kept, _ = self._held
        moved = self._after(commit)
        versions = graph.journal.kept_versions()
        coming: dict[int, Any] = {v: part for v, part in kept.items() if v in versions}
        trial = None
        if commit.kind == "trial":
            trial = commit.version
        if commit.kind != "end":
            coming[commit.version] = state
            if self._take is not None:
                coming[commit.version] = self._take(state, commit)
        held = (moved, coming, trial)

        def install() -> None:
            self._held = held

        return install

    def _after(self, commit: "Commit") -> Any:
        state, kept, _ = self._held
        undone = commit.undoes
        if undone is None or undone not in kept:
            return self._carry(state, commit)
        if self._give is None:
            return kept[undone]
        return self._give(self._carry(state, commit), kept[undone], commit)


def values_after(store: Coordinates, change: VectorChange | None) -> Tensor:
    """Returns every value of a vector, frozen ones included, as it is after a change (None: no
    change).
    """
    values = store.values().detach()
    if change is None:
        return values
    born = change.born_values
    if born is None:
        born = values.new_zeros(len(change.index.inserted))
    moved = change.index.carry(values, born)
    if change.shift is not None:
        at = change.shift.positions.long()
        shift = Shift(at, change.shift.before.to(values), change.shift.after.to(values))
        moved = moved.index_copy(0, at, shift.apply(moved[at]))
    return moved


def trainable_after(store: Coordinates, change: VectorChange) -> Tensor:
    """Returns the values of a vector that are in the Parameter after a change, in order."""
    was_frozen = store.frozen_bits(ascending(store.size, store.frozen_at.device))
    frozen = change.index.carry(was_frozen, change.born_frozen).clone()
    flips = change.flips.long()
    frozen[flips] = ~frozen[flips]
    return values_after(store, change)[~frozen]
