"""How modules with an opened weight run: what `core._opened` leaves to the backends.

A matrix of which relations are cut runs by the kernels of the sparse backend or by families, where
the measurements of `costs.json` expect that to be faster. A convolution whose relations form equal
blocks runs in groups, and one that has few relations left by the same kernels. Everything else runs
as the module's own forward pass, with the weight written out.

Plans are made with the commit, once per version of a weight. They are for a CPU; on a GPU a kernel
of the dense backend writes the weight out.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from grapnet._torch import (
    is_exporting,
    is_in_torch_dispatch_mode,
    let_sizes_vary,
    untraced,
)
from grapnet.core._opened import (
    CUT,
    FREE,
    FROZEN,
    Execution,
    Opened,
    is_watched,
    opened_of,
    plain_class,
    run_by,
)
from grapnet.core._transition import Topology

from . import _dense, _native, _operators
from ._changes import is_capturing
from ._convolution import Frame, Kernels, convolved
from ._costs import BATCHES, Shape, batch_class, precision
from ._dense import LARGE, is_live_on
from ._family import FamilyPlan, find_families
from ._manager import Key, fastest_that_runs
from ._plan import Plan, needs_plain_operations
from ._sparse import ByChildPlan, SparsePlan
from ._traced import tensors_in

RECTANGLE = "rectangle"
# cells from which a weight on a GPU pays for a call of the kernel that writes it: launches bound
# smaller ones, unless compiled code or a CUDA graph makes them
_LARGE_ON_DEVICE = 1 << 24
_DTYPES = (torch.float32, torch.float64, *_native.HALVES)
_CONVOLUTIONS: dict[Any, tuple[Callable[..., Tensor], int]] = {
    nn.Conv1d.forward: (F.conv1d, 1),
    nn.Conv2d.forward: (F.conv2d, 2),
    nn.Conv3d.forward: (F.conv3d, 3),
}
# What else than multiplications a convolution in groups costs, in multiplications, measured on a
# CPU: for every number that it reads or writes, for one that changes its place, and for a group.
_TOUCHED = 16
_MOVED = 24
_GROUP = 100_000
# What a sparse convolution costs, in multiplications of a dense one: for every place and relation,
# and for a call; it must be expected to take less of the time of a dense one than the last number.
_RELATION = 2.7
_SHIFTED = 20
_CALL = 8_000_000
_SHARE = 0.8
# How many times as fast a dense convolution is in half precision, where a CPU has instructions for
# it; a sparse one takes as long as in float32.
_HALVED = 2.2
# The least channels of a group, which kernels of one cell have fewer multiplications to pay for.
_LEAST_CHANNELS = 4
_LEAST_POINTWISE = 8


class OpenedExecution(Execution):
    """Runs opened weights by the backends of nets."""

    def write(self, opened: Opened, content: Tensor) -> Tensor | None:
        """Returns the whole tensor, written by a kernel; None where torch has to do it."""
        # In compiled code the number would be a constant.
        if not torch.compiler.is_compiling() and opened.pattern.n_cells < LARGE:
            return None
        if content.device.type in _dense.KEPT_ON:
            return _written_on_device(opened, content)
        if not _is_plain(content) or not _native.reads(content):
            return None
        return _filled(opened, opened.numbers(content))

    def prepare(self, module: nn.Module, opened: Opened, content: Tensor) -> None:
        """Makes the plans of a module, for all sizes of batches."""
        if content.device.type in _dense.KEPT_ON:
            for tensor in tensors_in(_layout_of(opened, content.device)):
                let_sizes_vary(tensor)
        if not content.is_cpu or content.dtype not in _DTYPES:
            return
        plain = plain_class(module)
        read = _dim_read(plain)
        if read is not None:
            plans = _matrix_plans(opened, read)
            precise = precision("cpu", content.dtype)
            for batch in BATCHES:
                for training in (False, True):
                    plans.choose((batch, training, precise))
            for tensor in tensors_in(plans.choices):
                let_sizes_vary(tensor)
        elif plain.forward in _CONVOLUTIONS and _groups_of(opened, module) is None:
            _kernels_of(opened)

    def forward_of(self, plain: type[nn.Module]) -> Callable[..., Any] | None:
        """Returns the forward pass of matrices and of convolutions."""
        read = _dim_read(plain)
        if read is not None:

            def multiply(module: Any, x: Tensor) -> Tensor:
                z = _multiplied(module, x, read) if x.is_cpu else None
                return plain.forward(module, x) if z is None else z

            return multiply
        if plain.forward in _CONVOLUTIONS:
            convolution, dims = _CONVOLUTIONS[plain.forward]

            def convolve(module: Any, x: Tensor) -> Tensor:
                z = _convolved(module, x, convolution, dims) if x.is_cpu else None
                return plain.forward(module, x) if z is None else z

            return convolve
        return None


def describe(
    module: nn.Module, name: str, batch: int = 256, *, training: bool = True
) -> tuple[str, str]:
    """Returns how a module runs with one of its tensors, and why.

    Args:
        module: a module of which the tensor may be opened.
        name: the name of the tensor there.
        batch: the number of samples; for a convolution, of positions.
        training: whether gradients are computed.
    """
    opened = opened_of(module, name)
    if opened is None:
        return "plain", "every relation exists"
    plain = plain_class(module)
    content = module._parameters[name]
    assert content is not None
    if name != "weight" or not content.is_cpu or content.dtype not in _DTYPES:
        return RECTANGLE, "other ways are for weights in floating point on a CPU"
    read = _dim_read(plain)
    if read is not None:
        key = batch_class(batch), training, precision("cpu", content.dtype)
        choice = _matrix_plans(opened, read).choose(key)
        return choice.name, choice.why
    if plain.forward not in _CONVOLUTIONS:
        return RECTANGLE, f"other ways are for matrices and convolutions, not {plain.__name__}"
    groups = _groups_of(opened, module)
    if groups is not None and groups.is_faster(batch):
        return "grouped", f"the relations form {groups.count} blocks"
    if not _is_simple(module):
        return RECTANGLE, "other ways are for convolutions without strides and groups"
    kernels = _kernels_of(opened)
    share = opened.numbers(content).numel() / opened.pattern.n_cells
    why = f"{share:.1%} of the kernels exist, at {batch} positions"
    precise = precision("cpu", content.dtype)
    if kernels is not None and _is_faster(kernels, batch, batch, precise):
        return "sparse", why
    return RECTANGLE, why


def _dim_read(plain: type[nn.Module]) -> int | None:
    """Returns the dimension of the weight that modules of a class sum over; None if the class is no
    matrix product.
    """
    if plain.forward is nn.Linear.forward:
        return 1
    forward = plain.forward
    # Hugging Face's Conv1D, which has the weight [in, out]
    if forward.__qualname__ == "Conv1D.forward" and forward.__module__.startswith("transformers."):
        return 0
    return None


def _is_plain(*tensors: Tensor) -> bool:
    """Returns whether kernels can run at once, with no trace or transform that needs plain
    operations.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or is_tracing():
        return False
    return not needs_plain_operations() and not _operators.is_watched(*tensors)


