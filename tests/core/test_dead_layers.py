"""An edit takes no last relation of a transition and no last parent of an output in silence."""

import copy
from collections.abc import Callable

import pytest
import torch

import grapnet as gn
from tests.fingerprint import fingerprint


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([3, 4, 2])


def cut(net: gn.GrapNet, relations: gn.RelationSet, **options: bool) -> None:
    with net.edit(reason="cut", **options) as edit:
        edit.cut(relations)


def make_orphans(edit: gn.Edit, net: gn.GrapNet) -> None:
    edit.cut(net.layers[1][1:].incoming())
    edit.cut(net.layers[1][0].outgoing(to=net.layers[2][1]))
    edit.remove_orphans(fold_bias=True)


DEADLY = {
    "the first transition": lambda edit, net: edit.cut(net.layers[0].outgoing()),
    "the last transition": lambda edit, net: edit.cut(net.layers[1].outgoing()),
    "one output": lambda edit, net: edit.cut(net.layers[2][1].incoming()),
    "hidden nodes": lambda edit, net: edit.remove_nodes(net.layers[1]),
    "sensory nodes": lambda edit, net: edit.remove_nodes(net.layers[0], interface=True),
    "orphans": make_orphans,
}


def make(write: Callable[..., None], net: gn.GrapNet, **options: bool) -> None:
    with net.edit(**options) as edit:
        write(edit, net)
        edit.commit()


@pytest.mark.parametrize("write", DEADLY.values(), ids=DEADLY)
def test_it_is_refused_unless_allowed_and_nothing_changes(
    write: Callable[..., None], net: gn.GrapNet
) -> None:
    before = fingerprint(net)
    random = torch.get_rng_state()
    for options in ({}, {"trial": True, "allow_dead": False}):
        with pytest.raises(gn.errors.EditError):
            make(write, net, **options)
        assert fingerprint(net) == before
        assert torch.equal(torch.get_rng_state(), random)
    make(write, net, trial=True)
    assert (net.version, net.count().relations) == (0, 20)
    make(write, net, allow_dead=True)
    assert net.version == 1
    gn.check(net)


def test_undo_redo_and_replay_reach_dead_states() -> None:
    net = gn.GrapNet([4, 0, 2])
    first = copy.deepcopy(net)
    with net.edit() as edit:
        new = edit.add_nodes(1, 3)
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[2])
    net.undo()
    assert net.count().relations == 0
    net.redo()
    cut(net, net.layers[0].outgoing(), allow_dead=True)
    net.undo()
    net.redo()
    first.replay(net.history)
    assert first.count().relations == net.count().relations == 6


def test_one_dead_net_stops_all_that_commit_together(net: gn.GrapNet) -> None:
    other = copy.deepcopy(net)

    def cut_both(**options: bool) -> None:
        with gn.edit(net, other, **options) as (first, second):
            first.cut(net.layers[0].outgoing().smallest(count=1))
            second.cut(other.layers[0].outgoing())

    with pytest.raises(gn.errors.EditError):
        cut_both()
    assert (net.version, other.version) == (0, 0)
    cut_both(allow_dead=True)
    assert (net.version, other.version) == (1, 1)


def test_a_last_parent_is_found_behind_thousands_of_relations() -> None:
    net = gn.GrapNet([200, 100])
    last = net.layers[1][99]
    cut(net, last.incoming()[:199])
    assert net.count().relations == 200 * 100 - 199
    with pytest.raises(gn.errors.EditError):
        cut(net, last.incoming())
    cut(net, net.layers[1][98].incoming()[1:])
    with pytest.raises(gn.errors.EditError):
        cut(net, net.layers[1][98].incoming())


def test_a_manager_refuses_unless_it_allows() -> None:
    def cut_everything(net: gn.GrapNet, edit: gn.Edit, now: object) -> None:
        edit.cut(net.select().outgoing())

    net = gn.GrapNet([3, 4, 2])
    manager = gn.rules.RuleManager()
    manager.add(cut_everything)
    for dry_run in (True, False):
        with pytest.raises(gn.errors.EditError):
            manager.apply(net, dry_run=dry_run)
    assert net.version == 0
    manager.allow_dead = True
    assert manager.apply(net, dry_run=True).after.relations == 0
    manager.apply(net)
    assert net.count().relations == 0
