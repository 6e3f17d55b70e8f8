"""Elimination: nodes leave one by one, each time the one that costs least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grapnet.core._errors import StaleError
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._space import Space

from ._alternating import Reader, elimination_costs
from ._cells import linear_of
from ._criteria import WINDOW, Evidence, seen
from ._gram import GramRecorder
from ._matrices import Matrix, matrix_of
from ._node_criteria import NodeScored, place_of
from ._repair import gram_recorders, problem_of
from ._rule import Recorder


@dataclass(frozen=True)
class Elimination(NodeScored):
    """The squared error that removing a node adds to what its readers receive, once the nodes that
    stay compensate for it.

    Nodes are eliminated one after the other, each time the cheapest, as the optimal brain surgeon
    does with weights. It needs the Gram matrices that `repair` needs, recorded after the last
    training step, and is meant to be followed by it. It takes as many steps as the layer has nodes,
    with all of its columns in each: seconds for a thousand, minutes for several thousand.
    `ColumnSubset` is cheaper, and does not look at what each reader does with a node.

    Attributes:
        damping: added to the diagonal of the Gram matrix, as a share of its mean.
        window: the number of steps to record.
    """

    damping: float = 1e-4
    window: int = WINDOW
    is_local: ClassVar[bool] = True

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns recorders of what every reader receives."""
        layer, _ = place_of(net, candidates)
        return dict(gram_recorders(net, [layer], window=self.window))

    def refusal(self, net: Any, number: int) -> str:
        """Returns why nothing can compensate for removals from a space."""
        if isinstance(net, Adopted):
            return problem_of(net, net.spaces[number])
        return ""

    def score(self, net: Any, candidates: Any, evidence: Evidence, /) -> Tensor:
        """Returns the cost of every node, in the order in which they leave."""
        layer, rows = place_of(net, candidates)
        readers = []
        for name, recorder in gram_recorders(net, [layer]).items():
            found = seen(evidence, name, self)
            if found.is_stale:
                raise StaleError(
                    f"the Gram matrix of {name} is stale: {found.stale_reason}. Run data through"
                    " the net while the recorder is armed"
                )
            readers += _readers(net, layer, recorder, found.total)
        may_leave = torch.zeros(len(layer), dtype=torch.bool)
        may_leave[rows] = True
        return elimination_costs(readers, may_leave, damping=self.damping)[rows]


def _readers(net: Any, layer: Any, recorder: GramRecorder, gram: Tensor) -> list[Reader]:
    """Returns the matrices that read what a recorder records."""
    found = []
    if not isinstance(layer, Space):
        columns = torch.arange(len(layer))[:, None]
        for t in net.leaving(layer.index):
            found.append(_reader(matrix_of(net, t), gram, columns))
        return found
    places = layer.places()
    for name in layer.readers:
        linear = linear_of(net, name)
        if linear.path == recorder.at:
            matrix = matrix_of(net, name)
            at = places[name, 1 - linear.out_dim]
            # [nodes, positions, cells of the kernel]
            kernel = linear.canonical(net._grids()[name].whole)[0, 0].numel()
            columns = (at[:, :, None] * kernel + torch.arange(kernel)).flatten(1)
            found.append(_reader(matrix, gram, columns))
    return found


def _reader(matrix: Matrix, gram: Tensor, columns: Tensor) -> Reader:
    """Returns a reader whose biases, in the last column, compensate if there are any."""
    if bool(matrix.absent[:, -1].all()):
        gram = gram.clone()
        gram[-1] = 0
        gram[:, -1] = 0
        gram[-1, -1] = 1
    return Reader(matrix.weights, gram, columns)
