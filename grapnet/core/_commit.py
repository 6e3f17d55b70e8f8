"""The corridor of a commit: resolve, prepare, publish, settle, record.

Every change of a net goes through `commit`: edits, undo and redo, trials and their ends, replays,
of one net or of several. It computes and allocates all that the change needs and collects the
assignments that put it in place. One assignment, `decision.made = True`, decides; `settle` then
carries out the others. They can be repeated, so that an interrupt between two of them is harmless:
the next public call settles what was decided. What was not decided has not happened.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from ._change import Change, LayerChange
from ._coordinates import (
    Coordinates,
    Decision,
    PreparedVector,
    Token,
    Vector,
    last_reads,
    layout_of,
    refuse_old_backward,
)
from ._errors import EditError
from ._journal import Commit, Joint
from ._layer import Layer, Roster
from ._transition import Topology, Transition, wirings_after

if TYPE_CHECKING:
    from ._edit import Block, Edit
    from ._graph import Column, Graph

Install = Callable[[], None]
State = TypeVar("State")
Kept = TypeVar("Kept")


class Follower(Protocol):
    """Whatever must move when a graph is edited: optimizer state, statistics, copies."""

    def prepare(self, graph: "Graph", commit: Commit) -> Install:
        """Computes its own state after the commit, or raises to stop it; returns the assignments
        that install it.

        The graph is still as it was before the commit. An interrupt can stop the assignments
        anywhere, after which they are all carried out once more: they must not depend on what they
        replace. What follows several graphs prepares for each before anything is installed, so an
        installation touches nothing of the other graphs.
        """
        ...


@runtime_checkable
class ColumnFollower(Protocol):
    """A follower that also holds the Parameters of a graph, and so needs to know which ones come
    and leave.
    """

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> Install:
        """Prepares for columns that come and leave, or raises to stop it; returns the assignments
        that install them.
        """
        ...


class Followers:
    """The followers of one graph, held weakly, in the order they came; a copy of the graph starts
    with none.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, follower: Follower) -> None:
        """Lets `follower` take part in commits, until nothing else refers to it."""
        others = self._without(follower)
        self._references = [*others, weakref.ref(follower)]

    def discard(self, follower: Follower) -> None:
        """Lets `follower` take part no longer."""
        self._references = self._without(follower)

    def prepare(self, graph: "Graph", commit: Commit, *, strict: bool = True) -> list[Install]:
        """Lets every follower prepare; one that raises stops the commit or, if not `strict`, stays
        behind.
        """
        installs = []
        for follower in self._alive():
            try:
                installs.append(follower.prepare(graph, commit))
            except Exception:
                if strict:
                    raise
        return installs

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> list[Install]:
        """Lets every follower that holds Parameters prepare."""
        holders = [follower for follower in self._alive() if isinstance(follower, ColumnFollower)]
        return [follower.prepare_columns(graph, coming, leaving) for follower in holders]

    def _without(self, follower: Follower) -> list[weakref.ref[Any]]:
        return [r for r in self._references if r() is not None and r() is not follower]

    def _alive(self) -> list[Any]:
        return [follower for reference in self._references if (follower := reference()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Followers, ()


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
        carry: Callable[[State, Commit], State],
        take: Callable[[State, Commit], Kept] | None = None,
        give: Callable[[State, Kept, Commit], State] | None = None,
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

    def prepare(self, graph: "Graph", commit: Commit) -> Callable[[], None]:
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

    def _after(self, commit: Commit) -> Any:
        state, kept, _ = self._held
        undone = commit.undoes
        if undone is None or undone not in kept:
            return self._carry(state, commit)
        if self._give is None:
            return kept[undone]
        return self._give(self._carry(state, commit), kept[undone], commit)


class View(NamedTuple):
    """All that a forward pass reads of a graph at one version."""

    rosters: tuple[Roster, ...]
    biases: tuple[Vector | None, ...]  # None for the sensory layer
    topologies: tuple[Topology, ...]
    weights: tuple[Vector, ...]
    columns: dict[str, Vector]


class Draws:
    """The random numbers of a commit.

    They come from copies of the generators; `installs` advances the generators themselves, so that
    an edit that fails has drawn nothing.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def source(self, generator: torch.Generator | None, device: torch.device) -> torch.Generator:
        """Returns what to draw from in place of a generator, or of the device's own."""
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
        """Returns what advances the generators."""
        found: list[Install] = []
        for generator, copy in self._copies.values():
            found.append(partial(_advance, generator, copy.get_state()))
        return found


def _advance(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


@dataclass(frozen=True, eq=False)
class Intent:
    """What one graph is about to go through.

    Attributes:
        graph: the graph.
        receipt: the receipt, as far as it is known before the change is prepared.
        next_uid: the uid of the next node that an edit adds afterwards.
        before: what the graph had before the trial that this ends.
    """

    graph: "Graph"
    receipt: Commit
    next_uid: int
    before: "Before | None" = None


class Before(NamedTuple):
    """What the end of a trial brings back as the very same objects, so that what was computed from
    them is valid again.
    """

    topologies: list[Topology]
    layouts: dict[str, Token | None]

    @classmethod
    def of(cls, graph: "Graph") -> "Before":
        """Returns what a graph has at present."""
        layouts = {name: layout_of(store.parameter) for name, store in graph.stores().items()}
        return cls([t.topology for t in graph.transitions], layouts)


def commit(
    asked: "Sequence[Edit | Intent]", *, ends: "Trial | None" = None, strict: bool = True
) -> "list[Commit | None]":
    """Carries out what is asked of one or several graphs: in all of them, or in none.

    Args:
        asked: an edit, or an intent from `undo`, `repeat`, …, for each graph.
        ends: the trial that this takes back.
        strict: whether a follower that raises stops it; otherwise it stays behind.

    Returns:
        The receipt of every graph, None where nothing changes.
    """
    draws = Draws()
    intents = _resolve(asked, draws)
    decision = Decision()
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
            tried.append((intent.graph, receipt, Before.of(intent.graph)))
    installs += draws.installs()
    trial = None
    for one, receipt in zip(asked, receipts, strict=True):
        if not isinstance(one, Intent):
            installs.append(partial(one.take_receipt, receipt))
            if tried:
                trial = Trial(one.block, tried)
    carry_out(installs, decision, trial)
    return receipts


def _resolve(asked: "Sequence[Edit | Intent]", draws: Draws) -> list[Intent | None]:
    """Returns what is to be done with each graph, None where nothing changes."""
    intents: list[Intent | None] = []
    changing = []
    for place, one in enumerate(asked):
        if isinstance(one, Intent):
            intents.append(one)
            continue
        intent = one.resolve(draws)
        intents.append(intent)
        if intent is not None:
            changing.append((place, intent))
    # Several edits that change something are parts of one joint transaction.
    joints = Joint.of(len(changing))
    for (place, intent), joint in zip(changing, joints, strict=True):
        if joint is not None:
            intents[place] = replace(intent, receipt=replace(intent.receipt, joint=joint))
    return intents


def prepare(
    intent: Intent, decision: Decision, *, strict: bool = True
) -> tuple[Commit, list[Install]]:
    """Does all of a commit of one graph that can fail; touches nothing.

    It works on detached tensors: `torch.no_grad` would stay on after an interrupt at its end.

    Returns:
        The complete receipt, and the assignments that put the change in place.
    """
    graph = intent.graph
    require_gradients()
    receipt = intent.receipt
    change = receipt.change.to(graph.device)
    if change is not receipt.change:
        receipt = replace(receipt, change=change)
    rosters = _prepare_rosters(graph, receipt.change)
    wirings = wirings_after(graph, receipt.change)
    if intent.before is not None:
        wirings = {t: intent.before.topologies[t] for t in wirings}
    vectors = _prepare_vectors(graph, receipt.change)
    receipt = _completed(graph, receipt, vectors)
    view = _view_after(graph, rosters, wirings, vectors)
    installs = [_prepare_stores(intent, receipt, rosters, wirings, vectors)]
    seen = replace(receipt, wirings=wirings, view=view, decision=decision)
    installs += graph.followers.prepare(graph, seen, strict=strict)
    if receipt.kind not in ("trial", "end"):
        installs.append(graph.journal.prepare(receipt))
    installs.append(partial(_release, receipt))
    _refuse_old_backwards(graph, receipt, decision)
    return receipt, installs


def carry_out(installs: list[Install], decision: Decision, trial: "Trial | None" = None) -> None:
    """Decides a transaction and carries out its assignments."""
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
                record.settle()
    _close(record)


class _Record:
    """One transaction: the assignments that put it in place, and whether it was decided."""

    def __init__(self, installs: list[Install], decision: Decision, trial: "Trial | None") -> None:
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

    def settle(self) -> None:
        """Carries out the assignments, unless that is done."""
        if self.is_settled:
            return
        for install in self._installs:
            install()
        self.is_settled = True
        self._installs = []


# The transactions that are being carried out, and the trials in effect. It is empty at nearly all
# times, so that a public call only looks whether it is.
unsettled: list[_Record] = []


def settle(*, wait: bool = True) -> None:
    """Completes what an interrupt has left: transactions that were decided, and trials whose block
    is over. Every public call begins with it: `if unsettled: settle()`.

    Args:
        wait: whether to wait for another thread that is settling, or to leave it to that one.
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
        # Whoever reads under torch.inference_mode may be the one that settles.
        with record.lock, torch.inference_mode(False):
            record.settle()
            if record.trial is not None and record.trial.is_due:
                _take_back(record.trial)
        _close(record)


def _close(record: _Record, *, always: bool = False) -> None:
    if (always or record.is_closed) and record in unsettled:
        unsettled.remove(record)


def _is_committing() -> bool:
    """Says whether this thread is inside of a commit: it sees the graph as it was before it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _CORRIDOR:
            return True
        frame = frame.f_back
    return False


_CORRIDOR = {commit.__code__, carry_out.__code__, settle.__code__}


class Trial:
    """A trial in effect, in one graph or in several, and what takes it back."""

    def __init__(self, block: "Block", parts: "list[tuple[Graph, Commit, Before]]") -> None:
        self.block = block
        self.parts = parts
        self.is_over = False

    @property
    def is_due(self) -> bool:
        """True when the block of the trial has ended and its effect has not."""
        return not self.is_over and not self.block.is_running

    def finish(self) -> None:
        """Notes that the trial was taken back."""
        self.is_over = True

    def endings(self) -> list[Intent]:
        """Returns what takes the trial back: everything is as it was before, the version and the
        tokens included.
        """
        found = []
        for graph, receipt, before in self.parts:
            back = Commit(
                receipt.version - 1,
                f"end of trial: {receipt.reason}",
                receipt.change.inverse(with_gradients=True),
                undoes=receipt.version,
                kind="end",
            )
            found.append(Intent(graph, back, graph.next_uid, before))
        return found


def _take_back(trial: Trial) -> None:
    try:
        commit(trial.endings(), ends=trial)
    except Exception:
        # A follower refuses: it loses its place, the graphs do not.
        if not trial.is_over:
            commit(trial.endings(), ends=trial, strict=False)
        raise


def uid_after(graph: "Graph", change: Change) -> int:
    """Returns the uid of the next node that an edit adds to a graph after a change."""
    born = [int(c.born.uids[-1]) + 1 for c in change.layers.values() if len(c.born)]
    return max([graph.next_uid, *born])


def exchange_columns(graph: "Graph", wanted: "Sequence[Column]", then: Sequence[Install]) -> None:
    """Makes `wanted` the columns of a graph, once every follower that holds Parameters is ready for
    it, and does `then`.
    """
    present = list(graph.columns.values())
    leaving = [column for column in present if all(column is not other for other in wanted)]
    coming = [column for column in wanted if all(column is not other for other in present)]
    installs: list[Install] = []
    if leaving or coming:
        graph.require_no_edit("change the columns of the graph")
        require_editable(graph)
        installs = graph.followers.prepare_columns(graph, coming, leaving)
        stay = [column for column in present if all(column is not other for other in leaving)]
        columns = {column.name: column for column in (*stay, *coming)}
        installs.append(partial(graph.install_columns, columns))
    carry_out([*installs, *then], Decision())


def require_editable(graph: "Graph") -> None:
    """Raises EditError where autograd cannot see an edit, and where Parameters are spread over
    processes.
    """
    require_gradients()
    for store in graph.stores().values():
        if store.parameter.is_inference():
            raise EditError(
                "this net was built under torch.inference_mode(), so it cannot be edited or trained"
            )
    reason = unfit_parameters(graph)
    if reason:
        raise EditError(reason)


def require_gradients() -> None:
    """Raises EditError under torch.inference_mode."""
    if torch.is_inference_mode_enabled():
        raise EditError(
            "a graph cannot be edited under torch.inference_mode(); use torch.no_grad()"
        )


def unfit_parameters(graph: "Graph") -> str:
    """Returns why the Parameters of a graph cannot be edited; empty when they can.

    Attributes and class names decide, so torch.distributed is not imported.
    """
    for name, store in graph.stores().items():
        parameter = store.parameter
        if type(parameter) is nn.Parameter and not vars(parameter):
            continue
        kinds = {kind.__name__ for kind in type(parameter).__mro__}
        if "DTensor" in kinds or hasattr(parameter, "_fsdp_flattened"):
            return (
                f"{name} is sharded over processes (FSDP or DTensor), and an edit needs all of its"
                " coordinates in every process. Replicate the net (DistributedDataParallel, or"
                " FSDP's ignored_params) and shard the rest of the model"
            )
        if getattr(parameter, "_in_backward_optimizers", None):
            return (
                f"{name} is trained inside of the backward pass (_apply_optimizer_in_backward),"
                " whose hooks an edit drops. Step in a hook of"
                " Tensor.register_post_accumulate_grad_hook, which edits keep, or after the"
                " backward pass"
            )
    return ""


def _prepare_rosters(graph: "Graph", change: Change) -> dict[int, Roster]:
    return {n: _roster_after(graph.layers[n], c) for n, c in change.layers.items()}


def _roster_after(layer: Layer, change: LayerChange) -> Roster:
    owners = layer.owner_names.carry(change.index, change.born.owners)
    activations = layer.activation_names.carry(change.index, change.born.activations)
    if change.owners is not None:
        owners = owners.replaced(change.owners.rows, change.owners.after)
    if change.activations is not None:
        activations = activations.replaced(change.activations.rows, change.activations.after)
    # Where nodes only come, every name stays in use.
    if len(change.index.removed) or change.owners or change.activations:
        owners = owners.compact()
        activations = activations.compact()
    uids = change.index.carry(layer.uid, change.born.uids)
    return Roster.of(uids, activations, owners, layer.kinds_place)


def _prepare_vectors(
    graph: "Graph", change: Change
) -> dict[str, tuple[Coordinates, PreparedVector]]:
    """Returns every vector of the graph after a change, by the name of its Parameter; those that
    the change does not touch are new versions too, which autograd keeps apart from the old ones.
    """
    found = {}
    for t, transition in enumerate(graph.transitions):
        part = change.transitions.get(t)
        prepared = transition.prepare(part and part.weights)
        found[f"transitions.{t}.weight"] = (transition, prepared)
    for n, layer in enumerate(graph.layers):
        if not layer.is_sensory:
            part = change.layers.get(n)
            found[f"layers.{n}.bias"] = (layer, layer.prepare(part and part.biases))
    for name, column in graph.columns.items():
        part = change.layers.get(column.layer)
        moved = None
        if part is not None and not part.index.is_identity:
            moved = part.columns.get(name) or column.change(part.index)
        found[column.parameter_name] = (column, column.prepare(moved))
    return found


def _completed(
    graph: "Graph", receipt: Commit, vectors: dict[str, tuple[Coordinates, PreparedVector]]
) -> Commit:
    """Returns the receipt with what leaves, and with the map of every touched Parameter."""
    changes = {name: prepared.change for name, (_, prepared) in vectors.items()}
    layers = {}
    for n, part in receipt.change.layers.items():
        columns = {}
        for name, column in graph.columns_of(n).items():
            moved = changes[column.parameter_name]
            if moved is not None:
                columns[name] = moved
        layers[n] = replace(part, biases=changes.get(f"layers.{n}.bias"), columns=columns)
    transitions = {}
    for t, part in receipt.change.transitions.items():
        weights = changes[f"transitions.{t}.weight"]
        assert weights is not None
        transitions[t] = replace(part, weights=weights, wiring=None)
    maps = {}
    for name, (_, prepared) in vectors.items():
        if prepared.parameter_index is not None:
            maps[name] = prepared.parameter_index
    return replace(receipt, change=Change(layers, transitions), parameters=maps)


def _view_after(
    graph: "Graph",
    rosters: dict[int, Roster],
    wirings: dict[int, Topology],
    vectors: dict[str, tuple[Coordinates, PreparedVector]],
) -> View:
    present = graph.view()
    biases: list[Vector | None] = [None]
    for n in range(1, len(present.rosters)):
        biases.append(vectors[f"layers.{n}.bias"][1].vector)
    return View(
        tuple(rosters.get(n, roster) for n, roster in enumerate(present.rosters)),
        tuple(biases),
        tuple(wirings.get(t, topology) for t, topology in enumerate(present.topologies)),
        tuple(vectors[f"transitions.{t}.weight"][1].vector for t in range(len(present.weights))),
        {name: vectors[f"columns.{name}.value"][1].vector for name in present.columns},
    )


def _prepare_stores(
    intent: Intent,
    receipt: Commit,
    rosters: dict[int, Roster],
    wirings: dict[int, Topology],
    vectors: dict[str, tuple[Coordinates, PreparedVector]],
) -> Install:
    """Returns what puts the stores of a graph, its version and its next uid in place."""
    graph = intent.graph
    placed = []
    for name, (store, prepared) in vectors.items():
        layout = Token()
        if intent.before is not None:
            layout = intent.before.layouts[name]
        placed.append((store, prepared, layout))
    attributes = {
        "_version": receipt.version,
        "_next_uid": max(graph.next_uid, intent.next_uid),
        "_structure": Token(),
    }
    return partial(
        _install_stores,
        graph,
        attributes,
        [(graph.layers[n], roster) for n, roster in rosters.items()],
        [(graph.transitions[t], topology) for t, topology in wirings.items()],
        placed,
    )


def _install_stores(
    graph: "Graph",
    attributes: dict[str, Any],
    rosters: list[tuple[Layer, Roster]],
    wirings: list[tuple[Transition, Topology]],
    vectors: "list[tuple[Coordinates, PreparedVector, Token | None]]",
) -> None:
    for layer, roster in rosters:
        layer.enrol(roster)
    for transition, topology in wirings:
        transition.rewire(topology)
    reads = last_reads()
    for store, prepared, layout in vectors:
        store.install(prepared, layout, reads)
    vars(graph).update(attributes)


def _release(receipt: Commit) -> None:
    """Lets go of what index maps have computed for their use in the commit."""
    for index in (
        *receipt.relations.values(),
        *receipt.nodes.values(),
        *receipt.parameters.values(),
    ):
        index.release()


def _refuse_old_backwards(graph: "Graph", receipt: Commit, decision: Decision) -> None:
    """Makes a backward through any forward pass of before this commit raise, whatever parameters it
    reaches.
    """
    edited = f"(version {receipt.version})"
    if receipt.reason:
        edited = f"({receipt.reason!r}, version {receipt.version})"
    message = (
        f"this backward goes through a forward pass of version {graph.version}, and the graph was"
        f" edited since {edited}. Run the forward pass again, or edit after optimizer.step()"
    )
    for store in graph.stores().values():
        refuse_old_backward(store.parameter, message, decision)
