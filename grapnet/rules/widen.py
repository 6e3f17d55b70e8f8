"""GrowWidth: a wider hidden layer that computes what the narrow one did, until training makes use
of it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grapnet.core._activation import activation_function
from grapnet.core._change import contains
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.network import GrapNet

from .budget import weakest_within
from .gradients import GradientRecorder
from .grow import affordable, hidden_layer, require_count
from .rule import Moment, Recorder
from .together import (
    gone_relations,
    leaving_relations,
    positions_in,
    refuse_attention,
    staying,
    unavailable_relations,
)


@dataclass(frozen=True)
class GrowWidth:
    """Adds nodes to a hidden layer such that the function stays the same.

    - "zero_outgoing": related to every node above, with random weights, and to every node below,
      with weights 0.
    - "net2net" (Chen et al. 2016): copies of nodes drawn at random, with their parents, bias,
      activation and owner. A node and its copies share its outgoing weights. An edit cannot assign
      a weight, so what is shared is cut and connected again: it goes to the end of its owner's
      list, and attached optimizers start it afresh, like the copies. The rest of the original
      stays, its incoming state included. A relation that may not be cut, since it is frozen or the
      budget protects it, is not shared; its copies get weights that cancel out, 0 when there is one
      copy.
    - "gradmax" (Evci et al. 2022): weights 0 from every node above; to the nodes below, the
      directions in which the gradient of those weights is largest, the leading singular vectors of
      the gradients that a recorder has seen. A bias too small to change a sum keeps a ReLU, which
      has no slope at 0, on its rising side. Where a direction's two signs are open, the one comes
      first that makes use of positive activations; when the directions are used up the other signs
      follow, and then no more nodes are grown.

    A budget of edits makes it grow fewer nodes, each of them whole. Nodes that the rules before
    remove in the same edit are neither related to nor copied, and copies do without relations that
    those cut. Attention in the transition to the nodes below, or for "net2net" in the one from
    above, raises EditError: relations then share what they say.

    Attributes:
        layer: number of a hidden layer; negative numbers count from the output.
        nodes: how many to add.
        init: one of the above.
        noise: of "net2net": how unevenly weights are shared, from 0 (evenly) to below 1. The
            function stays the same with any; but even shares get equal gradients, and copies stay
            copies of each other.
        split: of "net2net": False shares nothing, so that the original keeps its weights, slots and
            optimizer state, and the outgoing weights of its copies cancel out.
        scale: of "gradmax": the norm of the outgoing weights of each new node.
        owner: a tag for the new nodes; with None, copies take that of the original.

    Examples:
        >>> import grapnet as gn
        >>> net, x = (
        ...     gn.GrapNet([4, 3, 2], dtype=torch.float64),
        ...     torch.ones(1, 4, dtype=torch.float64),
        ... )
        >>> before = net(x)
        >>> with net.edit() as edit:
        ...     GrowWidth(layer=1, nodes=5, init="net2net")(net, edit, Moment())
        >>> net.sizes, torch.allclose(net(x), before, rtol=0, atol=1e-12)
        ([4, 8, 2], True)
    """

    layer: int
    nodes: int
    init: Literal["zero_outgoing", "net2net", "gradmax"] = "zero_outgoing"
    noise: float = 0.1
    split: bool = True
    scale: float = 1.0
    owner: str | None = None

    def __post_init__(self) -> None:
        require_count(self.nodes, "nodes to add")
        if self.init not in ("zero_outgoing", "net2net", "gradmax"):
            raise EditError(f'init is "zero_outgoing", "net2net" or "gradmax", got {self.init!r}')
        if not 0 <= self.noise < 1:
            raise EditError(f"noise lies between 0 and 1, 1 excluded, got {self.noise!r}")
        if not 0 < self.scale < float("inf"):
            raise EditError(f"scale is a positive number, got {self.scale!r}")
        if self.owner is not None and not isinstance(self.owner, str):
            raise EditError(f"an owner is a string or None, got {self.owner!r}")

    def recorders(self, net: GrapNet) -> dict[str, Recorder]:
        """Returns, for "gradmax", a recorder of the gradients between the layers around."""
        if self.init != "gradmax":
            return {}
        number = hidden_layer(net, self.layer)
        return {"gradients": GradientRecorder(upper=number - 1, lower=number + 1)}

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Adds the nodes."""
        number = hidden_layer(net, self.layer)
        for t in (number - 1, number) if self.init == "net2net" else (number,):
            refuse_attention(
                net,
                t,
                f"GrowWidth({self.init!r})",
                f'let transition {t} run with "auto" to widen there',
            )
        added = {
            "zero_outgoing": self._add_silent,
            "net2net": self._add_copies,
            "gradmax": self._add_steepest,
        }
        added[self.init](net, edit, now, number)

    def _add_silent(self, net: GrapNet, edit: Edit, now: Moment, number: int) -> None:
        above, below = (staying(net, edit, n) for n in (number - 1, number + 1))
        count = affordable(self.nodes, len(above) + len(below), now.budget)
        edit.remark(
            f"widens layer {number} by {count} nodes that say nothing yet",
            layer=number,
            nodes=count,
        )
        if count:
            new = edit.add_nodes(number, count, owner=self.owner)
            edit.connect(above, new, weights="linear")
            edit.connect(new, below, weights="zero")

    def _add_steepest(self, net: GrapNet, edit: Edit, now: Moment, number: int) -> None:
        if "gradients" not in now.evidence:
            raise EditError(
                'init="gradmax" needs evidence["gradients"]; inject the rule into a RuleManager,'
                f" or record some: GradientRecorder(upper={number - 1}, lower={number + 1})"
            )
        above, below = net.layers[number - 1], net.layers[number + 1]
        gradients = now.evidence["gradients"].matrix()
        if tuple(gradients.shape) != (len(above), len(below)):
            raise EditError(
                f"gradients of {list(gradients.shape)} nodes do not fit the {len(above)} nodes"
                f" above and {len(below)} below layer {number}"
            )
        upper, lower = (staying(net, edit, n) for n in (number - 1, number + 1))
        if len(edit.removals):
            rows = [
                net.rows(n, nodes.uids).to(gradients.device)
                for n, nodes in ((number - 1, upper), (number + 1, lower))
            ]
            gradients = gradients[rows[0].long()][:, rows[1].long()]
        directions = steepest_directions(gradients)
        count = min(affordable(self.nodes, len(upper) + len(lower), now.budget), len(directions))
        edit.remark(
            f"widens layer {number} by {count} nodes of steep gradient", layer=number, nodes=count
        )
        if count:
            bias = _rising_bias(
                net.layers[number].default_activation, net.layers[number].parameter.dtype
            )
            new = edit.add_nodes(number, count, owner=self.owner, bias=bias)
            edit.connect(upper, new, weights="zero")
            edit.connect(new, lower, weights=directions[:count] * self.scale)

    def _add_copies(self, net: GrapNet, edit: Edit, now: Moment, number: int) -> None:
        rows = self._originals(net, edit, now, number)
        edit.remark(
            f"widens layer {number} by {len(rows)} copies of nodes", layer=number, nodes=len(rows)
        )
        if len(rows):
            copies = _add_alike(net, edit, number, rows, self.owner)
            _copy_incoming(net, edit, number, rows, copies)
            self._share_outgoing(net, edit, now, number, rows, copies)

    def _originals(self, net: GrapNet, edit: Edit, now: Moment, number: int) -> Tensor:
        """Returns the rows to copy, drawn from the nodes with children: ascending, each as often as
        it is copied.

        A copy costs its own relations, and the first one of a node also those that are connected
        again.
        """
        into, out = net.transitions[number - 1].topology, net.transitions[number].topology
        if out.n_relations == 0:
            raise EditError(
                f'layer {number} has no node with children to copy; use init="zero_outgoing"'
            )
        lost = out.parents_at(unavailable_relations(net, edit, number)).long()
        candidates = (
            (out.degrees > torch.bincount(lost, minlength=out.n_parents)).nonzero().flatten().cpu()
        )
        if len(candidates) == 0:  # the rules before have taken them all
            return candidates
        drawn = candidates[(_uniform(self.nodes, edit.generator) * len(candidates)).long()]
        if now.budget.edits is not None:
            degrees, (ranked, order) = out.degrees.cpu()[drawn], drawn.sort(stable=True)
            first = torch.ones(len(drawn), dtype=torch.bool, device="cpu")
            first[order[1:]] = ranked[1:] != ranked[:-1]
            costs = into.fan_in().cpu()[drawn] + degrees + degrees * first
            drawn = drawn[: int((costs.cumsum(0) <= now.budget.edits).sum())]
        return drawn.sort().values

    def _share_outgoing(
        self, net: GrapNet, edit: Edit, now: Moment, number: int, rows: Tensor, copies: Tensor
    ) -> None:
        """Connects the copies, and the originals again, each relation with its share of the
        original's weight.
        """
        store, layer = net.transitions[number], net.layers[number]
        topology, originals = store.topology, rows.unique()
        owned = layer[originals].outgoing() - (edit.cuts | leaving_relations(edit))
        # Whatever may be cut; beside the cuts of another rule nobody knows what nodes can spare.
        uncertain = (now.budget.parents or now.budget.children) and len(edit.cuts)
        shared = weakest_within(
            net, owned, len(owned) if self.split and not uncertain else 0, now.budget
        )
        unavailable = unavailable_relations(net, edit, number)
        edit.cut(shared)
        again = positions_in(shared, number, net.device).long()
        copied = topology.owned_by(rows.to(net.device))
        free = ~contains(unavailable, copied)
        positions = torch.cat([again, copied[free].long()])  # one for each that has a share
        degrees = topology.degrees.cpu()[rows].long()
        parents = torch.cat([shared.parents, copies.repeat_interleave(degrees)[free.cpu()]])
        split = torch.zeros(topology.n_relations, dtype=torch.bool, device=net.device)
        split[again] = True
        shares = (1 + self.noise * (2 * _uniform(len(positions), edit.generator) - 1)).to(
            net.device
        )
        whole = shares.new_zeros(topology.n_relations).index_add_(0, positions, shares)[positions]
        times = torch.bincount(positions, minlength=topology.n_relations)[positions]
        # Shares of a whole that add up to 1; beside a relation that stays as it is they add up to
        # 0.
        shares = torch.where(split[positions], shares / whole, shares - whole / times)
        children = net.layers[number + 1].uid[topology.child[positions].cpu().long()]
        weights = store.read(positions.int()).detach() * shares
        edit.connect(parents, children, pairs="aligned", weights=weights)


