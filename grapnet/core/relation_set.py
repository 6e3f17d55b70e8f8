"""RelationSet: relations chosen from a graph, held as ranges or arrays of positions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import EditError, GrapNetError, StaleRelationsError
from .remap import as_tensor, contains, flatnonzero, kth_smallest, require_ranks

if TYPE_CHECKING:
    from .graph import Graph
    from .relations import Transition


class RelationSet:
    """A set of relations, of one transition or of several, in owner order.

    It names relations by position, so it is good until an edit moves them; select again afterwards.

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
        self._structures = {t: graph.transitions[t].structure for t in self._positions}

    @property
    def graph(self) -> "Graph":
        """The graph the relations are in."""
        return self._graph

    def positions_by_transition(self) -> "dict[int, Tensor | range]":
        """Returns the sorted positions, transition by transition; raises StaleRelationsError when
        they have moved.
        """
        for t, structure in self._structures.items():
            if self._graph.transitions[t].structure is not structure:
                raise StaleRelationsError(
                    f"the relations of transition {t} have moved since this RelationSet was"
                    f" selected (the graph is at version {self._graph.version}); select them again"
                )
        return self._positions

    @property
    def parents(self) -> Tensor:
        """The uid of every relation's parent, [n] int64."""
        return self._gather(lambda t, at: self._uids(t, self._store(t).topology.parents_at(at)))

    @property
    def children(self) -> Tensor:
        """The uid of every relation's child, [n] int64."""
        return self._gather(
            lambda t, at: self._uids(t + 1, self._store(t).child.index_select(0, at))
        )

    @property
    def weights(self) -> Tensor:
        """One weight a relation: live, differentiable, and assignable."""
        parts = [self._read(t, at) for t, at in self.positions_by_transition().items()]
        return (
            torch.cat(parts)
            if len(parts) > 1
            else parts[0]
            if parts
            else self._store(0).weight.new_empty(0)
        )

    @weights.setter
    def weights(self, values: Tensor) -> None:
        values = as_tensor(values).detach()
        if values.numel() not in (1, len(self)):
            raise ValueError(
                f"this RelationSet holds {len(self)} relations, got {values.numel()} weights"
            )
        found = self.positions_by_transition().items()
        parts = values.reshape(-1).expand(len(self)).split([len(at) for _, at in found])
        self._graph.write_all(
            [
                (self._store(t), _as_slice(at), part)
                for (t, at), part in zip(found, parts, strict=True)
            ]
        )

    @property
    def gradients(self) -> Tensor:
        """One gradient a relation, 0 where it is frozen; raises before the first backward."""
        found = []
        for t, at in self.positions_by_transition().items():
            gradients = self._store(t).gradients(self._tensor(t, at))
            if gradients is None:
                raise GrapNetError(
                    f"the relations of transition {t} have no gradients yet; call backward() first"
                )
            found.append(gradients)
        return torch.cat(found) if found else self._store(0).weight.detach().new_empty(0)

    @property
    def frozen(self) -> Tensor:
        """Says for every relation whether it is frozen."""
        return self._gather(lambda t, at: self._store(t).frozen_bits(at), torch.bool)

    def smallest(
        self, *, count: int | None = None, fraction: float | None = None, key: Tensor | None = None
    ) -> "RelationSet":
        """Returns the relations with the smallest key (|weight| unless given); the first of equals
        come first.
        """
        return self._ranked(count, fraction, key, largest=False)

    def largest(
        self, *, count: int | None = None, fraction: float | None = None, key: Tensor | None = None
    ) -> "RelationSet":
        """Returns the relations with the largest key (|weight| unless given); the first of equals
        come first.
        """
        return self._ranked(count, fraction, key, largest=True)

    def at_slots(self, slots: Any, degree: int, owner: object) -> "RelationSet":
        """Returns the relations at local slots of the one node that owns this set."""
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
        """Returns the subset at a slice, at an index array or under a bool mask over the set."""
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
        return self._combined(other, lambda a, b: a[~contains(b, a)])

    def __repr__(self) -> str:
        parts = ", ".join(f"transition {t}: {len(at):,}" for t, at in self._positions.items())
        return f"RelationSet({parts or 'empty'})"

    def _ranked(
        self, count: int | None, fraction: float | None, key: Tensor | None, *, largest: bool
    ) -> "RelationSet":
        if (count is None) == (fraction is None):
            raise ValueError("say how many relations: either count= or fraction=")
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"fraction lies between 0 and 1, got {fraction}")
        key = (
            self.weights.detach().abs()
            if key is None
            else key.detach().reshape(-1).to(self._graph.device)
        )
        if len(key) != len(self):
            raise ValueError(f"key has {len(key)} entries for {len(self)} relations")
        require_ranks(key)
        key = key.byte() if key.dtype == torch.bool else key
        if count is not None and count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        count = round(fraction * len(self)) if fraction is not None else min(count or 0, len(self))
        if count <= 0:
            return RelationSet(self._graph, {})
        rank = len(key) - count + 1 if largest else count
        limit = kth_smallest(key, rank)
        chosen = key > limit if largest else key < limit
        equals = flatnonzero(key == limit)
        chosen[equals[: count - int(chosen.sum())].long()] = True
        return self._marked(chosen)

    def _marked(self, marks: Tensor) -> "RelationSet":
        found: dict[int, Tensor | range] = {}
        items = self.positions_by_transition().items()
        for (t, at), part in zip(items, marks.split([len(at) for _, at in items]), strict=True):
            chosen = flatnonzero(part)
            found[t] = chosen + at.start if isinstance(at, range) else at[chosen.long()]
        return RelationSet(self._graph, found)

    def _combined(
        self, other: "RelationSet", rule: Callable[[Tensor, Tensor], Tensor]
    ) -> "RelationSet":
        if other._graph is not self._graph:
            raise ValueError("the two RelationSets belong to different graphs")
        mine, theirs = self.positions_by_transition(), other.positions_by_transition()
        found: dict[int, Tensor | range] = {}
        for t in mine.keys() | theirs.keys():
            found[t] = rule(
                self._tensor(t, mine.get(t, range(0))), self._tensor(t, theirs.get(t, range(0)))
            )
        return RelationSet(self._graph, found)

    def _gather(
        self, read: Callable[[int, Tensor], Tensor], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        parts = [read(t, self._tensor(t, at)) for t, at in self.positions_by_transition().items()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device="cpu")

    def _read(self, t: int, at: "Tensor | range") -> Tensor:
        store = self._store(t)
        if isinstance(at, range) and len(store.frozen_at) == 0:
            return store.weight[at.start : at.stop].view(-1)
        return store.read(self._tensor(t, at))

    def _store(self, t: int) -> "Transition":
        return self._graph.transitions[t]

    def _uids(self, layer: int, rows: Tensor) -> Tensor:
        return self._graph.layers[layer].uid[rows.cpu().long()]

    def _tensor(self, t: int, at: "Tensor | range") -> Tensor:
        if isinstance(at, Tensor):
            return at
        return torch.arange(
            at.start, at.stop, dtype=torch.int32, device=self._store(t).child.device
        )


def _as_slice(at: "Tensor | range") -> Tensor | slice:
    return slice(at.start, at.stop) if isinstance(at, range) else at
