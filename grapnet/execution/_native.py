"""The compiled extension: loaded if present, and called only with memory that it can read.

Activations are [batch, n], laid out row by row or feature by feature (`x.t().is_contiguous()`);
anything else is copied first. The type and length of every tensor are checked before its address
leaves Python; a kernel checks the indices in it, and refuses a wiring that leads out of a buffer.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._index_map import LARGE, room
from grapnet.core._transition import Topology

_NARROW = 1 << 16  # parents and slots below this fit together into 32 bits
_DTYPES = (torch.float32, torch.float64)
# the numbers that the kernels know them by; activations can have all of these types
_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
HALVES = (torch.bfloat16, torch.float16)
_POSITIONS = (torch.int32,)
_ENTRIES = (torch.int32, torch.int64)

DAMAGED = (
    "the wiring is damaged: it names relations or nodes that do not exist, so nothing was computed."
    " Something has written into it, as to_empty() does; load the net again: gn.load(path)"
)

_native: ModuleType | None = None
_variant = ""  # of the kernels, as chosen by use_variant
missing = ""  # why the kernels cannot run; empty when they can

try:
    _native = importlib.import_module("grapnet.execution._kernels")
except ImportError as error:
    missing = (
        f"the compiled kernels are not installed ({error}); install a C++ compiler, then grapnet"
        " again"
    )


@cache
def warn_missing() -> None:
    """Warns, once in a process, that a sparse transition runs slowly because the kernels are
    missing.
    """
    warnings.warn(f"a sparse transition runs slowly: {missing}", stacklevel=2)


def _limit_variant() -> None:
    """Limits the kernels to the vectors that torch may use, `$ATEN_CPU_CAPABILITY`."""
    limit = torch.backends.cpu.get_cpu_capability().lower()
    if limit == "default":
        limit = "baseline"
    if limit in variants():
        use_variant(limit)


def variants() -> list[str]:
    """Returns the variants of the kernels that this machine can run, the fastest first."""
    return _loaded().variants()


def use_variant(name: str) -> None:
    """Runs one variant from now on, in the whole process: for tests and measurements."""
    global _variant
    _loaded().use_variant(name)
    _variant = name


def variant() -> str:
    """Returns the variant of the kernels that runs."""
    return _variant or variants()[0]


def path() -> Path | None:
    """Returns the file of the compiled extension; None where it is missing."""
    if _native is None or _native.__file__ is None:
        return None
    return Path(_native.__file__)


class ByChild(NamedTuple):
    """The relations of a topology in the order of their children, and of the parents within a
    child.
    """

    in_ptr: Tensor  # [n_children + 1] int32
    entries: Tensor  # [n_relations] parent and slot, 16 + 16 bits (int32) or 32 + 32 (int64)


def order_by_child(topology: Topology) -> ByChild:
    """Sorts the relations of a topology by child."""
    _check_wiring(topology.ptr, topology.child)
    # of no parents the largest degree is 0
    most = int(topology.degrees.amax()) if topology.n_parents else 0
    wide = max(topology.n_parents, most) > _NARROW
    in_ptr = topology.ptr.new_empty(topology.n_children + 1)
    nothing = in_ptr.new_empty(0)
    entries = room(nothing.long() if wide else nothing, topology.n_relations)
    sound = _loaded().order_by_child(
        *_addressed(topology), wide, in_ptr.data_ptr(), entries.data_ptr()
    )
    _require(sound)
    return ByChild(in_ptr, entries)


def order_without(order: ByChild, topology: Topology, removed: Tensor) -> ByChild:
    """Returns the order of a topology after few of its relations are gone.

    Args:
        order: the order of `topology`.
        topology: the wiring from which the relations go.
        removed: their positions, int32, ascending.
    """
    _check_wiring(topology.ptr, topology.child)
    _check_order(*order, topology.n_children, topology.n_relations)
    _check("removed", removed, _POSITIONS, len(removed))
    if len(removed) > len(order.entries):
        raise PlanError(f"{len(removed)} of {len(order.entries)} relations cannot go")
    in_ptr = torch.empty_like(order.in_ptr)
    entries = room(order.entries, len(order.entries) - len(removed))
    old = (order.in_ptr.data_ptr(), order.entries.data_ptr(), order.entries.dtype == torch.int64)
    gone = (removed.data_ptr(), len(removed))
    new = (in_ptr.data_ptr(), entries.data_ptr())
    _require(_loaded().order_without(*_addressed(topology), *old, *gone, *new))
    return ByChild(in_ptr, entries)


def family_hashes(ptr: Tensor, child: Tensor) -> Tensor:
    """Returns a 64-bit hash of the set of children of every parent, [n_parents] int64."""
    n_parents, n_relations = _check_wiring(ptr, child)
    hashes = torch.empty(n_parents, dtype=torch.int64, device="cpu")
    sound = _loaded().family_hashes(
        ptr.data_ptr(),
        child.data_ptr(),
        n_parents,
        n_relations,
        hashes.data_ptr(),
        torch.get_num_threads(),
    )
    _require(sound)
    return hashes


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which activations of a type are summed up, and in which the kernels read
    weights and biases and write their gradients.
    """
    return torch.float32 if dtype in HALVES else dtype


