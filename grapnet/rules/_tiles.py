"""Tiles as rules see them: blocks of nodes whose relations are cut and grown together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from grapnet.core._graph import Graph
from grapnet.core._index_map import concatenate_ranges, flatnonzero, require_ranks
from grapnet.core._sets import RelationSet
from grapnet.core._transition import block_sizes

from ._budget import Budget, Side, largest_of_each, positions_in, weakest_places

Pairs = tuple[Tensor, Tensor]  # uids of parents and of their children


@dataclass(frozen=True, eq=False)
class TileGrid:
    """All tiles of one transition, present or not, numbered parent block by parent block.

    A tile is present if one of its relations is. Its strength is the root mean square of its
    weights, or of other scores of its relations, so that the smaller tiles at the borders of a
    layer compare with the others.
    """

    net: Graph
    transition: int
    tile: int
    blocks: tuple[int, int]  # of parents and of children
    cells: Tensor  # [n_relations] int64: the tile of every relation
    counts: Tensor  # [n_tiles] int64: how many relations are there
    areas: Tensor  # [n_tiles] int64: how many could be
    strengths: Tensor  # [n_tiles] float64

    @classmethod
    def of(cls, net: Graph, transition: int, tile: int, scores: Tensor | None = None) -> "TileGrid":
        """Returns the tiles of a transition; without scores, |weight| is the score."""
        topology = net.transitions[transition].topology
        upper = block_sizes(topology.n_parents, tile)
        lower = block_sizes(topology.n_children, tile)
        blocks = (len(upper), len(lower))
        cells = topology.parents().long() // tile * blocks[1] + topology.child // tile
        count = blocks[0] * blocks[1]
        counts = torch.bincount(cells, minlength=count)
        if scores is None:
            scores = RelationSet.of(net, [transition]).strengths
        strengths = scores.double()
        require_ranks(strengths)
        total = strengths.new_zeros(count).index_add_(0, cells, strengths.square())
        areas = (upper[:, None] * lower).view(-1).to(counts.device)
        return cls(
            net,
            transition,
            tile,
            blocks,
            cells,
            counts,
            areas,
            (total / counts.clamp(min=1)).sqrt(),
        )

    @property
    def is_whole(self) -> bool:
        """True if every tile is there as a whole or not at all."""
        return bool(((self.counts == 0) | (self.counts == self.areas)).all())

    @property
    def is_present(self) -> Tensor:
        """Which tiles are there, [n_tiles]."""
        return self.counts > 0

    def has(self, positions: Tensor) -> Tensor:
        """Returns which tiles have one of the relations at some positions, [n_tiles]."""
        found = torch.zeros_like(self.counts, dtype=torch.bool)
        found[self.cells[positions.long().to(self.cells.device)]] = True
        return found

    @property
    def is_frozen(self) -> Tensor:
        """Which tiles have a frozen relation, [n_tiles]."""
        return self.has(self.net.transitions[self.transition].frozen_at)

    def has_pairs(self, pairs: Tensor) -> Tensor:
        """Returns which tiles have one of the pairs: parent row · n_children + child row."""
        found = torch.zeros_like(self.counts, dtype=torch.bool)
        n_children = max(1, self.net.transitions[self.transition].n_children)
        rows = pairs // n_children // self.tile
        columns = pairs % n_children // self.tile
        found[(rows * self.blocks[1] + columns).to(found.device)] = True
        return found

    def relations(self, tiles: Tensor) -> Tensor:
        """Returns the ascending positions of the relations of tiles, given by number."""
        chosen = torch.zeros_like(self.counts, dtype=torch.bool)
        chosen[tiles] = True
        return flatnonzero(chosen[self.cells])

    def pairs(self, tiles: Tensor) -> Pairs:
        """Returns all pairs of nodes of tiles, given by number, as uids: by parent, then child."""
        transition = self.net.transitions[self.transition]
        tiles = tiles.cpu().sort().values
        lower = block_sizes(transition.n_children, self.tile)
        upper = block_sizes(transition.topology.n_parents, self.tile)
        row = tiles // self.blocks[1]
        column = tiles % self.blocks[1]
        # One entry for every parent of every tile; those of a parent follow each other.
        first = row * self.tile
        parents = concatenate_ranges(first, first + upper[row]).long()
        column = column.repeat_interleave(upper[row])
        order = parents.argsort(stable=True)
        parents = parents[order]
        column = column[order]
        children = concatenate_ranges(column * self.tile, column * self.tile + lower[column])
        parents = parents.repeat_interleave(lower[column])
        return (
            self.net.layers[transition.source].uid[parents],
            self.net.layers[transition.target].uid[children.long()],
        )


def weakest_tiles(
    grids: Sequence[TileGrid],
    keys: Tensor,
    free: Tensor,
    relations: int,
    budget: Budget,
    *,
    gone: RelationSet | None = None,
    outputs: int = 0,
) -> Tensor:
    """Returns the weakest tiles, with about as many relations in all as asked for, that can be cut
    within a budget; they are numbered through all grids.

    A node that would have too few parents or children keeps its strongest tiles.

    Args:
        grids: the tiles of one transition or several, with blocks of the same size.
        keys: one number for every tile of all grids; the smallest are the weakest.
        free: which tiles may be cut, one bool for every tile.
        relations: the number of relations to come near to; `budget.edits` is never exceeded.
        budget: the limits.
        gone: relations that go in any case.
        outputs: the smallest number of parents of outputs, where the budget has no larger one.
    """
    at = free.nonzero().view(-1)
    key = keys[at]
    require_ranks(key)
    counts = torch.cat([grid.counts for grid in grids])[at]
    ahead = counts[key.argsort(stable=True)].cumsum(0)
    most = relations if budget.edits is None else min(relations, budget.edits)
    count = int((ahead <= most).sum())
    # One more, if that is nearer to what was asked for.
    if count < len(ahead):
        fits = budget.edits is None or int(ahead[count]) <= budget.edits
        below = int(ahead[count - 1]) if count else 0
        if fits and int(ahead[count]) - relations < relations - below:
            count += 1
    sides = _sides(grids, at, budget, gone, outputs)
    return at[weakest_places(key, count, sides).long()]


def tiles_by_grid(grids: Sequence[TileGrid], tiles: Tensor) -> list[Tensor]:
    """Returns the numbers in each grid of tiles that are numbered through all grids."""
    found = []
    start = 0
    for grid in grids:
        stop = start + len(grid.counts)
        found.append(tiles[(tiles >= start) & (tiles < stop)] - start)
        start = stop
    return found


def _sides(
    grids: Sequence[TileGrid],
    at: Tensor,
    budget: Budget,
    gone: RelationSet | None,
    outputs: int,
) -> list[Side]:
    """Returns the blocks at each end of the tiles at some numbers whose minimum matters, and how
    many tiles each can spare.
    """
    sides = []
    for end, least in ((1, budget.parents), (0, budget.children)):
        leasts: dict[int, int] = {}
        for grid in grids:
            layer = grid.net.ends[grid.transition][end]
            leasts[layer] = least
            if end and grid.net._is_output(layer):
                leasts[layer] = max(least, outputs)
        if not any(leasts.values()):
            continue
        net = grids[0].net
        spares = {}
        for layer, own in leasts.items():
            spares[layer] = _spare(net, layer, end, own, grids[0].tile, gone)
        layers = list(spares)
        offsets = torch.tensor([0, *(len(spare) for spare in spares.values())]).cumsum(0).tolist()
        nodes = []
        for grid in grids:
            tiles = torch.arange(len(grid.counts), device=at.device)
            width = max(1, grid.blocks[1])
            block = tiles % width if end else tiles // width
            nodes.append(block + offsets[layers.index(grid.net.ends[grid.transition][end])])
        sides.append(Side(torch.cat(nodes)[at], torch.cat(list(spares.values()))))
    return sides


def _spare(
    net: Graph, layer: int, end: int, least: int, tile: int, gone: RelationSet | None
) -> Tensor:
    """Returns how many tiles each block of a layer can spare beside relations that are gone, by the
    node with the fewest relations; all of them if `least` is 0.
    """
    if least == 0:
        return torch.full((len(block_sizes(net.sizes[layer], tile)),), 2**62, device=net.device)
    total = torch.zeros(net.sizes[layer], dtype=torch.int64, device=net.device)
    for t, transition in enumerate(net.transitions):
        if net.ends[t][end] != layer:
            continue
        topology = transition.topology
        total += topology.fan_in() if end else topology.degrees.long()
        if gone is not None:
            at = positions_in(gone, t, net.device).long()
            rows = topology.child[at] if end else topology.parents_at(at)
            total -= torch.bincount(rows, minlength=len(total))
    spare = (total - least).clamp_(min=0)
    missing = -len(spare) % tile
    # `pad` takes a float, of which this is one; the largest int64 is none
    padded = pad(spare, (0, missing), value=2.0**62)
    return padded.view(len(padded) // tile, tile).amin(1) // tile


def strongest_of_children(grid: TileGrid) -> Tensor:
    """Returns the strongest tile of every block of children that has one, by number."""
    present = grid.is_present.nonzero().view(-1)
    one_each = torch.ones(grid.blocks[1], dtype=torch.int64, device=present.device)
    block = present % max(1, grid.blocks[1])
    return present[largest_of_each(grid.strengths[present], block, one_each)]
