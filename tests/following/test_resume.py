"""Training that was saved and resumed between edits equals training that was not, averages and
schedule included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn
from tests.checkpoint.files import as_text

from .plain import OPTIMIZERS, make_net, rewire, train

MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.02),
    "sgd momentum": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "rmsprop foreach": OPTIMIZERS["rmsprop foreach"],
    "adagrad": OPTIMIZERS["adagrad"],
    "nadam": OPTIMIZERS["nadam"],
    "asgd": OPTIMIZERS["asgd"],
}


class Run:
    """A net and all that trains it."""

    def __init__(
        self, net: gn.GrapNet, copied: gn.GrapNet | None, make: Callable[[Any], Optimizer]
    ) -> None:
        self.net = net
        self.make = make
        self.optimizer = make(list(net.parameters()))
        self.scheduler = CosineAnnealingLR(self.optimizer, 7)
        self.averaged = AveragedModel(copied or net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def attach(self) -> None:
        gn.attach(self.optimizer, self.net, newborn="mean")
        gn.attach(self.averaged, self.net)

    def train(self, first: int, last: int) -> None:
        for seed in range(first, last):
            train(self.net, self.optimizer, [seed])
            self.scheduler.step()
            self.averaged.update_parameters(self.net)

    def resumed(self, folder: Path, *, undo: bool, copied: bool) -> "Run":
        """Returns the run as another process would have it; the copy comes from a file of its own,
        or from a state.
        """
        extras = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "averaged": self.averaged,
        }
        gn.save(folder / "net", self.net, undo=undo, **extras)
        gn.save(folder / "copy", self.averaged.module, undo=undo)
        run = Run(gn.load(folder / "net"), gn.load(folder / "copy") if copied else None, self.make)
        gn.restore(
            folder / "net", optimizer=run.optimizer, scheduler=run.scheduler, averaged=run.averaged
        )
        run.attach()
        return run

    def contents(self) -> str:
        state = [self.net.state_dict(), self.averaged.state_dict(), self.scheduler.state_dict()]
        return as_text(
            [dict(part) for part in state] + [self.optimizer.state_dict(), self.net.version]
        )


def grow(net: gn.GrapNet) -> None:
    with net.edit(reason="grow", generator=torch.Generator().manual_seed(4)) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=3))
        edit.connect(net.layers[0], edit.add_nodes(1, 2))
        edit.unfreeze(net.layers[2])
        edit.freeze(net.layers[1][:1])


def started(make: Callable[[Any], Optimizer]) -> Run:
    run = Run(make_net(), None, make)
    run.attach()
    run.train(0, 3)
    rewire(run.net)
    run.train(3, 6)
    return run


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("copied", [True, False], ids=["copy's own file", "state of the copy"])
def test_resumed_training_is_bit_identical(tmp_path: Path, kind: str, copied: bool) -> None:
    ends = []
    for interrupted in (False, True):
        run = started(MAKE[kind])
        run = run.resumed(tmp_path, undo=False, copied=copied) if interrupted else run
        run.train(6, 9)
        grow(run.net)
        run = run.resumed(tmp_path, undo=False, copied=copied) if interrupted else run
        run.train(9, 12)
        ends.append(run.contents())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", MAKE)
def test_what_was_cut_returns_after_resuming_as_optimizer_and_copy_had_it(
    tmp_path: Path, kind: str
) -> None:
    ends = []
    for interrupted in (False, True):
        run = started(MAKE[kind])
        run = run.resumed(tmp_path, undo=True, copied=True) if interrupted else run
        for verb in (run.net.undo, run.net.redo, run.net.undo):
            verb()
            run.train(6, 8)
        ends.append(run.contents())
    assert ends[0] == ends[1]


def moments(optimizer: Optimizer, net: gn.GrapNet) -> torch.Tensor:
    return optimizer.state[net.transitions[0].weight]["exp_avg"].view(-1)


@pytest.mark.parametrize("attach_first", [True, False])
def test_two_nets_in_one_optimizer_get_their_own_slots_after_a_resume(
    tmp_path: Path, attach_first: bool
) -> None:
    nets = [make_net(), make_net()]
    optimizer = Adam([p for net in nets for p in net.parameters()])
    for net in nets:
        gn.attach(optimizer, net)
        train(net, optimizer, range(2))
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=2))
    gn.save(tmp_path / "0", nets[0], undo=True)
    gn.save(tmp_path / "1", nets[1], undo=True, optimizer=optimizer)
    again = [gn.load(tmp_path / "0"), gn.load(tmp_path / "1")]
    resumed = Adam([p for net in again for p in net.parameters()])
    if not attach_first:
        gn.restore(tmp_path / "1", optimizer=resumed)
    for net in again:
        gn.attach(resumed, net)
    if attach_first:
        gn.restore(tmp_path / "1", optimizer=resumed)
    for net in (*nets, *again):
        net.undo()
    assert torch.equal(moments(resumed, again[1]), moments(optimizer, nets[1]))
    # The slots of the first net were not in that file.
    assert int((moments(resumed, again[0]) == 0).sum()) == 2


def test_attaching_again_after_a_resume_keeps_what_was_cut_since(tmp_path: Path) -> None:
    net = make_net()
    optimizer = Adam(net.parameters())
    gn.attach(optimizer, net)
    train(net, optimizer, range(2))
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    gn.save(tmp_path / "net", net, undo=True, optimizer=optimizer)
    again = gn.load(tmp_path / "net")
    resumed = Adam(again.parameters())
    gn.restore(tmp_path / "net", optimizer=resumed)
    gn.attach(resumed, again)
    held = moments(resumed, again).clone()
    with again.edit() as edit:
        edit.cut(again.layers[0].outgoing().smallest(count=3))
    gn.attach(resumed, again, newborn="mean")
    again.undo()
    assert torch.equal(moments(resumed, again), held)
