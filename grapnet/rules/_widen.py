"""GrowWidth: wider hidden layers that compute what the narrow ones did, or something better."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._activation import activation_function
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._index_map import contains
from grapnet.core._sets import RelationSet
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._space import Space

from ._copies import copy_nodes
from ._gradients import GradientRecorder
from ._grow import affordable
from ._rule import (
    Layers,
    Recorder,
    RuleContext,
    as_names,
    gone_relations,
    only,
    seen_evidence,
    sources_of,
    staying,
    targets_of,
    unavailable_relations,
)
from ._steepest import SpaceGradientRecorder, rising_bias, values_of_steepest
from ._tiny import BottleneckRecorder, add_to_layer, add_to_space, require_no_removals


@dataclass(frozen=True)
class GrowWidth:
    """Adds nodes to hidden layers, or to spaces of an adopted model.

    All but "tiny" leave the function as it is.

    - "zero_outgoing": the new nodes get random weights from every node above and weights 0 to every
      node below.
    - "net2net" (Chen et al. 2016): the new nodes are copies of nodes drawn at random, with their
      parents, bias, activation and owner. A node and its copies share its outgoing weights; the
      relations of the original keep their slots and optimizer state. A relation that is frozen is
      not shared; the weights of its copies cancel out.
    - "gradmax" (Evci et al. 2022): the new nodes get weights 0 from every node above. Their
      outgoing weights are the directions in which the gradient of those weights is largest: the
      leading singular vectors of the recorded gradients. A bias too small to change a sum gives a
      ReLU a slope. The sign of a direction is the one that uses positive activations; the opposite
      signs follow when the directions are used up, and then no more nodes are added.
    - "tiny" (Verbockhaven et al. 2024): the new nodes express the part of the negative gradient
      that the layer below cannot express by changing its own weights: the product of their outgoing
      and incoming weights fits it best. They change the function by `scale` times this
      fit, which `search_scale` chooses on data of yours. There are at most as many as nodes below.

    A budget of edits makes it add fewer nodes, each of them complete. Nodes that earlier rules
    remove in the same edit are neither connected nor copied, and copies do not get relations that
    those rules cut. A policy in the transition to the nodes below, or for "net2net" in the one from
    above, raises PlanError.

    Spaces of an adopted model grow in all tensors that have their nodes: copies have the entries of
    the original in biases, norms and running statistics, and all readers of a node share alike. A
    space of which a removal would not be exact (`Space.verdict`) raises EditError. "gradmax" is for
    spaces that one Linear or convolution writes, and that Linears or convolutions read, with an
    activation and nothing else between them; kernels are unfolded, as in the paper. "tiny" is for
    such spaces between Linears. Others raise EditError with the reason.

    Attributes:
        layers: numbers of hidden layers; negative numbers count from the output. Of an adopted
            model, names of spaces, or spaces.
        nodes: the number of nodes to add to each layer.
        init: one of the above.
        noise: for "net2net": how unevenly weights are shared, from 0 (evenly) to below 1. Even
            shares get equal gradients, so copies remain copies of each other.
        split: for "net2net": with False the original keeps its weights, and the outgoing weights of
            its copies cancel out.
        scale: for "gradmax": the norm of the outgoing weights of each new node; for "tiny": the
            amplitude, the length of the step along the negative gradient of the mean loss that the
            new nodes stand for.
        owner: the owner of the new nodes; with None, copies have the owner of the original.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3, 2], dtype=torch.float64)
        >>> x = torch.ones(1, 4, dtype=torch.float64)
        >>> before = net(x)
        >>> with net.edit() as edit:
        ...     GrowWidth(layers=1, nodes=5, init="net2net")(net, edit, RuleContext())
        >>> net.sizes, torch.allclose(net(x), before, rtol=0, atol=1e-12)
        ([4, 8, 2], True)
    """

    layers: Layers
    nodes: int
    init: Literal["zero_outgoing", "net2net", "gradmax", "tiny"] = "zero_outgoing"
    noise: float = 0.1
    split: bool = True
    scale: float = 1.0
    owner: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_names(self.layers))
        if self.nodes < 1:
            raise EditError(f"nodes is at least 1, got {self.nodes!r}")
        if self.init not in ("zero_outgoing", "net2net", "gradmax", "tiny"):
            raise EditError(
                f'init is "zero_outgoing", "net2net", "gradmax" or "tiny", got {self.init!r}'
            )
        if not 0 <= self.noise < 1:
            raise EditError(f"noise lies between 0 and 1, 1 excluded, got {self.noise!r}")
        if not 0 < self.scale < float("inf"):
            raise EditError(f"scale is a positive number, got {self.scale!r}")

    def recorders(self, net: GrapNet | Adopted) -> dict[str, Recorder]:
        """Returns, for "gradmax" and "tiny", a recorder for each layer or space."""
        found: dict[str, Recorder] = {}
        if self.init == "tiny":
            for layer in self._grown(net):
                found[evidence_of_bottleneck(layer)] = BottleneckRecorder(net, layer)
        if self.init != "gradmax":
            return found
        if isinstance(net, Adopted):
            for space in self._spaces(net):
                found[_evidence(space.name)] = SpaceGradientRecorder(net, space)
            return found
        for number in self._numbers(net):
            upper, lower = _around(net, number)
            found[_evidence(number)] = GradientRecorder(upper=upper, lower=lower)
        return found

    def __call__(self, net: GrapNet, edit: Edit, context: RuleContext) -> None:
        """Adds the nodes."""
        if isinstance(net, Adopted):
            self._widen_spaces(net, edit, context)
            return
        for number in self._numbers(net):
            touched = net.leaving(number)
            if self.init == "net2net":
                touched = net.entering(number) + touched
            net.execution.require_sum(f"GrowWidth({self.init!r})", touched)
            connections = edit.n_connections
            if self.init == "zero_outgoing":
                self._add_silent(net, edit, context, number)
            elif self.init == "net2net":
                self._add_copies(net, edit, context, number)
            elif self.init == "tiny":
                self._add_optimal(net, edit, context, number)
            else:
                self._add_steepest(net, edit, context, number)
            budget = context.budget
            if budget.edits is not None:
                used = edit.n_connections - connections
                budget = replace(budget, edits=budget.edits - used)
                context = replace(context, budget=budget)

    def _numbers(self, net: GrapNet) -> list[int]:
        """Returns the numbers of the layers; raises EditError when one is not hidden."""
        last = len(net.layers) - 1
        given = [number for number in as_names(self.layers) or () if isinstance(number, int)]
        numbers = sorted({number % len(net.layers) for number in given})
        if not all(-last <= number <= last for number in given) or {0, last} & set(numbers):
            raise EditError(f"only hidden layers, 1 to {last - 1}, grow; got {self.layers}")
        return numbers

    def _grown(self, net: GrapNet | Adopted) -> list[int] | list[str]:
        """Returns the numbers of the layers, or the names of the spaces."""
        if isinstance(net, Adopted):
            return [space.name for space in self._spaces(net)]
        return self._numbers(net)

    def _widen_spaces(self, net: Adopted, edit: Any, context: RuleContext) -> None:
        """Adds nodes to spaces of an adopted model."""
        spaces = self._spaces(net)
        net.prove(spaces)
        for space in spaces:
            if space.verdict not in ("exact", "unproved"):
                raise EditError(
                    f"{space.name} cannot be widened without changing the function of the model:"
                    f" it is {space.verdict}"
                )
        counts = {}
        left = context.budget
        for space in spaces:
            each = edit._relations_of({space.index: 1})
            counts[space] = affordable(self.nodes, each, left)
            if left.edits is not None:
                left = replace(left, edits=left.edits - each * counts[space])
        if self.init == "tiny":
            self._add_optimal_to_spaces(net, edit, context, counts)
            return
        directions = {}
        if self.init == "gradmax":
            directions = self._directions(net, edit, context, counts)
            counts = {space: len(own) for space, own in directions.items()}
        how = {"net2net": "copies of nodes", "gradmax": "nodes of steep gradient"}
        for space, count in counts.items():
            kind = how.get(self.init, "nodes with zero outgoing weights")
            edit.remark(f"widens {space.name} by {count} {kind}", space=space.name, nodes=count)
        growing = {space: count for space, count in counts.items() if count}
        if self.init == "net2net":
            copy_nodes(net, edit, growing, self.noise, self.split, self.owner)
            return
        for space, count in growing.items():
            if self.init == "gradmax":
                bias = rising_bias(net, space)
                values = values_of_steepest(net, space, directions[space] * self.scale, bias)
                edit.add_nodes(space, count, owner=self.owner, readers="alike", values=values)
            else:
                edit.add_nodes(space, count, owner=self.owner)

    def _spaces(self, net: Adopted) -> list[Space]:
        return [net.space(str(name)) for name in as_names(self.layers) or ()]

    def _directions(
        self, net: Adopted, edit: Any, context: RuleContext, counts: Mapping[Space, int]
    ) -> dict[Space, Tensor]:
        """Returns the outgoing weights of new nodes of spaces, [nodes, cells below], of norm 1."""
        if len(edit.removals):
            raise EditError(
                "GradMax grows a model as it is, and this edit removes nodes; let the rules be due"
                " at different steps"
            )
        require_apart(counts, "GradMax")
        found = {}
        for space, count in counts.items():
            seen = seen_evidence(context, _evidence(space.name), "GrowWidth")
            found[space] = steepest_directions(seen.matrix())[:count]
        return found

    def _add_silent(self, net: GrapNet, edit: Edit, context: RuleContext, number: int) -> None:
        above = [staying(net, edit, n) for n in sources_of(net, number)]
        below = [staying(net, edit, n) for n in targets_of(net, number)]
        count = affordable(self.nodes, sum(map(len, above + below)), context.budget)
        edit.remark(
            f"widens layer {number} by {count} nodes with zero outgoing weights",
            layer=number,
            nodes=count,
        )
        if count:
            new = edit.add_nodes(number, count, owner=self.owner)
            for parents in above:
                edit.connect(parents, new, weights="linear")
            for children in below:
                edit.connect(new, children, weights="zero")

    def _add_steepest(self, net: GrapNet, edit: Edit, context: RuleContext, number: int) -> None:
        gradients = seen_evidence(context, _evidence(number), "GrowWidth").matrix()
        source, target = _around(net, number)
        upper = staying(net, edit, source)
        lower = staying(net, edit, target)
        if len(edit.removals):
            rows = net._rows(source, upper.uids).to(gradients.device).long()
            columns = net._rows(target, lower.uids).to(gradients.device).long()
            gradients = gradients[rows][:, columns]
        directions = steepest_directions(gradients)
        count = min(
            affordable(self.nodes, len(upper) + len(lower), context.budget), len(directions)
        )
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

    def _add_optimal(self, net: GrapNet, edit: Edit, context: RuleContext, number: int) -> None:
        require_no_removals(edit)
        nodes = seen_evidence(context, evidence_of_bottleneck(number), "GrowWidth").nodes()
        neighbours = [*sources_of(net, number), *targets_of(net, number)]
        relations = sum(len(net.layers[n]) for n in neighbours)
        count = affordable(self.nodes, relations, context.budget)
        add_to_layer(net, edit, number, nodes.scaled(count, self.scale), self.owner)

    def _add_optimal_to_spaces(
        self, net: Adopted, edit: Any, context: RuleContext, counts: Mapping[Space, int]
    ) -> None:
        require_no_removals(edit)
        require_apart(counts, "TINY")
        for space, count in counts.items():
            seen = seen_evidence(context, evidence_of_bottleneck(space.name), "GrowWidth")
            add_to_space(net, edit, space, seen.nodes().scaled(count, self.scale), self.owner)

    def _add_copies(self, net: GrapNet, edit: Edit, context: RuleContext, number: int) -> None:
        rows = self._originals(net, edit, context, number)
        edit.remark(
            f"widens layer {number} by {len(rows)} copies of nodes", layer=number, nodes=len(rows)
        )
        if len(rows):
            copies = _add_alike(net, edit, number, rows, self.owner)
            for t in net.entering(number):
                _copy_incoming(net, edit, t, rows, copies)
            for t in net.leaving(number):
                self._share_outgoing(net, edit, t, rows, copies)

    def _originals(self, net: GrapNet, edit: Edit, context: RuleContext, number: int) -> Tensor:
        """Returns the rows to copy, drawn from the nodes with children: ascending, each as often as
        it is copied.
        """
        # of each node of the layer
        fan_in = torch.zeros(net.sizes[number], dtype=torch.int64, device="cpu")
        fan_out = torch.zeros_like(fan_in)
        lost = torch.zeros_like(fan_in)
        for t in net.entering(number):
            fan_in += net.transitions[t].topology.fan_in().cpu()
        for t in net.leaving(number):
            topology = net.transitions[t].topology
            fan_out += topology.degrees.cpu()
            losers = topology.parents_at(unavailable_relations(net, edit, t)).cpu()
            lost += torch.bincount(losers, minlength=len(lost))
        if not bool(fan_out.any()):
            raise EditError(
                f'layer {number} has no node with children to copy; use init="zero_outgoing"'
            )
        candidates = (fan_out > lost).nonzero().flatten()
        if len(candidates) == 0:  # the rules before have taken them all
            return candidates
        drawn = candidates[(_uniform(self.nodes, edit.generator) * len(candidates)).long()]
        if context.budget.edits is not None:
            costs = fan_in[drawn] + fan_out[drawn]
            drawn = drawn[: int((costs.cumsum(0) <= context.budget.edits).sum())]
        return drawn.sort().values

    def _share_outgoing(
        self, net: GrapNet, edit: Edit, t: int, rows: Tensor, copies: Tensor
    ) -> None:
        """Connects the copies to the children of their originals in transition t; each relation
        gets its share of the weight of the original.
        """
        store = net.transitions[t]
        topology = store.topology
        unavailable = unavailable_relations(net, edit, t)
        owned = topology.owned_by(rows.unique().to(net.device))
        split = owned[:0]
        if self.split:
            split = owned[~contains(unavailable, owned) & ~store._frozen_bits(owned)]
        copied = topology.owned_by(rows.to(net.device))
        free = ~contains(unavailable, copied)
        positions = torch.cat([split, copied[free]]).long()  # one for each that has a share
        is_split = torch.zeros(topology.n_relations, dtype=torch.bool, device=net.device)
        is_split[split.long()] = True
        shares = (1 + self.noise * (2 * _uniform(len(positions), edit.generator) - 1)).to(
            net.device
        )
        whole = shares.new_zeros(topology.n_relations).index_add_(0, positions, shares)[positions]
        times = torch.bincount(positions, minlength=topology.n_relations)[positions]
        # Shares of a whole that add up to 1; beside a relation that stays as it is they add up to
        # 0.
        shares = torch.where(is_split[positions], shares / whole, shares - whole / times)
        weights = store._read(positions.int()).detach() * shares
        edit.assign(RelationSet(net, {t: split}), weights[: len(split)])
        degrees = topology.degrees.cpu()[rows].long()
        parents = copies.repeat_interleave(degrees)[free.cpu()]
        children = net.layers[store.target].uid[topology.child[copied[free].long()].cpu().long()]
        edit.connect(parents, children, pairs="aligned", weights=weights[len(split) :])


def _evidence(layer: int | str) -> str:
    return f"gradients across layer {layer}"


def evidence_of_bottleneck(layer: int | str) -> str:
    """Returns the name of what rules that grow by TINY record of a layer or space."""
    return f"bottleneck of layer {layer}"


def require_apart(spaces: Iterable[Space], what: str) -> None:
    """Raises EditError if a tensor has the nodes of two of the spaces."""
    touched: set[str] = set()
    for space in spaces:
        tensors = {*space.writers, *space.readers}
        if tensors & touched:
            raise EditError(
                f"{space.name} is next to another space that {what} grows in this edit; let them"
                " grow one after the other"
            )
        touched |= tensors


def steepest_directions(gradients: Tensor) -> Tensor:
    """Returns unit vectors of outgoing weights [n, n_lower], the largest gradient first.

    Args:
        gradients: between the nodes above and below, [n_upper, n_lower].
    """
    upper, strength, lower = torch.linalg.svd(
        gradients.detach().cpu().double(), full_matrices=False
    )
    rounding = torch.finfo(gradients.dtype).eps * max(gradients.shape, default=1)
    found = int((strength > rounding * strength[:1].sum()).sum())
    # A step moves the incoming weights of a node along -upper: with a positive sum there, the node
    # is active for positive inputs.
    signs = torch.where(upper[:, :found].sum(0) > 0, -1.0, 1.0)
    lower = lower[:found] * signs[:, None]
    return torch.cat([lower, -lower])


def _rising_bias(activation: str, dtype: torch.dtype) -> float:
    """Returns a bias too small to change a sum, at which the activation has a slope."""
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
    """Adds a node like each of the ascending rows, and returns their uids."""
    layer = net.layers[number]
    kinds = layer._activation_names
    owners = layer._owner_names
    codes = kinds.codes[rows].long() * len(owners.names) + owners.codes[rows]
    biases = layer[rows.unique()].biases.detach()[
        rows.unique(return_inverse=True)[1].to(net.device)
    ]
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


def _around(net: GrapNet, number: int) -> tuple[int, int]:
    """Returns the one layer that leads to a layer, and the one that it leads to."""
    return only(sources_of(net, number), number), only(targets_of(net, number), number)


def _copy_incoming(net: GrapNet, edit: Edit, t: int, rows: Tensor, copies: Tensor) -> None:
    """Connects the parents that the ascending rows have in transition t to their copies, with the
    same weights.
    """
    store = net.transitions[t]
    positions = store.topology.leading_to(rows.unique().to(net.device))
    positions = positions[~contains(gone_relations(net, edit, t), positions)]
    children = store.child[positions.long()].cpu().long()
    counts = torch.bincount(rows, minlength=store.n_children)
    times = counts[children]  # copies that a relation is for
    source = torch.arange(len(positions), device="cpu").repeat_interleave(times)
    nth = torch.arange(len(source), device="cpu") - (times.cumsum(0) - times)[source]
    children = copies[(counts.cumsum(0) - counts)[children[source]] + nth]
    positions = positions[source.to(net.device)]
    parents = net.layers[store.source].uid[store.topology.parents_at(positions).cpu().long()]
    edit.connect(parents, children, pairs="aligned", weights=store._read(positions).detach())


def _uniform(count: int, generator: torch.Generator | None) -> Tensor:
    """Returns numbers between 0 and 1, 1 excluded, on the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.rand(count, dtype=torch.float64, generator=generator, device=device).cpu()
