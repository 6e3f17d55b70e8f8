"""What a rule is, when it is due, and what rules ask about a net and an open edit."""

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import Tensor, nn

from grapnet._network import GrapNet
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import contains
from grapnet.core._layer import LiveNodes
from grapnet.core._sets import NodeSet, RelationSet
from grapnet.spaces._adopted import Adopted, adopted
from grapnet.spaces._grouped import GroupedWeight
from grapnet.spaces._space import Space

from ._budget import Budget, positions_in

# A net, a model with nets inside or that was adopted, or nets by name or one after the other.
Nets = nn.Module | Mapping[str, Graph] | Iterable[Graph]


@runtime_checkable
class Recorder(Protocol):
    """Gathers evidence while a net trains; a manager arms it only for the steps that a rule needs.

    A recorder follows the commits of its net, so that its evidence belongs to the right nodes. The
    manager does not call a rule while the `count` of one of its recorders is 0. With `state_dict`
    and `load_state_dict`, the evidence is part of a checkpoint.
    """

    window: int  # the number of steps that it records before its rule is due

    def arm(self, net: Any) -> None:
        """Starts to watch a net; does nothing when it watches already."""
        ...

    def disarm(self) -> None:
        """Stops watching and keeps what it has seen; does nothing when it does not watch."""
        ...

    def clear(self) -> None:
        """Forgets what it has seen."""
        ...


@dataclass(frozen=True)
class RuleContext:
    """When a rule is called, and with what.

    Attributes:
        step: the step of `RuleManager.apply`.
        task: the task of `RuleManager.apply`, None without one.
        budget: what the rule must not exceed in this net; the manager enforces it.
        evidence: the rule's recorders, by the names that its `recorders` method gave them.
    """

    step: int = 0
    task: Any = None
    budget: Budget = field(default_factory=Budget)
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Rule(Protocol):
    """Settings, usually a frozen dataclass, plus one method.

    It reads the net as it was when the edit began, writes operations into the edit, and draws
    random numbers from `edit.generator`. It never commits. A manager of several nets calls it once
    for each of them. The net is a `GrapNet`, or what `gn.adopt` returned.
    """

    def __call__(self, net: Any, edit: Any, context: RuleContext, /) -> None:
        """Writes operations into the edit."""
        ...


@runtime_checkable
class RecordingRule(Rule, Protocol):
    """A rule that needs evidence."""

    def recorders(self, net: Any) -> dict[str, Recorder]:
        """Returns the recorders to arm, by the names under which `context.evidence` has them."""
        ...


class Schedule(Protocol):
    """When a rule is due; a frozen dataclass whose fields a checkpoint can hold."""

    def is_due(self, step: int, task: Any) -> bool:
        """Returns whether the rule runs at this step; `task` is that of `RuleManager.apply`."""
        ...

    def may_be_due(self, first: int, last: int) -> bool:
        """Returns whether the rule could be due at a step from first to last.

        Recorders are armed while it could.
        """
        ...


@dataclass(frozen=True)
class Every:
    """Every `steps` steps: at start, start + steps, …, up to and including `until`.

    Examples:
        >>> schedule = Every(100, start=50, until=250)
        >>> [step for step in range(400) if schedule.is_due(step, None)]
        [50, 150, 250]
    """

    steps: int
    start: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a rule runs every 1 or more steps, got {self.steps}")

    def is_due(self, step: int, task: Any) -> bool:
        """Returns whether the rule runs at this step."""
        return self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Returns whether one of its steps is in the range from first to last."""
        following = max(first, self.start)
        following += (self.start - following) % self.steps
        if self.until is not None:
            last = min(last, self.until)
        return following <= last


@dataclass(frozen=True)
class At:
    """At given steps, one by one or from a list: `At(10, 50)`, `At(range(0, 1000, 100))`.

    Examples:
        >>> At(50, 10)
        At(steps=(10, 50))
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: SupportsIndex | Iterable[SupportsIndex]) -> None:
        flat: set[int] = set()
        for given in steps:
            if isinstance(given, Iterable):
                flat.update(operator.index(step) for step in given)
            else:
                flat.add(operator.index(given))
        object.__setattr__(self, "steps", tuple(sorted(flat)))

    def is_due(self, step: int, task: Any) -> bool:
        """Returns whether the rule runs at this step."""
        return self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Returns whether one of its steps is in the range from first to last."""
        place = bisect_left(self.steps, first)
        return place < len(self.steps) and self.steps[place] <= last


@dataclass(frozen=True)
class EveryTask:
    """Whenever `RuleManager.apply` gets a task, at steps from `start` to `until`.

    It is for rules that run before a task, such as growth, and for rules that run after one, such
    as freezing. Recorders are armed all the time, since the next task can come at any step.
    """

    start: int = 0
    until: int | None = None

    def is_due(self, step: int, task: Any) -> bool:
        """Returns whether there is a task, at a step from start to until."""
        return task is not None and self.may_be_due(step, step)

    def may_be_due(self, first: int, last: int) -> bool:
        """Returns whether the steps overlap with those from start to until."""
        return last >= self.start and (self.until is None or first <= self.until)


class Scheduled(NamedTuple):
    """A rule and its schedule, which `RuleManager.add` takes as one argument."""

    rule: Rule
    schedule: Schedule


# What managers and rules ask.


def nets_of(model: Nets) -> dict[str, Graph]:
    """Returns nets and adopted models by name; a net by itself has the empty name.

    Examples:
        >>> model = nn.ModuleDict({"encoder": nn.Linear(8, 4), "head": GrapNet([4, 2])})
        >>> list(nets_of(model))
        ['head']
    """
    nets: dict[str, Graph] = {}
    if isinstance(model, Graph):
        nets[""] = model
    elif isinstance(model, nn.Module):
        for name, part in model.named_modules():
            net = _graph_of(part)
            if net is not None:
                nets[name] = net
    elif isinstance(model, Mapping):
        nets = {str(name): net for name, net in model.items()}
    else:
        nets = {str(number): net for number, net in enumerate(model)}
    if not nets:
        raise ValueError(
            f"there is no GrapNet in {type(model).__name__}, and it was not adopted: gn.adopt"
        )
    return nets


def _graph_of(part: nn.Module) -> Graph | None:
    """Returns a module that is a net, or the graph of one that was adopted."""
    if isinstance(part, Graph):
        return part
    try:
        return adopted(part)
    except KeyError:
        return None


def as_numbers(given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Returns the setting `layers` or `transitions` of a rule as a tuple, None for its default."""
    if given is None:
        return None
    if isinstance(given, Iterable):
        return tuple(operator.index(number) for number in given)
    return (operator.index(given),)


