"""Rules in one apply: each leaves alone what those before it ask of the same edit."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.execution import _native
from grapnet.rules import (
    GradientRecorder,
    GrowForTask,
    GrowWidth,
    PruneWeakest,
    RemoveOrphans,
    Rewire,
    RuleContext,
    RuleManager,
    SplitIntoFamilies,
)

REWIRES = [
    Rewire(grow=grow, scope=scope)
    for grow in ("random", "gradient")
    for scope in ("transition", "child", "owner", "model")
]
COPIES = GrowWidth(1, 3, "net2net")


def remove_two(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
    edit.remove_nodes(net.layers[1][:1])
    edit.remove_nodes(net.layers[2][-1:])


def sparse_net(seed: int) -> gn.GrapNet:
    draw = torch.Generator().manual_seed(seed)
    return gn.GrapNet([6, 8, 8, 4], density=0.6, dtype=torch.float64, generator=draw)


def together(net: gn.GrapNet, *rules: Any, seed: int = 0) -> gn.Commit:
    """Applies rules in one commit, after a pass forward and backward that their recorders see."""
    manager = RuleManager(seed=seed)
    for rule in rules:
        manager.add(rule)
    draw = torch.Generator().manual_seed(seed)
    with manager.recording(net):
        net(torch.randn(32, 6, dtype=torch.float64, generator=draw)).square().sum().backward()
    commit = manager.apply(net, 0)
    assert isinstance(commit, gn.Commit)
    gn.check(net)
    return commit


def rewired(commit: gn.Commit) -> list[int]:
    """Returns how many relations each remark of a Rewire tells of."""
    return [o["relations"] for o in commit.operations if o.get("text", "").startswith("rewires")]


def moved(commit: gn.Commit) -> tuple[int, int]:
    """Returns how many relations were born and how many are gone."""
    changes = [change.index for change in commit.change.transitions.values()]
    return sum(len(index.inserted) for index in changes), sum(
        len(index.removed) for index in changes
    )


def test_an_edit_shows_what_it_was_asked_to_connect_and_remove() -> None:
    net = gn.GrapNet([3, 4, 2], density=0.0)
    upper, middle, lower = (layer.uid for layer in net.layers)
    with net.edit() as edit:
        assert [len(uids) for uids in edit.connections] == [0, 0]
        assert len(edit.removals) == 0
        new = edit.add_nodes(1, 2)
        edit.connect(new, net.layers[2][1])
        edit.connect(net.layers[0][:2], net.layers[1][3])
        edit.remove_nodes(net.layers[1][:2])
        parents, children = edit.connections
        assert parents.tolist() == [*upper[:2].tolist(), *new.uids.tolist()]
        assert children.tolist() == [int(middle[3])] * 2 + [int(lower[1])] * 2
        assert edit.removals.uids.tolist() == middle[:2].tolist()
    with pytest.raises(gn.errors.EditError, match="not open"):
        _ = edit.connections
    with pytest.raises(gn.errors.EditError, match="not open"):
        _ = edit.removals


@pytest.mark.parametrize("missing", [_native.missing, "the compiled kernels are not installed"])
@pytest.mark.parametrize("second", REWIRES)
@pytest.mark.parametrize(
    "first", [REWIRES[0], REWIRES[5], SplitIntoFamilies(1, 2, fill=True), COPIES, remove_two]
)
def test_rewire_leaves_alone_what_is_taken_and_grows_as_many_as_it_drops(
    first: Any, second: Rewire, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "missing", missing)
    for seed in range(2):
        net = sparse_net(seed)
        alone = sparse_net(seed)
        commit = together(net, first, second, seed=seed)
        before = together(alone, first, seed=seed)
        assert net.count().relations == alone.count().relations
        assert sum(rewired(commit)) > sum(rewired(before))
        (grown, lost) = moved(commit)
        (first_grown, first_lost) = moved(before)
        assert (
            grown - first_grown == lost - first_lost == sum(rewired(commit)) - sum(rewired(before))
        )


def test_gradient_growth_takes_the_largest_of_what_is_free() -> None:
    net = sparse_net(0)
    rule = Rewire(grow="gradient", transitions=(1,))
    recorder = GradientRecorder(1)
    recorder.arm(net)
    net(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()
    recorder.disarm()
    parents, children, _ = recorder.largest_absent(30)
    with net.edit() as edit:
        edit.connect(parents[:5], children[:5], pairs="aligned")
        rule(net, edit, RuleContext(evidence=dict.fromkeys(rule.recorders(net), recorder)))
        asked = [
            set(zip(p.tolist(), c.tolist(), strict=True))
            for p, c in [edit.connections, (parents, children)]
        ]
        assert asked[0] == set(
            list(zip(parents.tolist(), children.tolist(), strict=True))[: len(asked[0])]
        )


def test_blocks_are_filled_beside_a_rule_that_fills_them() -> None:
    for first in (Rewire(transitions=(1,)), SplitIntoFamilies(1, 2, fill=True), remove_two):
        net = sparse_net(1)
        commit = together(net, first, SplitIntoFamilies(1, 2, fill=True))
        assert commit.operations[-1]["operation"] == "remark"


@pytest.mark.parametrize(
    "first", [COPIES, GrowWidth(2, 3, "net2net"), PruneWeakest(0.4), Rewire(), remove_two]
)
@pytest.mark.parametrize("nodes", [3, 20])
def test_copies_do_what_their_originals_do_beside_other_rules(first: Any, nodes: int) -> None:
    x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for seed in range(2):
        net = sparse_net(seed)
        alone = sparse_net(seed)
        together(net, first, GrowWidth(1, nodes, "net2net"), seed=seed)
        together(alone, first, seed=seed)
        assert net.sizes[1] == alone.sizes[1] + nodes
        assert (net(x) - alone(x)).abs().max() < 1e-12


def test_copying_everything_twice_leaves_nothing_to_copy() -> None:
    net = sparse_net(0)
    together(net, GrowWidth(1, 200, "net2net"), COPIES)
    assert net.sizes[1] == 208


def test_what_is_pruned_does_not_come_back_as_a_share() -> None:
    net = gn.GrapNet([6, 6, 6, 2], dtype=torch.float64)
    old = net.layers[1].uid.clone()
    together(net, PruneWeakest(sparsity=0.5, transitions=1), GrowWidth(1, 6, "net2net"))
    assert int(torch.isin(net.layers[1].outgoing().parents, old).sum()) == 18


@pytest.mark.parametrize(
    "rule",
    [GrowWidth(1, 2), GrowWidth(1, 2, "gradmax"), COPIES, GrowForTask(2, classes_per_task=4)],
)
def test_what_grows_is_not_related_to_nodes_that_go(rule: Any) -> None:
    manager = RuleManager()
    net = sparse_net(0)
    manager.add(remove_two)
    manager.add(rule)
    with manager.recording(net):
        net(torch.randn(32, 6, dtype=torch.float64)).square().sum().backward()
    manager.apply(net, 0, task=0)
    assert sum(net.sizes) == 26 - 2 + rule.nodes
    gn.check(net)


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        (GrowWidth(1, 3), [1]),
        (GrowWidth(1, 3, "gradmax"), [1]),
        (COPIES, [0, 1]),
        (RemoveOrphans(fold_bias=True), [1, 2]),
        (RemoveOrphans(fold_bias=True, layers=-2), [2]),
        (RemoveOrphans(), []),
    ],
)
def test_what_would_change_the_function_under_attention_is_refused(
    rule: Any, refused: list[int]
) -> None:
    for t in range(3):
        net = sparse_net(0)
        with net.edit() as edit:
            edit.cut(net.layers[1][0].incoming())
            edit.cut(net.layers[2][0].incoming())
        net.execution.use("attention", transition=t)
        if t not in refused:
            together(net, rule)
            continue
        version = net.version
        sizes = net.sizes
        with pytest.raises(gn.errors.PlanError, match=f"transition {t} runs with attention"):
            together(net, rule)
        assert (net.version, net.sizes) == (version, sizes)