def steepest_directions(gradients: Tensor) -> Tensor:
    """Returns unit vectors of outgoing weights [n, n_lower], those with the largest gradient at
    zero weights first.

    Args:
        gradients: between the nodes above and below, [n_upper, n_lower].
    """
    upper, strength, lower = torch.linalg.svd(
        gradients.detach().cpu().double(), full_matrices=False
    )
    rounding = torch.finfo(gradients.dtype).eps * max(gradients.shape, default=1)
    found = int((strength > rounding * strength[:1].sum()).sum())
    # A step moves the incoming weights of a node along -upper: a positive sum there makes it speak
    # for positive inputs.
    signs = torch.where(upper[:, :found].sum(0) > 0, -1.0, 1.0)
    lower = lower[:found] * signs[:, None]
    return torch.cat([lower, -lower])


def _rising_bias(activation: str, dtype: torch.dtype) -> float:
    """Returns a bias so small that it changes no sum, at which the activation has a slope and is
    next to 0.
    """
    bias = max(2.0**-100, torch.finfo(dtype).tiny)
    z = torch.tensor(bias, dtype=torch.float64, device="cpu", requires_grad=True)
    with torch.enable_grad():
        h = activation_function(activation)(z)
        (slope,) = torch.autograd.grad(h, z)
    if float(h.detach().abs()) > 1e3 * bias or float(slope) == 0:
        raise EditError(
            'init="gradmax" needs an activation that passes through 0 with a slope, and'
            f' {activation!r} does not; use init="zero_outgoing"'
        )
    return bias


