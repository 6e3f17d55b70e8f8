"""GrowForTask: the paper's counts, who the new nodes relate to, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from grapnet.rules import Budget, GrowForTask, RuleContext

PAPER = GrowForTask(nodes=48, classes_per_task=2)


def grow(net: gn.GrapNet, rule: GrowForTask, task: Any, seed: int = 0, **given: Any) -> gn.NodeSet:
    """Applies the rule and returns the nodes that it added."""
    before = net.layers[-2].uids
    with net.edit(generator=torch.Generator().manual_seed(seed)) as edit:
        rule(net, edit, RuleContext(task=task, **given))
        assert net.version == len(net.history)  # the edit is still open
    return net.select(layer=-2, where=lambda nodes: ~torch.isin(nodes.uids, before))


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
        new = grow(net, rule, task)
        wanted = net.layers[2][first : 2 * task + 2]
        assert torch.equal(new.outgoing().children.view(48, -1), wanted.uids.expand(48, -1))
        assert torch.equal(new.incoming().parents, net.layers[0].uids.repeat_interleave(48))
    assert len(net.layers[1].outgoing()) == (1440 if classes == "seen" else 5 * 96)


@pytest.mark.parametrize("classes", ["seen", "own"])
def test_outputs_name_the_rows_of_tasks_in_their_order(classes: Any) -> None:
    net = gn.GrapNet([5, 0, 6])
    rule = GrowForTask(nodes=3, classes=classes, outputs={"shirts": [4, 1], "shoes": range(2, 4)})
    new = grow(net, rule, "shirts")
    assert new.owners == ["task-shirts"] * 3
    assert torch.equal(
        new.outgoing().children.view(3, -1), net.layers[2][[1, 4]].uids.expand(3, -1)
    )
    rows = [1, 2, 3, 4] if classes == "seen" else [2, 3]
    assert torch.equal(grow(net, rule, "shoes")[0].outgoing().children, net.layers[2][rows].uids)


def test_tasks_may_be_counted_from_one_and_by_numpy() -> None:
    net = gn.GrapNet([5, 0, 6])
    rule = GrowForTask(nodes=2, classes_per_task=2, first_task=1, tag="T{task}")
    assert len(grow(net, rule, 1).outgoing()) == 2 * 2
    new = grow(net, rule, np.int64(2))
    assert (len(new.outgoing()), new.owners) == (2 * 4, ["T2", "T2"])
    with pytest.raises(gn.errors.EditError, match="from 1"):
        grow(net, rule, 0)


def test_newborn_values_are_the_papers() -> None:
    net = gn.GrapNet([49, 0, 10])
    grow(net, PAPER, 0)
    new = grow(net, PAPER, 4)
    incoming = new.incoming().weights.detach().abs()
    outgoing = new.outgoing().weights.detach().abs()
    assert 0.99 * 48**-0.5 < incoming.max() <= 48**-0.5  # a sensory node gains 48 relations
    assert 0.97 * 10**-0.5 < outgoing.max() <= 10**-0.5  # a newborn gains 10
    assert new.biases.abs().max() == 0
    new = grow(net, replace(PAPER, weights="linear", bias="linear"), 4)
    assert 0.99 / 7 < new.incoming().weights.abs().max() <= 1 / 7
    assert new.biases.abs().max() > 0


def test_a_share_of_the_parents_is_drawn_for_every_node() -> None:
    net = gn.GrapNet([20, 0, 4])
    new = grow(net, GrowForTask(nodes=30, classes_per_task=2, parents=0.25), 0)
    parents = [tuple(node.parents.uids.tolist()) for node in new]
    assert {len(set(own)) for own in parents} == {5}
    assert len(set(parents)) > 25
    assert {uid for own in parents for uid in own} == set(range(20))
    gn.check(net)
    net = gn.GrapNet([4, 0, 2])
    new = grow(net, GrowForTask(nodes=3, classes_per_task=1, parents=0.1), 0)
    assert [len(node.parents) for node in new] == [1, 1, 1]


@pytest.mark.parametrize(
    ("edits", "nodes"), [(0, 0), (50, 0), (51, 1), (509, 9), (510, 10), (10**6, 48)]
)
def test_a_budget_of_edits_grows_fewer_nodes_each_of_them_whole(edits: int, nodes: int) -> None:
    net = gn.GrapNet([49, 0, 10])
    new = grow(net, PAPER, 0, budget=Budget(edits=edits))
    assert (len(new), net.count().relations) == (nodes, nodes * 51)
    assert len(new) == 0 or len(new[0].parents) == 49


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
    ("rule", "task"),
    [
        (PAPER, None),
        (PAPER, "shoes"),
        (PAPER, -1),
        (PAPER, 5),
        (replace(PAPER, classes_per_task=None, outputs={"a": [0]}), "b"),
        (replace(PAPER, classes_per_task=None, outputs={"a": [-1]}), "a"),
        (replace(PAPER, weights="big"), 0),
    ],
)
def test_wrong_tasks_are_refused_and_change_nothing(rule: GrowForTask, task: Any) -> None:
    net = gn.GrapNet([4, 2, 10])
    with pytest.raises(gn.errors.EditError), net.edit() as edit:
        rule(net, edit, RuleContext(task=task))
    assert (net.version, net.sizes) == (0, [4, 2, 10])


def test_the_last_hidden_layer_grows_and_a_net_without_one_is_refused() -> None:
    net = gn.GrapNet([4, 2, 2, 10])
    grow(net, PAPER, 0)
    assert net.sizes == [4, 2, 50, 10]
    with pytest.raises(gn.errors.EditError, match="hidden"):
        grow(gn.GrapNet([4, 10]), PAPER, 0)
