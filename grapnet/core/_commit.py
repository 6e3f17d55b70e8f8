"""The commit: prepare everything, then put it into effect."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ._change import Change, LayerChange, TransitionChange
from ._coordinates import PreparedVector, Token, refuse_old_backward, replace_content
from ._errors import EditError, HistoryError
from ._index_map import Labels, ascending, contains
from ._journal import Commit, Joint, Journal
from ._layer import rows_among
from ._resolve import rewound_on_error
from ._sets import RelationSet
from ._transition import Topology

if TYPE_CHECKING:
    from ._edit import Edit
    from ._graph import Column, Graph


class Follower(Protocol):
    """Whatever must move when a graph is edited: optimizer state, statistics, copies."""

    def prepare(self, graph: "Graph", commit: Commit) -> Callable[[], None]:
        """Computes its own state after the commit, or raises to stop it; returns the assignment
        that installs it.

        The graph is still as it was before the commit. Where several graphs commit together, what
        follows more than one of them prepares for each before anything is installed, so an
        installation touches nothing of the others.
        """
        ...


@runtime_checkable
class ColumnFollower(Protocol):
    """A follower that also holds a graph's Parameters, and so wants to hear which ones come and
    leave.
    """

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> Callable[[], None]:
        """Makes ready for columns that come and leave, or raises to stop it; returns what installs
        them.
        """
        ...


class Followers:
    """The followers of one graph, held weakly, in the order they came; a copy of the graph starts
    with none.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, follower: Follower) -> None:
        """Starts telling `follower` of commits, until nothing else refers to it."""
        self.discard(follower)
        self._references.append(weakref.ref(follower))

    def discard(self, follower: Follower) -> None:
        """Stops telling `follower`."""
        self._references = [r for r in self._references if r() is not None and r() is not follower]

    def prepare(self, graph: "Graph", commit: Commit) -> list[Callable[[], None]]:
        """Lets every follower prepare."""
        return [follower.prepare(graph, commit) for follower in self._alive()]

    def prepare_columns(
        self, graph: "Graph", coming: "Sequence[Column]", leaving: "Sequence[Column]"
    ) -> list[Callable[[], None]]:
        """Lets every follower that holds Parameters prepare."""
        holders = [follower for follower in self._alive() if isinstance(follower, ColumnFollower)]
        return [follower.prepare_columns(graph, coming, leaving) for follower in holders]

    def _alive(self) -> list[Any]:
        return [follower for reference in self._references if (follower := reference()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Followers, ()


@dataclass(frozen=True, eq=False)
class Tokens:
    """One token for the wiring of every transition and one for the layout of every Parameter."""

    structures: list[Token]
    layouts: dict[str, Token | None]

    @classmethod
    def fresh(cls, graph: "Graph") -> "Tokens":
        """Returns tokens that nobody has seen."""
        return cls([Token() for _ in graph.transitions], defaultdict(Token))


def commit_all(edits: "Sequence[Edit]") -> None:
    """Resolves and prepares every edit and only then puts all into effect; one without a change
    commits nothing.
    """
    for edit in edits:
        edit.close()
    with ExitStack() as stack:
        sources = [
            stack.enter_context(rewound_on_error(edit.generator, edit.graph.device))
            for edit in edits
        ]
        changes = [edit.resolved(generator) for edit, generator in zip(edits, sources, strict=True)]
        joints = Joint.of(sum(not change.is_empty for change in changes))
        installs = [
            edit.prepare(change, None if change.is_empty else joints.pop(0))
            for edit, change in zip(edits, changes, strict=True)
        ]
        for install in installs:
            install()


def carry_out(
    graph: "Graph",
    commit: Commit,
    tokens: "Tokens | None" = None,
    followers: Followers | None = None,
) -> Commit:
    """Applies `commit.change`; an error before the swap leaves graph, parameters and followers as
    they were.

    Args:
        graph: the graph to change.
        commit: a receipt whose change holds what comes; what leaves is filled in.
        tokens: what to put on moved relations and coordinates, when an earlier state returns.
        followers: whom to tell, the graph's own by default.

    Returns:
        The complete receipt.
    """
    commit, swap = prepare_commit(graph, commit, tokens, followers)
    swap()
    return commit


def prepare_commit(
    graph: "Graph",
    commit: Commit,
    tokens: "Tokens | None" = None,
    followers: Followers | None = None,
) -> tuple[Commit, Callable[[], None]]:
    """Does all of `carry_out` that can fail; returns the complete receipt and what puts it into
    effect.
    """
    require_editable(graph)
    commit = replace(commit, change=commit.change.to(graph.device))
    with torch.no_grad():
        layers = {n: _prepare_layer(graph, n, c) for n, c in commit.change.layers.items()}
        wirings = _prepare_wirings(graph, commit.change)
        weights = {
            t: graph.transitions[t].prepare(c.weights) for t, c in commit.change.transitions.items()
        }
        commit = _completed(commit, layers, weights)
        installs = (followers or graph.followers).prepare(graph, replace(commit, wirings=wirings))
        tokens = tokens or Tokens.fresh(graph)
    return commit, functools.partial(
        _swap, graph, commit, layers, wirings, weights, installs, tokens
    )


@torch.no_grad()
def _swap(
    graph: "Graph",
    commit: Commit,
    layers: "dict[int, _PreparedLayer]",
    wirings: dict[int, Topology],
    weights: dict[int, PreparedVector],
    installs: list[Callable[[], None]],
    tokens: Tokens,
) -> None:
    """Puts in place what was prepared."""
    _leave_old_graphs(graph, commit)
    for number, prepared in layers.items():
        graph.layers[number].renew(prepared.uids, prepared.activations, prepared.owners)
        if prepared.biases is not None:
            graph.layers[number].swap(prepared.biases, tokens.layouts[f"layers.{number}.bias"])
        for name, vector in prepared.columns.items():
            column = graph.columns[name]
            column.swap(vector, tokens.layouts[column.parameter_name])
    for t, topology in wirings.items():
        graph.transitions[t].rewire(topology, tokens.structures[t])
    for t, vector in weights.items():
        graph.transitions[t].swap(vector, tokens.layouts[f"transitions.{t}.weight"])
    graph.version = commit.version
    graph.structure = Token()
    for install in installs:
        install()
    for index in (*commit.relations.values(), *commit.nodes.values(), *commit.parameters.values()):
        index.release()


@dataclass(frozen=True, eq=False)
class _PreparedLayer:
    uids: Tensor
    activations: Labels
    owners: Labels
    biases: PreparedVector | None
    columns: dict[str, PreparedVector]


def _prepare_layer(graph: "Graph", number: int, change: LayerChange) -> _PreparedLayer:
    layer, columns = graph.layers[number], {}
    owners = layer.owner_names.carry(change.index, change.born.owners)
    activations = layer.activation_names.carry(change.index, change.born.activations)
    if change.owners is not None:
        owners = owners.replaced(change.owners.rows, change.owners.after)
    if change.activations is not None:
        activations = activations.replaced(change.activations.rows, change.activations.after)
    only_came = (
        change.index.removed.shape[0] == 0 and change.owners is None and change.activations is None
    )
    for name, column in graph.columns_of(number).items():
        if not change.index.is_identity:
            columns[name] = column.prepare(change.columns.get(name) or column.change(change.index))
    return _PreparedLayer(
        change.index.carry(layer.uid, change.born.uids),
        activations if only_came else activations.compact(),
        owners if only_came else owners.compact(),
        None if change.biases is None else layer.prepare(change.biases),
        columns,
    )


def _prepare_wirings(graph: "Graph", change: Change) -> dict[int, Topology]:
    """Returns the new wiring of every transition whose relations move or whose ends are
    renumbered.
    """
    wirings = {}
    for t, transition in enumerate(graph.transitions):
        upper, lower, wires = (
            change.layers.get(t),
            change.layers.get(t + 1),
            change.transitions.get(t),
        )
        moves = (c is not None and not c.index.is_identity for c in (upper, lower, wires))
        if wires is not None and wires.wiring is not None:
            wirings[t] = wires.wiring
        elif any(moves):
            wirings[t] = rewired(graph, t, transition.topology, upper, lower, wires)
    return wirings


def rewired(
    graph: "Graph",
    t: int,
    topology: Topology,
    upper: LayerChange | None,
    lower: LayerChange | None,
    wires: TransitionChange | None,
) -> Topology:
    """Returns the wiring of a transition after the changes of its two layers and of its
    relations.
    """
    child, degrees, device, n_children = (
        topology.child,
        topology.degrees.long(),
        topology.child.device,
        topology.n_children,
    )
    if lower is not None and not lower.index.is_identity:
        if len(lower.index.removed) or int(lower.index.inserted[0]) < n_children:
            child = (
                lower.index.new_positions(ascending(n_children, torch.device("cpu")))
                .to(device)
                .index_select(0, child)
            )
        n_children = lower.index.new_size
    if wires is not None:
        degrees = topology.degrees_without(wires.index.removed)
        child = wires.index.carry(
            child, rows_after(graph, t + 1, lower, wires.born.children).to(device)
        )
    if upper is not None:
        degrees = upper.index.carry(degrees)
    if wires is not None and len(wires.born):
        parents = rows_after(graph, t, upper, wires.born.parents).to(device)
        degrees = degrees + torch.bincount(parents, minlength=len(degrees))
    ptr = torch.zeros(len(degrees) + 1, dtype=torch.int32, device=device)
    ptr[1:] = degrees.cumsum(0)
    return Topology(ptr, child, n_children)


def rows_after(graph: "Graph", number: int, change: LayerChange | None, uids: Tensor) -> Tensor:
    """Returns the rows that nodes of a layer have after its change."""
    present = graph.layers[number].uid
    return rows_among(
        present if change is None else change.index.carry(present, change.born.uids), uids
    )


def _completed(
    commit: Commit, prepared: dict[int, _PreparedLayer], weights: dict[int, PreparedVector]
) -> Commit:
    """Returns the commit with what leaves, and with the map of every touched Parameter."""
    change, layers, moved = commit.change, {}, {}
    for n, layer in prepared.items():
        columns = {name: vector.change for name, vector in layer.columns.items()}
        layers[n] = replace(
            change.layers[n], biases=layer.biases and layer.biases.change, columns=columns
        )
        moved |= {} if layer.biases is None else {f"layers.{n}.bias": layer.biases.parameter_index}
        moved |= {
            f"columns.{name}.value": vector.parameter_index
            for name, vector in layer.columns.items()
        }
    transitions = {
        t: replace(c, weights=weights[t].change, wiring=None) for t, c in change.transitions.items()
    }
    moved |= {f"transitions.{t}.weight": p.parameter_index for t, p in weights.items()}
    return replace(commit, change=Change(layers, transitions), parameters=moved)


def require_editable(graph: "Graph") -> None:
    """Raises EditError where autograd cannot see an edit."""
    if torch.is_inference_mode_enabled():
        raise EditError(
            "a graph cannot be edited under torch.inference_mode(); use torch.no_grad()"
        )
    if any(parameter.is_inference() for parameter in graph.parameters()):
        raise EditError(
            "this net was built under torch.inference_mode(), so it cannot be edited or trained"
        )


def _leave_old_graphs(graph: "Graph", commit: Commit) -> None:
    """Makes a backward through any forward of before this commit raise, whatever parameters it
    reaches.
    """
    told = (
        f"({commit.reason!r}, version {commit.version})"
        if commit.reason
        else f"(version {commit.version})"
    )
    message = (
        f"this backward goes through a forward pass of version {graph.version}, and the graph was"
        f" edited since {told}. Run the forward pass again, or edit after optimizer.step()"
    )
    for name, parameter in graph.named_parameters():
        refuse_old_backward(parameter, message)
        if name not in commit.parameters:  # `swap` gives the others their content
            replace_content(parameter, parameter.data, parameter.grad)


Verb = Literal["undo", "redo"]


def reverse(graph: "Graph", verb: Verb, *, alone: bool) -> Commit:
    """Takes the last commit, or undo, of one graph back; its part of a joint transaction only
    `alone`.
    """
    graph.require_no_edit(verb)
    earlier = next_reversed(graph.journal, verb)
    if earlier.joint is not None and not alone:
        raise HistoryError(
            f"version {earlier.version} ({earlier.reason!r}) is part of a transaction over"
            f" {earlier.joint.parts} nets. Take it back in all of them: gn.{verb}_together(...); or"
            f" in this one alone: net.{verb}(alone=True)"
        )
    commit, install = prepare_reversal(graph, verb)
    install()
    return commit


def next_reversed(journal: Journal, verb: Verb) -> Commit:
    """Returns the commit that undo, or the undo that redo, takes back; raises HistoryError when
    there is none.
    """
    return journal.next_undo() if verb == "undo" else journal.next_redo()


def prepare_reversal(
    graph: "Graph", verb: Verb, joint: Joint | None = None
) -> tuple[Commit, Callable[[], None]]:
    """Does all of an undo or redo that can fail; returns its receipt and what puts it into
    effect.
    """
    earlier = next_reversed(graph.journal, verb)
    reason = f"{verb}: {earlier.reason.removeprefix('undo: ').removeprefix('redo: ')}"
    receipt = Commit(
        graph.version + 1,
        reason,
        earlier.change.inverse(),
        undoes=earlier.version,
        joint=joint,
        kind=verb,
    )
    commit, swap = prepare_commit(graph, receipt)

    def install() -> None:
        swap()
        record = graph.journal.record_undo if verb == "undo" else graph.journal.record_redo
        record(commit)

    return commit, install


def require_fit(graph: "Graph", commit: Commit) -> None:
    """Raises HistoryError when the commit was not made on a graph like this one."""
    for number, change in commit.change.layers.items():
        if number >= len(graph.layers) or not change.fits(graph.layers[number].uid):
            raise HistoryError(
                f"commit {commit.version} was made on another graph: layer {number} differs"
            )
    for t, change in commit.change.transitions.items():
        if t >= len(graph.transitions) or not _wires_fit(graph, t, change, commit.change):
            raise HistoryError(
                f"commit {commit.version} was made on another graph: transition {t} differs"
            )


def _wires_fit(graph: "Graph", t: int, change: TransitionChange, whole: Change) -> bool:
    """Says whether what the change cuts is here, and what it connects is not."""
    store = graph.transitions[t]
    if change.index.old_size != store.size:
        return False
    cut = RelationSet(graph, {t: change.index.removed})
    if not torch.equal(cut.parents.int(), change.gone.parents) or not torch.equal(
        cut.children.int(), change.gone.children
    ):
        return False
    parents, children = (
        graph.layers[t].rows(change.born.parents),
        graph.layers[t + 1].rows(change.born.children),
    )
    newborn = [whole.layers[n].born.uids if n in whole.layers else None for n in (t, t + 1)]
    for rows, uids, fresh in (
        (parents, change.born.parents, newborn[0]),
        (children, change.born.children, newborn[1]),
    ):
        if bool((rows < 0).any()) and (
            fresh is None or not bool(torch.isin(uids[rows < 0], fresh).all())
        ):
            return False
    upper, lower = whole.layers.get(t), whole.layers.get(t + 1)
    after = rewired(graph, t, store.topology, upper, lower, change)
    owners = rows_after(graph, t, upper, change.born.parents)
    if not torch.equal(after.parents_at(change.index.inserted).cpu(), owners):
        return False
    both = (parents >= 0) & (children >= 0)
    found = store.topology.find(
        parents[both].to(graph.device), children[both].to(graph.device)
    ).int()
    return bool(((found < 0) | contains(change.index.removed, found)).all())
