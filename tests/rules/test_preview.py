"""Dry runs: they tell the truth about the commit that follows, and leave no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.rules import At, Every, Preview, RemoveOrphans, RuleContext, RuleManager
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


def cut_all_parents(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
    edit.cut(net.layers[1][:2].incoming())


def freeze_some(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
    edit.freeze(net.layers[1][2])


def remove_output(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
    edit.remove_nodes(net.layers[2][0], interface=True)


RULES: dict[str, list[Any]] = {
    "with a state": [CutMoreEachTime()],
    "with evidence": [CutQuietest(window=1)],
    "orphans that go": [cut_all_parents, RemoveOrphans()],
    "narrower output": [remove_output],
    "all at once": [CutRandom(3), Grow(1), CutQuietest(window=1), freeze_some, cut_all_parents],
    "none": [],
}


def ready(rules: list[Any], **given: Any) -> tuple[gn.GrapNet, torch.optim.Optimizer, RuleManager]:
    net = small_net()
    manager = RuleManager(seed=3, **given)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    for rule in rules:
        manager.add(copy.deepcopy(rule))
    manager.start(net)
    train(net, optimizer)
    return net, optimizer, manager


@pytest.mark.parametrize("name", RULES)
def test_the_numbers_are_those_of_the_commit_that_follows(name: str) -> None:
    net, _, manager = ready(RULES[name])
    with torch.no_grad():
        before = net.count()
        output = net(X)
    preview = manager.apply(net, 0, dry_run=True, probe=X)
    assert (preview.before, net.count(), net.version) == (before, before, 0)
    commit = manager.apply(net, 0)
    after = net.count()
    counts = {} if commit is None else commit.change.counts()
    assert preview.after == after
    assert preview.nodes == after.nodes - before.nodes
    assert preview.relations == after.relations - before.relations
    assert preview.parameters == after.trainable - before.trainable
    assert preview.flops == after.flops - before.flops
    assert preview.cut == counts.get("relations_removed", 0)
    assert preview.connected == counts.get("relations_added", 0)
    assert preview.orphans == sum(len(node.parents) == 0 for node in net.layers[1])
    assert preview.operations == (() if commit is None else commit.operations)
    assert preview.rules == tuple(manager.names)
    with torch.no_grad():
        same_width = net(X).shape == output.shape
        assert preview.output_change == (
            float((net(X) - output).abs().max()) if same_width else None
        )


@pytest.mark.parametrize("name", RULES)
def test_a_dry_run_leaves_no_trace(name: str) -> None:
    net, optimizer, manager = ready(RULES[name])
    other, _, untouched = ready(RULES[name])
    before = contents(fingerprint(net, optimizer))
    state = text(manager.state_dict())
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


def test_a_probe_is_run_without_dropout_and_draws_nothing() -> None:
    net = gn.from_module(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    )
    manager = RuleManager()
    x = torch.ones(5, 4)
    manager.add(lambda net, edit, context: None, name="nothing")
    state = torch.get_rng_state()
    assert not torch.equal(net(x), net(x))
    torch.set_rng_state(state)
    assert manager.apply(net, 0, dry_run=True, probe=x).output_change == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training


def test_a_dry_run_that_raises_leaves_no_trace_either() -> None:
    net, optimizer, manager = ready([CutRandom(), CutMoreEachTime(), CutQuietest(window=1), Fail()])
    before = fingerprint(net, optimizer)
    state = text(manager.state_dict())
    with pytest.raises(ZeroDivisionError):
        manager.apply(net, 0, dry_run=True, probe=X)
    assert text(manager.state_dict()) == state
    assert fingerprint(net, optimizer) == before


def test_only_what_is_due_is_previewed() -> None:
    net = small_net()
    manager = RuleManager()
    manager.add(CutWeakest(1), schedule=At(1))
    manager.add(CutWeakest(2), name="two", schedule=Every(1))
    manager.add(CutWeakest(3), name="off", enabled=False)
    assert [manager.apply(net, step, dry_run=True).rules for step in (0, 1)] == [
        ("two",),
        ("CutWeakest", "two"),
    ]
    assert manager.apply(net, 0, dry_run=True).output_change is None
    assert manager.apply(net, 0, dry_run=True, probe=X[:0]).output_change is None


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
