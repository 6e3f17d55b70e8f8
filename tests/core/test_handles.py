"""Handles: nodes by permanent uid, their live views, and what they say once the node is gone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    """4 → 3 → 2 with children out of row order and one node without children."""
    relations = [([0, 0, 1, 2, 2, 2], [2, 0, 1, 1, 0, 2]), ([0, 1, 1, 2], [1, 1, 0, 0])]
    return gn.GrapNet.from_relations([4, 3, 2], relations, dtype=torch.float64)


def uids(nodes: object) -> list[int]:
    return [node.uid for node in nodes]


def test_children_stand_in_slot_order_and_parents_in_row_order(net: gn.GrapNet) -> None:
    node = net.layers[0][2]
    assert uids(node.children) == [5, 4, 6]
    assert node.children.uids.tolist() == [5, 4, 6]
    assert uids(net.layers[1][0].parents) == [0, 2]
    assert (len(node.children), node.degree, len(net.layers[0][3].children)) == (3, 3, 0)
    assert len(net.layers[0][0].parents) == 0
    assert len(net.layers[2][0].children) == 0
    assert net.layers[1][1] in node.children
    assert net.layers[1][1] not in net.layers[0][3].children
    assert node.children[-1] == net.layers[1][2]
    assert node.children[1:] == [net.layers[1][0], net.layers[1][2]]
    with pytest.raises(IndexError):
        node.children[3]


def test_slot_k_of_children_is_slot_k_of_w_alloc(net: gn.GrapNet) -> None:
    net.layers[0][2].W_alloc = torch.tensor([[10.0, 20.0, 30.0]])
    x = torch.zeros(1, 4, dtype=torch.float64)
    x[0, 2] = 1
    linear = gn.GrapNet.from_relations(
        [4, 3], [([2, 2, 2], [1, 0, 2], [10.0, 20.0, 30.0])], biases=[torch.zeros(3)]
    )
    assert linear(x.float()).tolist() == [[20.0, 10.0, 30.0]]
    for child, weight in zip(net.layers[0][2].children, net.layers[0][2].W_alloc[0], strict=True):
        assert net.layers[0][2].outgoing(to=child).weights.item() == weight.item()


def test_w_alloc_has_one_row_is_live_and_differentiable(net: gn.GrapNet) -> None:
    node = net.layers[0][2]
    assert node.W_alloc.shape == (1, 3)
    assert net.layers[0][3].W_alloc.shape == (1, 0)
    assert net.layers[2][0].W_alloc.shape == (1, 0)
    held = node.W_alloc
    with torch.no_grad():
        net.transitions[0].weight.add_(1)
    assert torch.equal(held, node.W_alloc)  # a view of the Parameter, not a copy
    (node.W_alloc * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert net.transitions[0].weight.grad.flatten().tolist() == [0, 0, 0, 1, 2, 3]
    assert node.outgoing().gradients.tolist() == [1, 2, 3]


def test_w_alloc_stays_live_and_differentiable_with_frozen_slots(net: gn.GrapNet) -> None:
    node, before = net.layers[0][2], net.layers[0][2].W_alloc.detach().clone()
    with net.edit() as edit:
        edit.freeze(node.outgoing(slots=[1]))
        edit.freeze(net.layers[0][0].outgoing(slots=[0]))
    assert torch.equal(node.W_alloc, before)
    (node.W_alloc * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert node.outgoing().gradients.tolist() == [1, 0, 3]
    assert node.outgoing().frozen.tolist() == [False, True, False]


def test_assignment_writes_through(net: gn.GrapNet) -> None:
    node = net.layers[0][2]
    others = [other.W_alloc.detach().clone() for other in net.layers[0] if other != node]
    node.W_alloc = torch.tensor([1, 2, 3])
    assert node.W_alloc.tolist() == [[1, 2, 3]]
    node.W_alloc = [[4.0, 5.0, 6.0]]
    node.outgoing(slots=[-1]).weights = 7
    assert net.transitions[0].weight.flatten()[3:].tolist() == [4, 5, 7]
    assert all(
        torch.equal(o.W_alloc, w)
        for o, w in zip([o for o in net.layers[0] if o != node], others, strict=True)
    )
    child = net.layers[1][1]
    child.bias = 2.5
    assert (child.bias.item(), net.layers[1].bias[1].item(), child.bias.shape) == (2.5, 2.5, ())
    net.layers[1][1:].biases = torch.tensor([8.0, 9.0])
    net.layers[2].biases = 1.0
    assert net.layers[1].biases[1:].tolist() == [8, 9]
    assert net.layers[2].biases.tolist() == [1, 1]


def test_sets_keep_the_order_they_were_given_in(net: gn.GrapNet) -> None:
    net.layers[1][[2, 0]].biases = torch.tensor([1.0, 2.0])
    assert net.layers[1].biases[[0, 2]].tolist() == [2, 1]
    assert net.layers[1][[2, 0]].biases.tolist() == [1, 2]
    with net.edit() as edit:
        edit.freeze(net.layers[1][1])
        edit.connect([3, 1], [6, 4], weights=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert net.layers[1][[1, 0]].frozen.tolist() == [True, False]
    assert (net.node(3).children.uids.tolist(), net.node(3).W_alloc.tolist()) == ([6, 4], [[1, 2]])
    assert (net.node(1).children.uids.tolist(), net.node(1).W_alloc[0, 1:].tolist()) == (
        [5, 6, 4],
        [3, 4],
    )


def test_a_parameter_can_be_assigned_like_any_tensor(net: gn.GrapNet) -> None:
    bias = nn.Linear(2, 3, dtype=torch.float64).bias
    net.layers[1].biases = bias
    assert torch.equal(net.layers[1].biases, bias)
    bias.data.zero_()
    assert not torch.equal(net.layers[1].biases, bias)  # copied, not shared
    assert len(list(net.parameters())) == 4


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2), torch.zeros(1, 4), torch.zeros(1, 1, 3), 0.0], ids=repr
)
def test_a_wrong_number_of_weights_is_refused(net: gn.GrapNet, wrong: object) -> None:
    before = net.transitions[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        net.layers[0][2].W_alloc = wrong
    assert torch.equal(net.transitions[0].weight, before)


def test_wrong_numbers_of_biases_and_relation_weights_name_both_counts(net: gn.GrapNet) -> None:
    with pytest.raises(ValueError, match=r"3.*2"):
        net.layers[1].biases = torch.zeros(2)
    with pytest.raises(ValueError, match=r"6.*2"):
        net.layers[0].outgoing().weights = torch.zeros(2)
    with pytest.raises(ValueError, match="sensory"):
        net.layers[0][0].bias = 1.0
    with pytest.raises(ValueError, match="sensory"):
        _ = net.layers[0].biases
    assert net.layers[0][0].bias is None


def test_assigning_to_a_frozen_coordinate_raises_and_writes_nothing(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.freeze(net.layers[0][2].outgoing(slots=[1]))
        edit.freeze(net.layers[1][0].outgoing())
        edit.freeze(net.select(layer=[1, 2])[[0, 3]], incoming=False, outgoing=False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(gn.FrozenError, match="1 of the 3"):
        net.layers[0][2].W_alloc = torch.zeros(1, 3)
    with pytest.raises(gn.FrozenError):  # what comes first is free, and must stay too
        (net.layers[0][0].outgoing() | net.layers[1].outgoing()).weights = 0.0
    with pytest.raises(gn.FrozenError):
        (net.layers[1][1:] | net.layers[2]).biases = 0.0
    with pytest.raises(gn.FrozenError):
        net.layers[1][0].bias = 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    net.layers[0][2].outgoing(slots=[0, 2]).weights = 5.0
    net.layers[1][1].bias = 5.0
    assert net.layers[0][2].W_alloc[0, ::2].tolist() == [5, 5]


def test_nodes_compare_and_hash_by_uid_and_net(net: gn.GrapNet) -> None:
    other = copy.deepcopy(net)
    assert net.layers[1][0] == net.node(4) == next(iter(net.layers[1]))
    assert len({net.layers[1][0], net.node(4), net.layers[1][1]}) == 2
    assert net.layers[1][0] != other.layers[1][0]
    assert net.layers[1][0] != 4
    assert net.layers[1][0] in net.layers[1]
    assert net.layers[1][0] in net.layers[1][:1]
    assert net.layers[1][0] not in net.layers[1][1:]
    assert other.layers[1][0] not in net.layers[1]
    assert other.layers[1][0] not in net.layers[0][0].children


def test_handles_stay_valid_while_rows_move(net: gn.GrapNet) -> None:
    last, weights = net.layers[1][2], net.layers[1][2].W_alloc.detach().clone()
    last.bias = 3.25
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][0])
        new = edit.add_nodes(1, 2)
        edit.connect(new, net.layers[2])
    assert (last.uid, last.layer, last.row, last.bias.item()) == (6, 1, 1, 3.25)
    assert torch.equal(last.W_alloc, weights)
    assert net.layers[1].uids.tolist() == [5, 6, 9, 10]
    assert uids(new) == [9, 10]


def test_uids_are_never_used_again(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.remove_nodes(net.layers[2][1], interface=True)
    with net.edit() as edit:
        new = edit.add_nodes(2, 1)
    assert uids(new) == [9]
    net.undo()
    with net.edit() as edit:
        again = edit.add_nodes(2, 1)
    assert uids(again) == [10]
    with pytest.raises(gn.StaleNodeError):
        net.node(9)


def test_a_stale_handle_names_commit_reason_and_versions(net: gn.GrapNet) -> None:
    node, kept = net.layers[1][1], net.layers[1][:2]
    with net.edit(reason="prune weakest") as edit:
        edit.remove_nodes(node)
    with net.edit() as edit:
        edit.set_owner(net.layers[0], "a")
    words = (
        r"node 5 of layer 1 was removed by commit 1 \('prune weakest'\); the graph is at version 2"
    )
    for read in (
        lambda: node.W_alloc,
        lambda: node.children[0],
        lambda: node.row,
        lambda: node.frozen,
        kept.outgoing,
    ):
        with pytest.raises(gn.StaleNodeError, match=words):
            read()
    assert "removed" in repr(node)
    with pytest.raises(gn.StaleNodeError, match=r"999.*version 2"):
        net.node(999)
    net.undo()
    net.undo()
    assert (node.row, len(kept.outgoing())) == (1, 3)  # the handle names the same node again


def test_a_layer_and_its_slices_are_node_sets(net: gn.GrapNet) -> None:
    layer = net.layers[1]
    assert isinstance(layer, gn.NodeSet)
    assert (layer.index, len(layer), len(layer[1:]), len(layer[[]])) == (1, 3, 2, 0)
    assert uids(layer[[2, 0]]) == [6, 4]
    assert uids(layer[np.array([1])]) == uids(layer[torch.tensor([False, True, False])]) == [5]
    assert layer[-1] == layer[np.int64(2)] == net.node(6)
    assert uids(net.select(layer=[0, 1])[2:6]) == [2, 3, 4, 5]
    for wrong in (3, -4, [7]):
        with pytest.raises(IndexError):
            layer[wrong]
    with net.edit() as edit:
        edit.add_nodes(1, 1)
    assert len(layer) == 4  # the layer is live, and the same object
    assert layer is net.layers[1]


def test_labels_and_frozen_bits_of_nodes(net: gn.GrapNet) -> None:
    node = net.layers[1][1]
    assert (node.activation, node.owner, node.frozen) == ("relu", None, False)
    assert (net.layers[0][0].activation, net.layers[2][0].activation) == ("identity", "identity")
    with net.edit() as edit:
        edit.set_owner(node, "task-0")
        edit.set_activation(node, "tanh")
        edit.freeze(node)
    assert (node.activation, node.owner, node.frozen) == ("tanh", "task-0", True)
    assert net.layers[1].frozen.tolist() == [False, True, False]
    assert (net.layers[1].owners, net.layers[1].activations[1]) == ([None, "task-0", None], "tanh")
    with net.edit() as edit:
        edit.unfreeze(node, incoming=False, outgoing=False)
    assert not node.frozen
    assert node.incoming().frozen.all()
    assert node.outgoing().frozen.all()
    assert not net.layers[0][3].frozen  # it owns nothing that could be frozen


def test_a_uid_that_nothing_has_is_not_found_however_large_it_is() -> None:
    net = gn.GrapNet([2, 2])
    assert [net.find(uid) for uid in (3, 4, -1, 2**70)] == [(1, 1), None, None, None]
