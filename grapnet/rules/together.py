"""What the rules before have asked of the same edit: pairs that are taken, nodes that go."""

import torch
from torch import Tensor

from grapnet.core._change import contains
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._sets import NodeSet, RelationSet
from grapnet.network import GrapNet


def taken_pairs(net: GrapNet, edit: Edit, t: int) -> Tensor:
    """Returns the pairs of transition t that the edit connects already, or whose node it removes;
    ascending.

    The number of a pair is parent row · n_children + child row. Relations may be among them.
    """
    n_parents, n_children = net.sizes[t], net.sizes[t + 1]
    found = [asked_pairs(net, edit, t)]
    leaving = edit.removals.rows_by_layer()
    if t in leaving:
        found.append(
            (leaving[t].long()[:, None] * n_children + torch.arange(n_children, device="cpu")).view(
                -1
            )
        )
    if t + 1 in leaving:
        found.append(
            (
                torch.arange(n_parents, device="cpu")[:, None] * n_children + leaving[t + 1].long()
            ).view(-1)
        )
    return torch.cat(found).unique() if len(found) > 1 else found[0]


def asked_pairs(net: GrapNet, edit: Edit, t: int) -> Tensor:
    """Returns the pairs of present nodes that the edit was asked to connect, numbered as above;
    ascending.
    """
    if edit.n_connections == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    parents, children = (
        net.layers[t + end].rows(uids).long() for end, uids in enumerate(edit.connections)
    )
    here = (parents >= 0) & (children >= 0)
    return (parents[here] * net.sizes[t + 1] + children[here]).unique()


def absent_among(net: GrapNet, t: int, pairs: Tensor) -> Tensor:
    """Returns those of the numbered pairs that have no relation."""
    if len(pairs) == 0:
        return pairs
    rows = pairs.to(net.device)
    n_children = net.sizes[t + 1]
    return pairs[
        (net.transitions[t].topology.find(rows // n_children, rows % n_children) < 0).cpu()
    ]


def gone_relations(net: GrapNet, edit: Edit, t: int) -> Tensor:
    """Returns the ascending positions of the relations that go: cut and not connected again, or
    with a node.
    """
    cuts = positions_in(edit.cuts, t, net.device)
    if len(cuts):
        topology = net.transitions[t].topology
        pairs = topology.parents_at(
            cuts
        ).long() * topology.n_children + topology.child.index_select(0, cuts)
        cuts = cuts[~contains(asked_pairs(net, edit, t), pairs.cpu()).to(cuts.device)]
    return torch.cat([cuts, positions_in(leaving_relations(edit), t, net.device)]).unique()


def unavailable_relations(net: GrapNet, edit: Edit, t: int) -> Tensor:
    """Returns the ascending positions of the relations that are cut, connected again or not, or go
    with a node.
    """
    return positions_in(edit.cuts | leaving_relations(edit), t, net.device)


def leaving_relations(edit: Edit) -> RelationSet:
    """Returns the relations that leave with nodes that the edit removes."""
    return edit.removals.incoming() | edit.removals.outgoing()


def staying(net: GrapNet, edit: Edit, layer: int) -> NodeSet:
    """Returns the nodes of a layer without those that the edit removes."""
    removals = edit.removals
    return net.select(layer=layer) - removals if len(removals) else net.layers[layer]


def refuse_attention(net: GrapNet, t: int, what: str, instead: str) -> None:
    """Raises EditError when a transition runs with attention, under which a relation's share
    depends on the others.
    """
    if net.execution.choices()[t] == "attention":
        raise EditError(
            f"{what} keeps the function of sums only, and transition {t} runs with attention, where"
            f" every relation changes the shares of the others; {instead}"
        )


def positions_in(relations: RelationSet, t: int, device: torch.device) -> Tensor:
    """Returns the int32 positions of the relations of one transition."""
    at = relations.positions_by_transition().get(t, range(0))
    return (
        at
        if isinstance(at, Tensor)
        else torch.arange(at.start, at.stop, dtype=torch.int32, device=device)
    )
