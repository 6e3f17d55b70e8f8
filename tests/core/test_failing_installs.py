"""A follower that fails after the decision: the commit is complete without it."""

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
