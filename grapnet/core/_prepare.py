"""The preparation of a commit: everything that can fail, and the assignments that install it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
    refuse_old_backwards,
)
from ._errors import EditError
from ._grid import (
    KeptContent,
    PreparedGrid,
    install_grid,
    install_layout,
    keep_contents,
    prepare_grids,
    renew_versions,
)
from ._grid_map import CellMap, GridMap
from ._journal import Commit
from ._layer import LiveNodes, Roster
from ._transition import Topology, Transition, wirings_after

if TYPE_CHECKING:
    from ._graph import Graph

Install = Callable[[], None]


class View(NamedTuple):
    """Everything that a forward pass reads of a graph at one version."""

    rosters: tuple[Roster, ...]
    biases: tuple[Vector | None, ...]  # None for the sensory layer
    topologies: tuple[Topology, ...]
    weights: tuple[Vector, ...]
    columns: dict[str, Vector]
    contents: dict[str, torch.Tensor]  # of the Parameters and changed buffers of an adopted model
    ends: tuple[tuple[int, int], ...]  # of the transitions: the layers that they lead from and to

    def content(self, parameter: str) -> torch.Tensor:
        """Returns the content of a Parameter, by its name."""
        if parameter in self.contents:
            return self.contents[parameter]
        kind, place, _ = parameter.split(".")
        if kind == "columns":
            return self.columns[place].content
        vectors = self.weights if kind == "transitions" else self.biases
        vector = vectors[int(place)]
        assert vector is not None
        return vector.content


@dataclass(frozen=True, eq=False)
class Intent:
    """The planned change of one graph.

    Attributes:
        graph: the graph.
        receipt: the commit, as far as it is known before the change is prepared.
        next_uid: the uid of the next node that an edit adds afterwards.
        before: the state of the graph before the trial that this ends.
    """

    graph: "Graph"
    receipt: Commit
    next_uid: int
    before: "Before | None" = None


class Before(NamedTuple):
    """The objects that the end of a trial restores, so that what was computed from them is valid
    again.
    """

    topologies: list[Topology]
    # by the ids of Parameters, whose names may change
    layouts: dict[int, Token | None]
    gradients: dict[int, torch.Tensor]  # of the coordinates that leave

    @classmethod
    def of(cls, graph: "Graph", receipt: Commit) -> "Before":
        """Returns the current objects of a graph, and the gradients that its commit takes away."""
        layouts = {}
        gradients = {}
        for name, store in graph._stores().items():
            parameter = store.parameter
            layouts[id(parameter)] = layout_of(parameter)
            index = receipt.parameters.get(name)
            if index is not None and parameter.grad is not None:
                gradients[id(parameter)] = index.take(parameter.grad.detach())
        return cls([t.topology for t in graph._wired], layouts, gradients)


def prepare(
    intent: Intent, decision: Decision, *, strict: bool = True
) -> tuple[Commit, list[Install]]:
    """Does everything in a commit of one graph that can fail; modifies nothing.

    It works on detached tensors: `torch.no_grad` would stay on after an interrupt at its end.

    Returns:
        The complete commit, and the assignments that install it.
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
    returning = {} if intent.before is None else intent.before.gradients
    vectors = _prepare_vectors(graph, receipt.change, returning)
    grids = prepare_grids(
        graph._grids(),
        receipt.change.tensors,
        returning=returning,
        is_staged=receipt.is_staged,
    )
    kept = keep_contents(graph._grids(), receipt.change.tensors)
    receipt = _completed(graph, receipt, vectors, grids)
    view = _view_after(graph, rosters, wirings, vectors, {**kept, **grids})
    if receipt.change.depth is not None:
        view = graph._view_at_depth(receipt.change.depth, view)
    installs = [_prepare_stores(intent, receipt, rosters, wirings, vectors)]
    if kept:
        installs.append(partial(renew_versions, list(kept.values())))
    installs += _prepare_model(intent, receipt, grids)
    seen = replace(receipt, wirings=wirings, view=view, decision=decision)
    installs += graph._followers.prepare(graph, seen, strict=strict)
    if receipt.kind not in ("trial", "end"):
        installs.append(graph.journal._prepare(receipt))
    installs.append(partial(_release, receipt))
    _refuse_old_backwards(graph, receipt, decision)
    return receipt, installs


