"""The rectangle of the dense backend on a GPU: kept between forward passes, and written from the
values.

Triton kernels write and read it, and a forward pass without gradients writes it only after a
change. `torch.compile` sees common operations instead, from which it makes kernels of its own, and
which it joins with the cast to the precision of autocast.
"""

import threading
import weakref
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from grapnet._torch import current_graph_task_id
from grapnet.core._coordinates import Vector
from grapnet.core._errors import PlanError
from grapnet.core._index_map import IndexMap
from grapnet.core._transition import Topology, Transition

from . import _native
from ._changes import State, count_steps, is_capturing, state_of
from ._operators import is_watched
from ._plan import needs_plain_operations
from ._reference import require_wiring

# cells of a block that a kernel writes; bit maps have whole blocks
BLOCK = 2048
# Cells up to which plain operations write the matrix of a pass that is neither compiled nor
# recorded: launches bound it, and theirs take less time than those of the kernels. On an H200,
# forward and backward of 768×3072 took 0.60 ms with them and 0.84 ms with the kernels.
SMALL = 1 << 22
# of the kernels
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# the kernels, where Triton is
_kernels: Any = None
if find_spec("triton"):
    _kernels = import_module("._gpu_live", __package__)


class Cells(NamedTuple):
    """Where coordinates are in a rectangle whose cells are numbered row by row."""

    cell_of: Tensor  # [n] int32, the cell of each coordinate
    bits: Tensor  # [blocks · BLOCK / 32] int32, one bit a cell: whether it has a coordinate
    before: Tensor  # as many int32: the coordinates in front of each 32 cells
    # [n] int32, the coordinate of each of these cells in turn; None if they come in this order
    order: Tensor | None

    @classmethod
    def of(cls, cell_of: Tensor, n_cells: int) -> "Cells":
        """Returns the cells of coordinates, [n] int32."""
        order = None
        if bool((cell_of[1:] <= cell_of[:-1]).any()):
            ascending, order = cell_of.sort()
            order = order.int()
            if bool((ascending[1:] == ascending[:-1]).any()):
                raise PlanError(_native.DAMAGED)
        return cls._marked(cell_of, n_cells, order)

    @classmethod
    def of_wiring(cls, topology: Topology) -> "Cells":
        """Returns the cells of all relations; raises PlanError if the wiring is damaged.

        On a GPU one kernel looks at the wiring and finds the cells, and the host waits once.
        """
        n_cells = topology.n_parents * topology.n_children
        wiring = (topology.ptr, topology.child)
        if not topology.child.is_cuda or topology.ptr.shape[0] == 0 or is_watched(*wiring):
            require_wiring(topology)
            return cls.of(_cell_of(topology), n_cells)
        # Triton launches on the present device.
        with torch.cuda.device(topology.child.device):
            cell_of, bits, counts, (is_damaged, is_unordered, set_bits) = _kernels.chart_cells(
                *wiring, topology.n_children, _words(n_cells)
            )
        # As many bits as relations: no pair has two of them.
        if is_damaged or set_bits != topology.n_relations:
            raise PlanError(_native.DAMAGED)
        order = None
        if is_unordered:
            order = cell_of.argsort().int()
        return cls(cell_of, bits, _before(counts), order)

    def after_cut(self, index: IndexMap, n_cells: int) -> "Cells":
        """Returns the cells of what a cut leaves of ascending coordinates."""
        cell_of = index.carry(self.cell_of)
        if not cell_of.is_cuda:
            return self._marked(cell_of, n_cells, None)
        bits = self.bits.clone()
        with torch.cuda.device(cell_of.device):
            counts = _kernels.flip_cells(index.take(self.cell_of), bits)
        return Cells(cell_of, bits, _before(counts), None)

    @classmethod
    def _marked(cls, cell_of: Tensor, n_cells: int, order: Tensor | None) -> "Cells":
        if cell_of.is_cuda:
            bits = torch.zeros(_words(n_cells), dtype=torch.int32, device=cell_of.device)
            with torch.cuda.device(cell_of.device):
                counts = _kernels.flip_cells(cell_of, bits)
        else:
            bits, counts = _mark_cells(cell_of, _words(n_cells))
        return cls(cell_of, bits, _before(counts), order)


