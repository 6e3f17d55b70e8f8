"""Snapshots: the net as plain torch modules, for inference, export and training elsewhere."""

import torch
from torch import nn

from grapnet.core._graph import Graph

from ._modules import (
    MOST_CELLS,
    Net,
    activation_module,
    build,
    computed_layers,
    is_written,
    same_activation,
)


class Snapshot(nn.Sequential):
    """A copy of a net as `nn.Linear` layers and activations, without gradients.

    It shares no memory with the net and does not change with it.

    Attributes:
        version: the version of the net; None for a part of a snapshot, such as a slice.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([49, 48, 10])
        >>> snapshot = net.snapshot()
        >>> snapshot
        Snapshot(
          version 0
          (0): Linear(in_features=49, out_features=48, bias=True)
          (1): ReLU()
          (2): Linear(in_features=48, out_features=10, bias=True)
        )
        >>> with net.edit() as edit:
        ...     edit.cut(net.layers[0][0], slots=[0])
        >>> snapshot.is_stale(net), net.snapshot().is_stale(net)
        (True, False)
    """

    version: int | None = None

    @classmethod
    def of(cls, net: Net, most_cells: int = MOST_CELLS) -> "Snapshot":
        """Returns a snapshot of the net; see `net.snapshot()`."""
        snapshot = cls(*build(net, most_cells, trainable=False))
        snapshot.version = net.execution._graph.version
        return snapshot.eval()

    def is_stale(self, net: Net) -> bool:
        """Returns whether the net is at another version, or computes with other values.

        At the same version it reads and compares every coordinate and activation, which takes about
        as long as another snapshot. An undo is a version of its own.

        Args:
            net: the net to compare with.
        """
        graph = net.execution._graph
        if self.version != graph.version or net.execution.policies():
            return True
        return not self._holds(graph)

    @torch.no_grad()
    def _holds(self, graph: Graph) -> bool:
        """Returns whether the modules are those of a snapshot of this graph, value by value."""
        modules = iter(self)
        for transition, layer in zip(graph.transitions, computed_layers(graph), strict=True):
            if not is_written(next(modules, None), transition, layer):
                return False
            activation = activation_module(layer)
            if activation is not None and not same_activation(next(modules, None), activation):
                return False
        return next(modules, None) is None

    def extra_repr(self) -> str:
        return f"version {self.version}"


def trainable_modules(net: Net, most_cells: int = MOST_CELLS) -> nn.Sequential:
    """Returns the net as a trainable stack of plain modules; see `net.to_module()`."""
    return nn.Sequential(*build(net, most_cells, trainable=True))