def reads(values: Tensor) -> bool:
    """Returns whether the kernels are installed and can read numbers like these."""
    return not missing and values.is_cpu and values.dtype in _DTYPES


def largest_of_rows(values: Tensor, ptr: Tensor, wanted: Tensor, least: float) -> Tensor:
    """Returns the ascending int32 positions of the largest values of every row; ties keep their
    order.

    Args:
        values: the rows, one after the other.
        ptr: where each row begins, and where the last one ends, [rows + 1] int32.
        wanted: the number per row, [rows]; there may be fewer.
        least: smaller values and NaN are ignored.
    """
    rows = ptr.numel() - 1
    _check("ptr", ptr, _POSITIONS, max(0, rows) + 1)
    _check("values", values, _DTYPES, int(ptr[-1]))
    _check("wanted", wanted, _ENTRIES, rows)
    starts = ptr.new_zeros(rows + 1)  # where the positions of each row have their room
    starts[1:] = torch.minimum(wanted, ptr.diff()).clamp_(min=0).cumsum(0)
    # rows that overlap could ask for more room than there are values
    positions = ptr.new_empty(min(max(0, int(starts[-1])), len(values)))
    found = _loaded().largest_of_rows(
        values.data_ptr(),
        ptr.data_ptr(),
        starts.data_ptr(),
        positions.data_ptr(),
        least,
        rows,
        len(values),
        len(positions),
        values.dtype == torch.float64,
        torch.get_num_threads(),
    )
    _require(found >= 0)
    return positions[:found]


def sum_over_own_wiring(
    x: Tensor,
    values: Tensor,
    bias: Tensor,
    wiring: tuple[Tensor, ...],
    row_major: bool,
    by_child: bool = False,
) -> Tensor:
    """Returns the sums of the children, [batch, n_children], row by row or feature by feature.

    The caller has called `require_readable` with the wiring: a plan once, others before each call.

    Args:
        x: the activations, [batch, n_parents].
        values: one per relation; like the bias in the type of x, or in that of its sums.
        bias: one per child.
        wiring: the relations by parent, and their order by child.
        row_major: whether the result is laid out row by row.
        by_child: whether the values are in the order by child; for more samples than a few.
    """
    ptr, child, in_ptr, entries = wiring
    n_parents = ptr.shape[0] - 1
    n_relations = child.shape[0]
    n_children = in_ptr.shape[0] - 1
    dtype = sums_dtype(x.dtype)
    if values.dtype != dtype or bias.dtype != dtype:
        values = _widened(values, x.dtype)
        bias = _widened(bias, x.dtype)
    if entries.shape[0] != n_relations:
        require_readable(ptr, child, in_ptr, entries)
    if not values.is_contiguous() or not bias.is_contiguous():
        values = values.contiguous()
        bias = bias.contiguous()
    fits = values.shape == (n_relations,) and bias.shape == (n_children,)
    if not (fits and values.is_cpu and bias.is_cpu and values.dtype == bias.dtype == dtype):
        _check("values", values, (dtype,), n_relations)
        _check("bias", bias, (dtype,), n_children)
    x = _matrix("x", x, n_parents)
    batch = x.shape[0]
    z = _reused_activations(x, batch, n_children, row_major)
    sound = _loaded().sum(
        x.data_ptr(),
        not x.is_contiguous(),
        values.data_ptr(),
        bias.data_ptr(),
        ptr.data_ptr(),
        child.data_ptr(),
        in_ptr.data_ptr(),
        entries.data_ptr(),
        entries.dtype == torch.int64,
        z.data_ptr(),
        not row_major,
        batch,
        n_parents,
        n_children,
        n_relations,
        _NUMBERS[x.dtype],
        torch.get_num_threads(),
        by_child,
    )
    if not sound:
        raise PlanError(DAMAGED)
    return z


