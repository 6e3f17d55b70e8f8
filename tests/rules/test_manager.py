"""RuleManager: order, schedules, one transaction an apply, and budgets."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.rules import (
    At,
    Budget,
    Every,
    EveryTask,
    RuleContext,
    RuleError,
    RuleManager,
    set_rewiring,
)
from tests.fingerprint import fingerprint

from .own_rules import (
    CutMoreEachTime,
    CutQuietest,
    CutRandom,
    CutWeakest,
    Fail,
    Grow,
    journal,
    recorded,
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
    first = CutWeakest(1)
    second = CutWeakest(2)
    assert manager.add(first) == "CutWeakest"
    assert manager.add(second) == "CutWeakest 2"
    assert manager.add(Grow(), name="grow") == "grow"
    manager.add(CutRandom(), before="CutWeakest 2")
    manager.add(Fail(), after="CutWeakest", enabled=False)
    assert manager.names == ["CutWeakest", "Fail", "CutRandom", "CutWeakest 2", "grow"]
    assert len(manager) == 5
    assert manager["CutWeakest 2"] is second
    assert "grow" in manager
    assert "Grow" not in manager
    assert list(manager) == [first, Fail(), CutRandom(), second, Grow()]
    assert manager.remove("CutWeakest") is first
    manager.reorder(["grow", "Fail", "CutWeakest 2", "CutRandom"])
    assert manager.names == ["grow", "Fail", "CutWeakest 2", "CutRandom"]
    assert "Fail: Fail(), Every(steps=1, start=0, until=None), disabled" in repr(manager)


def test_unknown_names_and_wrong_kinds_are_refused_and_change_nothing(manager: RuleManager) -> None:
    manager.add(CutWeakest(), name="known")
    manager.add(Grow(), name="other")
    for forbidden in (
        lambda: manager["a"],
        lambda: manager.remove("a"),
        lambda: manager.disable("a"),
        lambda: manager.replace("a", Grow()),
        lambda: manager.add(Grow(), before="a"),
        lambda: manager.add(Grow(), after="a"),
        lambda: manager.add(Grow(), name="known"),
        lambda: manager.add(Grow(), before="known", after="other"),
        lambda: manager.reorder(["known", "a"]),
        lambda: manager.reorder(["known"]),
        lambda: manager.reorder(["known", "known"]),
        lambda: manager.reorder(["known", "other", "known"]),
    ):
        with pytest.raises(RuleError):
            forbidden()
    kind: Any = CutWeakest
    with pytest.raises(TypeError):
        manager.add(kind)
    with pytest.raises(TypeError):
        manager.add(set_rewiring(10), schedule=Every(2))
    assert manager.names == ["known", "other"]
    assert manager["known"] == CutWeakest()
    assert issubclass(RuleError, gn.errors.GrapNetError)


def test_one_apply_is_one_commit_that_says_who_did_what(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    manager.add(CutWeakest(2))
    manager.add(Grow(1), name="growth")
    commit = manager.apply(net, 7, task="b")
    assert list(net.history) == [commit]
    assert commit.by == "CutWeakest, growth"
    assert commit.reason == "CutWeakest, growth at step 7, task b"
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


def test_a_step_that_is_not_given_is_the_next_one_and_not_in_the_journal(
    manager: RuleManager,
) -> None:
    net = small_net()
    steps = []
    manager.add(CutWeakest(2))
    manager.add(
        lambda net, edit, context: steps.append(context.step), name="spy", schedule=At(0, 8)
    )
    planned = manager.apply(net, dry_run=True)
    assert (planned.cut, steps) == (2, [0])
    commit = manager.apply(net)
    assert commit.reason == "CutWeakest, spy"
    assert commit.operations[0] == {"operation": "remark", "text": "CutWeakest"}
    assert manager.apply(net, 7).reason == "CutWeakest at step 7"
    assert manager.apply(net, task="b").reason == "CutWeakest, spy at task b"
    assert steps == [0, 0, 8]
    manager.add(Fail())
    with pytest.raises(ZeroDivisionError) as caught:
        manager.apply(net)
    assert caught.value.__notes__ == ["raised by rule 'Fail'"]


def test_rules_run_in_order_when_due_and_enabled(net: gn.GrapNet, manager: RuleManager) -> None:
    calls: list[Any] = []

    def spy(name: str) -> Any:
        return lambda net, edit, context: calls.append((context.step, context.task, name))

    manager.add(spy("a"), name="a", schedule=Every(2))
    manager.add(spy("b"), name="b", schedule=At(1, 2))
    manager.add(spy("c"), name="c", schedule=EveryTask())
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
    manager.add(CutWeakest(), schedule=At(5))
    manager.add(CutWeakest(0))
    assert manager.apply(net, 0) is None
    assert fingerprint(net) == before
    assert manager.apply(net, 5) is net.history[-1]


def test_a_rule_that_raises_leaves_everything_as_it_was(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    manager.add(CutRandom())
    manager.add(CutMoreEachTime())
    manager.add(CutQuietest(window=1))
    manager.add(Fail())
    manager.start(net)
    train(net, optimizer)
    before = fingerprint(net, optimizer)
    state = manager.state_dict()
    # the fingerprint runs the net too
    assert recorded(state)["CutQuietest"]["mean"]["count"] == 8 + 2
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        manager.apply(net, 0)
    assert caught.value.__notes__ == ["raised by rule 'Fail' at step 0"]
    assert_same_state(manager.state_dict(), state)
    assert fingerprint(net, optimizer) == before
    manager.disable("Fail")
    assert manager.apply(net, 0) is not None  # control: the others do change all of that
    after = manager.state_dict()
    assert not torch.equal(after["generator"], state["generator"])
    assert after["rules"][1]["state"] == {"calls": 1}
    assert recorded(after)["CutQuietest"]["mean"]["count"] == 0


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
    manager.add(CutRandom())
    manager.add(CutMoreEachTime())
    before = fingerprint(net)
    state = manager.state_dict()
    with pytest.raises(RuntimeError, match="no commits"):
        manager.apply(net, 0)
    assert fingerprint(net) == before
    assert_same_state(manager.state_dict(), state)


def test_a_rule_that_commits_by_itself_is_found(net: gn.GrapNet, manager: RuleManager) -> None:
    def rash(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        CutWeakest()(net, edit, context)
        edit.commit()

    manager.add(rash)
    with pytest.raises(gn.errors.EditError) as caught:
        manager.apply(net, 3)
    assert caught.value.__notes__ == ["raised by rule 'rash' at step 3"]


@pytest.mark.parametrize("rule", [CutRandom(3), Grow(2)])
def test_equal_seeds_make_equal_commits(rule: Any) -> None:
    nets = [small_net() for _ in range(3)]
    for net, seed in zip(nets, (5, 5, 6), strict=True):
        manager = RuleManager(seed=seed)
        manager.add(rule, schedule=Every(2))
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

    def chance(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        drawn.append(float(torch.rand(1, generator=edit.generator)))

    manager.add(chance)
    for step in range(3):
        assert manager.apply(net, step) is None
    assert len(set(drawn)) == 3


def test_budgets_hold_rules_that_do_not_look_at_them(net: gn.GrapNet) -> None:
    manager = RuleManager(budget=Budget(edits=12, parents=2))
    manager.add(CutWeakest(1000), budget=Budget(edits=9))
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

    def look(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        seen.append(context.budget)

    def cut_last(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        edit.cut(net.layers[1].outgoing())

    manager = RuleManager(budget=Budget(edits=10, children=1))
    manager.add(CutWeakest(4))
    manager.add(look, budget=Budget(edits=8, parents=2))
    manager.add(cut_last, budget=Budget(edits=7))
    commit = manager.apply(net, 0)
    assert seen == [Budget(edits=6, parents=2, children=1)]
    assert {t: len(m.removed) for t, m in commit.relations.items()} == {0: 4, 1: 6}


def test_connections_beyond_the_budget_are_refused_with_rule_and_number(net: gn.GrapNet) -> None:
    manager = RuleManager(budget=Budget(edits=20))
    manager.add(Grow(2), name="first")
    manager.add(CutWeakest(20))  # cuts and connections are counted apart
    manager.add(Grow(1), name="second", enabled=False)
    assert manager.apply(net, 0).change.counts()["relations_removed"] == 20
    manager.enable("second")
    before = fingerprint(net)
    with pytest.raises(gn.errors.EditError, match=r"27.* 20"):
        manager.apply(net, 1)
    manager.remove("first")
    manager.remove("second")
    manager.add(Grow(1), name="own", budget=Budget(edits=8))
    with pytest.raises(gn.errors.EditError, match=r"9.* 8"):
        manager.apply(net, 1)
    assert fingerprint(net) == before


def test_what_is_no_net_is_refused(manager: RuleManager) -> None:
    no_net: Any = 3
    for call in (manager.apply, manager.start):
        with pytest.raises(TypeError):
            call(no_net)
        with pytest.raises(ValueError, match="Linear"):
            call(torch.nn.Linear(2, 2))
