"""Small checkpoint files for the tests of the command line, each a fresh copy in the test's own
folder.

- `checkpoint`: a grown net 6-9-3 of the owners task-0, task-1 and task-2 at version 7: six inputs,
  three hidden nodes an owner, three outputs without owner, 36 relations; three of task-0's frozen,
  three commits by a rule with remarks, a cut and its undo. Saved with undo=True, an optimizer, a
  memory, a generator and a note.
- `earlier_checkpoint`: the same net, saved at version 4, before task-2 was grown.
- `bare_checkpoint`: the same net at version 7 without undo and extras.
- `model_checkpoint`: a model with two grafted nets, "0" (8-6-4) and "2" (4-2), beside a LayerNorm.
- `damaged_checkpoint`: `checkpoint` with one byte of its last tensor turned.
- `missing_checkpoint`: a path at which there is nothing.
- `run`: `run("inspect", path, ...)` runs a command in this process and returns its exit code,
  output and errors.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.cli.main import main
from grapnet.learning import ReservoirMemory


class Ran(NamedTuple):
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def grown_net() -> tuple[gn.GrapNet, gn.GrapNet]:
    """Returns the net of `checkpoint`, and the net as it was before its third owner."""
    torch.manual_seed(0)
    net, earlier = gn.GrapNet([6, 0, 3]), None
    for task in range(3):
        if task == 2:
            earlier = copy.deepcopy(net)
        with net.edit(reason=f"grow task {task}", by="GrowHeads") as edit:
            nodes = edit.add_nodes(1, 3, owner=f"task-{task}")
            edit.connect(net.layers[0][2 * task : 2 * task + 2], nodes)
            edit.connect(nodes, net.layers[2][task : task + 1])
            edit.remark("a task began", task=task)
        if task == 0:
            with net.edit(reason="keep task 0") as edit:
                edit.freeze(net.select(owner="task-0").outgoing())
        if task == 1:
            with net.edit(reason="let task 0 speak too") as edit:
                edit.connect(net.select(owner="task-0"), net.layers[2][1:])
                edit.connect(net.select(owner="task-1"), net.layers[2][2:])
    with net.edit(reason="forget task 1") as edit:
        edit.cut(net.select(owner="task-1").outgoing())
    net.undo()
    assert earlier is not None
    return net, earlier


def model_of_nets() -> nn.Module:
    """Returns a model with two nets inside."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)),
        nn.LayerNorm(4),
        nn.Sequential(nn.Linear(4, 2)),
    )
    nets = gn.graft(model, ["0", "2"])
    with nets["0"].edit(reason="thin out") as edit:
        edit.cut(nets["0"].layers[0].outgoing().smallest(fraction=0.5))
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of every file, written once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    net, earlier = grown_net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    memory = ReservoirMemory(4, seed=0)
    memory.add(torch.zeros(6, 6), torch.arange(6) % 3)
    extras = {
        "optimizer": optimizer,
        "memory": memory,
        "rng": torch.default_generator,
        "note": {"step": 3},
    }
    gn.save(folder / "whole", net, history="full", undo=True, **extras)
    gn.save(folder / "earlier", earlier, history="full", undo=True)
    gn.save(folder / "bare", net, history="full")
    gn.save(folder / "model", model_of_nets())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["damaged"] = files["whole"][:-1] + bytes([files["whole"][-1] ^ 1])
    return files


@pytest.fixture
def checkpoint(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """A grown net of three owners, with everything that a file can hold."""
    return _put(tmp_path / "net.safetensors", saved["whole"])


@pytest.fixture
def earlier_checkpoint(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """The same net before its third owner."""
    return _put(tmp_path / "earlier.safetensors", saved["earlier"])


@pytest.fixture
def bare_checkpoint(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """The same net without undo and extras."""
    return _put(tmp_path / "bare.safetensors", saved["bare"])


@pytest.fixture
def model_checkpoint(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """A model with two nets inside."""
    return _put(tmp_path / "model.safetensors", saved["model"])


@pytest.fixture
def damaged_checkpoint(saved: dict[str, bytes], tmp_path: Path) -> Path:
    """A file whose content is not what was saved."""
    return _put(tmp_path / "damaged.safetensors", saved["damaged"])


@pytest.fixture
def missing_checkpoint(tmp_path: Path) -> Path:
    """A path at which there is nothing."""
    return tmp_path / "missing.safetensors"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command in this process."""

    def run_command(*arguments: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # of the parser
            code = int(end.code or 0)
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return run_command


def _put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
