"""Column: one more trainable number a node, for a policy that needs its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .remap import IndexMap
from .requests import draw
from .transaction import require_editable
from .values import Coordinates
from .vector import VectorChange

if TYPE_CHECKING:
    from .graph import Graph


class Column(Coordinates):
    """A Parameter `value` with one coordinate a node of a layer, which follows every commit of that
    layer.

    It is registered under its name in `net.columns` by `Graph.set_columns`. A newborn node draws
    its coordinate from U(±bound); one that returns by undo gets what it had, or 0 when it left
    before the column came.

    Args:
        name: what `net.columns` calls it.
        layer: the number of the layer.
        values: one a node of the layer.
        beside: the name of the Parameter that it is trained with; an attached optimizer puts both
            into one group.
        bound: of the draw for newborn nodes.
    """

    value: torch.nn.Parameter

    def __init__(
        self, name: str, layer: int, values: Tensor, *, beside: str, bound: float = 1.0
    ) -> None:
        super().__init__("value", values)
        self.name = name
        self.layer = layer
        self.beside = beside
        self.bound = bound

    @property
    def parameter_name(self) -> str:
        """What `net.named_parameters()` calls its Parameter."""
        return f"columns.{self.name}.value"

    def change(self, index: IndexMap, born: Tensor | None = None) -> VectorChange:
        """Returns what it goes through when the rows of its layer move; nodes come with `born`, or
        with 0.
        """
        return VectorChange.of_free(index.to(self.value.device), born)

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Returns coordinates for newborn nodes."""
        return drawn(count, self.bound, self.value.detach(), generator)

    def extra_repr(self) -> str:
        return f"{self.size} nodes of layer {self.layer}"


def drawn(count: int, bound: float, example: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns `count` numbers of U(±bound) in the type of `example`, where `example` is."""
    return draw("linear", torch.ones(count, device=example.device), example, generator) * bound


def exchange_columns(graph: "Graph", wanted: Sequence[Column]) -> None:
    """Makes `wanted` the columns of a graph, once every follower that holds Parameters is ready for
    it.
    """
    present = list(graph.columns.values())
    leaving = [column for column in present if all(column is not other for other in wanted)]
    coming = [column for column in wanted if all(column is not other for other in present)]
    if not leaving and not coming:
        return
    graph.require_no_edit("change the columns of the graph")
    require_editable(graph)
    installs = graph.followers.prepare_columns(graph, coming, leaving)
    for column in leaving:
        del graph.columns[column.name]
    for column in coming:
        graph.columns[column.name] = column
    for install in installs:
        install()
