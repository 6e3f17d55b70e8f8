"""The state of a manager: runs that go on from a checkpoint, and states that do not fit."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.core._errors import CheckpointError
from grapnet.rules import (
    At,
    Budget,
    CovarianceSifter,
    Every,
    EveryTask,
    RuleContext,
    RuleManager,
)

from .own_rules import (
    CutMoreEachTime,
    CutQuietest,
    CutRandom,
    CutWeakest,
    Grow,
    X,
    journal,
    small_net,
    train,
)


def managed(seed: int = 3) -> RuleManager:
    manager = RuleManager(seed=seed, budget=Budget(edits=12, parents=1))
    manager.add(CutRandom(1), schedule=Every(2))
    manager.add(Grow(1), schedule=EveryTask())
    manager.add(CutMoreEachTime(), schedule=At(2, 5, 9), budget=Budget(edits=2))
    manager.add(CutQuietest(window=4), schedule=At(3, 8))
    return manager


def run(
    net: gn.GrapNet, optimizer: torch.optim.Optimizer, manager: RuleManager, steps: range
) -> None:
    for step in steps:
        train(net, optimizer, X * (1 + step))
        manager.apply(net, step, task=f"task {step}" if step % 4 == 3 else None)


def started(manager: RuleManager) -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    net = small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    manager.start(net)
    return net, optimizer


def outcome(net: gn.GrapNet, manager: RuleManager) -> tuple[Any, ...]:
    values = [parameter.tolist() for parameter in net.parameters()]
    return journal(net), values, text(manager.state_dict())


def text(state: dict[str, Any]) -> str:
    return str({**state, "generator": state["generator"].tolist()})


@pytest.mark.parametrize("stop", [0, 1, 6, 8])
@pytest.mark.parametrize("live", [False, True])
def test_a_restored_run_goes_on_bit_by_bit(tmp_path: Path, stop: int, live: bool) -> None:
    whole = managed()
    net, optimizer = started(whole)
    run(net, optimizer, whole, range(12))
    expected = outcome(net, whole)

    half = managed()
    net, optimizer = started(half)
    run(net, optimizer, half, range(stop))
    gn.save(tmp_path / "run", net, history="full", rules=half, optimizer=optimizer)
    del net, optimizer, half

    net = gn.load(tmp_path / "run")
    manager = managed(seed=99)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    if live:  # its recorders exist already
        manager.start(net, step=stop)
    gn.restore(tmp_path / "run", rules=manager, optimizer=optimizer)
    if not live:
        manager.start(net)
    run(net, optimizer, manager, range(stop, 12))
    assert outcome(net, manager) == expected
    assert len(net.history) > 6


def test_a_state_survives_being_saved_again_before_it_is_used(tmp_path: Path) -> None:
    first = managed()
    second = managed()
    net, optimizer = started(first)
    run(net, optimizer, first, range(2))
    gn.save(tmp_path / "one", net, rules=first)
    gn.restore(tmp_path / "one", rules=second)
    gn.save(tmp_path / "two", net, rules=second)
    third = managed()
    gn.restore(tmp_path / "two", rules=third)
    assert text(third.state_dict()) == text(first.state_dict())
    assert "'count': 16" in text(third.state_dict())


def test_order_and_switches_come_back() -> None:
    saved = managed()
    manager = managed()
    saved.reorder(["Grow", "CutQuietest", "CutRandom", "CutMoreEachTime"])
    saved.disable("CutRandom")
    manager.disable("Grow")
    manager.load_state_dict(saved.state_dict())
    assert manager.names == saved.names
    assert [manager.is_enabled(name) for name in manager.names] == [True, True, False, True]


def test_a_state_is_plain_data() -> None:
    def halve(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None: ...

    manager = RuleManager()
    manager.add(halve)
    manager.add(Called([Every(2), torch.ones(2), torch.relu]))
    halved, called = manager.state_dict()["rules"]
    assert halved["rule"] == {"class": "halve", "settings": {}}
    every, ones, relu = called["rule"]["settings"]["inner"]
    assert every == {"class": "Every", "settings": {"steps": 2, "start": 0, "until": None}}
    assert (ones, relu["class"]) == ([1.0, 1.0], "relu")
    manager.load_state_dict(copy.deepcopy(manager.state_dict()))


@dataclass(frozen=True)
class Called:
    inner: Any

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None: ...


def one(
    rule: Any,
    name: str = "rule",
    budget: Budget = Budget(),  # noqa: B008
    rule_budget: Budget | None = None,
    **given: Any,
) -> RuleManager:
    manager = RuleManager(seed=1, budget=budget)
    manager.add(rule, name=name, budget=rule_budget, **given)
    return manager


OTHERS: dict[str, Callable[[], RuleManager]] = {
    "another name": lambda: one(CutWeakest(2), "other"),
    "no rule": RuleManager,
    "another class": lambda: one(CutRandom(2)),
    "other settings": lambda: one(CutWeakest(3)),
    "another schedule": lambda: one(CutWeakest(2), schedule=At(1)),
    "other steps": lambda: one(CutWeakest(2), schedule=Every(5)),
    "another budget": lambda: one(CutWeakest(2), "rule", Budget(edits=1)),
    "a budget of its own": lambda: one(CutWeakest(2), rule_budget=Budget(edits=1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    saved = one(CutWeakest(2))
    manager = OTHERS[name]()
    net = small_net()
    manager.start(net)
    before = text(manager.state_dict())
    with pytest.raises(gn.errors.CheckpointError):
        manager.load_state_dict(saved.state_dict())
    gn.save(tmp_path / "run", net, rules=saved)
    with pytest.raises(gn.errors.CheckpointError, match=r"^extras\.rules: "):
        gn.restore(tmp_path / "run", rules=manager)
    assert text(manager.state_dict()) == before
    saved.load_state_dict(one(CutWeakest(2)).state_dict())  # control: one that fits


class Picky(CutMoreEachTime):
    """Refuses a state after having taken it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.calls == 13:
            raise KeyError("unlucky")


