"""Layer: the nodes of one layer, their biases, activations and owners.

A space of an adopted model, and the channels that several spaces divide, are node sets of the same
kind without biases and activations of their own; see `LiveNodes`.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from ._activation import activation_function
from ._change import Labels
from ._coordinates import Coordinates
from ._errors import StaleNodeError
from ._index_map import moved, on_host
from ._sets import NodeSet

if TYPE_CHECKING:
    from ._graph import Graph


class _Kind(NamedTuple):
    function: Callable[[Tensor], Tensor]
    rows: Tensor


class Roster(NamedTuple):
    """The nodes of one layer at one version, in row order."""

    # [n] int64, ascending: rows are born at the end, and undo puts them back in place
    uids: Tensor
    activations: Labels
    owners: Labels
    kinds: list[_Kind]  # which rows share an activation; with one kind the rows are left out
    order: Tensor  # of the rows of all kinds laid end to end

    @classmethod
    def of(
        cls, uids: Tensor, activations: Labels, owners: Labels, device: torch.device
    ) -> "Roster":
        """Returns the roster of a layer whose activations are computed on a device."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        if len(activations) and len(activations.names) == 1:
            function = activation_function(str(activations.names[0]))
            return cls(uids, activations, owners, [_Kind(function, none)], none)
        kinds = []
        rows = [none]
        for name, chosen in activations.kinds():
            rows.append(chosen.long().to(device))
            kinds.append(_Kind(activation_function(str(name)), rows[-1]))
        return cls(uids, activations, owners, kinds, torch.cat(rows).argsort())

    @classmethod
    def of_space(cls, uids: Tensor, owners: Labels | None = None) -> "Roster":
        """Returns the roster of nodes whose activations are in the code of an adopted model."""
        if owners is None:
            owners = Labels.uniform(None, len(uids))
        return cls.of(uids, Labels.uniform("identity", len(uids)), owners, torch.device("cpu"))


