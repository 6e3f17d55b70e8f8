"""The rectangle of the dense backend on a GPU, written and read by Triton kernels. Imported only
where Triton is.

A bit map says which cells have a coordinate. A program that writes takes one block of cells: the
number of coordinates before the block and the bits in front of a cell tell which coordinate the
cell has, so that one coalesced pass writes every cell, and no index is read. Reading goes over
the coordinates: over the cells its writes would be scattered, which took four times as long.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import wrap_triton


@triton.jit
def _popcount(words):
    """Returns how many bits are set in each word."""
    return tl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _places(bits, starts, BLOCK: tl.constexpr):
    """Returns for every cell of a block, [BLOCK / 32, 32], whether it has a coordinate, and how
    many coordinates come before it.
    """
    block = tl.program_id(0).to(tl.int64)
    word = tl.load(bits + block * (BLOCK // 32) + tl.arange(0, BLOCK // 32))
    count = _popcount(word)
    before = tl.load(starts + block) + tl.cumsum(count, 0) - count  # [BLOCK / 32]
    bit = tl.arange(0, 32)
    lower = word[:, None] & ((1 << bit) - 1)[None, :]
    place = before[:, None] + _popcount(lower)
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
    starts,
    order,
    frozen,
    frozen_bits,
    frozen_starts,
    frozen_order,
    rectangle,
    cells,
    ORDERED: tl.constexpr,
    FROZEN: tl.constexpr,
    FROZEN_ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rectangle[c] = values[the place of c], or the frozen value, or 0."""
    there, place = _places(bits, starts, BLOCK)
    if ORDERED:
        place = tl.load(order + place, mask=there, other=0)
    value = tl.load(values + place, mask=there, other=0).to(rectangle.dtype.element_ty)
    if FROZEN:
        held, place = _places(frozen_bits, frozen_starts, BLOCK)
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
def _mark(cell_of, bits, count, BLOCK: tl.constexpr):
    """Sets the bit of the cell of every coordinate."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = e < count
    cell = tl.load(cell_of + e, mask=exists, other=0)
    tl.atomic_or(bits + (cell >> 5), 1 << (cell & 31), mask=exists, sem="relaxed")


@triton.jit
def _count(bits, counts, BLOCK: tl.constexpr):
    """counts[b] = the bits that are set in block b."""
    block = tl.program_id(0).to(tl.int64)
    word = tl.load(bits + block * (BLOCK // 32) + tl.arange(0, BLOCK // 32))
    tl.store(counts + block, tl.sum(_popcount(word), axis=0))


def mark_cells(cell_of: Tensor, blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the bit map of cells, [blocks · size / 32] int32, and how many of each block are in
    it, [blocks] int32.
    """
    bits = torch.zeros(blocks * size // 32, dtype=torch.int32, device=cell_of.device)
    counts = torch.zeros(blocks, dtype=torch.int32, device=cell_of.device)
    count = cell_of.shape[0]
    if count:
        mark: Any = _mark
        mark[(triton.cdiv(count, 1024),)](cell_of, bits, count, BLOCK=1024)
        add_up: Any = _count
        add_up[(blocks,)](bits, counts, BLOCK=size, num_warps=1)
    return bits, counts


def write(
    rectangle: Tensor,
    values: Tensor,
    bits: Tensor,
    starts: Tensor,
    order: Tensor | None,
    frozen: Tensor | None,
    frozen_bits: Tensor | None,
    frozen_starts: Tensor | None,
    frozen_order: Tensor | None,
    size: int,
    kernel: Any = _write,
) -> None:
    """Writes every cell of a contiguous rectangle: a coordinate in its dtype, or 0.

    Args:
        rectangle: what to write.
        values: the trainable coordinates.
        bits: their cells, as `Cells` has them.
        starts: how many are before each block.
        order: which one each cell in turn has; None for one after the other.
        frozen: the frozen coordinates, None if there are none.
        frozen_bits: the same of them.
        frozen_starts: the same of them.
        frozen_order: the same of them.
        size: the cells of a block.
        kernel: the kernel as a trace wants it.
    """
    if rectangle.numel() == 0:
        return
    # The kernel does not read what stands in for a tensor that is not there.
    kernel[(starts.shape[0],)](
        values,
        bits,
        starts,
        starts if order is None else order,
        values if frozen is None else frozen,
        bits if frozen_bits is None else frozen_bits,
        starts if frozen_starts is None else frozen_starts,
        starts if frozen_order is None else frozen_order,
        rectangle,
        rectangle.numel(),
        ORDERED=order is not None,
        FROZEN=frozen is not None,
        FROZEN_ORDERED=frozen_order is not None,
        BLOCK=size,
        num_warps=4,
    )


def read(values: Tensor, rectangle: Tensor, cell_of: Tensor, kernel: Any = _read) -> None:
    """Writes the coordinates of a contiguous rectangle into `values`, in their dtype."""
    count = values.shape[0]
    if count:
        kernel[(triton.cdiv(count, 1024),)](rectangle, cell_of, values, count, BLOCK=1024)


def traced_write(*arguments: Any) -> None:
    """Does what `write` does, as the compiler sees it."""
    write(*arguments, kernel=wrap_triton(_write))


def traced_read(*arguments: Any) -> None:
    """Does what `read` does, as the compiler sees it."""
    read(*arguments, kernel=wrap_triton(_read))
