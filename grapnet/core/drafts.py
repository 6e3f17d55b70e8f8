"""Drafts: one layer or one transition while an edit is being resolved."""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .change import LayerChange, NodeRecord, Pairs, Relabel, TransitionChange
from .errors import EditError
from .labels import Labels
from .relations import Topology, require_countable
from .remap import IndexMap, ascending, contains, empty_positions, flatnonzero
from .requests import Connection, Requests, draw
from .values import Coordinates
from .vector import Shift, VectorChange

if TYPE_CHECKING:
    from .graph import Graph

MOST_CELLS = 2**26  # of a table with one byte a possible relation


class LayerDraft:
    """One layer while an edit is resolved: its present rows first, the newborn ones after them."""

    def __init__(self, graph: "Graph", requests: Requests, number: int) -> None:
        self.layer = graph.layers[number]
        self.number = number
        self.device = graph.device
        self.columns = graph.columns_of(number)
        self.newborns = requests.newborns.get(number, [])
        self.n_present = len(self.layer)
        self.uids = joined(self.layer.uid, [n.uids for n in self.newborns])
        self.gone = torch.zeros(len(self.uids), dtype=torch.bool, device="cpu")
        self.shift: Tensor | None = None  # what orphans leave to the biases, [present rows]
        self.any_gone = False
        for rows in requests.removals.get(number, ()):
            self.lose(rows.long())
        asked = (
            requests.namings,
            requests.freeze_biases,
            requests.unfreeze_biases,
            requests.orphans,
        )
        self._named = any(number in part for part in asked)

    @property
    def is_touched(self) -> bool:
        return bool(self.newborns) or self._named or self.any_gone or self.shift is not None

    @cached_property
    def short_uids(self) -> Tensor:
        return self.uids.int()

    @property
    def new_size(self) -> int:
        return len(self.uids) - int(self.gone.sum())

    def lose(self, rows: Tensor) -> None:
        """Marks rows, given as numbers or as one bool a row, as gone."""
        self.gone[rows] = True
        self.any_gone = bool(self.gone.any())

    def new_rows(self, rows: Tensor) -> Tensor:
        """Returns where surviving rows will be."""
        if not self.any_gone:
            return rows
        return ((~self.gone).cumsum(0) - 1).int().to(rows.device)[rows.long()]

    def survivors(self) -> Tensor:
        return flatnonzero(~self.gone)

    def present_values(self, column: Tensor, fill: float = 0) -> Tensor:
        """Returns a column of the present rows, extended by `fill` for the newborn and without the
        gone rows.
        """
        newborn = self.uids.shape[0] - self.n_present
        extended = torch.cat([column, column.new_full((newborn,), fill)]) if newborn else column
        if not self.any_gone:
            return extended
        return extended[self.survivors().to(column.device).long()]

    def change(
        self,
        requests: Requests,
        incoming: "TransitionDraft | None",
        generator: torch.Generator | None,
    ) -> LayerChange:
        gone = empty_positions()
        # no slice: it is kept
        born = torch.arange(self.n_present, self.uids.shape[0], dtype=torch.int32, device="cpu")
        if self.any_gone:
            gone = flatnonzero(self.gone[: self.n_present])
            born = flatnonzero(~self.gone[self.n_present :]) + self.n_present
        inserted = self.new_rows(born)
        index = IndexMap(self.n_present, self.n_present - len(gone) + len(born), gone, inserted)
        some = [n for n in self.newborns if len(n.uids)]  # no node bears the names of none
        owners = [Labels.uniform(n.owner, len(n.uids)) for n in some]
        kinds = [Labels.uniform(n.activation, len(n.uids)) for n in some]
        renamed_owners, owners = self._renamed(self.layer.owner_names, owners, "owners", requests)
        renamed_kinds, kinds = self._renamed(
            self.layer.activation_names, kinds, "activations", requests
        )
        before = self._record(
            self.layer.uid, self.layer.owner_names, self.layer.activation_names, gone
        )
        biases = (
            None
            if self.layer.is_sensory
            else self._biases(requests, index, born, incoming, generator)
        )
        comes = born - self.n_present
        record = self._record(self.uids[self.n_present :].clone(), owners, kinds, comes)
        drawn = {name: column.draw(len(born), generator) for name, column in self.columns.items()}
        columns = {name: column.change(index, drawn[name]) for name, column in self.columns.items()}
        return LayerChange(index, record, before, biases, renamed_owners, renamed_kinds, columns)

    @staticmethod
    def _record(uids: Tensor, owners: Labels, kinds: Labels, rows: Tensor) -> NodeRecord:
        """Returns who the nodes at ascending rows are."""
        if rows.shape[0] == uids.shape[0]:
            return NodeRecord(uids, owners, kinds)
        return NodeRecord(
            uids[rows.long()], owners.select(rows).compact(), kinds.select(rows).compact()
        )

    def _renamed(
        self, present: Labels, newborn: list[Labels], kind: str, requests: Requests
    ) -> tuple[Relabel | None, Labels]:
        """Returns the relabelling of the surviving present rows, and the names of the newborn ones
        after it.
        """
        asked = [n for n in requests.namings.get(self.number, ()) if n.kind == kind]
        if not asked:
            return None, Labels.join(newborn)
        before = labels = Labels.join([present, *newborn])
        set_here = torch.zeros(len(self.uids), dtype=torch.bool, device="cpu")
        for naming in asked:
            rows = naming.rows.unique()
            renamed = labels.replaced(rows, Labels.uniform(naming.name, len(rows)))
            again = rows[set_here[rows.long()]]
            clash = again[labels.differs(renamed, again)]
            if len(clash):
                uid, name = int(self.uids[int(clash[0])]), labels[int(clash[0])]
                raise EditError(
                    f"the edit gives node {uid} two different {kind}: {name!r} and {naming.name!r}"
                )
            labels = renamed
            set_here[rows.long()] = True
        set_here[self.n_present :] = False
        rows = flatnonzero(set_here & ~self.gone)
        rows = rows[before.differs(labels, rows)]
        names = labels.select(ascending(len(self.uids), torch.device("cpu"))[self.n_present :])
        if len(rows) == 0:
            return None, names
        return (
            Relabel(
                self.new_rows(rows), before.select(rows).compact(), labels.select(rows).compact()
            ),
            names,
        )

    def _biases(
        self,
        requests: Requests,
        index: IndexMap,
        born: Tensor,
        incoming: "TransitionDraft | None",
        generator: torch.Generator | None,
    ) -> VectorChange:
        layer, device = self.layer, self.device
        index = index.to(device)
        flips = flips_of(
            layer,
            index,
            requests.freeze_biases.get(self.number),
            requests.unfreeze_biases.get(self.number),
        )
        example = layer.parameter.detach()
        drawn, held = [], []
        for newborns in self.newborns:
            linear = newborns.bias == "linear" if isinstance(newborns.bias, str) else False
            if linear and incoming is not None:
                gains = incoming.fan_in(torch.searchsorted(self.uids, newborns.uids))
            else:
                gains = torch.zeros(newborns.uids.shape[0], device=device)
            given = (
                newborns.bias
                if isinstance(newborns.bias, Tensor)
                else "linear"
                if linear
                else "zero"
            )
            drawn.append(draw(given, gains, example, generator))
            held.append(torch.full_like(gains, newborns.bias is None, dtype=torch.bool))
        values, frozen = (
            joined(example.new_empty(0), drawn),
            joined(torch.empty(0, dtype=torch.bool, device=device), held),
        )
        if self.any_gone:
            comes = (born - self.n_present).to(device).long()
            values, frozen = values[comes], frozen[comes]
        return VectorChange(
            index,
            born_frozen=frozen,
            gone_frozen=layer.frozen_bits(index.removed),
            flips=flips,
            born_values=values,
            shift=self._shifted(index, flips),
        )

    def _shifted(self, index: IndexMap, flips: Tensor) -> Shift | None:
        if self.shift is None:
            return None
        rows = flatnonzero((self.shift != 0) & ~self.gone[: self.n_present].to(self.shift.device))
        if len(rows) == 0:
            return None
        after_rows = index.new_positions(rows)
        if bool(self.layer.frozen_bits(rows).any()) or bool(contains(flips, after_rows).any()):
            raise EditError(
                f"fold_bias would change frozen biases of layer {self.number}; unfreeze them in an"
                " edit before"
            )
        before = self.layer.read(rows)
        return Shift(after_rows, before, before + self.shift[rows.long()])


