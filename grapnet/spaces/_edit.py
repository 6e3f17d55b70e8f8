"""SpaceEdit: the verbs of a transaction on the spaces of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from grapnet.core._change import LayerChange
from grapnet.core._commit import Draws, Intent
from grapnet.core._edit import Edit, layer_number
from grapnet.core._errors import EditError
from grapnet.core._index_map import GridMap
from grapnet.core._node import GrapNode
from grapnet.core._sets import Nodes, NodeSet

if TYPE_CHECKING:
    from ._adopted import Adopted
    from ._space import Space

Start = Literal["alike", "zero"]


@dataclass(frozen=True)
class Growth:
    """How the weights of new nodes start."""

    readers: Start = "zero"
    writers: Start = "alike"
    values: Mapping[str, Tensor] = field(default_factory=dict)


class SpaceEdit(Edit):
    """A `with net.edit(...) as edit:` block on an adopted model.

    Nodes are added, removed and given owners; every tensor that has them follows.
    """

    graph: "Adopted"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._growths: dict[int, Growth] = {}

    def add_nodes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        layer: "Space | int",
        count: int,
        *,
        owner: str | None = None,
        readers: Start = "zero",
        writers: Start = "alike",
        values: Mapping[str, Tensor] | None = None,
    ) -> NodeSet:
        """Adds nodes at the end of a space and returns them.

        By default the weights that read them are 0, so that the function of the model stays. Where
        it would not, because activations alone read them or because the size of the space is also
        a number in the formula, this raises EditError. A norm over the nodes changes all the same.

        Args:
            layer: the space, or its number.
            count: how many.
            owner: a tag to select them by.
            readers: "zero", or "alike" to draw them as uniformly and as widely as the present
                weights of the tensor.
            writers: the same for the weights that compute the nodes. Other entries, such as biases
                and running statistics, start from the mean of the present ones.
            values: the new entries of some tensors, by name, instead: a tensor of the shape of the
                Parameter or buffer, with only the new positions on the axis of the space.
        """
        number = layer_number(self.graph, layer)
        self._require_free([number])
        for name, start in (("readers", readers), ("writers", writers)):
            if start not in ("alike", "zero"):
                raise EditError(f'{name} is "alike" or "zero", got {start!r}')
        space = self.graph.spaces[number]
        if number in self._growths:
            raise EditError(f"this edit adds nodes to {space.name} twice; add all of them at once")
        if readers == "zero" and not space.readers:
            raise EditError(
                f"no tensor of the model reads the nodes of {space.name}, so that new ones change"
                ' its function; add them nevertheless with readers="alike"'
            )
        nodes = super().add_nodes(number, count, owner=owner, bias="zero")
        self._growths[number] = Growth(readers, writers, dict(values or {}))
        return nodes

    def remove_nodes(self, nodes: Nodes, *, interface: bool = False) -> None:
        """Removes nodes from every tensor that has them.

        Raises:
            EditError: the space is pinned, or would be left without nodes.
        """
        self._require_free(self._rows(nodes))
        super().remove_nodes(nodes, interface=True)

    def _rows(self, nodes: Nodes) -> dict[int, Tensor]:
        # A uid counts the nodes of all spaces, and is easily taken for a row of one.
        if not isinstance(nodes, NodeSet | GrapNode):
            raise EditError(
                "nodes of an adopted model are given as such, space[[0, 1]] or space.weakest(...),"
                f" not as {type(nodes).__name__}"
            )
        return super()._rows(nodes)

    def _require_free(self, numbers: Any) -> None:
        for number in numbers:
            space = self.graph.spaces[number]
            if space.pins:
                raise EditError(
                    f"the nodes of {space.name} cannot be added or removed: {space.pins[0]}"
                )

    def _require_silence(self) -> None:
        """Raises EditError where new nodes whose readers are 0 change the function nevertheless."""
        silent = [
            self.graph.spaces[n] for n, growth in self._growths.items() if growth.readers == "zero"
        ]
        self.graph.prove(silent)
        for space in silent:
            if space.verdict == "differs":
                raise EditError(
                    f"the size of {space.name} is also a number in the formula, so that new nodes"
                    ' change the function of the model; add them nevertheless with readers="alike"'
                )

    def _refuse(self, verb: str) -> EditError:
        return EditError(
            f"{verb} works on the relations of a net. In an adopted model nodes are added and"
            " removed; for single relations, gn.graft turns linear layers into nets"
        )

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("connect")

    def cut(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("cut")

    def freeze(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("freeze")

    def unfreeze(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("unfreeze")

    def remove_orphans(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("remove_orphans")

    def set_activation(self, *args: Any, **kwargs: Any) -> None:
        """Raises EditError."""
        raise self._refuse("set_activation")

    def _resolve(self, draws: Draws) -> Intent | None:
        intent = super()._resolve(draws)
        if intent is None:
            return None
        change = intent.receipt.change
        for number, part in change.layers.items():
            if part.index.new_size == 0:
                raise EditError(f"this edit removes every node of {self.graph.spaces[number].name}")
        generator = None
        if self._growths:
            generator = draws.source(self.generator, self.graph.device)
            self._require_silence()
        change = self.graph._completed(change, self._growths, generator)
        return replace(intent, receipt=replace(intent.receipt, change=change))


def values_of_newborns(
    net: "Adopted",
    name: str,
    index: GridMap,
    layers: Mapping[int, LayerChange],
    growths: Mapping[int, Growth],
    generator: torch.Generator | None,
) -> Tensor:
    """Returns the cells that come into a tensor, as one vector.

    A tensor may read one growing space and write another: cells of new readers are set last, so
    that new nodes that are read stay silent.
    """
    tensor = net._grids()[name].tensor.detach()
    new = index.carry(tensor, 0.0)
    silent: list[tuple[int, Tensor]] = []
    for dim, axis in index.axes.items():
        if axis.n_born == 0:
            continue
        at = axis.inserted.to(new.device).long()
        for number, growth in growths.items():
            space = net.spaces[number]
            if (name, dim) not in space._members:
                continue
            role = net._role(space, name, dim)
            start: Any = "mean"
            if role == "reader":
                start = growth.readers
            elif role == "writer":
                start = growth.writers
            if name in growth.values:
                given = growth.values[name].to(new)
                shape = list(new.shape)
                shape[dim] = len(at)
                if list(given.shape) != shape:
                    raise EditError(
                        f"the new entries of {name} have the shape {shape}, got {list(given.shape)}"
                    )
                new.index_copy_(dim, at, given)
            elif start == "alike":
                new.index_copy_(dim, at, _alike(tensor, new.index_select(dim, at), generator))
            elif start == "mean":
                mean = tensor.mean(dim, keepdim=True, dtype=_mean_dtype(tensor)).to(new)
                new.index_copy_(dim, at, mean.expand_as(new.index_select(dim, at)))
            else:
                silent.append((dim, at))
    for dim, at in silent:
        new.index_fill_(dim, at, 0.0)
    return index.inverse().take(new)


def _alike(tensor: Tensor, block: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns numbers of the shape of `block`, uniform and as wide as the entries of a tensor."""
    spread = tensor.double().std(correction=0).item() if tensor.numel() > 1 else 0.0
    device = block.device if generator is None else generator.device
    numbers = torch.empty(block.shape, dtype=block.dtype, device=device)
    numbers.uniform_(-1, 1, generator=generator)
    return numbers.to(block.device) * (3**0.5 * spread)


def _mean_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_floating_point():
        return tensor.dtype
    return torch.float64
