"""Small files for the tests of the command line, and what runs a command in this process.

`folder` is an empty folder, in which the test runs, with
- net.safetensors: a grown net 6-9-3 of the owners task-0, task-1 and task-2 at version 7, three of
  task-0's relations frozen, with a cut and its undo in the journal; with undo, the full history,
  Adam, a memory, a generator and a note;
- earlier.safetensors: the same net at version 4, before task-2 was grown;
- bare.safetensors: the same net at version 7 with the outline of its history, and nothing else;
- model.safetensors: a model with two nets, "0" (8-6-4) and "2" (4-2), beside a LayerNorm;
- whole.safetensors: an adopted vision transformer at version 5, with nodes and a head removed, half
  of a weight cut, a part frozen and a removal undone; with undo, the full history and Adam;
- first.safetensors: the same model at version 1, with the outline of its history;
- deeper.safetensors: the same model at version 6, with one block more;
- damaged.safetensors: net.safetensors with one bit of its last tensor turned;
- mlp.pt: the state dict of a plain 5-8-3 MLP with ReLU, under the key "model" of a checkpoint;
- pruned.safetensors: the same with half of its weights zero.
"""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import grapnet as gn
from grapnet.cli._main import main
from grapnet.continual import ReservoirMemory
from tests.spaces import zoo


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --renew."""
    parser.addoption("--renew", action="store_true", help="write tests/cli/golden again")


class Ran(NamedTuple):
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def grown_net() -> tuple[gn.GrapNet, gn.GrapNet]:
    """Returns a net of three owners, and the net as it was before its third owner."""
    torch.manual_seed(0)
    net = gn.GrapNet([6, 0, 3])
    earlier = net
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
            with net.edit(reason="let both reach the last output") as edit:
                edit.connect(net.select(owner="task-0"), net.layers[2][1:])
                edit.connect(net.select(owner="task-1"), net.layers[2][2:])
    with net.edit(reason="forget task 1") as edit:
        edit.cut(net.select(owner="task-1").outgoing())
    net.undo()
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


def save_whole_models(folder: Path) -> None:
    """Writes the files of an adopted model."""
    case = zoo.MODELS["vit"]()
    optimizer = torch.optim.Adam(case.model.parameters())
    net = gn.adopt(case.model, *case.inputs, optimizer=optimizer)
    case.call().square().sum().backward()
    optimizer.step()
    with net.edit(reason="a thinner block", by="PruneNodes") as edit:
        edit.remove_nodes(net.space("blocks.0.fc1")[10:])
        edit.remove_nodes(net.space("blocks.0.attn.qkv#2")[1])
    gn.save(folder / "first.safetensors", net)
    with net.edit(reason="half of the other") as edit:
        edit.cut(net.relations("blocks.1.fc2").smallest(fraction=0.5))
    with net.edit(reason="keep what the first has learned") as edit:
        edit.freeze(net.space("blocks.0.fc1")[:4])
        edit.set_owner(net.space("blocks.0.fc1")[:4], "base")
    with net.edit(reason="too thin") as edit:
        edit.remove_nodes(net.space("blocks.1.fc1")[:20])
    net.undo()
    gn.save(folder / "whole.safetensors", net, undo=True, history="full", optimizer=optimizer)
    with net.edit(reason="deeper") as edit:
        edit.insert("blocks", after=0)
    gn.save(folder / "deeper.safetensors", net, undo=True, history="full")


def plain_mlp() -> nn.Sequential:
    """Returns the plain model of mlp.pt."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    """Makes two steps, so that an optimizer has state."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, width)).square().sum().backward()
        optimizer.step()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file, written once."""
    folder = tmp_path_factory.mktemp("files")
    net, earlier = grown_net()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, 6)
    memory = ReservoirMemory(4, seed=0)
    memory.add(torch.zeros(6, 6), torch.arange(6) % 3)
    extras = {
        "optimizer": optimizer,
        "memory": memory,
        "rng": torch.default_generator,
        "note": {"step": 3},
    }
    gn.save(folder / "net.safetensors", net, undo=True, history="full", **extras)
    gn.save(folder / "earlier.safetensors", earlier, undo=True, history="full")
    gn.save(folder / "bare.safetensors", net)
    gn.save(folder / "model.safetensors", model_of_nets())
    save_whole_models(folder)
    content = bytearray((folder / "net.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "damaged.safetensors").write_bytes(content)
    mlp = plain_mlp()
    torch.save({"model": mlp.state_dict(), "epoch": 3}, folder / "mlp.pt")
    prune.l1_unstructured(mlp[0], "weight", 0.5)
    save_file(mlp.state_dict(), folder / "pruned.safetensors")
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of every file, in the working directory of the test."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command in this process: `run("inspect", path)`."""

    def run_command(*arguments: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # of the parser
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run_command
