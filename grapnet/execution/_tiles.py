"""Tiles: relations that come in square tiles, each of which is a small matrix product.

The layers are divided into blocks of 16, 32, 64 or 128 nodes. In a tiled transition two blocks are
connected fully or not at all. The values keep their canonical order: all parents of a block have
the same children in the same order, so its values form a matrix with one row per parent, in which a
tile is a strip of columns. Kernels read and write those strips where they are. Where a layer is no
multiple of the size, its last block is smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from grapnet._torch import temporarily_clear_interpreter_stack
from grapnet.core._transition import TILES, Topology

from . import _native
from ._dense import FullPlan
from ._family import _column_sums as column_sums
from ._operators import register
from ._operators import run as run_operator
from ._plan import Plan, kernel_refusals
from ._sparse import SparsePlan

SIZES = TILES[::-1]  # the largest first
# columns of a block's matrix whose gradient one program of the GPU computes
COLUMNS = 256
# by size, the share of the rectangle up to which the compiled kernels, relation by relation, are
# faster on a CPU than matrix products
GATHERED = {16: 1.0, 32: 0.5, 64: 0.3, 128: 0.2}
_DTYPES = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Tiles:
    """Computes one small matrix product per tile: tensor cores run what exists, and nothing else.

    The relations have to come in tiles: `GrapNet(…, density=, tile=)` starts with some, and
    `PruneWeakest(tile=)` and `Rewire(tile=)` make and keep them.
    """

    name: ClassVar[str] = "tiles"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; empty if it can."""
        refusals = kernel_refusals(topology, dtype, _DTYPES)
        if not topology.is_full and find_tiles(topology) is None:
            sizes = ", ".join(map(str, TILES))
            refusals.append(f"the relations do not come in tiles of one size ({sizes})")
        return refusals

    def prepare(self, topology: Topology) -> Plan:
        """Lists the tiles by parent and by child."""
        if topology.is_full:
            return FullPlan(topology, narrow=False)
        tiling = find_tiles(topology)
        assert tiling is not None, "a topology without tiles is refused"
        return TilePlan(tiling, topology, _gather(tiling, topology))


