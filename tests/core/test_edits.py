"""Edits: every verb, what conflicting operations mean, orphans, and the transaction around them."""

from collections.abc import Callable
from itertools import permutations
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 3, 3, 2], activation="gelu", dtype=torch.float64)


def contents(net: gn.GrapNet) -> list[Any]:
    """Returns all there is to see of a graph, node by node."""
    found: list[Any] = []
    for n in net.select():
        found.append(
            (
                n.uid,
                n.layer,
                n.row,
                n.owner,
                n.activation,
                n.frozen,
                None if n.bias is None else n.bias.item(),
            )
        )
        found.append((n.children.uids.tolist(), n.W_alloc.tolist(), n.outgoing().frozen.tolist()))
    return found


def test_add_and_connect_put_newborns_at_the_end(net: gn.GrapNet) -> None:
    before = [node.children.uids.tolist() for node in net.layers[0]]
    with net.edit() as edit:
        new = edit.add_nodes(1, 2, owner="x", activation="tanh", bias=torch.tensor([1.0, 2.0]))
        edit.connect(net.layers[0], new, weights=torch.arange(8).reshape(4, 2))
        edit.connect(new, net.layers[2][[2, 0]], pairs="aligned", weights=0.5)
    assert [node.children.uids.tolist() for node in net.layers[0]] == [
        [*old, 12, 13] for old in before
    ]
    assert [node.W_alloc[0, 3:].tolist() for node in net.layers[0]] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert [(n.children.uids.tolist(), n.W_alloc.tolist()) for n in new] == [
        ([9], [[0.5]]),
        ([7], [[0.5]]),
    ]
    assert (new.owners, new.activations, new.biases.tolist()) == (
        ["x", "x"],
        ["tanh", "tanh"],
        [1, 2],
    )
    gn.check(net)


def test_node_removal_takes_its_relations_and_nothing_else(net: gn.GrapNet) -> None:
    node, others = net.layers[1][1], [n.uid for n in net.select() if n != net.layers[1][1]]
    with net.edit() as edit:
        edit.remove_nodes(node)
    assert [n.uid for n in net.select()] == others
    assert all(n.children.uids.tolist() == [4, 6] for n in net.layers[0])
    assert net.count().relations == 4 * 2 + 2 * 3 + 3 * 2
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[1].outgoing())  # cutting all relations removes no node
    assert net.sizes == [4, 2, 3, 2]
    gn.check(net)


@pytest.mark.parametrize("layer", [0, -1])
def test_removing_interface_nodes_must_be_said(net: gn.GrapNet, layer: int) -> None:
    with pytest.raises(gn.EditError, match="interface=True"), net.edit() as edit:
        edit.remove_nodes(net.layers[layer][0])
    assert net.version == 0
    with net.edit() as edit:
        edit.remove_nodes(net.layers[layer][0], interface=True)
    assert net(torch.ones(5, net.sizes[0], dtype=torch.float64)).shape == (5, net.sizes[-1])
    assert (net.sizes[0], net.sizes[-1]) == ((3, 2) if layer == 0 else (4, 1))


def test_freezing_a_node_is_its_bias_and_both_sides_unless_left_out(net: gn.GrapNet) -> None:
    node = net.layers[1][1]
    with net.edit() as edit:
        edit.freeze(node, outgoing=False)
    assert (node.incoming().frozen.all(), node.outgoing().frozen.any(), node.frozen) == (
        True,
        False,
        False,
    )
    assert net.count().frozen == 4 + 1
    with net.edit() as edit:
        edit.freeze(node)
    assert (net.count().frozen, node.frozen, net.count().trainable) == (4 + 1 + 3, True, 27 + 8 - 8)
    with net.edit() as edit:
        edit.unfreeze(node, bias=False)
    assert net.count().frozen == 1
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing())
        edit.freeze(net.layers[0])  # the same again
    assert net.count().frozen == 1 + 12


def test_cut_twice_is_once(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[1, 1, -2])
        edit.cut(net.layers[0][0].outgoing(slots=[1]))
        edit.cut(net.layers[1][1].incoming(of=net.layers[0][0]))
    assert (net.count().relations, net.layers[0][0].children.uids.tolist()) == (26, [4, 6])


@pytest.mark.parametrize("reverse", [False, True])
def test_cut_beats_freeze_and_freeze_beats_unfreeze(net: gn.GrapNet, reverse: bool) -> None:
    with net.edit() as edit:
        edit.freeze(net.layers[0][0].outgoing(slots=[0]))
    row = net.layers[0][0].outgoing()
    with net.edit() as edit:
        steps: list[Callable[[], None]] = [
            lambda: edit.cut(row[[1]]),
            lambda: edit.freeze(row[[0, 1, 2]]),
            lambda: edit.unfreeze(row),
        ]
        for step in reversed(steps) if reverse else steps:
            step()
    assert net.layers[0][0].children.uids.tolist() == [4, 6]
    assert net.layers[0][0].outgoing().frozen.tolist() == [True, True]
    assert net.count().frozen == 2


