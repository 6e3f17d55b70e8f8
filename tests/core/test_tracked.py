"""Everything that follows by Tracked: an installation may run twice, or be interrupted and run
again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.continual import ClosedFormReadout
from grapnet.core._commit import Tracked
from grapnet.rules import ActivationRecorder, CovarianceRecorder, GradientRecorder

from .worlds import plain


def program() -> list[Any]:
    """Runs edits, undo, redo and a trial, and returns what every follower has after each."""
    torch.manual_seed(0)
    net = gn.GrapNet([5, 7, 4, 3], dtype=torch.float64)
    recorders = [ActivationRecorder(1), CovarianceRecorder(1, 2), GradientRecorder(1, 2)]
    for recorder in recorders:
        recorder.arm(net)
    readout = ClosedFormReadout(net, layer=1, late_nodes="silent")
    values = {name: value.detach() for name, value in net.named_parameters()}
    followed = gn.follow(net, values, newborn="value")
    found = []

    def note() -> None:
        for follower in (*recorders, readout, followed):
            found.append(follower.state_dict())

    def learn() -> None:
        x = torch.randn(20, 5, dtype=torch.float64)
        net(x).square().sum().backward()
        readout.update(x, torch.randint(3, (20,)))
        followed["layers.1.bias"] += 1
        note()

    learn()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[1, 4]])
        edit.connect(net.layers[0], edit.add_nodes(1, 1))
    note()
    net.undo()
    note()
    net.redo()
    note()
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.remove_nodes(net.layers[2][2])
        edit.commit()
        learn()
    note()
    net.undo()
    note()
    learn()
    return found


def test_an_installation_may_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = program()
    prepare = Tracked.prepare
    ran = []

    def prepare_twice(self: Any, graph: Any, commit: Any) -> Callable[[], None]:
        install = prepare(self, graph, commit)

        def install_twice() -> None:
            install()
            install()
            ran.append(commit.kind)

        return install_twice

    monkeypatch.setattr(Tracked, "prepare", prepare_twice)
    found = program()
    assert set(ran) == {"edit", "undo", "redo", "trial", "end"}
    assert plain(found) == plain(expected)
    # the comparison tells the states of two moments apart
    assert plain(expected[:5]) != plain(expected[5:10])
