"""Resolves the operations of an edit into one Change, or an error; nothing is modified."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._activation import activation_function
from ._change import (
    Assignment,
    Change,
    Labels,
    LayerChange,
    NodeRecord,
    Pairs,
    Relabel,
    Shift,
    TransitionChange,
    VectorChange,
)
from ._coordinates import Coordinates
from ._errors import EditError, FrozenError
from ._index_map import (
    IndexMap,
    as_tensor,
    ascending,
    contains,
    counted,
    empty_positions,
    flatnonzero,
    moved,
    on_host,
)
from ._layer import LiveNodes, first_of_run
from ._transition import Topology, require_countable, wirings_after

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
    """Relations to add; rows count the present nodes of the layer first and then the new ones.

    They are on the CPU, or on the device of the relations.
    """

    parents: Tensor  # [n] int32
    children: Tensor  # [n] int32
    weights: Initial
    distinct: bool  # the pairs are known to differ from each other
    # They are known to be absent, too, and ascend by parent and then by child.
    absent: bool = False


@dataclass(frozen=True, eq=False)
class Naming:
    """Owners or activations to set."""

    kind: str  # "owners" or "activations"
    rows: Tensor
    name: str | None


@dataclass(frozen=True, eq=False)
class Assigned:
    """Values to assign to coordinates of one vector, or to the relations of one transition."""

    positions: Tensor  # [n] int32
    values: Tensor  # [n], or [n, numbers of a relation] for an adopted model


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
    assign_relations: dict[int, list[Assigned]] = field(default_factory=lambda: defaultdict(list))
    assign_biases: dict[int, list[Assigned]] = field(default_factory=lambda: defaultdict(list))
    namings: dict[int, list[Naming]] = field(default_factory=lambda: defaultdict(list))
    orphans: dict[int, bool] = field(default_factory=dict)  # layer -> fold the bias

    def rows(self, layer: LiveNodes, number: int, uids: Tensor) -> Tensor:
        """Returns the rows of uids in a layer, new nodes after the present ones, -1 for missing
        ones.
        """
        rows = layer.rows(uids)
        offset = len(layer)
        for newborns in self.newborns.get(number, ()):
            if len(newborns.uids):
                place = uids.numpy() - newborns.uids.numpy()[0]
                inside = (place >= 0) & (place < len(newborns.uids))
                rows.numpy()[inside] = place[inside] + offset
            offset += len(newborns.uids)
        return rows

    def connected_uids(self, graph: "Graph") -> tuple[Tensor, Tensor]:
        """Returns the uids of the parents and of the children to connect, transition by
        transition.
        """
        parents = [torch.empty(0, dtype=torch.int64, device="cpu")]
        children = list(parents)
        for t, asked in sorted(self.connections.items()):
            upper = self._uids(graph, graph.transitions[t].source)
            lower = self._uids(graph, graph.transitions[t].target)
            parents += [upper[connection.parents.cpu().long()] for connection in asked]
            children += [lower[connection.children.cpu().long()] for connection in asked]
        return torch.cat(parents), torch.cat(children)

    def _uids(self, graph: "Graph", number: int) -> Tensor:
        """Returns the uids of a layer, newborn nodes after the present ones."""
        newborns = [newborns.uids for newborns in self.newborns.get(number, ())]
        return torch.cat([graph.layers[number].uid, *newborns])

    def removed_rows(self, layers: Sequence[LiveNodes]) -> dict[int, Tensor]:
        """Returns the ascending rows of the present nodes to remove, layer by layer, int64."""
        found = {}
        for number, asked in self.removals.items():
            rows = torch.cat(asked).unique().long()
            found[number] = rows[rows < len(layers[number])]
        return found

    def removed_uids(self, layers: Sequence[LiveNodes]) -> dict[int, Tensor]:
        """Returns the ascending uids of the present nodes to remove, layer by layer."""
        rows = self.removed_rows(layers)
        return {number: layers[number].uid[at] for number, at in rows.items()}


def checked_initial(initial: Initial, count: int, what: str) -> Initial:
    """Returns the initialization, values flattened; raises EditError for an unknown name or a wrong
    count.
    """
    if isinstance(initial, str):
        if initial not in INITIALISATIONS:
            raise EditError(
                f"unknown initialization {initial!r}; use {', '.join(INITIALISATIONS)}, or a tensor"
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


def checked_values(values: Any, count: int, example: Tensor, what: str) -> Tensor:
    """Returns the values to assign as a vector in the dtype and on the device of `example`.

    Raises:
        EditError: there are neither `count` values nor one for all, or one is not finite.
    """
    given = as_tensor(values).detach()
    if given.numel() not in (1, count):
        raise EditError(f"{count} {what} need {count} values (or one for all), got {given.numel()}")
    # A copy, which the caller's tensor may not change any more.
    numbers = given.reshape(-1).expand(count).to(example, copy=True)
    if not bool(torch.isfinite(numbers).all()):
        raise EditError(f"the values to assign to {what} must be finite")
    return numbers


def draw(
    initial: Initial,
    gains: Tensor,
    example: Tensor,
    generator: torch.Generator | None,
    at: Tensor | None = None,
) -> Tensor:
    """Returns one value for each entry of `gains`, uniform in ±1/√gain (0 where the gain is 0), or
    the given values.

    With `at`, only for these positions in `gains`.
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
    """Raises EditError unless the owner is a string or None."""
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
    """One layer while an edit is resolved: present rows first, then new ones."""

    def __init__(self, graph: "Graph", requests: Requests, number: int) -> None:
        self.layer = graph.layers[number]
        self.number = number
        self.device = graph.device
        self.columns = graph._columns_of(number)
        self.newborns = requests.newborns.get(number, [])
        present = self.layer._roster.uids
        self.n_present = present.shape[0]
        self.uids = joined(present, [n.uids for n in self.newborns])
        self.shift: Tensor | None = None  # what orphans leave to the biases, [present rows]
        self.entering: list[TransitionDraft] = []
        self.leaving: list[TransitionDraft] = []
        self.any_gone = False
        for rows in requests.removals.get(number, ()):
            self.remove(rows.long())
        asked = (
            requests.namings,
            requests.freeze_biases,
            requests.unfreeze_biases,
            requests.assign_biases,
            requests.orphans,
        )
        self._named = any(number in part for part in asked)

    @property
    def is_touched(self) -> bool:
        return bool(self.newborns) or self._named or self.any_gone or self.shift is not None

    @cached_property
    def gone(self) -> Tensor:
        """One bool per row: True if it is removed."""
        return torch.zeros(len(self.uids), dtype=torch.bool, device="cpu")

    @cached_property
    def short_uids(self) -> Tensor:
        return self.uids.int()

    def uids_at(self, rows: Tensor) -> Tensor:
        """Returns the uids of rows, int32, on the device of the rows."""
        if self._first_uid is not None and not on_host(rows.device):
            return rows + self._first_uid
        return moved(self.short_uids, rows.device).index_select(0, rows)

    @cached_property
    def _first_uid(self) -> int | None:
        return first_of_run(self.uids)

    @property
    def new_size(self) -> int:
        if not self.any_gone:
            return self.uids.shape[0]
        return self.uids.shape[0] - int(self.gone.sum())

    def remove(self, rows: Tensor) -> None:
        """Marks rows, given as numbers or as one bool per row, as removed."""
        self.gone[rows] = True
        self.any_gone = bool(self.gone.any())

    def new_rows(self, rows: Tensor) -> Tensor:
        """Returns the new rows of survivors."""
        if not self.any_gone or rows.shape[0] == 0:
            return rows
        return moved(((~self.gone).cumsum(0) - 1).int(), rows.device).index_select(0, rows)

    def fan_in(self, rows: Tensor) -> Tensor:
        """Returns how many parents rows (newborn ones included) will have."""
        counts = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        for transition in self.entering:
            counts += transition.fan_in(rows)
        return counts

    @cached_property
    def gains(self) -> Tensor:
        """How many relations each row (newborn ones included) gains in all transitions."""
        counts = torch.zeros(len(self.uids), dtype=torch.int64, device=self.device)
        for transition in self.leaving:
            if transition.connections:
                counts += transition.gains(len(self.uids))
        return counts

    def survivors(self) -> Tensor:
        return flatnonzero(~self.gone)

    def present_values(self, column: Tensor, fill: float = 0) -> Tensor:
        """Returns a column without removed rows and with `fill` for new rows."""
        newborn = self.uids.shape[0] - self.n_present
        extended = torch.cat([column, column.new_full((newborn,), fill)]) if newborn else column
        if not self.any_gone:
            return extended
        return extended.index_select(0, moved(self.survivors(), column.device))

    def change(self, requests: Requests, generator: torch.Generator | None) -> LayerChange:
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
        renamed_owners, owners = self._renamed(self.layer._owner_names, owners, "owners", requests)
        renamed_kinds, kinds = self._renamed(
            self.layer._activation_names, kinds, "activations", requests
        )
        before = self._record(
            self.layer.uid, self.layer._owner_names, self.layer._activation_names, gone
        )
        biases = None
        if self.layer._has_biases:
            biases = self._biases(requests, index, born, generator)
        comes = born - self.n_present
        record = self._record(self.uids[self.n_present :].clone(), owners, kinds, comes)
        drawn = {name: column.draw(len(born), generator) for name, column in self.columns.items()}
        columns = {name: column.change(index, drawn[name]) for name, column in self.columns.items()}
        return LayerChange(index, record, before, biases, renamed_owners, renamed_kinds, columns)

    @staticmethod
    def _record(uids: Tensor, owners: Labels, kinds: Labels, rows: Tensor) -> NodeRecord:
        """Returns the identity of the nodes at ascending rows."""
        if rows.shape[0] == uids.shape[0]:
            return NodeRecord(uids, owners, kinds)
        return NodeRecord(
            uids[rows.long()], owners.select(rows).compact(), kinds.select(rows).compact()
        )

    def _renamed(
        self, present: Labels, newborn: list[Labels], kind: str, requests: Requests
    ) -> tuple[Relabel | None, Labels]:
        """Returns the relabelling of survivors, and the names of new rows."""
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
                uid = int(self.uids[int(clash[0])])
                name = labels[int(clash[0])]
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
        generator: torch.Generator | None,
    ) -> VectorChange:
        layer = self.layer
        device = self.device
        index = index.to(device)
        flips = flips_of(
            layer,
            index,
            requests.freeze_biases.get(self.number),
            requests.unfreeze_biases.get(self.number),
        )
        example = layer.parameter.detach()
        drawn = []
        held = []
        for newborns in self.newborns:
            linear = newborns.bias == "linear" if isinstance(newborns.bias, str) else False
            if linear:
                gains = self.fan_in(torch.searchsorted(self.uids, newborns.uids))
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
        values = joined(example.new_empty(0), drawn)
        frozen = None
        if any(newborns.bias is None for newborns in self.newborns):
            frozen = joined(torch.empty(0, dtype=torch.bool, device=device), held)
        if self.any_gone:
            comes = moved(born - self.n_present, device)
            values = values.index_select(0, comes)
            frozen = None if frozen is None else frozen.index_select(0, comes)
        assigned = assignment_of(
            layer, index, flips, requests.assign_biases.get(self.number), self._name_of_bias
        )
        if assigned is not None and self.shift is not None:
            # What orphans leave to an assigned bias comes on top of it.
            assert assigned.after is not None
            gained = self.shift[assigned.positions.long()]
            assigned = replace(assigned, after=assigned.after + gained)
        return VectorChange(
            index,
            born_frozen=frozen,
            gone_frozen=layer._frozen_among(index.removed),
            flips=flips,
            born_values=values,
            shift=self._shifted(index, flips, assigned),
            assigned=assigned,
        )

    def _name_of_bias(self, row: int) -> str:
        return f"the bias of node {int(self.uids[row])} (layer {self.number})"

    def _shifted(self, index: IndexMap, flips: Tensor, assigned: Assignment | None) -> Shift | None:
        if self.shift is None:
            return None
        rows = flatnonzero((self.shift != 0) & ~self.gone[: self.n_present].to(self.shift.device))
        if assigned is not None:
            rows = rows[~contains(assigned.positions, rows)]
        if len(rows) == 0:
            return None
        after_rows = index.new_positions(rows)
        if bool(self.layer._frozen_bits(rows).any()) or bool(contains(flips, after_rows).any()):
            raise EditError(
                f"fold_bias would change frozen biases of layer {self.number}; unfreeze them in an"
                " edit before"
            )
        before = self.layer._read(rows).detach()
        return Shift(after_rows, before, before + self.shift[rows.long()])


