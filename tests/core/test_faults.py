"""Fault injection: a commit that fails anywhere before the swap leaves everything bit-identical."""

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
from tests.fingerprint import fingerprint

from . import worlds
from .worlds import World

# Whatever fails in these fails before there is an edit, or after the swap has begun.
OUTSIDE = {
    "__enter__",
    "__get__",
    "enter",
    "_begin",
    "_open_edit",
    "edit",
    "__init__",
    "leave",
    "_leave",
    "_close_edit",
    "is_running",
    "_end",
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
        code = frame.f_code
        caller = frame.f_back
        name = code.co_name
        self.swapping = code.co_name == SWAP
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


def everything(net: gn.GrapNet, edit: gn.Edit) -> None:
    """Asks for one of every operation."""
    edit.cut(net.layers[0][1], slots=[0])
    edit.remove_nodes(net.layers[2][0])
    new = edit.add_nodes(1, 2, owner="new")
    edit.connect(net.layers[0], new)
    edit.connect(new, net.layers[2][1:], weights="alloc")
    edit.freeze(net.layers[0][2].outgoing())
    edit.unfreeze(net.layers[0][1].outgoing())
    edit.set_owner(net.layers[3], "output")
    edit.set_activation(net.layers[1][2], "relu")
    edit.cut(net.layers[1][1].incoming())
    edit.remove_orphans(fold_bias=True)


def edit_everything(world: World) -> None:
    worlds.edit_net(world, everything)


def undo(world: World) -> None:
    world.net.undo()


OPERATIONS = {
    "edit": worlds.Operation(edit_everything),
    "undo": worlds.Operation(undo, setup=edit_everything),
}
JOINT = ["edit together", "undo together", "redo together", "trial together"]
OPERATIONS |= {name: worlds.OPERATIONS[name] for name in (*JOINT, "replay one commit")}


def make(name: str, folder: Path) -> World:
    """Returns trained nets with everything that follows them, ready for an operation."""
    world = worlds.make_nets(folder, 0)
    world.recorder.disarm()  # it would record the passes of `state`
    world.kept["seed"] = 0
    OPERATIONS[name].setup(world)
    return world


def state(world: World) -> list[Any]:
    found = [fingerprint(net, *world.optimizers) for net in world.nets]
    return [worlds.fingerprint(world), *found]


@pytest.mark.parametrize("name", ["edit", "undo", *JOINT])
def test_a_fault_at_any_call_before_the_swap_changes_nothing(name: str, tmp_path: Path) -> None:
    act = OPERATIONS[name].act
    twin = make(name, tmp_path)
    state(twin)  # runs the nets, as `state(world)` below does, so that both have the same plans
    with Injection() as notes:
        act(twin)
    assert notes.swapping
    # the last call of every function by every file
    last = {(name, file): number for number, (name, file, _) in enumerate(notes.calls)}
    numbers = sorted(last.values())
    wanted = 15 if name in JOINT else 100
    numbers = numbers[:: max(1, len(numbers) // wanted)]
    world = make(name, tmp_path)
    before = state(world)
    for number in numbers:
        with Injection(number) as injection, suppress(Fault):
            act(world)
        assert injection.calls == notes.calls[: number + 1]  # it failed, and where it should
        assert state(world) == before, injection.calls[-1]
    files = {Path(code.co_filename).stem for code in notes.codes}
    assert {"_commit", "_coordinates", "_change", "_optimizers"} <= files
    act(world)  # the same goes through once nothing fails
    assert worlds.fingerprint(world) == worlds.fingerprint(twin)


class Refusal:
    """A follower that refuses commits, of one kind where it is given."""

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind
        self.refuses = True
        self.installed = 0

    def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
        if self.refuses and self.kind in (None, commit.kind):
            raise Fault("follower")

        def install() -> None:
            self.installed += 1

        return install


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "first") for name in OPERATIONS),
        *((name, "copy") for name in OPERATIONS),
        *((name, "second") for name in JOINT),
    ],
)
def test_a_follower_that_refuses_stops_the_commit_for_all(
    name: str, place: str, tmp_path: Path
) -> None:
    world = make(name, tmp_path)
    refusal = Refusal()
    net = world.nets[place == "second"]
    if place == "copy":
        net = world.averaged.module
    net.follow(refusal)
    loss = sum(output.square().sum() for output in world.passes())
    before = state(world)
    with pytest.raises(Fault):
        OPERATIONS[name].act(world)
    assert state(world) == before
    loss.backward()  # the forward pass is not stale
    refusal.refuses = False
    OPERATIONS[name].act(world)
    assert refusal.installed == (2 if name.startswith("trial") else 1)
    world.train()


@pytest.mark.parametrize("name", ["trial: prune and grow", "trial together"])
def test_a_follower_that_refuses_the_end_of_a_trial_does_not_lock_the_nets(
    name: str, tmp_path: Path
) -> None:
    world = make("edit", tmp_path)
    refusal = Refusal("end")
    world.net.follow(refusal)
    versions = [net.version for net in world.nets]
    outputs = worlds.plain(world.passes())
    moments = worlds.plain(world.optimizers[0].state_dict())
    with pytest.raises(Fault):
        worlds.OPERATIONS[name].act(world)
    assert [net.version for net in world.nets] == versions
    assert worlds.plain(world.passes()) == outputs
    assert worlds.plain(world.optimizers[0].state_dict()) == moments
    world.net.unfollow(refusal)
    for net in world.nets:
        gn.check(net)
    edit_everything(world)


def test_an_optimizer_that_cannot_follow_stops_the_commit_for_all(tmp_path: Path) -> None:
    world = make("edit", tmp_path)
    (optimizer,) = world.optimizers
    slots = optimizer.state[world.net.transitions[1].weight]
    slots["odd"] = torch.zeros(2, 3)
    before = state(world)
    with pytest.raises(gn.errors.OptimizerError, match=r"'odd' .*\[2, 3\].*transitions\.1\.weight"):
        edit_everything(world)
    assert state(world) == before
    del slots["odd"]
    edit_everything(world)
