"""Followers that fail or are interrupted after the decision: the commit is complete anyway."""

from collections.abc import Callable

import pytest
import torch
from torch.optim import Adam

import grapnet as gn


class Failing:
    """A follower that fails whenever its state is installed."""

    def __init__(self) -> None:
        self.calls = 0

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
        return self.install

    def install(self) -> None:
        self.calls += 1
        raise RuntimeError("it cannot be installed")


def test_the_rest_of_the_commit_is_installed_and_no_other_net_is_affected() -> None:
    net = gn.GrapNet([4, 3, 2])
    failing = Failing()
    net.follow(failing)
    optimizer = Adam(net.parameters())
    gn.attach(optimizer, net)
    other = gn.GrapNet([3, 2])
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="installed"), net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    calls = failing.calls
    assert net.version == len(net.history) == 1
    assert net.count().relations == 16
    gn.check(net)
    assert other(torch.ones(1, 3)).shape == (1, 2)
    # The optimizer came after the follower that failed, and has followed.
    optimizer.step()
    assert failing.calls == calls
    net.unfollow(failing)
    net.undo()
    assert net.count().relations == 18


class Interrupting:
    """A follower that is interrupted the first times that its state is installed."""

    def __init__(self, times: int) -> None:
        self.left = times

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
        return self.install

    def install(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise KeyboardInterrupt


def test_a_read_completes_a_commit_that_interrupts_have_stopped() -> None:
    net = gn.GrapNet([4, 3, 2])
    # Each of the three attempts inside of the edit is interrupted.
    interrupting = Interrupting(3)
    net.follow(interrupting)
    optimizer = Adam(net.parameters())
    gn.attach(optimizer, net)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight = net.transitions[0].weight
    with pytest.raises(KeyboardInterrupt), net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    assert net.version == 1
    # The optimizer comes after the interrupted follower.
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape == (10, 1)
