"""Commits: resolve, prepare, decide, install, record.

Every change of a net goes through `commit`: edits, undo and redo, trials and their ends, replays,
of one net or of several. It computes everything that the change needs and collects the assignments
that install it. One assignment, `decision.made = True`, decides; `settle` then executes the others.
They can be repeated, so an interrupt between two of them is harmless: they are completed at once,
or, after a second interrupt, by the next public call. Before the decision nothing has changed.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import torch
from torch import nn

from grapnet._torch import is_sharded, is_stepped_in_backward

from ._change import Change
from ._coordinates import Decision
from ._errors import EditError
from ._journal import Commit, Joint
from ._prepare import Before, Install, Intent, prepare, require_gradients

if TYPE_CHECKING:
    from ._edit import Edit, Statement
    from ._graph import Column, Graph

State = TypeVar("State")
Kept = TypeVar("Kept")


class Follower(Protocol):
    """State that moves when a graph is edited: optimizer state, statistics, copies.

    A commit that inserts or removes blocks of an adopted model, or layers of a net, changes the
    names of Parameters and the numbers of spaces or layers. It calls only followers with an
    attribute `follows_depth = True`, and is refused if there are others.
    """

    def prepare(self, graph: "Graph", commit: Commit) -> Install:
        """Computes its state after the commit, or raises to stop it; returns the assignments that
        install it.

        The graph has not changed yet. An interrupt can stop the assignments anywhere, after which
        all of them run again, so they must not depend on what they replace. A follower of several
        graphs prepares for each before anything is installed, so an installation must not touch the
        other graphs.
        """
        ...


@runtime_checkable
class ColumnFollower(Protocol):
    """A follower that holds the Parameters of a graph, and is called when Parameters are added or
    removed.
    """

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> Install:
        """Prepares for added and removed columns, or raises to stop it; returns the assignments
        that install them.
        """
        ...


class Recordings(Protocol):
    """Memory that depends on graphs as they are, such as recorded training steps."""

    def release(self, why: str) -> None:
        """Lets go of the memory, which a commit may need, before any graph changes."""
        ...


recordings: "weakref.WeakSet[Recordings]" = weakref.WeakSet()


class Followers:
    """The followers of one graph, held weakly, in order; a copy of the graph has none."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, follower: Follower) -> None:
        """Adds `follower` until nothing else refers to it."""
        others = self._without(follower)
        self._references = [*others, weakref.ref(follower)]

    def discard(self, follower: Follower) -> None:
        """Removes `follower`."""
        self._references = self._without(follower)

    def prepare(self, graph: "Graph", commit: Commit, *, strict: bool = True) -> list[Install]:
        """Calls `prepare` of every follower; one that raises stops the commit or, if not `strict`,
        misses it.
        """
        installs = []
        for follower in self._alive():
            try:
                if commit.change.depth is not None:
                    _require_depth_follower(follower)
                installs.append(follower.prepare(graph, commit))
            except Exception:
                if strict:
                    raise
        return installs

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> list[Install]:
        """Calls every follower that holds Parameters."""
        holders = [follower for follower in self._alive() if isinstance(follower, ColumnFollower)]
        return [follower.prepare_columns(graph, coming, leaving) for follower in holders]

    def _without(self, follower: Follower) -> list[weakref.ref[Any]]:
        return [r for r in self._references if r() is not None and r() is not follower]

    def _alive(self) -> list[Any]:
        return [follower for reference in self._references if (follower := reference()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Followers, ()


def _require_depth_follower(follower: object) -> None:
    """Raises EditError for a follower that cannot follow blocks or layers that come or leave."""
    if not getattr(follower, "follows_depth", False):
        name = getattr(follower, "follower_name", type(follower).__name__)
        raise EditError(
            f"{name} follows this graph, and cannot follow blocks or layers that come or leave."
            " Let go of it first (disarm() and clear() for a recorder, gn.detach for a copy), and"
            " make another one afterwards"
        )


class Tracked(Generic[State, Kept]):
    """State that follows the commits of a net, built from three functions.

    A commit moves the state with `carry` and keeps what `take` returns for as long as the commit
    can be reverted. The reverting commit (undo, redo, the end of a trial) passes it to `give`. None
    of the three may modify the state that it is given.

    Args:
        state: the initial state.
        carry: `carry(state, commit)` returns the state after the commit.
        take: `take(state, commit)` returns what to keep of the state before the commit; all of it
            by default.
        give: `give(present, kept, commit)` returns the state after a commit that reverts another
            one. `present` is the result of `carry`, `kept` that of the earlier `take`. By default
            `kept` becomes the state, and `carry` is not called.
        name: what it is called where it cannot follow.
    """

    def __init__(
        self,
        state: State,
        *,
        carry: Callable[[State, Commit], State],
        take: Callable[[State, Commit], Kept] | None = None,
        give: Callable[[State, Kept, Commit], State] | None = None,
        name: str = "Tracked",
    ) -> None:
        self.follower_name = name
        self._carry = carry
        self._take = take
        self._give = give
        # One attribute, so that one assignment installs all of a commit: the state, what is kept
        # by the version of the commit that took it away, and the version of the trial in effect.
        self._held: tuple[State, dict[int, Kept], int | None] = (state, {}, None)

    @property
    def state(self) -> State:
        """The current state."""
        if unsettled:
            settle()
        return self._held[0]

    @property
    def kept(self) -> dict[int, Kept]:
        """What commits have removed, by their versions."""
        if unsettled:
            settle()
        return self._held[1]

    @property
    def in_trial(self) -> bool:
        """True while a trial is in effect."""
        return self._held[2] is not None

    def replace(self, state: State) -> None:
        """Replaces the state; undo still restores what was kept."""
        self._held = (state, *self._held[1:])

    def learn(self, state: State) -> None:
        """Replaces the state by one with more information.

        What undo would restore lacks it, so it is dropped. A trial drops nothing: its end restores
        the state before it, which must not share memory with the new one.
        """
        _, kept, trial = self._held
        if trial is None:
            kept = {}
        self._held = (state, kept, trial)

    def remember(self, kept: dict[int, Kept]) -> None:
        """Adopts what commits have removed in another session."""
        self._held = (self._held[0], kept, self._held[2])

    def prepare(self, graph: "Graph", commit: Commit) -> Install:
        """Computes the state after a commit; returns the assignment that installs it."""
        return self.prepare_from(self._held[0], graph, commit)

    def prepare_from(self, state: State, graph: "Graph", commit: Commit) -> Install:
        """Does the same from a state before the commit that something else holds."""
        kept = self._held[1]
        moved = self._after(state, commit)
        versions = graph.journal._kept_versions()
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

    def _after(self, state: State, commit: Commit) -> Any:
        kept = self._held[1]
        undone = commit.undoes
        if undone is None or undone not in kept:
            return self._carry(state, commit)
        if self._give is None:
            return kept[undone]
        return self._give(self._carry(state, commit), kept[undone], commit)


class Draws:
    """The random numbers of a commit.

    They come from copies of the generators; `installs` advances the generators themselves, so a
    failed edit draws nothing.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def source(self, generator: torch.Generator | None, device: torch.device) -> torch.Generator:
        """Returns the copy of a generator, or of the generator of the device."""
        if generator is None:
            generator = torch.default_generator
            if device.type == "cuda":
                generator = torch.cuda.default_generators[device.index or 0]
        if id(generator) not in self._copies:
            copy = torch.Generator(generator.device)
            copy.set_state(generator.get_state())
            self._copies[id(generator)] = (generator, copy)
        return self._copies[id(generator)][1]

    def installs(self) -> list[Install]:
        """Returns the assignments that advance the generators."""
        found: list[Install] = []
        for generator, copy in self._copies.values():
            found.append(partial(_advance, generator, copy.get_state()))
        return found


def _advance(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def commit(
    asked: "Sequence[Edit | Intent]", *, ends: "Trial | None" = None, strict: bool = True
) -> "list[Commit | None]":
    """Changes one or several graphs: all of them, or none.

    Args:
        asked: an edit, or an intent from `undo`, `repeat`, …, for each graph.
        ends: the trial that this reverts.
        strict: whether a follower that raises stops it; otherwise the follower misses this commit.

    Returns:
        The commit of every graph, None where nothing changes.
    """
    draws = Draws()
    intents = _resolve(asked, draws)
    decision = Decision()
    if any(intent is not None for intent in intents):
        for one in list(recordings):
            one.release("a net was edited")
    receipts: list[Commit | None] = []
    installs: list[Install] = []
    tried: list[tuple[Graph, Commit, Before]] = []
    if ends is not None:
        installs.append(ends.finish)
    for intent in intents:
        if intent is None:
            receipts.append(None)
            continue
        receipt, steps = prepare(intent, decision, strict=strict)
        receipts.append(receipt)
        installs += steps
        if receipt.kind == "trial":
            tried.append((intent.graph, receipt, Before.of(intent.graph, receipt)))
    installs += draws.installs()
    edits = [one for one in asked if not isinstance(one, Intent)]
    for one, receipt in zip(asked, receipts, strict=True):
        if not isinstance(one, Intent):
            installs.append(partial(one._take_receipt, receipt))
    trial = None
    if tried:
        # The edits of a trial share one statement.
        trial = Trial(edits[0]._statement, tried)
    carry_out(installs, decision, trial)
    return receipts


def _resolve(asked: "Sequence[Edit | Intent]", draws: Draws) -> list[Intent | None]:
    """Returns the intent for each graph, None where nothing changes."""
    intents: list[Intent | None] = []
    changing = []
    for place, one in enumerate(asked):
        if isinstance(one, Intent):
            intents.append(one)
            continue
        intent = one._resolve(draws)
        intents.append(intent)
        if intent is not None:
            changing.append((place, intent))
    # Several edits that change something are parts of one joint transaction.
    joints = Joint.of(len(changing))
    for (place, intent), joint in zip(changing, joints, strict=True):
        if joint is not None:
            intents[place] = replace(intent, receipt=replace(intent.receipt, joint=joint))
    return intents


def carry_out(installs: list[Install], decision: Decision, trial: "Trial | None" = None) -> None:
    """Decides a transaction and executes its assignments."""
    record = _Record(installs, decision, trial)
    with record.lock:
        unsettled.append(record)
        try:
            # Before this line nothing has happened, after it everything has.
            decision.made = True
            record.settle()
        finally:
            # Once more after an interrupt; a second one leaves it to the next public call.
            if decision.made:
                record.settle(again=True)
    _close(record)


class _Record:
    """One transaction: the assignments that install it, and whether it was decided."""

    # how many there were in this process
    count: ClassVar[int] = 0

    def __init__(self, installs: list[Install], decision: Decision, trial: "Trial | None") -> None:
        _Record.count += 1
        self.decision = decision
        self.trial = trial
        self.lock = threading.RLock()
        self.thread = threading.get_ident()
        self.is_settled = False
        self._installs = installs

    @property
    def is_closed(self) -> bool:
        """True when nothing is left to do."""
        return self.is_settled and (self.trial is None or self.trial.is_over)

    def settle(self, *, again: bool = False) -> None:
        """Executes the assignments, unless that is done.

        One that fails `again` is left out, as it would fail in every later call, too: the others
        are executed, and then its error is raised.
        """
        if self.is_settled:
            return
        errors = []
        for install in self._installs:
            try:
                install()
            except Exception as error:
                if not again:
                    raise
                errors.append(error)
        self.is_settled = True
        self._installs = []
        if errors:
            raise errors[0]


def transactions() -> int:
    """Returns how many transactions this process has carried out, or begun to, over all graphs.

    Every commit, undo, trial and end of a trial is one, and every `net.execution.use`.
    """
    return _Record.count


# The transactions that are being carried out, and the trials in effect. It is empty at nearly all
# times, so that a public call only looks whether it is.
unsettled: list[_Record] = []


def settle(*, wait: bool = True) -> None:
    """Completes interrupted work: transactions that were decided, and trials whose block has ended.
    Calls of a net, of an edit and of an optimizer begin with it: `if unsettled: settle()`.

    Args:
        wait: whether to wait for another thread that is settling.
    """
    if _is_committing():
        return
    # The end of a trial comes behind the trial: the latest first.
    for record in reversed(unsettled.copy()):
        if not record.decision.made:
            # An interrupt came just before the decision.
            if record.thread == threading.get_ident():
                _close(record, always=True)
            continue
        owner_lives = record.thread in sys._current_frames()
        if not wait and owner_lives and record.thread != threading.get_ident():
            continue
        # A read under torch.inference_mode may be the one that settles.
        with record.lock, torch.inference_mode(False):
            record.settle(again=True)
            if record.trial is not None and record.trial.is_due:
                _take_back(record.trial)
        _close(record)


def _close(record: _Record, *, always: bool = False) -> None:
    if (always or record.is_closed) and record in unsettled:
        unsettled.remove(record)


def _is_committing() -> bool:
    """Returns whether this thread is inside a commit, where it sees the graph before it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _CORRIDOR:
            return True
        frame = frame.f_back
    return False


_CORRIDOR = {commit.__code__, carry_out.__code__, settle.__code__}


class Trial:
    """A trial in effect, in one graph or in several."""

    def __init__(self, statement: "Statement", parts: "list[tuple[Graph, Commit, Before]]") -> None:
        self.statement = statement
        self.parts = parts
        self.is_over = False

    @property
    def is_due(self) -> bool:
        """True when the statement of the trial has ended and its effect has not."""
        return not self.is_over and not self.statement.is_running

    def finish(self) -> None:
        """Notes that the trial was reverted."""
        self.is_over = True

    def endings(self) -> list[Intent]:
        """Returns the intents that revert the trial, version and tokens included."""
        found = []
        for graph, receipt, before in self.parts:
            back = Commit(
                receipt.version - 1,
                f"end of trial: {receipt.reason}",
                receipt.change.inverse(),
                undoes=receipt.version,
                kind="end",
            )
            found.append(Intent(graph, back, graph._next_uid, before))
        return found


def _take_back(trial: Trial) -> None:
    try:
        commit(trial.endings(), ends=trial)
    except Exception:
        # A follower refuses: it misses the end, the graphs do not.
        if not trial.is_over:
            commit(trial.endings(), ends=trial, strict=False)
        raise


def uid_after(graph: "Graph", change: Change) -> int:
    """Returns the uid of the next node that an edit adds to a graph after a change."""
    born = [int(uids.max()) + 1 for uids in change.born_uids() if len(uids)]
    return max([graph._next_uid, *born])


def exchange_columns(graph: "Graph", wanted: "Sequence[Column]", then: Sequence[Install]) -> None:
    """Makes `wanted` the columns of a graph after every follower has prepared, and executes
    `then`.
    """
    present = list(graph.columns.values())
    leaving = _without(present, wanted)
    coming = _without(wanted, present)
    installs: list[Install] = []
    if leaving or coming:
        graph._require_no_edit("change the columns of the graph")
        require_editable(graph)
        installs = graph._followers.prepare_columns(graph, coming, leaving)
        stay = _without(present, leaving)
        columns = {column.name: column for column in (*stay, *coming)}
        installs.append(partial(graph._install_columns, columns))
    carry_out([*installs, *then], Decision())


def _without(columns: "Sequence[Column]", others: "Sequence[Column]") -> "list[Column]":
    """Returns the columns that are none of the others."""
    known = {id(other) for other in others}
    return [column for column in columns if id(column) not in known]


def require_editable(graph: "Graph") -> None:
    """Raises EditError if autograd cannot see an edit, or if Parameters are sharded."""
    require_gradients()
    for store in graph._stores().values():
        if store.parameter.is_inference():
            raise EditError(
                "this net was built under torch.inference_mode(), so it cannot be edited or trained"
            )
    reason = unfit_parameters(graph)
    if reason:
        raise EditError(reason)


# Attributes of a Parameter that a commit sets.
_OWN_ATTRIBUTES = {"grapnet_layout"}


def unfit_parameters(graph: "Graph") -> str:
    """Returns why the Parameters of a graph cannot be edited; empty if they can."""
    for name, store in graph._stores().items():
        parameter = store.parameter
        if type(parameter) is nn.Parameter and vars(parameter).keys() <= _OWN_ATTRIBUTES:
            continue
        if is_sharded(parameter):
            return (
                f"{name} is sharded over processes (FSDP or DTensor), and an edit needs all of its"
                " coordinates in every process. Replicate the net (DistributedDataParallel, or"
                " FSDP's ignored_params) and shard the rest of the model"
            )
        if is_stepped_in_backward(parameter):
            return (
                f"{name} is trained inside the backward pass (_apply_optimizer_in_backward),"
                " whose hooks an edit drops. Step in a hook of"
                " Tensor.register_post_accumulate_grad_hook, which edits keep, or after the"
                " backward pass"
            )
    return ""
