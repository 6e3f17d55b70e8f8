"""The rectangle of the dense backend on a GPU, written and read by Triton kernels. Imported only
where Triton is.

A bit map says which cells have a coordinate. The number of coordinates before a word of it and the
bits in front of a cell tell which coordinate the cell has, so that one coalesced pass writes every
cell, and no index is read. Reading goes over the coordinates: over the cells its writes would be
scattered, which took four times as long.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# relations of one program that finds their cells
_CHARTED = 2048


@triton.jit
def _popcount(words):
    """Returns how many bits are set in each word."""
    return tl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _places(bits, before, BLOCK: tl.constexpr):
    """Returns for every cell of a block, [BLOCK / 32, 32], whether it has a coordinate, and how
    many coordinates come before it.
    """
    at = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    word = tl.load(bits + at)
    bit = tl.arange(0, 32)
    lower = word[:, None] & ((1 << bit) - 1)[None, :]
    place = tl.load(before + at)[:, None] + _popcount(lower)
    there = ((word[:, None] >> bit[None, :]) & 1) != 0
    return there, place


@triton.jit
def _cells_of_block(BLOCK: tl.constexpr):
    """Returns the numbers of the cells of a block, [BLOCK / 32, 32]."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    word = tl.arange(0, BLOCK // 32)
    return first + (word[:, None] * 32 + tl.arange(0, 32)[None, :])


