"""Hidden nodes without children: nobody hears them, they stay until they are removed, and then
nothing changes.
"""

import shlex
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grapnet as gn

from .columns import counted

_MOST = 6  # nodes that are told one by one


class Childless(NamedTuple):
    """Nodes that have lost their last child, and the command that takes them away.

    Attributes:
        uids: of these nodes.
        owners: how many of them each owner has; None stands for those without.
        remove: the command.
        others: how many nodes it takes away beside them.
    """

    uids: list[int]
    owners: dict[str | None, int]
    remove: str
    others: int

    def lines(self) -> list[str]:
        """Returns it for people, as lines; none without such nodes."""
        if not self.uids:
            return []
        one, few = len(self.uids) == 1, len(self.uids) <= _MOST
        which = f" (uid{'' if one else 's'} {', '.join(map(str, self.uids))})" if few else ""
        names = [repr(owner) for owner in self.owners if owner is not None]
        whose = f" of {', '.join(names)}" if len(names) == len(self.owners) <= _MOST else ""
        others = f", and {self.others:,} more that nobody hears" if self.others else ""
        told = (
            f"{counted(len(self.uids), 'node')}{whose} {'has' if one else 'have'} no children"
            f" left{which}"
        )
        return [f"{told}; {self.remove} takes {'it' if one else 'them'} away{others}"]

    def data(self) -> dict[str, Any] | None:
        """Returns it as plain data; None without such nodes."""
        owners = [{"owner": owner, "nodes": nodes} for owner, nodes in self.owners.items()]
        return self._asdict() | {"owners": owners} if self.uids else None


def hidden_nodes(net: gn.GrapNet, *, childless: bool) -> Tensor:
    """Returns the uids of hidden nodes that have no children, or of those that have some."""
    hidden = zip(net.layers[1:-1], net.transitions[1:], strict=True)
    found = [
        layer.uid[((store.topology.degrees == 0) == childless).cpu()] for layer, store in hidden
    ]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])


def unheard_nodes(net: gn.GrapNet) -> Tensor:
    """Returns the uids of hidden nodes that have no children, or only such children."""
    # rows of the layer behind
    found, gone = (
        [torch.empty(0, dtype=torch.int64)],
        torch.empty(0, dtype=torch.int64),
    )
    for layer, store in reversed(list(zip(net.layers[1:-1], net.transitions[1:], strict=True))):
        lost = store.topology.leading_to(gone.to(store.child.device))
        gone = (store.topology.degrees_without(lost) == 0).nonzero().flatten()
        found.append(layer.uid[gone.cpu()])
    return torch.cat(found)


def left_childless(net: gn.GrapNet, before: Tensor, place: str) -> Childless:
    """Returns the nodes that have lost their last child.

    Args:
        net: the net.
        before: uids of the hidden nodes that had children.
        place: of the net in its model, "" when it is all of the file.
    """
    present = hidden_nodes(net, childless=True)
    fresh = present[torch.isin(present, before)]
    nodes = net.select(
        layer=range(1, len(net.layers) - 1), where=lambda nodes: torch.isin(nodes.uids, fresh)
    )
    owners: dict[str | None, int] = {}
    for owner in nodes.owners:
        owners[owner] = owners.get(owner, 0) + 1
    words = ["grapnet", "remove", "FILE", *(["--net", place] if place else []), "--childless"]
    return Childless(
        fresh.tolist(), owners, shlex.join(words), len(unheard_nodes(net)) - len(fresh)
    )
