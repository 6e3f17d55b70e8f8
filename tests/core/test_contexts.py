"""Contexts: whatever mode a net is run, edited or built in leaves nothing behind in what it
caches.
"""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import grapnet as gn
from tests.rounding import SINGLE


def under_inference_mode(net: gn.GrapNet, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return net(x)


def under_compile(net: gn.GrapNet, x: Tensor) -> Tensor:
    torch._dynamo.reset()  # code compiled for the nets of other tests would be met again
    return torch.compile(net, backend="eager")(x)


def under_autocast(net: gn.GrapNet, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


FIRST: dict[str, Callable[[gn.GrapNet, Tensor], object]] = {
    "inference mode": under_inference_mode,
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "compile": under_compile,
    "autocast": lambda net, x: under_autocast(net, x.float()),
}


@pytest.mark.parametrize("first", FIRST)
def test_where_a_net_first_ran_does_not_matter(first: str) -> None:
    """What a net caches when it first runs must not belong to the context it ran in."""
    net, x = gn.GrapNet([4, 3, 2], dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2):
        expected = copy.deepcopy(net)
        FIRST[first](net, x)
        for model in (net, expected):
            model.zero_grad()
            model(x.clone().requires_grad_()).square().sum().backward()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(net.parameters(), expected.parameters(), strict=True)
        )
        with net.edit() as edit:
            edit.set_activation(net.layers[1][0], "tanh")
            edit.freeze(net.layers[0][0].outgoing(slots=[1]))
            edit.cut(net.layers[0][1], slots=[0])


def test_a_default_device_elsewhere_does_not_matter() -> None:
    with torch.device("meta"):
        net = gn.GrapNet([4, 3, 2], density=0.9, device="cpu")
        with net.edit() as edit:
            new = edit.add_nodes(1, 2, bias=0.5)
            edit.connect(net.layers[0], new)
            edit.remove_nodes(net.layers[1][0])
            edit.freeze(net.layers[1][1])
            edit.remove_orphans(fold_bias=True)
        net.undo()
        net.redo()
        gn.check(net)
        assert net(torch.ones(2, 4, device="cpu")).device.type == "cpu"
        assert len(net.layers[0].outgoing().smallest(count=3)) == 3


def test_gradients_of_samples_are_those_of_a_loop() -> None:
    net, x = (
        gn.GrapNet([4, 3, 2], activation="tanh", dtype=torch.float64),
        torch.randn(5, 4, dtype=torch.float64),
    )
    with net.edit() as edit:
        edit.freeze(net.layers[1][0])
    parameters = dict(net.named_parameters())
    loss = lambda p, row: torch.func.functional_call(net, p, (row,)).square().sum()  # noqa: E731
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for row in range(5):
        expected = torch.autograd.grad(net(x[row]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(found[name][row], gradient, atol=1e-12)


def test_numpy_numbers_are_numbers() -> None:
    net = gn.GrapNet([4, 3, 2])
    one = np.int64(1)
    assert net.select(layer=one).uids.tolist() == net.select(layer=[one]).uids.tolist() == [4, 5, 6]
    assert (net.node(np.int64(4)), net.layers[1][np.int32(0)]) == (net.layers[1][0], net.node(4))
    with net.edit() as edit:
        new = edit.add_nodes(one, np.int32(2), bias=np.float32(0.5))
        edit.connect(np.array([0, 1]), new, pairs="aligned", weights=np.array([1.0, 2.0]))
        edit.cut(net.layers[0][0], slots=np.array([0]))
        edit.remove_orphans(one)
    assert new.incoming().weights.tolist() == [1, 2]
    assert new.biases.tolist() == [0.5, 0.5]
    assert len(net.layers[0].outgoing().smallest(count=np.int64(2))) == 2


def test_a_shallow_copy_takes_nothing_away() -> None:
    net = gn.GrapNet([4, 3, 2])
    shallow = copy.copy(net)
    assert shallow.layers[0] is net.layers[0]
    del shallow
    assert net.layers[1][0].layer == 1
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    assert net(torch.ones(1, 4)).shape == (1, 2)


def test_a_map_carries_tensors_of_any_kind() -> None:
    """IndexMap.carry is public: statistics, copies and policies' own Parameters go through it."""
    net = gn.GrapNet([4, 3])
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[1])
        edit.connect(net.layers[0][1], edit.add_nodes(1, 1))
    index = net.history[-1].relations[0]
    kept = [0, *range(2, 6)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        wide = torch.arange(24).reshape(12, 2).to(dtype)
        carried = index.carry(wide, 1)
        assert torch.equal(carried[:5], wide[kept])
        assert torch.equal(carried[5], torch.ones(2, dtype=dtype))
        assert torch.equal(carried[6:], wide[6:])
    keys = torch.arange(24.0).reshape(12, 2).requires_grad_()
    assert torch.equal(index.carry(keys)[6:], keys[6:])  # whether it requires grad is no obstacle
    with pytest.raises(ValueError, match=r"12.*11"):
        index.carry(torch.zeros(11))


@pytest.mark.parametrize(
    ("size", "gone", "come"), [(30_000, 9_000, 7_000), (9_000, 0, 8_000), (20_000, 19_000, 0)]
)
def test_a_map_of_scattered_positions_is_plain_indexing(size: int, gone: int, come: int) -> None:
    """Too many runs to copy one by one: the other way through `carry`."""
    chance, new_size = np.random.default_rng(0), size - gone + come
    removed = np.sort(chance.choice(size, gone, replace=False)).astype(np.int32)
    inserted = np.sort(chance.choice(new_size, come, replace=False)).astype(np.int32)
    index = gn.IndexMap(size, new_size, torch.from_numpy(removed), torch.from_numpy(inserted))
    stay, place = np.delete(np.arange(size), removed), np.delete(np.arange(new_size), inserted)
    for shape in ((size,), (size, 1), (size, 3)):
        old = torch.from_numpy(chance.normal(size=shape))
        born = torch.from_numpy(chance.normal(size=(come, *shape[1:])))
        expected = torch.empty(new_size, *shape[1:], dtype=torch.float64)
        expected[place], expected[inserted.astype(np.int64)] = old[stay], born
        assert torch.equal(index.carry(old, born), expected)
        assert torch.equal(index.inverse().carry(expected, old[removed.astype(np.int64)]), old)
    survivors = torch.from_numpy(stay).int()
    assert index.new_positions(survivors).tolist() == place.tolist()
    assert index.old_positions(torch.from_numpy(place).int()).tolist() == stay.tolist()


def test_a_large_scattered_edit_moves_everything_to_its_place() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([150, 120], dtype=torch.float64)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[torch.rand(18_000) < 0.3])
        edit.cut(net.layers[0].outgoing()[torch.rand(18_000) < 0.05])
    net(torch.randn(3, 150, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    before = table(net, optimizer)
    with net.edit() as edit:
        relations = net.layers[0].outgoing()
        edit.cut(relations[torch.rand(len(relations)) < 0.4])
        edit.unfreeze(relations[torch.rand(len(relations)) < 0.2])
        edit.freeze(relations[torch.rand(len(relations)) < 0.2])
        edit.connect(net.layers[0], edit.add_nodes(1, 60))
    after = table(net, optimizer)
    assert len(after) == net.count().relations
    for pair, (weight, gradient, moment, frozen) in after.items():
        old = before.get(pair, (weight, 0.0, 0.0, False))
        turned = frozen != old[3]
        assert (weight, gradient, moment) == (old[0], *((0.0, 0.0) if turned else old[1:3])), pair
    net.undo()
    undone = table(net, optimizer)
    assert undone.keys() == before.keys()
    assert all(undone[pair][::3] == before[pair][::3] for pair in before)  # weights and frozen bits
    assert all(undone[pair][2] == before[pair][2] for pair in before)  # and the optimizer's slots
    gn.check(net)


def table(
    net: gn.GrapNet, optimizer: torch.optim.Optimizer
) -> dict[tuple[int, int], tuple[float, float, float, bool]]:
    """Returns weight, gradient, first moment and frozen bit of every relation, by the uids of its
    ends.
    """
    relations = net.layers[0].outgoing()
    moments = torch.zeros(len(relations), dtype=torch.float64)
    moments[~relations.frozen] = optimizer.state[net.transitions[0].weight]["exp_avg"].flatten()
    columns = (relations.weights, relations.gradients, moments, relations.frozen)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return dict(
        zip(
            zip(relations.parents.tolist(), relations.children.tolist(), strict=True),
            rows,
            strict=True,
        )
    )


def test_activations_can_be_added() -> None:
    gn.register_activation("test cube", torch_cube)
    gn.register_activation("test cube", torch_cube)  # the same again is fine
    with pytest.raises(ValueError, match="'relu' exists"):
        gn.register_activation("relu", torch_cube)
    net, x = gn.GrapNet([3, 2, 2], activation="test cube"), torch.randn(4, 3)
    linear = net(x)
    with net.edit() as edit:
        edit.set_activation(net.layers[2][0], "test cube")
    assert torch.allclose(net(x), torch.stack([linear[:, 0] ** 3, linear[:, 1]], dim=1))
    assert torch.allclose(net(x), net.walk(x), atol=SINGLE)


def torch_cube(z: Tensor) -> Tensor:
    return z**3