class LiveNodes(NodeSet):
    """All nodes of a layer, a space or channels, in row order; the graph owns them."""

    # whether there is one trainable bias per node
    _has_biases = False
    _roster: Roster  # the nodes at present

    def __len__(self) -> int:
        return self._roster.uids.shape[0]  # `len` of a tensor takes ten times as long

    @property
    def uid(self) -> Tensor:
        """The uid of every node, [n] int64, ascending."""
        return self._roster.uids

    @property
    def _activation_names(self) -> Labels:
        """The activation of every node."""
        return self._roster.activations

    @property
    def _owner_names(self) -> Labels:
        """The owner of every node."""
        return self._roster.owners

    def _activations_at(self, rows: Tensor) -> list[str]:
        """Returns the activations of some nodes."""
        raise ValueError("the activations of an adopted model are in its own code")

    @property
    def index(self) -> int:
        """The number among the layers of the graph."""
        for number, layer in enumerate(self.graph.layers):
            if layer is self:
                return number
        raise StaleNodeError("this layer is not part of its graph any more")

    @property
    def graph(self) -> "Graph":
        """The graph that the nodes are part of."""
        if not self._is_bound:
            raise RuntimeError(
                "this layer is not part of a graph any more; keep the net itself alive"
            )
        return self.__dict__["_graph_reference"]()

    @property
    def _uids_by_layer(self) -> dict[int, Tensor]:
        """The uids of all nodes, under the number of this layer."""
        return {self.index: self.uid}

    def rows(self, uids: Tensor) -> Tensor:
        """Returns the int32 rows of `uids`, -1 for those that are not among the nodes."""
        return rows_among(self.uid, uids)

    def _renew(self, uids: Tensor, activations: Labels, owners: Labels) -> None:
        """Installs other nodes."""
        self._enrol(Roster.of(uids, activations, owners, self._kinds_place))

    def _enrol(self, roster: Roster) -> None:
        """Installs the nodes of a prepared roster."""
        self._roster = roster

    @property
    def _kinds_place(self) -> torch.device:
        """Where activations are computed."""
        return torch.device("cpu")

    @property
    def _is_bound(self) -> bool:
        """True while the graph of the nodes is alive."""
        reference = self.__dict__.get("_graph_reference")
        return reference is not None and reference() is not None

    def _bind(self, graph: "Graph") -> None:
        """Sets the graph of the nodes, held weakly."""
        object.__setattr__(self, "_graph_reference", weakref.ref(graph))

    def __getstate__(self) -> dict[str, Any]:
        return self._without_graph(vars(self))

    def _without_graph(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state that can be copied: functions of activations are found again by their
        names.
        """
        found = {**state, "_roster": self._roster[:3]}
        found.pop("_graph_reference", None)
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew(*state["_roster"])


class Layer(Coordinates, LiveNodes):
    """The nodes of one layer, in row order; a live NodeSet of all of them.

    `bias` is the Parameter of the trainable biases, None for the sensory layer. `biases`, as in
    every NodeSet, has one value per node, frozen ones included.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, uids: Tensor, biases: Tensor | None, activation: str) -> None:
        Coordinates.__init__(self, "bias", biases)
        self.default_activation = activation
        self._has_biases = biases is not None
        self._dropout = 0.0
        self._renew(uids, Labels.uniform(activation, len(uids)), Labels.uniform(None, len(uids)))

    @property
    def is_sensory(self) -> bool:
        """True for the layer of the inputs, whose nodes have no biases."""
        return not self._has_biases

    def forward(self, z: Tensor, roster: Roster | None = None) -> Tensor:
        """Applies activations and dropout to the inputs `z` [..., n] of the nodes; forward hooks
        see the result.

        Args:
            z: the weighted sums of the nodes, biases included.
            roster: the nodes of the version to compute, the current ones by default.
        """
        if roster is None:
            roster = self._roster
        if len(roster.kinds) == 1:
            h = roster.kinds[0].function(z)
        elif roster.kinds:
            parts = [kind.function(z.index_select(-1, kind.rows)) for kind in roster.kinds]
            h = torch.cat(parts, dim=-1).index_select(-1, roster.order)
        else:
            h = z
        if self._dropout and self.training:
            return dropout(h, self._dropout)
        return h

    @property
    def dropout(self) -> float:
        """The dropout probability of the outputs of the layer, in training."""
        return self._dropout

    @dropout.setter
    def dropout(self, probability: float) -> None:
        if not isinstance(probability, Real):
            raise TypeError(f"dropout is a number between 0 and 1, got {probability!r}")
        if not 0 <= probability <= 1:
            raise ValueError(f"dropout is a probability between 0 and 1, got {probability!r}")
        self._dropout = float(probability)

    def _activations_at(self, rows: Tensor) -> list[str]:
        return list(map(str, self._activation_names.select(rows)))

    def __getstate__(self) -> dict[str, Any]:
        return self._without_graph(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._renew(*state["_roster"])

    @property
    def _kinds_place(self) -> torch.device:
        return self._device if self._has_biases else torch.device("cpu")

    def _apply(self, *args: Any, **kwargs: Any) -> "Layer":
        super()._apply(*args, **kwargs)
        self._renew(*self._roster[:3])
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Sets the values of the biases when a Parameter is assigned to `layer.biases`."""
        if name == "biases" and param is not None:
            self.biases = param.detach()
        else:
            super().register_parameter(name, param)

    def __repr__(self) -> str:
        kinds = (
            ", ".join(str(name) for name, _ in self._activation_names.kinds())
            or self.default_activation
        )
        return f"Layer({len(self)} {'sensory nodes' if self.is_sensory else f'nodes, {kinds}'})"


def uid_behind(layers: Iterable[LiveNodes]) -> int:
    """Returns the smallest uid that is larger than those of all nodes."""
    return 1 + max((int(layer.uid[-1]) for layer in layers if len(layer)), default=-1)


def rows_among(ascending: Tensor, uids: Tensor) -> Tensor:
    """Returns the int32 positions of `uids` in the sorted tensor, -1 for missing ones.

    Args:
        ascending: the uids of a layer, on the CPU.
        uids: the uids to look for, on any device; the result is there.
    """
    if len(ascending) == 0:
        return torch.full((len(uids),), -1, dtype=torch.int32, device=uids.device)
    first = first_of_run(ascending)
    if first is None:
        known = moved(ascending, uids.device).to(uids.dtype)
        place = torch.searchsorted(known, uids.contiguous()).clamp_(max=len(known) - 1)
        return torch.where(known[place] == uids, place, -1).int()
    # no gap: a subtraction instead of a search
    if on_host(uids.device):
        # numpy: a tenth of torch's time for a few dozen nodes
        place = uids.numpy() - first
        place[(place < 0) | (place >= len(ascending))] = -1
        return torch.from_numpy(place.astype(np.int32))
    place = uids - first
    return torch.where((place >= 0) & (place < len(ascending)), place, -1).int()


def first_of_run(ascending: Tensor) -> int | None:
    """Returns the first of some ascending uids, None if there is a gap between two of them."""
    known = ascending.numpy()
    if len(known) == 0 or known[-1] - known[0] != len(known) - 1:
        return None
    return int(known[0])
