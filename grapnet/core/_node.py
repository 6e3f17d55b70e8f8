"""GrapNode: a handle on one node, and the live views of its neighbours."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ._index_map import as_tensor
from ._sets import NodeSet, RelationSet, laid_end_to_end

if TYPE_CHECKING:
    from ._graph import Graph
    from ._layer import Layer
    from ._transition import Transition


class GrapNode:
    """One node of a graph, with a permanent uid; it owns no tensor and stays valid when rows move.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([3, 2])
        >>> node = net.layers[0][1]
        >>> len(node.children), node.W_alloc.shape
        (2, torch.Size([1, 2]))
    """

    __slots__ = ("_graph", "uid")

    def __init__(self, graph: "Graph", uid: int) -> None:
        self._graph = graph
        self.uid = uid

    @property
    def layer(self) -> int:
        """The number of the layer the node is in."""
        return self._graph._locate(self.uid)[0]

    @property
    def row(self) -> int:
        """The position of the node in its layer, and in the activations of the layer."""
        return self._graph._locate(self.uid)[1]

    @property
    def children(self) -> "NeighboursView":
        """The children of the node, transition after transition, ordered like `W_alloc`.

        In an adopted model, a child that several tensors lead to occurs once for each of them.
        """
        return NeighboursView(self, down=True)

    @property
    def parents(self) -> "NeighboursView":
        """The parents of the node in the previous layer, in row order."""
        return NeighboursView(self, down=False)

    @property
    def degree(self) -> int:
        """The number of children of the node."""
        return sum(stop - start for _, start, stop in self._slots())

    @property
    def W_alloc(self) -> Tensor:
        """The weights `[1, degree]` of the node, aligned with `children`; live, differentiable and
        assignable.

        Relations of a model may have several numbers each: then `[1, degree, numbers]`. Where its
        tensors have another count for each, this raises ValueError; see `RelationSet.weights`.
        """
        parts = []
        for transition, start, stop in self._slots():
            parts.append(transition._weights_at(range(start, stop)))
        if not parts:
            return self._graph.transitions[0].weight.new_empty((1, 0))
        return laid_end_to_end(parts)[None]

    @W_alloc.setter
    def W_alloc(self, weights: Tensor) -> None:
        weights = as_tensor(weights)
        shape = self.W_alloc.shape
        if weights.numel() != shape.numel() or weights.dim() > len(shape):
            raise ValueError(
                f"{self} has W_alloc of shape {list(shape)}, got {list(weights.shape)}"
            )
        slots = self._slots()
        counts = [(stop - start) * transition._payload for transition, start, stop in slots]
        parts = weights.detach().reshape(-1).split(counts)
        self._graph._write_all(
            [
                (transition, slice(start, stop), part)
                for (transition, start, stop), part in zip(slots, parts, strict=True)
            ]
        )

    @property
    def bias(self) -> Tensor | None:
        """The node's bias (a scalar tensor, live and assignable), or None for a sensory node and
        for one of an adopted model, whose tensors hold the biases.
        """
        layer, row = self._at()
        if not layer._has_biases:
            return None
        return layer._read(_one(row, layer)).squeeze(0)

    @bias.setter
    def bias(self, value: Tensor | float) -> None:
        layer, row = self._at()
        if not layer._has_biases:
            raise ValueError(f"{self} has no bias of its own: it is one of {layer}")
        layer._write(_one(row, layer), as_tensor(value).detach().reshape(1))

    @property
    def activation(self) -> str:
        """The name of the node's activation ("identity" for a sensory node); those of adopted
        models are in their own code.
        """
        layer, row = self._at()
        (name,) = layer._activations_at(torch.tensor([row], device="cpu"))
        return name

    @property
    def owner(self) -> str | None:
        """The owner of the node, a tag such as a task, or None."""
        layer, row = self._at()
        return layer._owner_names[row]

    @property
    def frozen(self) -> bool:
        """True if the bias, incoming and outgoing relations of the node are all frozen, and it has
        any.
        """
        return bool(self.as_set().frozen[0])

    def incoming(self, *, of: Any = None) -> RelationSet:
        """Returns the relations that lead to this node, or only those of the parents `of`."""
        return self.as_set().incoming(of=of)

    def outgoing(self, *, to: Any = None, slots: Any = None) -> RelationSet:
        """Returns the relations of this node, or only those `to` some children, or only some
        slots.
        """
        relations = self.as_set().outgoing(to=to)
        if slots is None:
            return relations
        if to is not None:
            raise ValueError("select relations by slots or by children, not by both")
        return relations._at_slots(slots, self.degree, self)

    def as_set(self) -> NodeSet:
        """Returns the NodeSet of this node."""
        return NodeSet(self._graph, {self.layer: torch.tensor([self.uid], device="cpu")})

    def _at(self) -> "tuple[Layer, int]":
        number, row = self._graph._locate(self.uid)
        return self._graph.layers[number], row

    def _slots(self) -> "list[tuple[Transition, int, int]]":
        """Returns where its relations begin and end, in every transition that leaves its layer."""
        number, row = self._graph._locate(self.uid)
        found = []
        for t in self._graph.leaving(number):
            transition = self._graph.transitions[t]
            start, stop = transition.topology.ptr[row : row + 2].tolist()
            found.append((transition, start, stop))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrapNode) and other.uid == self.uid and other._graph is self._graph

    def __hash__(self) -> int:
        return hash(self.uid)

    def __repr__(self) -> str:
        place = self._graph._find(self.uid)
        return f"GrapNode({'removed' if place is None else f'layer={place[0]}'}, uid={self.uid})"


class NeighboursView(Sequence[GrapNode]):
    """`node.children` or `node.parents`, read-only and live."""

    __slots__ = ("_down", "_node")

    def __init__(self, node: GrapNode, *, down: bool) -> None:
        self._node = node
        self._down = down

    @property
    def uids(self) -> Tensor:
        """The neighbours' uids in order."""
        return self._relations().children if self._down else self._relations().parents

    def __len__(self) -> int:
        return self._node.degree if self._down else len(self._relations())

    @overload
    def __getitem__(self, slot: int) -> GrapNode: ...
    @overload
    def __getitem__(self, slot: slice) -> list[GrapNode]: ...
    def __getitem__(self, slot: int | slice) -> GrapNode | list[GrapNode]:
        uids = self.uids.tolist()[slot]
        if isinstance(uids, list):
            return [GrapNode(self._node._graph, uid) for uid in uids]
        return GrapNode(self._node._graph, uids)

    def __contains__(self, node: object) -> bool:
        return (
            isinstance(node, GrapNode)
            and node._graph is self._node._graph
            and node.uid in self.uids.tolist()
        )

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self[:6]))}{', …' if len(self) > 6 else ''}]"

    def _relations(self) -> RelationSet:
        return self._node.outgoing() if self._down else self._node.incoming()


def _one(row: int, layer: "Layer") -> Tensor:
    return torch.tensor([row], dtype=torch.int32, device=layer.frozen_at.device)
