"""Nodes that an edit gives another owner: counted by the owner they had and the one they have."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import grapnet as gn
from grapnet.core.labels import Labels

from .columns import counted

_MOST = 6  # pairs of owners that are told one by one

Tags = list[tuple[Tensor, Labels]]  # uids and owners of every layer


class Retagged(NamedTuple):
    """How many nodes have gone from one owner to another; None is no owner."""

    before: str | None
    after: str | None
    nodes: int

    def __str__(self) -> str:
        return (
            f"owner of {counted(self.nodes, 'node')}: {_shown(self.before)} → {_shown(self.after)}"
        )


def tags_of(net: gn.GrapNet) -> Tags:
    """Returns who owns the nodes of a net; later edits leave it as it is."""
    return [(layer.uid, layer.owner_names) for layer in net.layers]


def retagged(before: Tags, net: gn.GrapNet) -> list[Retagged]:
    """Returns which owners have changed, of the nodes that were there before and still are."""
    counts: dict[tuple[str | None, str | None], int] = {}
    for (uids, owners), (other_uids, others) in zip(before, tags_of(net), strict=True):
        _, at, other_at = np.intersect1d(
            uids.numpy(), other_uids.numpy(), assume_unique=True, return_indices=True
        )
        both = Labels.join(
            [owners.select(torch.from_numpy(at)), others.select(torch.from_numpy(other_at))]
        )
        codes = both.codes.view(2, -1)  # [before and after, nodes]
        kinds, sizes = codes[:, codes[0] != codes[1]].unique(dim=1, return_counts=True)
        for (was, became), size in zip(kinds.t().tolist(), sizes.tolist(), strict=True):
            pair = both.names[was], both.names[became]
            counts[pair] = counts.get(pair, 0) + size
    return [Retagged(*pair, nodes) for pair, nodes in counts.items()]


def told_of_owners(changes: list[Retagged]) -> list[str]:
    """Returns lines about them, one a pair of owners where they are few."""
    if len(changes) <= _MOST:
        return [str(change) for change in changes]
    return [
        f"owner of {sum(change.nodes for change in changes):,} nodes: {len(changes):,} changes of"
        " owners"
    ]


def _shown(owner: str | None) -> str:
    return "none" if owner is None else repr(owner)
