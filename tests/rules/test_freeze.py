"""FreezeOwner: which coordinates stay put, and that they do."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.rules import EveryTask, FreezeOwner, GrowForTask, RuleContext, RuleManager


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2])
    with net.edit() as edit:
        edit.set_owner(net.layers[1][:2], "task-7")
        edit.set_owner(net.layers[1][2], "old")
    return net


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, 2 * (4 + 1 + 2)),
        ({"incoming": False}, 2 * (1 + 2)),
        ({"outgoing": False}, 2 * (4 + 1)),
        ({"bias": False}, 2 * (4 + 2)),
        ({"owner": "old"}, 4 + 1 + 2),
    ],
)
def test_it_freezes_what_belongs_to_an_owner(
    net: gn.GrapNet, settings: dict[str, Any], frozen: int
) -> None:
    with net.edit() as edit:
        FreezeOwner(**settings)(net, edit, RuleContext(task=7))
    assert net.count().frozen == frozen
    chosen = net.select(owner=settings.get("owner", "task-7"))
    for name, part in (("incoming", chosen.incoming()), ("outgoing", chosen.outgoing())):
        assert part.frozen.tolist() == [settings.get(name, True)] * len(part)


def test_an_owner_that_no_node_has_is_refused_with_those_there_are(net: gn.GrapNet) -> None:
    manager = RuleManager()
    manager.add(FreezeOwner(), schedule=EveryTask())
    with pytest.raises(gn.errors.EditError, match=r"'task-8'.*'task-7', 'old'"):
        manager.apply(net, task=8)
    assert (net.version, net.count().frozen) == (1, 0)


def test_undo_gives_the_coordinates_back_and_freezing_twice_is_once(net: gn.GrapNet) -> None:
    manager = RuleManager()
    manager.add(FreezeOwner(), schedule=EveryTask())
    assert manager.apply(net, 0) is None  # no task ended
    assert manager.apply(net, 1, task=7) is not None
    assert (net.count().frozen, net.layers[1].frozen.tolist()) == (14, [True, True, False])
    assert manager.apply(net, 2, task=7) is None
    net.undo()
    assert net.count().frozen == 0


def test_tasks_grown_trained_and_frozen_in_turn_stay_as_they_were() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 0, 6])
    growing = RuleManager()
    ending = RuleManager()
    growing.add(GrowForTask(nodes=4, classes_per_task=2, classes="own"))
    ending.add(FreezeOwner())
    kept: dict[int, tuple[gn.NodeSet, list[torch.Tensor]]] = {}
    for task in range(3):
        growing.apply(net, task, task=task)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        new = net.select(owner=f"task-{task}")
        before = new.incoming().weights.clone()
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(new.incoming().weights, before)  # what is not frozen does move
        ending.apply(net, task, task=task)
        kept[task] = new, [new.incoming().weights, new.outgoing().weights, new.biases]
    assert net.count().frozen == 3 * 4 * (6 + 1 + 2)
    for new, values in kept.values():
        assert bool(new.frozen.all())
        assert all(
            map(torch.equal, values, [new.incoming().weights, new.outgoing().weights, new.biases])
        )


def test_relations_gained_later_are_trainable_until_it_runs_again(net: gn.GrapNet) -> None:
    for _ in range(2):
        with net.edit() as edit:
            FreezeOwner(owner="old")(net, edit, RuleContext())
        with net.edit() as edit:
            new = edit.add_nodes(0, 1)
            edit.connect(new, net.layers[1][2])
        assert new.incoming().frozen.tolist() == []
        assert new.outgoing().frozen.tolist() == [False]
    assert net.layers[1][2].incoming().frozen.tolist() == [True] * 5 + [False]


def test_without_owner_and_without_task_it_says_what_is_missing(net: gn.GrapNet) -> None:
    with pytest.raises(gn.errors.EditError, match="task"), net.edit() as edit:
        FreezeOwner()(net, edit, RuleContext())
    assert net.count().frozen == 0
