"""PruneNodes: removes the weakest nodes of a model or net, by a share or down to a budget."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import require_ranks
from grapnet.core._layer import LiveNodes
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import ProductOf, SumOf, atoms_of
from grapnet.spaces._costs import latency
from grapnet.spaces._gates import kind_of
from grapnet.spaces._space import Space

from ._criteria import WINDOW, Choice, as_criterion, chosen, refusal_of, scored
from ._elimination import Elimination
from ._node_criteria import NODES
from ._rule import Layers, Recorder, RuleContext, as_names, gone_relations
from ._scopes import (
    Comparison,
    by_mean,
    layer_adaptive,
    require_comparison,
    require_keep,
    require_scope,
)

# For every model the kinds of its spaces, and whether the model runs with fewer nodes in one.
_kinds: "WeakKeyDictionary[Adopted, dict[Any, bool]]" = WeakKeyDictionary()
# Of all blocks of nodes, the share to which a bisection by measured latency comes close.
FINEST = 1 / 32


# What `by=` means for nodes.
CRITERIA: dict[str, Any] = {**NODES, "elimination": lambda window: Elimination(window=window)}


@dataclass(frozen=True)
class PruneNodes:
    """Removes the weakest nodes of the spaces of an adopted model, or of hidden layers of a net.

    Say how much with one of `fraction`, `parameters`, `macs` and `latency`. A budget is a share of
    the present as a float, such as `macs=0.5`, or an absolute number as an int; a model that is
    within it does not change. As few nodes go as the budget needs.

    Pinned spaces stay as they are, and so do spaces of which a tensor does not require gradients
    and nodes of a net with a frozen relation. After a cut, `gn.refresh_statistics` adapts the
    running statistics of BatchNorm.

    Attributes:
        fraction: the share of the nodes to remove at every call.
        parameters: the budget in Parameters of the whole model.
        macs: the budget in multiply-adds of a forward pass, as `net.count().macs` tells them.
        latency: the budget in seconds of a forward pass, as a share. Copies of the model of several
            sizes run on the first example of `gn.adopt`, in evaluation mode, without gradients, on
            the device of the model; each time is the fastest of some runs. Times differ from run to
            run, so a dry run and the commit after it may, too.
        multiple: the sizes of tensors that stay multiples. Of a space whose nodes are several
            entries of a tensor, such as heads, other numbers of nodes can stay than of channels.
        scope: "space" removes the same share of every space. For a budget that is a share of the
            nodes at adoption, so that many small cuts lead to the sizes of one large cut. "model"
            ranks the nodes of all spaces together.
        spaces: names of spaces, or spaces; for a net, numbers of hidden layers. By default all free
            spaces of which a removal is exact (see `Space.verdict`), but none that lies inside the
            nodes of another one, such as the width of heads and the channels of a group.
        keep: how many nodes of each space stay at least, as an int, or which share of the nodes at
            adoption, as a float. A layer of a net counts as it is at the call.
        by: the criterion: "norm", "incoming", "outgoing", "activation", "taylor", "subset",
            "elimination", "redundancy", "random", an object such as `MeanActivation("rms")`, or a
            function `score(net, nodes, evidence)` that returns one number per node of a space; the
            smallest go first.
        compare: how scores of different spaces compare in the scope "model": "mean" divides by the
            mean of the space, "lamp" takes layer-adaptive magnitudes, "score" takes them as they
            are. By default that of the criterion: "mean", and "score" for functions.
        window: the number of steps that a criterion which is given by its name records.

    Examples:
        >>> import grapnet as gn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
        >>> net = gn.adopt(model, torch.randn(1, 3, 9, 9))
        >>> with net.edit() as edit:
        ...     PruneNodes(macs=0.5, multiple=8)(net, edit, RuleContext())
        >>> model[0].weight.shape
        torch.Size([16, 3, 3, 3])
    """

    fraction: float | None = None
    parameters: float | None = None
    macs: float | None = None
    latency: float | None = None
    multiple: int = 1
    scope: Literal["space", "model"] = "space"
    spaces: Layers | None = None
    keep: float = 0.1
    by: Any = "norm"
    compare: Comparison | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        given = [name for name in _AMOUNTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise EditError(
                "say how much to prune, by one of fraction=, parameters=, macs= and latency=;"
                f" got {', '.join(given) or 'none'}"
            )
        amount = getattr(self, given[0])
        absolute = isinstance(amount, int) and given[0] in ("parameters", "macs")
        if not absolute and not 0 <= amount <= 1:
            raise EditError(f"{given[0]} is a share between 0 and 1, got {amount!r}")
        if self.multiple < 1:
            raise EditError(f"multiple is at least 1, got {self.multiple!r}")
        as_criterion(self.by, CRITERIA, self.window)
        require_scope(self.scope, ("space", "model"))
        require_comparison(self.compare)
        require_keep(self.keep)
        is_share = isinstance(self.keep, float)
        if self.fraction is not None and is_share and self.fraction + self.keep > 1 + 1e-9:
            raise EditError(
                f"fraction={self.fraction} and keep={self.keep} exclude each other; give a smaller"
                " keep="
            )
        object.__setattr__(self, "spaces", as_names(self.spaces))

    @property
    def criterion(self) -> Any:
        """The criterion that `by` means."""
        return as_criterion(self.by, CRITERIA, self.window)

    def recorders(self, net: Graph) -> dict[str, Recorder]:
        """Returns the recorders of the criterion, for every space or layer."""
        found: dict[str, Recorder] = {}
        criterion = self.criterion
        if hasattr(criterion, "recorders"):
            for layer in self._chosen(net):
                found |= criterion.recorders(net, layer)
        return found

    def __call__(self, net: Graph, edit: Edit, context: RuleContext) -> None:
        """Asks the edit to remove them, and to assign what the criterion assigns."""
        gone = {number: rows.numpy() for number, rows in edit.removals._rows_by_layer().items()}
        evidence = {**context.evidence, "generator": edit.generator}
        ranks = [self._ranked(net, layer, gone, evidence) for layer in self._chosen(net)]
        order = _Order(ranks, self.scope)
        if self.fraction is not None:
            counts = self._counts(ranks, order, self.fraction)
            budget: dict[str, float] = {}
        else:
            counts, budget = self._counts_within(net, edit, ranks, order, gone)
        for rank, count in zip(ranks, counts, strict=True):
            if count:
                self._choice(net, rank, count, evidence).write(edit)
        changed = sum(count > 0 for count in counts)
        edit.remark(
            f"prunes the {sum(counts)} weakest nodes of {changed} spaces",
            nodes=sum(counts),
            **budget,
        )

    def _chosen(self, net: Graph) -> list[LiveNodes]:
        """Returns the spaces or layers to prune, in order.

        Raises:
            EditError: one of them cannot be pruned, or there is none.
        """
        found = self._candidates(net)
        if self.spaces is not None:
            return found
        found = [layer for layer in found if not refusal_of(self.criterion, net, layer.index)]
        if not found:
            raise EditError(
                "no space of this model can be pruned: all are pinned, frozen, under a norm, or"
                " have a size that is also a number in the formula, or the criterion cannot"
                " score them; print(net) lists them"
            )
        return found

    def _candidates(self, net: Graph) -> list[LiveNodes]:
        """Returns the spaces or layers that are named, in order; by default all that can be pruned,
        whether or not the criterion can score them.

        Raises:
            EditError: one that is named cannot be pruned.
        """
        if not isinstance(net, Adopted):
            return self._hidden(net)
        if self.spaces is None:
            return list(_prunable(net))
        found = [net.space(str(name)) for name in as_names(self.spaces) or ()]
        for space in found:
            if space.pins:
                raise EditError(f"the nodes of {space.name} cannot be removed: {space.pins[0]}")
            frozen = _frozen_tensor(net, space)
            if frozen is not None:
                raise EditError(
                    f"the nodes of {space.name} cannot be removed: {frozen} does not require"
                    " gradients; unfreeze it with requires_grad_()"
                )
        return [space for space in net.spaces if any(space is one for one in found)]

    def _hidden(self, net: Graph) -> list[LiveNodes]:
        hidden = range(1, len(net.layers) - 1)
        numbers: Iterable[Any] = hidden
        if self.spaces is not None:
            numbers = sorted({_layer(net, number) for number in as_names(self.spaces) or ()})
        outside = [number for number in numbers if number not in hidden]
        if outside or not hidden:
            raise EditError(f"only hidden layers, 1 to {len(hidden)}, are pruned; got {outside}")
        return [net.layers[number] for number in numbers]

    def _choice(self, net: Graph, rank: "_Rank", count: int, evidence: Mapping[str, Any]) -> Choice:
        """Returns the nodes of a space that go."""
        layer = net.layers[rank.number]
        criterion = self.criterion
        if not hasattr(criterion, "score"):
            candidates = layer[torch.from_numpy(np.sort(rank.rows))]
            return chosen(criterion, net, candidates, evidence, count)
        return Choice(layer[torch.from_numpy(np.sort(rank.rows[:count]))])

    def _scores(
        self, net: Graph, layer: LiveNodes, free: np.ndarray, evidence: Mapping[str, Any]
    ) -> np.ndarray:
        """Returns the scores of the nodes that may go, in numbers that compare."""
        criterion = self.criterion
        if not hasattr(criterion, "score"):
            if self.scope == "model":
                raise EditError(
                    f'{type(criterion).__name__} has no scores, which scope="model" compares; use'
                    ' scope="space"'
                )
            return np.zeros(int(free.sum()))
        if not free.any():
            return np.empty(0)
        candidates: Any = layer
        if not free.all():
            candidates = layer[torch.from_numpy(free)]
        scores = scored(criterion, net, candidates, evidence).double()
        require_ranks(scores)
        how = self.compare or getattr(criterion, "comparison", "score")
        if how == "mean":
            scores = by_mean(scores)
        elif how == "lamp":
            scores = layer_adaptive(scores)
        return scores.numpy()

    def _ranked(
        self,
        net: Graph,
        layer: LiveNodes,
        gone: Mapping[int, np.ndarray],
        evidence: Mapping[str, Any],
    ) -> "_Rank":
        """Returns the nodes of a space that may go, the weakest first."""
        present = np.ones(len(layer), bool)
        if layer.index in gone:
            present[gone[layer.index]] = False
        free = present
        if not isinstance(layer, Space):
            free = present & ~_has_frozen_relations(net, layer)
        scores = self._scores(net, layer, free, evidence)
        order = np.argsort(scores, kind="stable")
        rows = np.flatnonzero(free)[order]
        size = int(present.sum())
        whole = size
        if isinstance(layer, Space):
            whole = max(size, _size_at_adoption(layer))
        least = self.keep
        if isinstance(least, float):
            least = math.ceil(least * whole - 1e-9)
        multiple = self.multiple
        if isinstance(layer, Space):
            multiple = _multiple_of_nodes(layer, multiple)
        # What may be removed: so many nodes that a multiple stays, and at least one.
        first = size % multiple or multiple
        most = min(len(rows), size - max(1, least))
        stops = np.arange(first, most + 1, multiple)
        return _Rank(layer.index, size, whole, rows, scores[order], stops)

    def _counts(self, ranks: "Sequence[_Rank]", order: "_Order", fraction: float) -> list[int]:
        """Returns how many nodes of every space go, for a share of nodes."""
        if self.scope == "model":
            total = sum(rank.size for rank in ranks)
            return order.counts(order.blocks_within(round(fraction * total)))
        counts = []
        for rank in ranks:
            reached = rank.stops[rank.stops <= round(fraction * rank.size)]
            counts.append(int(reached.max(initial=0)))
        return counts

    def _counts_within(
        self,
        net: Graph,
        edit: Edit,
        ranks: "Sequence[_Rank]",
        order: "_Order",
        gone: Mapping[int, np.ndarray],
    ) -> tuple[list[int], dict[str, float]]:
        """Returns how many nodes of every space go, the fewest that keep within the budget, and
        what the remark says about it.
        """
        name = next(name for name in _AMOUNTS if getattr(self, name) is not None)
        amount = getattr(self, name)
        present = _cost_function(net, None, name)({})
        cost = _cost_function(net, edit, name)
        budget = amount
        if isinstance(amount, float) or name == "latency":
            budget = amount * present

        def cost_of(blocks: int) -> float:
            leaving = {number: np.asarray(rows) for number, rows in gone.items()}
            for rank, count in zip(ranks, order.counts(blocks), strict=True):
                if count:
                    before = leaving.get(rank.number, np.empty(0, np.int64))
                    leaving[rank.number] = np.sort(np.append(before, rank.rows[:count]))
            return cost(leaving)

        # A latency that was measured once is not measured again, when it would differ a little.
        start = present
        if gone or name != "latency":
            start = cost_of(0)
        if start <= budget:
            return order.counts(0), {f"{name}_before": present, f"{name}_after": start}
        # The budget holds with `enough` blocks, and not with `few`.
        few = 0
        enough = order.n_blocks
        reached = cost_of(enough)
        if reached > budget:
            raise EditError(
                f"the model can be pruned to {reached / present:.1%} of its {name}, and"
                f" {budget / present:.1%} were asked for; choose more spaces, or a smaller keep="
            )
        finest = 1
        if name == "latency":
            finest = max(1, int(order.n_blocks * FINEST))
        while enough - few > finest:
            middle = (few + enough) // 2
            found = cost_of(middle)
            if found <= budget:
                enough = middle
                reached = found
            else:
                few = middle
        return order.counts(enough), {f"{name}_before": present, f"{name}_after": reached}


_AMOUNTS = ("fraction", "parameters", "macs", "latency")


@dataclass(frozen=True, eq=False)
class _Rank:
    """The nodes of one space that may go.

    Attributes:
        number: the number of the space among the layers.
        size: how many nodes it has, those that may not go included.
        whole: how many it had at adoption, or has if those are more.
        rows: the rows of the nodes that may go, the weakest first.
        scores: their scores, ascending.
        stops: how many of them may go together, ascending.
    """

    number: int
    size: int
    whole: int
    rows: np.ndarray
    scores: np.ndarray
    stops: np.ndarray


class _Order:
    """The order in which blocks of nodes go: each brings one space to its next allowed size.

    With the scope "space", all spaces shrink in step; with "model", the weakest block is next.
    """

    def __init__(self, ranks: Sequence[_Rank], scope: str) -> None:
        self._ranks = ranks
        owners = [np.full(len(rank.stops), place) for place, rank in enumerate(ranks)]
        means = []
        shares = []
        for rank in ranks:
            starts = np.concatenate([[0], rank.stops[:-1]])[: len(rank.stops)]
            sums = np.concatenate([[0.0], np.cumsum(rank.scores)])
            means.append((sums[rank.stops] - sums[starts]) / (rank.stops - starts))
            # of the nodes at adoption, how many are gone then
            shares.append((rank.whole - rank.size + rank.stops) / max(1, rank.whole))
        self._owners = np.concatenate([np.empty(0, int), *owners])
        keys = [np.concatenate([np.empty(0), *means])]
        if scope == "space":
            keys.append(np.concatenate([np.empty(0), *shares]))
        # The last key counts first. Blocks of one space keep their order: sums of ascending scores
        # may round, so the largest so far is taken.
        for place in range(len(ranks)):
            own = self._owners == place
            keys[0][own] = np.maximum.accumulate(keys[0][own])
        self._owners = self._owners[np.lexsort(keys)]

    @property
    def n_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._owners)

    def counts(self, blocks: int) -> list[int]:
        """Returns how many nodes of every space have gone with the first blocks."""
        taken = np.bincount(self._owners[:blocks], minlength=len(self._ranks))
        counts = []
        for rank, number in zip(self._ranks, taken, strict=True):
            counts.append(int(rank.stops[:number].max(initial=0)))
        return counts

    def blocks_within(self, nodes: int) -> int:
        """Returns how many blocks can go without exceeding a number of nodes."""
        few = 0
        many = self.n_blocks
        while few < many:
            middle = (few + many + 1) // 2
            if sum(self.counts(middle)) <= nodes:
                few = middle
            else:
                many = middle - 1
        return few


def _layer(net: Graph, number: str | int) -> Any:
    """Returns the number of a layer, counted from the first."""
    if isinstance(number, int) and number < 0:
        return number + len(net.layers)
    return number


def _has_frozen_relations(net: Graph, layer: LiveNodes) -> np.ndarray:
    """Marks the nodes of a layer that have a frozen relation, [n]."""
    marks = np.zeros(len(layer), bool)
    for t in net.entering(layer.index):
        transition = net.transitions[t]
        marks[transition.child[transition.frozen_at.long()].cpu().numpy()] = True
    for t in net.leaving(layer.index):
        transition = net.transitions[t]
        marks[transition.topology.parents_at(transition.frozen_at).cpu().numpy()] = True
    return marks


def _cost_function(
    net: Graph, edit: Edit | None, name: str
) -> Callable[[Mapping[int, np.ndarray]], float]:
    """Returns the function that tells what a net costs without some nodes: ascending rows, by
    layer. The relations of a net that the edit cuts do not count.
    """
    if not isinstance(net, Adopted):
        return _cost_of_net(net, edit, name)
    atoms = {number: space._atom for number, space in enumerate(net.spaces)}

    def timed(leaving: Mapping[int, np.ndarray]) -> float:
        return latency(net, {atoms[number]: rows for number, rows in leaving.items()})

    if name == "latency":
        return timed
    costs = net._current_costs()
    count = getattr(costs, name)

    def counted(leaving: Mapping[int, np.ndarray]) -> float:
        sizes = net._atom_sizes()
        for number, rows in leaving.items():
            sizes[atoms[number]] -= len(rows)
        return count(sizes)

    return counted


def _cost_of_net(
    net: Graph, edit: Edit | None, name: str
) -> Callable[[Mapping[int, np.ndarray]], float]:
    if name == "latency":
        raise EditError("latency= is for adopted models, which have an example to run: gn.adopt")
    staying = []
    for t in range(len(net.transitions)):
        marks = torch.ones(net.transitions[t].size, dtype=torch.bool, device=net.device)
        if edit is not None:
            marks[gone_relations(net, edit, t).long()] = False
        staying.append(marks)

    def counted(leaving: Mapping[int, np.ndarray]) -> float:
        alive = [torch.ones(size, dtype=torch.bool, device=net.device) for size in net.sizes]
        for number, rows in leaving.items():
            alive[number][torch.from_numpy(rows).long().to(net.device)] = False
        total = 0
        for transition, marks in zip(net.transitions, staying, strict=True):
            parents = alive[transition.source][transition.topology.parents().long()]
            children = alive[transition.target][transition.child.long()]
            total += int((marks & parents & children).sum())
        if name == "parameters":
            total += sum(int(marks.sum()) for marks in alive[1:])
        return total

    return counted


def _prunable(net: Adopted) -> list[Space]:
    """Returns the spaces of a model that are pruned by default."""
    free = {space._atom for space in net.spaces if not space.pins}
    runs = _kinds.setdefault(net, {})
    candidates = []
    for space in net.spaces:
        if space._atom not in free or len(space) < 2 or _frozen_tensor(net, space) is not None:
            continue
        outermost = _outermost_of_products(space, free)
        if any(space._atom not in atoms for atoms in outermost):
            continue
        # A factor of an axis, as heads are, may need numbers of the model to follow, which are
        # looked for long if there are none. So one space of a kind is tried for all of them.
        if outermost and space.verdict == "unproved":
            kind = kind_of(net.model, space)
            if kind not in runs:
                runs[kind] = _runs_with_fewer(net, space)
            if not runs[kind]:
                continue
        candidates.append(space)
    net.prove(candidates)
    return [space for space in candidates if space.verdict in ("exact", "unproved")]


def _outermost_of_products(space: Space, free: set[int]) -> list[list[int]]:
    """Returns, for every product of which a space is a factor, the atoms of its outermost factor
    that can be edited.
    """
    found = []
    for axis in space._members.values():
        terms = axis.parts if isinstance(axis, SumOf) else (axis,)
        for term in terms:
            if isinstance(term, ProductOf) and space._atom in atoms_of(term):
                outermost = next(part for part in term.parts if free & set(atoms_of(part)))
                found.append(atoms_of(outermost))
    return found


def _runs_with_fewer(net: Adopted, space: Space) -> bool:
    """Returns whether the model runs with one node less in a space."""
    sizes = net._atom_sizes()
    fewer = list(sizes)
    fewer[space._atom] -= 1
    try:
        net._gates.foresee(net.model, [space], sizes, fewer)
    except EditError:
        return False
    return True


def _size_at_adoption(space: Space) -> int:
    """Returns how many nodes a space had when the model was adopted."""
    net = space.graph
    assert isinstance(net, Adopted)
    return net._typed.sizes()[space._atom]


def _frozen_tensor(net: Adopted, space: Space) -> str | None:
    """Returns the name of a Parameter of a space that does not require gradients."""
    stores = net._stores()
    for name, _ in space._members:
        if name in stores and not stores[name].parameter.requires_grad:
            return name
    return None


def _multiple_of_nodes(space: Space, multiple: int) -> int:
    """Returns the smallest number of nodes whose entries are a multiple in every tensor."""
    needed = 1
    if multiple > 1:
        for at in space.places().values():
            needed = math.lcm(needed, multiple // math.gcd(multiple, at.shape[1]))
    return needed