def sum_by_child(
    x: Tensor,
    values: Tensor,
    bias: Tensor,
    ptr: Tensor,
    in_ptr: Tensor,
    parent: Tensor,
    row_major: bool,
) -> Tensor:
    """Returns what `sum_over_own_wiring` does for values in the order of their children.

    Args:
        x: the activations, [batch, n_parents].
        values: one per relation.
        bias: one per child.
        ptr: where the relations of each parent begin.
        in_ptr: where those of each child begin.
        parent: the parents in the order of the children, [n_relations] int32.
        row_major: whether the result is laid out row by row.
    """
    n_children, n_relations = _check_wiring(in_ptr, parent)
    n_parents = ptr.shape[0] - 1
    dtype = sums_dtype(x.dtype)
    values = _widened(values, x.dtype).contiguous()
    bias = _widened(bias, x.dtype).contiguous()
    _check("values", values, (dtype,), n_relations)
    _check("bias", bias, (dtype,), n_children)
    x = _matrix("x", x, n_parents)
    batch = x.shape[0]
    z = _reused_activations(x, batch, n_children, row_major)
    # In the opposite wiring, from the children to their parents, it is the gradient of the input.
    layouts = (False, is_by_feature(x), not row_major)
    sizes = (batch, n_children, n_parents)
    _run_gradients(None, x, values, bias, in_ptr, parent, z, None, None, layouts, sizes)
    return z


class Shifted(NamedTuple):
    """Channels that are read from several places, one after the other: the features of a kernel
    that moves over an image. Feature c · n + s begins at place c · stride + shifts[s].
    """

    numbers: Tensor  # one dimension
    shifts: Tensor  # [n] int32
    stride: int
    batch: int  # how many numbers a feature has


def sum_of_shifted(
    x: Shifted, values: Tensor, bias: Tensor | None, ptr: Tensor, child: Tensor
) -> Tensor:
    """Returns the sums over the children of every parent, [n_parents, batch].

    Args:
        x: the features, one per child.
        values: one per relation.
        bias: one per parent; None for zeros.
        ptr: where the relations of each parent begin.
        child: the child of every relation.
    """
    n_parents, n_relations = _check_wiring(ptr, child)
    dtype = sums_dtype(x.numbers.dtype)
    values = _widened(values, x.numbers.dtype).contiguous()
    _check("values", values, (dtype,), n_relations)
    if bias is not None:
        bias = _widened(bias, x.numbers.dtype).contiguous()
        _check("bias", bias, (dtype,), n_parents)
    z = room(x.numbers.new_empty(0, x.batch), n_parents)
    _run_shifted(x, None, values, bias, ptr, child, z, None)
    return z


def weights_of_shifted(x: Shifted, dz: Tensor, ptr: Tensor, child: Tensor) -> Tensor:
    """Returns the gradients of the values of `sum_of_shifted` for those of its result, in the type
    of its sums.
    """
    n_parents, n_relations = _check_wiring(ptr, child)
    dz = dz.contiguous()
    _check("dz", dz.view(-1), (x.numbers.dtype,), n_parents * x.batch)
    dw = room(dz.new_empty(0, dtype=sums_dtype(dz.dtype)), n_relations)
    _run_shifted(x, dz, None, None, ptr, child, None, dw)
    return dw


def _run_shifted(
    x: Shifted,
    dz: Tensor | None,
    values: Tensor | None,
    bias: Tensor | None,
    ptr: Tensor,
    child: Tensor,
    z: Tensor | None,
    dw: Tensor | None,
) -> None:
    _check("x", x.numbers, tuple(_NUMBERS), x.numbers.numel())
    _check("shifts", x.shifts, _POSITIONS, x.shifts.numel())
    channels = 1
    if x.stride > 0:
        channels = x.numbers.numel() // x.stride
    n_children = channels * x.shifts.numel()
    dbias = x.shifts.new_empty(
        n_children if dw is not None else 0, dtype=sums_dtype(x.numbers.dtype)
    )
    layouts = (True, True, True)
    sizes = (x.batch, ptr.shape[0] - 1, n_children)
    shifts = (x.shifts.data_ptr(), x.shifts.numel(), x.stride, x.numbers.numel())
    _run_gradients(dz, x.numbers, values, bias, ptr, child, z, dw, dbias, layouts, sizes, shifts)


