"""The sparse backend: compiled kernels that gather over the relations, vectorised over the
batch.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from grapnet.core._change import IndexMap
from grapnet.core._transition import Topology

from . import kernels, native
from .plan import Plan, in_transform
from .reference import ReferencePlan

# Carrying an order looks up every relation of the owners that lose one; building it again touches
# every relation.
_LOOKUPS = 1 / 16
_DTYPES = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


@dataclass(frozen=True)
class Sparse:
    """Computes the sum relation by relation: worth it when few of the possible relations exist."""

    name: ClassVar[str] = "sparse"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; none when it can."""
        device = topology.child.device.type
        if device not in _DTYPES:
            return [
                f"the weights are on {device}, the kernels are built for {' and '.join(_DTYPES)}"
            ]
        lacking = (
            native.missing
            if device == "cpu"
            else ""
            if find_spec("triton")
            else "Triton is not installed"
        )
        refusals = [lacking] if lacking else []
        if dtype not in _DTYPES[device]:
            known = ", ".join(map(str, _DTYPES[device]))
            refusals.append(
                f"the weights are {dtype}, the kernels on {device} are built for {known}"
            )
        return refusals

    def prepare(self, topology: Topology) -> Plan:
        """Sorts the relations by child."""
        if topology.child.device.type == "cuda":
            from .gpu import GpuPlan  # with Triton, which only CUDA builds of torch bring

            return GpuPlan(topology)
        return SparsePlan(topology, native.order_by_child(topology))


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """The gather for one topology; under autocast it computes in the dtype of the weights.

    Attributes:
        topology: the relations by parent.
        order: the relations by child.
        feature_major: whether the output comes as the transpose of a contiguous [n_children,
            batch].
    """

    topology: Topology
    order: native.ByChild
    feature_major: bool = True

    def __post_init__(self) -> None:
        native.require_readable(self.topology.ptr, self.topology.child, *self.order)

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if x.dtype != values.dtype and torch.is_autocast_enabled("cpu"):
            x = x.to(values.dtype)
        topology, row_major = self.topology, not self.feature_major
        if in_transform():
            return ReferencePlan(topology)(x, values, bias)
        wiring = topology.ptr, topology.child, self.order.in_ptr, self.order.entries
        if torch.is_grad_enabled() or kernels.is_watched(x, values, bias):
            return kernels.relation_sum(x, values, bias, *wiring, row_major)
        return native.sum_over_own_wiring(x, values, bias, wiring, row_major)

    def row_major(self) -> "SparsePlan":
        """Returns a plan over the same arrays that writes its output row by row."""
        return replace(self, feature_major=False)

    def moved(self, topology: Topology, index: IndexMap) -> "SparsePlan | None":
        """Returns the plan after relations came and went while no row of either layer moved.

        Only a few removals are carried: None when building the plan again is the better way.
        """
        if len(index.inserted) or len(index.removed) > self.topology.n_relations * _LOOKUPS:
            return None
        owners = self.topology.parents_at(index.removed).unique().long()
        if int(self.topology.degrees[owners].sum()) > self.topology.n_relations * _LOOKUPS:
            return None
        order = native.order_without(self.order, self.topology, index.removed)
        return replace(self, topology=topology, order=order)
