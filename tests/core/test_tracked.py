"""Everything that follows by Tracked: an installation may run twice, or be interrupted and run
again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual import ClosedFormReadout
from grapnet.core._commit import Tracked
from grapnet.rules import ActivationRecorder, CovarianceRecorder, GradientRecorder


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


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


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
    assert equal(found, expected)
    # the comparison tells the states of two moments apart
    assert not equal(expected[:5], expected[5:10])


def test_preparing_changes_nothing() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([5, 7, 4])
    recorder = CovarianceRecorder(0, 1)
    recorder.arm(net)
    readout = ClosedFormReadout(net)
    followed = gn.follow(net, {name: value.detach() for name, value in net.named_parameters()})
    x = torch.randn(20, 5)
    net(x)
    readout.update(x, torch.randint(4, (20,)))

    class Refusal:
        def prepare(self, graph: Any, commit: Any) -> Any:
            raise KeyboardInterrupt

    refusal = Refusal()
    net.follow(refusal)
    states = [each.state_dict() for each in (recorder, readout, followed)]
    with pytest.raises(KeyboardInterrupt), net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    assert equal([each.state_dict() for each in (recorder, readout, followed)], states)
    net.unfollow(refusal)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
    assert not equal([each.state_dict() for each in (recorder, readout, followed)], states)
