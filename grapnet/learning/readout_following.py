"""How the statistics of a layer follow a commit: who left, who came, and who says something else
from there on.
"""

import torch
from torch import Tensor

from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.remap import IndexMap
from grapnet.core.transaction import rows_after

from .readout_statistics import GramStatistics


def moved(statistics: GramStatistics, graph: Graph, commit: Commit, layer: int) -> GramStatistics:
    """Returns the statistics of a layer and its children after a commit; the same ones when it does
    not touch them.
    """
    parents, children = (commit.nodes.get(n) for n in (layer, layer + 1))
    changed = changed_rows(graph, commit, layer)
    still = all(index is None or index.is_identity for index in (parents, children))
    if still and not bool(changed.any()):
        return statistics
    features = torch.where(changed, -1, _source(parents, statistics.n_features))
    return statistics.rearranged(features, _source(children, statistics.n_outputs))


def changed_rows(graph: Graph, commit: Commit, layer: int) -> Tensor:
    """Says which nodes of a layer, by their rows after a commit, compute something else than before
    it.
    """
    above = torch.zeros(0, dtype=torch.bool, device="cpu")  # of the layer before
    for number in range(layer + 1):
        change = commit.change.layers.get(number)
        size = len(graph.layers[number]) if change is None else change.index.new_size
        changed = torch.zeros(size, dtype=torch.bool, device="cpu")
        wires = commit.change.transitions.get(number - 1)
        for pairs in () if wires is None else (wires.born, wires.gone):
            rows = rows_after(graph, number, change, pairs.children.cpu().long()).long()
            changed[rows[rows >= 0]] = True
        if change is not None and change.activations is not None:
            changed[change.activations.rows.cpu().long()] = True
        if change is not None and change.biases is not None and change.biases.shift is not None:
            changed[change.biases.shift.positions.cpu().long()] = True
        if bool(above.any()):
            wiring = commit.wirings.get(number - 1, graph.transitions[number - 1].topology)
            changed[wiring.child.cpu().long()[above[wiring.parents().cpu().long()]]] = True
        above = changed
    return above


@torch.no_grad()
def sums_below(graph: Graph, layer: int) -> list[float]:
    """Returns two numbers for every vector of coordinates that leads to a layer, which change when
    one of them does.
    """
    stores = [*graph.transitions[:layer], *graph.layers[1 : layer + 1]]
    found = []
    for store in stores:
        values = store.values().double()
        found += [values.square().sum(), (values + 1).square().sum()]
    return torch.stack(found).tolist() if found else []


def _source(index: IndexMap | None, size: int) -> Tensor:
    """Returns for every row after a commit which row it was, -1 for one that came."""
    rows = torch.arange(size, device="cpu")
    return rows if index is None else index.to(rows.device).carry(rows, -1)
