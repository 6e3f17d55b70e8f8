"""GrapNet as a module: what it draws, what it computes, how it is built, counted, converted and
loaded.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import grapnet as gn
from tests.rounding import SINGLE


def test_newborn_nets_are_distributed_like_linear_layers() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([300, 400, 2])
    linear = nn.Linear(300, 400)
    for mine, theirs in (
        (net.transitions[0].weight, linear.weight),
        (net.layers[1].bias, linear.bias),
    ):
        mine = mine.detach()
        theirs = theirs.detach()
        assert mine.abs().max() <= 300**-0.5
        assert mine.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.02)
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.12)
    sparse = gn.GrapNet([300, 400], density=0.1)
    fan_in = torch.tensor([len(node.parents) for node in sparse.layers[1]])
    bound = fan_in[sparse.transitions[0].child.long()] ** -0.5
    ratio = sparse.transitions[0].weight.detach().flatten() / bound
    assert 0.99 < ratio.abs().max() <= 1
    assert ratio.std().item() == pytest.approx(3**-0.5, rel=0.03)
    assert (sparse.layers[1].biases.abs() <= fan_in**-0.5).all()


def test_shapes_of_inputs_that_are_taken_and_refused() -> None:
    net = gn.GrapNet([49, 5, 3])
    x = torch.randn(2, 4, 49)
    assert net(x).shape == (2, 4, 3)
    torch.testing.assert_close(net(x)[1, 2], net(x[1, 2]))
    assert (net(torch.randn(49)).shape, net(torch.randn(0, 49)).shape) == ((3,), (0, 3))
    assert torch.allclose(net(x.transpose(0, 1)), net(x).transpose(0, 1), atol=SINGLE)
    for wrong in (torch.randn(2, 7, 7), torch.randn(2, 48), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=re.escape(str(list(wrong.shape)))):
            net(wrong)
    for wrong in (torch.ones(2, 49, dtype=torch.long), torch.ones(2, 49, dtype=torch.float64)):
        with pytest.raises((ValueError, RuntimeError, TypeError), match="float32"):
            net(wrong)


TAKEN: dict[str, tuple[Callable[[gn.GrapNet], Any], Callable[[gn.GrapNet], Any]]] = {
    "prune": (
        lambda net: prune.l1_unstructured(net.transitions[0], "weight", amount=0.5),
        lambda net: prune.remove(net.transitions[0], "weight"),
    ),
    "weight norm": (
        lambda net: weight_norm(net.transitions[0]),
        lambda net: remove_parametrizations(net.transitions[0], "weight"),
    ),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_parameter_that_torch_has_taken_away_is_missed(how: str) -> None:
    net = gn.GrapNet([4, 5, 3])
    (take, give_back) = TAKEN[how]
    x = torch.randn(2, 4)
    net(x)
    take(net)
    with pytest.raises(gn.errors.InvariantError):
        net(x)
    with pytest.raises(gn.errors.GrapNetError):
        net.count()
    give_back(net)
    assert net(x).shape == (2, 3)


def test_density_counts_exactly_and_erk_spends_the_same() -> None:
    for density in (0.0, 0.013, 0.3, 0.5, 0.77, 1.0):
        assert gn.GrapNet([30, 20], density=density).count().relations == round(density * 600)
        gn.check(gn.GrapNet([30, 20, 10], density=density, distribution="erk"))
    sizes = [200, 100, 50, 10]
    cells = [a * b for a, b in pairwise(sizes)]
    for density in (0.05, 0.1, 0.5, 0.9):
        net = gn.GrapNet(sizes, density=density, distribution="erk")
        shares = [t.size / c for t, c in zip(net.transitions, cells, strict=True)]
        assert net.count().relations == pytest.approx(density * sum(cells), abs=2)
        assert max(shares) <= 1
        open_ones = [
            (s, (a + b) / (a * b))
            for s, (a, b) in zip(shares, pairwise(sizes), strict=True)
            if s < 1
        ]
        scales = [share / raw for share, raw in open_ones]
        assert max(scales) == pytest.approx(min(scales), rel=0.02)
        assert shares == sorted(shares)
    net = gn.GrapNet(sizes, density=0.1)
    assert net.transitions[0].size == 2000
    assert net.transitions[0].density == 0.1


def test_a_wiring_in_tiles_comes_near_to_the_density_and_reaches_every_node() -> None:
    for sizes in ([64, 96, 32], [70, 100, 10], [784, 130]):
        for density in (0.3, 0.5, 0.9):
            net = gn.GrapNet(sizes, density=density, tile=16)
            gn.check(net)
            for t, (a, b) in enumerate(pairwise(sizes)):
                found = net.execution.tiles(t)
                assert found is not None
                assert found.size >= 16
                assert abs(net.transitions[t].size - density * a * b) <= 128
                # as many tiles as the longer side has blocks reach both layers
                if density * a * b >= 256 * max(found.present.shape):
                    assert net.transitions[t].topology.fan_in().min() > 0
                    assert net.transitions[t].topology.degrees.min() > 0
    assert gn.GrapNet([64, 64], density=0.0, tile=16).count().relations == 0
    assert gn.GrapNet([64, 64], density=0.001, tile=16).count().relations == 256
    assert gn.GrapNet([64, 64], tile=16).transitions[0].topology.is_full
    assert gn.GrapNet([64, 0, 64], density=0.5, tile=16).count().relations == 0


def test_tiles_are_drawn_by_the_generator_and_have_a_size_that_is_known() -> None:
    first, again, other = (
        gn.GrapNet([70, 100], density=0.3, tile=16, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.transitions[0].child, again.transitions[0].child)
    assert torch.equal(first.transitions[0].weight, again.transitions[0].weight)
    assert not torch.equal(first.transitions[0].child, other.transitions[0].child)
    for tile in (0, 8, 48, 256, 16.0, "16"):
        with pytest.raises(ValueError, match=re.escape(repr(tile))):
            gn.GrapNet([70, 100], density=0.3, tile=tile)


def test_random_wirings_are_uniform_over_cells() -> None:
    hits = torch.zeros(6, 5)
    for seed in range(300):
        net = gn.GrapNet([6, 5], density=0.4, generator=torch.Generator().manual_seed(seed))
        for node in net.layers[0]:
            hits[node.row, [child.row for child in node.children]] += 1
    assert hits.sum() == 300 * 12
    assert ((hits - 120).abs() < 6 * (300 * 0.4 * 0.6) ** 0.5).all()


def test_a_generator_decides_everything_and_leaves_the_global_one_alone() -> None:
    state = torch.get_rng_state()

    def make(seed: int) -> gn.GrapNet:
        generator = torch.Generator().manual_seed(seed)
        return gn.GrapNet([9, 8, 7], density=0.5, generator=generator)

    a = make(1)
    b = make(1)
    c = make(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(p, q)
        for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
    assert not torch.equal(a.transitions[0].child, c.transitions[0].child)


def test_from_relations_keeps_order_and_copies() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    biases = [torch.zeros(3), torch.ones(1)]
    given = [([1, 0, 1, 0], [2, 1, 0, 0], weights), ([2, 0], [0, 0])]
    net = gn.GrapNet.from_relations([2, 3, 1], given, biases=biases, activation=["tanh", "sigmoid"])
    assert [node.children.uids.tolist() for node in net.layers[0]] == [[3, 2], [4, 2]]
    assert [node.W_alloc.tolist() for node in net.layers[0]] == [[[2, 4]], [[1, 3]]]
    assert (net.layers[1].activations[0], net.layers[2].activations[0]) == ("tanh", "sigmoid")
    assert net.layers[2].biases.tolist() == [1]
    net.layers[1].biases = 5.0
    net.layers[0].outgoing().weights = 5.0
    assert (biases[0].tolist(), weights.tolist()) == ([0, 0, 0], [1, 2, 3, 4])
    assert net.layers[1].outgoing().weights.abs().max() <= 2**-0.5
    assert gn.GrapNet.from_relations([2, 2], [([], [])]).count().relations == 0


def test_a_state_dict_of_another_wiring_is_refused_whole() -> None:
    net = gn.GrapNet([4, 3, 2])
    other = gn.GrapNet([4, 3, 2])
    with other.edit() as edit:  # as many relations, between the same layers
        edit.cut(other.layers[1][0], slots=[0])
        edit.connect(other.layers[1][0], other.layers[2][0])
        edit.freeze(other.layers[1][2])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for model, prefix in ((net, ""), (nn.Sequential(net), "0.")):
        with pytest.raises(gn.errors.TopologyError, match=rf"{prefix}transitions\.1\.child"):
            model.load_state_dict(
                {prefix + name: tensor for name, tensor in other.state_dict().items()}
            )
    with pytest.raises(gn.errors.TopologyError, match=r"layers\.1\.bias has 4 .*3"):
        net.load_state_dict(gn.GrapNet([4, 4, 2]).state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.version == 0


@pytest.mark.parametrize("held", [[0, 12], [-1, 3], [4, 2], [5, 5]], ids=str)
@pytest.mark.parametrize("name", ["transitions.0.frozen", "layers.1.frozen"])
def test_a_state_dict_with_impossible_frozen_positions_is_refused(
    name: str, held: list[int]
) -> None:
    net = gn.GrapNet([4, 12, 2], density=0.25)
    state = net.state_dict()
    state[name] = torch.tensor(held, dtype=torch.int32)
    with pytest.raises(gn.errors.TopologyError):
        net.load_state_dict(state)
    assert net.version == 0
    # The same positions in order are loaded.
    state[name] = torch.tensor([0, 11], dtype=torch.int32)
    net.load_state_dict(state)
    assert net.count().frozen == 2


def test_a_state_dict_of_one_layer_or_transition_is_refused_when_it_does_not_fit() -> None:
    net = gn.GrapNet([4, 3, 2])
    other = gn.GrapNet([4, 5, 2])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(RuntimeError):
        net.layers[1].load_state_dict(other.layers[1].state_dict())
    with pytest.raises(RuntimeError):
        net.transitions[0].load_state_dict(other.transitions[0].state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_state_dict_of_plain_modules_is_refused() -> None:
    net = gn.GrapNet([4, 3, 2])
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict()
    with pytest.raises(gn.errors.TopologyError):
        net.load_state_dict(plain)
    assert net.load_state_dict(plain, strict=False).unexpected_keys == list(plain)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({})
    more = {**net.state_dict(), "transitions.0.more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict(more)
    assert net.load_state_dict(more, strict=False).unexpected_keys == ["transitions.0.more"]


def test_inside_other_modules_and_in_other_types() -> None:
    model = nn.Sequential(nn.Linear(6, 4), gn.GrapNet([4, 3, 2]), nn.Softmax(-1))
    fresh = nn.Sequential(nn.Linear(6, 4), gn.GrapNet([4, 3, 2]), nn.Softmax(-1))
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(5, 6)
    assert torch.equal(model(x), fresh(x))
    net = model[1]
    with net.edit() as edit:
        edit.freeze(net.layers[1][0])
        edit.cut(net.layers[0][0], slots=[2])
    model(x).square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    single = model(x)
    kept = net.layers[0][0].W_alloc.double()
    assert (model.double()(x.double()) - single).abs().max() < SINGLE
    assert torch.equal(net.layers[0][0].W_alloc, kept)
    net.undo()
    assert net.layers[0][0].W_alloc.dtype == torch.float64
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    gn.check(net)
