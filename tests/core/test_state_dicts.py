"""What other code does with the tensors of a net: empty them, write into them, save and load them.

None of it can change which relations a net has.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import grapnet as gn

BACKENDS = ["reference", "dense", "family", "sparse", "auto"]


def inputs(width: int = 6) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawn_net(backend: str = "reference", seed: int = 0) -> gn.GrapNet:
    """Returns a net in double precision with random relations that has run once."""
    generator = torch.Generator().manual_seed(seed)
    net = gn.GrapNet([6, 8, 3], density=0.5, dtype=torch.float64, generator=generator)
    net.execution.use(backend)
    net(inputs())
    return net


def edited_net(backend: str = "reference") -> gn.GrapNet:
    """Returns a net with frozen parts and several activations."""
    net = drawn_net(backend)
    with net.edit(reason="prepare") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=4))
        edit.freeze(net.layers[1][:2])
        edit.set_activation(net.layers[1][3:5], "tanh")
    net(inputs())
    return net


MAKERS: dict[str, Callable[[str], gn.GrapNet]] = {"drawn": drawn_net, "edited": edited_net}


def wiring(net: gn.GrapNet) -> list[list[int]]:
    """Returns the parents and the children of all relations."""
    found = []
    for layer in net.layers[:-1]:
        relations = layer.outgoing()
        found.append(relations.parents.tolist())
        found.append(relations.children.tolist())
    return found


def require_sound(net: gn.GrapNet, x: Tensor) -> None:
    """Fails the test unless a net passes its check and computes what its relations say."""
    gn.check(net)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            torch.testing.assert_close(net(x), net.walk(x))


# Emptied tensors

EMPTIED = """
import sys
from itertools import product

import torch

import grapnet as gn
from tests.core.test_state_dicts import MAKERS, inputs, require_sound, wiring

for backend, fill, maker in product(sys.argv[1:], (True, False), MAKERS):
    print(backend, fill, maker, flush=True)
    net = MAKERS[maker](backend)
    expected = net(inputs())
    relations = wiring(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for part in (net, *net.transitions, *net.layers):
        # Torch then fills what is left undefined, so that every run meets the same numbers.
        torch.use_deterministic_algorithms(fill)
        part.to_empty(device="cpu")
        torch.use_deterministic_algorithms(False)
        # What it computes is undefined, and so is whether it raises.
        try:
            net(inputs()).sum().backward()
        except (RuntimeError, gn.errors.GrapNetError):
            pass
        assert wiring(net) == relations
        net.load_state_dict(state)
        assert torch.equal(net(inputs()), expected)
        require_sound(net, inputs())
"""


@pytest.mark.parametrize("backend", ["sparse", "others"])
def test_a_net_whose_tensors_were_emptied_runs_and_loads(backend: str) -> None:
    backends = [backend]
    if backend == "others":
        backends = ["reference", "dense", "family", "auto"]
    # In a process of its own: it would end by a signal if the kernels read a broken wiring.
    command = [sys.executable, "-c", EMPTIED, *backends]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_net_returns_from_the_meta_device(backend: str, maker: str) -> None:
    net = MAKERS[maker](backend)
    expected = net(inputs())
    relations = wiring(net)
    state = copy.deepcopy(net.state_dict())
    net.to("meta")
    with pytest.raises(gn.errors.GrapNetError):
        net(inputs())
    net.to_empty(device="cpu")
    assert wiring(net) == relations
    net.load_state_dict(state)
    assert torch.equal(net(inputs()), expected)
    require_sound(net, inputs())
    with net.edit(reason="go on") as edit:
        edit.cut(net.layers[0].outgoing()[:2])
    require_sound(net, inputs())


# Entries that are written in place


def wired_net(parents: list[int], children: list[int], seed: int) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(seed)
    relations = [(parents, children)]
    return gn.GrapNet.from_relations([4, 3], relations, dtype=torch.float64, generator=generator)


def two_wirings(backend: str, *, frozen: bool) -> tuple[gn.GrapNet, gn.GrapNet]:
    """Returns two nets with as many relations, and as many frozen ones, in other places."""
    source = wired_net([0, 0, 1, 2, 3], [0, 1, 2, 0, 1], seed=1)
    target = wired_net([0, 1, 1, 3, 3], [2, 0, 1, 1, 2], seed=2)
    target.execution.use(backend)
    for net, place in ((source, 0), (target, 3)):
        if frozen:
            with net.edit(reason="freeze") as edit:
                edit.freeze(net.layers[0].outgoing()[place : place + 1])
        require_sound(net, inputs(4))
    return source, target


def copy_entries(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copies a state dict as loops do that update a target network."""
    for name, value in target.items():
        value.copy_(source[name])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_dict_written_in_place_leaves_the_wiring_alone(backend: str, frozen: bool) -> None:
    source, target = two_wirings(backend, frozen=frozen)
    relations = wiring(target)
    held = target.layers[0].outgoing().frozen.tolist()
    copy_entries(source.state_dict(), target.state_dict())
    assert wiring(target) == relations
    assert target.layers[0].outgoing().frozen.tolist() == held
    require_sound(target, inputs(4))
    # The entries are not compared with themselves.
    with pytest.raises(gn.errors.TopologyError):
        target.load_state_dict(source.state_dict())


# Weights that other code writes or replaces


def write_in_place(net: gn.GrapNet) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-2)


