"""Rewire: drops weak relations and grows as many others (SET, RigL, SRigL)."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grapnet.core._change import contains, require_ranks
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._sets import RelationSet
from grapnet.core._transition import Topology
from grapnet.execution import native
from grapnet.network import GrapNet

from .budget import Budget, weakest_within
from .choice import chosen_transitions, given_transitions, seen_evidence
from .gradients import GradientRecorder
from .prune import weakest_of_each
from .rule import Moment, Recorder
from .together import absent_among, leaving_relations, taken_pairs

Pairs = tuple[Tensor, Tensor]  # uids of parents and of their children


@dataclass(frozen=True)
class Rewire:
    """Drops the weakest relations of each transition and grows as many absent ones: none has more
    or fewer afterwards.

    SET is `Rewire()`, RigL `Rewire(grow="gradient", decay_until=T)`, SRigL that with
    `fan_in="constant"`. A frozen relation is never dropped and does not count, an output keeps its
    last parent, and what is dropped does not come back in the same call. Beside the rules before it
    in the same edit, it handles neither what they cut, nor pairs they connect, nor nodes they
    remove.

    Attributes:
        transitions: which ones, all of them by default; a full one is left alone.
        fraction: how many of the relations that may be dropped, rounded.
        grow: "random" takes absent relations all alike, "gradient" those with the largest
            |gradient|.
        decay_until: the step by which the fraction has gone down to 0 along a cosine; it stays as
            it is without.
        fan_in: "free" compares all relations of a transition, "constant" those of each child, which
            keeps its number of parents.
        weights: what grown relations start with, "zero" or "linear".
        window: over how many steps gradients are averaged.

    Examples:
        >>> net = GrapNet([20, 30, 10], density=0.2)
        >>> with net.edit(reason="SET") as edit:
        ...     Rewire(fraction=0.25)(net, edit, Moment())
        >>> net.count().relations, len(net.history[-1].change.transitions[0].born)
        (180, 30)
    """

    transitions: tuple[int, ...] | None = None
    fraction: float = 0.3
    grow: Literal["random", "gradient"] = "random"
    decay_until: int | None = None
    fan_in: Literal["free", "constant"] = "free"
    weights: Literal["zero", "linear"] = "zero"
    window: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "transitions", given_transitions(self.transitions))
        if not 0 <= self.fraction <= 1:
            raise EditError(f"fraction lies between 0 and 1, got {self.fraction!r}")
        if self.decay_until is not None and (
            not isinstance(self.decay_until, int) or self.decay_until < 1
        ):
            raise EditError(f"decay_until is a step from 1, or None, got {self.decay_until!r}")
        if not isinstance(self.window, int) or self.window < 1:
            raise EditError(f"window is a number of steps from 1, got {self.window!r}")
        for name, known in (
            ("grow", ("random", "gradient")),
            ("fan_in", ("free", "constant")),
            ("weights", ("zero", "linear")),
        ):
            if getattr(self, name) not in known:
                raise EditError(
                    f'{name} is "{known[0]}" or "{known[1]}", got {getattr(self, name)!r}'
                )

    def recorders(self, net: GrapNet) -> dict[str, Recorder]:
        """Returns one recorder of gradients a transition, none for random growth."""
        if self.grow == "random":
            return {}
        return {_evidence(t): GradientRecorder(t, window=self.window) for t in self._numbers(net)}

    def fraction_at(self, step: int) -> float:
        """Returns which fraction is dropped at a step."""
        if self.decay_until is None:
            return self.fraction
        return (
            self.fraction
            / 2
            * (1 + math.cos(math.pi * min(step, self.decay_until) / self.decay_until))
        )

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Writes the cuts and as many connections."""
        fraction = self.fraction_at(now.step)
        taken = {t: absent_among(net, t, taken_pairs(net, edit, t)) for t in self._numbers(net)}
        candidates = {t: self._candidates(net, edit, t, fraction, taken[t]) for t in taken}
        shares = _shared_out([count for _, count in candidates.values()], now.budget.edits)
        earlier = edit.cuts
        for (t, (relations, _)), count in zip(candidates.items(), shares, strict=True):
            if count == 0:
                continue
            within = now.budget
            # An output keeps its last parent; with a constant fan-in it gets another one.
            if t == len(net.transitions) - 1 and self.fan_in != "constant":
                within = within.tightened(Budget(parents=1))
            dropped = weakest_within(net, relations, count, _beside(earlier, within))
            self._rewire(net, edit, now, t, dropped, taken[t])

    def _rewire(
        self, net: GrapNet, edit: Edit, now: Moment, t: int, dropped: RelationSet, taken: Tensor
    ) -> None:
        """Cuts `dropped` and connects as many absent pairs of transition t that are not taken."""
        if len(dropped) == 0:
            return
        topology, lost, details = net.transitions[t].topology, None, {}
        if self.fan_in == "constant":
            lost = torch.bincount(_children(topology, dropped, t), minlength=topology.n_children)
        if self.grow == "random":
            rows = _random_absent(topology, len(dropped), lost, taken, edit.generator)
            parents, children = (
                net.layers[n].uid[r] for n, r in zip((t, t + 1), rows, strict=True)
            )
        else:
            recorder = seen_evidence(now, _evidence(t), 'Rewire(grow="gradient")')
            parents, children, gradients = _steepest_absent(
                net, t, recorder, len(dropped), lost, taken
            )
            details["smallest_grown_gradient"] = float(gradients.min())
        assert len(parents) == len(dropped), "there are absent pairs for all that is dropped"
        details["largest_dropped_weight"] = float(dropped.weights.detach().abs().max())
        edit.cut(dropped)
        edit.connect(parents, children, pairs="aligned", weights=self.weights)
        edit.remark(
            f"rewires by {self.grow} growth", transition=t, relations=len(dropped), **details
        )

    def _candidates(
        self, net: GrapNet, edit: Edit, t: int, fraction: float, taken: Tensor
    ) -> tuple[RelationSet, int]:
        """Returns relations to choose from, and how many of them to drop."""
        topology, relations = net.transitions[t].topology, net.layers[t].outgoing()
        if len(net.transitions[t].frozen_at):
            relations = relations[~relations.frozen]
        if len(edit.cuts):
            relations -= edit.cuts
        if len(edit.removals):
            relations -= leaving_relations(edit)
        absent = topology.n_parents * topology.n_children - topology.n_relations - len(taken)
        if self.fan_in == "free" or absent == 0:
            return relations, min(round(fraction * len(relations)), absent)
        children = _children(topology, relations, t)
        free = torch.bincount(children, minlength=topology.n_children)
        room = topology.n_parents - topology.fan_in().cpu() - _of_each(taken, topology.n_children)
        quotas = torch.minimum((fraction * free.double()).round().long(), room)
        relations = _weakest_of_each(relations, children, quotas)
        return relations, len(relations)

    def _numbers(self, net: GrapNet) -> list[int]:
        return chosen_transitions(net, self.transitions)


