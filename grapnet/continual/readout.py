"""ClosedFormReadout: relations solved in closed form, from statistics that follow commits."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from grapnet.core._change import Change, IndexMap, ascending
from grapnet.core._commit import Tracked
from grapnet.core._coordinates import Coordinates, values_after
from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.core._transition import rows_after
from grapnet.execution.attention import Attention
from grapnet.network import GrapNet

from .gram import GramStatistics, Solution, ridge_solution
from .gram import linear_discriminant as linear_discriminant
from .gram import nearest_class_mean as nearest_class_mean


@dataclass(frozen=True, eq=False)
class _Held:
    """What a readout has of its samples."""

    statistics: GramStatistics
    uids: list[Tensor]  # of the layer's nodes and of their children
    below: list[float]  # `sums_below` when the samples came in


def _after(graph: Graph, layer: int, held: _Held, commit: Commit) -> _Held:
    """Returns what a readout has after a commit."""
    uids = []
    for number, present in zip((layer, layer + 1), held.uids, strict=True):
        change = commit.change.layers.get(number)
        if change is not None:
            present = change.index.carry(present, change.born.uids)
        uids.append(present)
    if commit.kind == "end":
        # A readout that came, or was cleared, inside a trial has no state from before it.
        statistics = held.statistics.empty(*map(len, uids))
    else:
        statistics = moved(held.statistics, graph, commit, layer)
    below = held.below
    # Values that have changed since the samples came in must go on to differ.
    if _alike(below, sums_below(graph, layer)):
        below = sums_below(graph, layer, commit.change)
    return _Held(statistics, uids, below)


def moved(statistics: GramStatistics, graph: Graph, commit: Commit, layer: int) -> GramStatistics:
    """Returns the statistics of a layer and its children after a commit; the same ones when it does
    not touch them.
    """
    parents, children = (commit.nodes.get(n) for n in (layer, layer + 1))
    changed = changed_rows(graph, commit, layer)
    still = all(index is None or index.is_identity for index in (parents, children))
    if still and not bool(changed.any()):
        return statistics
    features = torch.where(changed, -1, _source(parents, statistics.n_features))
    return statistics.rearranged(features, _source(children, statistics.n_outputs))


def changed_rows(graph: Graph, commit: Commit, layer: int) -> Tensor:
    """Returns which nodes of a layer, by their rows after a commit, compute something else than
    before it, [n] bool.
    """
    above = torch.zeros(0, dtype=torch.bool, device="cpu")  # of the layer before
    for number in range(layer + 1):
        change = commit.change.layers.get(number)
        size = len(graph.layers[number]) if change is None else change.index.new_size
        changed = torch.zeros(size, dtype=torch.bool, device="cpu")
        wires = commit.change.transitions.get(number - 1)
        for pairs in () if wires is None else (wires.born, wires.gone):
            rows = rows_after(graph, number, change, pairs.children.cpu().long()).long()
            changed[rows[rows >= 0]] = True
        if change is not None and change.activations is not None:
            changed[change.activations.rows.cpu().long()] = True
        if change is not None and change.biases is not None and change.biases.shift is not None:
            changed[change.biases.shift.positions.cpu().long()] = True
        if bool(above.any()):
            wiring = commit.wirings.get(number - 1, graph.transitions[number - 1].topology)
            changed[wiring.child.cpu().long()[above[wiring.parents().cpu().long()]]] = True
        above = changed
    return above


@torch.no_grad()
def sums_below(graph: Graph, layer: int, change: Change | None = None) -> list[float]:
    """Returns two numbers for every vector of coordinates that leads to a layer, which change when
    one of them does; with `change`, those after it.
    """
    vectors = {}
    if change is not None:
        vectors |= {graph.transitions[t]: c.weights for t, c in change.transitions.items()}
        vectors |= {graph.layers[n]: c.biases for n, c in change.layers.items()}
    found = []
    for store in (*graph.transitions[:layer], *graph.layers[1 : layer + 1]):
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
    """Returns for every row after a commit which row it was, -1 for one that came."""
    rows = torch.arange(size, device="cpu")
    return rows if index is None else index.to(rows.device).carry(rows, -1)


class Wired(NamedTuple):
    """The relations that leave a layer and the biases they lead to, as rectangles with the biases
    in the last row.
    """

    parents: Tensor  # [n_relations] int64 rows
    children: Tensor  # [n_relations] int64 rows
    free: Tensor  # [n_parents + 1, n_children] bool: exists and is not frozen
    held: Tensor  # [n_parents + 1, n_children] float64: the values of what is frozen, 0 elsewhere

    @classmethod
    def of(cls, graph: Graph, layer: int, device: torch.device) -> "Wired":
        """Returns the present wiring on a device."""
        relations, children = graph.transitions[layer], graph.layers[layer + 1]
        topology = relations.topology
        parent, child = topology.parents().to(device).long(), topology.child.to(device).long()
        held = torch.zeros(
            topology.n_parents + 1, topology.n_children, dtype=torch.float64, device=device
        )
        free = torch.zeros_like(held, dtype=torch.bool)
        held[parent, child], held[-1] = relations.values().to(held), children.values().to(held)
        free[parent, child], free[-1] = (
            _free_bits(relations).to(device),
            _free_bits(children).to(device),
        )
        return cls(parent, child, free, held.masked_fill_(free, 0.0))

    def write(self, graph: Graph, layer: int, found: Tensor) -> None:
        """Assigns everything that is not frozen from a rectangle like `held`."""
        stores = graph.transitions[layer], graph.layers[layer + 1]
        chosen = found[self.parents, self.children], found[-1]
        places = [_free_bits(store).nonzero().squeeze(1).int() for store in stores]
        graph.write_all(
            [
                (store, at, values[at.to(values.device).long()])
                for store, at, values in zip(stores, places, chosen, strict=True)
            ]
        )


def _free_bits(store: Coordinates) -> Tensor:
    return ~store.frozen_bits(ascending(store.size, store.frozen_at.device))


LateNodes = Literal["refuse", "silent", "leave out"]


class ClosedFormReadout:
    """Solves for the relations that leave one layer, and the biases they lead to, from statistics
    of a stream.

    The targets are about what the children receive, which is the output of the net where they are
    linear. Every child is solved over its own parents; frozen relations and biases stay, and what
    they explain is taken from the targets.

    What leads to the layer has to stay as it is while samples come in. Of commits: a node that
    leaves takes exactly its own sums along; one that comes, or whose incoming relations, bias or
    activation a commit changes, has no past (see `late_nodes`); a child that comes had targets 0.
    What a trial sees is forgotten when it ends. Undo brings back what a node had, unless samples
    came in since: then it has no past.

    Args:
        net: the net to solve for; frozen incoming relations are the usual case, and not required.
        layer: whose outgoing relations; negative numbers count from the output.
        ridge: the penalty on the weights; see `GramStatistics.solve`.
        standardize: apply it as if every node were divided by its standard deviation.
        per_class: keep classes apart, so that `forget` can let one go; see `GramStatistics`.
        late_nodes: what `solve` does with nodes that lack a past: "refuse" raises, "silent" counts
            their output as 0 until they came, "leave out" gives their outgoing relations the
            weight 0. Where classes come one after the other, silence tells the early ones apart by
            when they came: leave such nodes out.
        dtype: what to keep the sums in; see `GramStatistics`. A ridge below 6e-8 · samples · √nodes
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
        if (
            not -len(net.layers) <= layer < len(net.layers)
            or layer % len(net.layers) == len(net.layers) - 1
        ):
            raise ValueError(
                f"the layers with outgoing relations are 0 to {len(net.layers) - 2}, got {layer}"
            )
        if not (math.isfinite(ridge) and ridge >= 0):
            raise ValueError(f"ridge is a number from 0, got {ridge!r}")
        if late_nodes not in ("refuse", "silent", "leave out"):
            raise ValueError(f'late_nodes is "refuse", "silent" or "leave out", got {late_nodes!r}')
        self.net, self.layer, self.ridge = net, layer % len(net.layers), ridge
        self.standardize, self.per_class, self.late_nodes, self.dtype = (
            standardize,
            per_class,
            late_nodes,
            dtype,
        )
        self.clear()

    @property
    def statistics(self) -> GramStatistics:
        """What it has seen, to read; `add` and `remove` here write into it."""
        return self._tracked.state.statistics

    def clear(self) -> None:
        """Forgets everything; the relations stay as they are."""
        self._track(self._empty(), sums_below(self.net, self.layer))

    def features(self, x: Tensor) -> Tensor:
        """Returns the activations of the layer for inputs [..., sensory nodes], without gradients
        and without dropout.
        """
        outputs = []
        layer = self.net.layers[self.layer]
        hook = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            with (
                torch.no_grad(),
                torch.autocast(x.device.type, enabled=False),
                _evaluating(self.net),
            ):
                self.net(x)
        finally:
            hook.remove()
        return outputs[0].reshape(*x.shape[:-1], len(layer))

    def update(self, x: Tensor, y: Tensor) -> None:
        """Takes samples in: inputs of the net, and labels (rows of the children) or targets [...,
        children].
        """
        self.add(self.features(x), y)

    def downdate(self, x: Tensor, y: Tensor) -> None:
        """Takes samples out that `update` took in.

        In a float32 net the last digits of features depend on how samples are batched. Where that
        matters, keep `features(x)` and use `remove`.
        """
        self.remove(self.features(x), y)

    def add(self, h: Tensor, y: Tensor) -> None:
        """Takes samples in whose features are known already; see `GramStatistics.add`."""
        self._change(lambda statistics: statistics.add(h, y))

    def remove(self, h: Tensor, y: Tensor) -> None:
        """Takes samples out whose features are known already; see `GramStatistics.remove`."""
        self._change(lambda statistics: statistics.remove(h, y))

    def forget(self, label: int) -> None:
        """Lets a class go as if it had never been seen; see `GramStatistics.forget`."""
        self._change(lambda statistics: statistics.forget(label))

    def __repr__(self) -> str:
        return f"ClosedFormReadout(layer {self.layer}, ridge={self.ridge:g}, {self.statistics})"

    @torch.no_grad()
    def solve(self) -> Solution:
        """Writes the weights of the layer's outgoing relations and the children's biases, and
        returns them dense.

        A relation that does not exist has weight 0 there.

        Raises:
            GrapNetError: nothing was seen, nodes lack a past, or what leads to the layer has
                changed; nothing was written.
        """
        self._require_current()
        if self.net.execution.choices()[self.layer] == Attention.name:
            raise GrapNetError(
                f"transition {self.layer} runs with attention; a closed form exists only for"
                " the sum"
            )
        wired = Wired.of(self.net, self.layer, self.statistics.device)
        gram = self.statistics.gram()
        cross = self.statistics.cross()
        solvable = wired.free & ~self._left_out(wired)
        found = ridge_solution(
            gram, cross, self.ridge, standardize=self.standardize, free=solvable, fixed=wired.held
        )
        wired.write(self.net, self.layer, found)
        return Solution(found[:-1].t().contiguous(), found[-1])

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen, with the uids of the nodes; not what undo would bring back."""
        held = self._tracked.state
        return {
            "layer": self.layer,
            "uids": [uids.clone() for uids in held.uids],
            "below": list(held.below),
            "statistics": held.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned of a readout of the same nodes.

        Raises:
            CheckpointError: the state is of another layer, of other nodes or not one of a readout;
                nothing was changed.
        """
        if not isinstance(state, dict) or state.keys() != {"layer", "uids", "below", "statistics"}:
            raise CheckpointError(
                "the state of a closed-form readout holds layer, uids, below and statistics"
            )
        uids, below = state["uids"], state["below"]
        present = [layer.uid for layer in self._ends(self.net)]
        lists = (
            isinstance(uids, list) and len(uids) == 2 and all(isinstance(u, Tensor) for u in uids)
        )
        if state["layer"] != self.layer or not lists or not all(map(torch.equal, uids, present)):
            raise CheckpointError(
                f"the state is about other nodes than those of layer {self.layer} and their"
                " children"
            )
        if not isinstance(below, list) or not all(
            isinstance(n, float) and math.isfinite(n) for n in below
        ):
            raise CheckpointError(
                "below, in the state of a closed-form readout, is a list of finite numbers"
            )
        statistics = self._empty()
        statistics.load_state_dict(state["statistics"])
        self._track(statistics, list(below))

    def _track(self, statistics: GramStatistics, below: list[float]) -> None:
        """Puts statistics in place, to follow the net; what undo would bring back is dropped."""
        held = _Held(statistics, [layer.uid for layer in self._ends(self.net)], below)
        tracked: Tracked[_Held, _Held] = Tracked(held, carry=partial(_after, self.net, self.layer))
        self.net.follow(tracked)
        self._tracked = tracked

    def _ends(self, graph: Graph) -> list[Any]:
        return [graph.layers[self.layer], graph.layers[self.layer + 1]]

    def _fits(self) -> bool:
        """Returns whether what leads to the layer is what it was when the samples came in."""
        return _alike(self._tracked.state.below, sums_below(self.net, self.layer))

    def _require_current(self) -> None:
        """Raises when the statistics are about other nodes or other features."""
        uids = [layer.uid for layer in self._ends(self.net)]
        if not all(map(torch.equal, self._tracked.state.uids, uids)):
            raise GrapNetError(
                "this readout has not followed the net's edits, as a copy does not; make one for"
                " the net"
            )
        if not self._fits():
            raise GrapNetError(
                f"the relations or biases that lead to layer {self.layer} have other values than"
                " when the samples came in, so the sums are about other features. Freeze them"
                " while samples come in; clear() to start again"
            )

    def _change(self, change: Callable[[GramStatistics], None]) -> None:
        """Writes into the statistics; outside a trial, what undo would bring back is dropped."""
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

    def _left_out(self, wired: Wired) -> Tensor:
        """Returns which coordinates get weight 0 because their parent lacks a past; raises when
        that is not wanted.
        """
        lacking = self.statistics.lacking
        late = torch.zeros_like(wired.free)
        if lacking is None or self.late_nodes == "silent":
            return late
        late[:-1] = (lacking > 0)[:, None]
        nodes = f"{int((lacking > 0).sum())} nodes of layer {self.layer}"
        if self.late_nodes == "refuse":
            raise GrapNetError(
                f"{nodes} came, or had what leads to them edited, after samples had come in, and"
                ' lack that past. Choose late_nodes="silent" or "leave out", or clear() and show'
                " the samples again"
            )
        if bool((late & (wired.held != 0)).any()):
            raise GrapNetError(
                f"some of the {nodes} that lack a past own frozen relations, and what those"
                ' explained of it is not known. Unfreeze them, or choose late_nodes="silent"'
            )
        return late


@contextmanager
def _evaluating(net: GrapNet) -> Iterator[None]:
    """Runs a net without dropout, and leaves every module in the mode it was in."""
    training = [module for module in net.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
