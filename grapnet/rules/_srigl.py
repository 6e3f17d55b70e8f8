"""SRigL: rewires to a constant number of parents, and removes nodes with few salient relations."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import require_ranks
from grapnet.core._sets import RelationSet
from grapnet.spaces._adopted import Adopted

from ._budget import largest_of_each, positions_in
from ._gradients import gradient_recorder
from ._rewire import connect_rows, cosine_fraction
from ._rule import (
    Every,
    Recorder,
    RuleContext,
    Scheduled,
    Transitions,
    as_transitions,
    rewirable_transitions,
    seen_evidence,
    taken_pairs,
)


@dataclass(frozen=True)
class SRigL:
    """Structured RigL (Lasby et al., 2024): all children of a transition have equally many parents,
    and nodes whose relations are hardly salient leave.

    At every call, K is the share `fraction` of the relations of a transition. Salient are the
    strongest relations that would stay if the K weakest were dropped, and the K absent ones with
    the largest |gradient|. A hidden node to which fewer than `salient` · k salient relations lead,
    where k is the number of parents of a node, is removed. What it had is shared out: the new
    number of parents is the number of relations divided by the number of nodes that stay, rounded
    down. Then the K weakest relations of the transition are dropped, whatever their child, and
    every child grows those with the largest |gradient| until it has as many parents as the others.

    What is ranked together follows from the method, so that there is no `scope`: relations of a
    transition are dropped together, and each child grows its own.

    Frozen relations are never dropped, and nodes that have some are not removed; outputs, and
    layers that several transitions lead to, keep their nodes. A dropped relation comes back only if
    its child has no other absent parent. A full transition does not change. A transition whose
    changes exceed the `edits` of a budget is left as it is. It computes with matrices of parents ×
    children.

    Attributes:
        transitions: numbers of the transitions, or names of modules and tensors of an adopted
            model; all by default.
        fraction: the share of the relations that may be dropped.
        salient: the share of the parents of a node that must be salient, so that it stays; 0 to
            remove no node.
        decay_until: the step at which the fraction reaches 0 along a cosine; constant with None.
        weights: the initial weights of grown relations, "zero" or "linear".
        window: the number of steps over which gradients are averaged.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([20, 30, 4], density=0.2)
        >>> rule = SRigL(transitions=0)
        >>> recorders = rule.recorders(net)
        >>> recorders["gradients of transition 0"].arm(net)
        >>> net(torch.randn(8, 20)).square().sum().backward()
        >>> with net.edit(reason="SRigL") as edit:
        ...     rule(net, edit, RuleContext(evidence=recorders))
        >>> len(net.transitions[0].topology.fan_in().unique())
        1
    """

    transitions: Transitions | None = None
    fraction: float = 0.3
    salient: float = 0.3
    decay_until: int | None = None
    weights: Literal["zero", "linear"] = "zero"
    window: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "transitions", as_transitions(self.transitions))
        for share in (self.fraction, self.salient):
            if not 0 <= share <= 1:
                raise EditError(f"fraction and salient lie between 0 and 1, got {share!r}")
        if self.decay_until is not None and self.decay_until < 1:
            raise EditError(f"decay_until is a step from 1, or None, got {self.decay_until!r}")

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns one recorder of gradients per transition."""
        found: dict[str, Recorder] = {}
        for t in rewirable_transitions(net, self.transitions):
            found[_evidence(t)] = gradient_recorder(net, t, self.window)
        return found

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Writes removals, cuts and connections."""
        fraction = cosine_fraction(self.fraction, context.step, self.decay_until)
        left = context.budget.edits
        for t in rewirable_transitions(net, self.transitions):
            recorder = seen_evidence(context, _evidence(t), "SRigL")
            wiring = _Wiring.of(net, edit, t, recorder)
            if not bool(wiring.absent.any()):
                continue
            changed = self._rewired(net, wiring, fraction)
            size = max(len(changed.cut), len(changed.grown))
            if left is not None and size > left:
                continue
            if left is not None:
                left -= size
            self._write(net, edit, t, changed)

    def _rewired(self, net: Graph, wiring: "_Wiring", fraction: float) -> "_Rewired":
        """Returns what changes in one transition."""
        total = int(wiring.present.sum())
        count = int(fraction * int(wiring.free.sum()))
        gone = self._ablated(net, wiring, total, count)
        stays = wiring.children & ~gone
        n_parents = int(wiring.parents.sum())
        fan_in = min(n_parents, total // max(1, int(stays.sum())))
        # [parents, children] of all that follows
        kept = wiring.strongest(total - count, stays)
        # A child keeps its strongest, if it has more than the others.
        kept = _strongest_of_children(wiring.strength, kept, fan_in, wiring.frozen)
        missing = (fan_in - kept.sum(0)).clamp(min=0) * stays
        grown = _largest_of_children(wiring.gradient, wiring.absent & stays, missing)
        # Where a child has no absent parent left, its strongest dropped relations stay.
        missing = missing - grown.sum(0)
        dropped = wiring.present & ~kept & stays
        kept |= _largest_of_children(wiring.strength, dropped & wiring.parents[:, None], missing)
        cut = wiring.present & ~kept & stays & wiring.parents[:, None]
        return _Rewired(gone.nonzero().view(-1), cut.nonzero(), grown.nonzero(), fan_in)

    def _ablated(self, net: Graph, wiring: "_Wiring", total: int, count: int) -> Tensor:
        """Returns which children leave, bool [children]."""
        nothing = torch.zeros_like(wiring.children)
        if self.salient == 0 or not wiring.can_ablate:
            return nothing
        n_children = int(wiring.children.sum())
        fan_in = total // max(1, n_children)
        salient = wiring.strongest(total - count, wiring.children)
        salient |= wiring.steepest(count)
        counts = salient.sum(0)
        least = max(1, int(self.salient * fan_in))
        weak = (counts < least) & wiring.children & ~wiring.held
        # So many children are needed to have all relations.
        needed = max(1, math.ceil(total / max(1, int(wiring.parents.sum()))))
        most = max(0, n_children - needed)
        at = weak.nonzero().view(-1)
        at = at[counts[at].argsort(stable=True)][:most]
        nothing[at] = True
        return nothing

    def _write(self, net: Graph, edit: Edit, t: int, changed: "_Rewired") -> None:
        transition = net.transitions[t]
        if len(changed.gone):
            edit.remove_nodes(net.layers[transition.target][changed.gone.cpu()])
        if len(changed.cut):
            at = transition.topology.find(*changed.cut.t())
            edit.cut(RelationSet(net, {t: at.sort().values.int()}))
        parents, children = changed.grown.t()
        connect_rows(net, edit, t, parents, children, self.weights, absent=True)
        if len(changed.gone) or len(changed.cut) or len(changed.grown):
            edit.remark(
                f"rewires to {changed.fan_in} parents a node",
                transition=t,
                relations=len(changed.cut),
                grown=len(changed.grown),
                nodes=len(changed.gone),
            )


def srigl(
    steps: int,
    *,
    every: int = 100,
    fraction: float = 0.3,
    salient: float = 0.3,
    stop: float = 0.75,
    transitions: Transitions | None = None,
) -> Scheduled:
    """Returns SRigL for a training of `steps` steps: `manager.add(srigl(1000))`.

    It rewires every `every` steps, up to the share `stop` of the training, at which `fraction`
    reaches 0 along a cosine.

    Examples:
        >>> srigl(steps=1000).schedule
        Every(steps=100, start=100, until=750)
    """
    end = max(1, int(stop * steps))
    rule = SRigL(transitions, fraction, salient, decay_until=end)
    return Scheduled(rule, Every(every, start=every, until=end))


@dataclass(frozen=True, eq=False)
class _Rewired:
    """What changes in one transition."""

    gone: Tensor  # rows of children
    cut: Tensor  # [n, 2] rows of parents and children
    grown: Tensor  # [n, 2] rows of parents and children
    fan_in: int


@dataclass(frozen=True, eq=False)
class _Wiring:
    """One transition as matrices [parents, children].

    Attributes:
        present: the relations that the edit has not cut.
        frozen: those of them that are frozen.
        absent: the pairs that can be connected.
        strength: |weight|, 0 where no relation is.
        gradient: |gradient|.
        parents: which parents stay, bool [parents].
        children: which children stay, bool [children].
        held: which children have a frozen relation, on either side, bool [children].
        can_ablate: whether children may leave.
    """

    present: Tensor
    frozen: Tensor
    absent: Tensor
    strength: Tensor
    gradient: Tensor
    parents: Tensor
    children: Tensor
    held: Tensor
    can_ablate: bool

    @classmethod
    def of(cls, net: Graph, edit: Edit, t: int, recorder: Any) -> "_Wiring":
        """Returns that of a transition, without what the edit takes away."""
        transition: Any = net.transitions[t]
        topology = transition.topology
        shape = (topology.n_parents, topology.n_children)
        device = net.device
        parent = topology.parents().long()
        child = topology.child.long()
        strengths = RelationSet.of(net, [t]).strengths
        require_ranks(strengths)
        strength = strengths.new_zeros(shape)
        strength[parent, child] = strengths
        present = torch.zeros(shape, dtype=torch.bool, device=device)
        present[parent, child] = True
        taken = torch.zeros_like(present).view(-1)
        taken[taken_pairs(net, edit, t).to(device)] = True
        absent = ~present & ~taken.view(shape)
        frozen = torch.zeros_like(present)
        held_at = transition.frozen_at.long()
        frozen[parent[held_at], child[held_at]] = True
        cuts = positions_in(edit.cuts, t, device).long()
        present[parent[cuts], child[cuts]] = False
        stays = [torch.ones(size, dtype=torch.bool, device=device) for size in shape]
        removals = edit.removals._rows_by_layer()
        for marks, layer in zip(stays, (transition.source, transition.target), strict=True):
            if layer in removals:
                marks[removals[layer].long().to(device)] = False
        parents, children = stays
        if isinstance(net, Adopted):
            gradient = transition.norms(recorder.gradient()).to(device)
        else:
            gradient = recorder.matrix().abs()
        return cls(
            present & children,
            frozen,
            absent,
            strength,
            gradient,
            parents,
            children,
            _held(net, transition.target),
            _can_ablate(net, transition.target),
        )

    @property
    def free(self) -> Tensor:
        """The relations that may be dropped."""
        return self.present & ~self.frozen & self.parents[:, None]

    def strongest(self, count: int, children: Tensor) -> Tensor:
        """Returns the strongest relations to some children, as many as asked for, all frozen ones
        among them.
        """
        candidates = self.present & self.parents[:, None] & children
        key = self.strength.masked_fill(self.frozen, torch.inf)
        return _largest(key, candidates, count)

    def steepest(self, count: int) -> Tensor:
        """Returns the absent pairs with the largest |gradient|."""
        return _largest(self.gradient, self.absent, count)


def _largest(key: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Marks the candidates with the largest keys."""
    found = torch.zeros_like(candidates)
    at = candidates.view(-1).nonzero().view(-1)
    order = key.reshape(-1)[at].argsort(descending=True, stable=True)[: max(0, count)]
    found.view(-1)[at[order]] = True
    return found