def _words(n_cells: int) -> int:
    """Returns how many words the bit map of a rectangle has."""
    return -(-n_cells // BLOCK) * (BLOCK // 32)


def _before(counts: Tensor) -> Tensor:
    """Returns the sum of the counts in front of each."""
    return counts.cumsum(0, dtype=torch.int32) - counts


def _cell_of(topology: Topology) -> Tensor:
    """Returns the cell of every relation, [n_relations] int32."""
    return topology.parents().mul_(topology.n_children).add_(topology.child)


def _mark_cells(cell_of: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Returns the bit map of cells, and how many of each word are in it, in operations of torch."""
    there = torch.zeros(words * 32, dtype=torch.bool, device=cell_of.device)
    there[cell_of.long()] = True
    there = there.view(words, 32)
    bit = torch.ones((), dtype=torch.int64, device=cell_of.device) << _ascending(32, there)
    return (there * bit).sum(1).int(), there.sum(1, dtype=torch.int32)


def _has_kernels(tensor: Tensor) -> bool:
    """Returns whether the kernels read such a tensor."""
    return tensor.is_cuda and tensor.dtype in DTYPES


def _ascending(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _plain_rectangle(
    values: Tensor,
    cell_of: Tensor,
    frozen: Tensor | None,
    frozen_cell_of: Tensor | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the coordinates as a rectangle, [rows, columns], by operations that torch can
    differentiate and batch in every way.
    """
    values = values.to(dtype)
    rectangle = values.new_zeros(rows * columns).index_add(0, cell_of, values)
    if frozen is not None and frozen_cell_of is not None:
        rectangle = rectangle.index_add(0, frozen_cell_of, frozen.to(dtype))
    return rectangle.view(rows, columns)


def _plain_values(rectangle: Tensor, cell_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the trainable coordinates of a rectangle, [n], by such operations."""
    return rectangle.reshape(-1).index_select(0, cell_of).to(dtype)


def _spread(
    rectangle: Tensor, values: Tensor, bits: Tensor, before: Tensor, order: Tensor | None
) -> Tensor:
    """Returns the cells of a rectangle, [n], with values in those that a bit map marks.

    A compiler makes one kernel of it, which reads the bit map and the values.
    """
    if values.shape[0] == 0:
        return rectangle
    cell = torch.arange(rectangle.shape[0], dtype=torch.int32, device=values.device)
    word = bits.index_select(0, cell >> 5)
    bit = cell & 31
    there = ((word >> bit) & 1) != 0
    lower = ~(torch.full_like(bit, -1) << bit)
    place = before.index_select(0, cell >> 5) + _bits_set(word & lower)
    # Behind the last value, the place of a cell that has none would be outside.
    place = torch.where(there, place, 0)
    if order is not None:
        place = order.index_select(0, place)
    return torch.where(there, values.index_select(0, place).to(rectangle.dtype), rectangle)


def _bits_set(words: Tensor) -> Tensor:
    """Returns how many bits are set in each number, int32 and not negative."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 63


def _rectangle(
    values: Tensor,
    cell_of: Tensor,
    bits: Tensor,
    before: Tensor,
    order: Tensor | None,
    frozen: Tensor | None,
    frozen_bits: Tensor | None,
    frozen_before: Tensor | None,
    frozen_order: Tensor | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the coordinates as a rectangle, [rows, columns], 0 where there is no relation; its
    gradient reads `cell_of`.
    """
    rectangle = torch.zeros(rows * columns, dtype=dtype, device=values.device)
    rectangle = _spread(rectangle, values, bits, before, order)
    if frozen is not None and frozen_bits is not None and frozen_before is not None:
        rectangle = _spread(rectangle, frozen, frozen_bits, frozen_before, frozen_order)
    return rectangle.view(rows, columns)


# On its own, the gradient of the gather would be a scatter.
rectangle_operator: Any
if _kernels is not None:
    # A compiler looks into it.
    rectangle_operator = torch.library.triton_op("grapnet::rectangle", _rectangle, mutates_args=())
else:
    rectangle_operator = torch.library.custom_op("grapnet::rectangle", _rectangle, mutates_args=())
    rectangle_operator.register_fake(_rectangle)


def _keep_cells(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, cell_of = inputs[:2]
    ctx.save_for_backward(cell_of)
    ctx.dtype = values.dtype


def _gradient_of_rectangle(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (cell_of,) = ctx.saved_tensors
    return _plain_values(gradient, cell_of, ctx.dtype), *[None] * 11


rectangle_operator.register_autograd(_gradient_of_rectangle, setup_context=_keep_cells)


class Kept:
    """A rectangle in memory, and the state of the coordinates that it was written from.

    Attributes:
        tensor: the rectangle.
        thread: the thread whose forward passes read it.
        state: what `state_of` returned before it was written; None if that is not known.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.thread = threading.get_ident()
        self.state: State = None
        self._event: Any = None
        # the streams that may still read what it holds
        self._streams: list[Any] = []
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._streams.append(torch.cuda.current_stream(tensor.device))

    def holds(self, state: State) -> bool:
        """Returns whether it was written from coordinates in this state."""
        return state is not None and state == self.state

    def begin_write(self, state: State) -> None:
        """Lets the present stream wait until no other stream reads what it is to replace."""
        is_same = self.holds(state)
        # An interrupted write leaves the content unknown.
        self.state = None
        if self._event is None:
            return
        stream = self._use_stream()
        if not is_same:
            for other in self._streams:
                if other != stream:
                    stream.wait_stream(other)
            self._streams = [stream]

    def end_write(self, state: State) -> None:
        """Notes that the write is queued, and from what."""
        self.state = state
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.tensor.device))

    def wait(self) -> None:
        """Lets the present stream wait for the last write."""
        if self._event is not None:
            self._use_stream().wait_event(self._event)

    def _use_stream(self) -> Any:
        stream = torch.cuda.current_stream(self.tensor.device)
        if stream not in self._streams:
            self._streams.append(stream)
            self.tensor.record_stream(stream)
        return stream


class LivePlan:
    """Some relations are missing: their cells are zero.

    Called with all values it writes a rectangle in every pass. A net runs the plan that `reading`
    returns, which keeps one.
    """

    def __init__(self, topology: Topology, cells: Cells | None = None) -> None:
        self.topology = topology
        self.cells = Cells.of_wiring(topology) if cells is None else cells
        # held by the nets that run it, so that its memory leaves with the last of them
        self._reading: weakref.ref[StoredPlan] | None = None

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return _multiply(x, values, bias, Layout(self.cells))

    def moved(self, topology: Topology, index: IndexMap) -> "LivePlan | None":
        """Returns the plan after a cut, whose relations keep their cells; None after anything
        else.
        """
        if index.n_born or self.cells.order is not None:
            return None
        return LivePlan(topology, self.cells.after_cut(index, self.n_cells))

    @property
    def n_cells(self) -> int:
        """The number of cells of the rectangle."""
        return self.topology.n_parents * self.topology.n_children

    def reading(self, store: Transition, vector: Vector) -> "StoredPlan":
        """Returns the plan that reads the coordinates of a store; one for each version of them."""
        reading = self._present()
        if reading is None or reading.vector is not vector:
            reading = StoredPlan(self, store, vector)
            self._reading = weakref.ref(reading)
        return reading

    @property
    def kept_bytes(self) -> int:
        """The memory of the rectangles that are kept."""
        return sum(kept.tensor.nbytes for kept in self._kept())

    def refresh(self) -> None:
        """Lets the next forward pass write the rectangles that are kept."""
        for kept in self._kept():
            kept.state = None

    def _present(self) -> "StoredPlan | None":
        return None if self._reading is None else self._reading()

    def _kept(self) -> list[Kept]:
        reading = self._present()
        return [] if reading is None else list(reading.kept)


class Layout(NamedTuple):
    """Where the coordinates of a rectangle come from."""

    cells: Cells  # of the trainable coordinates
    frozen: Tensor | None = None
    frozen_cells: Cells | None = None

    def rectangle(self, values: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a rectangle of its own memory; differentiable."""
        if torch.compiler.is_compiling():
            held = (None, None, None)
            if self.frozen_cells is not None:
                _, *held = self.frozen_cells
            sizes = (rows, columns, dtype)
            return rectangle_operator(values, *self.cells, self.frozen, *held, *sizes)
        if needs_plain_operations() or is_watched(values):
            return self.plain(values, rows, columns, dtype)
        if torch.is_grad_enabled() and values.requires_grad:
            return _Written.apply(values, self, rows, columns, dtype)
        return self.written(values, rows, columns, dtype)

    def plain(self, values: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a rectangle by operations that torch can differentiate and batch in every way."""
        held = None
        if self.frozen_cells is not None:
            held = self.frozen_cells.cell_of
        return _plain_rectangle(values, self.cells.cell_of, self.frozen, held, rows, columns, dtype)

    def written(self, values: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a rectangle without gradients."""
        rectangle = torch.empty(rows, columns, dtype=dtype, device=values.device)
        self.write(rectangle, values)
        return rectangle

    def write(self, rectangle: Tensor, values: Tensor) -> None:
        """Writes every cell of a rectangle."""
        values = values.detach().contiguous()
        if not _has_kernels(values):
            rows, columns = rectangle.shape
            rectangle.copy_(self.plain(values, rows, columns, rectangle.dtype))
            return
        _, *cells = self.cells
        held: list[Tensor | None] = [None, None, None]
        if self.frozen_cells is not None:
            _, *held = self.frozen_cells
        # Triton launches on the present device.
        with torch.cuda.device(values.device):
            _kernels.write(rectangle, values, *cells, self.frozen, *held, BLOCK)

    def read(self, rectangle: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the trainable coordinates of a rectangle, without gradients."""
        cell_of = self.cells.cell_of
        if not _has_kernels(rectangle):
            return _plain_values(rectangle, cell_of, dtype)
        values = torch.empty(cell_of.shape[0], dtype=dtype, device=rectangle.device)
        with torch.cuda.device(rectangle.device):
            _kernels.read(values, rectangle.contiguous(), cell_of)
        return values


class StoredPlan:
    """Reads the coordinates of a store, the frozen ones included, and keeps a rectangle for every
    dtype that the product runs in.

    A pass with gradients always writes it. One without gradients does where the coordinates may
    have changed: torch counts most writes, and a hook the steps of optimizers, whose fused kernels
    torch does not count. What a CUDA graph replays is not counted at all: coordinates that took
    part in one are always written. Values from elsewhere, as `torch.func.functional_call` brings
    them, and passes that a CUDA graph records get a rectangle of their own.

    Attributes:
        vector: the version of the coordinates.
        kept: the rectangles.
    """

    # The net passes the trainable coordinates alone.
    values_shape = None

    def __init__(self, plan: LivePlan, store: Transition, vector: Vector) -> None:
        self.vector = vector
        self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._plan = plan
        self._store = store
        self._frozen = None
        self._frozen_cells = None
        if vector.order is None:
            self._cells = plan.cells
        else:
            cell_of = plan.cells.cell_of
            is_free = torch.ones_like(cell_of, dtype=torch.bool)
            frozen_at = vector.frozen_at.long()
            is_free[frozen_at] = False
            self._cells = Cells.of(cell_of[is_free], plan.n_cells)
            self._frozen = vector.frozen_values.view(-1)
            self._frozen_cells = Cells.of(cell_of[frozen_at], plan.n_cells)
        # by dtype: of the thread that trains, and of every thread that only reads
        self._shared: dict[torch.dtype, Kept] = {}
        self._own = threading.local()

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _multiply(x, values, bias, self._layout(self._frozen))
        if self.vector.order is not None and values.shape[0] == self._plan.topology.n_relations:
            # All values, as callers of `net.execution.plan` pass them.
            return self._plan(x, values, bias)
        layout = self._layout(self._frozen_now())
        parameter = self.vector.parameter
        if not _can_keep(x, values, bias) or values.data_ptr() != parameter.data_ptr():
            return _multiply(x, values, bias, layout)
        if is_capturing(values):
            # Its replays may change the coordinates, and nothing reports them.
            parameter.grapnet_is_unreported = True  # pyright: ignore[reportAttributeAccessIssue]
            return _multiply(x, values, bias, layout)
        if self._plan.n_cells <= SMALL:
            return _multiply(x, values, bias, layout, plain=True)
        source = Source(parameter, layout.frozen, state_of(parameter, layout.frozen))
        matrix = self._current(values, layout, source.state, (x.shape[1], bias.shape[0]))
        x = x.to(matrix.dtype)
        bias = bias.to(matrix.dtype)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, values, bias)):
            return _Product.apply(x, values, bias, layout, matrix, source)
        return torch.addmm(bias, x, matrix)

    def _layout(self, frozen: Tensor | None) -> Layout:
        return Layout(self._cells, frozen, self._frozen_cells)

    def _frozen_now(self) -> Tensor | None:
        """Returns the frozen coordinates, None if there are none: those of the store, where another
        thread has not put the next version in place.
        """
        if self._frozen is None:
            return None
        # In this order: a commit replaces `vector` before it touches the buffer.
        frozen = self._store.frozen_values.view(-1)
        if self._store.vector is not self.vector:
            return self._frozen
        return frozen

    def _current(
        self,
        values: Tensor,
        layout: Layout,
        state: State,
        shape: tuple[int, int],
    ) -> Tensor:
        """Returns the rectangle of this thread, written where that may be needed."""
        training = torch.is_grad_enabled()
        kept = self._find(_product_dtype(values), shape, values.device, training)
        if training or not kept.holds(state):
            kept.begin_write(state)
            layout.write(kept.tensor, values)
            kept.end_write(state)
        else:
            kept.wait()
        return kept.tensor

    def _find(
        self, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, training: bool
    ) -> Kept:
        shared = self._shared.get(dtype)
        if shared is None:
            shared = self._shared.setdefault(dtype, self._make(dtype, shape, device))
        thread = threading.get_ident()
        if training:
            # Checkpoints run again in a thread of the backward pass.
            if current_graph_task_id() == -1:
                shared.thread = thread
            return shared
        if shared.thread == thread:
            return shared
        own: dict[torch.dtype, Kept] | None = getattr(self._own, "kept", None)
        if own is None:
            own = self._own.kept = {}
        if dtype not in own:
            own[dtype] = self._make(dtype, shape, device)
        return own[dtype]

    def _make(self, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> Kept:
        count_steps(self.vector.parameter)
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            kept = Kept(torch.empty(shape, dtype=dtype, device=device))
        self.kept.add(kept)
        return kept


class Source(NamedTuple):
    """The coordinates that a kept rectangle was written from, for the backward pass."""

    parameter: nn.Parameter
    frozen: Tensor | None
    state: State  # at the forward pass

    def is_unchanged(self) -> bool:
        """Returns whether nothing reports a write since the forward pass."""
        return self.state is None or self.state == state_of(self.parameter, self.frozen)


def _can_keep(x: Tensor, values: Tensor, bias: Tensor) -> bool:
    """Returns whether a pass may read a rectangle in memory: no transform, trace or mode is at
    work.
    """
    return not (needs_plain_operations() or is_watched(x, values, bias))


def _product_dtype(values: Tensor) -> torch.dtype:
    """Returns the dtype that a product with these values runs in, under autocast the lower one."""
    device = values.device.type
    if values.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return values.dtype


class _Written(Function):
    """A rectangle that is written once; the operator without the cost of calling one."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, layout: Layout, rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.layout = layout
        ctx.dtype = values.dtype
        return layout.written(values, rows, columns, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _values_of(gradients[0], ctx.layout, ctx.dtype), None, None, None, None


def _values_of(rectangle: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Returns the trainable coordinates of a rectangle, in a backward pass."""
    # A second derivative needs operations that have one.
    if torch.is_grad_enabled() or needs_plain_operations(rectangle):
        return _plain_values(rectangle, layout.cells.cell_of, dtype)
    return layout.read(rectangle, dtype)


def _multiply(
    x: Tensor, values: Tensor, bias: Tensor, layout: Layout, *, plain: bool = False
) -> Tensor:
    """Returns the product with a rectangle that is written for it."""
    dtype = _product_dtype(values)
    write = layout.plain if plain else layout.rectangle
    matrix = write(values, x.shape[1], bias.shape[0], dtype)
    return torch.addmm(bias.to(dtype), x.to(dtype), matrix)


class _Product(Function):
    """The product with a kept rectangle; with a second derivative, the first runs operators that
    have one.

    The values are saved so that autograd raises where they are modified before the backward pass,
    as it does for the weight of an `nn.Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor,
        layout: Layout,
        matrix: Tensor,
        source: Source,
    ) -> Tensor:
        needs_x, needs_values = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_values else None, values if needs_x else None)
        ctx.matrix = None
        if needs_x:
            ctx.matrix = matrix
        ctx.layout = layout
        ctx.source = source
        ctx.dtype = values.dtype
        return torch.addmm(bias, x, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dz,) = gradients
        x, values = ctx.saved_tensors
        needs_x, needs_values, needs_bias = ctx.needs_input_grad[:3]
        dx = dvalues = dbias = None
        if needs_x:
            dx = dz @ _Product._matrix(ctx, values, dz).t()
        if needs_values:
            dmatrix = x.t() @ dz  # [n_parents, n_children]
            dvalues = _values_of(dmatrix, ctx.layout, ctx.dtype)
        if needs_bias:
            dbias = dz.sum(0)
        return dx, dvalues, dbias, None, None, None

    @staticmethod
    def _matrix(ctx: Any, values: Tensor, dz: Tensor) -> Tensor:
        """Returns the rectangle of the forward pass."""
        matrix: Tensor = ctx.matrix
        layout: Layout = ctx.layout
        source: Source = ctx.source
        rows, columns = matrix.shape
        is_unchanged = source.is_unchanged()
        # Hooks on saved tensors return other memory.
        if not is_unchanged and values.data_ptr() == source.parameter.data_ptr():
            raise RuntimeError(
                "the weights that this backward pass needs were written after the forward pass, for"
                " example by optimizer.step(). Run the backward pass first, or the forward pass"
                " again"
            )
        if torch.is_grad_enabled() or needs_plain_operations(dz):
            return layout.plain(values, rows, columns, matrix.dtype)
        if is_unchanged:
            return matrix
        return layout.written(values, rows, columns, matrix.dtype)