def require_gradients() -> None:
    """Raises EditError under torch.inference_mode."""
    if torch.is_inference_mode_enabled():
        raise EditError(
            "a graph cannot be edited under torch.inference_mode(); use torch.no_grad()"
        )


def _prepare_rosters(graph: "Graph", change: Change) -> dict[int, Roster]:
    return {n: _roster_after(graph.layers[n], c) for n, c in change.layers.items()}


def _roster_after(layer: LiveNodes, change: LayerChange) -> Roster:
    owners = layer._owner_names.carry(change.index, change.born.owners)
    activations = layer._activation_names.carry(change.index, change.born.activations)
    if change.owners is not None:
        owners = owners.replaced(change.owners.rows, change.owners.after)
    if change.activations is not None:
        activations = activations.replaced(change.activations.rows, change.activations.after)
    # Where nodes only come, every name stays in use.
    if len(change.index.removed) or change.owners or change.activations:
        owners = owners.compact()
        activations = activations.compact()
    # A gather: to look for runs takes longer than to move so few numbers.
    moves = GridMap((change.index.old_size,), {0: change.index})
    uids = moves.carry(layer.uid, change.born.uids)
    return Roster.of(uids, activations, owners, layer._kinds_place)


def _prepare_vectors(
    graph: "Graph", change: Change, returning: Mapping[int, torch.Tensor]
) -> dict[str, tuple[Coordinates, PreparedVector]]:
    """Returns every vector of the graph after a change, by the name of its Parameter; those that
    the change does not touch are new versions too, which autograd keeps apart from the old ones.
    """
    found = {}
    for t, transition in enumerate(graph._wired):
        part = change.transitions.get(t)
        prepared = transition._prepare(
            part and part.weights, returning.get(id(transition.parameter))
        )
        found[f"transitions.{t}.weight"] = (transition, prepared)
    for n, layer in enumerate(graph._own_layers):
        if layer._has_biases:
            part = change.layers.get(n)
            prepared = layer._prepare(part and part.biases, returning.get(id(layer.parameter)))
            found[f"layers.{n}.bias"] = (layer, prepared)
    for name, column in graph.columns.items():
        part = change.layers.get(column.layer)
        moved = None
        if part is not None and not part.index.is_identity:
            moved = part.columns.get(name) or column.change(part.index)
        found[column.parameter_name] = (
            column,
            column._prepare(moved, returning.get(id(column.parameter))),
        )
    return found


def _completed(
    graph: "Graph",
    receipt: Commit,
    vectors: dict[str, tuple[Coordinates, PreparedVector]],
    grids: dict[str, PreparedGrid],
) -> Commit:
    """Returns the commit with removed values and the map of every changed Parameter."""
    changes = {name: prepared.change for name, (_, prepared) in vectors.items()}
    layers = {}
    for n, part in receipt.change.layers.items():
        columns = {}
        for name, column in graph._columns_of(n).items():
            moved = changes[column.parameter_name]
            if moved is not None:
                columns[name] = moved
        layers[n] = replace(part, biases=changes.get(f"layers.{n}.bias"), columns=columns)
    transitions = {}
    for t, part in receipt.change.transitions.items():
        weights = changes[f"transitions.{t}.weight"]
        assert weights is not None
        transitions[t] = replace(part, weights=weights, wiring=None)
    maps: dict[str, CellMap] = {}
    assigned: dict[str, torch.Tensor] = {}
    for name, (_, prepared) in vectors.items():
        if prepared.parameter_index is not None:
            maps[name] = prepared.parameter_index
        if prepared.assigned is not None:
            assigned[name] = prepared.assigned
    tensors = {}
    for name, prepared in grids.items():
        tensors[name] = prepared.change
        if isinstance(prepared.tensor, nn.Parameter):
            maps[name] = prepared.tensor_index
        if prepared.assigned is not None:
            assigned[name] = prepared.assigned
    depth = receipt.change.depth
    if depth is not None:
        depth = graph._completed_depth(depth)
    change = replace(
        receipt.change, layers=layers, transitions=transitions, tensors=tensors, depth=depth
    )
    return replace(receipt, change=change, parameters=maps, assigned=assigned)