class TransitionDraft:
    """The relations of one transition while an edit is resolved."""

    def __init__(
        self, graph: "Graph", requests: Requests, t: int, upper: LayerDraft, lower: LayerDraft
    ) -> None:
        self.store = graph.transitions[t]
        self.topology = self.store.topology
        self.t = t
        device = self.topology.child.device
        leaving = list(requests.cuts.get(t, ()))
        if upper.any_gone:
            leaving.append(
                self.topology.owned_by(flatnonzero(upper.gone[: upper.n_present]).to(device))
            )
        if lower.any_gone:
            leaving.append(
                self.topology.leading_to(flatnonzero(lower.gone[: lower.n_present]).to(device))
            )
        self.cuts = union(leaving, device)
        self.connections = requests.connections.get(t, [])
        asked = (requests.freeze_relations, requests.unfreeze_relations)
        self.is_touched = (
            len(self.cuts) > 0 or bool(self.connections) or any(t in part for part in asked)
        )
        self._lower_size = len(lower.uids)
        for connection in self.connections:
            self._check(connection, requests, upper, lower)
        self.parents = joined(empty_positions(), [c.parents for c in self.connections])
        self.children = joined(empty_positions(), [c.children for c in self.connections])
        self._check_distinct(upper, lower)
        # None: all of them
        self.kept = flatnonzero(~upper.gone[self.parents.long()]) if upper.any_gone else None
        self._surviving_fan_in: Tensor | None = None

    def fan_in(self, rows: Tensor) -> Tensor:
        """Returns how many parents lower rows (newborn ones included) will have."""
        counts = torch.bincount(_picked(self.children, self.kept), minlength=self._lower_size)[
            rows.long()
        ]
        present = rows < self.topology.n_children
        if bool(present.any()):
            if self._surviving_fan_in is None:
                cut = torch.bincount(
                    self.topology.child[self.cuts.long()], minlength=self.topology.n_children
                )
                self._surviving_fan_in = (self.topology.fan_in() - cut).cpu()
            counts[present] += self._surviving_fan_in[rows[present].long()]
        return counts.to(self.store.weight.device)

    def change(
        self,
        upper: LayerDraft,
        lower: LayerDraft,
        requests: Requests,
        generator: torch.Generator | None,
    ) -> TransitionChange:
        topology, device = self.topology, self.topology.child.device
        born = self._in_order(upper)
        parents = _picked(upper.new_rows(self.parents), born).numpy()
        stays = topology.n_relations - self.cuts.shape[0]
        ends = upper.present_values(
            topology.ends_without(self.cuts).cpu(), fill=stays
        ).numpy()  # of what each row keeps
        # relations that it is given, behind what it keeps
        gains = np.bincount(parents, minlength=len(ends))
        inserted = torch.from_numpy(ends[parents] + np.arange(len(parents), dtype=np.int32)).to(
            device
        )
        size = stays + len(parents)
        require_countable(size, f"transition {self.t}", EditError)
        index = IndexMap(topology.n_relations, size, self.cuts, inserted)
        values = _picked(self._drawn(torch.from_numpy(gains).to(device), upper, generator), born)
        gone = Pairs(empty_positions(), empty_positions())
        if self.cuts.shape[0]:
            losses = topology.degrees.long() - topology.degrees_without(self.cuts)
            gone = Pairs(
                upper.short_uids[: upper.n_present].repeat_interleave(losses.cpu()),
                lower.short_uids.index_select(0, topology.child.index_select(0, self.cuts).cpu()),
            )
        flips = flips_of(
            self.store,
            index,
            requests.freeze_relations.get(self.t),
            requests.unfreeze_relations.get(self.t),
        )
        weights = VectorChange(
            index,
            born_frozen=torch.zeros(len(inserted), dtype=torch.bool, device=device),
            gone_frozen=self.store.frozen_bits(self.cuts),
            flips=flips,
            born_values=values,
        )
        children = _picked(self.children, born)
        ptr = np.zeros(len(ends) + 1, dtype=np.int32)
        ptr[1:] = ends + gains.cumsum()
        child = index.carry(lower.new_rows(topology.child), lower.new_rows(children).to(device))
        return TransitionChange(
            index,
            born=Pairs(
                upper.short_uids.index_select(0, _picked(self.parents, born)),
                lower.short_uids.index_select(0, children),
            ),
            gone=gone,
            weights=weights,
            wiring=(
                None
                if index.is_identity
                else Topology(torch.from_numpy(ptr).to(device), child, lower.new_size)
            ),
        )

    def _in_order(self, upper: LayerDraft) -> Tensor | None:
        """Returns which of the relations asked for come, by owner; None when all do and are in that
        order already.
        """
        rows = self.parents.numpy()
        if self.kept is None and not (rows[1:] < rows[:-1]).any():
            return None
        kept = (
            flatnonzero(torch.ones(len(rows), dtype=torch.bool, device="cpu"))
            if self.kept is None
            else self.kept
        )
        return kept[_picked(self.parents, kept).argsort(stable=True)]

    def _drawn(self, gains: Tensor, upper: LayerDraft, generator: torch.Generator | None) -> Tensor:
        """Returns the newborn weights in the order they were asked for."""
        example, drawn = self.store.weight.detach(), []
        for connection in self.connections:
            if isinstance(connection.weights, str) and connection.weights == "alloc":
                counts = gains
                if upper.any_gone:
                    counts = torch.zeros(len(upper.uids), dtype=torch.int64, device=gains.device)
                    counts[upper.survivors().to(gains.device).long()] = gains
                drawn.append(
                    draw(
                        "alloc", counts, example, generator, at=connection.parents.to(gains.device)
                    )
                )
                continue
            elif isinstance(connection.weights, str) and connection.weights == "linear":
                scale = self.fan_in(connection.children)
            else:
                scale = torch.zeros(len(connection.parents), device=example.device)
            drawn.append(draw(connection.weights, scale, example, generator))
        return joined(example.new_empty(0), drawn)

    def _check(
        self, connection: Connection, requests: Requests, upper: LayerDraft, lower: LayerDraft
    ) -> None:
        for role, draft, rows in (
            ("parent", upper, connection.parents),
            ("child", lower, connection.children),
        ):
            for removed in requests.removals.get(draft.number, ()):
                hit = rows[torch.isin(rows, removed)]
                if len(hit):
                    uid = int(draft.uids[int(hit[0])])
                    raise EditError(
                        f"node {uid} of layer {draft.number} is removed in this edit, so it cannot"
                        f" be a {role} in it"
                    )

    def _check_distinct(self, upper: LayerDraft, lower: LayerDraft) -> None:
        width = max(len(lower.uids), 1)
        if not (len(self.connections) == 1 and self.connections[0].distinct):
            keys = self.parents.long() * width + self.children
            if not bool((keys[1:] > keys[:-1]).all()):
                keys = keys.sort().values
            twice = keys[1:][keys[1:] == keys[:-1]]
            if len(twice):
                self._refuse(
                    upper,
                    lower,
                    int(twice[0]) // width,
                    int(twice[0]) % width,
                    "is asked for twice in this edit",
                )
        present = (self.parents.numpy() < upper.n_present) & (
            self.children.numpy() < lower.n_present
        )
        if not present.any():
            return
        parents, children = (
            rows[torch.from_numpy(present)] for rows in (self.parents, self.children)
        )
        device = self.topology.child.device
        clash = self._exist(parents.to(device), children.to(device))
        if bool(clash.any()):
            first = int(clash.nonzero()[0])
            self._refuse(upper, lower, int(parents[first]), int(children[first]), "exists already")

    def _exist(self, parents: Tensor, children: Tensor) -> Tensor:
        """Says for every pair of rows whether it is related and stays so; many pairs are looked up
        in a table.
        """
        topology = self.topology
        cells = topology.n_parents * topology.n_children
        if cells > MOST_CELLS or len(parents) < topology.n_relations // 16:
            found = topology.find(parents, children)
            return (found >= 0) & ~contains(self.cuts, found.int())
        table = torch.zeros(cells, dtype=torch.bool, device=parents.device)
        present = topology.parents().long() * topology.n_children + topology.child
        table.index_fill_(0, present, True)
        table.index_fill_(0, present[self.cuts.long()], False)
        return table[parents.long() * topology.n_children + children]

    def _refuse(
        self, upper: LayerDraft, lower: LayerDraft, parent: int, child: int, why: str
    ) -> None:
        raise EditError(
            f"the relation from node {int(upper.uids[parent])} (layer {upper.number}) to node"
            f" {int(lower.uids[child])} (layer {lower.number}) {why}"
        )


