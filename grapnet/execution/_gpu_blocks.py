"""The products of families on a GPU with their biases, in one Triton kernel. Imported only where
Triton is.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of the tile of one program


@triton.jit
def _tile(
    x,
    values,
    bias,
    z,
    batch,
    families,
    size,
    degree,
    EVEN: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """z[b, f, j] = bias[f, j] + Σ_i x[b, f, i] · values[f, i, j], one tile of one family f per
    program.
    """
    family = tl.program_id(2).to(INDEX)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(INDEX)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    in_row = (row < batch)[:, None]
    in_column = (column < degree)[None, :]
    inputs = x + row[:, None] * (families * size) + family * size + depth[None, :]
    weight = values + family * size * degree + depth[:, None] * degree + column[None, :]
    here = family * degree + column
    biases = tl.load(bias + here, mask=column < degree, other=0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32) + biases[None, :]
    for first in range(0, size, DEPTH):
        if EVEN:
            total = tl.dot(tl.load(inputs), tl.load(weight), total)
        else:
            inside = first + depth < size
            left = tl.load(inputs, mask=in_row & inside[None, :], other=0)
            right = tl.load(weight, mask=inside[:, None] & in_column, other=0)
            total = tl.dot(left, right, total)
        inputs += DEPTH
        weight += DEPTH * degree
    target = z + row[:, None] * (families * degree) + here[None, :]
    if EVEN:
        tl.store(target, total.to(z.dtype.element_ty))
    else:
        tl.store(target, total.to(z.dtype.element_ty), mask=in_row & in_column)


@triton.jit
def _any_shape(
    x,
    values,
    bias,
    z,
    batch,
    families,
    size,
    degree,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    _tile(x, values, bias, z, batch, families, size, degree, False, INDEX, ROWS, COLUMNS, DEPTH)


@triton.jit
def _one_shape(
    x,
    values,
    bias,
    z,
    batch,
    families: tl.constexpr,
    size: tl.constexpr,
    degree: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    _tile(x, values, bias, z, batch, families, size, degree, True, INDEX, ROWS, COLUMNS, DEPTH)


def block_product(
    x: Tensor, values: Tensor, bias: Tensor, shape: tuple[int, int, int], z: Tensor
) -> None:
    """Writes the messages and biases of families of one size into z.

    Args:
        x: the activations of the members, [batch, families · size].
        values: family by family, [families · size · degree].
        bias: of the children, [families · degree].
        shape: families, size, degree.
        z: [batch, families · degree], contiguous.
    """
    families, size, degree = shape
    batch = len(x)
    x = x.contiguous()
    values = values.contiguous()
    bias = bias.contiguous()
    # Whole tiles are compiled for their shape, a tenth faster; shapes that come and go with edits
    # share one kernel.
    even = batch % ROWS == 0 and degree % COLUMNS == 0 and size % DEPTH == 0
    kernel, stages = (_one_shape, 2) if even else (_any_shape, 3)
    index = tl.int32 if max(x.numel(), values.numel(), z.numel()) < 2**31 else tl.int64
    grid = (triton.cdiv(degree, COLUMNS), triton.cdiv(batch, ROWS), families)
    kernel[grid](  # pyright: ignore[reportIndexIssue]
        x,
        values,
        bias,
        z,
        batch,
        families,
        size,
        degree,
        index,
        ROWS,
        COLUMNS,
        DEPTH,
        num_warps=4,
        num_stages=stages,
    )
