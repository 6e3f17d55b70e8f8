"""How a commit cuts, connects, freezes and unfreezes the relations inside a tensor."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import NONE_TURNED, GridChange, Turned
from grapnet.core._errors import EditError
from grapnet.core._grid_map import GridMap, RowMap
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
class Assigned:
    """Free rows of a tensor that get other numbers."""

    rows: Tensor  # [n] int64
    cells: Tensor  # [n, width]


@dataclass(eq=False)
class Wish:
    """What an edit asks of the rows of one tensor, int64 in its present rows (see `Pattern`).

    Relations count as relations, whatever the number of their rows.
    """

    cut: list[Tensor] = field(default_factory=list)
    connect: list[Joined] = field(default_factory=list)
    assign: list[Assigned] = field(default_factory=list)
    freeze: list[Tensor] = field(default_factory=list)
    unfreeze: list[Tensor] = field(default_factory=list)
    relations: Turned = NONE_TURNED

    def count(self, *, added: int = 0, removed: int = 0, turned: int = 0) -> None:
        """Counts relations for the journal."""
        one = self.relations
        self.relations = Turned(one.added + added, one.removed + removed, one.turned + turned)


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
        EditError: a relation to connect exists, or cells to assign are frozen in the same edit.
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
    if index is None and not wish.assign and torch.equal(kinds, before.kinds):
        return None
    whole = grid.whole.contiguous()
    if wish.connect:
        whole = _with_connected(whole.clone(), before, wish.connect, generator)
    origin = torch.arange(len(kinds))
    for assigned in wish.assign:
        if bool((kinds[assigned.rows] == FROZEN).any()):
            raise EditError(f"this edit freezes weights of {name} that it also assigns")
        whole = whole.clone()
        whole.view(-1, before.width)[assigned.rows.to(whole.device)] = assigned.cells.to(whole)
        # They leave and come in one commit, so that optimizers start over with them.
        origin[assigned.rows] = -1
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
    return GridChange(
        RowMap(_live_shape(before), _live_shape(after), before.width, live),
        born_values=cells.reshape(-1),
        before=None if before.is_full else before,
        after=None if after.is_full else after,
        relations=wish.relations,
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
