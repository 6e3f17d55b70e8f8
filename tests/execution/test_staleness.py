"""Snapshots and their controller know whether the net went on without them."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from tests.rounding import SINGLE

from .snapped import addresses, cut, edited, every_graph, full, inputs, mixed, ragged, step


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def trial(net: gn.GrapNet) -> None:
    version = net.version
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        edit.commit()
    assert net.version == version


def load(net: gn.GrapNet) -> None:
    net.load_state_dict(
        {k: v + 1 if v.is_floating_point() else v for k, v in net.state_dict().items()}
    )


def load_frozen_alone(net: gn.GrapNet) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["transitions.0.weight"][state["transitions.0.frozen"].long()] += 1
    net.load_state_dict(state)


def in_place(net: gn.GrapNet) -> None:
    with torch.no_grad():
        net.transitions[1].weight.mul_(2)


def in_inference_mode(net: gn.GrapNet) -> None:
    with torch.inference_mode():
        net.layers[1].bias.add_(1)


def assign(net: gn.GrapNet) -> None:
    net.layers[1][3].W_alloc = torch.ones(net.layers[1][3].degree)


def assign_biases(net: gn.GrapNet) -> None:
    net.layers[3].biases = 3.0


def replace_memory(net: gn.GrapNet) -> None:
    net.transitions[0].weight.data = net.transitions[0].weight.data + 1


def there_and_back(net: gn.GrapNet) -> None:
    net.half().float()


def replace_parameter(net: gn.GrapNet) -> None:
    net.transitions[0].weight = nn.Parameter(net.transitions[0].weight.data)


CHANGES: dict[str, Callable[[gn.GrapNet], None]] = {
    "cut": edited(lambda net, edit: edit.cut(net.layers[0][0].outgoing())),
    "activation": edited(lambda net, edit: edit.set_activation(net.layers[1][0], "elu")),
    "freeze": edited(lambda net, edit: edit.freeze(net.layers[2][0])),
    "undo": lambda net: net.undo(),
    "trial": trial,
    "load": load,
    "load_frozen_alone": load_frozen_alone,
    "in_place": in_place,
    "in_inference_mode": in_inference_mode,
    "assign": assign,
    "assign_biases": assign_biases,
    "replace_memory": replace_memory,
    "replace_parameter": replace_parameter,
    "there_and_back": there_and_back,
    "double": lambda net: net.double(),
    "sgd": step(torch.optim.SGD),
    "adam": step(torch.optim.Adam),
    "adam_loop": step(torch.optim.Adam, foreach=False),
    "adam_fused": step(torch.optim.Adam, fused=True),
    "adamw_fused": step(torch.optim.AdamW, fused=True),
    "sgd_fused": step(torch.optim.SGD, fused=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_makes_it_stale_and_the_controller_follow(change):
    net = cut()
    snapshot, serve, x = net.snapshot(), gn.SnapshotController(net), inputs(net, 5)
    assert not snapshot.is_stale(net)
    change(net)
    assert snapshot.is_stale(net)
    assert not net.snapshot().is_stale(net)
    x = x.to(net.transitions[0].weight)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=SINGLE)
    assert serve.refreshes == 1
    assert not serve.snapshot.is_stale(net, exact=True)


def test_version_number_that_comes_back_does_not_make_it_fresh():
    net = full()
    with net.edit(trial=True) as edit:
        edit.set_activation(net.layers[1], "tanh")
        edit.commit()
        snapshot, serve = net.snapshot(), gn.SnapshotController(net)
    assert snapshot.is_stale(net)
    edited(lambda net, edit: edit.set_activation(net.layers[1], "elu"))(net)  # moves no coordinate
    assert snapshot.version == net.version
    assert snapshot.is_stale(net)
    x = inputs(net, 5)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=SINGLE)
    assert serve.rebuilds == 1


def test_what_changes_nothing_leaves_it_fresh(tmp_path):
    net, other = cut(), full()
    snapshot = net.snapshot()
    net(inputs(net, 4).requires_grad_()).sum().backward()
    net.zero_grad()
    step(torch.optim.Adam, fused=True)(other)
    (
        net.state_dict(),
        copy.deepcopy(net),
        gn.save(tmp_path / "net", net),
        net.eval(),
        net.train(),
        net.to("cpu"),
    )
    net.requires_grad_(False).requires_grad_()
    with net.edit(reason="nothing"):
        pass
    assert not snapshot.is_stale(net)
    assert not snapshot.is_stale(net, exact=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda net: net.transitions[0].weight.data.add_(1),
        lambda net: net.layers[1].bias.detach().numpy().fill(7),
    ],
    ids=["data", "numpy"],
)
def test_writes_behind_autograds_back_are_seen_by_reading_alone(write):
    net = full()
    snapshot, serve, x = net.snapshot(), gn.SnapshotController(net), inputs(net, 3)
    write(net)
    assert not snapshot.is_stale(net)
    assert snapshot.is_stale(net, exact=True)
    serve.refresh()
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=SINGLE, atol=SINGLE)


def through_a_file(snapshot: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(snapshot, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {
    "pickle": lambda snapshot: pickle.loads(pickle.dumps(snapshot)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_a_file,
}


@every_graph
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_compares_what_it_holds(build, copied):
    net = build()
    twin = copied(net.snapshot())
    assert twin.version == net.version
    assert not twin.is_stale(net)
    assert not twin.is_stale(copy.deepcopy(net))
    assert not twin.update(net)
    net.layers[-1].biases = 9.0
    assert twin.is_stale(net)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copy_never_claims_to_be_fresh_after_a_change(change):
    net = cut()
    twin, state = copy.deepcopy(net.snapshot()), copy.deepcopy(net.state_dict())
    change(net)
    pairs = [(value, state[name]) for name, value in net.state_dict().items()]
    same = net.version == twin.version and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )
    assert twin.is_stale(net) is not same  # the end of a trial brings every coordinate back
    assert not same or change in (trial, replace_parameter)


def test_copy_of_net_and_snapshot_together_compares_too():
    net, snapshot = copy.deepcopy((net := full(), net.snapshot()))
    assert not snapshot.is_stale(net)
    net.transitions[0].weight.data.add_(1)
    assert snapshot.is_stale(net)


def test_copy_with_other_modules_is_stale():
    net = mixed()
    changed = [copy.deepcopy(net.snapshot()) for _ in range(5)]
    changed[0].append(nn.ReLU())
    changed[1].pop(-1)
    changed[2][1].order.copy_(changed[2][1].order.flip(0))
    changed[3][0].weight.mul_(-1)
    changed[4][3] = nn.Tanh()
    assert [snapshot.is_stale(net) for snapshot in changed] == [True] * 5
    sparse = ragged()
    twin = copy.deepcopy(sparse.snapshot())
    twin[0].weight[twin[0].weight == 0] = 1.0  # where no relation is
    assert twin.is_stale(sparse)
    assert net.snapshot()[:2].is_stale(net)
    assert net.snapshot()[:2].version is None


def test_snapshot_of_another_net_is_stale():
    assert full().snapshot().is_stale(full())
    assert full().snapshot().is_stale(gn.GrapNet([6, 3]))


def test_copy_in_another_dtype_is_stale_and_the_snapshot_itself_is_not():
    net = full(dtype=torch.float64)
    assert copy.deepcopy(net.snapshot()).float().is_stale(net)
    assert not net.snapshot().float().is_stale(net)


def test_step_of_an_optimizer_that_is_gone_is_found_by_reading():
    net, other = full(), full()
    snapshot = net.snapshot()
    step(torch.optim.Adam, fused=True)(other)
    gc.collect()
    assert not snapshot.is_stale(net)
    step(torch.optim.Adam, fused=True)(net)
    gc.collect()
    assert snapshot.is_stale(net)
    kept = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    snapshot = net.snapshot()
    kept.step()
    assert snapshot.is_stale(net)


def test_controller_writes_in_place_until_an_edit_and_counts():
    net = cut()
    serve, train, x = gn.SnapshotController(net), step(torch.optim.SGD), inputs(net, 5)
    first = serve.snapshot
    places = addresses(first)
    serve(x), serve(x)
    assert (serve.refreshes, serve.rebuilds) == (0, 0)
    for _ in range(2):
        train(net)
        serve(x), serve(x)
    assert serve.snapshot is first
    assert addresses(first) == places
    assert (serve.refreshes, serve.rebuilds) == (2, 0)
    edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[:2]))(net)
    torch.testing.assert_close(serve(x), net(x).detach(), rtol=0, atol=SINGLE)
    assert serve.snapshot is not first
    assert (serve.refreshes, serve.rebuilds) == (3, 1)
    assert repr(serve) == "SnapshotController(version 2, 3 refreshes)"


def test_training_is_the_same_beside_a_controller():
    net = full()
    alone, beside = net, copy.deepcopy(net)
    serve, x = gn.SnapshotController(beside), inputs(net, 8)
    for n in (alone, beside):
        optimizer = torch.optim.Adam(n.parameters(), lr=0.05)
        gn.attach(optimizer, n)
        for round_ in range(4):
            optimizer.zero_grad()
            loss = n(x).square().sum()
            if n is beside:
                serve(x)
            loss.backward()
            optimizer.step()
            if round_ == 1:
                edited(lambda net, edit: edit.cut(net.layers[0].outgoing()[::3]))(n)
    assert all(
        torch.equal(a, b) for a, b in zip(alone.parameters(), beside.parameters(), strict=True)
    )
    assert serve.refreshes == 3


def test_controller_works_in_and_after_inference_mode():
    net = full()
    x = inputs(net, 2)
    with torch.inference_mode():
        serve = gn.SnapshotController(net)
        serve(x)
    in_place(net)
    given = x.clone().requires_grad_()
    serve(given).sum().backward()
    net(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(given.grad, x.grad)
    with torch.inference_mode():
        made = full()
        snapshot = made.snapshot()
        assert not snapshot.is_stale(made)
        in_place(made)
        assert snapshot.is_stale(made)


def test_controller_does_not_keep_the_net_alive():
    net = full()
    serve, x = gn.SnapshotController(net), inputs(net, 2)
    expected = net(x).detach()
    del net
    gc.collect()
    with pytest.raises(gn.PlanError, match=r"is gone.*controller\.snapshot \(version 0\)"):
        serve(x)
    torch.testing.assert_close(serve.snapshot(x), expected)


def test_controller_of_a_model_says_what_to_do():
    model: Any = nn.Sequential(nn.Linear(4, 4), full())
    with pytest.raises(
        TypeError, match=r"runs one net, got Sequential\. Give it the net inside .* gn\.snapshot"
    ):
        gn.SnapshotController(model)


def test_controller_cannot_be_copied():
    serve = gn.SnapshotController(full())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save controller\.snapshot"):
            attempt(serve)


def test_trial_that_waits_is_not_run():
    net = full()
    serve = gn.SnapshotController(net)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        for attempt in (net.snapshot, net.to_module, lambda: serve(inputs(net, 1))):
            with pytest.raises(gn.EditError, match=r"edit\.commit\(\)"):
                attempt()
        edit.commit()
        assert net.snapshot()[0].weight[:, 0].count_nonzero() == 0
