"""gn.attach: what a newborn starts with, which state can follow, and what stops an edit."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, Optimizer, SparseAdam

import grapnet as gn
from tests.fingerprint import fingerprint

from .plain import OPTIMIZERS, make_net, rewire, swap_one, train


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_mean_covers_every_entry_and_is_clean_without_survivors(kind: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[kind](list(net.parameters()))
    gn.attach(optimizer, net, newborn="mean")
    train(net, optimizer, range(3))
    weight = net.transitions[0].weight
    old = {key: value.clone() for key, value in optimizer.state[weight].items() if value.dim() == 2}
    with net.edit() as edit:
        edit.connect(net.layers[0][1], edit.add_nodes(1, 1))
    place = int((net.layers[0].outgoing().children == net._next_uid - 1).nonzero())
    for key, value in old.items():
        expected = value.mean().item()
        if key == "ax":  # an average of the weights themselves
            expected = weight[place].item()
        assert optimizer.state[weight][key][place].item() == pytest.approx(
            expected, rel=1e-12, abs=1e-300
        )
    with net.edit(allow_dead=True) as edit:
        edit.cut(net.layers[0].outgoing())
    with net.edit() as edit:
        edit.connect(net.layers[0], net.layers[1])
    clean = {"sum": 0.1, "step_size": 0.02}
    for key in old.keys() - {"ax"}:
        assert torch.equal(
            optimizer.state[weight][key], torch.full_like(weight, clean.get(key, 0.0))
        )
    train(net, optimizer, range(3))


def test_the_mean_is_that_of_the_coordinates_that_stay() -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.02, momentum=0.9)
    gn.attach(optimizer, net, newborn="mean")
    train(net, optimizer, range(3))
    weight = net.transitions[0].weight
    # Four relations of each of the five inputs; those of the first leave.
    stay = optimizer.state[weight]["momentum_buffer"][4:].clone()
    with net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing())
        edit.connect(net.layers[0][4], edit.add_nodes(1, 1))
    moved = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(moved[:-1], stay)
    assert moved[-1].item() == pytest.approx(stay.mean().item(), rel=1e-12)


def test_the_mean_of_half_precision_state_does_not_overflow() -> None:
    net = gn.GrapNet([40, 30], dtype=torch.float16)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    gn.attach(optimizer, net, newborn="mean")
    weight = net.transitions[0].weight
    # The sum over 1200 relations, 120,000, is beyond the largest number of this type.
    optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight.detach(), 100.0)
    with net.edit() as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 1))
    moved = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(moved, torch.full_like(weight.detach(), 100.0))


REFUSED: dict[str, tuple[Callable[[gn.GrapNet], Optimizer], str]] = {
    "lbfgs": (lambda net: torch.optim.LBFGS(net.parameters()), "one flat history"),
    "adafactor": (lambda net: Adafactor(net.parameters()), "rows and columns of a matrix"),
    "sparse adam": (lambda net: SparseAdam(list(net.parameters())), "gradients .* are dense"),
}


def test_what_is_attached_is_returned() -> None:
    net = gn.GrapNet([3, 2])
    optimizer = torch.optim.Adam(net.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(net)
    assert gn.attach(optimizer, net) is optimizer
    assert gn.attach(averaged, net) is averaged


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_cannot_follow_are_refused_with_the_reason(kind: str) -> None:
    net = make_net()
    make, reason = REFUSED[kind]
    with pytest.raises(gn.errors.OptimizerError, match=reason):
        gn.attach(make(net), net)
    rewire(net)  # and are not in the way of an edit


def test_every_optimizer_of_torch_is_among_these() -> None:
    kinds = {
        k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, Optimizer)
    }
    parameters = list(make_net().parameters())
    followed = {type(make(parameters)) for make in OPTIMIZERS.values()}
    assert kinds - {Optimizer} == followed | {
        type(make(make_net())) for make, _ in REFUSED.values()
    }


class Strange(SGD):
    """An optimizer with state of another shape."""

    def __init__(self, parameters: Any, entry: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters, lr=0.01)
        self.entry = entry

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("strange", self.entry(parameter.detach()))


@pytest.mark.parametrize(
    "entry",
    [
        lambda p: torch.zeros(3, 3),
        lambda p: torch.zeros(len(p), 2),
        lambda p: [torch.zeros(3, 3)],
        lambda p: torch.zeros(2, len(p)),
    ],
    ids=["rectangle", "two a coordinate", "list", "rows"],
)
def test_state_that_cannot_be_mapped_stops_the_edit(entry: Any) -> None:
    net = make_net()
    optimizer = Strange(net.parameters(), entry)
    adam = Adam(net.parameters())
    gn.attach(adam, net)
    gn.attach(optimizer, net)
    train(net, adam, range(2))
    train(net, optimizer, range(2))
    before = fingerprint(net, adam)
    with pytest.raises(gn.errors.OptimizerError):
        rewire(net)
    assert fingerprint(net, adam) == before


@pytest.mark.parametrize(
    "number", [lambda p: torch.tensor(5.0), lambda p: torch.full((1,), 5.0), lambda p: 5.0]
)
def test_one_number_stays_one_number_where_a_parameter_has_a_single_coordinate(number: Any) -> None:
    net = gn.GrapNet.from_relations([2, 1], [([0], [0])])  # one relation, one bias
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = Strange([*net.parameters(), other], number)
    gn.attach(optimizer, net)
    train_float(net, optimizer)
    with net.edit() as edit:
        edit.connect(net.layers[0][1], net.layers[1])
        edit.add_nodes(1, 2)
    for parameter in net.parameters():
        assert torch.equal(
            torch.as_tensor(optimizer.state[parameter]["strange"]),
            torch.as_tensor(number(parameter)),
        )
    train_float(net, optimizer)


def train_float(net: gn.GrapNet, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    net(
        torch.ones(2, net.sizes[0], dtype=net.transitions[0].weight.dtype)
    ).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_one_coordinate_and_of_none(kind: str) -> None:
    net = gn.GrapNet.from_relations([2, 1], [([0], [0])], dtype=torch.float64)
    optimizer = OPTIMIZERS[kind](list(net.parameters()))
    gn.attach(optimizer, net)
    train_float(net, optimizer)
    weight = net.transitions[0].weight
    for size, act in (
        (2, lambda edit: edit.connect(net.layers[0][1], net.layers[1])),
        (0, lambda edit: edit.cut(net.layers[0].outgoing())),
        (1, lambda edit: edit.connect(net.layers[0][1], net.layers[1])),
        (0, lambda edit: edit.freeze(net.layers[1])),
        (1, lambda edit: edit.unfreeze(net.layers[1])),
    ):
        with net.edit(allow_dead=True) as edit:
            act(edit)
        entries = [v for v in optimizer.state[weight].values() if isinstance(v, Tensor) and v.dim()]
        assert {v.shape for v in entries} <= {weight.shape}
        assert weight.shape == (size, 1)
        train_float(net, optimizer)
    assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("kind", [Adagrad, Adam])
def test_a_trial_brings_back_what_it_renewed(kind: Any) -> None:
    net = make_net()
    optimizer = kind(net.parameters(), lr=0.1)
    gn.attach(optimizer, net, survivors="renew")
    train(net, optimizer, range(3))
    held = copy.deepcopy(optimizer.state_dict()["state"])
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0][0].outgoing())
        edit.commit()
        renewed = optimizer.state[net.transitions[1].weight]
        assert not any(value.any() for value in renewed.values())
    state = optimizer.state_dict()["state"]
    assert all(
        torch.equal(state[n][key], value)
        for n, entries in held.items()
        for key, value in entries.items()
    )
    rewire(net)
    train(net, optimizer, range(2))


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16_by_default")
def test_renewed_state_is_as_torch_makes_it_whatever_the_default_dtype_and_device() -> None:
    net = make_net()
    optimizer = Adagrad(net.parameters(), initial_accumulator_value=0.1)
    gn.attach(optimizer, net, survivors="renew")
    train(net, optimizer, range(2))
    with torch.device("meta"), net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing())
    fresh = Adagrad(net.parameters(), initial_accumulator_value=0.1)
    for parameter in net.parameters():
        renewed = optimizer.state[parameter]
        expected = fresh.state[parameter]
        assert renewed.keys() == expected.keys()
        for entry, value in expected.items():
            # A count in bfloat16 stops at 256.
            assert (renewed[entry].device, renewed[entry].dtype) == (value.device, value.dtype)
            assert torch.equal(renewed[entry], value)
    train(net, optimizer, range(2))


# Of optimizers of other packages: an entry, and what the package fills it with at first.
STARTS = [
    ("Adai", "beta1_prod", 1.0),
    ("BSAM", "s", 1.0),
    ("DAdaptAdaGrad", "alpha_k", 1e-6),
    ("DAdaptAdaGrad", "alphak", 1e-6),
]


@pytest.mark.parametrize(("name", "entry", "start"), STARTS)
def test_a_newborn_starts_from_what_its_optimizer_starts_from(
    name: str, entry: str, start: float
) -> None:
    net = make_net()
    # Known by the name of its class; the package is not needed.
    optimizer = type(name, (SGD,), {})(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    weight = net.transitions[0].weight
    optimizer.state[weight][entry] = torch.full_like(weight.detach(), 3.0)
    with net.edit() as edit:
        edit.connect(net.layers[0][4], edit.add_nodes(1, 1))
    assert optimizer.state[weight][entry].view(-1).tolist() == [3.0] * 20 + [start]


def test_state_in_objects_of_another_library_refuses_to_step_after_an_edit() -> None:
    net = make_net()
    optimizer = Strange(net.parameters(), lambda p: SimpleNamespace(moment=torch.zeros_like(p)))
    train(net, optimizer, range(2))
    swap_one(net)
    with pytest.raises(gn.errors.OptimizerError):
        train(net, optimizer, range(1))


def test_a_parameter_that_joins_later_is_watched_too() -> None:
    net = make_net()
    optimizer = Adam([net.transitions[1].weight])
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": [net.transitions[0].weight]})
    train(net, optimizer, range(2))
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
        edit.connect(net.layers[0][0], net.layers[0][0].children[0])
    with pytest.raises(gn.errors.OptimizerError):
        train(net, optimizer, range(1))


def test_attaching_twice_keeps_what_was_cut_in_between() -> None:
    net = make_net()
    optimizer = Adam(net.parameters())
    gn.attach(optimizer, net)
    gn.attach(optimizer, net, newborn="mean")
    train(net, optimizer, range(2))
    held = {p: v["exp_avg"].clone() for p, v in optimizer.state.items()}
    rewire(net)
    gn.attach(optimizer, net)
    net.undo()
    assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in held.items())


def test_a_detached_optimizer_stops_no_edit_while_its_error_is_kept() -> None:
    net = make_net()
    optimizer = Strange(net.parameters(), lambda p: torch.zeros(3, 3))
    gn.attach(optimizer, net)
    train(net, optimizer, range(1))
    # The error holds the frames of the failed edit, as an interactive session does.
    with pytest.raises(gn.errors.OptimizerError) as kept:
        rewire(net)
    gn.detach(optimizer, net)
    rewire(net)
    assert net.version == 2
    assert kept.tb is not None


def test_a_column_that_joins_later_is_watched_too() -> None:
    net = gn.GrapNet([3, 2], dtype=torch.float64)
    with net.edit() as edit:
        edit.cut(net.layers[0][1].outgoing())
    optimizer = Adam(net.parameters())
    gn.attach(optimizer, net)
    train_float(net, optimizer)
    net.execution.use("attention")
    train_float(net, optimizer)
    gn.detach(optimizer, net)
    # The keys of the inputs move, and nothing else that the optimizer holds.
    with net.edit() as edit:
        edit.remove_nodes(net.layers[0][1], interface=True)
        edit.add_nodes(0, 1)
    assert list(net.history[-1].parameters) == ["columns.key_0.value"]
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(gn.errors.OptimizerError):
        train_float(net, optimizer)
    assert all(torch.equal(p, kept) for p, kept in zip(net.parameters(), before, strict=True))
