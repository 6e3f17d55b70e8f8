"""GrapNet as a module: what it draws, what it computes, how it is built, counted, converted and
loaded.
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import grapnet as gn
from grapnet.execution import reference
from tests.rounding import SINGLE

MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}


def twin(sizes: list[int], activation: str) -> tuple[gn.GrapNet, nn.Sequential]:
    """A net and an nn.Sequential with its weights copied in, by the paper's mapping W_alloc[j] =
    A[i, j].
    """
    net, modules = gn.GrapNet(sizes, activation=activation, dtype=torch.float64), []
    for t, (a, b) in enumerate(pairwise(sizes)):
        linear = nn.Linear(a, b, dtype=torch.float64)
        for node in net.layers[t]:
            linear.weight.data[:, node.row] = node.W_alloc[0]
        linear.bias.data[:] = net.layers[t + 1].biases
        modules += [linear, MODULES[activation]()]
    return net, nn.Sequential(*modules[:-1])


@pytest.mark.parametrize("activation", MODULES)
def test_a_full_net_is_the_matrix_network_in_values_and_gradients(activation: str) -> None:
    """Proposition 2."""
    net, dense = twin([6, 5, 4, 3], activation)
    x = torch.randn(9, 6, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    target = torch.randn(9, 3, dtype=torch.float64)
    for model, inputs in ((net, a), (dense, b)):
        nn.functional.mse_loss(model(inputs), target).backward()
    assert (net(x) - dense(x)).abs().max() < 1e-12
    assert (net.walk(x) - dense(x)).abs().max() < 1e-12
    assert (a.grad - b.grad).abs().max() < 1e-12
    for t, linear in enumerate(m for m in dense if isinstance(m, nn.Linear)):
        assert (
            net.transitions[t].weight.grad.view(linear.weight.T.shape) - linear.weight.grad.T
        ).abs().max() < 1e-12
        assert (net.layers[t + 1].bias.grad - linear.bias.grad).abs().max() < 1e-12


def test_a_sparse_frozen_mixed_net_is_its_materialised_matrix() -> None:
    net = gn.GrapNet([7, 6, 5], density=0.4, dtype=torch.float64)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
        edit.freeze(net.layers[1][1:4])
    x = h = torch.randn(8, 7, dtype=torch.float64)
    for upper, lower in pairwise(net.layers):
        matrix = torch.zeros(len(upper), len(lower), dtype=torch.float64)
        for node in upper:
            matrix[node.row, [child.row for child in node.children]] = node.W_alloc[0].detach()
        z = h @ matrix + lower.biases
        h = torch.stack([MODULES[node.activation]()(z[:, node.row]) for node in lower], dim=1)
    assert (net(x) - h).abs().max() < 1e-12
    assert (net.walk(x) - h).abs().max() < 1e-12
    assert torch.autograd.gradcheck(net, x.requires_grad_())


def test_newborn_nets_are_distributed_like_linear_layers() -> None:
    torch.manual_seed(0)
    net, linear = gn.GrapNet([300, 400, 2]), nn.Linear(300, 400)
    for mine, theirs in (
        (net.transitions[0].weight, linear.weight),
        (net.layers[1].bias, linear.bias),
    ):
        mine, theirs = mine.detach(), theirs.detach()
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


def test_shapes_of_inputs_and_what_is_said_about_wrong_ones() -> None:
    net = gn.GrapNet([49, 5, 3])
    x = torch.randn(2, 4, 49)
    assert net(x).shape == (2, 4, 3)
    torch.testing.assert_close(net(x)[1, 2], net(x[1, 2]))
    assert (net(torch.randn(49)).shape, net(torch.randn(0, 49)).shape) == ((3,), (0, 3))
    assert torch.allclose(net(x.transpose(0, 1)), net(x).transpose(0, 1), atol=SINGLE)
    with pytest.raises(ValueError, match=r"\[\.\.\., 49\].*\[2, 7, 7\].*flatten\(1\)"):
        net(torch.randn(2, 7, 7))
    for wrong in (torch.randn(2, 48), torch.tensor(1.0), torch.randn(0, 7, 7)):
        with pytest.raises(
            ValueError, match=rf"49.*{list(wrong.shape)}".replace("[", r"\[").replace("]", r"\]")
        ):
            net(wrong)
    for wrong in (torch.ones(2, 49, dtype=torch.long), torch.ones(2, 49, dtype=torch.float64)):
        with pytest.raises((ValueError, RuntimeError, TypeError), match="float32"):
            net(wrong)


TAKEN: dict[str, tuple[Callable[[gn.GrapNet], Any], Callable[[gn.GrapNet], Any]]] = {
    "prune": (
        lambda net: prune.l1_unstructured(net.transitions[0], "weight", amount=0.5),
        lambda net: prune.remove(net.transitions[0], "weight"),
    ),
    "prune a bias": (
        lambda net: prune.l1_unstructured(net.layers[1], "bias", amount=0.5),
        lambda net: prune.remove(net.layers[1], "bias"),
    ),
    "weight norm": (
        lambda net: weight_norm(net.transitions[0]),
        lambda net: remove_parametrizations(net.transitions[0], "weight"),
    ),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_parameter_that_torch_has_taken_away_is_named(how: str) -> None:
    net, (take, give_back) = gn.GrapNet([4, 5, 3]), TAKEN[how]
    x = torch.randn(2, 4)
    net(x)
    take(net)
    with pytest.raises(
        gn.InvariantError,
        match=r"Parameter '(weight|bias)' .*prune\.remove.* cut relations in an edit",
    ):
        net(x)
    with pytest.raises(gn.GrapNetError, match=r"Parameter '(weight|bias)'"):
        net.count()
    give_back(net)
    assert net(x).shape == (2, 3)


@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 3, 2], [3, 2, 0], [0, 0]], ids=str)
def test_layers_may_be_empty(sizes: list[int]) -> None:
    net = gn.GrapNet(sizes, activation="tanh")
    x = torch.randn(4, sizes[0], requires_grad=True)
    output = net(x)
    assert torch.equal(output, net.walk(x))
    output.sum().backward()
    if sizes == [3, 0, 2]:
        assert torch.equal(output, net.layers[2].biases.expand(4, 2))
    assert output.shape == (4, sizes[-1])
    gn.check(net)


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
    assert gn.GrapNet(sizes, density=0.1).transitions[0].size == 2000


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

    a, b, c = make(1), make(1), make(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(p, q)
        for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
    assert not torch.equal(a.transitions[0].child, c.transitions[0].child)


def test_from_relations_keeps_order_and_copies() -> None:
    weights, biases = torch.tensor([1.0, 2.0, 3.0, 4.0]), [torch.zeros(3), torch.ones(1)]
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


def test_count_says_sizes_bytes_and_operations() -> None:
    net = gn.GrapNet([4, 3, 2])
    count = net.count()
    assert (count.nodes, count.relations, count.biases, count.trainable, count.frozen) == (
        9,
        18,
        5,
        23,
        0,
    )
    assert count.flops == 2 * 18 + 5
    assert count.bytes == 4 * (18 + 5) + 4 * (18 + 5 + 4)  # coordinates; child and ptr
    with net.edit() as edit:
        edit.freeze(net.layers[1][0])
        edit.cut(net.layers[0][0], slots=[1])
    count = net.count()
    assert (count.relations, count.trainable, count.frozen, count.flops) == (17, 15, 7, 39)
    assert count.bytes == 4 * (17 + 5) + 4 * (17 + 5 + 4) + 4 * 7  # frozen positions
    assert "17 relations" in repr(net)


@pytest.mark.parametrize("held", [[], [0], [1, 2]], ids=str)
def test_a_state_dict_loads_whatever_is_frozen(held: list[int]) -> None:
    net = gn.GrapNet([4, 3, 2])
    other = copy.deepcopy(net)
    with net.edit() as edit:
        edit.freeze(net.layers[1][1:])
    for p in net.parameters():
        p.data.normal_()
    if held:
        with other.edit() as edit:
            edit.freeze(other.layers[1][held], incoming=False)
    state = net.state_dict()
    assert state["transitions.0.weight"].shape == (12, 1)
    assert other.load_state_dict(state).missing_keys == []
    assert all(
        torch.equal(a, b) for a, b in zip(other.state_dict().values(), state.values(), strict=True)
    )
    assert [n.frozen for n in other.select()] == [n.frozen for n in net.select()]
    assert torch.equal(other(torch.ones(1, 4)), net(torch.ones(1, 4)))
    other.layers[1][0].W_alloc = torch.zeros(1, 2)
    assert net.layers[1][0].W_alloc.abs().sum() > 0  # nothing is shared


def test_a_state_dict_of_another_wiring_is_refused_whole() -> None:
    net, other = gn.GrapNet([4, 3, 2]), gn.GrapNet([4, 3, 2])
    with other.edit() as edit:  # as many relations, between the same layers
        edit.cut(other.layers[1][0], slots=[0])
        edit.connect(other.layers[1][0], other.layers[2][0])
        edit.freeze(other.layers[1][2])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for model, prefix in ((net, ""), (nn.Sequential(net), "0.")):
        with pytest.raises(
            gn.TopologyError, match=rf"{prefix}transitions\.1\.child.*nothing was loaded"
        ):
            model.load_state_dict(
                {prefix + name: tensor for name, tensor in other.state_dict().items()}
            )
    with pytest.raises(gn.TopologyError, match=r"layers\.1\.bias has 4 .*3"):
        net.load_state_dict(gn.GrapNet([4, 4, 2]).state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.version == 0


def test_a_state_dict_of_one_layer_or_transition_is_refused_when_it_does_not_fit() -> None:
    net = gn.GrapNet([4, 3, 2])
    other = gn.GrapNet([4, 5, 2])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(RuntimeError):
        net.layers[1].load_state_dict(other.layers[1].state_dict())
    with pytest.raises(RuntimeError):
        net.transitions[0].load_state_dict(other.transitions[0].state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_state_dict_of_plain_modules_is_told_how_to_become_a_net() -> None:
    net, plain = (
        gn.GrapNet([4, 3, 2]),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict(),
    )
    with pytest.raises(
        gn.TopologyError, match=r"'0\.weight' and the other keys .*gn\.from_module\(module\)"
    ):
        net.load_state_dict(plain)
    assert net.load_state_dict(plain, strict=False).unexpected_keys == list(plain)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({})


def test_sizes_that_are_no_list_are_told_to_be_one() -> None:
    make: Any = gn.GrapNet
    with pytest.raises(TypeError, match=r"one list, as in gn\.GrapNet\(\[4, 8, 2\]\); got 4"):
        make(4)


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


@pytest.mark.parametrize("cells", [1, 7, 30])
def test_the_reference_in_pieces_is_the_reference(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = gn.GrapNet([6, 5, 4], activation="tanh", density=0.7, dtype=torch.float64)
    net.execution.use("reference")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def results() -> list[Tensor]:
        model = copy.deepcopy(net)  # with plans of its own
        parameters = dict(model.named_parameters())
        output = functional_call(model, parameters, (x,))
        first = torch.autograd.grad(
            output.square().sum(), [x, *parameters.values()], create_graph=True
        )
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), [x, *parameters.values()]
        )
        with torch.no_grad():
            return [output, model(x), *first, *second]

    whole, pieces, again = results(), [], reference.checkpoint
    monkeypatch.setattr(reference, "CELLS", cells)
    monkeypatch.setattr(reference, "checkpoint", lambda *a, **k: pieces.append(a) or again(*a, **k))
    assert all(
        torch.allclose(a, b, atol=1e-12, rtol=1e-10) for a, b in zip(results(), whole, strict=True)
    )
    assert len(pieces) >= 2 * 2  # it did run in pieces
