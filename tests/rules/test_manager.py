"""RuleManager: order, schedules, one transaction an apply, and budgets."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.rules.budget import Budget
from grapnet.rules.manager import RuleManager
from grapnet.rules.roster import RuleError
from grapnet.rules.rule import Moment
from grapnet.rules.schedule import At, Every, EveryTask
from tests.fingerprint import fingerprint

from .own_rules import (
    CutMoreEachTime,
    CutQuietest,
    CutRandom,
    CutWeakest,
    Fail,
    Grow,
    journal,
    small_net,
    train,
)


@pytest.fixture
def net() -> gn.GrapNet:
    return small_net()


@pytest.fixture
def manager() -> RuleManager:
    return RuleManager()


def test_rules_are_kept_by_name_and_in_order(manager: RuleManager) -> None:
    first, second = CutWeakest(1), CutWeakest(2)
    assert [manager.inject(first), manager.inject(second), manager.inject(Grow(), name="grow")] == [
        "CutWeakest",
        "CutWeakest 2",
        "grow",
    ]
    manager.inject(CutRandom(), before="CutWeakest 2")
    manager.inject(Fail(), after="CutWeakest", enabled=False)
    assert manager.names == ["CutWeakest", "Fail", "CutRandom", "CutWeakest 2", "grow"]
    assert (len(manager), manager["CutWeakest 2"], "grow" in manager, "Grow" in manager) == (
        5,
        second,
        True,
        False,
    )
    assert [type(rule).__name__ for rule in manager] == [
        "CutWeakest",
        "Fail",
        "CutRandom",
        "CutWeakest",
        "Grow",
    ]
    assert manager.remove("CutWeakest") is first
    manager.reorder(["grow", "Fail", "CutWeakest 2", "CutRandom"])
    assert manager.names == ["grow", "Fail", "CutWeakest 2", "CutRandom"]
    assert "Fail: Fail(), Every(steps=1, start=0, until=None), disabled" in repr(manager)


def test_unknown_names_and_wrong_kinds_are_refused_and_change_nothing(manager: RuleManager) -> None:
    with pytest.raises(RuleError, match="no rule is called 'a'; the manager has none"):
        manager.enable("a")
    manager.inject(CutWeakest(), name="known")
    manager.inject(Grow(), name="other")
    for forbidden in (
        lambda: manager["a"],
        lambda: manager.remove("a"),
        lambda: manager.disable("a"),
        lambda: manager.replace("a", Grow()),
        lambda: manager.inject(Grow(), before="a"),
        lambda: manager.inject(Grow(), after="a"),
        lambda: manager.inject(Grow(), name="known"),
        lambda: manager.inject(Grow(), before="known", after="other"),
        lambda: manager.reorder(["known", "a"]),
        lambda: manager.reorder(["known"]),
        lambda: manager.reorder(["known", "known"]),
        lambda: manager.reorder(["known", "other", "known"]),
    ):
        with pytest.raises(RuleError, match="known"):
            forbidden()
    wrong: list[Any] = [
        lambda: manager.inject(CutWeakest),
        lambda: manager.inject("CutWeakest"),
        lambda: manager.replace("known", Grow),
        lambda: manager.inject(Grow(), schedule=100),
        lambda: manager.inject(Grow(), schedule=Every),
        lambda: manager.inject(Grow(), budget=5),
        lambda: RuleManager(budget=5),
        lambda: manager.apply(small_net(), 1.5),
    ]
    for forbidden in wrong:
        with pytest.raises(TypeError):
            forbidden()
    assert manager.names == ["known", "other"]
    assert manager["known"] == CutWeakest()
    assert issubclass(RuleError, gn.GrapNetError)


def test_one_apply_is_one_commit_that_says_who_did_what(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    manager.inject(CutWeakest(2))
    manager.inject(Grow(1), name="growth")
    commit = manager.apply(net, 7, task="b")
    assert list(net.history) == [commit]
    assert (commit.by, commit.reason) == (
        "CutWeakest, growth",
        "CutWeakest, growth at step 7, task b",
    )
    assert commit.operations == (
        {"operation": "remark", "text": "CutWeakest", "step": 7, "task": "b"},
        {"operation": "cut", "transition": 0, "relations": 2},
        {"operation": "remark", "text": "growth", "step": 7, "task": "b"},
        {"operation": "add_nodes", "layer": 1, "nodes": 1, "owner": "b", "activation": "relu"},
        {"operation": "connect", "transition": 0, "relations": 6, "weights": "linear"},
        {"operation": "connect", "transition": 1, "relations": 3, "weights": "linear"},
    )
    assert net.count().relations == 45 - 2 + 9
    gn.check(net)


def test_a_step_that_nobody_told_is_the_next_one_and_is_not_in_the_journal(
    manager: RuleManager,
) -> None:
    net, steps = small_net(), []
    manager.inject(CutWeakest(2))
    manager.inject(lambda net, edit, now: steps.append(now.step), name="spy", schedule=At(0, 8))
    planned = manager.apply(net, dry_run=True)
    assert (planned.cut, steps) == (2, [0])
    commit = manager.apply(net)
    assert (commit.reason, commit.operations[0]) == (
        "CutWeakest, spy",
        {"operation": "remark", "text": "CutWeakest"},
    )
    assert (manager.apply(net, 7).reason, manager.apply(net, task="b").reason) == (
        "CutWeakest at step 7",
        "CutWeakest, spy at task b",
    )
    assert steps == [0, 0, 8]
    manager.inject(Fail())
    with pytest.raises(ZeroDivisionError) as caught:
        manager.apply(net)
    assert caught.value.__notes__ == ["raised by rule 'Fail'"]


def test_rules_run_in_order_when_due_and_enabled(net: gn.GrapNet, manager: RuleManager) -> None:
    calls: list[Any] = []

    def spy(name: str) -> Any:
        return lambda net, edit, now: calls.append((now.step, now.task, name))

    manager.inject(spy("a"), name="a", schedule=Every(2))
    manager.inject(spy("b"), name="b", schedule=At(1, 2))
    manager.inject(spy("c"), name="c", schedule=EveryTask())
    for step in range(3):
        assert manager.apply(net, step, task="t" if step == 2 else None) is None
    assert calls == [(0, None, "a"), (1, None, "b"), (2, "t", "a"), (2, "t", "b"), (2, "t", "c")]
    calls.clear()
    manager.disable("a")
    manager.reorder(["c", "b", "a"])
    manager.replace("b", spy("B"))
    manager.apply(net, 2, task=0)
    assert not manager.is_enabled("a")
    manager.enable("a")
    assert manager.is_enabled("a")
    manager.remove("c")
    manager.apply(net, 2, task=0)
    assert calls == [(2, 0, "c"), (2, 0, "B"), (2, 0, "B"), (2, 0, "a")]
    assert net.version == 0


def test_nothing_due_or_nothing_to_change_commits_nothing(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    before = fingerprint(net)
    assert manager.apply(net, 0) is None
    manager.inject(CutWeakest(), schedule=At(5))
    manager.inject(CutWeakest(0))
    assert manager.apply(net, 0) is None
    assert fingerprint(net) == before
    assert manager.apply(net, 5) is net.history[-1]


def test_a_rule_that_raises_leaves_everything_as_it_was(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    manager.inject(CutRandom())
    manager.inject(CutMoreEachTime())
    manager.inject(CutQuietest(window=1))
    manager.inject(Fail())
    manager.start(net)
    train(net, optimizer)
    before, state = fingerprint(net, optimizer), manager.state_dict()
    # the fingerprint runs the net too
    assert state["rules"][2]["recorders"]["mean"]["count"] == 8 + 2
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        manager.apply(net, 0)
    assert caught.value.__notes__ == ["raised by rule 'Fail' at step 0"]
    assert_same_state(manager.state_dict(), state)
    assert fingerprint(net, optimizer) == before
    manager.disable("Fail")
    assert manager.apply(net, 0) is not None  # control: the others do change all of that
    after = manager.state_dict()
    assert not torch.equal(after["generator"], state["generator"])
    assert (after["rules"][1]["state"], after["rules"][2]["recorders"]["mean"]["count"]) == (
        {"calls": 1},
        0,
    )


def assert_same_state(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert torch.equal(one["generator"], other["generator"])
    assert str({**one, "generator": None}) == str({**other, "generator": None})


class Refusal:
    """A follower that stops every commit."""

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Any:
        raise RuntimeError("no commits here")


def test_a_commit_that_is_stopped_leaves_everything_as_it_was(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    refusal = Refusal()
    net.follow(refusal)
    manager.inject(CutRandom())
    manager.inject(CutMoreEachTime())
    before, state = fingerprint(net), manager.state_dict()
    with pytest.raises(RuntimeError, match="no commits"):
        manager.apply(net, 0)
    assert fingerprint(net) == before
    assert_same_state(manager.state_dict(), state)


def test_a_rule_that_commits_by_itself_is_found(net: gn.GrapNet, manager: RuleManager) -> None:
    def rash(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
        CutWeakest()(net, edit, now)
        edit.commit()

    manager.inject(rash)
    with pytest.raises(gn.EditError, match="leaves it to the manager") as caught:
        manager.apply(net, 3)
    assert caught.value.__notes__ == ["raised by rule 'rash' at step 3"]


@pytest.mark.parametrize("rule", [CutRandom(3), Grow(2)])
def test_equal_seeds_make_equal_commits(rule: Any) -> None:
    nets = [small_net() for _ in range(3)]
    for net, seed in zip(nets, (5, 5, 6), strict=True):
        manager = RuleManager(seed=seed)
        manager.inject(rule, schedule=Every(2))
        torch.manual_seed(len(nets) + id(net) % 1000)  # what else is random does not matter
        for step in range(5):
            manager.apply(net, step)
    weights = [torch.cat([t.weight.detach() for t in net.transitions]) for net in nets]
    assert journal(nets[0]) == journal(nets[1])
    assert torch.equal(weights[0], weights[1])
    assert journal(nets[0]) != journal(nets[2]) or not torch.equal(weights[0], weights[2])


def test_a_draw_that_changes_nothing_still_moves_the_generator(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    """Otherwise a rule that acts by chance would draw the same number for ever."""
    drawn: list[float] = []

    def chance(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
        drawn.append(float(torch.rand(1, generator=edit.generator)))

    manager.inject(chance)
    for step in range(3):
        assert manager.apply(net, step) is None
    assert len(set(drawn)) == 3


def test_budgets_hold_rules_that_do_not_look_at_them(net: gn.GrapNet) -> None:
    manager = RuleManager(budget=Budget(edits=12, parents=2))
    manager.inject(CutWeakest(1000), budget=Budget(edits=9))
    strongest = net.layers[0].outgoing().largest(count=21).weights.sort().values
    commit = manager.apply(net, 0)
    assert commit.change.counts()["relations_removed"] == 9
    assert {"operation": "keep", "transition": 0, "relations": 30 - 9 - 10} in commit.operations
    assert int(net.transitions[0].topology.fan_in().min()) >= 2
    while manager.apply(net, 0) is not None:
        pass
    assert net.transitions[0].topology.fan_in().tolist() == [2] * 5
    assert bool(torch.isin(net.layers[0].outgoing().weights, strongest).all())


def test_rules_of_one_apply_share_the_budget_of_the_manager(net: gn.GrapNet) -> None:
    seen: list[Budget] = []

    def look(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
        seen.append(now.budget)

    def cut_last(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
        edit.cut(net.layers[1].outgoing())

    manager = RuleManager(budget=Budget(edits=10, children=1))
    manager.inject(CutWeakest(4))
    manager.inject(look, budget=Budget(edits=8, parents=2))
    manager.inject(cut_last, budget=Budget(edits=7))
    commit = manager.apply(net, 0)
    assert seen == [Budget(edits=6, parents=2, children=1)]
    assert {t: len(m.removed) for t, m in commit.relations.items()} == {0: 4, 1: 6}


def test_connections_beyond_the_budget_are_refused_with_rule_and_number(net: gn.GrapNet) -> None:
    manager = RuleManager(budget=Budget(edits=20))
    manager.inject(Grow(2), name="first")
    manager.inject(CutWeakest(20))  # cuts and connections are counted apart
    manager.inject(Grow(1), name="second", enabled=False)
    assert manager.apply(net, 0).change.counts()["relations_removed"] == 20
    manager.enable("second")
    before = fingerprint(net)
    with pytest.raises(gn.EditError, match=r"rule 'second' .* 27 connected relations.* allows 20"):
        manager.apply(net, 1)
    manager.remove("first")
    manager.remove("second")
    manager.inject(Grow(1), name="own", budget=Budget(edits=8))
    with pytest.raises(gn.EditError, match=r"rule 'own' .* 9 connected relations.* allows 8"):
        manager.apply(net, 1)
    assert fingerprint(net) == before


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_net_comes_first_and_by_itself(
    net: gn.GrapNet, manager: RuleManager, wrapped: bool
) -> None:
    given = torch.nn.Sequential(net) if wrapped else 0
    for call in (lambda: manager.apply(given, net), lambda: manager.start(given)):
        with pytest.raises(TypeError, match=r"the net comes first: manager\.apply\(net, step\)"):
            call()
    assert net.version == 0
