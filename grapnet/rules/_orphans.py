"""RemoveOrphans: removes hidden nodes without parents."""

from dataclasses import dataclass
from typing import Any, cast

from grapnet._network import GrapNet
from grapnet.core._errors import EditError
from grapnet.spaces._adopted import Adopted

from ._rule import Layers, RuleContext, as_names, count_orphans


@dataclass(frozen=True)
class RemoveOrphans:
    """Removes hidden nodes without parents, and those that this leaves without parents.

    Cuts by other rules in the same edit count, whatever the order of the rules. The relations of a
    removed node are not cuts, so a budget does not limit them.

    In an adopted model nodes lose their parents when relations of its weights are cut. Orphans
    leave the spaces from which nodes can be removed exactly, and so does what they sent: the
    constant that their biases and norms make.

    Attributes:
        fold_bias: add an orphan's constant φ(bias)·weight to its children's biases, which keeps the
            function of the net. The commit raises EditError if a child's bias is frozen, and
            PlanError if a policy runs a transition from such a layer. For nets.
        layers: numbers of hidden layers; all of them by default. Of an adopted model, spaces or
            their names.
        childless: also remove nodes that no relation leads away from, which keeps the function. For
            adopted models.

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
    layers: Layers | None = None
    childless: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_names(self.layers))

    def __call__(self, net: GrapNet | Adopted, edit: Any, context: RuleContext) -> None:
        """Asks the edit to remove orphans."""
        if isinstance(net, Adopted):
            self._remove_from_spaces(net, edit)
            return
        if self.childless:
            raise EditError("childless=True works on adopted models; nets keep such nodes")
        edit.remove_orphans(self.layers, fold_bias=self.fold_bias)
        hidden = range(1, len(net.layers) - 1)
        given = hidden if self.layers is None else cast("tuple[int, ...]", self.layers)
        numbers = [number % len(net.layers) for number in given]
        if self.fold_bias:
            leaving = [t for number in numbers for t in net.leaving(number)]
            net.execution.require_sum("fold_bias=True", leaving)
        present = sum(count_orphans(net, number) for number in numbers)
        edit.remark(f"orphans before the edit: {present}", orphans=present)

    def _remove_from_spaces(self, net: Adopted, edit: Any) -> None:
        edit.remove_orphans(self.layers, fold_bias=self.fold_bias, childless=self.childless)
        numbers = net._orphanages()
        if self.layers is not None:
            numbers = edit._numbers_of(self.layers)
        present = sum(count_orphans(net, number) for number in numbers)
        edit.remark(f"orphans before the edit: {present}", orphans=present)
