"""What a backend is: two functions."""

from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]

from grapnet.core._index_map import IndexMap
from grapnet.core._transition import Topology


class Plan(Protocol):
    """A backend's analysis of one topology, to be run many times; it holds no weights.

    A net hands the values over flat, or in the shape of an attribute `values_shape` where a plan
    has one.
    """

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Returns z [batch, n_children] for x [batch, n_parents], values [n_relations] and bias
        [n_children].
        """
        ...


class Backend(Protocol):
    """A way to compute z_j = b_j + Σ_i x_i w_ij over the relations of one transition.

    It sees the topology without weights, so a plan can never hold stale ones. It is a frozen
    dataclass whose fields are its options, all with defaults.
    """

    name: ClassVar[str]  # what `net.execution.use` calls it

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; none when it can."""
        ...

    def prepare(self, topology: Topology) -> Plan:
        """Analyses the topology once."""
        ...


@runtime_checkable
class MovablePlan(Plan, Protocol):
    """A plan that can follow a small edit for less than making it again costs."""

    def moved(self, topology: Topology, index: IndexMap) -> Plan | None:
        """Returns the plan after relations came and went while both layers kept their rows; None to
        make it again.
        """
        ...


@runtime_checkable
class FeatureMajorPlan(Plan, Protocol):
    """A plan that takes activations feature by feature and can hand its result on like that.

    Its result is the transpose of a contiguous tensor, which the next such plan reads without a
    copy.
    """

    def row_major(self) -> Plan:
        """Returns the same plan with a contiguous result, for whoever does not read feature by
        feature.
        """
        ...


def in_transform() -> bool:
    """Says whether torch.func's vmap, grad or jacrev is at work, for which compiled kernels have no
    rules.
    """
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is not None
