"""Edits: what reads mean inside of one, what newborns draw, and what orphans leave."""

import pytest
import torch
from torch import Tensor

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 3, 3, 2], activation="gelu", dtype=torch.float64)


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


def test_alloc_counts_what_its_owner_gains_in_all_transitions() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([40, 300, 100], density=0.0, skips=[(0, 2)])
    with net.edit() as edit:
        edit.connect(net.layers[0], net.layers[1], weights="alloc")
        edit.connect(net.layers[0], net.layers[2], weights="alloc")
    _check_uniform(net.layers[0].outgoing(to=net.layers[1]).weights, 400**-0.5)
    _check_uniform(net.layers[0].outgoing(to=net.layers[2]).weights, 400**-0.5)


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


def test_folded_constants_go_through_several_layers(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1][:2].incoming())
        edit.set_activation(net.layers[1][0], "softplus")
        edit.cut(net.layers[1][2].outgoing(to=net.layers[2][:2]))
    x = torch.randn(20, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = net(x)
        with net.edit() as edit:
            edit.remove_orphans(fold_bias=True)
        assert net.sizes == [4, 1, 1, 2]
        assert (net(x) - expected).abs().max() < 1e-12
        net.undo()
        assert torch.equal(net(x), expected)


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


@pytest.fixture
def wide() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([4, 5, 3])


def test_cuts_are_listed_once_and_can_be_kept(wide: gn.GrapNet) -> None:
    weakest = wide.layers[0].outgoing().smallest(count=6)
    with wide.edit() as edit:
        assert len(edit.cuts) == 0
        edit.cut(weakest)
        edit.cut(weakest.smallest(count=2))
        edit.cut(wide.layers[1][0].outgoing())
        assert len(edit.cuts) == 9
        edit.keep(weakest.largest(count=4))
        edit.keep(wide.layers[1][1].outgoing())  # nobody asked to cut these
        assert torch.equal(
            edit.cuts.weights[:2].abs().sort().values, weakest.weights.abs().sort().values[:2]
        )
    assert wide.count().relations == 4 * 5 + 5 * 3 - 5
    operations = [dict(operation) for operation in wide.history[-1].operations]
    assert {"operation": "keep", "transition": 0, "relations": 4} in operations


def test_keeping_every_cut_leaves_nothing_to_commit(wide: gn.GrapNet) -> None:
    with wide.edit() as edit:
        edit.cut(wide.layers[0].outgoing())
        edit.keep(wide.layers[0].outgoing())
    assert wide.version == 0


def test_keeping_does_not_save_what_leaves_with_its_node(wide: gn.GrapNet) -> None:
    with wide.edit() as edit:
        edit.remove_nodes(wide.layers[1][0])
        edit.keep(wide.layers[1][0].outgoing())
    assert wide.count().relations == 4 * 4 + 4 * 3


def test_connections_are_counted(wide: gn.GrapNet) -> None:
    with wide.edit() as edit:
        assert edit.n_connections == 0
        edit.connect(wide.layers[0], edit.add_nodes(1, 2))
        assert edit.n_connections == 8


def test_a_remark_stands_in_the_journal_and_changes_nothing(wide: gn.GrapNet) -> None:
    with wide.edit() as edit:
        edit.remark("only talking", score=0.5)
    assert wide.version == 0
    with wide.edit("prune") as edit:
        edit.remark("the weakest went", largest=0.25, rule="PruneWeakest")
        edit.cut(wide.layers[0].outgoing().smallest(count=1))
    operation = wide.history[-1].operations[0]
    assert operation == {
        "operation": "remark",
        "text": "the weakest went",
        "largest": 0.25,
        "rule": "PruneWeakest",
    }
    with wide.edit() as edit, pytest.raises(gn.errors.EditError, match="scores"):
        edit.remark("no tensors", scores=torch.ones(3))
