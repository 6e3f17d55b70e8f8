"""What tests of edits from the shell share: the files of a folder, the state of optimizers, and a
little training.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import grapnet as gn


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_optimizer(path: Path) -> tuple[gn.GrapNet, dict]:
    """Returns the net of a file and the state of its optimizer by the names of Parameters."""
    net = gn.load(path)
    optimizer = torch.optim.Adam(net.parameters())
    gn.restore(path, optimizer=optimizer)
    return net, {name: optimizer.state[p] for name, p in net.named_parameters()}


def assert_same_states(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for name, state in mine.items():
        assert state.keys() == theirs[name].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name][key])), (
                name,
                key,
            )


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(5, width)).square().sum().backward()
        optimizer.step()


def values(net: gn.GrapNet) -> list[Tensor]:
    return [parameter.detach() for parameter in net.parameters()]