def test_a_rule_that_refuses_its_state_leaves_the_manager_as_it_was() -> None:
    manager = RuleManager()
    for name in "ab":
        manager.add(Picky(), name=name)
    net = small_net()
    manager.apply(net, 0)
    state = copy.deepcopy(manager.state_dict())
    before = text(manager.state_dict())
    state["rules"].reverse()
    state["rules"][0]["state"]["calls"] = 5
    state["rules"][0]["enabled"] = False
    state["rules"][1]["state"]["calls"] = 13
    with pytest.raises(KeyError, match="unlucky"):
        manager.load_state_dict(state)
    assert text(manager.state_dict()) == before


def swap(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
    edit.remove_nodes(net.layers[2][:1])
    new = edit.add_nodes(2, 1)
    edit.connect(net.layers[1], new, weights=0.5)
    edit.connect(new, net.layers[3], weights=0.5)


def swapping() -> RuleManager:
    manager = RuleManager()
    manager.add(CovarianceSifter(window=1), schedule=At(9))
    manager.add(swap, schedule=At(2))
    return manager


def recorded() -> tuple[gn.GrapNet, RuleManager]:
    torch.manual_seed(0)
    net = gn.GrapNet([4, 6, 6, 2])
    manager = swapping()
    with manager.recording(net):
        net(torch.randn(64, 4))
    return net, manager


@pytest.mark.parametrize("steps", [(2, 9), range(2, 10)], ids=["never armed", "armed later"])
@pytest.mark.parametrize("live", [False, True])
def test_restored_recorders_follow_commits_before_they_watch(
    tmp_path: Path, steps: Any, live: bool
) -> None:
    net, manager = recorded()
    gn.save(tmp_path / "run", net, rules=manager)
    twin = gn.load(tmp_path / "run")
    restored = swapping()
    if live:  # its recorders exist already, and never watched
        restored.start(twin, 2)
    gn.restore(tmp_path / "run", rules=restored)
    for one, rules in ((net, manager), (twin, restored)):
        rules.start(one, 2)
        for step in steps:
            rules.apply(one, step)
    assert journal(twin) == journal(net)
    assert len(net.history) == 2


def test_evidence_about_other_nodes_is_refused_and_stays_for_the_right_net() -> None:
    net, manager = recorded()
    other = copy.deepcopy(net)
    restored = swapping()
    with other.edit() as edit:
        edit.remove_nodes(other.layers[2][0])
    restored.load_state_dict(manager.state_dict())
    with pytest.raises(CheckpointError, match="other nodes"):
        restored.start(other)
    assert restored.apply(net, 9) is not None


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_has_the_evidence_and_is_bound_to_no_net(how: Callable[[Any], Any]) -> None:
    net, manager = recorded()
    manager.start(net, 9)
    twin, copied = how((net, manager))
    before = str(copied.state_dict())
    net(torch.randn(64, 4))
    twin(torch.randn(64, 4))
    assert str(copied.state_dict()) == before  # neither net shows it anything
    assert str(manager.state_dict()) != before
    fresh, same = recorded()
    same.apply(fresh, 9)
    copied.apply(twin, 9)
    assert journal(twin) == journal(fresh)
    assert len(twin.history) == 1
