"""Evidence for rules: when recorders watch, and what the rules get to see."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest

import grapnet as gn
from grapnet.rules import At, CovarianceRecorder, Every, RuleManager
from tests.fingerprint import fingerprint

from .own_rules import CutQuietest, Grow, Mean, X, recorded, small_net


@pytest.fixture
def net() -> gn.GrapNet:
    return small_net()


@pytest.fixture
def manager() -> RuleManager:
    return RuleManager()


def watches(manager: RuleManager, net: gn.GrapNet) -> int:
    """Returns how many samples a forward pass shows to the recorders."""
    before = samples(manager)
    net(X)
    return samples(manager) - before


def samples(manager: RuleManager) -> int:
    states = recorded(manager.state_dict()).values()
    return sum(state["mean"]["count"] for state in states if state)


def test_recorders_watch_only_before_their_rule_is_due(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    manager.add(CutQuietest(window=3), schedule=Every(5, start=4, until=9))
    manager.start(net)
    watched = []
    for step in range(14):
        watched.append(watches(manager, net))
        manager.apply(net, step)
    assert watched == [0, 0, 8, 8, 8, 0, 0, 8, 8, 8, 0, 0, 0, 0]
    remarks = [
        op for commit in net.history for op in commit.operations if op.get("text") == "quietest"
    ]
    assert [remark["seen"] for remark in remarks] == [24, 24]  # forgotten once used


def test_start_looks_as_far_as_the_window_reaches(net: gn.GrapNet, manager: RuleManager) -> None:
    manager.add(CutQuietest(window=3), schedule=At(10))
    for step, expected in ((7, 0), (8, 8), (10, 8), (11, 0), (0, 0)):
        manager.start(net, step=step)
        assert watches(manager, net) == expected, step
    manager.apply(net, 8)
    manager.start(net)  # goes on behind the last step
    assert watches(manager, net) == 8


def test_a_due_rule_without_evidence_is_refused(net: gn.GrapNet, manager: RuleManager) -> None:
    manager.add(CutQuietest(), schedule=At(0))
    before = fingerprint(net)
    for dry_run in (False, True):
        with pytest.raises(gn.errors.GrapNetError, match=r"'CutQuietest'.*'mean'"):
            manager.apply(net, 0, dry_run=dry_run)
    assert fingerprint(net) == before
    with manager.recording(net):
        net(X)
    assert watches(manager, net) == 0  # only inside the block
    manager.apply(net, 0)
    assert net.version == 1


def test_recording_leaves_alone_who_watched_before_and_who_is_disabled(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    manager.add(CutQuietest(window=1), schedule=Every(1))
    manager.add(CutQuietest(window=1), name="off", enabled=False)
    manager.start(net)
    with manager.recording(net):
        assert watches(manager, net) == 8
    assert watches(manager, net) == 8
    manager.disable("CutQuietest")
    assert watches(manager, net) == 0
    manager.enable("CutQuietest")
    with pytest.raises(gn.errors.GrapNetError, match="has seen nothing"):
        manager.apply(net, 0)  # what it saw before it was switched off does not count


def test_pausing_hides_what_is_run_inside_the_block(net: gn.GrapNet, manager: RuleManager) -> None:
    manager.add(CutQuietest(window=1), schedule=Every(1))
    manager.add(CutQuietest(window=1), name="later", schedule=At(9))
    with manager.pausing():  # before there is anything to pause
        net(X)
    manager.start(net)
    net(X)
    with manager.pausing():
        assert watches(manager, net) == 0
    with pytest.raises(ValueError, match="expects x"), manager.pausing():
        net(X[:, :1])
    assert watches(manager, net) == 8
    manager.apply(net, 0)
    (remark,) = [op for op in net.history[-1].operations if op.get("text") == "quietest"]
    assert remark["seen"] == 16


@pytest.mark.parametrize("verb", ["disable", "remove", "replace"])
@pytest.mark.parametrize("block", ["pausing", "recording", "none"])
def test_a_rule_that_leaves_takes_no_other_with_it(
    net: gn.GrapNet, manager: RuleManager, block: str, verb: str
) -> None:
    for name in "abc":
        manager.add(CutQuietest(window=1), name=name, schedule=Every(1))
    manager.start(net)
    assert watches(manager, net) == 24
    blocks = {"pausing": manager.pausing(), "recording": manager.recording(net)}
    with blocks.get(block, nullcontext()):
        getattr(manager, verb)("b", *([Grow()] if verb == "replace" else []))
    assert watches(manager, net) == 16


def test_another_net_gets_recorders_of_its_own_and_none_is_kept_alive(
    net: gn.GrapNet, manager: RuleManager
) -> None:
    manager.add(CutQuietest(window=1), schedule=Every(1))
    manager.start(net)
    net(X)
    other = small_net(1)
    with pytest.raises(gn.errors.GrapNetError, match="has seen nothing"):
        manager.apply(other, 0)
    manager.apply(net, 0)
    assert net.version == 1  # the refusal cost nothing of what was seen of the first net
    manager.start(other)
    assert (watches(manager, net), watches(manager, other)) == (0, 8)
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None
    manager.start(net)
    assert watches(manager, net) == 8


@pytest.mark.parametrize("verb", ["add", "enable", "replace"])
def test_rules_that_come_while_a_net_trains_get_evidence_from_then_on(
    net: gn.GrapNet, manager: RuleManager, verb: str
) -> None:
    manager.add(CutQuietest() if verb == "enable" else Grow(0), name="a", enabled=verb != "enable")
    manager.start(net)
    manager.apply(net, 0)
    if verb == "add":
        manager.add(CutQuietest())
    elif verb == "enable":
        manager.enable("a")
    else:
        manager.replace("a", CutQuietest())
    assert watches(manager, net) == 8
    manager.apply(net, 1)
    assert net.version == 1


@pytest.mark.parametrize("verb", ["add", "enable", "replace"])
def test_a_rule_whose_recorders_cannot_be_armed_leaves_the_manager_as_it_was(
    net: gn.GrapNet, manager: RuleManager, verb: str
) -> None:
    made: list[Mean] = []

    class HalfReady(CutQuietest):
        def recorders(self, net: gn.GrapNet) -> Any:
            made.append(Mean(9))
            return {"mean": made[-1], "other": CovarianceRecorder(0, 1, most_cells=1)}

    bad = HalfReady()
    manager.add(CutQuietest(window=1), name="a")
    if verb == "enable":
        manager.add(bad, name="off", enabled=False)
    manager.start(net)
    net(X)
    before = str(manager.state_dict())
    names = manager.names
    verbs = {
        "add": lambda: manager.add(bad, before="a"),
        "enable": lambda: manager.enable("off"),
        "replace": lambda: manager.replace("a", bad),
    }
    with pytest.raises(gn.errors.GrapNetError, match="pairs of nodes"):
        verbs[verb]()
    assert (str(manager.state_dict()), manager.names) == (before, names)
    assert manager["a"] == CutQuietest(window=1)
    assert watches(manager, net) == 8  # the old one still does
    assert [recorder.hook for recorder in made] == [None]
    manager.apply(net, 0)
    assert net.history[-1].operations[-1]["seen"] == 16
