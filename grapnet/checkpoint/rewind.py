"""Going back through a journal by uids alone, to see that undo and redo will work before anyone
calls them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grapnet.core.activation import is_activation
from grapnet.core.change import LayerChange, NodeRecord, TransitionChange
from grapnet.core.errors import CheckpointError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.remap import IndexMap, contains
from grapnet.core.values import VectorChange


class Rewind:
    """A graph without values: who its nodes are, which pairs of them are related, what is frozen.

    Rows of a layer and relations of a transition are in the order of uids (of the parents), so a
    commit fits when what it brought stands where it says, and what returns leaves that order
    intact.
    """

    def __init__(self, graph: Graph) -> None:
        self.uids = [layer.uid for layer in graph.layers]
        self.names = [
            NodeRecord(layer.uid, layer.owner_names, layer.activation_names)
            for layer in graph.layers
        ]
        biased = [layer for layer in graph.layers if not layer.is_sensory]
        self.biases = [
            _bits(torch.empty(0, device="cpu"), 0),
            *(_bits(layer.frozen_at, layer.size) for layer in biased),
        ]
        self.weights = [_bits(store.frozen_at, store.size) for store in graph.transitions]
        wirings = list(zip(graph.layers, graph.transitions, graph.layers[1:], strict=False))
        self.parents = [upper.uid[store.topology.parents().long()] for upper, store, _ in wirings]
        self.children = [lower.uid[store.child.long()] for _, store, lower in wirings]
        self._events = [
            [_Event("", True, _keys(*ends))]
            for ends in zip(self.parents, self.children, strict=True)
        ]

    def take_back(self, commit: Commit, where: str) -> None:
        """Undoes a commit; raises CheckpointError, naming the field under `where`, when it does not
        fit.
        """
        for n, change in commit.change.layers.items():
            self._layer(n, change, f"{where}layers.{n}.")
        for t, change in commit.change.transitions.items():
            self._transition(t, change, f"{where}transitions.{t}.")
        for n, change in commit.change.layers.items():
            self._require_unrelated(n, change.born.uids, f"{where}layers.{n}.")

    def require_no_twins(self) -> None:
        """Raises when a relation would have returned while it was there: by pairs of uids, all
        commits at once.
        """
        for events in self._events:
            keys, order = torch.cat([event.keys for event in events]).sort(stable=True)
            comes = torch.cat(
                [torch.full((len(event.keys),), event.comes, device="cpu") for event in events]
            )[order]
            twins = order[1:][(keys[1:] == keys[:-1]) & comes[1:] & comes[:-1]]
            if len(twins):
                ends = torch.tensor([len(event.keys) for event in events], device="cpu").cumsum(0)
                event = events[int(torch.searchsorted(ends, twins[0], right=True))]
                raise CheckpointError(
                    f"{event.where}gone_children: a relation that was cut is there"
                )

    def _layer(self, n: int, change: LayerChange, where: str) -> None:
        index, back, uids = change.index, change.index.inverse(), self.uids[n]
        _require_size(len(uids), index, where)
        _require_equal(uids[index.inserted.long()], change.born.uids, f"{where}born_uids")
        if any(bool(contains(others, change.gone.uids).any()) for others in self.uids):
            raise CheckpointError(f"{where}gone_uids: a node that was removed is there")
        self.uids[n] = back.carry(uids, change.gone.uids)
        if bool((self.uids[n].diff() <= 0).any()):
            raise CheckpointError(f"{where}gone_uids: would not be in order")
        columns: dict[str, Any] = {}
        for kind, relabel in (("owners", change.owners), ("activations", change.activations)):
            column, gone = getattr(self.names[n], kind), getattr(change.gone, kind)
            if list(column.select(index.inserted)) != list(getattr(change.born, kind)):
                raise CheckpointError(f"{where}born_{kind}: are not what the nodes have")
            if relabel is not None:
                if list(column.select(relabel.rows)) != list(relabel.after):
                    raise CheckpointError(f"{where}{kind}_after: are not what the nodes have")
                column = column.replaced(relabel.rows, relabel.before)
            columns[kind] = column.carry(back, gone).compact()
        unknown = [name for name in columns["activations"].names if not is_activation(name)]
        if unknown:
            raise CheckpointError(f"{where}gone_activations: {str(unknown[0])[:40]!r} is unknown")
        self.names[n] = NodeRecord(self.uids[n], **columns)
        if change.biases is not None:
            self.biases[n] = _frozen_before(self.biases[n], change.biases, back, where)

    def _transition(self, t: int, change: TransitionChange, where: str) -> None:
        index, back, gone = change.index, change.index.inverse(), change.gone
        _require_size(len(self.parents[t]), index, where)
        for column, born, side in (
            (self.parents[t], change.born.parents, "parents"),
            (self.children[t], change.born.children, "children"),
        ):
            _require_equal(column[index.inserted.long()], born, f"{where}born_{side}")
        self.parents[t] = back.carry(self.parents[t], gone.parents)
        self.children[t] = back.carry(self.children[t], gone.children)
        self.weights[t] = _frozen_before(self.weights[t], change.weights, back, where)
        if bool((self.parents[t].diff() < 0).any()):
            raise CheckpointError(
                f"{where}gone_parents: a relation would return among those of another node"
            )
        for ends, uids, side in (
            (gone.parents, self.uids[t], "parents"),
            (gone.children, self.uids[t + 1], "children"),
        ):
            if not bool(contains(uids, ends.long()).all()):
                raise CheckpointError(f"{where}gone_{side}: names a node that would not be there")
        self._events[t].append(
            _Event(where, False, _keys(change.born.parents.long(), change.born.children.long()))
        )
        self._events[t].append(
            _Event(where, True, _keys(gone.parents.long(), gone.children.long()))
        )

    def _require_unrelated(self, n: int, leaving: Tensor, where: str) -> None:
        """Raises when a relation would stay without one of its nodes."""
        ends = ([self.children[n - 1]] if n > 0 else []) + (
            [self.parents[n]] if n < len(self.parents) else []
        )
        if len(leaving) and any(bool(contains(leaving, column).any()) for column in ends):
            raise CheckpointError(f"{where}born_uids: a node would leave before its relations")


class _Event(NamedTuple):
    """Relations that come or go while a journal is taken back."""

    where: str
    comes: bool
    keys: Tensor


def _keys(parents: Tensor, children: Tensor) -> Tensor:
    return parents << 32 | children


def _frozen_before(bits: Tensor, change: VectorChange, back: IndexMap, where: str) -> Tensor:
    """Returns which coordinates were frozen before a commit."""
    _require_equal(bits[back.removed.long()], change.born_frozen, f"{where}born_frozen")
    bits = bits.clone()
    if change.shift is not None:
        moved = change.shift.positions
        if bool((bits[moved.long()] | contains(change.flips, moved)).any()):
            raise CheckpointError(f"{where}shift: names a frozen coordinate")
    bits[change.flips.long()] ^= True
    return back.carry(bits, change.gone_frozen)


def _bits(positions: Tensor, size: int) -> Tensor:
    bits = torch.zeros(size, dtype=torch.bool, device="cpu")
    bits[positions.long()] = True
    return bits


def _require_size(size: int, index: IndexMap, where: str) -> None:
    if size != index.new_size:
        raise CheckpointError(
            f"{where}new_size: {index.new_size} where undo or redo would find {size}"
        )


def _require_equal(found: Tensor, told: Tensor, name: str) -> None:
    if not torch.equal(found, told.to(found)):
        raise CheckpointError(f"{name}: differs from what the graph holds there")
