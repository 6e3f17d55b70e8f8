"""Layer: the nodes of one layer, their biases, activations and owners."""

import weakref
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout

from ._activation import activation_function
from ._coordinates import Coordinates
from ._index_map import Labels
from ._sets import NodeSet

if TYPE_CHECKING:
    from ._graph import Graph


class _Kind(NamedTuple):
    function: Callable[[Tensor], Tensor]
    rows: Tensor


class Layer(Coordinates, NodeSet):
    """The nodes of one layer, in row order; a NodeSet of all of them that stays live.

    `bias` is the Parameter of the trainable biases, None for the sensory layer. `biases`, like on
    every NodeSet, is one value a node, frozen ones included.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, uids: Tensor, biases: Tensor | None, activation: str) -> None:
        Coordinates.__init__(self, "bias", biases)
        # [n] int64, ascending: rows are born at the end, and undo puts them back in place
        self.uid = uids
        self.default_activation = activation
        self.is_sensory = biases is None
        self._dropout = 0.0
        self.activation_names = Labels.uniform(activation, len(uids))
        self.owner_names = Labels.uniform(None, len(uids))
        self._find_kinds()

    def __len__(self) -> int:
        return self.uid.shape[0]  # `len` of a tensor takes ten times as long

    @property
    def index(self) -> int:
        """Which layer of the graph this is."""
        return next(i for i, layer in enumerate(self.graph.layers) if layer is self)

    @property
    def graph(self) -> "Graph":
        """The graph the layer is part of."""
        if not self.is_bound:
            raise RuntimeError(
                "this layer is not part of a graph any more; keep the net itself alive"
            )
        return self.__dict__["_graph_reference"]()

    @property
    def uids_by_layer(self) -> dict[int, Tensor]:
        """The uids of all nodes, under the number of this layer."""
        return {self.index: self.uid}

    def rows(self, uids: Tensor) -> Tensor:
        """Returns the int32 rows of `uids`, -1 for one that is not in this layer."""
        return rows_among(self.uid, uids)

    def forward(self, z: Tensor) -> Tensor:
        """Applies activations and dropout to what the nodes receive, `z` [..., n]; forward hooks
        see what they say.
        """
        if len(self._kinds) == 1:
            h = self._kinds[0].function(z)
        else:
            parts = [kind.function(z.index_select(-1, kind.rows)) for kind in self._kinds]
            h = torch.cat(parts, dim=-1).index_select(-1, self._kinds_order) if parts else z
        return dropout(h, self._dropout) if self._dropout and self.training else h

    @property
    def dropout(self) -> float:
        """The probability with which, in training, a node says 0 instead; nothing is dropped at
        0.0.
        """
        return self._dropout

    @dropout.setter
    def dropout(self, probability: float) -> None:
        if not isinstance(probability, Real):
            raise TypeError(f"dropout is a number between 0 and 1, got {probability!r}")
        if not 0 <= probability <= 1:
            raise ValueError(f"dropout is a probability between 0 and 1, got {probability!r}")
        self._dropout = float(probability)

    def renew(self, uids: Tensor, activations: Labels, owners: Labels) -> None:
        """Puts other nodes in place; `swap` brings the biases that go with them."""
        # past nn.Module's assignment
        self.__dict__.update(uid=uids, activation_names=activations, owner_names=owners)
        self._find_kinds()

    def _find_kinds(self) -> None:
        """Works out ahead which rows share an activation, so that a forward pass under any
        transform only reads it.
        """
        device = torch.device("cpu") if self.is_sensory else self.frozen_at.device
        # the rows matter only among several
        if len(self.activation_names) and len(self.activation_names.names) == 1:
            none = torch.empty(0, dtype=torch.int64, device=device)
            function = activation_function(str(self.activation_names.names[0]))
            self._kinds, self._kinds_order = [_Kind(function, none)], none
            return
        kinds = [
            (str(name), rows.long().to(device)) for name, rows in self.activation_names.kinds()
        ]
        self._kinds = [_Kind(activation_function(name), rows) for name, rows in kinds]
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._kinds_order = torch.cat([none, *(rows for _, rows in kinds)]).argsort()

    def _apply(self, *args: Any, **kwargs: Any) -> "Layer":
        super()._apply(*args, **kwargs)
        self._find_kinds()
        return self

    @property
    def is_bound(self) -> bool:
        """True while the graph that the layer is part of is alive."""
        reference = self.__dict__.get("_graph_reference")
        return reference is not None and reference() is not None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "biases":  # nn.Module would take a Parameter for one of its own
            NodeSet.biases.fset(self, value)  # pyright: ignore[reportOptionalCall]
        else:
            super().__setattr__(name, value)

    def bind(self, graph: "Graph") -> None:
        """Tells the layer which graph it is part of, without keeping that graph alive."""
        object.__setattr__(self, "_graph_reference", weakref.ref(graph))

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("_graph_reference", "_kinds", "_kinds_order")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_kinds()

    def __repr__(self) -> str:
        kinds = (
            ", ".join(str(name) for name, _ in self.activation_names.kinds())
            or self.default_activation
        )
        return f"Layer({len(self)} {'sensory nodes' if self.is_sensory else f'nodes, {kinds}'})"


def rows_among(ascending: Tensor, uids: Tensor) -> Tensor:
    """Returns the int32 places of `uids` in the sorted tensor, -1 for one that is not there."""
    if len(ascending) == 0:
        return torch.full((len(uids),), -1, dtype=torch.int32, device="cpu")
    # numpy: a tenth of torch's time for a few dozen nodes
    known, asked = (
        ascending.numpy(),
        uids.numpy(),
    )
    first = known[0]
    if known[-1] - first == len(known) - 1:  # no gap: a subtraction instead of a search
        place = asked - first
        place[(place < 0) | (place >= len(known))] = -1
        return torch.from_numpy(place.astype(np.int32))
    place = torch.searchsorted(ascending, uids.contiguous()).clamp_(max=len(ascending) - 1)
    return torch.where(ascending[place] == uids, place, -1).int()
