"""RemoveOrphans: removes hidden nodes without parents."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from grapnet._network import GrapNet
from grapnet.core._edit import Edit

from ._rule import RuleContext, as_numbers, count_orphans


@dataclass(frozen=True)
class RemoveOrphans:
    """Removes hidden nodes without parents, and those that this leaves without parents.

    Cuts by other rules in the same edit count, whatever the order of the rules. The relations of a
    removed node are not cuts, so a budget does not limit them.

    Attributes:
        fold_bias: add an orphan's constant φ(bias)·weight to its children's biases, which keeps the
            function of the net. The commit raises EditError if a child's bias is frozen, and
            PlanError if a policy runs a transition from such a layer.
        layers: numbers of hidden layers; all of them by default.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> with net.edit() as edit:
        ...     edit.cut(net.layers[1][0].incoming())
        ...     RemoveOrphans()(net, edit, RuleContext())
        >>> net.sizes
        [4, 2, 2]
    """

    fold_bias: bool = False
    layers: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_numbers(self.layers))

    def __call__(self, net: GrapNet, edit: Edit, context: RuleContext) -> None:
        """Asks the edit to remove orphans."""
        edit.remove_orphans(self.layers, fold_bias=self.fold_bias)
        hidden = range(1, len(net.layers) - 1)
        given = hidden if self.layers is None else cast("tuple[int, ...]", self.layers)
        numbers = [number % len(net.layers) for number in given]
        if self.fold_bias:
            leaving = [t for number in numbers for t in net.leaving(number)]
            net.execution.require_sum("fold_bias=True", leaving)
        present = sum(count_orphans(net, number) for number in numbers)
        edit.remark(f"orphans before the edit: {present}", orphans=present)
