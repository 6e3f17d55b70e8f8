"""Optimizers that have not followed an edit refuse to step, and attaching, detaching and loading
decide which have.
"""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

import grapnet as gn

from .plain import OPTIMIZERS, batch, make_net, rewire, swap_one, train


@pytest.fixture
def net() -> gn.GrapNet:
    return make_net()


def backward(net: gn.GrapNet) -> None:
    net.zero_grad()
    net(batch(0)).square().sum().backward()


def attached(net: gn.GrapNet, make: Callable[[Any], Optimizer]) -> Optimizer:
    """Returns an optimizer that follows the net and has taken some steps."""
    optimizer = make(net.parameters())
    gn.attach(optimizer, net)
    train(net, optimizer, range(3))
    return optimizer


@pytest.mark.parametrize(
    "edit", [rewire, swap_one, lambda n: (swap_one(n), n.undo())], ids=["sizes", "equal", "undone"]
)
@pytest.mark.parametrize("kind", ["adam", "adam fused", "sgd momentum", "rmsprop", "adagrad"])
def test_an_optimizer_that_did_not_follow_refuses_to_step(
    net: gn.GrapNet, kind: str, edit: Any
) -> None:
    optimizer = OPTIMIZERS[kind](list(net.parameters()))
    train(net, optimizer, range(2))
    edit(net)
    backward(net)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        with pytest.raises(gn.errors.OptimizerError, match=r"gn\.attach\(optimizer, net\)"):
            optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), before, strict=True))
    train(net, OPTIMIZERS[kind](list(net.parameters())), range(2))  # one made after the edit steps


def test_one_without_state_or_without_moved_coordinates_just_steps(net: gn.GrapNet) -> None:
    plain = SGD(net.parameters(), lr=0.01)
    adam = Adam(net.parameters())
    train(net, plain, range(2))
    rewire(net)
    train(net, plain, range(2))
    train(net, adam, range(2))
    with net.edit() as edit:
        edit.set_owner(net.layers[1], "a")
        edit.set_activation(net.layers[1], "relu")
    train(net, adam, range(2))
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        edit.commit()
    train(net, adam, range(2))  # everything is as it was
    swap_one(gn.GrapNet([5, 4, 4, 3]))
    train(net, adam, range(2))  # another net's edits are another net's


def test_state_that_was_loaded_or_copied_is_known_to_be_old(net: gn.GrapNet) -> None:
    source = Adam(net.parameters())
    train(net, source, range(2))
    loaded = Adam(net.parameters())
    loaded.load_state_dict(source.state_dict())
    twin, copied = copy.deepcopy((net, source))
    swap_one(net)
    swap_one(twin)
    for graph, optimizer in ((net, loaded), (twin, copied)):
        backward(graph)
        with pytest.raises(gn.errors.OptimizerError):
            optimizer.step()
        # Attaching it now does not make the state fit.
        with pytest.raises(gn.errors.OptimizerError):
            gn.attach(optimizer, graph)


def test_a_pickle_goes_on_once_it_is_attached(net: gn.GrapNet) -> None:
    source = attached(net, Adam)
    swap_one(net)
    twin, copied = pickle.loads(pickle.dumps((net, source)))
    alone, ignored = pickle.loads(pickle.dumps((net, source)))
    gn.attach(copied, twin)
    train(net, source, range(2))
    train(twin, copied, range(2))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    backward(alone)
    with pytest.raises(gn.errors.OptimizerError):
        ignored.step()


def test_an_attached_optimizer_takes_a_state_dict_after_an_edit(net: gn.GrapNet) -> None:
    source = attached(net, Adam)
    swap_one(net)
    state = copy.deepcopy(source.state_dict())
    other = Adam(net.parameters())
    gn.attach(other, net)
    other.load_state_dict(state)
    train(net, other, range(2))
    # Without a net to follow, nothing tells whether the state is of this version.
    alone = Adam(net.parameters())
    alone.load_state_dict(state)
    backward(net)
    with pytest.raises(gn.errors.OptimizerError):
        alone.step()


