"""Edits that use little memory: the same results, and a lower peak."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet.spaces import Adopted
from tests.spaces import oracle

WIDTH = 2048
Memory = Literal["normal", "low"]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def built(width: int, blocks: int) -> tuple[nn.Module, torch.optim.Adam, torch.Tensor]:
    torch.manual_seed(0)
    parts = [Block(width, width) for _ in range(blocks)]
    model = nn.Sequential(nn.Linear(8, width), *parts, nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2, 8)
    step(model, optimizer, x)
    return model, optimizer, x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_edit_with_little_memory_does_the_same() -> None:
    found = []
    for memory in ("normal", "low"):
        model, optimizer, x = built(700, 2)
        averaged = AveragedModel(model)
        net = gn.adopt(model, x, optimizer=optimizer)
        gn.attach(averaged, net)
        averaged.update_parameters(model)
        before = oracle.snapshot(model, optimizer)
        with net.edit(memory=memory) as edit:
            edit.remove_nodes(net.space("0")[:70])
            edit.cut(net.relations("1.up").smallest(fraction=0.5))
        net.undo()
        assert oracle.same(before, oracle.snapshot(model, optimizer)) == []
        net.redo()
        step(model, optimizer, x)
        pictures = [copy.deepcopy(model.state_dict()), copy.deepcopy(averaged.state_dict())]
        pictures.append(copy.deepcopy(optimizer.state_dict()["state"]))
        found.append(pictures)
        before = oracle.snapshot(model, optimizer)
        with net.edit(trial=True, memory=memory) as edit:
            edit.remove_nodes(net.space("0")[:70])
            edit.commit()
        assert oracle.same(before, oracle.snapshot(model, optimizer)) == []
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_another_amount_of_memory_is_refused() -> None:
    model, _, x = built(16, 1)
    net = gn.adopt(model, x)
    with pytest.raises(ValueError, match="low"):
        net.edit(memory="little")  # pyright: ignore[reportArgumentType]


class Peak:
    """The largest memory of the process that no file holds, while a block runs."""

    def __init__(self) -> None:
        self.start = anonymous()
        self.most = self.start
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.most = max(self.most, anonymous())


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon")


def taken_with_adam(memory: Memory) -> float:
    """Returns the memory that an edit takes at most, in weights and state of Adam."""
    model, optimizer, x = built(WIDTH, 4)
    return taken(gn.adopt(model, x, optimizer=optimizer), memory, copies=3)


def taken_with_an_average(memory: Memory) -> float:
    """Returns the memory that an edit takes at most, in weights and their averages."""
    model, _, x = built(WIDTH, 4)
    averaged = AveragedModel(model)
    net = gn.adopt(model, x)
    gn.attach(averaged, net)
    return taken(net, memory, copies=2)


def taken(net: Adopted, memory: Memory, *, copies: int) -> float:
    stream = net.space("0")
    stream.prove()
    size = copies * sum(p.numel() * p.element_size() for p in net.model.parameters())
    with Peak() as peak, net.edit(memory=memory) as edit:
        edit.remove_nodes(stream[: WIDTH // 10])
    return (size + peak.most - peak.start) / size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the memory")
@pytest.mark.parametrize("measure", ["taken_with_adam", "taken_with_an_average"])
def test_an_edit_with_little_memory_takes_little(measure: str) -> None:
    # Every tensor has memory of its own, which goes back to the system with it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    program = f"from tests.spaces.test_memory import {measure} as m; print(m('normal'), m('low'))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    normal, low = map(float, done.stdout.split())
    assert low < 1.3
    assert 1.7 < normal < 2.1