def _evidence(t: int) -> str:
    return f"gradients of transition {t}"


def _shared_out(counts: list[int], most: int | None) -> list[int]:
    """Returns the counts, lowered in proportion where they sum to more than `most`."""
    total = sum(counts)
    if most is None or total <= most:
        return counts
    ends = [most * int(end) // total for end in np.cumsum([0, *counts])]
    return [stop - start for start, stop in pairwise(ends)]


def _beside(earlier: RelationSet, budget: Budget) -> Budget:
    """Returns a budget that is kept together with what the edit cuts already, whichever nodes that
    is.
    """
    if len(earlier) == 0 or budget.parents == budget.children == 0:
        return budget
    taken = [
        int(uids.unique(return_counts=True)[1].max())
        for uids in (earlier.children, earlier.parents)
    ]
    return Budget(
        budget.edits,
        *(
            least and least + n
            for least, n in zip((budget.parents, budget.children), taken, strict=True)
        ),
    )


def _children(topology: Topology, relations: RelationSet, t: int) -> Tensor:
    """Returns the row of every relation's child, on the CPU."""
    at = relations.positions_by_transition().get(t, range(0))
    child = topology.child
    return (child[at.start : at.stop] if isinstance(at, range) else child.index_select(0, at)).cpu()


def _weakest_of_each(relations: RelationSet, children: Tensor, quotas: Tensor) -> RelationSet:
    """Returns, for every child row, as many of its weakest relations as its quota says."""
    keys, child = relations.weights.detach().abs().cpu(), children.numpy()
    require_ranks(keys)
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32)).numpy()
    # 16 bits are sorted by radix, many times faster
    small = np.uint16 if len(quotas) <= 2**16 else np.int32
    order = np.argsort(child.astype(small), kind="stable")
    if native.missing:
        chosen = weakest_of_each(keys[order], child[order], quotas.numpy())
    else:
        ptr = torch.zeros(len(quotas) + 1, dtype=torch.int32, device="cpu")
        ptr[1:] = torch.bincount(children, minlength=len(quotas)).cumsum(0)
        chosen = native.largest_of_rows(
            torch.from_numpy(-keys[order]), ptr, quotas, least=-math.inf
        ).numpy()
    marks = np.zeros(len(child), dtype=bool)
    marks[order[chosen]] = True
    return relations[torch.from_numpy(marks)]


