"""Hidden nodes that an edit leaves without children: they take part in nothing, and stay until they are removed."""

import shlex
from typing import NamedTuple

import torch
from torch import Tensor

import grapnet as gn

from .columns import counted

_MOST = 3  # owners that are told one by one


class Childless(NamedTuple):
    """Nodes of one owner that have lost their last child, and the command that takes away these and no others."""

    owner: str | None
    nodes: int
    remove: str | None

    def __str__(self) -> str:
        whose = "without owner " if self.owner is None else f"of {self.owner!r} "
        verb, them = ("has", "it") if self.nodes == 1 else ("have", "them")
        told = f"{counted(self.nodes, 'node')} {whose}{verb} no children left"
        return told if self.remove is None else f"{told}; {self.remove} takes {them} away"


def hidden_nodes(net: gn.GrapNet, *, childless: bool) -> Tensor:
    """Returns the uids of hidden nodes that have no children, or of those that have some."""
    hidden = zip(net.layers[1:-1], net.transitions[1:], strict=True)
    found = [layer.uid[((store.topology.degrees == 0) == childless).cpu()] for layer, store in hidden]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])


def left_childless(net: gn.GrapNet, before: Tensor, place: str) -> list[Childless]:
    """Returns, owner by owner, the nodes that have lost their last child.

    Args:
        net: the net.
        before: uids of the hidden nodes that had children.
        place: of the net in its model, "" when it is all of the file.
    """
    hidden, present = range(1, len(net.layers) - 1), hidden_nodes(net, childless=True)
    fresh = present[torch.isin(present, before)]
    owners = dict.fromkeys(name for n in hidden for name in net.layers[n].owner_names.names) if len(fresh) else {}
    found = []
    for owner in owners:
        nodes = net.select(layer=hidden, owner=owner)
        count, remove = int(torch.isin(nodes.uids, fresh).sum()), None
        if owner is not None and bool(torch.isin(nodes.uids, present).all()):  # the command removes all of them
            words = ["grapnet", "remove", "FILE", *(["--net", place] if place else []), "--owner", owner]
            if len(nodes) < len(net.select(owner=owner)):  # it refuses sensory and output nodes
                words += [word for n, uids in nodes.uids_by_layer.items() if len(uids) for word in ("--layer", str(n))]
            remove = shlex.join(words)
        found += [Childless(owner, count, remove)] if count else []
    return found


def told_of(childless: list[Childless]) -> list[str]:
    """Returns lines about them, one an owner where they are few."""
    if len(childless) <= _MOST:
        return [str(one) for one in childless]
    return [f"{sum(one.nodes for one in childless):,} nodes of {len(childless):,} owners have no children left"]
