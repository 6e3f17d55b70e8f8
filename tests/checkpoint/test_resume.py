"""gn.restore: training goes on bit for bit, and an object that does not fit leaves every object as
it was.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Adam, Optimizer, lr_scheduler

import grapnet as gn
from tests.schedulers import SCHEDULERS

from .files import Objects, as_text, contents, edited_net, objects_for, train


def edit(net: gn.GrapNet, objects: Objects, reason: str) -> None:
    with net.edit(reason=reason, generator=objects["generator"]) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=5))
        edit.connect(edit.add_nodes(1, 2, owner=reason), net.layers[2][:3])
        edit.freeze(net.layers[1][:1])


def resumed(
    path: Any, net: gn.GrapNet, objects: Objects, **settings: Any
) -> tuple[gn.GrapNet, Objects]:
    """Saves everything, and returns it as another process would have it."""
    gn.save(path, net, **settings, **objects)
    loaded = gn.load(path)
    fresh = objects_for(loaded)
    assert gn.restore(path, **fresh) == {}
    gn.attach(fresh["optimizer"], loaded)
    return loaded, fresh


def test_resumed_training_is_bit_identical(tmp_path):
    ends = []
    for interrupted in (False, True):
        net = gn.GrapNet(
            [8, 12, 6, 4], activation="tanh", generator=torch.Generator().manual_seed(1)
        )
        objects = objects_for(net)
        gn.attach(objects["optimizer"], net)
        losses = train(net, objects, 5)
        edit(net, objects, "before")
        losses += train(net, objects, 5)
        if interrupted:
            net, objects = resumed(tmp_path / "net", net, objects)
        losses += train(net, objects, 5)
        edit(net, objects, "after")
        if interrupted:
            net, objects = resumed(tmp_path / "net", net, objects)
        losses += train(net, objects, 5)
        ends.append(
            (losses, contents(objects), as_text(dict(net.state_dict())), net.version, net._next_uid)
        )
    assert ends[0] == ends[1]


@pytest.mark.parametrize("attention", [False, True])
def test_what_is_not_trained_stays_untrained(tmp_path, attention):
    ends = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        net, objects = edited_net()
        if attention:
            net.execution.use("attention", transition=1)
            objects = objects_for(net)
        net.requires_grad_(False)
        net.transitions[0].weight.requires_grad_(True)
        net.layers[2].bias.requires_grad_(True)
        train(net, objects, 1)
        if interrupted:
            net, objects = resumed(tmp_path / "run", net, objects)
        train(net, objects, 2)
        flags = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
        ends.append((flags, as_text(dict(net.state_dict())), contents(objects)))
    assert ends[0] == ends[1]
    assert sum(ends[1][0].values()) == 2


def test_undo_after_resuming_brings_the_optimizer_state_back(tmp_path):
    ends = []
    for interrupted in (False, True):
        net, objects = edited_net()
        if interrupted:
            net, objects = resumed(tmp_path / "net", net, objects, undo=True)
        losses = []
        for verb in [net.redo] + [net.undo] * 5 + [net.redo] * 3:
            verb()
            losses += train(net, objects, 1)
        ends.append((losses, contents(objects), as_text(dict(net.state_dict())), net.version))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_single_numbers_of_a_state_keep_their_type(tmp_path, kind):
    net = gn.GrapNet([4, 3, 2], dtype=torch.bfloat16)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    gn.save(tmp_path / "net", net, optimizer=optimizer)
    fresh = getattr(torch.optim, kind)(gn.load(tmp_path / "net").parameters(), lr=0.1)
    gn.restore(tmp_path / "net", optimizer=fresh)
    # torch's own load_state_dict rounds them to the type of the parameter.
    assert as_text(fresh.state_dict()["state"]) == as_text(optimizer.state_dict()["state"])


def rates(optimizer: Optimizer, scheduler: Any, first: int, last: int) -> list[tuple[float, float]]:
    found = []
    for n in range(first, last):
        optimizer.step()
        scheduler.step(
            *([1 + 0.01 * n] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
        )
        found += [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on(tmp_path, kind):
    net = gn.GrapNet([2, 2])
    pairs = []
    for _ in range(2):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        pairs.append((optimizer, SCHEDULERS[kind](optimizer)))
    rates(*pairs[0], 0, 3)
    gn.save(tmp_path / "net", net, optimizer=pairs[0][0], scheduler=pairs[0][1])
    gn.restore(tmp_path / "net", optimizer=pairs[1][0], scheduler=pairs[1][1])
    assert rates(*pairs[0], 3, 20) == rates(*pairs[1], 3, 20)


class Reluctant:
    """An object that takes its state over half-way and then raises."""

    def __init__(self, *, refuses: bool) -> None:
        self.first = torch.zeros(2)
        self.second = 0
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first.copy_(state["first"])
        if self.refuses and state["second"] == 5:
            raise ValueError("not five")
        self.second = state["second"]


MISFITS: dict[str, Callable[[gn.GrapNet], dict[str, Any]]] = {
    "unknown name": lambda net: {"scheduled": objects_for(net)["scheduler"]},
    "wrong shapes": lambda net: {"last": Adam(gn.GrapNet([6, 8, 5, 3]).parameters())},
    "wrong class": lambda net: {"last": torch.optim.SGD(net.parameters(), lr=0.1)},
    "wrong kind": lambda net: {"last": torch.Generator()},
    "plain data": lambda net: {"notes": objects_for(net)["optimizer"]},
    "refuses": lambda net: {"memory": Reluctant(refuses=True)},
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("first", [True, False])
def test_what_does_not_fit_leaves_every_object_as_it_was(tmp_path, misfit, first):
    net, objects = edited_net()
    memory = Reluctant(refuses=False)
    memory.second = 5
    memory.first += 1
    gn.save(
        tmp_path / "net", net, last=objects["optimizer"], memory=memory, notes={"a": 1}, **objects
    )
    train(net, objects, 2)
    before = contents(objects)
    slots = {id(t) for s in objects["optimizer"].state.values() for t in s.values()}
    other = MISFITS[misfit](net)
    held = copy.deepcopy(
        {name: value.state_dict() for name, value in other.items() if hasattr(value, "state_dict")}
    )
    everything = {**objects, **other}
    if first:
        everything = {**other, **objects}
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "net", **everything)
    assert contents(objects) == before
    assert {id(t) for s in objects["optimizer"].state.values() for t in s.values()} == slots
    for name, state in held.items():
        assert as_text(other[name].state_dict()) == as_text(state)


@pytest.mark.parametrize("more", ["saved", "present"])
def test_an_optimizer_of_more_or_fewer_parameters_is_refused(tmp_path, more):
    net = gn.GrapNet([3, 2])
    own = list(net.parameters())
    another = torch.nn.Parameter(torch.ones(7, 5))
    saved = [*own, another] if more == "saved" else own
    present = [*own, another] if more == "present" else own
    gn.save(tmp_path / "net", net, optimizer=Adam(saved))
    optimizer = Adam(present)
    before = as_text(optimizer.state_dict())
    with pytest.raises(gn.errors.CheckpointError, match=r"^extras\.optimizer: .*\[7, 5\]"):
        gn.restore(tmp_path / "net", optimizer=optimizer)
    assert as_text(optimizer.state_dict()) == before


def rewired() -> tuple[gn.GrapNet, Objects]:
    """Returns a net that was trained and then edited, and an optimizer that has not followed."""
    net = gn.GrapNet.from_relations([3, 2], [([0, 1, 2], [0, 1, 0])])
    objects = objects_for(net)
    train(net, objects, 1)
    with net.edit() as edit:  # as many relations as before, and not the same
        edit.cut(net.layers[0][0].outgoing())
        edit.connect(net.layers[0][0], net.layers[1][1])
    return net, objects


def test_an_optimizer_that_has_not_followed_is_not_saved(tmp_path):
    net, objects = rewired()
    with pytest.raises(gn.errors.OptimizerError, match=r"gn\.attach"):
        gn.save(tmp_path / "net", net, **objects)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_undo_leaves_what_the_session_keeps_for_it(tmp_path):
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2])
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in net.parameters()}
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=5))
    gn.save(tmp_path / "net", net, optimizer=optimizer)
    gn.restore(tmp_path / "net", optimizer=optimizer)
    net.undo()
    assert all(torch.equal(optimizer.state[p]["exp_avg"], moment) for p, moment in moments.items())


ALTERATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no rate": lambda state: state["param_groups"][0].pop("lr"),
    "no betas": lambda state: state["param_groups"][0].pop("betas"),
    "another length": lambda state: state["state"][0].update(exp_avg=torch.zeros(13)),
    "one number": lambda state: state["state"][0].update(exp_avg=torch.zeros(1)),
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_state_that_does_not_fit_the_optimizer_is_not_restored(tmp_path, monkeypatch, alteration):
    net = gn.GrapNet([4, 3, 2])
    optimizer = Adam(net.parameters())
    net(torch.ones(5, 4)).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    ALTERATIONS[alteration](state)
    monkeypatch.setattr(optimizer, "state_dict", lambda: state)
    gn.save(tmp_path / "net", net, optimizer=optimizer)
    fresh = Adam(net.parameters())
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "net", optimizer=fresh)
    assert fresh.state == {}
