"""The products of tiles on a GPU: Triton kernels over values in their canonical order. Imported
only where Triton is.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ._tiles import COLUMNS

try:
    from triton.tools.tensor_descriptor import (  # pyright: ignore[reportMissingImports]
        TensorDescriptor,
    )
except ImportError:
    TensorDescriptor = None


class Launch(NamedTuple):
    """How a kernel is launched."""

    rows: int  # samples of one program, or of one step of the weight gradient
    part: int  # nodes that one step sums over, or tiles of one program of the weight gradient
    warps: int
    stages: int  # of the pipeline


@triton.jit(do_not_specialize=["batch"])
def _products(
    x,
    values,
    bias,
    z,
    ptr,
    tiles,
    batch,
    depth,
    width,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP_BORDER: tl.constexpr,
    WIDE_BORDER: tl.constexpr,
    ROW_BORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):
    """z[:, block j] = bias[block j] + Σ_t x[:, other block of t] · tile t, over the tiles t of list
    j, PART nodes of the other block at a time.

    The lists of tiles are those of the children; with TRANSPOSED those of the parents, and the
    tiles are transposed. With DESCRIBED, x is a tensor descriptor, which loads whole blocks. Blocks
    are the fastest index of a program: programs that run at the same time share samples.
    """
    own = tl.program_id(0)
    first_sample = tl.program_id(1) * ROWS
    samples = first_sample + tl.arange(0, ROWS)
    inside = (samples < batch)[:, None]
    lane = tl.arange(0, PART)
    wide = tl.arange(0, SIZE)
    column = own * SIZE + wide
    PARTS: tl.constexpr = SIZE // PART
    total = tl.zeros([ROWS, SIZE], dtype=tl.float32)
    for step in range(tl.load(ptr + own) * PARTS, tl.load(ptr + own + 1) * PARTS):
        tile = tiles + 4 * (step // PARTS)
        start = tl.load(tile + 1).to(tl.int64)
        degree = tl.load(tile + 2)
        if ALIGNED:
            start = tl.multiple_of(start, 16)
            degree = tl.multiple_of(degree, 16)
        deep = step % PARTS * PART + lane
        if TRANSPOSED:
            weight = values + start + wide[None, :] * degree + deep[:, None]
            other = tl.load(tile) * SIZE + step % PARTS * PART
        else:
            weight = values + start + deep[:, None] * degree + wide[None, :]
            other = tl.load(tile + 3) * SIZE + step % PARTS * PART
        exists = other + lane < depth
        if DESCRIBED:
            left = x.load([first_sample, other])
        else:
            inputs = x + samples[:, None].to(tl.int64) * depth + (other + lane)[None, :]
            if DEEP_BORDER:
                left = tl.load(inputs, mask=inside & exists[None, :], other=0)
            elif ROW_BORDER:
                left = tl.load(inputs, mask=inside, other=0)
            else:
                left = tl.load(inputs)
        if DEEP_BORDER or WIDE_BORDER:
            right = tl.load(weight, mask=exists[:, None] & (column < width)[None, :], other=0)
        else:
            right = tl.load(weight)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if WITH_BIAS:
        total += tl.load(bias + column, mask=column < width, other=0).to(tl.float32)[None, :]
    target = z + samples[:, None].to(tl.int64) * width + column[None, :]
    if WIDE_BORDER:
        inside = inside & (column < width)[None, :]
    tl.store(target, total.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch"])
def _weight_gradient(
    x,
    dz,
    gradient,
    tiles,
    groups,
    batch,
    depth,
    width,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEEP_BORDER: tl.constexpr,
    WIDE_BORDER: tl.constexpr,
    ROW_BORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """gradient[tile t] = x[:, parents of t]ᵀ · dz[:, children of t] for TILES tiles of one
    group.

    The tiles of a group have the same parents and follow each other in `gradient`.
    """
    group = tl.program_id(0)
    before = tl.program_id(1) * TILES
    first = tl.load(groups + 2 * group) + before
    count = tl.load(groups + 2 * group + 1) - before
    if count <= 0:
        return
    lane = tl.arange(0, SIZE)
    place = tl.arange(0, TILES * SIZE)
    slot = place // SIZE
    there = slot < count
    tile = tiles + 4 * (first + slot)
    column = tl.load(tile, mask=there, other=0) * SIZE + place % SIZE
    position = tl.load(tile + 1, mask=there, other=0).to(tl.int64) + place % SIZE
    degree = tl.load(tiles + 4 * first + 2)
    upper = tl.load(tiles + 4 * first + 3) * SIZE + lane
    if WIDE_BORDER:
        there = there & (column < width)
    # Sixteen neighbours each time, so that loads and stores are wide.
    column = tl.max_contiguous(tl.multiple_of(column, 16), 16)
    if ALIGNED:
        degree = tl.multiple_of(degree, 16)
        position = tl.max_contiguous(tl.multiple_of(position, 16), 16)
    samples = tl.arange(0, ROWS)
    inputs = x + samples[:, None].to(tl.int64) * depth + upper[None, :]
    received = dz + samples[:, None].to(tl.int64) * width + column[None, :]
    total = tl.zeros([SIZE, TILES * SIZE], dtype=tl.float32)
    for start in range(0, batch, ROWS):
        inside = (start + samples < batch)[:, None]
        if DEEP_BORDER:
            left = tl.load(inputs, mask=inside & (upper < depth)[None, :], other=0)
        elif ROW_BORDER:
            left = tl.load(inputs, mask=inside, other=0)
        else:
            left = tl.load(inputs)
        if ROW_BORDER:
            right = tl.load(received, mask=inside & there[None, :], other=0)
        else:
            right = tl.load(received, mask=there[None, :], other=0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
        inputs += ROWS * depth
        received += ROWS * width
    target = gradient + position[None, :] + lane[:, None] * degree
    kept = (upper < depth)[:, None] & there[None, :]
    tl.store(target, total.to(gradient.dtype.element_ty), mask=kept)


def products(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    size: int,
    ptr: Tensor,
    tiles: Tensor,
    width: int,
) -> Tensor:
    """Returns the products of activations with tiles, [batch, width].

    Args:
        x: the activations of the parents, or with `bias=None` the gradients of the children.
        values: of all relations, in the order of their parents.
        bias: of the children; None for the gradient of the parents, whose tiles are transposed.
        size: of the tiles.
        ptr: where the tiles of each block of the result begin.
        tiles: the tiles in this order, four numbers each.
        width: the number of nodes of the result.
    """
    batch, depth = x.shape
    z = x.new_empty(batch, width)
    if z.numel() == 0:
        return z
    precision = _precision(x)
    launch = _products_launch(size, x.dtype, precision)
    n_children = depth if bias is None else width
    x = x.contiguous()
    borders = {
        "DEEP_BORDER": depth % size != 0,
        "WIDE_BORDER": width % size != 0,
        "ROW_BORDER": batch % launch.rows != 0,
    }
    described = not any(borders.values()) and _has_descriptors(x)
    grid = (len(ptr) - 1, triton.cdiv(batch, launch.rows))
    _products[grid](  # pyright: ignore[reportIndexIssue]
        TensorDescriptor.from_tensor(x, [launch.rows, launch.part]) if described else x,  # pyright: ignore[reportOptionalMemberAccess]
        values.contiguous(),
        values if bias is None else bias.contiguous(),
        z,
        ptr,
        tiles,
        batch,
        depth,
        width,
        SIZE=size,
        PART=launch.part,
        TRANSPOSED=bias is None,
        WITH_BIAS=bias is not None,
        ALIGNED=n_children % 16 == 0,
        DESCRIBED=described,
        PRECISION=precision,
        ROWS=launch.rows,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **borders,
    )
    return z


def weight_gradient(
    x: Tensor, dz: Tensor, n_relations: int, size: int, tiles: Tensor, groups: Tensor
) -> Tensor:
    """Returns the gradients of the values, [n_relations], in the order of their parents.

    Args:
        x: the activations of the parents.
        dz: the gradients of the children.
        n_relations: how many values there are.
        size: of the tiles.
        tiles: the tiles by parent, four numbers each.
        groups: the first of some tiles with the same parents, and how many they are.
    """
    gradient = x.new_empty(n_relations)
    if n_relations == 0:
        return gradient
    batch, depth = x.shape
    width = dz.shape[1]
    precision = _precision(x)
    launch = _gradient_launch(size, x.dtype, precision)
    grid = (len(groups), COLUMNS // size // launch.part)
    _weight_gradient[grid](  # pyright: ignore[reportIndexIssue]
        x.contiguous(),
        dz.contiguous(),
        gradient,
        tiles,
        groups,
        batch,
        depth,
        width,
        SIZE=size,
        ALIGNED=width % 16 == 0,
        DEEP_BORDER=depth % size != 0,
        WIDE_BORDER=width % size != 0,
        ROW_BORDER=batch % launch.rows != 0,
        PRECISION=precision,
        ROWS=launch.rows,
        TILES=launch.part,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return gradient


def _products_launch(size: int, dtype: torch.dtype, precision: str) -> Launch:
    """Returns how `_products` runs fast on an H200; tiles of 64 in half precision were measured."""
    if dtype == torch.float32 and precision == "ieee":
        # Without matrix units every product is an instruction of its own.
        return Launch(64, min(size, 32), 8 if size == 128 else 4, 2)
    if dtype == torch.float32:
        return Launch(64, min(size, 32), 4, 4)
    return Launch(128, min(size, 64), 8 if size == 128 else 4, 5)


def _gradient_launch(size: int, dtype: torch.dtype, precision: str) -> Launch:
    """Returns the same for `_weight_gradient`."""
    if dtype == torch.float32 and precision == "ieee":
        return Launch(16, 1, 8, 2) if size == 128 else Launch(32, 64 // size, 4, 2)
    if dtype == torch.float32:
        return Launch(32, 128 // size, 4, 3)
    if size == 128:
        return Launch(64, 1, 8, 3)
    return Launch(32, COLUMNS // size, 8, 4)


def _has_descriptors(x: Tensor) -> bool:
    """Returns whether the hardware loads blocks of these activations by itself."""
    if TensorDescriptor is None or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.element_size() == 2 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0


def _precision(x: Tensor) -> str:
    """Returns how float32 is multiplied, as `torch.set_float32_matmul_precision` says."""
    if x.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