def test_connecting_a_pair_that_the_edit_cuts_makes_a_newborn(net: gn.GrapNet) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(torch.randn(6, 4, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    with net.edit() as edit:
        edit.freeze(net.layers[0][1].outgoing(slots=[0]))
    with net.edit() as edit:
        edit.connect(net.layers[0][:2], net.layers[1][0], weights=9.0)
        edit.cut(net.layers[0][:2].outgoing(to=net.layers[1][0]))
    for node in net.layers[0][:2]:
        assert (node.children.uids.tolist(), node.W_alloc[0, 2].item()) == ([5, 6, 4], 9)
        assert node.outgoing().gradients[2] == 0
        assert not node.outgoing().frozen.any()
    moments = optimizer.state[net.transitions[0].weight]["exp_avg"].flatten()
    assert moments[[2, 5]].tolist() == [0, 0]
    assert (moments[[0, 1, 3, 4]] != 0).all()


def test_reads_inside_an_edit_mean_the_graph_at_its_beginning(net: gn.GrapNet) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    before, output, node = contents(net), net(x).detach(), net.layers[0][0]
    with net.edit() as edit:
        edit.cut(node, slots=[0])
        edit.cut(node, slots=[0])  # the same slot, not the next one
        edit.remove_nodes(net.layers[1][2])
        edit.add_nodes(2, 4)
        assert contents(net) == before
        assert torch.equal(net(x), output)
        edit.cut(node, slots=[-1])
    assert node.children.uids.tolist() == [5]


def test_the_order_of_operations_does_not_matter(net: gn.GrapNet) -> None:
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    results = []
    for order in Random(0).sample(list(permutations(range(6))), 60):
        net.load_state_dict(start)
        with net.edit() as edit:
            steps: list[Callable[[], None]] = [
                lambda: edit.cut(net.layers[0][0], slots=[0, 1]),
                lambda: edit.connect(net.layers[0][0], net.layers[1][0], weights=7.0),
                lambda: edit.freeze(net.layers[1][1]),
                lambda: edit.unfreeze(net.layers[1]),
                lambda: edit.remove_nodes(net.layers[2][0]),
                lambda: edit.set_owner(net.layers[1], "a"),
            ]
            for number in order:
                steps[number]()
        results.append(contents(net))
        net.undo()
    assert all(result == results[0] for result in results)
    assert results[0] != contents(net)


@pytest.mark.parametrize("fan_in", [100, 400])
def test_linear_draws_what_nn_linear_of_the_resulting_fan_in_draws(fan_in: int) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([450, 1, 1])
    with net.edit() as edit:
        new = edit.add_nodes(1, 60)
        edit.connect(net.layers[0][:fan_in], new)
    _check_uniform(new.incoming().weights, fan_in**-0.5)
    assert new.biases.abs().max() <= fan_in**-0.5
    assert new.biases.std().item() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.35)
    with net.edit() as edit:  # survivors count, what the edit cuts does not
        edit.cut(net.layers[0][:50].outgoing(to=new))
        edit.connect(net.layers[0][fan_in:], new)
    _check_uniform(net.layers[0][fan_in:].outgoing(to=new).weights, 400**-0.5)


def test_alloc_draws_by_what_its_owner_gains() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([60, 500, 1], density=0.0)
    with net.edit() as edit:
        few = edit.add_nodes(0, 40)
        edit.connect(few, net.layers[1][:100], weights="alloc")
        edit.connect(few, net.layers[1][100:400], weights="alloc")
        edit.connect(net.layers[0][:1], net.layers[1], weights="alloc")
    _check_uniform(few.outgoing().weights, 400**-0.5)
    assert net.layers[0][0].W_alloc.abs().max() <= 500**-0.5
    with net.edit() as edit:
        new = edit.add_nodes(1, 3, bias="alloc")
        edit.connect(net.layers[0][:1], new, weights="zero")
    assert new.biases.tolist() == [0, 0, 0]
    assert net.layers[0][0].W_alloc[0, -3:].tolist() == [0, 0, 0]


def test_a_generator_decides_every_newborn_value() -> None:
    values = []
    for _ in range(2):
        net = gn.GrapNet([5, 2, 2], generator=torch.Generator().manual_seed(1))
        state = torch.get_rng_state()
        with net.edit(generator=torch.Generator().manual_seed(2)) as edit:
            new = edit.add_nodes(1, 4)
            edit.connect(net.layers[0], new)
            edit.connect(new, net.layers[2], weights="alloc")
        assert torch.equal(torch.get_rng_state(), state)
        values.append((new.biases, new.incoming().weights, new.outgoing().weights))
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    assert len(values[0][0].unique()) == 4


def test_a_value_of_zero_takes_no_random_number() -> None:
    net = gn.GrapNet([5, 2, 2])
    generator = torch.Generator().manual_seed(2)
    state = generator.get_state()
    with net.edit(generator=generator) as edit:
        new = edit.add_nodes(1, 4, bias="zero")
        edit.connect(net.layers[0], new, weights="zero")
    assert torch.equal(generator.get_state(), state)
    assert not new.biases.any()
    assert not new.incoming().weights.any()


@pytest.mark.parametrize("hidden", [240, 6000])
def test_an_empty_layer_grows_to_any_size(hidden: int) -> None:
    net = gn.GrapNet([49, 0, 10])
    assert torch.equal(net(torch.ones(2, 49)), net.layers[2].biases.expand(2, 10))
    weights = torch.arange(49.0 * hidden).reshape(49, hidden)
    with net.edit() as edit:
        new = edit.add_nodes(1, hidden)
        edit.connect(net.layers[0], new, weights=weights)
        edit.connect(new, net.layers[2])
    gn.check(net)
    assert torch.equal(net.layers[0].outgoing().weights.view(49, hidden), weights)
    with net.edit(allow_dead=True) as edit:
        edit.remove_nodes(net.layers[1])
    assert net.sizes == [49, 0, 10]
    net.undo()
    assert torch.equal(net.layers[0].outgoing().weights.view(49, hidden), weights)


def test_orphans_go_with_what_they_leave_without_parents(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1].incoming() - net.layers[1][0].incoming())
        edit.cut(net.layers[2][2].incoming(of=net.layers[1][0]))
    assert net.sizes == [4, 3, 3, 2]  # without parents, and still there: three different verbs
    with net.edit() as edit:
        new = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], new[:1])
        edit.connect(new, net.layers[2][0])
        edit.remove_orphans()
    assert [n.uid for n in net.select()] == [0, 1, 2, 3, 4, 12, 7, 8, 10, 11]
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[2].outgoing())  # no children is no reason
        edit.remove_orphans()
    assert net.sizes == [4, 2, 2, 2]
    gn.check(net)


