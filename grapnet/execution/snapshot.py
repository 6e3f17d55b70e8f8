"""Snapshots: the net as plain torch modules, for inference, for export and to be trained
elsewhere.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from grapnet.core._errors import PlanError
from grapnet.core._graph import Graph

from .modules import (
    MOST_CELLS,
    Net,
    activation_module,
    build,
    computed_layers,
    is_written,
    refuse,
    require_in_effect,
    same_activation,
    write,
)
from .traces import Traces


class Snapshot(nn.Sequential):
    """The net as it was when `net.snapshot()` was called: `nn.Linear` layers and activations that
    nothing trains.

    It shares no memory with the net and stays as it is while the net goes on.

    Attributes:
        version: of the net it was taken from; None for a part of a snapshot, such as a slice.

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
    _seen: Traces | None = None  # a copy has none: they are of the tensors of this process

    @classmethod
    def of(cls, net: Net, most_cells: int = MOST_CELLS) -> "Snapshot":
        """Returns a snapshot of the net; see `net.snapshot()`."""
        snapshot, graph = cls(*build(net, most_cells, trainable=False)), net.execution.graph
        snapshot.version, snapshot._seen = graph.version, Traces.of(graph)
        return snapshot.eval()

    def is_stale(self, net: Net, *, exact: bool = False) -> bool:
        """Says whether the net was edited, or its coordinates changed, since the snapshot was
        taken.

        An edit counts even when an undo or the end of a trial brought everything back. Changed
        coordinates are noticed by the traces they leave in torch, without reading them: version
        counters, replaced memory, optimizer steps. No trace is left by writing through
        `weight.data`, a numpy array or the replay of a CUDA graph, and only `exact=True` sees that.

        Asked about another net, or after a copy or a file, a snapshot knows no traces. It then
        compares version, activations and every coordinate, and is stale unless all are equal. It
        also reads when an optimizer that stepped since is gone, because that may have been the
        net's.

        Args:
            net: the net to compare with.
            exact: read and compare every coordinate even when there is no trace of a change.
        """
        graph = net.execution.graph
        if self.version != graph.version or "attention" in net.execution.choices():
            return True
        if self._seen is None or self._seen.graph() is not graph:
            return not self._holds(graph)
        moved = self._seen.moved(graph)
        if moved is None or (exact and not moved):
            moved = not self._holds(graph)
            self._seen = self._seen if moved else Traces.of(graph)
        return moved

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, net: Net) -> bool:
        """Writes the net's present coordinates into the matrices; False, and nothing done, where
        that is not enough.

        It is not enough after an edit, or when the net has moved to another device or dtype: take
            another snapshot.
        """
        graph = net.execution.graph
        fits = (
            self._seen is not None
            and self._seen.graph() is graph
            and self._seen.structure is graph.structure
        )
        linears = [module for module in self if isinstance(module, nn.Linear)]
        if not fits or any(
            _place(a.weight) != _place(b.weight)
            for a, b in zip(linears, graph.transitions, strict=True)
        ):
            return False
        refuse(net, max(linear.weight.numel() for linear in linears))
        for linear, transition, layer in zip(
            linears, graph.transitions, computed_layers(graph), strict=True
        ):
            write(linear, transition, layer)
        self._seen = Traces.of(graph)
        return True

    @torch.no_grad()
    def _holds(self, graph: Graph) -> bool:
        """Says whether the modules are those that a snapshot of this graph would have, value by
        value.
        """
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

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_seen"}


class SnapshotController:
    """Runs a net through a snapshot that it keeps up to date.

    Before a call it refreshes the snapshot when `Snapshot.is_stale` says so: in place when only
    coordinates changed, as another snapshot after an edit. The net knows nothing of it, and it does
    not keep the net alive: once the net is gone a call raises PlanError, because nobody knows what
    happened after the last refresh; `snapshot` is still there.

    Args:
        net: the net to run; of a model with nets inside, one of them.
        most_cells: as for `net.snapshot()`.

    Attributes:
        snapshot: the last one, as of the last call.
        refreshes: how often a call or `refresh()` found the snapshot outdated, or was told to renew
            it.
        rebuilds: how many of them made another snapshot.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([49, 48, 10])
        >>> serve = gn.SnapshotController(net)
        >>> with net.edit() as edit:
        ...     edit.cut(net.layers[0][0], slots=[0])
        >>> serve(torch.zeros(2, 49)).shape, serve.refreshes
        (torch.Size([2, 10]), 1)
    """

    def __init__(self, net: Net, *, most_cells: int = MOST_CELLS) -> None:
        if not isinstance(net, Graph):
            raise TypeError(
                f"a SnapshotController runs one net, got {type(net).__name__}. Give"
                " it the net inside and run the rest of the model around it; or take"
                " gn.snapshot(model) again when the model has changed"
            )
        self._net, self._most_cells = weakref.ref(net), most_cells
        self.refreshes = self.rebuilds = 0
        self.snapshot = Snapshot.of(net, most_cells)

    @property
    def net(self) -> Net:
        """The net; raises PlanError when it is gone."""
        net = self._net()
        if net is None:
            raise PlanError(
                "the net of this controller is gone; its state at the last refresh is"
                f" controller.snapshot (version {self.snapshot.version})"
            )
        return net

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the net's present output for inputs of shape [..., sensory nodes]."""
        net = self.net
        require_in_effect(net.execution.graph)
        if self.snapshot.is_stale(net):
            self.refresh()
        return self.snapshot(x)

    def refresh(self) -> Snapshot:
        """Brings the snapshot up to date whether or not it is stale, and returns it."""
        net = self.net
        if not self.snapshot.update(net):
            self.snapshot = Snapshot.of(net, self._most_cells)
            self.rebuilds += 1
        self.refreshes += 1
        return self.snapshot

    def __repr__(self) -> str:
        return f"SnapshotController(version {self.snapshot.version}, {self.refreshes} refreshes)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a SnapshotController belongs to its net and cannot be copied or saved; "
            "save controller.snapshot, or make another controller"
        )


def trainable_modules(net: Net, most_cells: int = MOST_CELLS) -> nn.Sequential:
    """Returns the net as a trainable stack of plain modules; see `net.to_module()`."""
    return nn.Sequential(*build(net, most_cells, trainable=True))


def _place(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype
