"""FreezeOwner: freezes what a task has learnt."""

from dataclasses import dataclass

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph

from ._grow import owner_of
from ._rule import RuleContext


@dataclass(frozen=True)
class FreezeOwner:
    """Freezes the nodes of an owner, by default those of the task that just ended.

    It freezes the present relations; relations that a frozen node gains later are trainable until
    it runs again. An owner without nodes raises EditError.

    Attributes:
        owner: the owner; None for that of the task of `RuleManager.apply`.
        incoming: freeze the relations that lead to the nodes.
        outgoing: freeze the relations that the nodes own.
        bias: freeze their biases; of an adopted model also the entries that norms have for them.
        tag: the owner of a task's nodes, as in `GrowForTask`.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2])
        >>> with net.edit() as edit:
        ...     edit.set_owner(net.layers[1][:2], "task-0")
        >>> with net.edit() as edit:
        ...     FreezeOwner()(net, edit, RuleContext(task=0))
        >>> net.count().frozen, net.layers[1].frozen.tolist()
        (14, [True, True, False])
    """

    owner: str | None = None
    incoming: bool = True
    outgoing: bool = True
    bias: bool = True
    tag: str = "task-{task}"

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Asks the edit to freeze them."""
        owner = owner_of(self.tag, context.task) if self.owner is None else self.owner
        if owner not in net.owners:
            known = ", ".join(map(repr, net.owners)) or "none"
            raise EditError(f"no node has the owner {owner!r}; owners are: {known}")
        nodes = net.select(owner=owner)
        edit.freeze(nodes, incoming=self.incoming, outgoing=self.outgoing, bias=self.bias)
        edit.remark(f"freezes the nodes of {owner!r}", owner=owner, nodes=len(nodes))