class Grown(NamedTuple):
    """New relations of a transition, in the order of their owners.

    Attributes:
        born: the uids of their ends.
        children: the rows of their children before the edit, newborn ones behind, [n] int32.
        inserted: their positions afterwards, [n].
        values: their weights, [n].
        ends: where the relations of each parent end afterwards; None if no parent comes or leaves
            and none gains any.
    """

    born: Pairs
    children: Tensor
    inserted: Tensor
    values: Tensor
    ends: Tensor | None


class TransitionDraft:
    """The relations of one transition while an edit is resolved, on the device of the relations."""

    def __init__(
        self, graph: "Graph", requests: Requests, t: int, upper: LayerDraft, lower: LayerDraft
    ) -> None:
        self.store = graph.transitions[t]
        self.topology = self.store.topology
        self.t = t
        device = self.topology.child.device
        leaving = list(requests.cuts.get(t, ()))
        if upper.any_gone:
            rows = moved(flatnonzero(upper.gone[: upper.n_present]), device)
            leaving.append(self.topology.owned_by(rows))
        if lower.any_gone:
            rows = moved(flatnonzero(lower.gone[: lower.n_present]), device)
            leaving.append(self.topology.leading_to(rows))
        self.cuts = union(leaving, device)
        self.connections = requests.connections.get(t, [])
        asked = (
            requests.freeze_relations,
            requests.unfreeze_relations,
            requests.assign_relations,
        )
        self.is_touched = (
            len(self.cuts) > 0 or bool(self.connections) or any(t in part for part in asked)
        )
        self._lower_size = len(lower.uids)
        for connection in self.connections:
            self._check(connection, requests, upper, lower)
        self._is_by_owner = True
        if self.connections and not (len(self.connections) == 1 and self.connections[0].absent):
            self._check_distinct(upper, lower)
        # None: all of them
        self.kept = None
        if upper.any_gone:
            self.kept = flatnonzero(~moved(upper.gone, device).index_select(0, self.parents))

    def fan_in(self, rows: Tensor) -> Tensor:
        """Returns how many of its relations will lead to lower rows (newborn ones included)."""
        counts = self._gained
        # Only those of present rows are counted, for which all relations are read.
        if not on_host(rows.device) or bool((rows < self.topology.n_children).any()):
            counts = self._counts
        return counts.index_select(0, moved(rows, counts.device))

    def gains(self, n_rows: int) -> Tensor:
        """Returns how many relations each upper row (newborn ones included) gains."""
        return counted(_picked(self.parents, self.kept), n_rows)

    @cached_property
    def parents(self) -> Tensor:
        """The parents of the requested relations, [n] int32."""
        return self._requested([connection.parents for connection in self.connections])

    @cached_property
    def children(self) -> Tensor:
        """The children of the requested relations, [n] int32."""
        return self._requested([connection.children for connection in self.connections])

    def _requested(self, rows: list[Tensor]) -> Tensor:
        device = self.topology.child.device
        return joined(empty_positions(device), [moved(part, device) for part in rows])

    @cached_property
    def _counts(self) -> Tensor:
        """How many relations will lead to each lower row, newborn ones included."""
        children = self.topology.child.index_select(0, self.cuts)
        counts = self._gained.clone()
        present = self.topology.fan_in() - counted(children, self.topology.n_children)
        counts[: self.topology.n_children] += present
        return counts

    @cached_property
    def _gained(self) -> Tensor:
        """How many of the requested relations lead to each lower row."""
        return counted(_picked(self.children, self.kept), self._lower_size)

    def change(
        self,
        upper: LayerDraft,
        lower: LayerDraft,
        requests: Requests,
        generator: torch.Generator | None,
    ) -> TransitionChange:
        """Returns what happens to the relations, their weights, and the wiring.

        The relations that a parent keeps stay in their order, and new ones come behind them: where
        the kept ones end is where new ones are inserted.
        """
        topology = self.topology
        stays = topology.n_relations - self.cuts.shape[0]
        # where the relations that each present parent keeps begin and end, [parents + 1]
        kept = topology.ptr
        if self.cuts.shape[0]:
            kept = kept - torch.searchsorted(self.cuts, kept, out_int32=True)
        # where they end for each parent after the edit; None if those of `kept` remain
        ends = None
        if self.connections or upper.any_gone or upper.newborns:
            ends = upper.present_values(kept[1:], fill=stays)
        grown = self._grown(upper, lower, ends, generator)
        size = stays + len(grown.inserted)
        require_countable(size, f"transition {self.t}", EditError)
        index = IndexMap(topology.n_relations, size, self.cuts, grown.inserted)
        flips = flips_of(
            self.store,
            index,
            requests.freeze_relations.get(self.t),
            requests.unfreeze_relations.get(self.t),
        )
        assigned = assignment_of(
            self.store,
            index,
            flips,
            requests.assign_relations.get(self.t),
            partial(self._name_at, upper, lower),
        )
        weights = VectorChange(
            index,
            born_frozen=None,
            gone_frozen=self.store._frozen_among(self.cuts),
            flips=flips,
            born_values=grown.values,
            assigned=assigned,
        )
        wiring = None
        if not index.is_identity:
            ptr = kept
            if grown.ends is not None:
                ptr = kept.new_zeros(len(grown.ends) + 1)
                ptr[1:] = grown.ends
            child = index.carry(lower.new_rows(topology.child), lower.new_rows(grown.children))
            wiring = Topology(ptr, child, lower.new_size)
        gone = self._gone(upper, lower, kept)
        return TransitionChange(index, grown.born, gone, weights, wiring)

    def _grown(
        self,
        upper: LayerDraft,
        lower: LayerDraft,
        ends: Tensor | None,
        generator: torch.Generator | None,
    ) -> "Grown":
        """Returns the new relations, behind those that each row keeps.

        Args:
            upper: the layer of the parents.
            lower: the layer of the children.
            ends: where the relations that each parent keeps end, [parents after the edit].
            generator: source of random numbers.
        """
        device = self.topology.child.device
        if not self.connections:
            none = empty_positions(device)
            values = self.store.weight.detach().new_empty(0)
            return Grown(Pairs(none, none), none, none, values, ends)
        assert ends is not None
        order = self._in_order()
        parents = _picked(upper.new_rows(self.parents), order)
        inserted = ends.index_select(0, parents) + ascending(len(parents), device)
        values = _picked(self._drawn(upper, lower, generator), order)
        children = _picked(self.children, order)
        born = Pairs(upper.uids_at(_picked(self.parents, order)), lower.uids_at(children))
        ends = ends + counted(parents, len(ends)).cumsum(0)
        return Grown(born, children, inserted, values, ends)

    def _gone(self, upper: LayerDraft, lower: LayerDraft, kept: Tensor) -> Pairs:
        """Returns the uids of the two ends of the relations to cut; `kept` as for
        `_owners_of_cuts`.
        """
        if not self.cuts.shape[0]:
            none = empty_positions(self.topology.child.device)
            return Pairs(none, none)
        losers = self.topology.child.index_select(0, self.cuts)
        return Pairs(self._owners_of_cuts(upper, kept), lower.uids_at(losers))

    def _owners_of_cuts(self, upper: LayerDraft, kept: Tensor) -> Tensor:
        """Returns the uids of the parents of the relations to cut, [cuts] int32.

        Args:
            upper: the layer of the parents.
            kept: where the relations that each of them keeps begin and end, [rows + 1].
        """
        if not on_host(kept.device):
            return upper.uids_at(self.topology.parents_at(self.cuts))
        # numpy repeats each parent faster than it finds those of the relations
        lost = self.topology.degrees - kept.diff()
        owners = upper.short_uids.numpy()[: upper.n_present]
        return torch.from_numpy(owners.repeat(lost.numpy()))

    def _in_order(self) -> Tensor | None:
        """Returns the requested relations to add, by owner; None if all are added in the given
        order.
        """
        if self.kept is None:
            if self._is_by_owner:
                return None
            return self.parents.argsort(stable=True)
        return self.kept[_picked(self.parents, self.kept).argsort(stable=True)]

    def _drawn(
        self, upper: LayerDraft, lower: LayerDraft, generator: torch.Generator | None
    ) -> Tensor:
        """Returns the new weights in the order of the requests."""
        example = self.store.weight.detach()
        drawn = []
        for connection in self.connections:
            if isinstance(connection.weights, str) and connection.weights == "alloc":
                at = moved(connection.parents, upper.gains.device)
                drawn.append(draw("alloc", upper.gains, example, generator, at=at))
                continue
            elif isinstance(connection.weights, str) and connection.weights == "linear":
                scale = lower.fan_in(connection.children)
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
                hit = rows[torch.isin(rows, moved(removed, rows.device))]
                if len(hit):
                    uid = int(draft.uids[int(hit[0])])
                    raise EditError(
                        f"node {uid} of layer {draft.number} is removed in this edit, so it cannot"
                        f" be a {role} in it"
                    )

    def _check_distinct(self, upper: LayerDraft, lower: LayerDraft) -> None:
        """Raises EditError if a pair is requested twice or exists; notes whether the pairs are in
        the order of their owners.
        """
        width = max(len(lower.uids), 1)
        parents = self.parents
        children = self.children
        keys = parents
        if not (len(self.connections) == 1 and self.connections[0].distinct):
            keys = parents.long() * width + children
        clash = self._clash(upper, lower)
        # All answers at once, which a device gives only when it has done everything before.
        is_by_owner, is_ascending, clashes = torch.stack(
            [
                (parents[1:] >= parents[:-1]).all(),
                (keys[1:] > keys[:-1]).all(),
                clash.any(),
            ]
        ).tolist()
        self._is_by_owner = is_by_owner
        if keys is not parents and not is_ascending:
            keys = keys.sort().values
            twice = keys[1:][keys[1:] == keys[:-1]]
            if len(twice):
                parent, child = divmod(int(twice[0]), width)
                self._refuse(upper, lower, parent, child, "is requested twice in this edit")
        if clashes:
            first = int(clash.nonzero()[0])
            self._refuse(upper, lower, int(parents[first]), int(children[first]), "exists already")

    def _clash(self, upper: LayerDraft, lower: LayerDraft) -> Tensor:
        """Returns one bool per requested pair: True if it is connected and stays so."""
        if not upper.newborns and not lower.newborns:
            return self._exist(self.parents, self.children)
        present = (self.parents < upper.n_present) & (self.children < lower.n_present)
        clash = torch.zeros_like(present)
        at = flatnonzero(present).long()
        if len(at):
            clash[at] = self._exist(self.parents[at], self.children[at])
        return clash

    def _exist(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns one bool per pair of rows: True if it is connected and stays so."""
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
        raise EditError(f"{_relation(upper, lower, parent, child)} {why}")

    def _name_at(self, upper: LayerDraft, lower: LayerDraft, position: int) -> str:
        """Returns the name of the relation at a position."""
        at = torch.tensor([position], dtype=torch.int32, device=self.topology.child.device)
        parent = int(self.topology.parents_at(at))
        return _relation(upper, lower, parent, int(self.topology.child[position]))


def _relation(upper: LayerDraft, lower: LayerDraft, parent: int, child: int) -> str:
    return (
        f"the relation from node {int(upper.uids[parent])} (layer {upper.number}) to node"
        f" {int(lower.uids[child])} (layer {lower.number})"
    )


def _picked(vector: Tensor, places: Tensor | None) -> Tensor:
    """Returns the entries at `places`, or the vector itself when that is all of them in order."""
    return vector if places is None else vector.index_select(0, places)


def joined(first: Tensor, others: list[Tensor]) -> Tensor:
    """Returns concatenated vectors; a single one is returned itself."""
    filled = [part for part in (first, *others) if part.shape[0]]
    return filled[0] if len(filled) == 1 else torch.cat(filled) if filled else first


def union(parts: list[Tensor], device: torch.device) -> Tensor:
    """Returns the sorted union of position tensors.

    Positions on a device are those of relations, which are ascending; rows are on the CPU.
    """
    if not parts:
        return empty_positions(device)
    if len(parts) == 1:
        (part,) = parts
        if not on_host(part.device) or bool((part.diff() > 0).all()):
            return moved(part, device)
    return torch.cat([moved(part, device) for part in parts]).unique()


def flips_of(
    store: Coordinates, index: IndexMap, freezes: list[Tensor] | None, thaws: list[Tensor] | None
) -> Tensor:
    """Returns the new positions whose frozen bit changes: cut wins over freeze, and freeze over
    unfreeze.
    """
    device = store.frozen_at.device
    if not freezes and not thaws:
        return empty_positions(device)
    freeze = union(freezes or [], device)
    thaw = union(thaws or [], device)
    thaw = thaw[~contains(freeze, thaw)]
    turned = (
        torch.cat([freeze[~store._frozen_bits(freeze)], thaw[store._frozen_bits(thaw)]])
        .sort()
        .values
    )
    return index.new_positions(turned[~contains(index.removed, turned)])


def assignment_of(
    store: Coordinates,
    index: IndexMap,
    flips: Tensor,
    asked: "list[Assigned] | None",
    name: Callable[[int], str],
) -> Assignment | None:
    """Returns what is assigned to the coordinates of a vector that stay; None if nothing is.

    Args:
        store: the vector.
        index: how its coordinates move; cut wins over assign.
        flips: the new positions whose frozen bit changes.
        asked: the requests.
        name: returns the name of the coordinate at a position, for errors.

    Raises:
        EditError: a coordinate is assigned twice.
        FrozenError: a coordinate is frozen, and the edit does not unfreeze it.
    """
    if not asked:
        return None
    device = store.frozen_at.device
    positions = torch.cat([moved(one.positions, device) for one in asked])
    values = torch.cat([moved(one.values, device) for one in asked])
    if not bool((positions[1:] > positions[:-1]).all()):
        positions, order = positions.sort()
        values = values.index_select(0, order)
        twice = positions[1:][positions[1:] == positions[:-1]]
        if len(twice):
            raise EditError(f"this edit assigns {name(int(twice[0]))} twice")
    if index.removed.shape[0]:
        stays = ~contains(index.removed, positions)
        positions = positions[stays]
        values = values[stays]
    if positions.shape[0] == 0:
        return None
    held = store._frozen_among(positions)
    if held is not None:
        held &= ~contains(flips, index.new_positions(positions))
        if bool(held.any()):
            first = int(positions[held][0])
            raise FrozenError(
                f"{int(held.sum())} of the {len(held)} coordinates to assign are frozen, such as"
                f" {name(first)}; unfreeze them in the same edit or before"
            )
    return Assignment(positions, values)


# relations to look at first for parents of outputs; four times as many each time after that
_FIRST_LOOK = 4096


class Drafts(NamedTuple):
    """The nodes and relations that requests add and remove, orphans included.

    Attributes:
        layers: by number.
        transitions: by number.
        folded: the positions of the relations over which orphans leave their constants to biases,
            by their layer and transition.
    """

    layers: list[LayerDraft]
    transitions: dict[int, TransitionDraft]
    folded: dict[int, dict[int, Tensor] | None]

    @classmethod
    def of(cls, graph: "Graph", requests: Requests) -> "Drafts":
        """Finds the orphans of the requests; raises EditError if these conflict."""
        layers = [LayerDraft(graph, requests, number) for number in range(len(graph.layers))]
        transitions: dict[int, TransitionDraft] = {}
        folded: dict[int, dict[int, Tensor] | None] = {}
        # All that enters a layer is known before its orphans are looked for, as sources come first.
        for number, draft in enumerate(layers):
            if number in requests.orphans:
                folded[number] = _remove_orphans(graph, requests, draft, layers)
            for t, transition in enumerate(graph._wired):
                if transition.source == number:
                    lower = layers[transition.target]
                    transitions[t] = TransitionDraft(graph, requests, t, draft, lower)
                    draft.leaving.append(transitions[t])
                    lower.entering.append(transitions[t])
        return cls(layers, transitions, folded)

    def constants(self, graph: "Graph", t: int) -> Tensor:
        """Returns what orphans leave to biases over a transition, [children]."""
        transition = graph.transitions[t]
        relations = (self.folded.get(transition.source) or {}).get(t)
        if relations is None:
            return transition.weight.detach().new_zeros(transition.n_children)
        return folded_constants(graph, t, relations, self.layers[transition.source].shift, None)


def resolve(graph: "Graph", requests: Requests, generator: torch.Generator | None) -> Change:
    """Returns the Change of the requests; raises EditError if they conflict."""
    drafts = Drafts.of(graph, requests)
    transitions = {}
    for t, transition in enumerate(graph._wired):
        draft = drafts.transitions[t]
        if draft.is_touched:
            upper = drafts.layers[transition.source]
            lower = drafts.layers[transition.target]
            transitions[t] = draft.change(upper, lower, requests, generator)
    layers = {}
    for number, draft in enumerate(drafts.layers):
        if draft.is_touched:
            layers[number] = draft.change(requests, generator)
    folded = drafts.folded
    return Change(
        {n: replace(c, folded=folded.get(n)) for n, c in layers.items() if not c.is_empty},
        {t: c for t, c in transitions.items() if not c.is_empty},
    )


def require_alive(graph: "Graph", change: Change) -> None:
    """Raises EditError when a change takes the last relation that leads to a layer, or the last
    parent of an output that stays.

    It looks at the relations that leave, and at as many others as it takes to meet every output
    that lost a parent. An output that no path from the inputs led to before may lose its parents.
    """
    for t, part in change.transitions.items():
        if part.index.old_size == 0 or part.index.new_size > 0:
            continue
        entering = graph.entering(graph.transitions[t].target)
        is_cut_off = not any(_size_after(graph, change, other) for other in entering)
        if is_cut_off and bool(_reached(graph).any()):
            raise _dead(f"this edit takes the last relation of transition {t}")
    last = len(graph.layers) - 1
    lost = []
    for t in graph.entering(last):
        part = change.transitions.get(t)
        if part is not None and len(part.index.removed):
            lost.append(graph.transitions[t].child.index_select(0, part.index.removed))
    if not lost:
        return
    # outputs that lost a parent, [rows before], then [rows after]
    outputs = graph.layers[last]
    without = torch.zeros(len(outputs), dtype=torch.bool, device=graph.device)
    without.index_fill_(0, torch.cat(lost).long(), True)
    index = None
    if last in change.layers:
        index = change.layers[last].index
        without = index.carry(without, False)
    for t in graph.entering(last):
        child = _children_after(graph, change, t)
        # Most outputs have a parent among the first relations, so that few are read. To look
        # whether that is so takes longer on a device than to read a million.
        start = 0
        stop = _FIRST_LOOK if on_host(graph.device) else 1 << 20
        while start < len(child):
            without.index_fill_(0, child[start:stop].long(), False)
            if not bool(without.any()):
                return
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
    raise _dead(f"this edit removes the last parent of output nodes: {names}")


def _size_after(graph: "Graph", change: Change, t: int) -> int:
    """Returns how many relations a transition will have."""
    part = change.transitions.get(t)
    if part is None:
        return graph.transitions[t].size
    return part.index.new_size


def _children_after(graph: "Graph", change: Change, t: int) -> Tensor:
    """Returns the child row that every relation of a transition will have."""
    part = change.transitions.get(t)
    if part is not None and part.wiring is not None:
        return part.wiring.child
    # No relation comes or goes, but the rows of the children may move.
    return wirings_after(graph, change).get(t, graph.transitions[t].topology).child


def _reached(graph: "Graph") -> Tensor:
    """Returns whether a path from the sensory layer leads to each output, [outputs] bool."""
    reached = []
    for number, layer in enumerate(graph.layers):
        is_reached = torch.full((len(layer),), layer.is_sensory, device=graph.device)
        for t in graph.entering(number):
            topology = graph.transitions[t].topology
            sources = reached[graph.transitions[t].source]
            arriving = topology.child[sources[topology.parents().long()]]
            is_reached[arriving.long()] = True
        reached.append(is_reached)
    return reached[-1].cpu()


def _dead(what: str) -> EditError:
    return EditError(
        f"{what}; an output would no longer depend on the input, and nothing was changed.\n"
        "Cut less, or use allow_dead=True"
    )


def _remove_orphans(
    graph: "Graph", requests: Requests, draft: LayerDraft, drafts: list[LayerDraft]
) -> dict[int, Tensor] | None:
    """Marks the nodes without parents of a hidden layer as removed and, if requested, adds their
    constants to the biases of their children.

    Returns the positions of the relations over which they were left, by transition.
    """
    counts = draft.fan_in(torch.arange(len(draft.uids), device="cpu")).cpu()
    orphans = (counts == 0) & ~draft.gone
    draft.remove(orphans)
    rows = flatnonzero(orphans[: draft.n_present])
    if not requests.orphans[draft.number] or len(rows) == 0:
        return None
    folded = {}
    for t in graph.leaving(draft.number):
        transition = graph.transitions[t]
        positions = transition.topology.owned_by(rows.to(graph.device))
        cuts = union(requests.cuts.get(t, []), graph.device)
        folded[t] = positions[~contains(cuts, positions)]
        lower = drafts[transition.target]
        lower.shift = folded_constants(graph, t, folded[t], draft.shift, lower.shift)
    return folded


def folded_constants(
    graph: "Graph", t: int, relations: Tensor, shift: Tensor | None, received: Tensor | None
) -> Tensor:
    """Returns what parentless nodes send over a transition to each node of the layer that it leads
    to, [rows of that layer].

    Args:
        graph: the graph.
        t: the transition.
        relations: the positions of their relations, in the order of their owners.
        shift: what their own biases are given in the same edit, [rows of their layer].
        received: what other transitions have sent to the same layer; it is added.
    """
    transition = graph.transitions[t]
    layer = graph.layers[transition.source]
    topology = transition.topology
    rows, counts = topology.parents_at(relations).unique_consecutive(return_counts=True)
    biases = layer.values().detach()
    if shift is not None:
        biases = biases + shift
    constants = biases[rows.long()]
    for kind, chosen in layer._activation_names.select(rows.cpu()).kinds():
        places = chosen.long().to(graph.device)
        constants[places] = activation_function(str(kind))(constants[places])
    sent = constants.repeat_interleave(counts) * transition._read(relations).detach()
    if received is None:
        received = sent.new_zeros(topology.n_children)
    return received.index_add(0, topology.child[relations.long()], sent)
