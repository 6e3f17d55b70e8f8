"""The names of nets on adopted models: they do what they do there, or do not exist."""

import copy
import pickle

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.spaces import Adopted, Space

INPUT = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A stream that two convolutions of different kernels, and a linear layer, read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Conv2d(8, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 6, 1)
        self.back = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        h = h + self.wide(h)
        h = h + self.back(self.gate(h).relu())
        return self.head(h.mean((2, 3)))


@pytest.fixture
def net() -> Adopted:
    torch.manual_seed(0)
    return gn.adopt(Residual(), INPUT)


@pytest.mark.parametrize(
    "name",
    [
        "bias",
        "default_activation",
        "dropout",
        "frozen_at",
        "frozen_values",
        "is_sensory",
        "parameter",
        "size",
        "values",
        "vector",
    ],
)
def test_a_space_has_no_names_of_the_layers_of_a_net(net: Adopted, name: str) -> None:
    assert hasattr(gn.GrapNet([2, 1]).layers[1], name)
    assert not hasattr(net.spaces[0], name)


def test_nodes_of_a_model_have_no_biases_and_activations_of_their_own(net: Adopted) -> None:
    space = net.space("gate")
    for nodes in (space, space[:2], net.select()):
        for name in ("biases", "activations"):
            with pytest.raises(ValueError):
                getattr(nodes, name)
        with pytest.raises(ValueError):
            nodes.biases = torch.zeros(len(nodes))
    assert not {"biases", "activations"} & {*dir(space)}
    assert space[0].bias is None
    with pytest.raises(ValueError):
        space[0].bias = 1.0
    with pytest.raises(ValueError):
        _ = space[0].activation


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_their_own_spaces(net: Adopted, copied: object) -> None:
    with net.edit(reason="owners, and fewer nodes") as edit:
        edit.set_owner(net.space("gate")[:2], "task")
        edit.remove_nodes(net.space("gate")[4:])
    other = copied(net)  # pyright: ignore[reportCallIssue]
    assert [space.name for space in other.spaces] == [space.name for space in net.spaces]
    for mine, its in zip(net.spaces, other.spaces, strict=True):
        assert isinstance(its, Space)
        assert its.graph is other
        assert its.index == mine.index
        assert torch.equal(its.uid, mine.uid)
        assert its.owners == mine.owners
    other.undo()
    assert (len(net.space("gate")), len(other.space("gate"))) == (4, 6)
    gn.check(other)
