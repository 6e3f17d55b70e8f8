"""Budgets: how much one apply may change, and how few parents and children it may leave a node."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import as_positions, counted, first_in_order, require_ranks
from grapnet.core._sets import RelationSet
from grapnet.execution import _native


@dataclass(frozen=True)
class Budget:
    """The limits of a rule in one `apply`, for all nets of the `apply` together.

    Only cuts count, not the relations that a removed node loses.

    Attributes:
        edits: the largest number of relations to cut, and of relations to connect; None for no
            limit.
        parents: the smallest number of parents after cuts, for nodes that have as many.
        children: the smallest number of children after cuts, for nodes that have as many.
    """

    edits: int | None = None
    parents: int = 0
    children: int = 0

    def tightened(self, other: "Budget | None") -> "Budget":
        """Returns the budget that keeps within both.

        Examples:
            >>> Budget(edits=10, parents=1).tightened(Budget(parents=3))
            Budget(edits=10, parents=3, children=0)
        """
        if other is None:
            return self
        edits = [budget.edits for budget in (self, other) if budget.edits is not None]
        return Budget(
            min(edits, default=None),
            max(self.parents, other.parents),
            max(self.children, other.children),
        )


def weakest_within(
    net: Graph,
    relations: RelationSet,
    count: int,
    budget: Budget,
    key: Tensor | None = None,
) -> RelationSet:
    """Returns the `count` weakest of some relations, or fewer, that can be cut within a budget.

    A node that would have too few parents or children keeps its strongest relations, and relations
    of other nodes are taken instead. A relation that one of its two nodes keeps does not count for
    the other, so a few more may stay than necessary. Relations outside the set, and frozen ones,
    stay and count as parents and children.

    Args:
        net: the net of the relations.
        relations: the relations to choose from.
        count: the largest number to return; `budget.edits` may allow fewer.
        budget: the limits.
        key: one number per relation, |weight| by default; the smallest are the weakest.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> relations = net.layers[0].outgoing()
        >>> [len(weakest_within(net, relations, 12, Budget(parents=n))) for n in (0, 1, 3)]
        [12, 9, 3]
    """
    if key is None:
        key = relations.strengths
    else:
        key = key.detach().reshape(-1).to(net.device)
    touched = relations._positions_by_transition()
    if any(len(net.transitions[t].frozen_at) for t in touched):
        free = ~relations.frozen
        relations = relations[free]
        key = key[free]
    count = min(count, len(relations) if budget.edits is None else budget.edits)
    if budget.parents == budget.children == 0 or count == 0 or len(relations) == 0:
        return relations.smallest(count=count, key=key)
    require_ranks(key)
    key = key.int() if key.dtype == torch.bool else key
    return relations._at(weakest_places(key, count, sides_of(net, relations, budget)))


def enforce(
    net: Graph,
    edit: Edit,
    budget: Budget,
    *,
    settled: RelationSet,
    cuts: int | None,
    connections: int | None,
) -> None:
    """Takes back cuts of an open edit until it keeps within a budget, the largest |weight| first.

    Relations that the edit connects do not make up for those that it cuts.

    Args:
        net: the net of the edit.
        edit: the open edit.
        budget: how many parents and children cuts leave a node.
        settled: cuts that stand in any case.
        cuts: how many cuts are allowed beside the settled ones; None for any number.
        connections: how many connections the edit may have in all; None for any number.

    Raises:
        EditError: the edit connects more relations than are allowed; nothing was taken back.
    """
    if connections is not None and edit.n_connections > connections:
        raise EditError(
            f"the edit connects {edit.n_connections:,} relations, and the budget allows"
            f" {connections:,}; connect fewer, or give a larger Budget(edits=…)"
        )
    everything = edit.cuts
    asked = everything - settled
    if (budget.parents or budget.children) and len(asked):
        key = asked.strengths.nan_to_num(nan=torch.inf)
        taken_back = torch.zeros(len(asked), dtype=torch.bool, device=key.device)
        for side in sides_of(net, asked, budget, gone=everything - asked):
            standing = torch.bincount(side.nodes[~taken_back], minlength=len(side.spare))
            # What is taken back for its child counts for its parent, too.
            left = key.masked_fill(taken_back, -torch.inf)
            taken_back |= largest_of_each(left, side.nodes, standing - side.spare)
        edit.keep(asked[taken_back])
        asked = asked[~taken_back]
    if cuts is not None and len(asked) > cuts:
        edit.keep(asked.largest(count=len(asked) - cuts))


@dataclass(eq=False)
class Side:
    """One end of some relations: the number of each one's node, and how many of them each node can
    spare.
    """

    nodes: Tensor  # [n_relations] int64
    spare: Tensor  # [n_nodes] int64


def sides_of(
    net: Graph,
    relations: RelationSet,
    budget: Budget,
    *,
    gone: RelationSet | None = None,
    outputs: int = 0,
) -> list[Side]:
    """Returns the ends whose minimum matters.

    Args:
        net: the net.
        relations: the relations that go, or might.
        budget: the minima.
        gone: others that go in any case; what they take from a node it cannot spare again.
        outputs: the smallest number of parents of outputs, where the budget has no larger one.
    """
    sizes = net.sizes
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    sides = []
    for end, least in ((1, budget.parents), (0, budget.children)):
        # Wirings of other layers are not asked for: a large model would build them first.
        layers = {net.ends[t][end] for t in relations._positions_by_transition()}
        held = []
        if end and outputs > least:
            held = [layer for layer in layers if net._is_output(layer)]
        if least == 0 and not held:
            continue
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=net.device)
        for transition, ends in zip(net.transitions, net.ends, strict=True):
            layer = ends[end]
            if layer not in layers:
                continue
            topology = transition.topology
            first = offsets[layer]
            total[first : first + sizes[layer]] += (
                topology.fan_in() if end else topology.degrees.long()
            )
        nodes = _nodes(net, relations, end, offsets)
        spare = total - least
        for layer in held:
            spare[offsets[layer] : offsets[layer] + sizes[layer]] -= outputs - least
        spare.clamp_(min=0)
        if gone is not None:
            taken = {}
            for t, at in gone._positions_by_transition().items():
                if net.ends[t][end] in layers and len(at):
                    taken[t] = at
            if taken:
                others = _nodes(net, RelationSet(net, taken), end, offsets)
                spare = (spare - counted(others, len(spare))).clamp_(min=0)
        sides.append(Side(nodes, spare))
    return sides


def _nodes(net: Graph, relations: RelationSet, end: int, offsets: list[int]) -> Tensor:
    """Returns for every relation the number of its parent (end 0) or child (end 1), counted through
    all layers.
    """
    found = [torch.empty(0, dtype=torch.int64, device=net.device)]
    for t in relations._positions_by_transition():
        topology = net.transitions[t].topology
        positions = positions_in(relations, t, net.device)
        if end:
            rows = topology.child.index_select(0, positions)
        else:
            rows = topology.parents_at(positions)
        found.append(rows.long() + offsets[net.ends[t][end]])
    return torch.cat(found)


def weakest_places(key: Tensor, count: int, sides: list[Side]) -> Tensor:
    """Returns the ascending places of the weakest `count` relations of which no node loses more
    than it can spare.
    """
    free: Tensor | None = None  # the places of those that need not stay; None for all
    while True:
        if free is None:
            chosen = first_in_order(key, min(count, len(key)), largest=False)
        else:
            some = first_in_order(key[free], min(count, len(free)), largest=False)
            chosen = free.index_select(0, some).int()
        losses = [counted(side.nodes[chosen.long()], len(side.spare)) for side in sides]
        short = [loss > side.spare for loss, side in zip(losses, sides, strict=True)]
        if not short or not bool(torch.cat(short).any()):
            return chosen
        # A node that would fall short keeps its strongest, so it falls short only once.
        stays = torch.zeros(len(key), dtype=torch.bool, device=key.device)
        if free is not None:
            stays[:] = True
            stays[free] = False
        for side, falls_short in zip(sides, short, strict=True):
            total = counted(side.nodes, len(side.spare))
            stays |= largest_of_each(key, side.nodes, (total - side.spare) * falls_short)
        free = (~stays).nonzero().view(-1)


def largest_of_each(key: Tensor, nodes: Tensor, quota: Tensor) -> Tensor:
    """Marks as many entries of every node as its quota, the largest keys first, [n_entries].

    Of equals the first come in. NaN is not marked.

    Args:
        key: [n_entries].
        nodes: the number of each entry's node, [n_entries].
        quota: how many of each node, [n_nodes].
    """
    if _native.reads(key):
        # numpy sorts numbers of 16 bits by radix, many times faster
        small = np.uint16 if len(quota) <= 2**16 else np.int32
        order = torch.from_numpy(nodes.numpy().astype(small).argsort(kind="stable"))
        ptr = torch.zeros(len(quota) + 1, dtype=torch.int32, device="cpu")
        ptr[1:] = torch.bincount(nodes, minlength=len(quota)).cumsum(0)
        found = _native.largest_of_rows(key[order], ptr, quota, least=-math.inf)
        at = order[found.long()]
    else:
        at = (quota[nodes] > 0).nonzero().view(-1)
        at = at[key[at].argsort(descending=True, stable=True)]
        at = at[nodes[at].argsort(stable=True)]  # by node, and the largest of each node first
        numbers = nodes[at]
        rank = torch.arange(len(at), device=at.device) - torch.searchsorted(numbers, numbers)
        at = at[rank < quota[numbers]]
    marks = torch.zeros(len(key), dtype=torch.bool, device=key.device)
    marks[at] = True
    return marks


def shared_out(counts: list[int], most: int | None) -> list[int]:
    """Returns the counts, lowered in proportion where they sum to more than `most`."""
    total = sum(counts)
    if most is None or total <= most:
        return counts
    ends = [most * int(end) // total for end in np.cumsum([0, *counts])]
    return [stop - start for start, stop in pairwise(ends)]


def positions_in(relations: RelationSet, t: int, device: torch.device) -> Tensor:
    """Returns the int32 positions of the relations of one transition."""
    return as_positions(relations._positions_by_transition().get(t, range(0)), device)
