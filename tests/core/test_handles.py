"""Handles: nodes by permanent uid, their live views, and what they say once the node is gone."""

import copy

import numpy as np
import pytest
import torch

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
    node = net.layers[0][2]
    before = net.layers[0][2].W_alloc.detach().clone()
    with net.edit() as edit:
        edit.freeze(node.outgoing(slots=[1]))
        edit.freeze(net.layers[0][0].outgoing(slots=[0]))
    assert torch.equal(node.W_alloc, before)
    (node.W_alloc * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert node.outgoing().gradients.tolist() == [1, 0, 3]
    assert node.outgoing().frozen.tolist() == [False, True, False]


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


def test_wrong_numbers_of_weights_and_biases_are_refused(net: gn.GrapNet) -> None:
    before = net.transitions[0].weight.detach().clone()
    for wrong in (torch.zeros(2), torch.zeros(1, 4), torch.zeros(1, 1, 3), 0.0):
        with pytest.raises(ValueError, match=r"\[1, 3\]"):
            net.layers[0][2].W_alloc = wrong
    assert torch.equal(net.transitions[0].weight, before)
    with pytest.raises(ValueError, match=r"3.*2"):
        net.layers[1].biases = torch.zeros(2)
    with pytest.raises(ValueError, match=r"6.*2"):
        net.layers[0].outgoing().weights = torch.zeros(2)
    with pytest.raises(ValueError, match="sensory"):
        net.layers[0][0].bias = 1.0
    with pytest.raises(ValueError, match="sensory"):
        _ = net.layers[0].biases
    assert net.layers[0][0].bias is None


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
    with pytest.raises(gn.errors.StaleNodeError):
        net.node(9)


def test_a_stale_handle_names_commit_reason_and_versions(net: gn.GrapNet) -> None:
    node = net.layers[1][1]
    kept = net.layers[1][:2]
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
        with pytest.raises(gn.errors.StaleNodeError, match=words):
            read()
    assert "removed" in repr(node)
    with pytest.raises(gn.errors.StaleNodeError, match=r"999.*version 2"):
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


def test_a_uid_that_nothing_has_is_not_found_however_large_it_is() -> None:
    net = gn.GrapNet([2, 2])
    assert [net._find(uid) for uid in (3, 4, -1, 2**70)] == [(1, 1), None, None, None]