def _live(opened: Opened) -> np.ndarray:
    """Returns one bool per row of a tensor, [rows of the first dimension, others]."""
    live = opened.pattern.kinds.numpy() != CUT
    return live.reshape(opened.pattern.shape[0], -1)


def _written_on_device(opened: Opened, content: Tensor) -> Tensor | None:
    """Returns the whole tensor, written by the kernel of the dense backend on a GPU; None where
    torch has to do it.
    """
    if torch.compiler.is_compiling() or is_capturing(content):
        # made with the commit: neither a trace nor a CUDA graph can
        layout = opened.plans.get(("layout", content.device))
    elif opened.pattern.n_cells >= _LARGE_ON_DEVICE:
        layout = _layout_of(opened, content.device)
    else:
        return None
    if layout is None or is_exporting():
        return None
    shape = opened.shape
    return layout.rectangle(content.view(-1), 1, math.prod(shape), content.dtype).view(shape)


def _layout_of(opened: Opened, device: torch.device) -> Any:
    """Returns where the cells of the Parameter and the frozen ones are in the whole tensor."""
    key = ("layout", device)
    if key not in opened.plans:
        opened.plans[key] = None
        if opened.pattern.n_cells >= LARGE and is_live_on(device.type):
            from ._live import Cells, Layout  # with Triton, which only CUDA builds of torch bring

            kinds = opened.pattern.kinds.to(device).repeat_interleave(opened.pattern.width)
            layout = Layout(Cells.of((kinds == FREE).nonzero().view(-1).int(), len(kinds)))
            if len(opened.frozen_values):
                frozen_at = (kinds == FROZEN).nonzero().view(-1).int()
                layout = Layout(
                    layout.cells,
                    opened.frozen_values.to(device).view(-1),
                    Cells.of(frozen_at, len(kinds)),
                )
            opened.plans[key] = layout
    return opened.plans[key]