def write_through_data(net: gn.GrapNet) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(-2)


def replace_data(net: gn.GrapNet) -> None:
    for parameter in net.parameters():
        parameter.data = -2 * parameter.data


def set_storage(net: gn.GrapNet) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.set_(-2 * parameter.detach())


def replace_parameters(net: gn.GrapNet) -> None:
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(-2 * parameter.detach()))


def swap_parameters(net: gn.GrapNet) -> None:
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(-2 * parameter.detach()))


def cast_twice(net: gn.GrapNet) -> None:
    net.float()
    write_in_place(net)
    net.double()


def assign_a_state_dict(net: gn.GrapNet) -> None:
    twin = copy.deepcopy(net)
    write_in_place(twin)
    net.load_state_dict(twin.state_dict(), assign=True)


def step_of_a_fused_optimizer(net: gn.GrapNet) -> None:
    for parameter in net.parameters():
        parameter.grad = 3 * parameter.detach()
    torch.optim.SGD(net.parameters(), lr=1.0, fused=True).step()


WRITES: list[Callable[[gn.GrapNet], None]] = [
    write_in_place,
    write_through_data,
    replace_data,
    set_storage,
    replace_parameters,
    swap_parameters,
    cast_twice,
    assign_a_state_dict,
    step_of_a_fused_optimizer,
]


def outputs_of(net: gn.GrapNet) -> list[Tensor]:
    """Returns the output in every gradient mode, and that of the walk."""
    found = [net(inputs()).detach(), net.walk(inputs()).detach()]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found.append(net(inputs()).clone())
    return found


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_every_pass_sees_the_weights_that_other_code_has_written(
    maker: str, backend: str, write: Callable[[gn.GrapNet], None]
) -> None:
    net = MAKERS[maker](backend)
    before = outputs_of(net)[0]
    write(net)
    first, *others = outputs_of(net)
    assert not torch.allclose(first, before)
    for other in others:
        torch.testing.assert_close(other, first)
    weights = net.layers[0].outgoing().weights.detach().clone()
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing()[:2])
    assert torch.equal(net.layers[0].outgoing().weights, weights[2:])
    first, *others = outputs_of(net)
    for other in others:
        torch.testing.assert_close(other, first)
    gn.check(net)


# Entries that look shared


def shared_names(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the entries that accelerate takes for one tensor: those at one address."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def attending_net() -> gn.GrapNet:
    net = drawn_net()
    net.execution.use("attention")
    return net


def frozen_net() -> gn.GrapNet:
    net = drawn_net()
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.select())
    return net


def bare_net() -> gn.GrapNet:
    """Returns a net whose second transition has lost its relations."""
    net = drawn_net()
    with net.edit(reason="empty", allow_dead=True) as edit:
        edit.cut(net.layers[1].outgoing())
    return net


STATES: dict[str, Callable[[], gn.GrapNet]] = {
    "full": lambda: gn.GrapNet([4, 6, 2]),
    "empty": lambda: gn.GrapNet([49, 0, 10]),
    "edited": edited_net,
    "frozen": frozen_net,
    "bare": bare_net,
    "attention": attending_net,
}


@pytest.mark.parametrize("maker", STATES)
def test_no_two_entries_of_a_state_dict_look_shared(maker: str) -> None:
    net = STATES[maker]()
    for state in (net.state_dict(), nn.Sequential(net, nn.Linear(2, 2)).state_dict()):
        assert shared_names(state) == []
        assert all(value.untyped_storage().data_ptr() != 0 for value in state.values())
    # The control: the rule finds what is shared.
    shared = torch.ones(2)
    assert shared_names({"a": shared, "b": shared[:1]}) == [["a", "b"]]


@pytest.mark.parametrize("maker", STATES)
def test_safetensors_save_and_load_a_net(maker: str, tmp_path: Path) -> None:
    net = STATES[maker]()
    twin = copy.deepcopy(net)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    save_model(net, str(tmp_path / "net"))
    load_model(twin, str(tmp_path / "net"))
    for name, value in net.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)


# Distributed state dicts


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("maker", STATES)
def test_a_distributed_state_dict_is_that_of_the_net_and_is_loaded(maker: str) -> None:
    net = STATES[maker]()
    model = nn.Sequential(net, nn.Linear(2, 2))
    require_equal(get_model_state_dict(model), model.state_dict())
    state = copy.deepcopy(get_model_state_dict(net))
    require_equal(state, net.state_dict())
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    set_model_state_dict(net, state)
    require_equal(net.state_dict(), state)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_distributed_state_dict_brings_the_optimizer_along(maker: str) -> None:
    net = MAKERS[maker]("reference")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(inputs()).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = copy.deepcopy(get_state_dict(net, optimizer))
    before = [copy.deepcopy(optimizer.state[parameter]) for parameter in net.parameters()]
    expected = net(inputs())
    net(inputs()).square().sum().backward()
    optimizer.step()
    set_state_dict(
        net,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    assert torch.equal(net(inputs()), expected)
    for parameter, state in zip(net.parameters(), before, strict=True):
        for name, value in state.items():
            assert torch.equal(optimizer.state[parameter][name], value)
