"""Fault injection: an edit of every operation that fails anywhere before the swap leaves everything
bit-identical.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import grapnet as gn
from tests.fingerprint import as_bytes, fingerprint

# Whatever fails in these fails before there is an edit, or after the swap has begun.
OUTSIDE = {
    "__enter__",
    "__get__",
    "enter",
    "open",
    "open_edit",
    "edit",
    "__init__",
    "leave",
    "_leave",
    "close_edit",
    "is_running",
    "is_open",
    "close",
    "__del__",
}
SWAP = "carry_out"


class Fault(Exception):
    """The failure that is injected."""


class Injection:
    """Fails at the n-th call of a function of the core or of the optimizer's follower, or only
    notes the calls.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.calls: list[tuple[str, str, int]] = []  # function, caller and the caller's line
        self.codes: set[CodeType] = set()
        self.swapping = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self.swapping:
            return
        code, caller = frame.f_code, frame.f_back
        name, self.swapping = code.co_name, code.co_name == SWAP
        # entered once more to be closed, where errors are lost
        generates = code.co_flags & CO_GENERATOR
        foreign = "/grapnet/" not in code.co_filename
        if foreign or self.swapping or generates or name in OUTSIDE or caller is None:
            return
        self.calls.append((name, caller.f_code.co_filename, caller.f_lineno))
        self.codes.add(frame.f_code)
        if len(self.calls) - 1 == self.number:
            raise Fault(name)

    def __enter__(self) -> "Injection":
        gc.disable()  # so that nothing of other tests is finalised in the middle of the calls
        self._before = sys.getprofile()
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        gc.enable()


class Statistics:
    """A follower with state of its own: how often each relation of transition 1 was seen."""

    def __init__(self, net: gn.GrapNet) -> None:
        self.seen = torch.arange(float(net.transitions[1].size))
        self.told = 0
        self.refuses = False

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
        if self.refuses:
            raise Fault("follower")
        seen = commit.relations[1].carry(self.seen) if 1 in commit.relations else self.seen

        def install() -> None:
            self.seen, self.told = seen, self.told + 1

        return install


def everything(net: gn.GrapNet) -> None:
    """An edit with one of every operation."""
    with net.edit(reason="everything", by="test") as edit:
        edit.cut(net.layers[0][1], slots=[0])
        edit.remove_nodes(net.layers[2][0])
        new = edit.add_nodes(1, 2, owner="new")
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[2][1:], weights="alloc")
        edit.freeze(net.layers[0][2].outgoing())
        edit.unfreeze(net.layers[1][2])
        edit.set_owner(net.layers[3], "output")
        edit.set_activation(net.layers[1][2], "tanh")
        edit.cut(net.layers[1][1].incoming())
        edit.remove_orphans(fold_bias=True)


def make() -> tuple[gn.GrapNet, torch.optim.Optimizer, list[Statistics]]:
    """A trained net with a history, frozen coordinates, and followers before and after the
    optimizer's.
    """
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 3, 2])
    with net.edit(reason="before") as edit:
        edit.freeze(net.layers[1][2])
        edit.cut(net.layers[0][0], slots=[0])
    first, optimizer, middle, last = (
        Statistics(net),
        torch.optim.Adam(net.parameters()),
        Statistics(net),
        Statistics(net),
    )
    net.follow(first)
    gn.attach(optimizer, net)
    net.execution.use("attention", transition=1)
    net.follow(middle)
    net.follow(last)
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer, [first, middle, last]


@pytest.fixture
def followed() -> tuple[gn.GrapNet, torch.optim.Optimizer, list[Statistics]]:
    return make()


def state(followed: Any) -> list[Any]:
    net, optimizer, followers = followed
    return [
        fingerprint(net, optimizer),
        [(f.seen.tolist(), f.told) for f in followers],
        as_bytes(torch.get_rng_state()),
    ]


ACTIONS: dict[str, Callable[[gn.GrapNet], object]] = {
    "edit": everything,
    "undo": lambda net: net.undo(),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_fault_at_any_call_before_the_swap_changes_nothing(followed: Any, action: str) -> None:
    twin = make()
    state(twin)  # runs the net, as `state(followed)` below does, so that both have the same plans
    with Injection() as notes:
        ACTIONS[action](twin[0])
    assert notes.swapping
    # of every place that calls something
    last = {call: number for number, call in enumerate(notes.calls)}
    net, before = followed[0], state(followed)
    for number in last.values():
        with Injection(number) as injection, suppress(Fault):
            ACTIONS[action](net)
        assert injection.calls == notes.calls[: number + 1]  # it failed, and where it should
        assert state(followed) == before, injection.calls[-1]
    files = {Path(code.co_filename).stem for code in notes.codes}
    assert {"_commit", "_coordinates", "_change", "optimizers"} | (
        {"_resolve"} if action == "edit" else set()
    ) <= files
    ACTIONS[action](net)  # the same goes through once nothing fails
    gn.check(net)
    assert net.version == 2
    assert all(
        follower.told == 1 and len(follower.seen) == net.transitions[1].size
        for follower in followed[2]
    )


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_follower_that_refuses_stops_the_commit_for_all(
    followed: Any, action: str, place: int
) -> None:
    net, optimizer, followers = followed
    loss = net(torch.ones(2, 4)).sum()
    before = state(followed)
    followers[place].refuses = True
    with pytest.raises(Fault):
        ACTIONS[action](net)
    assert state(followed) == before
    loss.backward()
    followers[place].refuses = False
    ACTIONS[action](net)
    assert [follower.told for follower in followers] == [1, 1, 1]
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_an_optimizer_that_cannot_follow_stops_the_commit_for_all(followed: Any) -> None:
    net, optimizer, _ = followed
    optimizer.state[net.transitions[1].weight]["odd"] = torch.zeros(2, 3)
    before = state(followed)
    with pytest.raises(gn.OptimizerError, match=r"'odd' .*\[2, 3\].*transitions\.1\.weight"):
        everything(net)
    assert state(followed) == before
    del optimizer.state[net.transitions[1].weight]["odd"]
    everything(net)
    gn.check(net)


def test_a_fault_in_replay_and_in_a_trial_changes_nothing(followed: Any) -> None:
    net, _, followers = followed
    twin = gn.GrapNet([4, 3, 3, 2])
    with twin.edit(reason="before") as edit:
        edit.freeze(twin.layers[1][2])
        edit.cut(twin.layers[0][0], slots=[0])
    everything(twin)
    before = state(followed)
    followers[2].refuses = True
    with pytest.raises(Fault):
        net.replay(twin.history[1:])
    assert state(followed) == before
    with pytest.raises(Fault), net.edit(trial=True) as edit:
        cut_and_commit(net, edit)
    assert state(followed) == before


def cut_and_commit(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0].outgoing())
    edit.commit()