def _filled(opened: Opened, numbers: Tensor) -> Tensor:
    """Returns the whole tensor with the rows that exist, written by a compiled kernel."""
    rows = _rows_of(opened)
    if numbers.shape[1] == 1:
        numbers = numbers.squeeze(1)
    whole = _operators.fill(numbers, rows.ptr, rows.child, rows.n_children, transposed=False)
    return whole.view(opened.pattern.shape)


@untraced
def _rows_of(opened: Opened) -> Topology:
    """Returns the rows that exist as relations of the first dimension with all others."""
    if "rows" not in opened.plans:
        opened.plans["rows"] = _topology(_live(opened))
    return opened.plans["rows"]


def _topology(related: np.ndarray) -> Topology:
    """Returns the wiring of a matrix of bools, [parents, children]."""
    ptr = np.zeros(len(related) + 1, dtype=np.int32)
    np.cumsum(related.sum(1), out=ptr[1:])
    # numpy finds the positions in a flat array several times as fast as in a matrix
    child = np.flatnonzero(related) % max(related.shape[1], 1)
    wired = torch.from_numpy(ptr), torch.from_numpy(child.astype(np.int32))
    return Topology(*wired, related.shape[1])


@dataclass(frozen=True, eq=False)
class Choice:
    """What runs a matrix at a batch size."""

    name: str
    why: str
    plan: Plan | None  # None: the rectangle


class MatrixPlans:
    """The plans of one opened matrix.

    Args:
        opened: the weight.
        read: the dimension that has the parents: 1 in an `nn.Linear`, whose values come in the
            order of their children.
    """

    def __init__(self, opened: Opened, read: int) -> None:
        self._opened = weakref.ref(opened)
        self._read = read
        self._made: dict[str, Plan] = {}
        self.choices: dict[Key, Choice] = {}

    @property
    def _live(self) -> np.ndarray:
        """One bool per cell of the weight."""
        opened = self._opened()
        assert opened is not None
        live = _live(opened)
        if opened.pattern.width > 1:
            live = np.repeat(live, opened.pattern.width, axis=1)
        return live.reshape(opened.pattern.shape)

    @cached_property
    def _topology(self) -> Topology:
        """The relations by parent."""
        live = self._live
        if self._read == 1:
            live = np.ascontiguousarray(live.T)
        return _topology(live)

    @cached_property
    def _shape(self) -> Shape:
        return Shape.of(self._topology)

    def choose(self, key: Key) -> Choice:
        """Returns what runs at one of the measured batch sizes."""
        if key not in self.choices:
            batch, training, precise = key
            backend, why = fastest_that_runs(
                self._shape,
                torch.float32,
                _BACKENDS,
                precision=precise,
                batch=batch,
                training=training,
            )
            self.choices[key] = Choice(
                backend.name if backend.name in ("sparse", "family") else RECTANGLE,
                f"{why.in_words(batch)} ({why.source})",
                self._plan(backend.name),
            )
        return self.choices[key]

    def _plan(self, name: str) -> Plan | None:
        if name not in self._made:
            if name == "sparse":
                self._made[name] = self._sparse()
            elif name == "family":
                self._made[name] = self._family()
        return self._made.get(name)

    def _sparse(self) -> Plan:
        topology = self._topology
        if self._read == 0:
            return SparsePlan(topology, _native.order_by_child(topology), feature_major=False)
        return ByChildPlan.of(topology, _topology(self._live))

    def _family(self) -> Plan:
        topology = self._topology
        groups = find_families(topology)
        if self._read == 1:
            # where each relation, in the order of the parents, is in that of the children
            live = self._live
            place = np.cumsum(live).reshape(live.shape) - 1
            moved = torch.from_numpy(place.T[live.T].astype(np.int32))
            groups = [replace(one, positions=moved[one.positions.long()]) for one in groups]
        return FamilyPlan(topology, groups).row_major()


