"""The form of a net for torch.export: one matrix per transition, in common operations."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grapnet._torch import disable_current_modes
from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology

if TYPE_CHECKING:
    from ._manager import Plans, Step


class MatrixPlan:
    """Writes the live values into a matrix with zeros for absent relations, and multiplies once."""

    def __init__(self, topology: Topology) -> None:
        self._shape = topology.n_parents, topology.n_children
        # int64, as ONNX has it; the values of a full transition are the matrix
        self._cells = (
            None
            if topology.is_full
            else topology.parents().long() * topology.n_children + topology.child
        )

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        if self._cells is not None:
            rows, columns = self._shape
            values = values.new_zeros(rows * columns).index_put((self._cells,), values)
        return torch.addmm(bias, x, values.view(self._shape))


def exported_steps(plans: "Plans") -> "list[Step]":
    """Returns the steps of a forward pass that is being exported, whichever backends run the net.

    Raises:
        PlanError: the export is strict; torch then shows it inside an error of its own.
    """
    if torch.compiler.is_dynamo_compiling():
        raise PlanError("a net cannot be exported with strict=True; omit it, or export a snapshot")
    # The relations as they are, not as the trace shows them.
    with disable_current_modes():
        made = [MatrixPlan(topology) for topology in plans.topologies]
    return plans.steps(made, training=True)
