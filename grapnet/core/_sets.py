"""NodeSet and RelationSet: selections of nodes and relations."""

from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, cast

import numpy as np
import torch
from torch import Tensor

from ._errors import EditError, GrapNetError, StaleNodeError, StaleRelationsError
from ._index_map import (
    as_positions,
    as_tensor,
    contains,
    first_in_order,
    flatnonzero,
    require_ranks,
)

if TYPE_CHECKING:
    from ._graph import Graph
    from ._node import GrapNode
    from ._transition import Topology, Transition


class Ranking(SupportsIndex, Protocol):
    """How many relations to choose, and among which they are ranked: `grapnet.rules.Quota`."""

    def places(self, key: Tensor) -> Tensor:
        """Returns the ascending places of the relations with the smallest key, int32."""
        ...


class RelationSet:
    """A set of relations, of one transition or of several, in owner order.

    It refers to relations by position, so it is valid until an edit moves them; select again
    afterwards.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> relations = net.layers[0].outgoing()
        >>> len(relations), len(relations.smallest(fraction=0.25))
        (12, 3)
    """

    def __init__(self, graph: "Graph", positions: "dict[int, Tensor | range]") -> None:
        self._graph = graph
        self._positions = {t: found for t, found in sorted(positions.items()) if len(found)}
        self._structures = {t: graph.transitions[t]._structure for t in self._positions}

    @classmethod
    def of(cls, graph: "Graph", transitions: Iterable[int]) -> "RelationSet":
        """Returns all relations of some transitions."""
        return cls(graph, {t: range(graph.transitions[t].size) for t in transitions})

    @property
    def graph(self) -> "Graph":
        """The graph the relations are in."""
        return self._graph

    def _positions_by_transition(self) -> "dict[int, Tensor | range]":
        """Returns the sorted positions by transition; raises StaleRelationsError if they have
        moved.
        """
        transitions = self._graph.transitions
        for t, structure in self._structures.items():
            # With blocks of an adopted model transitions leave, too.
            if t >= len(transitions) or transitions[t]._structure is not structure:
                raise StaleRelationsError(
                    f"the relations of transition {t} have moved since this RelationSet was"
                    f" selected (the graph is at version {self._graph.version}); select them again"
                )
        return self._positions

    @property
    def parents(self) -> Tensor:
        """The uid of every relation's parent, [n] int64."""
        return self._gather(
            lambda t, at: self._uids(self._store(t).source, self._store(t).topology.parents_at(at))
        )

    @property
    def children(self) -> Tensor:
        """The uid of every relation's child, [n] int64."""
        return self._gather(
            lambda t, at: self._uids(
                self._store(t).target, self._store(t).child.index_select(0, at)
            )
        )

    @property
    def weights(self) -> Tensor:
        """One weight per relation; live, differentiable and assignable.

        Relations of a model may have several numbers each: then [n, numbers]. Those of tensors
        that have another count for each have no common shape, and raise ValueError.
        """
        found = self._positions_by_transition().items()
        parts = [self._store(t)._weights_at(at) for t, at in found]
        if not parts:
            return self._store(0).weight.new_empty(0)
        return laid_end_to_end(parts)

    @weights.setter
    def weights(self, values: Tensor) -> None:
        values = as_tensor(values).detach()
        found = self._positions_by_transition().items()
        counts = [len(at) * self._store(t)._payload for t, at in found]
        if values.numel() not in (1, sum(counts)):
            raise ValueError(
                f"this RelationSet holds {len(self)} relations, got {values.numel()} weights"
            )
        parts = values.reshape(-1).expand(sum(counts)).split(counts)
        self._graph._write_all(
            [
                (self._store(t), _as_slice(at), part)
                for (t, at), part in zip(found, parts, strict=True)
            ]
        )

    @property
    def strengths(self) -> Tensor:
        """|weight| of every relation, [n]; the norm, where a relation has several numbers."""
        device = self._graph.device
        parts = []
        for t, at in self._positions_by_transition().items():
            parts.append(self._store(t)._strengths(at).to(device))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([torch.empty(0, device=device), *parts])

    @property
    def gradients(self) -> Tensor:
        """One gradient per relation, 0 where it is frozen; raises before the first backward."""
        found = []
        for t, at in self._positions_by_transition().items():
            gradients = self._store(t)._gradients(self._tensor(at))
            if gradients is None:
                raise GrapNetError(
                    f"the relations of transition {t} have no gradients yet; call backward() first"
                )
            found.append(gradients)
        if not found:
            return self._store(0).weight.detach().new_empty(0)
        return laid_end_to_end(found)

    @property
    def frozen(self) -> Tensor:
        """One bool per relation: True where it is frozen."""
        return self._gather(lambda t, at: self._store(t)._frozen_bits(at), torch.bool)

    def smallest(
        self,
        *,
        count: int | Ranking | None = None,
        fraction: float | None = None,
        key: Tensor | None = None,
    ) -> "RelationSet":
        """Returns the relations with the smallest key (|weight| by default); ties keep their
        order.

        Args:
            count: how many; a `grapnet.rules.Quota` also has the scope and limits of a rule.
            fraction: which share of them.
            key: one number per relation.
        """
        # Checking for a protocol would take as long as ranking a few relations.
        if hasattr(count, "places") and fraction is None:
            return self._at(cast("Ranking", count).places(self._key(key)))
        return self._ranked(count, fraction, key, largest=False)

    def largest(
        self, *, count: int | None = None, fraction: float | None = None, key: Tensor | None = None
    ) -> "RelationSet":
        """Returns the relations with the largest key (|weight| by default); ties keep their
        order.
        """
        return self._ranked(count, fraction, key, largest=True)

    def random(
        self,
        *,
        count: int | None = None,
        fraction: float | None = None,
        generator: torch.Generator | None = None,
    ) -> "RelationSet":
        """Returns relations drawn without replacement, each with the same chance.

        Args:
            count: how many; all of them when there are fewer.
            fraction: which share of them.
            generator: source of the random numbers, on the CPU.
        """
        order = torch.randperm(len(self), generator=generator, device="cpu")
        return self._ranked(count, fraction, order, largest=False)

    def _at_slots(self, slots: Any, degree: int, owner: object) -> "RelationSet":
        """Returns the relations at the slots of the one node that owns this set."""
        slots = as_tensor(slots).reshape(-1)
        if slots.dtype == torch.bool and len(slots) == degree:
            return self[slots]
        if len(slots) and (slots.dtype.is_floating_point or slots.dtype == torch.bool):
            raise EditError(
                f"slots of {owner} are whole numbers, or one bool for each of its {degree}"
                " relations"
            )
        slots = slots.long()
        outside = slots[(slots < -degree) | (slots >= degree)]
        if len(outside):
            raise EditError(
                f"{owner} owns {degree} relations, so slots {outside.tolist()} do not exist"
            )
        return self[slots.remainder(max(degree, 1)).unique()]

    def __len__(self) -> int:
        return sum(len(at) for at in self._positions.values())

    def __getitem__(self, which: Any) -> "RelationSet":
        """Returns the subset for a slice, an index array or a bool mask."""
        if not isinstance(which, slice):
            which = as_tensor(which).reshape(-1)
        if isinstance(which, Tensor) and which.dtype == torch.bool:
            if len(which) != len(self):
                raise IndexError(
                    f"the bool mask has {len(which)} entries for {len(self)} relations"
                )
            marks = which
        else:
            marks = torch.zeros(len(self), dtype=torch.bool, device=self._graph.device)
            marks[which if isinstance(which, slice) else which.to(marks.device, torch.int64)] = True
        return self._marked(marks.to(self._graph.device))

    def __or__(self, other: "RelationSet") -> "RelationSet":
        return self._combined(other, lambda a, b: torch.cat([a, b]).unique())

    def __and__(self, other: "RelationSet") -> "RelationSet":
        return self._combined(other, lambda a, b: a[contains(b, a)])

    def __sub__(self, other: "RelationSet") -> "RelationSet":
        if len(other) == 0 and other._graph is self._graph:
            return self
        return self._combined(other, lambda a, b: a[~contains(b, a)])

    def __repr__(self) -> str:
        parts = ", ".join(f"transition {t}: {len(at):,}" for t, at in self._positions.items())
        return f"RelationSet({parts or 'empty'})"

    def _ranked(
        self,
        count: SupportsIndex | None,
        fraction: float | None,
        key: Tensor | None,
        *,
        largest: bool,
    ) -> "RelationSet":
        count = how_many(count, fraction, len(self))
        key = self._key(key)
        if count == 0:
            return RelationSet(self._graph, {})
        return self._at(first_in_order(key, count, largest=largest))

    def _key(self, key: Tensor | None) -> Tensor:
        """Returns a key for all relations, |weight| by default; raises if it does not rank them."""
        if key is None:
            key = self.strengths
        return as_key(key, len(self), "relations").to(self._graph.device)

    def _at(self, places: Tensor) -> "RelationSet":
        """Returns the relations at ascending int32 places in this set."""
        items = self._positions_by_transition().items()
        if len(items) != 1:
            marks = torch.zeros(len(self), dtype=torch.bool, device=places.device)
            return self._marked(marks.index_fill_(0, places.long(), True))
        ((t, at),) = items
        if isinstance(at, range):
            return RelationSet(self._graph, {t: places + at.start})
        return RelationSet(self._graph, {t: at.index_select(0, places)})

    def _marked(self, marks: Tensor) -> "RelationSet":
        found: dict[int, Tensor | range] = {}
        items = self._positions_by_transition().items()
        for (t, at), part in zip(items, marks.split([len(at) for _, at in items]), strict=True):
            chosen = flatnonzero(part)
            found[t] = chosen + at.start if isinstance(at, range) else at[chosen.long()]
        return RelationSet(self._graph, found)

    def _combined(
        self, other: "RelationSet", rule: Callable[[Tensor, Tensor], Tensor]
    ) -> "RelationSet":
        if other._graph is not self._graph:
            raise ValueError("the two RelationSets belong to different graphs")
        mine = self._positions_by_transition()
        theirs = other._positions_by_transition()
        found: dict[int, Tensor | range] = {}
        for t in mine.keys() | theirs.keys():
            found[t] = rule(
                self._tensor(mine.get(t, range(0))), self._tensor(theirs.get(t, range(0)))
            )
        return RelationSet(self._graph, found)

    def _gather(
        self, read: Callable[[int, Tensor], Tensor], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        parts = [read(t, self._tensor(at)) for t, at in self._positions_by_transition().items()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device="cpu")

    def _store(self, t: int) -> "Transition":
        return self._graph.transitions[t]

    def _uids(self, layer: int, rows: Tensor) -> Tensor:
        return self._graph.layers[layer].uid[rows.cpu().long()]

    def _tensor(self, at: "Tensor | range") -> Tensor:
        return as_positions(at, self._graph.device)


def how_many(count: SupportsIndex | None, fraction: float | None, size: int) -> int:
    """Returns how many of `size` entries a count or a fraction means, at most all of them."""
    if (count is None) == (fraction is None):
        raise ValueError("pass either count= or fraction=")
    if fraction is not None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
        return round(fraction * size)
    assert count is not None
    count = index(count)
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    return min(count, size)


def as_key(key: Tensor, size: int, entries: str) -> Tensor:
    """Returns a key with one number per entry, [size]; raises if it cannot rank them."""
    key = key.detach().reshape(-1)
    if len(key) != size:
        raise ValueError(f"key has {len(key)} entries for {size} {entries}")
    require_ranks(key)
    return key.byte() if key.dtype == torch.bool else key


def laid_end_to_end(parts: list[Tensor]) -> Tensor:
    """Returns the numbers of relations of several transitions, [n] or [n, numbers]; raises
    ValueError where relations have different counts of numbers.
    """
    if len(parts) == 1:
        return parts[0]
    parts = [part for part in parts if len(part)] or parts[:1]
    counts = sorted({part[0].numel() for part in parts if len(part)})
    if len(counts) > 1:
        raise ValueError(
            f"these relations have {' or '.join(map(str, counts))} numbers each; take those of one"
            " tensor, relations & net.relations(name)"
        )
    return torch.cat(parts)


def _as_slice(at: "Tensor | range") -> Tensor | slice:
    return slice(at.start, at.stop) if isinstance(at, range) else at


Nodes = Any  # a GrapNode, a NodeSet, uids in a tensor or array, or an iterable of nodes and uids


class NodeSet:
    """An ordered set of nodes, of one layer or of several; it refers to uids, so it stays valid
    when rows move.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> nodes = net.layers[1][:2]
        >>> len(nodes), len(nodes.incoming()), len(nodes.outgoing())
        (2, 8, 4)
    """

    def __init__(self, graph: "Graph", uids_by_layer: dict[int, Tensor]) -> None:
        self._graph = graph
        self._uids_held = {
            layer: uids for layer, uids in sorted(uids_by_layer.items()) if len(uids)
        }

    @property
    def graph(self) -> "Graph":
        """The graph the nodes are in."""
        return self._graph

    @property
    def _uids_by_layer(self) -> dict[int, Tensor]:
        """The uids of the nodes, layer by layer."""
        return self._graph._by_layer(self._uids_held)

    @property
    def uids(self) -> Tensor:
        """The uids of all nodes, [n] int64."""
        parts = list(self._uids_by_layer.values())
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")

    def _rows_by_layer(self) -> dict[int, Tensor]:
        """Returns the int32 rows of the nodes by layer; raises StaleNodeError if one was
        removed.
        """
        return {layer: self.graph._rows(layer, uids) for layer, uids in self._uids_by_layer.items()}

    @property
    def biases(self) -> Tensor:
        """One bias per node; live, differentiable and assignable. Sensory nodes have none, nor do
        those of adopted models, whose tensors hold them.
        """
        return torch.cat(
            [self._biased(layer)._read(rows) for layer, rows in self._device_rows()]
            or [torch.empty(0, device="cpu")]
        )

    @biases.setter
    def biases(self, values: Tensor) -> None:
        places = [(self._biased(layer), rows) for layer, rows in self._device_rows()]
        values = as_tensor(values).detach().reshape(-1)
        if len(values) not in (1, len(self)):
            raise ValueError(f"this NodeSet holds {len(self)} nodes, got {len(values)} biases")
        values = values.expand(len(self))
        parts = values.split([len(rows) for _, rows in places])
        self.graph._write_all(
            [(layer, rows, part) for (layer, rows), part in zip(places, parts, strict=True)]
        )

    @property
    def owners(self) -> list[str | None]:
        """One owner per node."""
        found: list[str | None] = []
        for layer, rows in self._rows_by_layer().items():
            found += self.graph.layers[layer]._owner_names.select(rows)
        return found

    @property
    def activations(self) -> list[str]:
        """One activation name per node; those of adopted models are in their own code."""
        found: list[str] = []
        for layer, rows in self._rows_by_layer().items():
            found += self.graph.layers[layer]._activations_at(rows)
        return found

    @property
    def frozen(self) -> Tensor:
        """One bool per node: True if its bias, incoming and outgoing relations are all frozen, and
        it has any.
        """
        return torch.cat(
            [self._frozen_in(layer, rows) for layer, rows in self._device_rows()]
            or [torch.empty(0, device="cpu").bool()]
        )

    def incoming(self, *, of: Nodes = None) -> RelationSet:
        """Returns the relations that lead to these nodes, or only those of the parents `of`."""
        graph = self.graph
        found: dict[int, Tensor | range] = {}
        for layer, rows in self._device_rows():
            for t in graph.entering(layer):
                found[t] = graph.transitions[t].topology.leading_to(rows)
        relations = RelationSet(graph, found)
        return relations if of is None else relations & as_node_set(graph, of).outgoing()

    def outgoing(self, *, to: Nodes = None) -> RelationSet:
        """Returns the relations that these nodes own, or only those that lead to the children
        `to`.
        """
        graph = self.graph
        found: dict[int, Tensor | range] = {}
        for layer, rows in self._device_rows():
            for t in graph.leaving(layer):
                found[t] = _owned(graph.transitions[t].topology, rows)
        relations = RelationSet(graph, found)
        return relations if to is None else relations & as_node_set(graph, to).incoming()

    def __len__(self) -> int:
        return sum(len(uids) for uids in self._uids_by_layer.values())

    def __iter__(self) -> "Iterator[GrapNode]":
        return (self.graph.node(uid) for uid in self.uids.tolist())

    def __contains__(self, node: object) -> bool:
        if getattr(node, "_graph", self.graph) is not self.graph:
            return False
        uid = getattr(node, "uid", node)
        return isinstance(uid, int) and any(
            bool((uids == uid).any()) for uids in self._uids_by_layer.values()
        )

    def __getitem__(self, which: Any) -> Any:
        """Returns one GrapNode for an int, and a NodeSet for a slice, an index array or a bool
        mask.
        """
        if isinstance(which, int | np.integer):
            uids = self.uids
            if not -len(uids) <= which < len(uids):
                raise IndexError(f"node {which} of {len(uids)} does not exist")
            return self.graph.node(int(uids[which]))
        if not isinstance(which, slice):
            which = as_tensor(which)
            which = which.long() if which.numel() == 0 else which.cpu()
        order = torch.arange(len(self), device="cpu")[which]
        if order.dim() != 1:
            raise IndexError(
                "nodes are indexed with a slice or a one-dimensional list, array or mask"
            )
        # A slice has no node twice.
        if not isinstance(which, slice) and len(order.unique()) < len(order):
            raise IndexError(
                "these indices contain a node twice, and a NodeSet holds each once; for pairs that"
                " share a node pass uids, as in connect(nodes.uids[[0, 0, 1]], others.uids[[0, 1,"
                ' 1]], pairs="aligned")'
            )
        by_layer = self._uids_by_layer
        if len(by_layer) == 1:
            return NodeSet(self.graph, {layer: uids[order] for layer, uids in by_layer.items()})
        found = {}
        start = 0
        for layer, uids in by_layer.items():
            found[layer] = uids[order[(order >= start) & (order < start + len(uids))] - start]
            start += len(uids)
        return NodeSet(self.graph, found)

    def __or__(self, other: "NodeSet") -> "NodeSet":
        return self._combined(other, lambda a, b: torch.cat([a, b]).unique())

    def __and__(self, other: "NodeSet") -> "NodeSet":
        return self._combined(other, lambda a, b: a[torch.isin(a, b)])

    def __sub__(self, other: "NodeSet") -> "NodeSet":
        return self._combined(other, lambda a, b: a[~torch.isin(a, b)])

    def __repr__(self) -> str:
        parts = ", ".join(
            f"layer {layer}: {len(uids)}" for layer, uids in self._uids_by_layer.items()
        )
        return f"NodeSet({parts or 'empty'})"

    def _combined(self, other: "NodeSet", rule: Any) -> "NodeSet":
        if other.graph is not self.graph:
            raise ValueError("the two NodeSets belong to different graphs")
        mine = self._uids_by_layer
        theirs = other._uids_by_layer
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return NodeSet(
            self.graph,
            {k: rule(mine.get(k, none), theirs.get(k, none)) for k in mine.keys() | theirs.keys()},
        )

    def _device_rows(self) -> list[tuple[int, Tensor]]:
        return [
            (layer, rows.to(self.graph.device)) for layer, rows in self._rows_by_layer().items()
        ]

    def _biased(self, layer: int) -> Any:
        store = self.graph.layers[layer]
        if not store._has_biases:
            raise ValueError(f"these nodes have no biases of their own: {store}")
        return store

    def _frozen_in(self, number: int, rows: Tensor) -> Tensor:
        graph = self.graph
        layer = self.graph.layers[number]
        # free coordinates of each node
        free = torch.zeros(len(layer), dtype=torch.int64, device=rows.device)
        total = torch.zeros_like(free)
        if layer._has_biases:
            total += 1
            free += (
                ~layer._frozen_bits(torch.arange(len(layer), dtype=torch.int32, device=rows.device))
            ).long()
        for t in graph.entering(number):
            into = graph.transitions[t].topology
            held = graph.transitions[t].frozen_at
            total += into.fan_in()
            free += into.fan_in() - torch.bincount(into.child[held.long()], minlength=len(layer))
        for t in graph.leaving(number):
            out = graph.transitions[t].topology
            held = graph.transitions[t].frozen_at
            total += out.degrees
            free += out.degrees - torch.bincount(out.parents_at(held), minlength=len(layer))
        return ((free == 0) & (total > 0))[rows.long()]


def _owned(topology: "Topology", rows: Tensor) -> Tensor | range:
    """Returns the sorted positions of the relations that parent rows own."""
    if (
        len(rows)
        and int(rows[-1]) - int(rows[0]) == len(rows) - 1
        and bool((rows.diff() == 1).all())
    ):
        return range(int(topology.ptr[int(rows[0])]), int(topology.ptr[int(rows[-1]) + 1]))
    return topology.owned_by(rows.sort().values)


def as_uids(graph: "Graph", nodes: Nodes) -> Tensor:
    """Returns the uids of `nodes` in order, with repeats; raises if a node belongs to another
    graph.
    """
    if isinstance(nodes, NodeSet):
        if nodes.graph is not graph:
            raise ValueError("the nodes belong to another graph")
        return nodes.uids
    if isinstance(nodes, Tensor | np.ndarray):
        uids = as_tensor(nodes).reshape(-1)
        if len(uids) and (uids.dtype.is_floating_point or uids.dtype == torch.bool):
            raise TypeError(f"uids are whole numbers, got a tensor of {uids.dtype}")
        return uids.to("cpu", torch.int64)
    uid = getattr(nodes, "uid", nodes)
    if isinstance(uid, int | np.integer) and not isinstance(uid, bool):
        if getattr(nodes, "_graph", graph) is not graph:
            raise ValueError("the nodes belong to another graph")
        return torch.tensor([int(uid)], device="cpu")
    if isinstance(nodes, Iterable) and not isinstance(nodes, str | bytes):
        return torch.cat(
            [as_uids(graph, node) for node in nodes]
            or [torch.empty(0, dtype=torch.int64, device="cpu")]
        )
    raise TypeError(
        "nodes are given as a GrapNode, a NodeSet, uids or an iterable of these, not as"
        f" {type(nodes).__name__}"
    )


def as_node_set(graph: "Graph", nodes: Nodes) -> NodeSet:
    """Returns the NodeSet of `nodes`, each of which must be in the graph."""
    if isinstance(nodes, NodeSet) and nodes.graph is graph:
        return nodes
    uids = as_uids(graph, nodes).unique()
    found = {}
    for number, layer in enumerate(graph.layers):
        found[number] = uids[layer.rows(uids) >= 0]
    if sum(map(len, found.values())) < len(uids):
        known = torch.cat(list(found.values()))
        graph._locate(int(uids[~torch.isin(uids, known)][0]))  # raises and names it
        raise StaleNodeError("a node is not in the graph")
    return NodeSet(graph, found)