_BACKENDS = ("dense", "sparse", "family")


@untraced
def _matrix_plans(opened: Opened, read: int) -> MatrixPlans:
    if ("matrix", read) not in opened.plans:
        opened.plans["matrix", read] = MatrixPlans(opened, read)
    return opened.plans["matrix", read]


@untraced
def _choose(opened: Opened, read: int, key: Key) -> Choice:
    return _matrix_plans(opened, read).choose(key)


def _multiplied(module: Any, x: Tensor, read: int) -> Tensor | None:
    """Returns the result of a module whose weight is an opened matrix; None to run the module's own
    forward pass.
    """
    content = module._parameters["weight"]
    opened = opened_of(module, "weight")
    assert opened is not None
    if not _reads_alike(x, content) or is_watched(content):
        return None
    parents = opened.shape[read]
    children = opened.shape[1 - read]
    if x.dim() == 0 or x.shape[-1] != parents or x.numel() == 0:
        return None
    batch = math.prod(x.shape[:-1])
    key = batch_class(batch), torch.is_grad_enabled(), precision("cpu", content.dtype)
    plans = opened.plans.get(("matrix", read))
    choice = None
    if plans is not None:
        choice = plans.choices.get(key)
    if choice is None:
        if torch.compiler.is_compiling():
            return None
        choice = _choose(opened, read, key)
    if choice.plan is None:
        return None
    bias = module.bias
    if bias is None:
        bias = content.new_zeros(children)
    elif bias.dtype != content.dtype or not bias.is_cpu:
        return None
    z = choice.plan(x.reshape(batch, parents), opened.numbers(content).view(-1), bias)
    return z.view(*x.shape[:-1], children)


def _reads_alike(x: Tensor, content: Tensor) -> bool:
    """Returns whether plans of a CPU run these tensors, with nothing that wants to see plain
    operations.

    Under autocast x can be in another precision than a weight in float32.
    """
    if not (x.is_cpu and content.is_cpu) or is_exporting():
        return False
    if x.dtype not in _DTYPES or content.dtype not in _DTYPES:
        return False
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in _native.HALVES
    if cast and (content.dtype != torch.float32 or x.dtype == torch.float64):
        return False
    if not cast and x.dtype != content.dtype:
        return False
    if torch.compiler.is_compiling():
        return True
    return _is_plain(x, content)


