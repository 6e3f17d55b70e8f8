"""The reference: a vectorised scatter over relations that defines the correct result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grapnet._torch import in_forward_mode, temporarily_clear_interpreter_stack
from grapnet.core._activation import activation_function
from grapnet.core._errors import PlanError
from grapnet.core._graph import Graph
from grapnet.core._transition import Topology

from . import _native, _operators

# Messages (batch × relations) made at once; larger pieces leave the cache and run two to three
# times slower.
CELLS = 1 << 20


@dataclass(frozen=True)
class Reference:
    """Computes Z[b, child(e)] += X[b, parent(e)] · w(e), some relations at a time."""

    name: ClassVar[str] = "reference"

    def refusals(self, topology: Topology, dtype: torch.dtype) -> list[str]:
        """Runs everything."""
        return []

    def prepare(self, topology: Topology) -> "ReferencePlan":
        """Returns a plan that holds nothing but the topology, and the parents of a small one."""
        return ReferencePlan(topology)


class ReferencePlan:
    """The scatter for one topology; memory stays bounded at any size, in the backward too."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._parents = None
        if not topology.ptr.is_cpu:
            require_wiring(topology)
        if topology.n_relations <= CELLS:
            self._parents = topology.parents()

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        size = max(1, CELLS // max(1, len(x)))
        if self.topology.n_relations <= size:
            return self._sum(x, values, 0, bias.shape[0]) + bias
        z = bias
        for number, part in enumerate(values.split(size)):
            z = z + made_again(self._sum, x, part, number * size, bias.shape[0])
        return z

    def _sum(self, x: Tensor, values: Tensor, start: int, n_children: int) -> Tensor:
        """Returns the contribution of the relations from `start` on, [batch, n_children]."""
        stop = start + len(values)
        if self._parents is None:
            parents = self.topology.parents(start, stop)
        else:
            parents = self._parents[start:stop]
        messages = x.index_select(1, parents) * values  # [batch, relations]
        children = self.topology.child[start:stop].long().expand(len(x), -1)
        return messages.new_zeros(len(x), n_children).scatter_add(1, children, messages)


def made_again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function whose intermediate results the backward makes again and does not keep."""
    # The checkpoints of torch have no rule for tangents up to torch 2.11.
    if in_forward_mode():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def require_wiring(topology: Topology) -> None:
    """Raises PlanError if the lists of a topology are damaged or a child does not exist."""
    if _operators.is_watched(topology.ptr, topology.child):
        return
    ptr = topology.ptr
    child = topology.child
    if len(ptr) == 0:
        raise PlanError(_native.DAMAGED)
    # A transform of torch.func hides the numbers of every tensor.
    with temporarily_clear_interpreter_stack():
        is_damaged = (ptr[0] != 0) | (ptr[-1] != topology.n_relations)
        is_damaged |= (ptr[1:] < ptr[:-1]).any()
        if topology.n_relations:
            least, most = child.aminmax()
            is_damaged |= (least < 0) | (most >= topology.n_children)
        # the only number that the host waits for
        if bool(is_damaged):
            raise PlanError(_native.DAMAGED)


def walk(graph: Graph, x: Tensor) -> Tensor:
    """Runs Algorithm 1 of the paper, node by node and slot by slot: slow, for audits.

    Args:
        graph: the net.
        x: the inputs, [batch, sensory nodes].
    """
    received: dict[int, Tensor] = {}
    h = x
    for layer in graph.layers:
        if not layer.is_sensory:
            columns = []
            for node in layer:
                bias = node.bias
                assert bias is not None  # only sensory nodes have none
                z = received.get(node.uid, x.new_zeros(len(x))) + bias
                columns.append(activation_function(node.activation)(z))
            h = torch.stack(columns, dim=1) if columns else x.new_zeros(len(x), 0)
        for column, node in enumerate(layer):
            messages = h[:, column, None] * node.W_alloc  # [batch, degree]
            for slot, uid in enumerate(node.children.uids.tolist()):
                received[uid] = (
                    received[uid] + messages[:, slot] if uid in received else messages[:, slot]
                )
    return h
