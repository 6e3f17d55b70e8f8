"""What torch.export sees of a net: one matrix a transition, by operations that every runtime
has.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology

from .attention import Attention
from .plans import Plans, Step


def is_exporting() -> bool:
    """Says whether torch.export is at work; `torch.compiler.is_exporting` says so of torch.compile
    too, up to 2.11.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)  # torch has it from 2.7 on


class MatrixPlan:
    """Writes the live values into a matrix that is zero where no relation is, and multiplies
    once.
    """

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


def exported_steps(plans: Plans) -> list[Step]:
    """Returns the steps of a forward pass that is being exported, whichever backends run the net.

    Raises:
        PlanError: a transition runs with attention, or the export is strict; torch then shows it
            inside an error of its own.
    """
    if torch.compiler.is_dynamo_compiling():
        raise PlanError(
            "a net is not exported with strict=True; leave that out, or export a snapshot of it"
        )
    for t, backend in enumerate(plans.chosen):
        if isinstance(backend, Attention):
            raise PlanError(
                f"transition {t} runs with attention, which is not exported. Choose a backend of"
                " the sum first: "
                f'net.execution.use("auto", transition={t})'
            )
    with _disable_current_modes():  # the relations as they are, not as the trace shows them
        made = [MatrixPlan(topology) for topology in plans.topologies]
    return plans.steps(made, training=True)
