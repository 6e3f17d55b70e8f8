"""ClosedFormReadout: relations solved in closed form, from statistics that follow commits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._change import Change
from grapnet.core._commit import Tracked
from grapnet.core._coordinates import Coordinates, values_after
from grapnet.core._edit import Edit
from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._evaluating import evaluating
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap, ascending
from grapnet.core._journal import Commit
from grapnet.core._sets import NodeSet, RelationSet
from grapnet.core._transition import rows_after

from ._gram import GramStatistics, Solution, ridge_solution, weakest_features


@dataclass(frozen=True, eq=False)
class _Held:
    """The statistics of a readout."""

    statistics: GramStatistics
    uids: list[Tensor]  # of the layer's nodes and of their children
    below: list[float]  # `sums_below` when the samples came in


def _after(graph: Graph, t: int, held: _Held, commit: Commit) -> _Held:
    """Returns what a readout of a transition has after a commit."""
    layer = graph.transitions[t].source
    uids = []
    for number, present in zip(graph.ends[t], held.uids, strict=True):
        change = commit.change.layers.get(number)
        if change is not None:
            present = change.index.carry(present, change.born.uids)
        uids.append(present)
    if commit.kind == "end":
        # A readout that came, or was cleared, inside a trial has no state from before it.
        statistics = held.statistics.empty(*map(len, uids))
    else:
        statistics = moved(held.statistics, graph, commit, t)
    below = held.below
    # Values that have changed since the samples came in must go on to differ.
    if _alike(below, sums_below(graph, layer)):
        below = sums_below(graph, layer, commit.change)
    return _Held(statistics, uids, below)


def moved(statistics: GramStatistics, graph: Graph, commit: Commit, t: int) -> GramStatistics:
    """Returns the statistics of both ends of a transition after a commit; the same ones when it
    does not touch them.
    """
    source, target = graph.ends[t]
    parents = commit.nodes.get(source)
    children = commit.nodes.get(target)
    changed = changed_rows(graph, commit, source)
    still = all(index is None or index.is_identity for index in (parents, children))
    if still and not bool(changed.any()):
        return statistics
    features = torch.where(changed, -1, _source(parents, statistics.n_features))
    return statistics.rearranged(features, _source(children, statistics.n_outputs))


def changed_rows(graph: Graph, commit: Commit, layer: int) -> Tensor:
    """Returns which nodes of a layer compute another function after a commit, [n] bool."""
    found: list[Tensor] = []  # layer by layer
    for number in range(layer + 1):
        change = commit.change.layers.get(number)
        size = len(graph.layers[number]) if change is None else change.index.new_size
        changed = torch.zeros(size, dtype=torch.bool, device="cpu")
        for t in graph.entering(number):
            transition = graph.transitions[t]
            wires = commit.change.transitions.get(t)
            for pairs in () if wires is None else (wires.born, wires.gone):
                rows = rows_after(graph, number, change, pairs.children.cpu().long()).long()
                changed[rows[rows >= 0]] = True
            if wires is not None and wires.weights.assigned is not None:
                wiring = commit.wirings.get(t, transition.topology)
                at = wires.index.new_positions(wires.weights.assigned.positions)
                changed[wiring.child[at.long()].cpu().long()] = True
            above = found[transition.source]
            if bool(above.any()):
                wiring = commit.wirings.get(t, transition.topology)
                changed[wiring.child.cpu().long()[above[wiring.parents().cpu().long()]]] = True
        if change is not None and change.activations is not None:
            changed[change.activations.rows.cpu().long()] = True
        if change is not None and change.biases is not None and change.biases.shift is not None:
            changed[change.biases.shift.positions.cpu().long()] = True
        if change is not None and change.biases is not None and change.biases.assigned is not None:
            rows = change.biases.index.new_positions(change.biases.assigned.positions)
            changed[rows.cpu().long()] = True
        found.append(changed)
    return found[layer]


@torch.no_grad()
def sums_below(graph: Graph, layer: int, change: Change | None = None) -> list[float]:
    """Returns two checksums for every vector of coordinates below a layer; with `change`, those
    after it.
    """
    vectors = {}
    if change is not None:
        vectors |= {graph.transitions[t]: c.weights for t, c in change.transitions.items()}
        vectors |= {graph.layers[n]: c.biases for n, c in change.layers.items()}
    found = []
    relations = [transition for transition in graph.transitions if transition.target <= layer]
    for store in (*relations, *graph.layers[1 : layer + 1]):
        values = values_after(store, vectors.get(store)).double()
        found += [values.square().sum(), (values + 1).square().sum()]
    if not found:
        return []
    return torch.stack(found).tolist()


def _alike(some: list[float], others: list[float]) -> bool:
    if len(some) != len(others):
        return False
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(some, others, strict=True))


def _source(index: IndexMap | None, size: int) -> Tensor:
    """Returns the old row of every row after a commit, -1 for new ones."""
    rows = torch.arange(size, device="cpu")
    return rows if index is None else index.to(rows.device).carry(rows, -1)


class Wired(NamedTuple):
    """The outgoing relations of a layer and the biases of their children, as matrices with the
    biases in the last row.
    """

    parents: Tensor  # [n_relations] int64 rows
    children: Tensor  # [n_relations] int64 rows
    free: Tensor  # [n_parents + 1, n_children] bool: exists and is not frozen
    held: Tensor  # [n_parents + 1, n_children] float64: the values of what is frozen, 0 elsewhere

    @classmethod
    def of(cls, graph: Graph, t: int, device: torch.device) -> "Wired":
        """Returns the present wiring of a transition on a device."""
        relations = graph.transitions[t]
        children = graph.layers[relations.target]
        topology = relations.topology
        parent = topology.parents().to(device).long()
        child = topology.child.to(device).long()
        held = torch.zeros(
            topology.n_parents + 1, topology.n_children, dtype=torch.float64, device=device
        )
        free = torch.zeros_like(held, dtype=torch.bool)
        held[parent, child] = relations.values().to(held)
        held[-1] = children.values().to(held)
        free[parent, child] = _free_bits(relations).to(device)
        free[-1] = _free_bits(children).to(device)
        return cls(parent, child, free, held.masked_fill_(free, 0.0))

    def without(self, leaves: Tensor) -> "Wired":
        """Returns the wiring as if the relations at some positions were absent."""
        leaves = leaves.to(self.free.device).long()
        parents = self.parents[leaves]
        children = self.children[leaves]
        free = self.free.clone()
        held = self.held.clone()
        free[parents, children] = False
        held[parents, children] = 0.0
        return Wired(self.parents, self.children, free, held)

    def assign(self, graph: Graph, t: int, found: Tensor, edit: Edit) -> None:
        """Lets an edit assign everything that is free from a rectangle like `held`."""
        is_free = self.free[self.parents, self.children]
        at = is_free.nonzero().squeeze(1)
        relations = RelationSet(graph, {t: at.int().to(graph.device)})
        edit.assign(relations, found[self.parents[at], self.children[at]])
        rows = self.free[-1].nonzero().squeeze(1)
        children = graph.layers[graph.transitions[t].target]
        # The commit adds what orphans leave to biases.
        biases = found[-1] - edit._drafts().constants(graph, t).to(found)
        edit.assign(children[rows.cpu()], biases[rows])

    def write(self, graph: Graph, t: int, found: Tensor) -> None:
        """Assigns everything that is not frozen from a rectangle like `held`."""
        relations = graph.transitions[t]
        values = {
            relations: found[self.parents, self.children],
            graph.layers[relations.target]: found[-1],
        }
        writes = []
        for store, new in values.items():
            at = _free_bits(store).nonzero().squeeze(1).int()
            writes.append((store, at, new[at.to(new.device).long()]))
        graph._write_all(writes)


def _free_bits(store: Coordinates) -> Tensor:
    return ~store._frozen_bits(ascending(store.size, store.frozen_at.device))


LateNodes = Literal["refuse", "silent", "leave out"]


class ClosedFormReadout:
    """Solves the outgoing relations of one layer, and the biases of their children, from statistics
    of a stream.

    The targets are those of the children before their activation, which are the outputs of the net
    if they are linear. Every child is solved over its own parents; frozen relations and biases
    stay, and their contribution is subtracted from the targets.

    Everything before the layer must not change while samples are added. A commit that removes a
    node removes exactly its sums. A new node, or one whose incoming relations, bias or activation
    change, lacks statistics (see `late_nodes`). A new child had targets 0. Samples added in a trial
    are dropped at its end. Undo restores the statistics of a node, unless samples were added since.

    Args:
        net: the net to solve for; its incoming relations are usually frozen.
        layer: the layer whose outgoing relations are solved; negative numbers count from the
            output.
        ridge: the penalty on the weights; see `GramStatistics.solve`.
        standardize: apply it to nodes divided by their standard deviation.
        per_class: keep statistics per class for `forget`; see `GramStatistics`.
        late_nodes: what `solve` does with nodes that lack statistics: "refuse" raises, "silent"
            counts their earlier output as 0, "leave out" sets their outgoing weights to 0. Use
            "leave out" if classes arrive one after the other.
        dtype: the dtype of the sums; see `GramStatistics`. A ridge below 6e-8 · samples · √nodes
            needs float64.

    Examples:
        >>> net = GrapNet([1, 8, 2], generator=torch.Generator().manual_seed(0))
        >>> readout = ClosedFormReadout(net, ridge=1e-6)
        >>> x = torch.tensor([[-1.0], [-0.5], [0.5], [1.0]])
        >>> readout.update(x, torch.tensor([0, 1, 1, 0]))
        >>> _ = readout.solve()
        >>> net(x).argmax(1).tolist()
        [0, 1, 1, 0]
    """

    def __init__(
        self,
        net: GrapNet,
        layer: int = -2,
        *,
        ridge: float = 1.0,
        standardize: bool = False,
        per_class: bool = False,
        late_nodes: LateNodes = "refuse",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if late_nodes not in ("refuse", "silent", "leave out"):
            raise ValueError(f'late_nodes is "refuse", "silent" or "leave out", got {late_nodes!r}')
        self.net = net
        self.layer = layer % len(net.layers)
        self.ridge = ridge
        leaving = net.leaving(self.layer)
        if len(leaving) != 1 or len(net.entering(net.transitions[leaving[0]].target)) > 1:
            raise ValueError(
                f"a closed form needs one transition from layer {layer}, and no other to its"
                " children"
            )
        self._transition = leaving[0]
        self.standardize = standardize
        self.per_class = per_class
        self.late_nodes = late_nodes
        self.dtype = dtype
        self.clear()

    @property
    def statistics(self) -> GramStatistics:
        """The statistics, to read; use `add` and `remove` of the readout to change them."""
        return self._tracked.state.statistics

    def clear(self) -> None:
        """Clears the statistics; the relations do not change."""
        self._track(self._empty(), sums_below(self.net, self.layer))

    def features(self, x: Tensor) -> Tensor:
        """Returns the activations of the layer for inputs [..., sensory nodes], without gradients
        and without dropout.
        """
        outputs = []
        layer = self.net.layers[self.layer]
        hook = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            autocast = torch.autocast(x.device.type, enabled=False)
            with evaluating(self.net), torch.no_grad(), autocast:
                self.net(x)
        finally:
            hook.remove()
        return outputs[0].reshape(*x.shape[:-1], len(layer))

    def update(self, x: Tensor, y: Tensor) -> None:
        """Adds samples: inputs of the net, and labels (rows of the children) or targets [...,
        children].
        """
        self.add(self.features(x), y)

    def downdate(self, x: Tensor, y: Tensor) -> None:
        """Removes samples that `update` added.

        In a float32 net the last digits of features depend on the batches. If that matters, keep
        `features(x)` and use `remove`.
        """
        self.remove(self.features(x), y)

    def add(self, h: Tensor, y: Tensor) -> None:
        """Adds samples by their features; see `GramStatistics.add`."""
        self._change(lambda statistics: statistics.add(h, y))

    def remove(self, h: Tensor, y: Tensor) -> None:
        """Removes samples by their features; see `GramStatistics.remove`."""
        self._change(lambda statistics: statistics.remove(h, y))

    def forget(self, label: int) -> None:
        """Removes a class; see `GramStatistics.forget`."""
        self._change(lambda statistics: statistics.forget(label))

    def __repr__(self) -> str:
        return f"ClosedFormReadout(layer {self.layer}, ridge={self.ridge:g}, {self.statistics})"

    @torch.no_grad()
    def solve(self, edit: Edit | None = None) -> Solution:
        """Writes the weights of the layer's outgoing relations and the children's biases, and
        returns them dense.

        Absent relations have weight 0.

        Args:
            edit: an open edit of the net, after its removals, cuts and `remove_orphans`. It assigns
                what is solved for the nodes and relations that stay, and commits it with them.

        Raises:
            GrapNetError: nothing was seen, nodes lack a past, what leads to the layer has
                changed, or a policy runs the transition; nothing was written.
        """
        wired = self._wired()
        if edit is not None:
            wired = wired.without(edit._drafts().transitions[self._transition].cuts)
        found = ridge_solution(
            self.statistics.gram(),
            self.statistics.cross(),
            self.ridge,
            standardize=self.standardize,
            free=wired.free & ~self._left_out(wired),
            fixed=wired.held,
        )
        if edit is None:
            wired.write(self.net, self._transition, found)
        else:
            wired.assign(self.net, self._transition, found, edit)
        return Solution(found[:-1].t().contiguous(), found[-1])

    @torch.no_grad()
    def weakest(self, count: int, *, steps: int = 8) -> NodeSet:
        """Returns the nodes of the layer whose removal makes the loss of `solve` grow least.

        Nothing changes: remove them in an edit, and solve again. Nodes with frozen outgoing
        relations, and nodes that lack statistics, are not among them.

        Args:
            count: how many nodes.
            steps: in how many steps they are chosen; after each, the others are judged as solved
                without those of the steps before.

        Raises:
            ValueError: fewer than `count` nodes may leave.
            GrapNetError: as for `solve`.
        """
        wired = self._wired()
        left_out = self._left_out(wired)
        exists = torch.zeros_like(wired.free)
        exists[wired.parents, wired.children] = True
        has_frozen = (exists & ~wired.free)[:-1].any(1)
        rows = weakest_features(
            self.statistics.gram(),
            self.statistics.cross(),
            self.ridge,
            count,
            steps=steps,
            standardize=self.standardize,
            free=wired.free & ~left_out,
            fixed=wired.held,
            candidates=~has_frozen & ~left_out[:-1].any(1),
        )
        return self.net.layers[self.layer][rows]

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics and the uids of the nodes, without what undo would restore."""
        held = self._tracked.state
        return {
            "layer": self.layer,
            "uids": [uids.clone() for uids in held.uids],
            "below": list(held.below),
            "statistics": held.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` of a readout of the same nodes returned.

        Raises:
            CheckpointError: the state belongs to another layer or other nodes; nothing changes.
        """
        present = [layer.uid for layer in self._ends(self.net)]
        if state["layer"] != self.layer or not all(map(torch.equal, state["uids"], present)):
            raise CheckpointError(
                f"the state belongs to other nodes than those of layer {self.layer} and their"
                " children"
            )
        statistics = self._empty()
        statistics.load_state_dict(state["statistics"])
        self._track(statistics, list(state["below"]))

    def _track(self, statistics: GramStatistics, below: list[float]) -> None:
        """Installs statistics that follow the net; drops what undo would restore."""
        held = _Held(statistics, [layer.uid for layer in self._ends(self.net)], below)
        tracked: Tracked[_Held, _Held] = Tracked(
            held, carry=partial(_after, self.net, self._transition), name=type(self).__name__
        )
        self.net.follow(tracked)
        self._tracked = tracked

    def _ends(self, graph: Graph) -> list[Any]:
        return [graph.layers[number] for number in graph.ends[self._transition]]

    def _fits(self) -> bool:
        """Returns whether everything before the layer is unchanged since samples were added."""
        return _alike(self._tracked.state.below, sums_below(self.net, self.layer))

    def _require_current(self) -> None:
        """Raises if the statistics belong to other nodes or other features."""
        uids = [layer.uid for layer in self._ends(self.net)]
        if not all(map(torch.equal, self._tracked.state.uids, uids)):
            raise GrapNetError(
                "this readout has not followed the edits of the net, because it is a copy; create"
                " one for the net"
            )
        if not self._fits():
            raise GrapNetError(
                f"the relations or biases before layer {self.layer} have changed since samples were"
                " added, so the sums belong to other features. Freeze them while adding samples;"
                " clear() to start again"
            )

    def _change(self, change: Callable[[GramStatistics], None]) -> None:
        """Modifies the statistics; outside a trial, drops what undo would restore."""
        if self.statistics.count == 0:
            below = sums_below(self.net, self.layer)
            self._tracked.replace(replace(self._tracked.state, below=below))
        self._require_current()
        held = self._tracked.state
        statistics = held.statistics
        if self._tracked.in_trial:
            # The end of the trial brings back the statistics before it, which must not change.
            statistics = statistics.copied()
        change(statistics)
        self._tracked.learn(replace(held, statistics=statistics))

    def _empty(self) -> GramStatistics:
        return GramStatistics(
            *map(len, self._ends(self.net)),
            per_class=self.per_class,
            device=self.net.device,
            dtype=self.dtype,
        )

    def _wired(self) -> Wired:
        """Returns the present wiring; raises if the statistics do not belong to it."""
        self._require_current()
        self.net.execution.require_sum("a closed form", [self._transition])
        return Wired.of(self.net, self._transition, self.statistics.device)

    def _left_out(self, wired: Wired) -> Tensor:
        """Returns the coordinates that get weight 0 because their parent lacks statistics; raises
        if late nodes are refused.
        """
        lacking = self.statistics.lacking
        late = torch.zeros_like(wired.free)
        if lacking is None or self.late_nodes == "silent":
            return late
        late[:-1] = (lacking > 0)[:, None]
        nodes = f"{int((lacking > 0).sum())} nodes of layer {self.layer}"
        if self.late_nodes == "refuse":
            raise GrapNetError(
                f"{nodes} came, or changed, after samples were added, and lack their statistics."
                ' Choose late_nodes="silent" or "leave out", or clear() and add the samples again'
            )
        if bool((late & (wired.held != 0)).any()):
            raise GrapNetError(
                f"some of the {nodes} that lack statistics own frozen relations, whose"
                ' contribution is unknown. Unfreeze them, or choose late_nodes="silent"'
            )
        return late
