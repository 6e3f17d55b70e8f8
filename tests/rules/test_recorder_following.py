"""Recorders follow commits, trials, undo and redo; copies and files of what they have seen."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.rules import ActivationRecorder, CovarianceRecorder
from tests.rules.watched import MAKE, armed, batch, close, equal, outputs_of, run, seen, small_net

NAMES = ["mean", "variance", "firing_rate"]


@pytest.fixture
def net() -> gn.GrapNet:
    return small_net()


def test_statistics_move_with_the_nodes(net: gn.GrapNet) -> None:
    recorder = armed(ActivationRecorder(1), net)
    pairs = armed(CovarianceRecorder(1, 2), net)
    net(batch(net, 30, seed=1))
    uids = net.layers[1].uids
    before = {name: getattr(recorder, name) for name in NAMES}
    covariance = pairs.covariance()
    correlation = pairs.correlation()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[0, 3]])
        edit.remove_nodes(net.layers[2][1])
        new = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], new, weights=1.0)
    kept = torch.tensor([1, 2, 4, 5, 6])
    assert net.layers[1].uids.tolist() == [*uids[kept].tolist(), *new.uids.tolist()]
    for name in NAMES:
        assert torch.equal(
            getattr(recorder, name), torch.cat([before[name][kept], torch.zeros(2).double()])
        )
    assert (recorder.count, recorder.counts.tolist()) == (30, [30] * 5 + [0] * 2)
    assert torch.equal(pairs.covariance()[:5], covariance[kept][:, [0, 2, 3]])
    assert torch.equal(pairs.correlation()[:5], correlation[kept][:, [0, 2, 3]])
    net(x := batch(net, 50, seed=2))
    h = outputs_of(net, x)
    assert (recorder.count, recorder.counts.tolist()) == (80, [80] * 5 + [50] * 2)
    assert close(recorder.mean[5:], h[1].mean(0)[5:], net)
    assert close(recorder.variance[5:], h[1].var(0)[5:], net)
    assert close(
        recorder.mean[:5], (before["mean"][kept].numpy() * 30 + h[1].mean(0)[:5] * 50) / 80, net
    )
    assert recorder.firing_rate[5:].min() > 0
    assert (pairs.covariance()[5:] == 0).all()  # not there from the first sample on
    assert pairs.covariance()[:5].abs().max() > 0
    pairs.clear()
    net(x)
    assert close(pairs.covariance(), (h[1] - h[1].mean(0)).T @ (h[2] - h[2].mean(0)) / 50, net)


def shrink(net: gn.GrapNet) -> None:
    with net.edit(reason="shrink") as edit:
        edit.remove_nodes(net.layers[1][[1, 4]])
        edit.remove_nodes(net.layers[2][0])
        edit.add_nodes(1, 1)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("watching", [True, False], ids=["armed", "disarmed"])
def test_undo_and_redo_bring_back_what_was_seen(net: gn.GrapNet, kind: str, watching: bool) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    if not watching:
        recorder.disarm()
    before = seen(recorder)
    shrink(net)
    between = seen(recorder)
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][2])
    net.undo()
    for start in (0, 1):  # what a trial records takes nothing from undo: rows stay, rows move
        with net.edit(trial=True) as edit:
            edit.cut(net.layers[0][2].outgoing())
            edit.remove_nodes(net.layers[1][start : 2 * start])
            edit.commit()
            run(net, seed=1)
    assert equal(seen(recorder), between)
    net.undo()
    assert equal(seen(recorder), before)
    net.redo()
    assert equal(seen(recorder), between)
    assert not equal(before, between)


@pytest.mark.parametrize("kind", MAKE)
def test_a_node_that_returns_after_more_was_seen_starts_at_nothing(
    net: gn.GrapNet, kind: str
) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    shrink(net)
    run(net, 10)
    net.undo()
    if kind == "activations":
        assert recorder.counts.tolist() == [50, 0, 50, 50, 0, 50, 50]
        return
    found = recorder.covariance() if kind == "covariances" else recorder.matrix()
    assert found.shape == (7, 4)
    assert (found[[1, 4]] == 0).all()
    assert (found[:, 0] == 0).all()
    assert found[[0, 2, 3]][:, 1:].abs().max() > 0


@pytest.mark.parametrize("kind", MAKE)
def test_a_trial_leaves_no_trace(net: gn.GrapNet, kind: str) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    before = seen(recorder)
    for start in (0, 1):  # rows move, rows stay
        with net.edit(trial=True) as edit:
            edit.cut(net.layers[0][2].outgoing())
            edit.remove_nodes(net.layers[1][start : 3 * start])
            edit.commit()
            run(net, seed=1)
            assert not equal(seen(recorder), before)
        assert equal(seen(recorder), before)
    run(net, seed=2)
    assert not equal(seen(recorder), before)
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][0])
        edit.commit()
        recorder.clear()
        run(net)
        late = armed(MAKE[kind](), net)
        run(net)
        assert late.count > 0
    assert recorder.count == late.count == 0


@pytest.mark.parametrize("kind", MAKE)
def test_neither_keeps_the_other_alive(kind: str) -> None:
    net = gn.GrapNet([5, 7, 4, 3])
    recorder = armed(MAKE[kind](), net)
    run(net)
    gone = weakref.ref(net)
    there = weakref.ref(recorder)
    del net
    gc.collect()
    assert gone() is None
    assert not recorder.armed
    assert recorder.count > 0  # what it has seen stays
    net = gn.GrapNet([5, 7, 4, 3])
    recorder.clear()
    recorder.arm(net)
    assert any(module._forward_hooks for module in net.modules())
    out = net(batch(net)).sum()
    del recorder
    gc.collect()
    assert there() is None
    assert not any(module._forward_hooks for module in net.modules())
    out.backward()
    run(net)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_net_does_not_feed_it(
    net: gn.GrapNet, kind: str, how: Callable[[Any], Any]
) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    before = seen(recorder)
    twin = how(net)
    run(twin)
    shrink(twin)
    run(twin)
    assert equal(seen(recorder), before)
    # the first pass took the copied hooks away
    assert not any(module._forward_hooks for module in twin.modules())
    run(net)
    assert not equal(seen(recorder), before)
    run(copied := copy.deepcopy(twin))
    assert copied.version == twin.version


@pytest.mark.parametrize("kind", MAKE)
def test_a_copy_of_a_recorder_has_the_evidence_and_watches_nothing(
    net: gn.GrapNet, kind: str
) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    twin, copied = copy.deepcopy((net, recorder))
    assert equal(seen(copied), seen(recorder))
    assert not copied.armed
    run(net)
    run(twin)
    assert not equal(seen(copied), seen(recorder))
    copied.arm(twin)
    run(twin)
    assert equal(seen(copied), seen(recorder))


@pytest.mark.parametrize("kind", MAKE)
def test_state_goes_through_a_file(net: gn.GrapNet, kind: str) -> None:
    recorder = armed(MAKE[kind](), net)
    run(net)
    state = recorder.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for fresh in (MAKE[kind](), armed(MAKE[kind](), net)):
        fresh.load_state_dict(state)
        assert equal(seen(fresh), seen(recorder))
        fresh.arm(net)
    run(net, seed=1)
    assert equal(seen(fresh), seen(recorder))  # goes on alike
    shrink(net)
    assert equal(seen(fresh), seen(recorder))
    before = seen(recorder)
    with pytest.raises(CheckpointError):
        recorder.load_state_dict(state)  # the nodes are others by now
    assert equal(seen(recorder), before)
    late = MAKE[kind]()
    late.load_state_dict(state)
    with pytest.raises(GrapNetError, match="clear"):
        late.arm(net)
    recorder.clear()
    fresh.load_state_dict(recorder.state_dict())
    assert fresh.count == 0


@pytest.mark.parametrize("kind", MAKE)
def test_a_bound_recorder_follows_and_does_not_watch(net: gn.GrapNet, kind: str) -> None:
    recorder = armed(MAKE[kind](), net)
    bound = MAKE[kind]()
    run(net)
    bound.load_state_dict(recorder.state_dict())
    bound.bind(net)
    recorder.disarm()
    run(net, seed=1)
    assert not bound.armed
    shrink(net)
    assert equal(seen(bound), seen(recorder))
    bound.arm(net)
    with pytest.raises(GrapNetError, match="another net"):
        bound.bind(small_net())