@triton.jit
def _write(
    values,
    bits,
    before,
    order,
    frozen,
    frozen_bits,
    frozen_before,
    frozen_order,
    rectangle,
    cells,
    ORDERED: tl.constexpr,
    FROZEN: tl.constexpr,
    FROZEN_ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rectangle[c] = values[the place of c], or the frozen value, or 0."""
    there, place = _places(bits, before, BLOCK)
    if ORDERED:
        place = tl.load(order + place, mask=there, other=0)
    value = tl.load(values + place, mask=there, other=0).to(rectangle.dtype.element_ty)
    if FROZEN:
        held, place = _places(frozen_bits, frozen_before, BLOCK)
        if FROZEN_ORDERED:
            place = tl.load(frozen_order + place, mask=held, other=0)
        fixed = tl.load(frozen + place, mask=held, other=0).to(rectangle.dtype.element_ty)
        value = tl.where(held, fixed, value)
    cell = _cells_of_block(BLOCK)
    tl.store(rectangle + cell, value, mask=cell < cells)


@triton.jit
def _read(rectangle, cell_of, values, count, BLOCK: tl.constexpr):
    """values[e] = rectangle[the cell of e]."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = e < count
    cell = tl.load(cell_of + e, mask=exists, other=0)
    value = tl.load(rectangle + cell, mask=exists, other=0)
    tl.store(values + e, value.to(values.dtype.element_ty), mask=exists)


@triton.jit
def _flip(cell_of, bits, count, BLOCK: tl.constexpr):
    """Sets the bits of cells that have none, and clears the others."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = e < count
    cell = tl.load(cell_of + e, mask=exists, other=0)
    tl.atomic_xor(bits + (cell >> 5), 1 << (cell & 31), mask=exists, sem="relaxed")


@triton.jit
def _parent_of(ptr, e, low, high):
    """Returns the last parent from `low` to `high` whose relations begin at or before e."""
    span = tl.max(high - low, 0)
    while span > 0:
        middle = (low + high + 1) // 2
        is_before = tl.load(ptr + middle) <= e
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
        span = span >> 1
    return low


@triton.jit(do_not_specialize=["n_parents", "n_children", "count"])
def _chart(
    ptr,
    child,
    cell_of,
    bits,
    faults,
    n_parents,
    n_children,
    count,
    BLOCK: tl.constexpr,
):
    """cell_of[e] = the cell of relation e, and its bit is set; faults[0] tells whether the wiring
    is damaged, faults[1] whether the children of a parent do not ascend.

    The relations of a program mostly have one parent, so those of the first and of the last one are
    found before those in between. The bits of neighbours are in one word, which so many single
    writes would make slow: a run of ascending relations in one word adds all of its bits at once,
    as the difference of two running sums. If a pair has two relations, fewer bits than relations
    are set: a sum of powers of two has as many bits as terms only if all terms differ.
    """
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e = start + lane
    exists = e < count
    ends = tl.minimum(start + tl.arange(0, 2) * (BLOCK - 1), count - 1)  # [2]
    none = tl.zeros([2], tl.int32)
    outer = _parent_of(ptr, ends, none, none + (n_parents - 1))
    none = tl.zeros([BLOCK], tl.int32)
    parent = _parent_of(ptr, e, none + tl.min(outer, 0), none + tl.max(outer, 0))

    begin = tl.load(ptr + parent)
    end = tl.load(ptr + parent + 1)
    this = tl.load(child + e, mask=exists, other=0)
    is_first = e <= begin
    is_last = (e + 1 >= end) | (e + 1 >= count)
    before = tl.load(child + e - 1, mask=exists & (is_first == 0), other=-1)
    after = tl.load(child + e + 1, mask=exists & (is_last == 0), other=0)
    is_outside = exists & ((this < 0) | (this >= n_children))
    cell = parent * n_children + this
    tl.store(cell_of + e, cell, mask=exists)

    word = cell >> 5
    opens = is_first | (lane == 0) | (before >= this)
    opens |= ((cell - this + before) >> 5) != word
    closes = is_last | (lane == BLOCK - 1) | (this >= after)
    closes |= ((cell - this + after) >> 5) != word
    is_marked = exists & (is_outside == 0)
    bit = tl.where(is_marked, 1 << (cell & 31), 0)
    total = tl.cumsum(bit, 0)  # of 32 bits, as are the words: what overflows does not count
    share = tl.where(closes, total, 0) - tl.where(opens, total - bit, 0)
    tl.atomic_add(bits + word, share.to(tl.int32), mask=is_marked & (opens | closes), sem="relaxed")

    # Every program also looks at some of the parents.
    row = tl.program_id(0) * BLOCK + lane
    is_row = row < n_parents
    opening = tl.load(ptr + row, mask=is_row, other=0)
    closing = tl.load(ptr + row + 1, mask=is_row, other=0)
    is_wrong = is_row & (closing < opening)
    is_wrong |= (row == 0) & (opening != 0)
    is_wrong |= (row == n_parents - 1) & (closing != count)
    is_damaged = tl.max((is_outside | is_wrong).to(tl.int32), 0)
    is_unordered = tl.max((exists & (before >= this)).to(tl.int32), 0)
    if is_damaged != 0:
        tl.store(faults, 1)
    if is_unordered != 0:
        tl.store(faults + 1, 1)


@triton.jit
def _count(bits, counts, total, words, TOTAL: tl.constexpr, BLOCK: tl.constexpr):
    """counts[w] = the bits that are set in word w; total grows by all of them."""
    w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = w < words
    count = _popcount(tl.load(bits + w, mask=exists, other=0))
    tl.store(counts + w, count, mask=exists)
    if TOTAL:
        tl.atomic_add(total, tl.sum(count, axis=0), sem="relaxed")


def flip_cells(cell_of: Tensor, bits: Tensor) -> Tensor:
    """Sets the bits of cells that have none in a bit map, and clears the others; returns how many
    are set in each word then, int32.

    Args:
        cell_of: the cells, [n] int32, each one once.
        bits: the bit map, int32.
    """
    count = cell_of.shape[0]
    if count:
        flip: Any = _flip
        flip[(triton.cdiv(count, 1024),)](cell_of, bits, count, BLOCK=1024)
    return _counts_of(bits, None)


def chart_cells(
    ptr: Tensor, child: Tensor, n_children: int, words: int
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Returns the cell of every relation, [n] int32, the bit map of the cells, and how many of each
    word are in it, as `flip_cells` does. The numbers behind them, for which the host waits, are
    not 0 if the wiring is damaged, or if the cells do not ascend, and how many bits are set.
    """
    device = child.device
    count = child.shape[0]
    n_parents = ptr.shape[0] - 1
    cell_of = torch.empty_like(child)
    # In one piece of memory, so that one kernel clears it.
    cleared = torch.zeros(words + 3, dtype=torch.int32, device=device)
    bits = cleared[:words]
    found = cleared[words:]
    if n_parents:
        chart: Any = _chart
        programs = triton.cdiv(max(count, n_parents), _CHARTED)
        sizes = (n_parents, n_children, count)
        chart[(programs,)](ptr, child, cell_of, bits, found, *sizes, BLOCK=_CHARTED)
    counts = _counts_of(bits, found[2:])
    return cell_of, bits, counts, found.tolist()


def _counts_of(bits: Tensor, total: Tensor | None) -> Tensor:
    """Returns how many bits are set in each word, int32, and adds them to a total."""
    words = bits.shape[0]
    counts = torch.empty_like(bits)
    if words:
        add_up: Any = _count
        # The kernel does not read what stands in for a total that is not there.
        whole = counts if total is None else total
        programs = triton.cdiv(words, 1024)
        add_up[(programs,)](bits, counts, whole, words, TOTAL=total is not None, BLOCK=1024)
    return counts


def write(
    rectangle: Tensor,
    values: Tensor,
    bits: Tensor,
    before: Tensor,
    order: Tensor | None,
    frozen: Tensor | None,
    frozen_bits: Tensor | None,
    frozen_before: Tensor | None,
    frozen_order: Tensor | None,
    size: int,
) -> None:
    """Writes every cell of a contiguous rectangle: a coordinate in its dtype, or 0.

    Args:
        rectangle: what to write.
        values: the trainable coordinates.
        bits: their cells, as `Cells` has them.
        before: how many are in front of each word of the bit map.
        order: which one each cell in turn has; None for one after the other.
        frozen: the frozen coordinates, None if there are none.
        frozen_bits: the same of them.
        frozen_before: the same of them.
        frozen_order: the same of them.
        size: the cells of a block.
    """
    if rectangle.numel() == 0:
        return
    # The kernel does not read what stands in for a tensor that is not there.
    launch: Any = _write
    launch[(bits.shape[0] * 32 // size,)](
        values,
        bits,
        before,
        before if order is None else order,
        values if frozen is None else frozen,
        bits if frozen_bits is None else frozen_bits,
        before if frozen_before is None else frozen_before,
        before if frozen_order is None else frozen_order,
        rectangle,
        rectangle.numel(),
        ORDERED=order is not None,
        FROZEN=frozen is not None,
        FROZEN_ORDERED=frozen_order is not None,
        BLOCK=size,
        num_warps=4,
    )


def read(values: Tensor, rectangle: Tensor, cell_of: Tensor) -> None:
    """Writes the coordinates of a contiguous rectangle into `values`, in their dtype."""
    count = values.shape[0]
    if count:
        launch: Any = _read
        launch[(triton.cdiv(count, 1024),)](rectangle, cell_of, values, count, BLOCK=1024)