@pytest.mark.parametrize("cascade", [False, True])
def test_fold_bias_keeps_the_function(net: gn.GrapNet, cascade: bool) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1][:2].incoming())
        edit.set_activation(net.layers[1][0], "softplus")
        if cascade:
            edit.cut(net.layers[1][2].outgoing(to=net.layers[2][:2]))
    x = torch.randn(20, 4, dtype=torch.float64)
    with torch.no_grad():
        expected, biases = net(x), net.layers[3].biases.clone()
        with net.edit(trial=True) as edit:
            edit.remove_orphans()
            edit.commit()
            assert (net(x) - expected).abs().max() > 1e-3  # the constants do matter
        with net.edit() as edit:
            edit.remove_orphans(fold_bias=True)
        assert (net(x) - expected).abs().max() < 1e-12
        assert net.sizes == ([4, 1, 1, 2] if cascade else [4, 1, 3, 2])
        net.undo()
        assert torch.equal(net.layers[3].biases, biases)
        assert torch.equal(net(x), expected)


def test_fold_bias_refuses_to_change_a_frozen_bias(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1][0].incoming())
        edit.freeze(net.layers[2][1], incoming=False, outgoing=False)
    with pytest.raises(gn.EditError, match="frozen biases of layer 2"), net.edit() as edit:
        edit.remove_orphans(fold_bias=True)
    assert (net.version, net.sizes) == (1, [4, 3, 3, 2])


def test_nodes_without_bias_are_born_zero_and_frozen_and_stay_so() -> None:
    net = gn.GrapNet([3, 2, 2])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    gn.attach(optimizer, net)
    with net.edit() as edit:
        plain = edit.add_nodes(1, 2, bias=None)
        other = edit.add_nodes(1, 1, bias=0.5)
        edit.connect(net.layers[0], plain | other)
        edit.connect(plain | other, net.layers[2])
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    gn.check(net)
    assert net.layers[1].biases[2:4].tolist() == [0.0, 0.0]
    assert net.layers[1].frozen_at.tolist() == [2, 3]
    assert net.layers[1].biases[4].item() not in (0.0, 0.5)  # the one beside them trains
    net.undo()
    net.redo()
    assert net.layers[1].frozen_at.tolist() == [2, 3]
    with net.edit() as edit:
        edit.unfreeze(net.layers[1])
    assert net.count().frozen == 0


def _check_uniform(values: Tensor, bound: float) -> None:
    values = values.detach()
    assert bound * 0.99 < values.abs().max() <= bound
    assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert values.mean().abs() < 0.03 * bound
