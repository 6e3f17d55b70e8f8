"""The relations of one transition: the wiring, and one coordinate per relation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ._change import Change, LayerChange, TransitionChange
from ._coordinates import Coordinates, Token
from ._index_map import (
    as_positions,
    ascending,
    concatenate_ranges,
    counted,
    flatnonzero,
    moved,
    on_host,
    positions_in,
    sorted_nearly,
)
from ._layer import rows_among

if TYPE_CHECKING:
    from ._graph import Graph

MOST_RELATIONS = 2**31 - 1  # of one transition: positions are int32
# nodes of the blocks that a tile connects: what tensor cores multiply at once, and multiples
TILES = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Topology:
    """The wiring between two layers, without weights; a plan is made from it.

    The relations of parent `i` are positions `ptr[i]` to `ptr[i + 1]`; relation `e` leads to child
    `child[e]`.
    """

    ptr: Tensor  # [n_parents + 1] int32
    child: Tensor  # [n_relations] int32
    n_children: int
    # changes when relations move; caches compare it
    token: Token = field(default_factory=Token)

    def to(self, device: torch.device) -> "Topology":
        """Returns the same wiring on a device."""
        if self.child.device == device:
            return self
        return Topology(self.ptr.to(device), self.child.to(device), self.n_children, self.token)

    @property
    def n_parents(self) -> int:
        """The number of parents."""
        return self.ptr.shape[0] - 1

    @property
    def n_relations(self) -> int:
        """The number of relations."""
        return self.child.shape[0]

    @property
    def degrees(self) -> Tensor:
        """The number of children of each parent, [n_parents]."""
        return self.ptr[1:] - self.ptr[:-1]  # `diff` takes twice as long

    @cached_property
    def is_full(self) -> bool:
        """True if every parent lists every child in order, so that the values form the full
        matrix.
        """
        if self.n_relations != self.n_parents * self.n_children:
            return False
        rows = self.child.view(self.n_parents, self.n_children)
        order = torch.arange(self.n_children, dtype=rows.dtype, device=rows.device)
        equal = (
            rows.numpy() == order.numpy() if on_host(rows.device) else rows == order
        )  # numpy compares twice as fast
        return bool(equal.all())

    def parents(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns the parent row of the relations from `start` to `stop`."""
        # On a CPU torch compares the sum of the degrees with the size of the result, but a negative
        # degree would let it write behind the end.
        if start == 0 and stop is None:
            degrees = self.degrees.clamp_(min=0)
            return torch.repeat_interleave(degrees, output_size=self.n_relations)
        stop = self.n_relations if stop is None else stop
        inside = self.ptr.clamp(start, stop).diff().clamp_(min=0).long()
        rows = torch.arange(self.n_parents, dtype=torch.int32, device=self.ptr.device)
        return rows.repeat_interleave(inside, output_size=stop - start)

    def degrees_without(self, removed: Tensor) -> Tensor:
        """Returns how many children each parent keeps when the sorted positions `removed` go,
        [n_parents] int64.
        """
        if removed.shape[0] == 0:
            return self.degrees.long()
        return (self.ptr - torch.searchsorted(removed, self.ptr, out_int32=True)).diff().long()

    def parents_at(self, positions: Tensor) -> Tensor:
        """Returns the parent rows of relation positions."""
        return torch.searchsorted(self.ptr, positions, right=True, out_int32=True) - 1

    def owned_by(self, rows: Tensor) -> Tensor:
        """Returns the positions of the relations of parent rows, one parent after the other."""
        rows = rows.long()
        return concatenate_ranges(self.ptr[rows], self.ptr[rows + 1])

    def leading_to(self, rows: Tensor) -> Tensor:
        """Returns the sorted positions of the relations that lead to child rows."""
        if len(rows) == 1:
            return flatnonzero(self.child == int(rows[0]))
        wanted = torch.zeros(self.n_children, dtype=torch.bool, device=self.child.device)
        wanted[rows.long()] = True
        return flatnonzero(wanted.index_select(0, self.child))

    def find(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the position of every (parent, child) pair of rows, -1 where no relation
        exists.
        """
        owners = parents.unique()
        if len(owners) == self.n_parents:
            slots = None
            rows = self.parents()
            child = self.child
        else:
            slots = self.owned_by(owners)
            rows = self.parents_at(slots)
            child = self.child[slots.long()]
        owned = rows.long() * self.n_children + child
        wanted = parents.long() * self.n_children + children
        if len(owned) == 0:
            return torch.full_like(wanted, -1)
        owned, order = sorted_nearly(owned)
        place = positions_in(owned, wanted).clamp_(max=len(owned) - 1)
        at = order[place]
        if slots is not None:
            at = slots[at].long()
        return torch.where(owned[place] == wanted, at, -1)

    def fan_in(self) -> Tensor:
        """Returns how many parents each child has, [n_children]."""
        return counted(self.child, self.n_children)


def require_countable(relations: int, where: str, error: type[Exception] = ValueError) -> None:
    """Raises if a transition would have more relations than an int32 can count."""
    if relations > MOST_RELATIONS:
        raise error(
            f"{where} would hold {relations:,} relations; a transition holds at most"
            f" {MOST_RELATIONS:,}"
        )


class Transition(Coordinates):
    """The canonical store of one transition: the wiring, and the coordinates in the Parameter
    `weight` [E, 1].

    It leads from the layer number `source` to the layer number `target`, which the graph sets.
    """

    weight: torch.nn.Parameter
    source: int
    target: int
    # No buffer: what empties, averages or overwrites buffers leaves the wiring alone.
    topology: Topology
    _payload: ClassVar[int] = 1  # how many numbers a relation has
    # how many groups the nodes of both layers form that are related inside of a group alone
    _n_groups: ClassVar[int] = 1

    def __init__(self, topology: Topology, weights: Tensor) -> None:
        super().__init__("weight", weights.reshape(-1, 1))
        self.topology = topology

    @property
    def ptr(self) -> Tensor:
        """Where the relations of each parent begin, [n_parents + 1] int32."""
        return self.topology.ptr

    @property
    def child(self) -> Tensor:
        """The child row of every relation, [n_relations] int32."""
        return self.topology.child

    @property
    def n_children(self) -> int:
        """How many nodes the layer that it leads to has."""
        return self.topology.n_children

    @property
    def density(self) -> float:
        """The share of all possible relations that are there; 0 where there can be none."""
        possible = self.topology.n_parents * self.topology.n_children
        return self.topology.n_relations / max(possible, 1)

    @property
    def _structure(self) -> Token:
        """A token that changes when relations move."""
        return self.topology.token

    def _weights_at(self, at: Tensor | range) -> Tensor:
        """Returns the weights of relations, live and differentiable."""
        if isinstance(at, range) and len(self.frozen_at) == 0:
            return self._trainable(at.start, at.stop)
        return self._read(as_positions(at, self.child.device))

    def _strengths(self, at: Tensor | range) -> Tensor:
        """Returns |weight| of relations."""
        return self._weights_at(at).detach().abs()

    @property
    def frozen(self) -> Tensor:
        """The sorted positions of the frozen relations: torch.distributed.checkpoint looks up every
        entry of the state dict by its name.
        """
        return self.frozen_at

    def forward(
        self,
        x: Tensor,
        plan: Callable[[Tensor, Tensor, Tensor], Tensor],
        bias: Tensor,
        values: Tensor | None = None,
    ) -> Tensor:
        """Runs a plan over the coordinates, the current ones by default; forward hooks see the
        result, bias included.
        """
        if values is None:
            values = self.values()
        return plan(x, values, bias)

    def _rewire(self, topology: Topology) -> None:
        """Installs another wiring; `_install` installs its coordinates."""
        self.topology = topology

    def _differs_from(self, state: Mapping[str, Any], prefix: str) -> str:
        """Returns how a state dict differs from these relations; empty if it fits."""
        for name, mine in (("ptr", self.ptr), ("child", self.child)):
            theirs = state.get(prefix + name)
            if theirs is not None and not torch.equal(theirs.to(mine), mine):
                return f"{prefix}{name} differs from this graph's"
        return super()._differs_from(state, prefix)

    def _state(self) -> dict[str, Tensor]:
        return {**super()._state(), "ptr": self.ptr, "child": self.child}

    def _apply(self, *args: Any, **kwargs: Any) -> "Transition":
        super()._apply(*args, **kwargs)
        self._rewire(self.topology.to(self._device))
        return self

    def extra_repr(self) -> str:
        return (
            f"{self.topology.n_parents}→{self.n_children}, {self.size:,} relations, density"
            f" {self.density:.3g}, {len(self.frozen_at):,} frozen"
        )


def full_topology(n_parents: int, n_children: int, device: torch.device) -> Topology:
    """Returns the wiring that connects every parent to every child."""
    ptr = torch.arange(n_parents + 1, dtype=torch.int32, device=device) * n_children
    return Topology(
        ptr,
        torch.arange(n_children, dtype=torch.int32, device=device).repeat(n_parents),
        n_children,
    )


def random_topology(
    n_parents: int,
    n_children: int,
    density: float,
    device: torch.device,
    generator: torch.Generator | None,
) -> Topology:
    """Returns a uniformly random wiring with exactly round(density · parents · children)
    relations.
    """
    cells = n_parents * n_children
    count = round(density * cells)
    require_countable(
        count, f"a transition from {n_parents:,} to {n_children:,} nodes at density {density}"
    )
    if count == cells:
        return full_topology(n_parents, n_children, device)
    few = min(count, cells - count)
    source = torch.device("cpu") if generator is None else generator.device
    keys = torch.empty(0, dtype=torch.int64, device="cpu")
    # Draw with repetition, keep the distinct ones, top up. A mark for every cell tells them in less
    # time than sorting, unless almost no cell is drawn.
    is_drawn = None
    if cells <= 64 * few:
        is_drawn = torch.zeros(cells, dtype=torch.bool, device="cpu")
    found = 0
    while found < few:
        more = torch.randint(cells, (few - found + 16,), generator=generator, device=source).cpu()
        if is_drawn is None:
            keys = torch.cat([keys, more]).unique()
            found = len(keys)
        else:
            is_drawn[more] = True
            found = int(is_drawn.count_nonzero())
    if is_drawn is not None:
        keys = is_drawn.nonzero().squeeze(1)
    if len(keys) > few:
        spare = torch.randperm(len(keys), generator=generator, device=source)[
            : len(keys) - few
        ].cpu()
        kept = torch.ones(len(keys), dtype=torch.bool, device="cpu")
        kept[spare] = False
        keys = keys[kept]
    if few < count:
        absent = torch.zeros(cells, dtype=torch.bool, device="cpu")
        absent[keys] = True
        keys = (~absent).nonzero().squeeze(1)
    return topology_from_pairs(
        keys // max(n_children, 1), keys % max(n_children, 1), n_parents, n_children, device
    )


def require_tile(tile: int | None, error: type[Exception] = ValueError) -> None:
    """Raises unless tiles can have this size; None stands for single relations."""
    if tile is not None and (not isinstance(tile, int) or tile not in TILES):
        raise error(f"a tile has {', '.join(map(str, TILES))} nodes a side, got {tile!r}")


def block_sizes(nodes: int, tile: int) -> Tensor:
    """Returns how many nodes each block of a layer has: `tile`, and what is left in the last."""
    first = torch.arange(0, nodes, tile, device="cpu")
    return (nodes - first).clamp_(max=tile)


def random_tiles(
    n_parents: int,
    n_children: int,
    density: float,
    tile: int,
    device: torch.device,
    generator: torch.Generator | None,
) -> Topology:
    """Returns a random wiring in tiles, as near to density · parents · children relations as whole
    tiles come, and at least one tile if the density is not 0.

    Where the tiles suffice, every node has parents and children.
    """
    upper = block_sizes(n_parents, tile)
    lower = block_sizes(n_children, tile)
    possible = len(upper) * len(lower)
    source = torch.device("cpu") if generator is None else generator.device
    draws = []
    for blocks in (len(upper), len(lower), possible):
        draws.append(torch.randperm(blocks, generator=generator, device=source).cpu())
    # The first tiles go through all blocks of both layers, then come any others.
    numbers = torch.arange(max(len(upper), len(lower)), device="cpu")
    cover = draws[0][numbers % len(upper)] * len(lower) + draws[1][numbers % len(lower)]
    present = torch.zeros(possible, dtype=torch.bool, device="cpu")
    present[cover] = True
    order = torch.cat([cover, draws[2][~present[draws[2]]]])
    areas = upper[order // len(lower)] * lower[order % len(lower)]
    off = (areas.cumsum(0) - density * n_parents * n_children).abs()
    count = 1 + int(off.argmin())
    if density == 0:
        count = 0
    if count == possible:
        require_countable(
            n_parents * n_children, f"a transition from {n_parents:,} to {n_children:,} nodes"
        )
        return full_topology(n_parents, n_children, device)
    present.zero_()
    present[order[:count]] = True
    rows = present.view(len(upper), len(lower)).repeat_interleave(upper, 0)
    degrees = (rows * lower).sum(1)
    relations = int(degrees.sum())
    require_countable(
        relations, f"a transition from {n_parents:,} to {n_children:,} nodes at density {density}"
    )
    block = rows.nonzero()[:, 1]
    children = concatenate_ranges(block * tile, block * tile + lower[block])
    parents = torch.arange(n_parents, device="cpu").repeat_interleave(degrees)
    return topology_from_pairs(parents, children, n_parents, n_children, device)


def topology_from_pairs(
    parents: Tensor, children: Tensor, n_parents: int, n_children: int, device: torch.device
) -> Topology:
    """Returns the wiring of (parent, child) rows that are sorted by parent."""
    ptr = torch.zeros(n_parents + 1, dtype=torch.int32, device="cpu")
    ptr[1:] = torch.bincount(parents, minlength=n_parents).cumsum(0)
    return Topology(ptr.to(device), children.to(device, torch.int32), n_children)


def erk_densities(sizes: Sequence[tuple[int, int]], density: float) -> list[float]:
    """Returns one density per transition, proportional to (parents + children) / (parents ·
    children).

    Small transitions are denser than large ones (Erdős–Rényi); none exceeds 1, and the total
    matches `density`. Sizes are the numbers of parents and of children.
    """
    cells = [a * b for a, b in sizes]
    raw = []
    for parents, children in sizes:
        share = 0.0
        if parents * children:
            share = (parents + children) / (parents * children)
        raw.append(share)
    full: set[int] = set()
    while True:
        open_cells = [t for t in range(len(cells)) if t not in full and cells[t]]
        wanted = density * sum(cells) - sum(cells[t] for t in full)
        scale = 0.0
        if open_cells:
            scale = wanted / sum(raw[t] * cells[t] for t in open_cells)
        over = {t for t in open_cells if scale * raw[t] > 1}
        if not over:
            break
        full |= over
    densities = [scale * share for share in raw]
    for t in full:
        densities[t] = 1.0
    return densities


def wirings_after(graph: "Graph", change: Change) -> dict[int, Topology]:
    """Returns the new wiring of every transition whose relations or rows a change moves."""
    wirings = {}
    for t, transition in enumerate(graph._wired):
        upper = change.layers.get(transition.source)
        lower = change.layers.get(transition.target)
        wires = change.transitions.get(t)
        if wires is not None and wires.wiring is not None:
            wirings[t] = wires.wiring
        elif any(c is not None and not c.index.is_identity for c in (upper, lower, wires)):
            wirings[t] = rewired(graph, transition, upper, lower, wires)
    return wirings


def rewired(
    graph: "Graph",
    transition: Transition,
    upper: LayerChange | None,
    lower: LayerChange | None,
    wires: TransitionChange | None,
) -> Topology:
    """Returns the wiring of a transition after the changes of its two layers and of its
    relations.
    """
    topology = transition.topology
    child = topology.child
    degrees = topology.degrees.long()
    device = child.device
    n_children = topology.n_children
    if lower is not None and not lower.index.is_identity:
        if len(lower.index.removed) or int(lower.index.inserted[0]) < n_children:
            rows = lower.index.new_positions(ascending(n_children, torch.device("cpu")))
            child = moved(rows, device).index_select(0, child)
        n_children = lower.index.new_size
    if wires is not None:
        degrees = topology.degrees_without(wires.index.removed)
        children = rows_after(graph, transition.target, lower, wires.born.children)
        child = wires.index.carry(child, children)
    if upper is not None:
        degrees = upper.index.carry(degrees)
    if wires is not None and len(wires.born):
        parents = rows_after(graph, transition.source, upper, wires.born.parents)
        degrees = degrees + counted(parents, len(degrees))
    ptr = torch.zeros(len(degrees) + 1, dtype=torch.int32, device=device)
    ptr[1:] = degrees.cumsum(0)
    return Topology(ptr, child, n_children)


def rows_after(graph: "Graph", number: int, change: LayerChange | None, uids: Tensor) -> Tensor:
    """Returns the rows that nodes of a layer have after its change, on the device of `uids`."""
    present = graph.layers[number].uid
    return rows_among(
        present if change is None else change.index.carry(present, change.born.uids), uids
    )