def _largest_of_children(key: Tensor, candidates: Tensor, quotas: Tensor) -> Tensor:
    """Marks the candidates with the largest keys of every child, as many as its quota."""
    found = torch.zeros_like(candidates)
    at = candidates.view(-1).nonzero().view(-1)
    child = at % max(1, candidates.shape[1])
    marks = largest_of_each(key.reshape(-1)[at], child, quotas.long())
    found.view(-1)[at[marks]] = True
    return found


def _strongest_of_children(strength: Tensor, kept: Tensor, fan_in: int, frozen: Tensor) -> Tensor:
    """Returns kept relations without the weakest of children that have too many; frozen stay."""
    key = strength.masked_fill(frozen, torch.inf)
    quotas = torch.full_like(kept.sum(0), fan_in)
    return _largest_of_children(key, kept, quotas) | (kept & frozen)


def _held(net: Graph, layer: int) -> Tensor:
    """Returns which nodes of a layer have a frozen relation, bool [n]."""
    held = torch.zeros(net.sizes[layer], dtype=torch.bool, device=net.device)
    for t in (*net.entering(layer), *net.leaving(layer)):
        transition = net.transitions[t]
        at = transition.frozen_at
        if len(at) == 0:
            continue
        if transition.target == layer:
            held[transition.topology.child[at.long()].long()] = True
        if transition.source == layer:
            held[transition.topology.parents_at(at).long()] = True
    return held


def _can_ablate(net: Graph, layer: int) -> bool:
    """Returns whether nodes of a layer may be removed for what one transition brings them."""
    if net._is_output(layer) or len(net.entering(layer)) != 1:
        return False
    if not isinstance(net, Adopted):
        return True
    space = net.spaces[layer]
    return not space.pins and space.verdict in ("exact", "unproved")


def _evidence(t: int) -> str:
    return f"gradients of transition {t}"
