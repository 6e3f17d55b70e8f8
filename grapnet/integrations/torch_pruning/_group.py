"""Groups of layers that can only be pruned together, under Torch-Pruning's names."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grapnet.spaces import Space

from . import ops

if TYPE_CHECKING:
    from .dependency import DependencyGraph


@dataclass(frozen=True, eq=False)
class Part:
    """Some nodes of one space in a group.

    Attributes:
        space: the space.
        rows: the rows of the nodes in the space, ascending.
        numbers: the numbers of the nodes in the group.
    """

    space: Space
    rows: Tensor
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class Target:
    """One side of a layer, or a Parameter outside of layers.

    Attributes:
        module: the layer or the Parameter.
        side: whether its output or its input channels are meant.
        place: the tensor of the model and the dimension that have the channels; None for a
            customized layer.
    """

    module: Any
    side: ops.Side
    place: tuple[str, int] | None

    @property
    def key(self) -> tuple[int, str]:
        """What differs between groups."""
        return id(self.module), self.side


class Node:
    """A layer, or a Parameter outside of layers, in a dependency graph."""

    def __init__(self, module: Any, name: str) -> None:
        self.module = module
        self.type = ops.module2type(module)
        self.module_class = type(module)
        self._name = name

    @property
    def name(self) -> str:
        """The name of the layer in the model, and the layer."""
        if isinstance(self.module, nn.Parameter):
            return self._name
        return f"{self._name} ({self.module})"

    def __repr__(self) -> str:
        return f"<Node: ({self.name})>"


class Dependency:
    """Pruning `source` by `trigger` needs pruning `target` by `handler`."""

    def __init__(
        self, trigger: Callable[..., Any], handler: Callable[..., Any], source: Node, target: Node
    ) -> None:
        self.trigger = trigger
        self.handler = handler
        self.source = source
        self.target = target

    @property
    def layer(self) -> Any:
        """The layer that is pruned."""
        return self.target.module

    @property
    def pruning_fn(self) -> Callable[..., Any]:
        """The function that prunes it."""
        return self.handler

    def is_triggered_by(self, pruning_fn: Callable[..., Any]) -> bool:
        """Returns whether a function triggers it."""
        return pruning_fn == self.trigger

    def __call__(self, idxs: Sequence[int]) -> Any:
        """Prunes this layer alone; the others of its group do not follow."""
        return self.handler(self.target.module, list(idxs))

    def __repr__(self) -> str:
        trigger = f"{self.trigger.__name__} on {self.source.name}"
        return f"{trigger} => {self.handler.__name__} on {self.target.name}"


class GroupItem(tuple[Dependency, list[int]]):
    """A layer of a group: unpacks to the dependency and the channels to remove.

    Attributes:
        root_idxs: for every channel the number of its node in the group.
        tensor: the name of the tensor of the layer that has the channels; empty for a Parameter and
            for a customized layer.
        dim: the dimension of the tensor.
    """

    root_idxs: list[int]
    tensor: str
    dim: int

    def __new__(
        cls, dep: Dependency, idxs: list[int], root_idxs: list[int], tensor: str, dim: int
    ) -> "GroupItem":
        item = super().__new__(cls, (dep, idxs))
        item.root_idxs = root_idxs
        item.tensor = tensor
        item.dim = dim
        return item

    @property
    def dep(self) -> Dependency:
        """The dependency."""
        return self[0]

    @property
    def idxs(self) -> list[int]:
        """The channels of the layer."""
        return self[1]

    @property
    def weight(self) -> Tensor | None:
        """The tensor that has the channels, at present; None for a customized layer."""
        if isinstance(self.dep.layer, nn.Parameter):
            return self.dep.layer
        if not self.tensor:
            return None
        return getattr(self.dep.layer, self.tensor)


class Group:
    """Layers that can only be pruned together; the first one is the root.

    Iterating yields pairs of a dependency and the channels of its layer. Where a node has several
    channels in the root, as behind a flatten, all of them are listed; `n_nodes` counts the nodes.
    """

    def __init__(self, graph: "DependencyGraph", parts: list[Part], root: Target) -> None:
        self._DG = graph
        self._parts = parts
        self._root = root
        # As they are now; an edit of these spaces in the meantime makes them stale.
        self._nodes = [part.space[part.rows] for part in parts]
        self._group = graph._items(parts, root)
        self.n_nodes = 1 + max(int(part.numbers.max()) for part in parts)

    @property
    def items(self) -> list[GroupItem]:
        """The layers of the group."""
        return self._group

    @property
    def spaces(self) -> list[Space]:
        """The spaces of the adopted model that the group removes nodes of."""
        return [part.space for part in self._parts]

    def prune(self, idxs: Sequence[int] | None = None, record_history: bool = True) -> None:
        """Removes the nodes of the group, in one edit of the adopted model.

        Args:
            idxs: other channels of the root than those of the group.
            record_history: whether `DependencyGraph.pruning_history` lists it.
        """
        group = self
        if idxs is not None:
            dep = self[0].dep
            group = self._DG.get_pruning_group(dep.layer, dep.handler, idxs)
        self._DG.prune([group], record_history=record_history)

    def exec(self) -> None:
        """Does what `prune` does."""
        self.prune()

    def subset(self, numbers: Iterable[int]) -> "Group":
        """Returns a group with some of the nodes, by their numbers in this one."""
        chosen = torch.as_tensor(sorted(numbers))
        parts = []
        for part in self._parts:
            kept = torch.isin(part.numbers, chosen)
            if kept.any():
                among = torch.searchsorted(chosen, part.numbers[kept])
                parts.append(Part(part.space, part.rows[kept], among))
        return Group(self._DG, parts, self._root)

    def __call__(self) -> None:
        self.prune()

    def __getitem__(self, place: int) -> GroupItem:
        return self._group[place]

    def __iter__(self) -> Iterator[GroupItem]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __str__(self) -> str:
        return self._as_text(lambda item: f"len(idxs)={len(item.idxs)}")

    def details(self) -> str:
        """Returns the group as text, with all channels."""
        return self._as_text(lambda item: f"idxs ({len(item.idxs)}) = {item.idxs}")

    def _as_text(self, channels: Callable[[GroupItem], str]) -> str:
        line = "-" * 32
        lines = ["", line, "          Pruning Group", line]
        for place, item in enumerate(self._group):
            lines.append(f"[{place}] {item.dep}, {channels(item)}")
        return "\n".join([*lines, line, ""])
