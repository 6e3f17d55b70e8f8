"""FreezeOwner: what a task has learnt stays as it is."""

from dataclasses import dataclass

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.network import GrapNet

from .grow import owner_of
from .rule import Moment


@dataclass(frozen=True)
class FreezeOwner:
    """Freezes the nodes of an owner, or those of the task that just ended.

    It freezes the relations that are there; those that a frozen node gains later are trainable
    until it runs again. An owner that no node has is refused: what a misspelt name leaves trainable
    would be noticed too late.

    Attributes:
        owner: the tag; None takes that of the task that `RuleManager.apply` is told.
        incoming: freeze the relations that lead to the nodes.
        outgoing: freeze the relations that the nodes own.
        bias: freeze their biases.
        tag: how a task becomes an owner, as in `GrowForTask`.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> with net.edit() as edit:
        ...     edit.set_owner(net.layers[1][:2], "task-0")
        >>> with net.edit() as edit:
        ...     FreezeOwner()(net, edit, Moment(task=0))
        >>> net.count().frozen, net.layers[1].frozen.tolist()
        (14, [True, True, False])
    """

    owner: str | None = None
    incoming: bool = True
    outgoing: bool = True
    bias: bool = True
    tag: str = "task-{task}"

    def __post_init__(self) -> None:
        if self.owner is not None and not isinstance(self.owner, str):
            raise EditError(
                f"an owner is a string, or None for the task that just ended, got {self.owner!r}"
            )
        if not (self.incoming or self.outgoing or self.bias):
            raise EditError(
                "FreezeOwner with incoming, outgoing and bias all False would freeze nothing"
            )
        owner_of(self.tag, 0)

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Asks the edit to freeze them."""
        owner = owner_of(self.tag, now.task) if self.owner is None else self.owner
        if owner not in net.owners:
            known = ", ".join(map(repr, net.owners)) or "none"
            raise EditError(f"no node has the owner {owner!r}; owners are: {known}")
        nodes = net.select(owner=owner)
        edit.freeze(nodes, incoming=self.incoming, outgoing=self.outgoing, bias=self.bias)
        edit.remark(f"freezes the nodes of {owner!r}", owner=owner, nodes=len(nodes))
