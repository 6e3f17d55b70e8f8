"""How a commit cuts, connects, freezes, unfreezes and assigns the relations inside a tensor."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import NO_RELATIONS, Assignment, GridChange, RelationCounts
from grapnet.core._errors import EditError, FrozenError
from grapnet.core._grid import Grid
from grapnet.core._grid_map import GridMap, RowMap, cells_at
from grapnet.core._index_map import IndexMap, map_of_sources
from grapnet.core._opened import CUT, FREE, FROZEN, Pattern

from ._weights import leading_shape

if TYPE_CHECKING:
    from ._adopted import Adopted


@dataclass(frozen=True, eq=False)
class Joined:
    """Rows of a tensor that relations to connect have, and how they start."""

    rows: Tensor  # [relations, rows per relation] int64
    numbers: Tensor | None  # one for all, or [relations, payload]
    bound: float  # without numbers they are drawn uniformly from ± this


@dataclass(frozen=True, eq=False)
class CellValues:
    """Numbers for cells of a tensor; those of cells that are cut or leave are not used."""

    cells: Tensor  # [n] int64, positions in the vector of all cells
    values: Tensor  # [n]


@dataclass(eq=False)
class Wish:
    """What an edit asks of the rows of one tensor, int64 in its present rows (see `Pattern`).

    Relations count as relations, whatever the number of their rows.
    """

    cut: list[Tensor] = field(default_factory=list)
    connect: list[Joined] = field(default_factory=list)
    assign: list[CellValues] = field(default_factory=list)
    freeze: list[Tensor] = field(default_factory=list)
    unfreeze: list[Tensor] = field(default_factory=list)
    relations: RelationCounts = NO_RELATIONS

    @property
    def moves_none(self) -> bool:
        """True if it asks for nothing but to assign."""
        return not (self.cut or self.connect or self.freeze or self.unfreeze)

    def count(self, *, added: int = 0, removed: int = 0, frozen_or_unfrozen: int = 0) -> None:
        """Counts relations for the journal."""
        one = self.relations
        self.relations = RelationCounts(
            one.added + added,
            one.removed + removed,
            one.frozen_or_unfrozen + frozen_or_unfrozen,
        )


def rewired(
    net: "Adopted",
    name: str,
    wish: Wish,
    index: GridMap | None,
    born: Tensor | None,
    generator: torch.Generator | None,
) -> GridChange | None:
    """Returns the change of a tensor of which some cells are cut or frozen, before the commit or
    after it; None if nothing changes.

    Args:
        net: the graph.
        name: the tensor.
        wish: what to do with its rows; a cut prevails over freezing, freezing over unfreezing.
        index: how its axes move; None if they stay.
        born: the cells that come with new nodes.
        generator: source of random numbers.

    Raises:
        EditError: a relation to connect exists, or a cell is assigned twice.
        FrozenError: a cell to assign is frozen and stays so.
    """
    grid = net._grids()[name]
    before = net._pattern_of(name)
    kinds = before.kinds.clone()
    for rows in wish.unfreeze:
        kinds[rows[kinds[rows] == FROZEN]] = FREE
    for rows in wish.freeze:
        kinds[rows[kinds[rows] == FREE]] = FROZEN
    for joined in wish.connect:
        if bool((before.kinds[joined.rows] != CUT).all(1).any()):
            raise EditError(f"a relation to connect in {name} exists already")
        kinds[joined.rows[before.kinds[joined.rows] == CUT]] = FREE
    for rows in wish.cut:
        kinds[rows] = CUT
    is_still = index is None and torch.equal(kinds, before.kinds)
    if is_still and not wish.assign:
        return None
    whole = grid.whole.contiguous()
    if wish.connect:
        whole = _with_connected(whole.clone(), before, wish.connect, generator)
    origin = torch.arange(len(kinds))
    unfrozen = (before.kinds == FROZEN) & (kinds == FREE)
    shape = before.shape
    if index is not None:
        leading = leading_shape(before)
        of_rows = GridMap(leading, index.axes)
        kinds = of_rows.carry(kinds.view(leading), float(FREE)).reshape(-1)
        origin = of_rows.carry(origin.view(leading), -1.0).reshape(-1)
        whole = index.carry(whole, 0.0 if born is None else born)
        shape = index.new_shape
    after = Pattern(shape, before.width, kinds)
    live = _live_map(before, after, origin)
    come = np.flatnonzero(kinds.numpy() != CUT)[live.inserted.numpy()]
    cells = whole.reshape(-1, before.width)[torch.from_numpy(come).to(whole.device)]
    moves = RowMap(_live_shape(before), _live_shape(after), before.width, live)
    assigned = assignment_of(name, grid, moves, wish.assign, unfrozen)
    if is_still and assigned is None:
        return None
    return GridChange(
        moves,
        born_values=cells.reshape(-1),
        before=None if before.is_full else before,
        after=None if after.is_full else after,
        relations=wish.relations,
        assigned=assigned,
    )


def assignment_of(
    name: str,
    grid: Grid,
    index: GridMap | RowMap,
    asked: list[CellValues],
    unfrozen: Tensor | None = None,
) -> Assignment | None:
    """Returns what an edit assigns to the cells of a tensor that stay; None if nothing is.

    Args:
        name: of the tensor.
        grid: the tensor.
        index: how the cells that exist move.
        asked: the cells to assign.
        unfrozen: the rows that the edit unfreezes, [rows] bool; none by default.

    Raises:
        EditError: a cell is assigned twice, or a value is not finite.
        FrozenError: a cell that is frozen would get another value.
    """
    if not asked:
        return None
    cells = torch.cat([one.cells for one in asked])
    values = torch.cat([one.values for one in asked])
    if not bool((cells[1:] > cells[:-1]).all()):
        cells, order = cells.sort()
        values = values[order.to(values.device)]
        twice = cells[1:][cells[1:] == cells[:-1]]
        if len(twice):
            at = [int(place) for place in torch.unravel_index(twice[0], grid.shape)]
            raise EditError(f"this edit assigns {name}{at} twice")
    live = cells  # positions among the cells that exist
    if grid.opened is None:
        is_used = ~index.are_gone(live)
    else:
        pattern = grid.opened.pattern
        rows = cells // pattern.width
        ranks = (pattern.kinds != CUT).cumsum(0) - 1
        live = ranks[rows] * pattern.width + cells % pattern.width
        is_used = (pattern.kinds[rows] != CUT) & ~index.are_gone(live)
        is_held = is_used & (pattern.kinds[rows] == FROZEN)
        if unfrozen is not None:
            is_held &= ~unfrozen[rows]
        _require_unchanged(name, grid, cells[is_held], values[is_held.to(values.device)])
        is_used &= ~is_held
    cells = live[is_used]
    values = values[is_used.to(values.device)]
    if len(cells) == 0:
        return None
    values = values.to(grid.tensor)
    if not bool(torch.isfinite(values).all()):
        raise EditError(f"the values to assign to {name} must be finite")
    return Assignment(cells.int(), values)


def _require_unchanged(name: str, grid: Grid, cells: Tensor, values: Tensor) -> None:
    """Raises FrozenError if cells that are frozen would get other values."""
    if len(cells) == 0:
        return
    present = cells_at(grid.whole, cells)
    others = int((present != values.to(present)).sum())
    if others:
        raise FrozenError(
            f"{others} of the numbers of {name} to assign are frozen; unfreeze them in the same"
            " edit or before"
        )


def _live_shape(pattern: Pattern) -> tuple[int, ...]:
    """Returns the shape of the cells that exist."""
    if pattern.is_full:
        return pattern.shape
    return (len(pattern.is_free), pattern.width)


def _live_map(before: Pattern, after: Pattern, origin: Tensor) -> IndexMap:
    """Returns how the rows that exist move.

    Args:
        before: the rows before the commit.
        after: the rows after it.
        origin: which row before the commit each row after it was, -1 for a new one.
    """
    was_live = before.kinds.numpy() != CUT
    # The last entry is for rows that were not there.
    rank = np.append(np.where(was_live, np.cumsum(was_live) - 1, -1), -1)
    place = rank[origin.numpy()[after.kinds.numpy() != CUT]]
    return map_of_sources(place, int(was_live.sum()))


def _with_connected(
    whole: Tensor, pattern: Pattern, connect: list[Joined], generator: torch.Generator | None
) -> Tensor:
    """Returns a tensor with the numbers of relations to connect."""
    rows_of_cells = whole.view(-1, pattern.width)
    for joined in connect:
        missing = (pattern.kinds[joined.rows] == CUT).to(whole.device)
        rows = joined.rows.to(whole.device)
        count = rows.numel() * pattern.width
        if joined.numbers is not None:
            numbers = joined.numbers.to(whole).reshape(-1).expand(count)
        else:
            device = whole.device if generator is None else generator.device
            drawn = torch.empty(count, dtype=whole.dtype, device=device)
            drawn.uniform_(-joined.bound, joined.bound, generator=generator)
            numbers = drawn.to(whole.device)
        cells = numbers.reshape(*rows.shape, pattern.width)
        rows_of_cells[rows[missing]] = cells[missing]
    return whole
