"""GrowForTask: the paper's counts, who the new nodes relate to, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from grapnet.rules.budget import Budget
from grapnet.rules.grow import GrowForTask
from grapnet.rules.manager import RuleManager
from grapnet.rules.rule import Moment

PAPER = GrowForTask(layer=1, nodes=48, classes_per_task=2)


def grow(net: gn.GrapNet, rule: GrowForTask, task: Any, seed: int = 0, **moment: Any) -> gn.NodeSet:
    """Applies the rule and returns the nodes that it added."""
    before = net.layers[rule.layer].uids
    with net.edit(generator=torch.Generator().manual_seed(seed)) as edit:
        rule(net, edit, Moment(task=task, **moment))
        assert net.version == len(net.history)  # the edit is still open
    return net.select(layer=rule.layer, where=lambda nodes: ~torch.isin(nodes.uids, before))


@pytest.mark.parametrize(("inputs", "parameters"), [(49, 13_450), (512, 124_570)])
def test_the_papers_growth_gives_the_papers_counts(inputs: int, parameters: int) -> None:
    net = gn.GrapNet([inputs, 0, 10])
    for task in range(5):
        new = grow(net, PAPER, task)
        assert new.owners == [f"task-{task}"] * 48
        assert (len(new.incoming()), len(new.outgoing())) == (48 * inputs, 48 * 2 * (task + 1))
    count = net.count()
    assert net.sizes == [inputs, 240, 10]
    assert (count.relations, count.biases) == (inputs * 240 + 1440, 250)
    assert (count.trainable, count.frozen) == (parameters, 0)
    gn.check(net)


@pytest.mark.parametrize("classes", ["seen", "own"])
def test_a_task_relates_to_the_outputs_of_its_classes(classes: Any) -> None:
    net = gn.GrapNet([6, 0, 10])
    rule = replace(PAPER, classes=classes)
    for task in range(5):
        first = 0 if classes == "seen" else 2 * task
        new, wanted = grow(net, rule, task), net.layers[2][first : 2 * task + 2]
        assert torch.equal(new.outgoing().children.view(48, -1), wanted.uids.expand(48, -1))
        assert torch.equal(new.incoming().parents, net.layers[0].uids.repeat_interleave(48))
    assert len(net.layers[1].outgoing()) == (1440 if classes == "seen" else 5 * 96)


@pytest.mark.parametrize("classes", ["seen", "own"])
def test_outputs_name_the_rows_of_tasks_in_their_order(classes: Any) -> None:
    net = gn.GrapNet([5, 0, 6])
    rule = GrowForTask(
        layer=-2, nodes=3, classes=classes, outputs={"shirts": [4, 1], "shoes": range(2, 4)}
    )
    new = grow(net, rule, "shirts")
    assert new.owners == ["task-shirts"] * 3
    assert torch.equal(
        new.outgoing().children.view(3, -1), net.layers[2][[1, 4]].uids.expand(3, -1)
    )
    rows = [1, 2, 3, 4] if classes == "seen" else [2, 3]
    assert torch.equal(grow(net, rule, "shoes")[0].outgoing().children, net.layers[2][rows].uids)


def test_tasks_may_be_counted_from_one_and_by_numpy() -> None:
    net = gn.GrapNet([5, 0, 6])
    rule = GrowForTask(layer=1, nodes=2, classes_per_task=2, first_task=1, tag="T{task}")
    assert len(grow(net, rule, 1).outgoing()) == 2 * 2
    new = grow(net, rule, np.int64(2))
    assert (len(new.outgoing()), new.owners) == (2 * 4, ["T2", "T2"])
    with pytest.raises(gn.EditError, match="whole numbers from 1, got task 0"):
        grow(net, rule, 0)


def test_newborn_values_are_the_papers() -> None:
    net = gn.GrapNet([49, 0, 10])
    grow(net, PAPER, 0)
    new = grow(net, PAPER, 4)
    incoming, outgoing = (
        new.incoming().weights.detach().abs(),
        new.outgoing().weights.detach().abs(),
    )
    assert 0.99 * 48**-0.5 < incoming.max() <= 48**-0.5  # a sensory node gains 48 relations
    assert 0.97 * 10**-0.5 < outgoing.max() <= 10**-0.5  # a newborn gains 10
    assert new.biases.abs().max() == 0
    new = grow(net, replace(PAPER, weights="linear", bias="linear"), 4)
    assert 0.99 / 7 < new.incoming().weights.abs().max() <= 1 / 7
    assert new.biases.abs().max() > 0


def test_a_share_of_the_parents_is_drawn_for_every_node() -> None:
    net = gn.GrapNet([20, 0, 4])
    new = grow(net, GrowForTask(layer=1, nodes=30, classes_per_task=2, parents=0.25), 0)
    parents = [tuple(node.parents.uids.tolist()) for node in new]
    assert {len(set(own)) for own in parents} == {5}
    assert len(set(parents)) > 25
    assert {uid for own in parents for uid in own} == set(range(20))
    gn.check(net)


def test_the_smallest_share_is_one_parent() -> None:
    net = gn.GrapNet([4, 0, 2])
    new = grow(net, GrowForTask(layer=1, nodes=3, classes_per_task=1, parents=0.1), 0)
    assert [len(node.parents) for node in new] == [1, 1, 1]


@pytest.mark.parametrize("parents", ["all", 0.5])
def test_it_is_deterministic_under_the_edits_generator(parents: Any) -> None:
    rule, state = replace(PAPER, parents=parents), torch.get_rng_state()
    nets = [gn.GrapNet([12, 0, 10], generator=torch.Generator().manual_seed(3)) for _ in range(3)]
    for net, seed in zip(nets, (0, 0, 1), strict=True):
        grow(net, rule, 2, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    same, other = ([net.layers[0].outgoing() for net in pair] for pair in (nets[:2], nets[1:]))
    assert torch.equal(same[0].children, same[1].children)
    assert torch.equal(same[0].weights, same[1].weights)
    assert not torch.equal(other[0].weights, other[1].weights)


@pytest.mark.parametrize(
    ("edits", "nodes"), [(0, 0), (50, 0), (51, 1), (509, 9), (510, 10), (10**6, 48)]
)
def test_a_budget_of_edits_grows_fewer_nodes_each_of_them_whole(edits: int, nodes: int) -> None:
    net = gn.GrapNet([49, 0, 10])
    new = grow(net, PAPER, 0, budget=Budget(edits=edits))
    assert (len(new), net.count().relations) == (nodes, nodes * 51)
    assert len(new) == 0 or len(new[0].parents) == 49


def test_the_manager_applies_it_and_undo_takes_it_back() -> None:
    net = gn.GrapNet([7, 3, 4])
    manager = RuleManager(budget=Budget(edits=60))
    manager.inject(PAPER)
    before, weights = net.count(), net.layers[0].outgoing().weights.clone()
    commit = manager.apply(net, 0, task=1)
    assert commit is not None
    assert net.count().relations == before.relations + 5 * (7 + 4)
    assert {
        "operation": "remark",
        "text": "grows 5 nodes for 'task-1'",
    }.items() <= commit.operations[1].items()
    net.undo()
    assert (net.count(), net.sizes) == (before, [7, 3, 4])
    assert torch.equal(net.layers[0].outgoing().weights, weights)


def test_existing_nodes_and_frozen_ones_are_left_as_they_are() -> None:
    net = gn.GrapNet([7, 3, 4], dtype=torch.float64)
    with net.edit() as edit:
        edit.freeze(net.layers[1])
    old = net.layers[1][:3]
    before = old.incoming().weights.clone(), old.outgoing().weights.clone()
    grow(net, PAPER, 0)
    assert torch.equal(old.incoming().weights, before[0])
    assert torch.equal(old.outgoing().weights, before[1])
    assert net.count().frozen == 21 + 3 + 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "number of nodes that a task gets is a whole number, at least 1, got 0"),
        ({"nodes": 2.0}, "at least 1, got 2.0"),
        ({"classes": "all"}, '"seen" or "own", got \'all\''),
        ({"classes_per_task": None}, "either classes_per_task= or outputs="),
        ({"outputs": {0: [1]}}, "either classes_per_task= or outputs="),
        ({"classes_per_task": 0}, "classes of a task is a whole number"),
        ({"parents": 0.0}, "share above 0 and up to 1, got 0.0"),
        ({"parents": "some"}, "got 'some'"),
        ({"weights": "big"}, "one of linear, alloc, zero, got 'big'"),
        ({"tag": "mine"}, "holds the place of the task"),
    ],
)
def test_wrong_settings_are_refused_when_they_are_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(gn.EditError, match=message):
        replace(PAPER, **settings)


@pytest.mark.parametrize(
    ("rule", "task", "message"),
    [
        (PAPER, None, "works for a task, and none was told"),
        (PAPER, "shoes", "whole numbers from 0, got task 'shoes'"),
        (PAPER, -1, "got task -1"),
        (PAPER, 5, "task 5 has outputs 0 to 11, but the net has outputs 0 to 9"),
        (
            replace(PAPER, classes_per_task=None, outputs={"a": [0]}),
            "b",
            r"tasks \['a'\], not of task 'b'",
        ),
        (replace(PAPER, classes_per_task=None, outputs={"a": [-1]}), "a", "has outputs -1 to -1"),
        (replace(PAPER, layer=0), 0, "only hidden layers grow"),
        (replace(PAPER, layer=2), 0, "only hidden layers grow, and layer 2 of 0 to 2 is none"),
        (replace(PAPER, layer=-3), 0, "only hidden layers grow"),
    ],
)
def test_wrong_tasks_and_layers_are_refused_and_change_nothing(
    rule: GrowForTask, task: Any, message: str
) -> None:
    net = gn.GrapNet([4, 2, 10])
    with pytest.raises(gn.EditError, match=message), net.edit() as edit:
        rule(net, edit, Moment(task=task))
    assert (net.version, net.sizes) == (0, [4, 2, 10])


def test_a_layer_above_the_last_hidden_one_is_refused() -> None:
    net = gn.GrapNet([4, 2, 2, 10])
    with (
        pytest.raises(gn.EditError, match=r"layer 1 does not lead to the output.*grow layer 2"),
        net.edit() as edit,
    ):
        PAPER(net, edit, Moment(task=0))


def test_later_changes_of_the_given_outputs_do_not_reach_the_rule() -> None:
    given = {"a": [0, 1]}
    rule = GrowForTask(layer=1, nodes=1, outputs=given)
    given["a"].append(9)
    assert rule.outputs == {"a": (0, 1)}
