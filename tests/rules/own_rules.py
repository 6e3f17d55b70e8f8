"""Small rules, a small recorder and a training step, for the tests of the manager."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import Recorder, RuleContext

X = torch.linspace(-1, 1, 48).reshape(8, 6)


@dataclass(frozen=True)
class CutWeakest:
    """Cuts the weakest relations that leave a layer."""

    count: int = 2
    layer: int = 0

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        edit.cut(net.select(layer=self.layer).outgoing().smallest(count=self.count))


@dataclass(frozen=True)
class CutRandom:
    """Cuts random relations of the first transition."""

    count: int = 2

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        relations = net.layers[0].outgoing()
        edit.cut(relations[torch.randperm(len(relations), generator=edit.generator)[: self.count]])


@dataclass(frozen=True)
class Grow:
    """Adds nodes to the hidden layer and relates them to everything, with random weights."""

    nodes: int = 1

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        new = edit.add_nodes(
            1, self.nodes, owner=None if context.task is None else str(context.task)
        )
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[2])


@dataclass(frozen=True)
class Fail:
    """Cuts, draws a number and raises."""

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        edit.cut(net.layers[0].outgoing())
        torch.rand(1, generator=edit.generator)
        raise ZeroDivisionError("on purpose")


class CutMoreEachTime:
    """Cuts one relation when first called, then two, and so on: a rule with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        self.calls += 1
        edit.cut(net.layers[0].outgoing().smallest(count=self.calls))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Mean:
    """A recorder of the mean input of every sensory node."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = 0
        self.total = torch.zeros(6)
        self.hook: Any = None
        self.log: list[str] = []

    def arm(self, net: gn.GrapNet) -> None:
        if self.hook is None:
            this = weakref.ref(self)
            self.hook = net.layers[0].register_forward_hook(lambda module, x, y: this().see(y))
            self.log.append("arm")

    def disarm(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
            self.log.append("disarm")

    def clear(self) -> None:
        self.count = 0
        self.total = torch.zeros(6)

    def see(self, x: Tensor) -> None:
        self.count += len(x)
        self.total = self.total + x.detach().sum(0)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.total = state["total"]


@dataclass(frozen=True)
class CutQuietest:
    """Cuts a relation of the sensory node whose mean input is smallest."""

    window: int = 3

    def recorders(self, net: gn.GrapNet) -> dict[str, Recorder]:
        return {"mean": Mean(self.window)}

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        seen = context.evidence["mean"]
        row = int((seen.total / seen.count).abs().argmin())
        edit.cut(net.layers[0][row].outgoing().smallest(count=1))
        edit.remark("quietest", row=row, seen=seen.count)


def seen_evidence(net: gn.GrapNet, rule: Any, x: Tensor) -> dict[str, Recorder]:
    """Returns the recorders of a rule after one pass forward and backward."""
    recorders = rule.recorders(net)
    for recorder in recorders.values():
        recorder.arm(net)
    if recorders:
        net(x).square().sum().backward()
    for recorder in recorders.values():
        recorder.disarm()
    return recorders


def small_net(seed: int = 0) -> gn.GrapNet:
    return gn.GrapNet([6, 5, 3], generator=torch.Generator().manual_seed(seed))


def train(net: gn.GrapNet, optimizer: torch.optim.Optimizer | None = None, x: Tensor = X) -> None:
    net.zero_grad()
    net(x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def recorded(state: dict[str, Any], net: int = 0) -> dict[str, Any]:
    """Returns what a manager's state holds of the recorders on one of its nets, by rule."""
    if not state["recorders"]:
        return {}
    return state["recorders"][net]["rules"]


def journal(net: gn.GrapNet) -> list[Any]:
    """Returns the commits as comparable data: why, who, what was asked for, and which relations and
    nodes moved.
    """
    found = []
    for commit in net.history:
        moved = [
            (t, record.parents.tolist(), record.children.tolist())
            for t, change in commit.change.transitions.items()
            for record in (change.gone, change.born)
        ]
        nodes = [
            (n, change.gone.uids.tolist(), change.born.uids.tolist())
            for n, change in commit.change.layers.items()
        ]
        found.append((commit.version, commit.reason, commit.by, commit.operations, moved, nodes))
    return found
