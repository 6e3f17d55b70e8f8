"""What a backend is: two functions; and a policy, which computes something else than the sum."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from grapnet._torch import in_forward_mode, is_legacy_batchedtensor, peek_interpreter_stack
from grapnet.core._index_map import IndexMap
from grapnet.core._transition import Topology

Side = Literal["parents", "children"]


class Plan(Protocol):
    """A backend's analysis of one topology, to be run many times; it holds no weights.

    A net passes the values flat, or in the shape of the plan's attribute `values_shape`; if that is
    None, the trainable ones alone.

    `torch.compile` traces the call. It makes guards of the class of a plan and of its numbers and
    flags, and inputs of its tensors. Sizes that edits change are therefore read from tensors: from
    those that the plan is given, from its wiring, or from one that `sized` returns.
    """

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Returns z [batch, n_children] for x [batch, n_parents], values [n_relations] and bias
        [n_children].
        """
        ...


class Backend(Protocol):
    """A way to compute z_j = b_j + Σ_i x_i w_ij over the relations of one transition.

    It sees the topology without weights, so a plan can never hold stale ones. It is a frozen
    dataclass whose fields are its options, all with defaults. One that multiplies absent relations
    by 0 has a class attribute `finite_only = True`.
    """

    name: ClassVar[str]  # what `net.execution.use` calls it

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; empty if it can."""
        ...

    def prepare(self, topology: Topology) -> Plan:
        """Analyses the topology once."""
        ...


class Policy(Protocol):
    """A backend that computes something else than the sum, with Parameters of its own.

    Each of its Parameters has one coordinate for every parent, or for every child, of the
    transition. The net makes them (`net.columns["gate_0"]` for `gate` at transition 0), lets them
    follow edits, undo and attached optimizers, and saves them. A plan receives their values by
    name: `plan(x, values, bias, gate=...)`. A plan adds the bias to its result; where several
    transitions enter a layer, only the first of them receives it, and the others receive zeros.

    It has no options, because a file keeps only its name and its Parameters. Whatever relies on the
    sum, such as a snapshot, raises PlanError for it: see `Execution.require_sum`.
    """

    name: ClassVar[str]
    columns: ClassVar[Mapping[str, Side]]  # its Parameters
    not_a_sum: ClassVar[str]  # the reason, as error messages show it

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why it cannot run this topology; empty if it can."""
        ...

    def prepare(self, topology: Topology) -> Callable[..., Tensor]:
        """Analyses the topology once."""
        ...


@runtime_checkable
class MovablePlan(Plan, Protocol):
    """A plan that can follow a small edit faster than it can be made again."""

    def moved(self, topology: Topology, index: IndexMap) -> Plan | None:
        """Returns the plan after relations changed while both layers kept their rows; None to make
        it again.
        """
        ...


@runtime_checkable
class FeatureMajorPlan(Plan, Protocol):
    """A plan that reads feature-major activations and can return them.

    Its result is the transpose of a contiguous tensor, which the next such plan reads without a
    copy.
    """

    def row_major(self) -> Plan:
        """Returns the same plan with a contiguous, row-major result."""
        ...


def kernel_refusals(
    topology: Topology, dtype: torch.dtype, known: Mapping[str, Sequence[torch.dtype]]
) -> list[str]:
    """Returns the reasons why kernels cannot run a topology, given the dtypes that they know on
    every type of device.
    """
    device = topology.child.device.type
    if device not in known:
        return [f"the weights are on {device}, the kernels are built for {' and '.join(known)}"]
    refusals = []
    if device == "cuda" and not find_spec("triton"):
        refusals.append("Triton is not installed")
    if dtype not in known[device]:
        names = ", ".join(map(str, known[device]))
        refusals.append(f"the weights are {dtype}, the kernels on {device} are built for {names}")
    return refusals


def sized(*sizes: int, device: torch.device) -> Tensor:
    """Returns an empty tensor of shape [*sizes, 0].

    A plan that keeps sizes in its shape can run with others in the same compiled code; integers
    would be constants of it.
    """
    return torch.empty(*sizes, 0, device=device)


def in_transform() -> bool:
    """Returns whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is not None


def needs_plain_operations(*gradients: Tensor) -> bool:
    """Returns whether torch differentiates or batches in a way that the kernels have no rule for.

    That is the case in a transform of torch.func, inside a level of forward-mode AD, whichever
    tensors carry tangents, and in a backward that receives many gradients at once.

    Args:
        gradients: what a backward works with; `is_grads_batched=True` shows in the tensors alone.
    """
    if torch.compiler.is_compiling():
        return False
    if peek_interpreter_stack() is not None or in_forward_mode():
        return True
    return any(map(is_legacy_batchedtensor, gradients))