def _view_after(
    graph: "Graph",
    rosters: dict[int, Roster],
    wirings: dict[int, Topology],
    vectors: dict[str, tuple[Coordinates, PreparedVector]],
    tensors: Mapping[str, KeptContent | PreparedGrid],
) -> View:
    present = graph._view()
    biases: list[Vector | None] = []
    for n, layer in enumerate(graph._own_layers):
        biases.append(vectors[f"layers.{n}.bias"][1].vector if layer._has_biases else None)
    return View(
        tuple(rosters.get(n, roster) for n, roster in enumerate(present.rosters)),
        tuple(biases),
        tuple(wirings.get(t, topology) for t, topology in enumerate(present.topologies)),
        tuple(vectors[f"transitions.{t}.weight"][1].vector for t in range(len(present.weights))),
        {name: vectors[f"columns.{name}.value"][1].vector for name in present.columns},
        {name: one.content for name, one in tensors.items()},
        present.ends,
    )


def _prepare_model(
    intent: Intent, receipt: Commit, grids: dict[str, PreparedGrid]
) -> list[Install]:
    """Returns the assignments that install the tensors, attributes and blocks of an adopted
    model, or the layers of a net.
    """
    found: list[Install] = []
    for prepared in grids.values():
        layout = Token()
        if intent.before is not None:
            layout = intent.before.layouts.get(id(prepared.tensor))
        found.append(partial(install_grid, prepared, layout))
    for attribute in receipt.change.attributes:
        found.append(intent.graph._prepare_attribute(attribute))
    if receipt.change.depth is not None:
        found += intent.graph._prepare_depth(receipt.change.depth)
        if receipt.kind not in ("trial", "end"):
            # A block that comes back was not there for the last backward pass.
            for one in receipt.change.depth.coming:
                found.append(partial(setattr, one.parameter, "grad", None))
                # An optimizer of the other blocks that is not attached would not train this one:
                # with another layout it is refused.
                if one.beside is not None:
                    found.append(partial(install_layout, one.beside, Token()))
    return found


def _prepare_stores(
    intent: Intent,
    receipt: Commit,
    rosters: dict[int, Roster],
    wirings: dict[int, Topology],
    vectors: dict[str, tuple[Coordinates, PreparedVector]],
) -> Install:
    """Returns the assignments that install the stores, version and next uid of a graph."""
    graph = intent.graph
    placed = []
    for store, prepared in vectors.values():
        layout = Token()
        if intent.before is not None:
            layout = intent.before.layouts.get(id(store.parameter))
        placed.append((store, prepared, layout))
    attributes = {
        "_version": receipt.version,
        "_next_uid": max(graph._next_uid, intent.next_uid),
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
    rosters: list[tuple[LiveNodes, Roster]],
    wirings: list[tuple[Transition, Topology]],
    vectors: "list[tuple[Coordinates, PreparedVector, Token | None]]",
) -> None:
    for layer, roster in rosters:
        layer._enrol(roster)
    for transition, topology in wirings:
        transition._rewire(topology)
    reads = last_reads()
    for store, prepared, layout in vectors:
        store._install(prepared, layout, reads)
    vars(graph).update(attributes)


def _release(receipt: Commit) -> None:
    """Drops what index maps cache during the commit."""
    for index in (
        *receipt.relations.values(),
        *receipt.nodes.values(),
        *receipt.parameters.values(),
    ):
        index.release()


def _refuse_old_backwards(graph: "Graph", receipt: Commit, decision: Decision) -> None:
    """Makes a backward pass through any earlier forward pass raise, for every Parameter."""
    edited = f"(version {receipt.version})"
    if receipt.reason:
        edited = f"({receipt.reason!r}, version {receipt.version})"
    message = (
        f"this backward goes through a forward pass of version {graph.version}, and the graph was"
        f" edited since {edited}. Run the forward pass again, or edit after optimizer.step()"
    )
    parameters = [store.parameter for store in graph._stores().values()]
    refuse_old_backwards(parameters, message, decision)