@dataclass(frozen=True, eq=False)
class Groups:
    """Blocks of one size in the relations of a convolution.

    Attributes:
        count: the number of blocks.
        weight_shape: [channels written, channels read by each, *kernel].
        n_read: the number of channels that are read.
        reads: the channels in the order of the blocks, and the way back; None if they are in it.
        writes: the same of the channels that are written.
    """

    count: int
    weight_shape: tuple[int, ...]
    n_read: int
    reads: tuple[Tensor, Tensor] | None
    writes: tuple[Tensor, Tensor] | None

    def is_faster(self, positions: int) -> bool:
        """Returns whether to run in groups, for so many numbers in every channel that is
        written.
        """
        written, read, *kernel = self.weight_shape
        cells = math.prod(kernel)
        least = _LEAST_CHANNELS if cells > 1 else _LEAST_POINTWISE
        is_depthwise = cells > 1 and read == 1 and written == self.count
        if min(read, written // self.count) < least and not is_depthwise:
            return False
        multiplications = written * self.n_read * cells
        grouped = written * read * cells + _TOUCHED * (self.n_read + written)
        if self.reads is not None:
            grouped += _MOVED * self.n_read
        if self.writes is not None:
            grouped += _MOVED * written
        return positions * (multiplications - grouped) > _GROUP * self.count


@untraced
def _groups_of(opened: Opened, module: Any) -> Groups | None:
    """Returns the blocks in the weight of a convolution; None if its relations form none.

    The relations of one that has groups itself are not cut one by one.
    """
    if module.groups != 1 or module.padding_mode != "zeros":
        return None
    if "groups" not in opened.plans:
        opened.plans["groups"] = _find_groups(opened)
    return opened.plans["groups"]


def _find_groups(opened: Opened) -> Groups | None:
    live = _live(opened)
    shape = opened.pattern.shape
    written, given = shape[:2]
    if live.shape[1] != given:
        return None  # single cells of kernels are cut
    degrees = live.sum(1)
    if degrees.min() == 0 or degrees.min() != degrees.max():
        return None
    each = int(degrees[0])
    # the channels that each one reads, [written, each]
    lists = np.nonzero(live)[1].reshape(written, each)
    blocks, block = np.unique(lists, axis=0, return_inverse=True)
    block = block.reshape(-1)
    sizes = np.bincount(block)
    count = len(blocks)
    reads = blocks.reshape(-1)
    is_partition = len(reads) == given and len(np.unique(reads)) == given
    if count == 1 or not is_partition or sizes.min() != sizes.max():
        return None
    writes = np.argsort(block, kind="stable")
    return Groups(
        count,
        (written, each, *shape[2:]),
        given,
        _order(reads),
        _order(writes),
    )


def _order(places: np.ndarray) -> tuple[Tensor, Tensor] | None:
    if np.array_equal(places, np.arange(len(places))):
        return None
    return torch.from_numpy(places), torch.from_numpy(np.argsort(places))


def _convolved(
    module: Any, x: Tensor, convolution: Callable[..., Tensor], dims: int
) -> Tensor | None:
    """Returns the result of a convolution with an opened weight; None to run the module's own
    forward pass.
    """
    content = module._parameters["weight"]
    opened = opened_of(module, "weight")
    assert opened is not None
    if not (x.is_cpu and content.is_cpu) or is_watched(content):
        return None
    z = _in_groups(module, x, opened, content, convolution, dims)
    if z is None and _is_plain(x, content) and _reads_alike(x, content):
        z = _by_kernels(module, x, opened, content, convolution, dims)
    return z


def _in_groups(
    module: Any,
    x: Tensor,
    opened: Opened,
    content: Tensor,
    convolution: Callable[..., Tensor],
    dims: int,
) -> Tensor | None:
    """Returns the result of a convolution whose relations form blocks; None if that is not the
    fastest way.
    """
    groups = opened.plans.get("groups")
    if groups is None and "groups" not in opened.plans and not torch.compiler.is_compiling():
        groups = _groups_of(opened, module)
    channels = x.dim() - dims - 1
    if groups is None or channels not in (0, 1) or x.shape[channels] != groups.n_read:
        return None
    positions = x.numel() // groups.n_read // math.prod(module.stride)
    if not groups.is_faster(positions):
        return None
    weight = opened.numbers(content).view(groups.weight_shape)
    bias = module.bias
    if groups.reads is not None:
        x = _moved(x, channels, groups.reads)
    if groups.writes is not None:
        weight = _moved(weight, 0, groups.writes)
        bias = None if bias is None else bias.index_select(0, groups.writes[0])
    settings = (module.stride, module.padding, module.dilation, groups.count)
    z = convolution(x, weight, bias, *settings)
    if groups.writes is not None:
        z = _moved(z, channels, groups.writes[::-1])
    return z


def _by_kernels(
    module: Any,
    x: Tensor,
    opened: Opened,
    content: Tensor,
    convolution: Callable[..., Tensor],
    dims: int,
) -> Tensor | None:
    """Returns the result of a convolution of which few relations are left; None if that is not the
    fastest way.
    """
    if x.dim() != dims + 2 or x.numel() == 0 or not _is_simple(module):
        return None
    kernels = _kernels_of(opened)
    bias = module.bias
    if kernels is None or x.shape[1] != kernels.shape[1]:
        return None
    if bias is not None and (bias.dtype != content.dtype or not bias.is_cpu):
        return None
    frame = Frame.of(x, kernels.shape[2:], module.padding, module.dilation)
    written = x.shape[0] * math.prod(frame.written)
    precise = precision("cpu", content.dtype)
    if min(frame.written) < 1 or not _is_faster(kernels, written, frame.places, precise):
        return None
    settings = (module.stride, module.padding, module.dilation)
    if torch.is_autocast_enabled("cpu"):
        x = x.to(torch.get_autocast_dtype("cpu"))

    def plain(x: Tensor, numbers: Tensor, bias: Tensor | None) -> Tensor:
        weight = _filled(opened, numbers).to(x.dtype)
        return convolution(x, weight, None if bias is None else bias.to(x.dtype), *settings)

    return convolved(x, opened.numbers(content), bias, kernels, frame, plain)


def _is_simple(module: Any) -> bool:
    """Returns whether a convolution has the settings that its kernels run with."""
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return False
    return all(step == 1 for step in module.stride)


@untraced
def _kernels_of(opened: Opened) -> Kernels | None:
    """Returns the relations of a convolution cell by cell; None if so many are left that the
    rectangle is faster, or if single cells are cut.
    """
    if "kernels" not in opened.plans:
        shape = opened.pattern.shape
        live = _live(opened)
        is_sparse = _RELATION * live.mean() < _SHARE
        kernels = None
        if is_sparse and live.shape[1] == shape[1] and live.any() and not _native.missing:
            kernels = Kernels.of(live, shape)
        opened.plans["kernels"] = kernels
    return opened.plans["kernels"]


def _is_faster(kernels: Kernels, written: int, places: int, precise: str) -> bool:
    """Returns whether kernels run faster one by one than all together.

    Args:
        kernels: those that exist.
        written: how many numbers a channel of the result has.
        places: how many are computed for it, in the padding, too.
        precise: the precision of products.
    """
    touched = _SHIFTED * sum(kernels.shape[:2])
    sparse = places * (_RELATION * kernels.n_cells + touched) + _CALL
    if precise in ("bfloat16", "float16"):
        sparse *= _HALVED
    return sparse < _SHARE * written * math.prod(kernels.shape)


def _moved(x: Tensor, dim: int, order: Sequence[Tensor]) -> Tensor:
    """Returns a tensor with the entries of a dimension in another order."""
    if not _is_plain(x):
        return x.index_select(dim, order[0])
    return _Moved.apply(x, dim, *order)


class _Moved(Function):
    """Another order of a dimension; its gradient is gathered, not added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, there: Tensor, back: Tensor) -> Tensor:
        ctx.order = dim, back, there
        return x.index_select(dim, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim, back, there = ctx.order
        if needs_plain_operations(*gradients):
            return gradients[0].index_select(dim, back), None, None, None
        return _Moved.apply(gradients[0], dim, back, there), None, None, None


run_by(OpenedExecution())