def _of_each(pairs: Tensor, n_children: int) -> Tensor:
    """Returns how many of the numbered pairs lead to each child."""
    return torch.bincount(pairs % max(1, n_children), minlength=n_children)


def _steepest_absent(
    net: GrapNet, t: int, recorder: Any, count: int, per_child: Tensor | None, taken: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the absent pairs of the largest |gradient| that are not taken, as uids, and those
    gradients.
    """
    if len(taken) == 0:
        return recorder.largest_absent(count, per_child=per_child, ranked=False)
    n_children = net.sizes[t + 1]
    quotas = None if per_child is None else per_child + _of_each(taken, n_children)
    # As many more as might be taken; what is left is ranked, so the first ones are the largest.
    parents, children, gradients = recorder.largest_absent(
        None if quotas is not None else count + len(taken), per_child=quotas
    )
    rows = net.rows(t + 1, children).long()
    free = (~contains(taken, net.rows(t, parents).long() * n_children + rows)).nonzero().view(-1)
    if per_child is not None:
        order = free[rows[free].argsort(stable=True)]  # child by child, the largest of each first
        found = torch.bincount(rows[order], minlength=n_children)
        rank = torch.arange(len(order), device="cpu") - (found.cumsum(0) - found)[rows[order]]
        free = order[rank < per_child[rows[order]]]
    free = free[:count]
    return parents[free], children[free], gradients[free.to(gradients.device)]


def _random_absent(
    topology: Topology,
    count: int,
    per_child: Tensor | None,
    taken: Tensor,
    generator: torch.Generator | None,
) -> Pairs:
    """Returns rows of absent (parent, child) pairs, all alike in chance, sorted; a number of each
    child if given.

    Absent pairs that are taken count as present.
    """
    n_parents, n_children = topology.n_parents, topology.n_children
    parent, child = topology.parents().cpu().long().numpy(), topology.child.cpu().numpy()
    if len(taken):
        parent = np.concatenate([parent, taken.numpy() // n_children])
        child = np.concatenate([child, (taken.numpy() % n_children).astype(child.dtype)])
    # Pairs are numbered child by child where each child has its own number to grow, parent by
    # parent otherwise.
    present = (
        parent * n_children + child if per_child is None else child * np.int64(n_parents) + parent
    )
    present.sort(kind="stable")  # close to sorted, which a stable sort sees
    if per_child is None:
        absent, quotas = np.array([n_parents * n_children - len(present)]), np.array([count])
    else:
        absent, quotas = n_parents - np.bincount(child, minlength=n_children), per_child.numpy()
    numbers = _distinct(absent, quotas, generator)  # among the absent pairs only
    # how many absent pairs stand before each present one
    before = present - np.arange(len(present))
    cells = numbers + np.searchsorted(before, numbers, side="right")
    if per_child is not None:
        cells = np.sort(cells % n_parents * n_children + cells // n_parents)
    return torch.from_numpy(cells // n_children), torch.from_numpy(cells % n_children)


def _distinct(
    sizes: np.ndarray, quotas: np.ndarray, generator: torch.Generator | None
) -> np.ndarray:
    """Returns sorted distinct numbers: `quotas[g]` of those of group g, which owns the next
    `sizes[g]` numbers.
    """
    starts = sizes.cumsum() - sizes
    spared = 2 * quotas > sizes  # quicker to draw what is left out
    wanted = np.where(spared, sizes - quotas, quotas)
    source = torch.device("cpu") if generator is None else generator.device
    drawn, missing = np.empty(0, dtype=np.int64), wanted
    while missing.any():  # draw with repetition, keep the distinct ones, top up
        group = np.repeat(np.arange(len(sizes)), missing)
        numbers = (
            torch.rand(len(group), dtype=torch.float64, generator=generator, device=source)
            .cpu()
            .numpy()
        )
        drawn = np.concatenate([drawn, starts[group] + (numbers * sizes[group]).astype(np.int64)])
        drawn.sort(kind="stable")
        drawn = drawn[np.diff(drawn, prepend=-1) > 0]
        missing = wanted - np.diff(np.searchsorted(drawn, np.append(starts, sizes.sum())))
    if not spared.any():
        return drawn
    group = np.searchsorted(starts, drawn, side="right") - 1
    rest = np.setdiff1d(
        _ranges(starts[spared], sizes[spared]), drawn[spared[group]], assume_unique=True
    )
    return np.sort(np.concatenate([drawn[~spared[group]], rest]))


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the numbers of many ranges, one after the other."""
    return np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