def test_importing_grapnet_changes_no_class_of_torch() -> None:
    program = """
import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

kinds = [Optimizer, AveragedModel, torch.nn.Module, torch.nn.Parameter, torch.Tensor]
before = [dict(vars(kind)) for kind in kinds]
import grapnet

grapnet.GrapNet([2, 2]).snapshot()
assert [dict(vars(kind)) for kind in kinds] == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_attached_optimizer_that_loads_an_older_state_refuses_to_step(
    net: gn.GrapNet,
) -> None:
    optimizer = attached(net, Adam)
    train(net, optimizer, range(2))
    earlier = copy.deepcopy(optimizer.state_dict())
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    later = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(earlier)
    backward(net)
    with pytest.raises(gn.errors.OptimizerError):
        optimizer.step()
    optimizer.load_state_dict(later)
    train(net, optimizer, range(2))


def test_one_that_was_left_behind_goes_on_from_a_file_of_after_the_edit(
    net: gn.GrapNet, tmp_path: Path
) -> None:
    optimizer = attached(net, Adam)
    late = Adam(net.parameters())
    train(net, optimizer, range(2))
    train(net, late, range(2))
    swap_one(net)
    gn.save(tmp_path / "after", net, optimizer=optimizer)
    backward(net)
    with pytest.raises(gn.errors.OptimizerError):
        late.step()
    gn.restore(tmp_path / "after", optimizer=late)
    gn.attach(late, net)
    train(net, late, range(2))


def test_detaching_and_attaching_late(net: gn.GrapNet) -> None:
    optimizer = attached(net, Adam)
    gn.attach(optimizer, net)  # twice is once
    rewire(net)
    train(net, optimizer, range(2))
    gn.detach(optimizer, net)
    swap_one(net)
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(optimizer, net)
    backward(net)
    with pytest.raises(gn.errors.OptimizerError):
        optimizer.step()


def test_attach_refuses_what_it_cannot_serve(net: gn.GrapNet) -> None:
    foreign = Adam(gn.GrapNet([2, 2]).parameters())
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(foreign, net)
    adam = Adam(net.parameters())
    for name in ("newborn", "survivors"):
        with pytest.raises(ValueError, match="drop"):
            gn.attach(adam, net, **{name: "drop"})
    with pytest.raises(TypeError):
        gn.attach(net, adam)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        gn.attach(adam, torch.nn.Linear(2, 2))


def test_attaching_moments_of_another_shape_is_refused(net: gn.GrapNet) -> None:
    optimizer = attached(net, Adam)
    rewire(net)
    fresh = make_net()
    # A fused step would write outside of the moments.
    resumed = Adam(fresh.parameters(), fused=True)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(resumed, fresh)


def test_lbfgs_cannot_follow_and_says_so(net: gn.GrapNet) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    closure = lambda: (backward(net), net(torch.ones(1, 5, dtype=torch.float64)).sum())[1]  # noqa: E731
    optimizer.step(closure)
    with pytest.raises(gn.errors.OptimizerError, match="LBFGS"):
        gn.attach(optimizer, net)
    with net.edit() as edit:  # moves a parameter other than the one its state hangs on
        edit.cut(net.layers[2][0], slots=[0])
        edit.connect(net.layers[2][0], net.layers[3][0])
    with pytest.raises(gn.errors.OptimizerError):
        optimizer.step(closure)


def test_neither_the_net_nor_the_optimizer_keeps_the_other_alive(net: gn.GrapNet) -> None:
    optimizer = attached(net, Adam)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_group_keeps_its_members_and_its_learning_rate() -> None:
    net = make_net()
    groups = [{"params": [p], "lr": 0.001 * n} for n, p in enumerate(net.parameters())]
    optimizer = Adam(groups, eps=0.0)
    gn.attach(optimizer, net, survivors="renew")
    train(net, optimizer, range(2))
    rewire(net)
    for n, (group, parameter) in enumerate(
        zip(optimizer.param_groups, net.parameters(), strict=True)
    ):
        before = parameter.detach().clone()
        assert group["params"][0] is parameter
        group["before"] = before
        group["number"] = n
    train(net, optimizer, [2])
    for group in optimizer.param_groups:
        size = (group["params"][0] - group.pop("before")).detach().abs()
        torch.testing.assert_close(
            size, torch.full_like(size, 0.001 * group["number"]), rtol=1e-6, atol=0.0
        )


def test_a_grad_scaler_goes_on_through_an_edit() -> None:
    ends = []
    for scaled in (False, True):
        net = make_net()
        optimizer = Adam(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        gn.attach(optimizer, net)
        for seed in range(6):
            optimizer.zero_grad()
            scaler.scale(net(batch(seed)).square().sum()).backward()
            scaler.unscale_(optimizer)
            if seed == 3:
                rewire(net)  # between unscaling and stepping
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in net.parameters()])
        assert scaler.get_scale() == (8192.0 if scaled else 1.0)
    # a scale of 2ⁿ rounds nothing
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_parameters_of_an_edited_net_can_be_loaded_by_torch(net: gn.GrapNet) -> None:
    rewire(net)
    file = io.BytesIO()
    torch.save(list(net.parameters()), file)
    file.seek(0)
    for parameter, loaded in zip(net.parameters(), torch.load(file), strict=True):
        assert torch.equal(parameter, loaded)