def _add_alike(net: GrapNet, edit: Edit, number: int, rows: Tensor, owner: str | None) -> Tensor:
    """Adds a node for each of the ascending rows, with its bias, activation and owner, and returns
    their uids.
    """
    layer = net.layers[number]
    kinds, owners = layer.activation_names, layer.owner_names
    codes, biases = (
        kinds.codes[rows].long() * len(owners.names) + owners.codes[rows],
        layer[rows.unique()].biases,
    )
    biases = biases.detach()[rows.unique(return_inverse=True)[1].to(net.device)]
    uids = torch.empty_like(rows)
    for code in codes.unique().tolist():
        alike = codes == code
        new = edit.add_nodes(
            number,
            int(alike.sum()),
            activation=kinds.names[code // len(owners.names)],
            owner=owners.names[code % len(owners.names)] if owner is None else owner,
            bias=biases[alike.to(net.device)],
        )
        uids[alike] = new.uids
    return uids


def _copy_incoming(net: GrapNet, edit: Edit, number: int, rows: Tensor, copies: Tensor) -> None:
    """Connects the parents of the ascending rows to their copies, with the same weights."""
    store = net.transitions[number - 1]
    positions = store.topology.leading_to(rows.unique().to(net.device))
    positions = positions[~contains(gone_relations(net, edit, number - 1), positions)]
    children = store.child[positions.long()].cpu().long()
    counts = torch.bincount(rows, minlength=net.sizes[number])
    times = counts[children]  # copies that a relation is for
    source = torch.arange(len(positions), device="cpu").repeat_interleave(times)
    nth = torch.arange(len(source), device="cpu") - (times.cumsum(0) - times)[source]
    children = copies[(counts.cumsum(0) - counts)[children[source]] + nth]
    positions = positions[source.to(net.device)]
    parents = net.layers[number - 1].uid[store.topology.parents_at(positions).cpu().long()]
    edit.connect(parents, children, pairs="aligned", weights=store.read(positions).detach())


def _uniform(count: int, generator: torch.Generator | None) -> Tensor:
    """Returns numbers between 0 and 1, 1 excluded, on the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.rand(count, dtype=torch.float64, generator=generator, device=device).cpu()
