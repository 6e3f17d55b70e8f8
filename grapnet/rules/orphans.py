"""RemoveOrphans: clears away the hidden nodes that nothing leads to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.network import GrapNet

from .rule import Moment
from .together import refuse_attention


@dataclass(frozen=True)
class RemoveOrphans:
    """Removes hidden nodes without parents, and those that this leaves without, when the edit
    commits.

    What other rules cut in the same edit counts, whichever comes first. The relations that leave
    with a node are not cuts, so a budget of edits, parents or children does not hold them back.

    Attributes:
        fold_bias: add an orphan's constant φ(bias)·weight to its children's biases, so that the
            function stays. A child whose bias is frozen makes the commit raise EditError, and so
            does, at once, a transition from such a layer that runs with attention.
        layers: numbers of hidden layers; all of them by default.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> with net.edit() as edit:
        ...     edit.cut(net.layers[1][0].incoming())
        ...     RemoveOrphans()(net, edit, Moment())
        >>> net.sizes
        [4, 2, 2]
    """

    fold_bias: bool = False
    layers: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        if self.layers is None:
            return
        numbers = (self.layers,) if isinstance(self.layers, int) else tuple(self.layers)
        if not all(isinstance(number, int) for number in numbers):
            raise EditError(
                f"the layers to clear of orphans are given as numbers, got {self.layers!r}"
            )
        object.__setattr__(self, "layers", numbers)

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Asks the edit to remove orphans."""
        edit.remove_orphans(self.layers, fold_bias=self.fold_bias)
        hidden = range(1, len(net.layers) - 1)
        given = hidden if self.layers is None else cast("tuple[int, ...]", self.layers)
        numbers = [number % len(net.layers) for number in given]
        for number in numbers if self.fold_bias else ():
            refuse_attention(
                net,
                number,
                "fold_bias=True",
                f"leave layer {number} out of layers=, or do not fold",
            )
        present = sum(
            int((net.transitions[number - 1].topology.fan_in() == 0).sum()) for number in numbers
        )
        edit.remark(f"orphans before the edit: {present}", orphans=present)
