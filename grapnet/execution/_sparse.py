"""The sparse backend: compiled kernels that gather over the relations, vectorised over the
batch.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._index_map import IndexMap
from grapnet.core._transition import Topology

from . import _native, _operators
from ._plan import Plan, kernel_refusals, needs_plain_operations
from ._reference import ReferencePlan

# Carrying an order looks up every relation of the owners that lose one; building it again touches
# every relation.
_LOOKUPS = 1 / 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Sparse:
    """Computes the sum relation by relation; fast if few of the possible relations exist."""

    name: ClassVar[str] = "sparse"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; empty if it can."""
        refusals = kernel_refusals(topology, dtype, dict.fromkeys(("cpu", "cuda"), _DTYPES))
        if topology.child.is_cpu and _native.missing:
            refusals.append(_native.missing)
        return refusals

    def prepare(self, topology: Topology) -> Plan:
        """Sorts the relations by child."""
        if topology.child.device.type == "cuda":
            from ._gpu import GpuPlan  # with Triton, which only CUDA builds of torch bring

            return GpuPlan.of(topology)
        return SparsePlan(topology, _native.order_by_child(topology))


@dataclass(frozen=True, eq=False)
class ByChildPlan:
    """The gather for one topology whose values come in the order of their children."""

    orders: _operators.Orders

    @classmethod
    def of(cls, topology: Topology, opposite: Topology) -> "ByChildPlan":
        """Returns the plan for the relations by parent and for those by child, both in order."""
        return cls(_operators.Orders.of(_wiring(topology), _wiring(opposite)))

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        x = _as_read(x, values)
        return _operators.sum_by_child(x, values, bias, self.orders, row_major=True)


def _as_read(x: Tensor, values: Tensor) -> Tensor:
    """Returns activations in the dtype in which `nn.Linear` would read them.

    Under autocast that is the lower precision. The weights keep theirs: the kernels convert what
    they read, and a rounded copy of the weights would cost time and digits.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        if values.dtype != torch.float32 or dtype not in _native.HALVES:
            dtype = values.dtype
        return x.to(dtype)
    if x.dtype != values.dtype:
        raise PlanError(f"x is {x.dtype}, the weights are {values.dtype}")
    return x


def _wiring(topology: Topology) -> tuple[Tensor, ...]:
    order = _native.order_by_child(topology)
    _native.require_readable(topology.ptr, topology.child, *order)
    return topology.ptr, topology.child, *order


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """The gather for one topology; under autocast it reads and writes activations in the lower
    precision, and sums up in the dtype of the weights.

    Attributes:
        topology: the relations by parent.
        order: the relations by child.
        feature_major: whether the output is the transpose of a contiguous [n_children, batch].
    """

    topology: Topology
    order: _native.ByChild
    feature_major: bool = True

    def __post_init__(self) -> None:
        _native.require_readable(self.topology.ptr, self.topology.child, *self.order)

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        x = _as_read(x, values)
        topology = self.topology
        row_major = not self.feature_major
        if needs_plain_operations():
            return ReferencePlan(topology)(x, values, bias).to(x.dtype)
        wiring = topology.ptr, topology.child, self.order.in_ptr, self.order.entries
        if torch.is_grad_enabled() or _operators.is_watched(x, values, bias):
            return _operators.relation_sum(x, values, bias, wiring, row_major)
        return _native.sum_over_own_wiring(x, values, bias, wiring, row_major)

    def row_major(self) -> "SparsePlan":
        """Returns a plan over the same arrays that writes its output row by row."""
        return replace(self, feature_major=False)

    def moved(self, topology: Topology, index: IndexMap) -> "SparsePlan | None":
        """Returns the plan after relations changed while no row of either layer moved.

        Carries only a few removals; returns None if building the plan again is faster.
        """
        if len(index.inserted) or len(index.removed) > self.topology.n_relations * _LOOKUPS:
            return None
        owners = self.topology.parents_at(index.removed).unique().long()
        if int(self.topology.degrees[owners].sum()) > self.topology.n_relations * _LOOKUPS:
            return None
        order = _native.order_without(self.order, self.topology, index.removed)
        return replace(self, topology=topology, order=order)