def _gather(tiling: "Tiling", topology: Topology) -> SparsePlan | None:
    """Returns the plan of the compiled kernels where they run these tiles faster."""
    if topology.child.device.type != "cpu" or _native.missing:
        return None
    parents, children = tiling.shape
    if topology.n_relations > GATHERED[tiling.size] * parents * children:
        return None
    return SparsePlan(topology, _native.order_by_child(topology), feature_major=False)


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles of a transition, by parent and in the order of their values.

    Attributes:
        size: the nodes of a block, fewer in the last block of a layer.
        shape: the numbers of parents and of children.
        parent: the number of each tile's block of parents.
        child: the number of each tile's block of children.
        start: the position of each tile's first value.
        degree: the number of children of each of its parents, which is the distance in `values`
            between a tile's rows.
    """

    size: int
    shape: tuple[int, int]
    parent: np.ndarray  # [tiles] int64, as are the others
    child: np.ndarray
    start: np.ndarray
    degree: np.ndarray

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def blocks(self) -> tuple[int, int]:
        """The numbers of blocks of parents and of children."""
        return -(-self.shape[0] // self.size), -(-self.shape[1] // self.size)

    @cached_property
    def present(self) -> np.ndarray:
        """Which tiles exist, [blocks of parents, blocks of children]."""
        present = np.zeros(self.blocks, dtype=bool)
        present[self.parent, self.child] = True
        return present


_found: WeakKeyDictionary[Topology, Tiling | None] = WeakKeyDictionary()


def find_tiles(topology: Topology) -> Tiling | None:
    """Returns the tiles of a transition, of the largest possible size, or None if its relations do
    not come in tiles.
    """
    if topology not in _found:
        # A transform of torch.func hides the numbers of every tensor.
        with temporarily_clear_interpreter_stack():
            _found[topology] = _find_tiles(topology)
    return _found[topology]


def _find_tiles(topology: Topology) -> Tiling | None:
    """Compares degrees and the first list of every block before it looks at all relations."""
    ptr = topology.ptr.cpu().numpy().astype(np.int64)
    degrees = np.diff(ptr)
    if ptr[0] != 0 or ptr[-1] != topology.n_relations or (degrees < 0).any():
        return None
    smallest = SIZES[-1]
    if not _is_even(degrees, smallest):
        return None
    # The lists of every 16th parent, one after the other.
    counts = degrees[::smallest]
    at = np.arange(counts.sum()) + np.repeat(ptr[:-1:smallest] - _starts(counts), counts)
    firsts = topology.child[torch.from_numpy(at).to(topology.child.device)].cpu().numpy()
    owner = np.repeat(np.arange(len(counts)) * smallest, counts)
    for size in SIZES:
        if not _is_even(degrees, size):
            continue
        lists = firsts[owner % size == 0]
        tiling = _tiling(lists, size, ptr, degrees, topology.n_children)
        if tiling is not None and _repeats(topology, size):
            return tiling
    return None


def _is_even(degrees: np.ndarray, size: int) -> bool:
    """Returns whether all parents of a block have as many children as its first."""
    return bool((degrees == np.repeat(degrees[::size], size)[: len(degrees)]).all())


def _starts(counts: np.ndarray) -> np.ndarray:
    return counts.cumsum() - counts


def _tiling(
    lists: np.ndarray, size: int, ptr: np.ndarray, degrees: np.ndarray, n_children: int
) -> Tiling | None:
    """Returns the tiles if the lists of the first parents of all blocks consist of whole blocks."""
    counts = degrees[::size]
    begins = lists % size == 0
    follows = np.diff(lists, prepend=-2) == 1
    opens = np.zeros(len(lists) + 1, dtype=bool)  # where a list begins, and behind the last one
    opens[_starts(counts)] = True
    opens[-1] = True
    ends = ((lists + 1) % size == 0) | (lists == n_children - 1)
    whole = (
        (begins | (follows & ~opens[:-1]))  # a list begins with a block and goes on in order
        & (ends | ~(opens[1:] | np.append(begins[1:], True)))  # up to the end of the block
        & (lists >= 0)
        & (lists < n_children)
    )
    if not whole.all():
        return None
    at = begins.nonzero()[0]
    parent = np.repeat(np.arange(len(counts)), counts)[at]
    offset = at - _starts(counts)[parent]
    start = ptr[parent * size] + offset
    shape = (len(degrees), n_children)
    return Tiling(size, shape, parent, lists[at].astype(np.int64) // size, start, counts[parent])


def _repeats(topology: Topology, size: int) -> bool:
    """Returns whether all parents of a block have the list of its first, given equal degrees."""
    if topology.n_relations == 0:
        return True
    device = topology.child.device
    if device.type == "cpu":
        # block by block, which needs no index of every relation
        ptr = topology.ptr.tolist()
        child = topology.child.numpy()
        for first in range(0, topology.n_parents, size):
            last = min(first + size, topology.n_parents)
            rows = child[ptr[first] : ptr[last]].reshape(last - first, -1)
            if not (rows == rows[0]).all():
                return False
        return True
    rows = torch.arange(topology.n_parents, dtype=torch.int32, device=device)
    back = ((rows % size) * topology.degrees).repeat_interleave(
        topology.degrees, output_size=topology.n_relations
    )
    first = torch.arange(topology.n_relations, dtype=torch.int32, device=device) - back
    return torch.equal(topology.child, topology.child.index_select(0, first))


class TilePlan:
    """The tiles of one topology; under autocast it computes in the lower precision, as a Linear
    does.
    """

    def __init__(self, tiling: Tiling, topology: Topology, gather: SparsePlan | None) -> None:
        self._size = tiling.size
        self._gather = gather
        self._wiring = _wiring(tiling, topology.child.device)

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        dtype = values.dtype
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        if self._gather is not None and dtype in (torch.float32, torch.float64):
            return self._gather(x.to(dtype), values, bias)
        return tile_sum(x.to(dtype), values.to(dtype), bias.to(dtype), self._size, self._wiring)


def _wiring(tiling: Tiling, device: torch.device) -> tuple[Tensor, ...]:
    """Returns what the operators read, all int32: where the tiles of each block of parents begin,
    the tiles, where those of each block of children begin, the tiles by child, and groups.

    A tile is four numbers: its block of children, the position of its first value, the distance
    between its rows, and its block of parents. A group is the first of some tiles with the same
    parents, and their number.
    """
    upper, lower = tiling.blocks
    tiles = np.stack([tiling.child, tiling.start, tiling.degree, tiling.parent], axis=1)
    counts = np.bincount(tiling.parent, minlength=upper)
    most = COLUMNS // tiling.size
    in_row = -(-counts // most)  # groups of each block of parents
    row = np.repeat(np.arange(upper), in_row)
    before = (np.arange(len(row)) - _starts(in_row)[row]) * most
    groups = np.stack([_starts(counts)[row] + before, np.minimum(counts[row] - before, most)], 1)
    found = (
        np.append(0, counts.cumsum()),
        tiles,
        np.append(0, np.bincount(tiling.child, minlength=lower).cumsum()),
        tiles[tiling.child.argsort(kind="stable")],
        groups,
    )
    return tuple(torch.from_numpy(part.astype(np.int32)).to(device) for part in found)


def tile_sum(
    x: Tensor, values: Tensor, bias: Tensor, size: int, wiring: Sequence[Tensor]
) -> Tensor:
    """Returns z[b, j] = bias[j] + Σ_i x[b, i] · w_ij over tiles, [batch, n_children]."""
    return run_operator(_ops.tile_sum.default, _TileSum, x, values, bias, size, *wiring)


def tile_input_gradient(
    dz: Tensor, values: Tensor, n_parents: int, size: int, wiring: Sequence[Tensor]
) -> Tensor:
    """Returns the gradient of `tile_sum` for x, [batch, n_parents]."""
    inputs = (dz, values, n_parents, size, *wiring)
    return run_operator(_ops.tile_input_gradient.default, _TileInputGradient, *inputs)


def tile_weight_gradient(
    x: Tensor, dz: Tensor, n_relations: int, size: int, wiring: Sequence[Tensor]
) -> Tensor:
    """Returns the gradient of `tile_sum` for the values, [n_relations]."""
    inputs = (x, dz, n_relations, size, *wiring)
    return run_operator(_ops.tile_weight_gradient.default, _TileWeightGradient, *inputs)


class _Block(NamedTuple):
    """A block of parents with children: the matrix of its values, and where its columns are."""

    parents: slice
    values: slice
    shape: tuple[int, int]  # parents, degree
    children: Tensor  # the blocks of children, [tiles] int32
    border: int  # which of the tiles is smaller; -1 if none is


def _blocks(
    n_parents: int, n_children: int, size: int, wiring: Sequence[Tensor]
) -> Iterator[_Block]:
    """Yields the blocks of parents that have children, on the host."""
    ptr, tiles = wiring[:2]
    with temporarily_clear_interpreter_stack():
        ends = ptr.tolist()
        rows = tiles.tolist()
    # the number of the last block of children, if it is smaller
    smaller = n_children // size
    for number, (first, stop) in enumerate(pairwise(ends)):
        if first == stop:
            continue
        parents = slice(number * size, min((number + 1) * size, n_parents))
        _, start, degree, _ = rows[first]
        height = parents.stop - parents.start
        border = -1
        for slot in range(first, stop):
            if rows[slot][0] == smaller:
                border = slot - first
        yield _Block(
            parents,
            slice(start, start + height * degree),
            (height, degree),
            tiles[first:stop, 0],
            border,
        )


def _columns(block: _Block, n_children: int, size: int) -> Tensor:
    """Returns the children of a block of parents one by one, [degree]."""
    lanes = torch.arange(size, device=block.children.device)
    columns = (block.children[:, None] * size + lanes).view(-1)
    if block.border < 0:
        return columns
    return columns[columns < n_children]


def _strips(block: _Block, n_children: int, size: int) -> Iterator[tuple[slice, slice | Tensor]]:
    """Yields parts of a block's columns and where their children are: blocks by number, or a slice
    for the smaller tile.
    """
    before = len(block.children) if block.border < 0 else block.border
    if before:
        yield slice(0, before * size), block.children[:before]
    if block.border < 0:
        return
    width = n_children % size
    at = before * size
    yield slice(at, at + width), slice(n_children - width, n_children)
    if before + 1 < len(block.children):
        yield slice(at + width, block.shape[1]), block.children[before + 1 :]


def _gathered(z: Tensor, block: _Block, size: int) -> Tensor:
    """Returns the columns of a block, [batch, degree]."""
    n_children = z.shape[1]
    whole = n_children // size * size
    parts = []
    for _, where in _strips(block, n_children, size):
        if isinstance(where, slice):
            parts.append(z[:, where])
        else:
            tiles = z[:, :whole].unflatten(1, (-1, size))
            parts.append(tiles.index_select(1, where).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _add_to(z: Tensor, messages: Tensor, block: _Block, size: int) -> None:
    """Adds the columns of a block, [batch, degree], to where they belong."""
    n_children = z.shape[1]
    whole = n_children // size * size
    for columns, where in _strips(block, n_children, size):
        if isinstance(where, slice):
            z[:, where] += messages[:, columns]
        else:
            tiles = z[:, :whole].unflatten(1, (-1, size))
            tiles.index_add_(1, where, messages[:, columns].unflatten(1, (-1, size)))


class _TileSum(Function):
    @staticmethod
    def forward(x: Tensor, values: Tensor, bias: Tensor, size: int, *wiring: Any) -> Tensor:
        if x.is_cuda:
            from ._gpu_tiles import products  # with Triton, which only CUDA builds of torch bring

            return products(x, values, bias, size, wiring[2], wiring[3], len(bias))
        dtype = torch.promote_types(x.dtype, torch.float32)
        z = bias.to(dtype).repeat(len(x), 1)
        for block in _blocks(x.shape[1], len(bias), size, wiring):
            messages = x[:, block.parents] @ values[block.values].view(block.shape)
            _add_to(z, messages.to(dtype), block, size)
        return z.to(x.dtype)

    @staticmethod
    def plain(x: Tensor, values: Tensor, bias: Tensor, size: int, *wiring: Tensor) -> Tensor:
        z = bias.expand(x.shape[0], -1)
        for block in _blocks(x.shape[1], bias.shape[0], size, wiring):
            messages = x[:, block.parents] @ values[block.values].view(block.shape)
            z = z.index_add(1, _columns(block, bias.shape[0], size), messages)
        return z

    @staticmethod
    def shape(x: Tensor, values: Tensor, bias: Tensor, size: int, *wiring: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], bias.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, values, _, ctx.size, *wiring = inputs
        ctx.save_for_backward(x, values, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dz,) = grads
        x, values, *wiring = ctx.saved_tensors
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = tile_input_gradient(dz, values, x.shape[1], ctx.size, wiring)
        if ctx.needs_input_grad[1]:
            dw = tile_weight_gradient(x, dz, values.shape[0], ctx.size, wiring)
        if ctx.needs_input_grad[2]:
            dbias = column_sums(dz)
        return dx, dw, dbias, *[None] * 6


class _TileInputGradient(Function):
    @staticmethod
    def forward(dz: Tensor, values: Tensor, n_parents: int, size: int, *wiring: Any) -> Tensor:
        if dz.is_cuda:
            from ._gpu_tiles import products

            return products(dz, values, None, size, wiring[0], wiring[1], n_parents)
        dx = dz.new_zeros(len(dz), n_parents)
        for block in _blocks(n_parents, dz.shape[1], size, wiring):
            matrix = values[block.values].view(block.shape)
            torch.mm(_gathered(dz, block, size), matrix.t(), out=dx[:, block.parents])
        return dx

    @staticmethod
    def plain(dz: Tensor, values: Tensor, n_parents: int, size: int, *wiring: Tensor) -> Tensor:
        n_children = dz.shape[1]
        dx = dz.new_zeros(dz.shape[0], n_parents)
        for block in _blocks(n_parents, n_children, size, wiring):
            received = dz.index_select(1, _columns(block, n_children, size))
            rows = torch.arange(block.parents.start, block.parents.stop, device=dz.device)
            dx = dx.index_add(1, rows, received @ values[block.values].view(block.shape).t())
        return dx

    @staticmethod
    def shape(dz: Tensor, values: Tensor, n_parents: int, size: int, *wiring: Tensor) -> Tensor:
        return dz.new_empty(dz.shape[0], n_parents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        dz, values, _, ctx.size, *wiring = inputs
        ctx.save_for_backward(dz, values, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (on_dx,) = grads
        dz, values, *wiring = ctx.saved_tensors
        zeros = dz.new_zeros(dz.shape[1])
        on_dz = tile_sum(on_dx, values, zeros, ctx.size, wiring)
        on_values = tile_weight_gradient(on_dx, dz, values.shape[0], ctx.size, wiring)
        return on_dz, on_values, *[None] * 7


class _TileWeightGradient(Function):
    @staticmethod
    def forward(x: Tensor, dz: Tensor, n_relations: int, size: int, *wiring: Any) -> Tensor:
        if x.is_cuda:
            from ._gpu_tiles import weight_gradient

            return weight_gradient(x, dz, n_relations, size, wiring[1], wiring[4])
        dw = x.new_empty(n_relations)
        for block in _blocks(x.shape[1], dz.shape[1], size, wiring):
            received = _gathered(dz, block, size)
            torch.mm(x[:, block.parents].t(), received, out=dw[block.values].view(block.shape))
        return dw

    @staticmethod
    def plain(x: Tensor, dz: Tensor, n_relations: int, size: int, *wiring: Tensor) -> Tensor:
        n_children = dz.shape[1]
        parts = [dz.new_zeros(0)]
        for block in _blocks(x.shape[1], n_children, size, wiring):
            received = dz.index_select(1, _columns(block, n_children, size))
            parts.append((x[:, block.parents].t() @ received).reshape(-1))
        return torch.cat(parts)

    @staticmethod
    def shape(x: Tensor, dz: Tensor, n_relations: int, size: int, *wiring: Tensor) -> Tensor:
        return x.new_empty(n_relations)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, dz, _, ctx.size, *wiring = inputs
        ctx.save_for_backward(x, dz, *wiring)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (on_dw,) = grads
        x, dz, *wiring = ctx.saved_tensors
        zeros = dz.new_zeros(dz.shape[1])
        on_x = tile_input_gradient(dz, on_dw, x.shape[1], ctx.size, wiring)
        on_dz = tile_sum(x, on_dw, zeros, ctx.size, wiring)
        return on_x, on_dz, *[None] * 7


_ops = torch.ops.grapnet
_WIRING = "int size, Tensor ptr, Tensor tiles, Tensor in_ptr, Tensor incoming, Tensor groups"

for function, name, given in (
    (_TileSum, "tile_sum", "Tensor x, Tensor values, Tensor bias"),
    (_TileInputGradient, "tile_input_gradient", "Tensor dz, Tensor values, SymInt n_parents"),
    (_TileWeightGradient, "tile_weight_gradient", "Tensor x, Tensor dz, SymInt n_relations"),
):
    register(function, name, f"{given}, {_WIRING}", "Tensor", device="CompositeExplicitAutograd")
