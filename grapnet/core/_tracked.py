"""Tracked: state that follows the commits of a net and comes back on undo."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
        take: `take(state, commit)` returns what has to be kept of the state before the commit.
        carry: `carry(state, commit)` returns the state after the commit.
        give: `give(present, kept, commit)` returns the state after a commit that takes another one
            back. `present` is what `carry` returned, `kept` what `take` had returned then.
    """

    def __init__(
        self,
        state: State,
        *,
        take: "Callable[[State, Commit], Kept]",
        carry: "Callable[[State, Commit], State]",
        give: "Callable[[State, Kept, Commit], State]",
    ) -> None:
        self._take = take
        self._carry = carry
        self._give = give
        # One attribute, so that one assignment installs all of a commit: the state, what is kept
        # by the version of the commit that took it away, and the version of the trial in effect.
        self._held: tuple[State, dict[int, Kept], int | None] = (state, {}, None)

    @property
    def state(self) -> State:
        """The state at present."""
        return self._held[0]

    @property
    def kept(self) -> dict[int, Kept]:
        """What commits have taken away, by their versions."""
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

        What undo would give back knows less, so it is dropped; the end of a trial still brings back
        what was there before the trial.
        """
        _, kept, trial = self._held
        self._held = (state, {v: part for v, part in kept.items() if v == trial}, trial)

    def remember(self, kept: dict[int, Kept]) -> None:
        """Takes over what commits have taken away in another session."""
        self._held = (self._held[0], kept, self._held[2])

    def prepare(self, graph: "Graph", commit: "Commit") -> Callable[[], None]:
        """Computes the state after a commit; returns the assignment that installs it."""
        state, kept, _ = self._held
        moved = self._carry(state, commit)
        if commit.undoes is not None and commit.undoes in kept:
            moved = self._give(moved, kept[commit.undoes], commit)
        coming = {v: part for v, part in kept.items() if graph.journal.keeps(v)}
        trial = None
        if commit.kind == "trial":
            trial = commit.version
        if commit.kind != "end":
            coming[commit.version] = self._take(state, commit)
        held: Any = (moved, coming, trial)

        def install() -> None:
            self._held = held

        return install