def _run_gradients(
    x: Tensor | None,
    dz: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    ptr: Tensor,
    child: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    dbias: Tensor | None,
    layouts: tuple[bool, bool, bool],
    sizes: tuple[int, int, int],
    shifts: tuple[int, ...] = (),
) -> None:
    """Writes dx, which starts from the bias, where values are given, and dw and dbias where x is.

    Args:
        x, dz, values, bias, ptr, child, dx, dw, dbias: as in `gradients`.
        layouts: whether x, dz and dx are laid out feature by feature.
        sizes: the numbers of samples, parents and children.
        shifts: the address and number of the shifts of `Shifted`, its stride, and its size.
    """
    sound = _loaded().gradients(
        _address(x),
        layouts[0],
        dz.data_ptr(),
        layouts[1],
        _address(values),
        _address(bias),
        ptr.data_ptr(),
        child.data_ptr(),
        _address(dx),
        layouts[2],
        _address(dw),
        _address(dbias),
        values is not None,
        x is not None,
        *sizes,
        child.shape[0],
        _NUMBERS[dz.dtype],
        torch.get_num_threads(),
        *shifts,
    )
    _require(sound)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def gradients(
    x: Tensor | None,
    dz: Tensor,
    values: Tensor | None,
    ptr: Tensor,
    child: Tensor,
    in_ptr: Tensor,
    row_major: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx if values are given, and dw and dbias, in the type of their sums, if x is given;
    the others are empty.
    """
    n_parents, n_relations = _check_wiring(ptr, child)
    n_children = in_ptr.numel() - 1
    dz = _matrix("dz", dz, n_children)
    batch = dz.shape[0]
    sums = sums_dtype(dz.dtype)
    dx = dz.new_empty(0)
    dw = dbias = nothing = dz.new_empty(0, dtype=sums)
    if values is not None:
        values = _widened(values, dz.dtype).contiguous()
        _check("values", values, (sums,), n_relations)
        dx = _reused_activations(dz, batch, n_parents, row_major)
    if x is not None:
        x = _matrix("x", x, n_parents)
        if x.shape[0] != batch or x.dtype != dz.dtype:
            raise PlanError(f"x holds {x.shape[0]} samples of {x.dtype}, dz {batch} of {dz.dtype}")
        dw = room(nothing, n_relations)
        dbias = nothing.new_empty(n_children)
        if batch == 0:
            dw.zero_()
            dbias.zero_()
    layouts = (x is not None and is_by_feature(x), is_by_feature(dz), not row_major)
    sizes = (batch, n_parents, n_children)
    _run_gradients(x, dz, values, None, ptr, child, dx, dw, dbias, layouts, sizes)
    return dx, dw, dbias


def fill(values: Tensor, ptr: Tensor, child: Tensor, n_children: int, transposed: bool) -> Tensor:
    """Returns the rectangle with the values in their cells and zeros elsewhere.

    Values of several numbers, [n_relations, width], give a rectangle with a third dimension.
    """
    _, n_relations = _check_wiring(ptr, child)
    values = values.contiguous()
    _check("values", values.view(-1), (values.dtype,), n_relations * _width(values, 1))
    shape = (*rectangle_shape(ptr, n_children, transposed), *values.shape[1:])
    rectangle = room(values.new_empty(0, *shape[1:]), shape[0])
    _touch_rectangle(_loaded().fill, values, ptr, child, rectangle, transposed)
    return rectangle


def pick(rectangle: Tensor, ptr: Tensor, child: Tensor, transposed: bool) -> Tensor:
    """Returns the values of the relations from a rectangle."""
    n_parents, n_relations = _check_wiring(ptr, child)
    if (
        rectangle.dim() not in (2, 3)
        or rectangle.shape[1 if transposed else 0] != n_parents
        or not rectangle.is_cpu
    ):
        given = f"{list(rectangle.shape)} on {rectangle.device}"
        raise PlanError(f"the rectangle is {given}, the kernel needs {n_parents} parents on cpu")
    values = room(rectangle.new_empty(0, *rectangle.shape[2:]), n_relations)
    if rectangle.dim() == 2 and is_by_feature(rectangle):
        rectangle = rectangle.t()
        transposed = not transposed
    _touch_rectangle(_loaded().pick, values, ptr, child, rectangle.contiguous(), transposed)
    return values


def rectangle_shape(ptr: Tensor, n_children: int, transposed: bool) -> tuple[int, int]:
    """Returns the rows and columns of a matrix: one row per parent, or per child when
    transposed.
    """
    n_parents = ptr.shape[0] - 1
    if transposed:
        return n_children, n_parents
    return n_parents, n_children


def _touch_rectangle(
    kernel: Callable[..., bool],
    values: Tensor,
    ptr: Tensor,
    child: Tensor,
    rectangle: Tensor,
    transposed: bool,
) -> None:
    n_parents, n_children = rectangle.shape[:2]
    if transposed:
        n_children, n_parents = rectangle.shape[:2]
    size = values.element_size() * _width(rectangle, 2)
    if size not in (2, 4, 8) and (transposed or rectangle.dim() == 2):
        raise PlanError(f"numbers of type {values.dtype} are not 2, 4 or 8 bytes long")
    sound = kernel(
        values.data_ptr(),
        ptr.data_ptr(),
        child.data_ptr(),
        n_parents,
        n_children,
        values.shape[0],
        rectangle.data_ptr(),
        transposed,
        size,
        torch.get_num_threads(),
    )
    _require(sound)


def _width(tensor: Tensor, dim: int) -> int:
    """Returns how many numbers the dimensions from `dim` on have together."""
    return math.prod(tensor.shape[dim:])


def _loaded() -> ModuleType:
    if _native is None:
        raise PlanError(missing)
    return _native


def _require(sound: bool) -> None:
    """Raises PlanError when a kernel has found an index that leads out of a buffer."""
    if not sound:
        raise PlanError(DAMAGED)


def _addressed(topology: Topology) -> tuple[int, int, int, int, int]:
    return (
        topology.ptr.data_ptr(),
        topology.child.data_ptr(),
        topology.n_parents,
        topology.n_children,
        topology.n_relations,
    )


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], length: int) -> None:
    """Raises unless a 1-D tensor can be handed to a kernel."""
    if (
        tensor.shape == (length,)
        and tensor.dtype in dtypes
        and tensor.is_cpu
        and tensor.is_contiguous()
    ):
        return
    wanted = f"[{length}] {' or '.join(map(str, dtypes))} without gaps on cpu"
    raise PlanError(
        f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, the kernel needs"
        f" {wanted}"
    )


def _check_wiring(ptr: Tensor, child: Tensor) -> tuple[int, int]:
    """Returns the numbers of parents and relations; raises if a kernel cannot read them."""
    n_parents = ptr.numel() - 1
    n_relations = child.numel()
    _check("ptr", ptr, _POSITIONS, max(0, n_parents) + 1)
    _check("child", child, _POSITIONS, n_relations)
    return n_parents, n_relations


def require_readable(ptr: Tensor, child: Tensor, in_ptr: Tensor, entries: Tensor) -> None:
    """Raises PlanError unless a kernel can read the tensors of a wiring and of its order."""
    _, n_relations = _check_wiring(ptr, child)
    _check_order(in_ptr, entries, max(0, in_ptr.numel() - 1), n_relations)


def _check_order(in_ptr: Tensor, entries: Tensor, n_children: int, n_relations: int) -> None:
    _check("in_ptr", in_ptr, _POSITIONS, n_children + 1)
    _check("entries", entries, _ENTRIES, n_relations)


def is_by_feature(matrix: Tensor) -> bool:
    """Returns whether a matrix is the transpose of a contiguous one."""
    return not matrix.is_contiguous() and matrix.t().is_contiguous()


def _widened(numbers: Tensor, activations: torch.dtype) -> Tensor:
    """Returns weights or biases that have the type of activations in that of their sums."""
    if numbers.dtype == activations and activations in HALVES:
        return numbers.float()
    return numbers


def _matrix(name: str, matrix: Tensor, width: int) -> Tensor:
    """Returns a [batch, width] matrix without gaps, or raises when a kernel cannot read it."""
    reads = matrix.dtype in _NUMBERS and matrix.is_cpu
    if matrix.dim() != 2 or matrix.shape[1] != width or not reads:
        given = f"{list(matrix.shape)} {matrix.dtype} on {matrix.device}"
        wanted = f"[batch, {width}] {' or '.join(map(str, _NUMBERS))} on cpu"
        raise PlanError(f"{name} is {given}, the kernel needs {wanted}")
    if matrix.is_contiguous() or matrix.t().is_contiguous():
        return matrix
    return matrix.contiguous()


def empty_activations(like: Tensor, batch: int, width: int, row_major: bool) -> Tensor:
    """Returns memory for activations [batch, width] in one of the two layouts."""
    if row_major:
        return like.new_empty(batch, width)
    return like.new_empty(width, batch).t()


def _reused_activations(like: Tensor, batch: int, width: int, row_major: bool) -> Tensor:
    """Returns memory that an earlier step used: touching fresh pages costs as much as a sparse
    sum.
    """
    if batch * width * like.element_size() < LARGE:
        return empty_activations(like, batch, width, row_major)
    if row_major:
        return room(like.new_empty(0, width), batch)
    return room(like.new_empty(0, batch), width).t()


if _native is not None:
    _limit_variant()
