"""Dry runs: they tell the truth about the commit that follows, and leave no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.rules.budget import Budget
from grapnet.rules.manager import RuleManager
from grapnet.rules.preview import Preview
from grapnet.rules.rule import Moment
from grapnet.rules.schedule import At, Every, EveryTask
from tests.fingerprint import Same, fingerprint

from .own_rules import (
    CutMoreEachTime,
    CutQuietest,
    CutRandom,
    CutWeakest,
    Fail,
    Grow,
    X,
    journal,
    small_net,
    train,
)


def cut_all_parents(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    edit.cut(net.layers[1][:2].incoming())


def freeze_some(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    edit.freeze(net.layers[1][2])


def remove_orphans(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    edit.remove_orphans()


def remove_output(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    edit.remove_nodes(net.layers[2][0], interface=True)


def nothing(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    torch.rand(3, generator=edit.generator)


RULES: dict[str, list[Any]] = {
    "cut": [CutWeakest(7)],
    "random": [CutRandom(4)],
    "grow": [Grow(2)],
    "with a state": [CutMoreEachTime()],
    "with evidence": [CutQuietest(window=1)],
    "orphans that stay": [cut_all_parents],
    "orphans that go": [cut_all_parents, remove_orphans],
    "freeze": [freeze_some],
    "narrower output": [remove_output],
    "all at once": [CutRandom(3), Grow(1), CutQuietest(window=1), freeze_some, cut_all_parents],
    "nothing": [nothing],
    "none": [],
}


def ready(rules: list[Any], **given: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer, RuleManager]:
    net, manager = small_net(), RuleManager(seed=3, **given)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    for rule in rules:
        manager.inject(copy.deepcopy(rule))
    manager.start(net)
    train(net, optimizer)
    return net, optimizer, manager


@pytest.mark.parametrize("name", RULES)
def test_the_numbers_are_those_of_the_commit_that_follows(name: str) -> None:
    net, _, manager = ready(RULES[name])
    with torch.no_grad():
        before, output = net.count(), net(X)
    preview = manager.apply(net, 0, dry_run=True, probe=X)
    assert (preview.before, net.count(), net.version) == (before, before, 0)
    commit = manager.apply(net, 0)
    after, counts = net.count(), {} if commit is None else commit.change.counts()
    assert preview.after == after
    assert preview.nodes == after.nodes - before.nodes
    assert preview.relations == after.relations - before.relations
    assert preview.parameters == after.trainable - before.trainable
    assert preview.flops == after.flops - before.flops
    assert (preview.cut, preview.connected) == (
        counts.get("relations_removed", 0),
        counts.get("relations_added", 0),
    )
    assert preview.orphans == sum(len(node.parents) == 0 for node in net.layers[1])
    assert preview.operations == (() if commit is None else commit.operations)
    assert preview.rules == tuple(manager.names)
    with torch.no_grad():
        same_width = net(X).shape == output.shape
        assert preview.output_change == (
            float((net(X) - output).abs().max()) if same_width else None
        )
    assert (preview.relations, preview.nodes, preview.orphans) == {
        "cut": (-7, 0, 0),
        "random": (-4, 0, 0),
        "grow": (18, 2, 0),
        "with a state": (-1, 0, 0),
        "with evidence": (-1, 0, 0),
        "orphans that stay": (-12, 0, 2),
        "orphans that go": (-18, -2, 0),
        "freeze": (0, 0, 0),
        "narrower output": (-5, -1, 0),
        "all at once": (preview.relations, 1, 2),
        "nothing": (0, 0, 0),
        "none": (0, 0, 0),
    }[name]


@pytest.mark.parametrize("name", RULES)
def test_a_dry_run_leaves_no_trace(name: str) -> None:
    (net, optimizer, manager), (other, _, untouched) = ready(RULES[name]), ready(RULES[name])
    before, state = contents(fingerprint(net, optimizer)), text(manager.state_dict())
    assert isinstance(manager.apply(net, 0, dry_run=True, probe=X), Preview)
    manager.apply(net, 0, dry_run=True)
    assert text(manager.state_dict()) == state
    assert contents(fingerprint(net, optimizer)) == before
    fingerprint(other)  # runs the net as often
    fingerprint(other)
    for step in range(2):
        assert (manager.apply(net, step) is None) == (untouched.apply(other, step) is None)
        train(net)
        train(other)
    assert journal(net) == journal(other)  # the uids of newborn nodes too
    assert text(manager.state_dict()) == text(untouched.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def contents(found: Any) -> Any:
    """Returns a fingerprint without saying which objects hold it: a trial gives contents back in
    other tensors.
    """
    if isinstance(found, dict):
        return {key: contents(value) for key, value in found.items() if not isinstance(value, Same)}
    if isinstance(found, list | tuple):
        return [contents(value) for value in found if not isinstance(value, Same)]
    return found


def text(state: dict[str, Any]) -> str:
    return str({**state, "generator": state["generator"].tolist()})


def test_a_recorder_does_not_see_the_probe() -> None:
    net, _, manager = ready(RULES["with evidence"])

    def count() -> int:
        return manager.state_dict()["rules"][0]["recorders"]["mean"]["count"]

    assert count() == 8
    manager.apply(net, 0, dry_run=True, probe=X)
    assert count() == 8
    net(X)
    assert count() == 16  # it goes on afterwards


def test_a_probe_is_run_without_dropout_and_draws_nothing() -> None:
    net = gn.from_module(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    )
    manager, x = RuleManager(), torch.ones(5, 4)
    manager.inject(lambda net, edit, now: None, name="nothing")
    state = torch.get_rng_state()
    assert not torch.equal(net(x), net(x))
    torch.set_rng_state(state)
    assert manager.apply(net, 0, dry_run=True, probe=x).output_change == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training


def test_a_dry_run_that_raises_leaves_no_trace_either() -> None:
    net, optimizer, manager = ready([CutRandom(), CutMoreEachTime(), CutQuietest(window=1), Fail()])
    before, state = fingerprint(net, optimizer), text(manager.state_dict())
    with pytest.raises(ZeroDivisionError):
        manager.apply(net, 0, dry_run=True, probe=X)
    assert text(manager.state_dict()) == state
    assert fingerprint(net, optimizer) == before


def test_only_what_is_due_is_previewed() -> None:
    net, manager = small_net(), RuleManager()
    manager.inject(CutWeakest(1), schedule=At(1))
    manager.inject(CutWeakest(2), name="two", schedule=Every(1))
    manager.inject(CutWeakest(3), name="off", enabled=False)
    assert [manager.apply(net, step, dry_run=True).rules for step in (0, 1)] == [
        ("two",),
        ("CutWeakest", "two"),
    ]
    assert manager.apply(net, 0, dry_run=True).output_change is None
    assert manager.apply(net, 0, dry_run=True, probe=X[:0]).output_change is None


def test_a_dry_run_of_nothing_says_what_comes_next() -> None:
    net, manager = small_net(), RuleManager()
    manager.inject(CutWeakest(1), name="late", schedule=Every(100, start=50, until=250))
    manager.inject(CutWeakest(2), name="once", schedule=At(0, 70))
    manager.inject(CutWeakest(3), name="off", enabled=False)
    for step, said in {
        1: "no rule is due at step 1; next comes late, at step 50",
        51: "no rule is due at step 51; next comes once, at step 70",
        251: "no rule is due at step 251 or later",
    }.items():
        found = manager.apply(net, step, dry_run=True)
        assert found.waiting == said
        assert str(found).splitlines()[0] == f"dry run: {said}"
    assert manager.apply(net, 50, dry_run=True).waiting == ""
    manager.inject(CutWeakest(4), name="task", schedule=EveryTask(start=400))
    assert manager.apply(net, 251, dry_run=True).waiting.endswith(
        "next comes task, at step 400 at the earliest"
    )


def test_budgets_hold_in_a_dry_run() -> None:
    net, _, manager = ready([CutWeakest(30)], budget=Budget(edits=4))
    assert manager.apply(net, 0, dry_run=True).cut == 4


def test_a_probe_without_a_dry_run_is_refused() -> None:
    net, _, manager = ready([CutWeakest()])
    arguments: dict[str, Any] = {"probe": X}
    with pytest.raises(ValueError, match="dry_run=True"):
        manager.apply(net, 0, **arguments)
    assert net.version == 0


def test_a_preview_reads_as_a_table() -> None:
    net, _, manager = ready([CutWeakest(7), Grow(2)])
    lines = str(manager.apply(net, 0, dry_run=True, probe=X)).splitlines()
    assert lines[0] == "dry run of CutWeakest, Grow"
    assert lines[1].split() == ["before", "after", "change"]
    assert [line.split() for line in lines[2:6]] == [
        ["nodes", "14", "16", "+2"],
        ["relations", "45", "56", "+11"],
        ["parameters", "53", "66", "+13"],
        ["flops", "98", "122", "+24"],
    ]
    assert lines[6].startswith("cut 7, connected 18, orphans 0, output change 0.")
    assert "output" not in repr(manager.apply(net, 0, dry_run=True))
