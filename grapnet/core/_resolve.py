"""Resolving an edit: what was asked for becomes one Change, or an error; nothing is touched."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import Shift, VectorChange

from ._activation import activation_function
from ._change import (
    Change,
    IndexMap,
    Labels,
    LayerChange,
    NodeRecord,
    Pairs,
    Relabel,
    TransitionChange,
    as_tensor,
    ascending,
    contains,
    empty_positions,
    flatnonzero,
)
from ._coordinates import Coordinates
from ._errors import EditError
from ._layer import Layer
from ._transition import Topology, require_countable

if TYPE_CHECKING:
    from ._graph import Graph


INITIALISATIONS = ("linear", "alloc", "zero")
Initial = str | Tensor  # the name of an initialisation, or the values themselves


@dataclass(frozen=True, eq=False)
class Newborns:
    """Nodes to add to one layer."""

    uids: Tensor
    activation: str
    owner: str | None
    bias: Initial | None  # None: zero and frozen


@dataclass(frozen=True, eq=False)
class Connection:
    """Relations to add; rows count the layer's present nodes first and the edit's newborn ones
    after them.
    """

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32
    weights: Initial
    distinct: bool  # the pairs are known to differ from each other


@dataclass(frozen=True, eq=False)
class Naming:
    """Owners or activations to set."""

    kind: str  # "owners" or "activations"
    rows: Tensor
    name: str | None


@dataclass(eq=False)
class Requests:
    """The operations of one edit, by layer or by transition; their order does not matter."""

    newborns: dict[int, list[Newborns]] = field(default_factory=lambda: defaultdict(list))
    removals: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # rows
    connections: dict[int, list[Connection]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # positions
    freeze_relations: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    freeze_biases: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    unfreeze_relations: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    unfreeze_biases: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    namings: dict[int, list[Naming]] = field(default_factory=lambda: defaultdict(list))
    orphans: dict[int, bool] = field(default_factory=dict)  # layer -> fold the bias

    def rows(self, layer: Layer, number: int, uids: Tensor) -> Tensor:
        """Returns the rows of uids in a layer, newborn nodes counted after the present ones, -1
        where they are not.
        """
        rows, offset = layer.rows(uids), len(layer)
        for newborns in self.newborns.get(number, ()):
            if len(newborns.uids):
                place = uids.numpy() - newborns.uids.numpy()[0]
                inside = (place >= 0) & (place < len(newborns.uids))
                rows.numpy()[inside] = place[inside] + offset
            offset += len(newborns.uids)
        return rows

    def connected_uids(self, layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
        """Returns the uids of the parents and of the children to connect, transition by
        transition.
        """
        parents, children = ([torch.empty(0, dtype=torch.int64, device="cpu")] for _ in range(2))
        for t, asked in sorted(self.connections.items()):
            upper, lower = (
                torch.cat(
                    [layers[n].uid, *(newborns.uids for newborns in self.newborns.get(n, ()))]
                )
                for n in (t, t + 1)
            )
            parents += [upper[connection.parents.long()] for connection in asked]
            children += [lower[connection.children.long()] for connection in asked]
        return torch.cat(parents), torch.cat(children)

    def removed_uids(self, layers: Sequence[Layer]) -> dict[int, Tensor]:
        """Returns the ascending uids of the present nodes to remove, layer by layer."""
        rows = {number: torch.cat(asked).unique().long() for number, asked in self.removals.items()}
        return {
            number: layers[number].uid[at[at < len(layers[number])]] for number, at in rows.items()
        }


def checked_initial(initial: Initial, count: int, what: str) -> Initial:
    """Returns the initialisation, values flattened; raises EditError for an unknown name or a wrong
    count.
    """
    if isinstance(initial, str):
        if initial not in INITIALISATIONS:
            raise EditError(
                f"no initialisation is called {initial!r}; known are {', '.join(INITIALISATIONS)},"
                " or give a tensor"
            )
        return initial
    values = as_tensor(initial).detach().clone()
    if values.numel() not in (1, count):
        raise EditError(
            f"{count} new {what} need {count} values (or one for all), got {values.numel()}"
        )
    if not bool(torch.isfinite(values).all()):
        raise EditError(f"the values for new {what} must be finite")
    return values.reshape(-1).expand(count)


def draw(
    initial: Initial,
    gains: Tensor,
    example: Tensor,
    generator: torch.Generator | None,
    at: Tensor | None = None,
) -> Tensor:
    """Returns one value for each entry of `gains`, uniform in ±1/√gain (0 where the gain is 0), or
    the given values.

    With `at` it is one for each of these places in `gains`.
    """
    if isinstance(initial, Tensor):
        return initial.to(example)
    if initial == "zero" or len(gains) == 0:
        return example.new_zeros(len(gains))
    bound = gains.to(example).rsqrt_().nan_to_num_(posinf=0.0)
    bound = bound if at is None else bound.index_select(0, at)
    device = example.device if generator is None else generator.device
    numbers = torch.empty(bound.shape[0], dtype=example.dtype, device=device).uniform_(
        -1, 1, generator=generator
    )
    return numbers.to(example.device) * bound


def checked_owner(owner: str | None) -> None:
    """Raises EditError for an owner that is no tag."""
    if owner is not None and not isinstance(owner, str):
        raise EditError(f"an owner is a string or None, got {owner!r}")


def checked_activation(name: str) -> None:
    """Raises EditError for an unknown activation."""
    try:
        activation_function(name)
    except ValueError as error:
        raise EditError(str(error)) from None


MOST_CELLS = 2**26  # of a table with one byte a possible relation


class LayerDraft:
    """One layer while an edit is resolved: its present rows first, the newborn ones after them."""

    def __init__(self, graph: "Graph", requests: Requests, number: int) -> None:
        self.layer = graph.layers[number]
        self.number = number
        self.device = graph.device
        self.columns = graph.columns_of(number)
        self.newborns = requests.newborns.get(number, [])
        present = self.layer.roster.uids
        self.n_present = present.shape[0]
        self.uids = joined(present, [n.uids for n in self.newborns])
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
        if not self.any_gone:
            return self.uids.shape[0]
        return self.uids.shape[0] - int(self.gone.sum())

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
        before = self.layer.read(rows).detach()
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
        if self.connections:
            self._check_distinct(upper, lower)
        # None: all of them
        self.kept = flatnonzero(~upper.gone[self.parents.long()]) if upper.any_gone else None

    def fan_in(self, rows: Tensor) -> Tensor:
        """Returns how many parents lower rows (newborn ones included) will have."""
        counts = self._gained.index_select(0, rows)
        present = rows < self.topology.n_children
        if bool(present.any()):
            counts[present] += self._surviving.index_select(0, rows[present])
        return counts.to(self.store.weight.device)

    @cached_property
    def _gained(self) -> Tensor:
        """How many of the relations asked for lead to each lower row."""
        return torch.bincount(_picked(self.children, self.kept), minlength=self._lower_size)

    @cached_property
    def _surviving(self) -> Tensor:
        """How many of the present relations will still lead to each present lower row."""
        children = self.topology.child.index_select(0, self.cuts)
        cut = torch.bincount(children, minlength=self.topology.n_children)
        return (self.topology.fan_in() - cut).cpu()

    def change(
        self,
        upper: LayerDraft,
        lower: LayerDraft,
        requests: Requests,
        generator: torch.Generator | None,
    ) -> TransitionChange:
        topology = self.topology
        device = topology.child.device
        stays = topology.n_relations - self.cuts.shape[0]
        present = topology.ptr.cpu().numpy()
        # how many relations are cut before those of each row
        lost = np.searchsorted(self.cuts.cpu().numpy(), present)
        # where the relations that each row keeps end
        kept = torch.from_numpy((present - lost)[1:].astype(np.int32))
        ends = upper.present_values(kept, fill=stays).numpy()
        none = empty_positions()
        inserted = empty_positions(device)
        values = self.store.weight.detach().new_empty(0)
        born = Pairs(none, none)
        children = none
        if self.connections:
            order = self._in_order(upper)
            parents = _picked(upper.new_rows(self.parents), order).numpy()
            # relations that each row is given, behind what it keeps
            gains = np.bincount(parents, minlength=len(ends))
            places = ends[parents] + np.arange(len(parents), dtype=np.int32)
            inserted = torch.from_numpy(places).to(device)
            drawn = self._drawn(torch.from_numpy(gains).to(device), upper, generator)
            values = _picked(drawn, order)
            children = _picked(self.children, order)
            born = Pairs(
                upper.short_uids.index_select(0, _picked(self.parents, order)),
                lower.short_uids.index_select(0, children),
            )
            ends = ends + gains.cumsum()
        size = stays + inserted.shape[0]
        require_countable(size, f"transition {self.t}", EditError)
        index = IndexMap(topology.n_relations, size, self.cuts, inserted)
        gone = Pairs(none, none)
        if self.cuts.shape[0]:
            owners = upper.short_uids.numpy()[: upper.n_present]
            losers = topology.child.index_select(0, self.cuts).cpu()
            gone = Pairs(
                torch.from_numpy(np.repeat(owners, np.diff(lost))),
                lower.short_uids.index_select(0, losers),
            )
        flips = flips_of(
            self.store,
            index,
            requests.freeze_relations.get(self.t),
            requests.unfreeze_relations.get(self.t),
        )
        weights = VectorChange(
            index,
            born_frozen=torch.zeros(inserted.shape[0], dtype=torch.bool, device=device),
            gone_frozen=self.store.frozen_bits(self.cuts),
            flips=flips,
            born_values=values,
        )
        wiring = None
        if not index.is_identity:
            ptr = np.zeros(len(ends) + 1, dtype=np.int32)
            ptr[1:] = ends
            child = index.carry(lower.new_rows(topology.child), lower.new_rows(children).to(device))
            wiring = Topology(torch.from_numpy(ptr).to(device), child, lower.new_size)
        return TransitionChange(index, born, gone, weights, wiring)

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


# relations to look at first for parents of outputs; four times as many each time after that
_FIRST_LOOK = 4096


def resolve(graph: "Graph", requests: Requests, generator: torch.Generator | None) -> Change:
    """Returns the Change that the requests amount to; raises EditError when they conflict. Touches
    nothing.
    """
    drafts = [LayerDraft(graph, requests, number) for number in range(len(graph.layers))]
    wirings: list[TransitionDraft] = []
    folded: dict[int, Tensor | None] = {}
    for number, draft in enumerate(drafts):
        if number in requests.orphans:
            folded[number] = _remove_orphans(graph, requests, number, drafts, wirings[-1])
        if number < len(graph.transitions):
            wirings.append(TransitionDraft(graph, requests, number, draft, drafts[number + 1]))
    transitions = {
        t: w.change(drafts[t], drafts[t + 1], requests, generator)
        for t, w in enumerate(wirings)
        if w.is_touched
    }
    layers = {
        n: draft.change(requests, wirings[n - 1] if n else None, generator)
        for n, draft in enumerate(drafts)
        if draft.is_touched
    }
    return Change(
        {n: replace(c, folded=folded.get(n)) for n, c in layers.items() if not c.is_empty},
        {t: c for t, c in transitions.items() if not c.is_empty},
    )


def require_alive(graph: "Graph", change: Change) -> None:
    """Raises EditError when a change takes the last relation of a transition, or the last parent of
    an output that stays.

    It looks at the relations that leave, and at as many others as it takes to meet every output
    that lost a parent. An output that no path from the inputs led to before may lose its parents.
    """
    for t, part in change.transitions.items():
        is_emptied = part.index.old_size > 0 and part.index.new_size == 0
        if is_emptied and bool(_reached(graph).any()):
            raise _dead(f"this edit takes the last relation of transition {t}")
    last = len(graph.transitions) - 1
    part = change.transitions.get(last)
    if part is None or part.wiring is None or len(part.index.removed) == 0:
        return
    outputs = graph.layers[-1]
    child = part.wiring.child
    # outputs that lost a parent, [rows before], then [rows after]
    rows = graph.transitions[last].child.index_select(0, part.index.removed).long()
    without = torch.zeros(len(outputs), dtype=torch.bool, device=child.device)
    without[rows] = True
    index = None
    if last + 1 in change.layers:
        index = change.layers[last + 1].index
        without = index.carry(without.cpu(), False).to(child.device)
    # Most outputs have a parent among the first relations, so that few are read.
    start = 0
    stop = _FIRST_LOOK
    while start < len(child) and bool(without.any()):
        without[child[start:stop].long()] = False
        start = stop
        stop *= 4
    dead = flatnonzero(without).cpu()
    if len(dead) == 0:
        return
    if index is not None:
        dead = index.old_positions(dead)
    # An output that only parentless nodes led to is a constant already.
    dead = dead[_reached(graph)[dead.long()]]
    if len(dead) == 0:
        return
    uids = outputs.uid[dead.long()].tolist()
    names = ", ".join(str(uid) for uid in uids[:5])
    if len(uids) > 5:
        names += ", …"
    raise _dead(f"this edit takes the last parent of output nodes: {names}")


def _reached(graph: "Graph") -> Tensor:
    """Returns whether a path from the sensory layer leads to each output, [outputs] bool."""
    reached = torch.ones(len(graph.layers[0]), dtype=torch.bool, device=graph.device)
    for transition in graph.transitions:
        topology = transition.topology
        arriving = topology.child[reached[topology.parents().long()]]
        reached = torch.zeros(topology.n_children, dtype=torch.bool, device=graph.device)
        reached[arriving.long()] = True
    return reached.cpu()


def _dead(what: str) -> EditError:
    return EditError(
        f"{what}; an output would no longer depend on the input, and nothing was changed.\n"
        "Cut less, or say allow_dead=True"
    )


def _remove_orphans(
    graph: "Graph",
    requests: Requests,
    number: int,
    drafts: list[LayerDraft],
    incoming: TransitionDraft,
) -> Tensor | None:
    """Marks the parentless nodes of a hidden layer as gone and, if asked, leaves their constants to
    their children.

    Returns the positions of the relations over which they were left.
    """
    draft, topology = drafts[number], graph.transitions[number].topology
    orphans = (
        incoming.fan_in(torch.arange(len(draft.uids), device="cpu")).cpu() == 0
    ) & ~draft.gone
    draft.lose(orphans)
    rows = flatnonzero(orphans[: draft.n_present])
    if not requests.orphans[number] or len(rows) == 0:
        return None
    positions = topology.owned_by(rows.to(graph.device))
    positions = positions[~contains(union(requests.cuts.get(number, []), graph.device), positions)]
    drafts[number + 1].shift = folded_constants(graph, number, positions, draft.shift)
    return positions


def folded_constants(
    graph: "Graph", number: int, relations: Tensor, shift: Tensor | None
) -> Tensor:
    """Returns what parentless nodes of a layer send to each node of the next one, [rows of the next
    layer].

    Args:
        graph: whose weights and biases count.
        number: the layer of the parentless nodes.
        relations: the positions of the relations they send it over, in the order of their owners.
        shift: what their own biases are given in the same edit, [rows of the layer].
    """
    layer, transition = graph.layers[number], graph.transitions[number]
    topology = transition.topology
    rows, counts = topology.parents_at(relations).unique_consecutive(return_counts=True)
    biases = layer.values().detach()
    if shift is not None:
        biases = biases + shift
    constants = biases[rows.long()]
    for kind, chosen in layer.activation_names.select(rows.cpu()).kinds():
        places = chosen.long().to(graph.device)
        constants[places] = activation_function(str(kind))(constants[places])
    sent = constants.repeat_interleave(counts) * transition.read(relations).detach()
    return sent.new_zeros(topology.n_children).index_add_(0, topology.child[relations.long()], sent)
