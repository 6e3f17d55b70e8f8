"""Dense: the live values written into a rectangle, and one matrix product."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from grapnet.core._transition import Topology

from . import _native, _operators
from ._plan import Plan, sized
from ._reference import require_wiring

# children up to which a matrix with one row per child is faster than one with one row per parent
NARROW = 16
# relations from which compiled kernels, which cost some microseconds to call, write a rectangle
LARGE = 1 << 15
# devices on which a rectangle is kept between forward passes
KEPT_ON = {"cuda"}


@dataclass(frozen=True)
class Dense:
    """Computes the whole rectangle; a full transition is a view of its values and costs what
    `nn.Linear` costs.
    """

    most_cells: int = 2**28  # of a rectangle that has to be written

    name: ClassVar[str] = "dense"
    # absent relations are cells of zero, and 0 · ∞ is NaN
    finite_only: ClassVar[bool] = True

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Refuses a rectangle that would not be worth its memory."""
        cells = topology.n_parents * topology.n_children
        limit = min(self.most_cells, 2**31 - 1)  # cells are counted in int32
        if cells <= limit or topology.n_relations == cells:
            return []
        return [f"the matrix would hold {cells:,} cells (limit {limit:,})"]

    def prepare(self, topology: Topology) -> Plan:
        """Returns the plan that suits the shape."""
        narrow = topology.n_children <= NARROW
        if topology.is_full:
            return FullPlan(topology, narrow)
        if is_live_on(topology.child.device.type):
            from ._live import LivePlan  # with Triton, which only CUDA builds of torch bring

            return LivePlan(topology)
        return RectanglePlan(topology, narrow)


def is_live_on(device: str) -> bool:
    """Returns whether rectangles on a kind of device are written by the kernels of `_live`."""
    return device in KEPT_ON and (device != "cuda" or find_spec("triton") is not None)


class FullPlan:
    """Every parent leads to every child: the values are the matrix."""

    def __init__(self, topology: Topology, narrow: bool) -> None:
        self._sizes = sized(topology.n_parents, topology.n_children, device=topology.child.device)
        self._narrow = narrow

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self._sizes.shape[:2]

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        matrix = values if values.dim() == 2 else values.view(self.values_shape)
        if self._narrow:
            return linear(x, matrix.t().contiguous(), bias)
        return torch.addmm(bias, x, matrix)


class RectanglePlan:
    """Some relations are missing: their cells are zero. Compiled kernels write a large rectangle
    without an index.
    """

    def __init__(self, topology: Topology, narrow: bool) -> None:
        self.topology = topology
        self._narrow = narrow
        shape = (topology.n_parents, topology.n_children)
        # one row per child when there are few, otherwise one per parent
        if narrow:
            shape = shape[::-1]
        self._sizes = sized(*shape, device=topology.child.device)
        large = topology.n_relations >= LARGE and topology.child.device.type == "cpu"
        self._cells = None if large and not _native.missing else self._find_cells()

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        rows, columns, _ = self._sizes.shape
        if self._cells is None:
            topology = self.topology
            n_children = rows if self._narrow else columns
            matrix = _operators.fill(values, topology.ptr, topology.child, n_children, self._narrow)
        else:
            zeros = values.new_zeros(rows * columns)
            matrix = zeros.index_add(0, self._cells, values).view(rows, columns)
        if self._narrow:
            return linear(x, matrix, bias)
        return torch.addmm(bias, x, matrix)

    def _find_cells(self) -> Tensor:
        """Returns the cell of each relation in the matrix, [n_relations] int32."""
        if not self.topology.ptr.is_cpu:
            require_wiring(self.topology)
        parents = self.topology.parents()
        children = self.topology.child
        if self._narrow:
            return parents.add_(children, alpha=self.topology.n_parents)
        return parents.mul_(self.topology.n_children).add_(children)


class MatrixPlan:
    """The form for torch.export: common operations alone write the values into a matrix, with zeros
    for absent relations, and multiply once.
    """

    def __init__(self, topology: Topology) -> None:
        self._shape = topology.n_parents, topology.n_children
        # None: the values of a full transition are the matrix
        self._cells = None
        if not topology.is_full:
            # int64, as ONNX has it
            self._cells = topology.parents().long() * topology.n_children + topology.child

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if self._cells is not None:
            rows, columns = self._shape
            values = values.new_zeros(rows * columns).index_put((self._cells,), values)
        return torch.addmm(bias, x, values.view(self._shape))
