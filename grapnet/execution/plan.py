"""What a backend is: two functions."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from grapnet.core.relations import Topology

Plan = Callable[[Tensor, Tensor], Tensor]  # (x [batch, n_parents], values [n_relations]) -> z [batch, n_children]


class Backend(Protocol):
    """A way to compute z_j = Σ_i x_i w_ij over the relations of one transition.

    It sees the topology without weights, so a plan can never hold stale ones.
    """

    name: str

    def refusals(self, topology: Topology) -> list[str]:
        """Returns the reasons why it cannot run this topology; none when it can."""
        ...

    def prepare(self, topology: Topology) -> Plan:
        """Analyses the topology once."""
        ...
