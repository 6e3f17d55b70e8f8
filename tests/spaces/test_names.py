"""The names of nets on adopted models: they do what they do there, or do not exist."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

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
        with pytest.raises(ValueError, match="no biases"):
            _ = nodes.biases
        with pytest.raises(ValueError, match="activations"):
            _ = nodes.activations
        with pytest.raises(ValueError, match="no biases"):
            nodes.biases = torch.zeros(len(nodes))
    assert not {"biases", "activations"} & {*dir(space)}
    assert space[0].bias is None
    with pytest.raises(ValueError, match="no bias"):
        space[0].bias = 1.0
    with pytest.raises(ValueError, match="activations"):
        _ = space[0].activation


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_their_own_spaces(net: Adopted, copied: Callable[[Any], Any]) -> None:
    with net.edit(reason="owners, and fewer nodes") as edit:
        edit.set_owner(net.space("gate")[:2], "task")
        edit.remove_nodes(net.space("gate")[4:])
    other = copied(net)
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


def test_an_edit_of_a_model_has_no_verbs_that_change_the_layers_of_a_net(net: Adopted) -> None:
    verbs = {"insert_layer", "remove_layer", "insert_skip", "remove_skip", "set_activation"}
    assert verbs <= {*dir(gn.GrapNet([2, 1]).edit())}
    edit: Any = net.edit()
    assert not verbs & {*dir(edit)}
    for verb in verbs:
        with pytest.raises(gn.errors.EditError):
            getattr(edit, verb)(1)


def test_an_edit_of_a_model_tells_which_relations_it_assigns(net: Adopted) -> None:
    chosen = net.relations("wide").smallest(count=3) | net.relations("back").smallest(count=2)
    with net.edit(reason="other numbers") as edit:
        assert len(edit.assigned_relations) == 0
        edit.assign(chosen, 0.5)
        assert len(edit.assigned_relations - chosen) == len(chosen - edit.assigned_relations) == 0
    assert set((net.relations("wide") & chosen).weights.flatten().tolist()) == {0.5}


def relations_of(net: Adopted, node: gn.GrapNode, *names: str) -> list[gn.RelationSet]:
    """Returns the relations of a node in some tensors, found among all of the tensor."""
    found = []
    for name in names:
        relations = net.relations(name)
        found.append(relations[relations.parents == node.uid])
    return found


def test_a_node_of_one_tensor_has_its_relations_as_slots(net: Adopted) -> None:
    node = net.space("gate")[2]
    (relations,) = relations_of(net, node, "back")
    assert node.degree == len(node.children) == len(relations) == 8
    assert node.children.uids.tolist() == relations.children.tolist()
    assert torch.equal(node.W_alloc, relations.weights[None])
    chosen = node.outgoing(slots=[0, -1])
    assert chosen.children.tolist() == [relations.children[0], relations.children[-1]]
    with net.edit(reason="two relations") as edit:
        edit.cut(node, slots=[0, -1])
    (left,) = relations_of(net, node, "back")
    assert node.degree == len(left) == 6
    assert torch.equal(node.W_alloc, left.weights[None])
    back: Any = net.model.get_submodule("back").weight
    assert back[:, 2].flatten().nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]
    net.undo()
    assert node.degree == 8


def test_relations_of_several_numbers_are_one_slot_each(net: Adopted) -> None:
    node = net.space("stem:in")[1]
    (relations,) = relations_of(net, node, "stem")
    assert node.W_alloc.shape == (1, 8, 9)
    assert torch.equal(node.W_alloc[0], relations.weights)
    node.W_alloc = torch.arange(72.0)
    stem: Any = net.model.get_submodule("stem").weight
    assert torch.equal(stem[:, 1].reshape(-1), torch.arange(72.0))
    node.W_alloc.square().sum().backward()
    assert torch.equal(stem.grad[:, 1], 2 * stem[:, 1])
    assert stem.grad[:, 0].abs().max() == 0
    with pytest.raises(ValueError, match="W_alloc"):
        node.W_alloc = torch.zeros(8)


def test_a_node_of_several_tensors_has_one_slot_for_each_relation(net: Adopted) -> None:
    node = net.space("stem")[3]
    parts = relations_of(net, node, "wide", "gate", "head")
    names = [weight.name for weight in net.transitions if weight.source == net.space("stem").index]
    assert names == ["wide.weight", "gate.weight", "head.weight"]
    assert node.degree == 8 + 6 + 5
    assert node.children.uids.tolist() == torch.cat([p.children for p in parts]).tolist()
    # "wide" has nine numbers for each of its relations, the others have one
    with pytest.raises(ValueError, match="1 or 9 numbers"):
        _ = node.W_alloc
    with pytest.raises(ValueError, match="1 or 9 numbers"):
        _ = node.outgoing().weights
    assert torch.equal((node.outgoing() & net.relations("wide")).weights, parts[0].weights)
    with net.edit(reason="one of each tensor") as edit:
        edit.cut(node, slots=[7, 8, 18])
    assert [len(p) for p in relations_of(net, node, "wide", "gate", "head")] == [7, 5, 4]
    with net.edit(reason="all of the kernels") as edit:
        edit.cut(node.outgoing() & net.relations("wide"))
    _, gate, head = relations_of(net, node, "wide", "gate", "head")
    assert torch.equal(node.W_alloc, torch.cat([gate.weights, head.weights])[None])
    node.W_alloc = torch.arange(9.0)
    assert head.weights.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_channels_of_groups_have_children() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 2, 1))
    net = gn.adopt(model, INPUT)
    relations = net.relations("1")
    node = net.node(int(relations.parents[0]))
    assert node.degree == 3
    assert torch.equal(node.W_alloc[0], relations[relations.parents == node.uid].weights)
