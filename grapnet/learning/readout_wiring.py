"""Wired: which coordinates of a layer's outgoing relations a closed form may choose, and where they
are stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from grapnet.core.graph import Graph
from grapnet.core.remap import ascending
from grapnet.core.values import Coordinates


class Wired(NamedTuple):
    """The relations that leave a layer and the biases they lead to, as rectangles with the biases
    in the last row.
    """

    parents: Tensor  # [n_relations] int64 rows
    children: Tensor  # [n_relations] int64 rows
    free: Tensor  # [n_parents + 1, n_children] bool: exists and is not frozen
    held: Tensor  # [n_parents + 1, n_children] float64: the values of what is frozen, 0 elsewhere

    @classmethod
    def of(cls, graph: Graph, layer: int, device: torch.device) -> "Wired":
        """Returns the present wiring on a device."""
        relations, children = graph.transitions[layer], graph.layers[layer + 1]
        topology = relations.topology
        parent, child = topology.parents().to(device).long(), topology.child.to(device).long()
        held = torch.zeros(
            topology.n_parents + 1, topology.n_children, dtype=torch.float64, device=device
        )
        free = torch.zeros_like(held, dtype=torch.bool)
        held[parent, child], held[-1] = relations.values().to(held), children.values().to(held)
        free[parent, child], free[-1] = (
            _free_bits(relations).to(device),
            _free_bits(children).to(device),
        )
        return cls(parent, child, free, held.masked_fill_(free, 0.0))

    def write(self, graph: Graph, layer: int, found: Tensor) -> None:
        """Assigns everything that is not frozen from a rectangle like `held`."""
        stores = graph.transitions[layer], graph.layers[layer + 1]
        chosen = found[self.parents, self.children], found[-1]
        places = [_free_bits(store).nonzero().squeeze(1).int() for store in stores]
        graph.write_all(
            [
                (store, at, values[at.to(values.device).long()])
                for store, at, values in zip(stores, places, chosen, strict=True)
            ]
        )


def _free_bits(store: Coordinates) -> Tensor:
    return ~store.frozen_bits(ascending(store.size, store.frozen_at.device))