# Layers by number, spaces by name, or either as such.
Layers = int | str | LiveNodes | Iterable[int | str | LiveNodes]


def as_names(given: Layers | None) -> tuple[int | str, ...] | None:
    """Returns spaces by name and layers by number, which a checkpoint can hold; None for the
    default of a rule.
    """
    if given is None:
        return None
    # A layer is a set of nodes, and so could be taken for several.
    if isinstance(given, str | LiveNodes) or not isinstance(given, Iterable):
        given = (given,)
    names: list[str | int] = []
    for one in given:
        if isinstance(one, Space):
            names.append(one.name)
        elif isinstance(one, LiveNodes):
            names.append(one.index)
        elif isinstance(one, str):
            names.append(one)
        else:
            names.append(operator.index(one))
    return tuple(names)


# Transitions by number or, of an adopted model, by the name of a module or tensor.
Transitions = int | str | Iterable[int | str]


def as_transitions(given: Transitions | None) -> tuple[int | str, ...] | None:
    """Returns the setting `transitions` of a rule as a tuple, None for its default."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = (given,)
    return tuple(one if isinstance(one, str) else operator.index(one) for one in given)


def chosen_transitions(
    net: Graph, transitions: Transitions | None, default: Iterable[int] | None = None
) -> list[int]:
    """Returns the numbers of a net's transitions in order, all of them by default.

    Negative numbers count from the end. Tensors of an adopted model that do not require gradients
    are left out by default.

    Raises:
        EditError: one of them does not exist, or does not require gradients.
    """
    count = len(net.transitions)
    trainable = net._trainable_transitions()
    given = as_transitions(transitions)
    if given is None:
        return sorted(trainable if default is None else default)
    numbers = []
    for one in given:
        if isinstance(one, str):
            named = net._named_transitions(one)
            if not named:
                raise EditError(f"no module or tensor called {one!r} holds relations")
            numbers += named
        else:
            numbers.append(one)
    outside = [t for t in numbers if not -count <= t < count]
    if outside:
        raise EditError(
            f"the net has transitions 0 to {count - 1}, so there are no transitions {outside}"
        )
    found = sorted({t % count for t in numbers})
    for t in found:
        if t not in trainable:
            raise EditError(
                f"{net.transitions[t]} does not require gradients, so rules leave it as it is"
            )
    return found


def rewirable_transitions(net: Graph, transitions: Transitions | None) -> list[int]:
    """Returns the chosen transitions, by default all without groups.

    Raises:
        EditError: also if one of them is a convolution with groups.
    """
    plain = []
    for t in net._trainable_transitions():
        if not isinstance(net.transitions[t], GroupedWeight):
            plain.append(t)
    found = chosen_transitions(net, transitions, plain)
    for t in found:
        if t not in plain:
            raise EditError(
                f"{net.transitions[t]} is in a convolution with groups, which cannot be rewired;"
                " its relations can be cut, connected and frozen"
            )
    return found


def require_net(net: Graph, rule: str) -> None:
    """Raises EditError if a graph is an adopted model, and the rule works on nets alone."""
    if isinstance(net, Adopted):
        raise EditError(
            f"{rule} works on nets, whose layers lead to each other; this is an adopted model"
        )


def sources_of(net: GrapNet, layer: int) -> list[int]:
    """Returns the layers that lead to a layer."""
    return [net.transitions[t].source for t in net.entering(layer)]


def targets_of(net: GrapNet, layer: int) -> list[int]:
    """Returns the layers that a layer leads to."""
    return [net.transitions[t].target for t in net.leaving(layer)]


def only(neighbours: list[int], layer: int) -> int:
    """Returns the one neighbour of a layer; raises EditError when it has several."""
    if len(neighbours) != 1:
        raise EditError(
            f"this works for a layer between two others, and layer {layer} is next to {neighbours}"
        )
    return neighbours[0]


def count_orphans(net: Graph, layer: int) -> int:
    """Returns how many nodes of a layer have no parent."""
    if isinstance(net, Adopted):
        # Where a tensor has all of its relations, no node is without; most are never wired.
        entering = [net.transitions[t].grid for t in net.entering(layer)]
        if any(grid.opened is None for grid in entering):
            return 0
    parents = torch.zeros(net.sizes[layer], dtype=torch.int64, device=net.device)
    for t in net.entering(layer):
        parents += net.transitions[t].topology.fan_in()
    return int((parents == 0).sum())


def seen_evidence(context: RuleContext, name: str, rule: str) -> Any:
    """Returns a recorder of the context; raises EditError when it is missing or empty."""
    recorder = context.evidence.get(name)
    if recorder is None or recorder.count == 0:
        raise EditError(
            f"{rule} has no evidence {name!r}. Add the rule to a RuleManager, which arms its"
            " recorders while the net trains, or arm them yourself, run the net and pass"
            " RuleContext(evidence=recorders)"
        )
    return recorder


# What the rules before have asked of the same edit. The number of a pair of transition t is
# parent row · n_children + child row.


def staying(net: GrapNet, edit: Edit, layer: int) -> NodeSet:
    """Returns the nodes of a layer without those that the edit removes."""
    removals = edit.removals
    if len(removals) == 0:
        return net.layers[layer]
    return net.select(layer=layer) - removals


def leaving_relations(edit: Edit) -> RelationSet:
    """Returns the relations that leave with nodes that the edit removes."""
    return edit.removals.incoming() | edit.removals.outgoing()


def taken_pairs(net: Graph, edit: Edit, t: int) -> Tensor:
    """Returns the ascending absent pairs of transition t that the edit connects, or whose node it
    removes.
    """
    transition = net.transitions[t]
    n_children = transition.n_children
    found = [asked_pairs(net, edit, t)]
    leaving = edit.removals._rows_by_layer()
    if transition.source in leaving:
        parents = leaving[transition.source].long()
        children = torch.arange(n_children, device="cpu")
        found.append((parents[:, None] * n_children + children).view(-1))
    if transition.target in leaving:
        parents = torch.arange(len(net.layers[transition.source]), device="cpu")
        children = leaving[transition.target].long()
        found.append((parents[:, None] * n_children + children).view(-1))
    if not any(len(part) for part in found):
        return found[0]
    pairs = torch.cat(found).unique()
    rows = pairs.to(net.device)
    related = transition.topology.find(rows // max(1, n_children), rows % max(1, n_children)) >= 0
    return pairs[~related.cpu()]


def asked_pairs(net: Graph, edit: Edit, t: int) -> Tensor:
    """Returns the pairs of present nodes that the edit connects in transition t, ascending."""
    if edit.n_connections == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    transition = net.transitions[t]
    parents, children = edit._connected_rows(t)
    here = parents < len(net.layers[transition.source])
    here &= children < len(net.layers[transition.target])
    return (parents[here] * transition.n_children + children[here]).unique()


def gone_relations(net: Graph, edit: Edit, t: int) -> Tensor:
    """Returns the ascending positions of the relations that go.

    They are cut and not connected again, or leave with a node.
    """
    cuts = positions_in(edit.cuts, t, net.device)
    if len(cuts):
        topology = net.transitions[t].topology
        parents = topology.parents_at(cuts).long()
        pairs = parents * topology.n_children + topology.child.index_select(0, cuts)
        again = contains(asked_pairs(net, edit, t), pairs.cpu())
        cuts = cuts[~again.to(cuts.device)]
    return torch.cat([cuts, positions_in(leaving_relations(edit), t, net.device)]).unique()


def unavailable_relations(net: GrapNet, edit: Edit, t: int) -> Tensor:
    """Returns the ascending positions of the relations that the edit cuts or assigns, or that leave
    with a node, connected again or not.
    """
    taken = edit.cuts | edit.assigned_relations | leaving_relations(edit)
    return positions_in(taken, t, net.device)