def _picked(vector: Tensor, places: Tensor | None) -> Tensor:
    """Returns the entries at `places`, or the vector itself when that is all of them in order."""
    return vector if places is None else vector.index_select(0, places.to(vector.device))


def joined(first: Tensor, others: list[Tensor]) -> Tensor:
    """Returns vectors one behind the other; one that stands alone is returned itself."""
    filled = [part for part in (first, *others) if part.shape[0]]
    return filled[0] if len(filled) == 1 else torch.cat(filled) if filled else first


def union(parts: list[Tensor], device: torch.device) -> Tensor:
    """Returns the sorted union of position tensors."""
    if not parts:
        return empty_positions(device)
    if len(parts) == 1 and bool((parts[0].diff() > 0).all()):
        return parts[0].to(device)
    return torch.cat([part.to(device) for part in parts]).unique()


def flips_of(
    store: Coordinates, index: IndexMap, freezes: list[Tensor] | None, thaws: list[Tensor] | None
) -> Tensor:
    """Returns the new positions whose frozen bit turns: cutting beats freezing, and freezing beats
    unfreezing.
    """
    device = store.frozen_at.device
    if not freezes and not thaws:
        return empty_positions(device)
    freeze, thaw = union(freezes or [], device), union(thaws or [], device)
    thaw = thaw[~contains(freeze, thaw)]
    turned = (
        torch.cat([freeze[~store.frozen_bits(freeze)], thaw[store.frozen_bits(thaw)]]).sort().values
    )
    return index.new_positions(turned[~contains(index.removed, turned)])
