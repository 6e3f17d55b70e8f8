"""Where and how a net runs: dtypes, transforms, modes and threads leave its plans fit for
everything else.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import grapnet as gn

from .figures import inputs, require_reference
from .graphs import BACKEND_NAMES, EDITS, edited

backends = pytest.mark.parametrize("backend", BACKEND_NAMES)


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    return gn.GrapNet([6, 8, 5, 3], density=0.5, activation="tanh", dtype=torch.float64)


@backends
def test_other_dtypes_and_state_dicts(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    net(inputs(net, 4))
    net.float()
    assert net.execution.choices() == [backend] * 3
    require_reference(net, inputs(net, 4))
    net.double()
    require_reference(net, inputs(net, 4))
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    require_reference(net, inputs(net, 4))
    net.load_state_dict(state)
    require_reference(net, inputs(net, 4))
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(net.parameters()) + 1, net.parameters()
    )
    require_reference(net, inputs(net, 4))


def per_sample(net: gn.GrapNet, x: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of every sample."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    loss = lambda p, row: functional_call(net, p, (row,)).square().sum()  # noqa: E731
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)


def in_inference_mode(net: gn.GrapNet, x: Tensor) -> None:
    with torch.inference_mode():
        net(x)


def without_gradients(net: gn.GrapNet, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def with_another_default_device(net: gn.GrapNet, x: Tensor) -> None:
    with torch.device("meta"):
        assert net(x).device.type == "cpu"


def traced(net: gn.GrapNet, x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(net, backend="eager")(x)


def under_autocast(net: gn.GrapNet, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x.float())


FIRST: dict[str, Callable[[gn.GrapNet, Tensor], object]] = {
    "inference mode": in_inference_mode,
    "no_grad": without_gradients,
    "default device": with_another_default_device,
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "grad": lambda net, x: torch.func.grad(lambda x: net(x).sum())(x),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "per-sample gradients": per_sample,
    "functional_call": lambda net, x: functional_call(
        net, {n: p * 2 for n, p in net.named_parameters()}, (x,)
    ),
    "compile": traced,
    "autocast": under_autocast,
}


@pytest.mark.parametrize("first", FIRST)
@backends
def test_where_a_plan_was_made_does_not_matter(net: gn.GrapNet, backend: str, first: str) -> None:
    net.execution.use(backend)
    x = inputs(net, 4)
    for edit in ("rewire", "add_nodes"):
        FIRST[first](net, x)
        require_reference(net, x)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        net(x).square().sum().backward()
        optimizer.step()
        net.zero_grad()
        FIRST[first](net, x)  # and with plans that exist
        edited(net, EDITS[edit])
    require_reference(net, x)


@backends
def test_an_edit_under_no_grad_makes_plans_that_train(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    net(inputs(net, 4))
    with torch.no_grad():
        edited(net, EDITS["rewire"])
    require_reference(net, inputs(net, 4))


@backends
def test_gradients_of_samples_are_those_of_a_loop(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    edited(net, EDITS["freeze"])
    x = inputs(net, 4)
    found = per_sample(net, x)
    parameters = dict(net.named_parameters())
    for row in range(4):
        expected = torch.autograd.grad(net(x[row]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(found[name][row], gradient, atol=1e-12), name
    jacobian = torch.func.jacrev(net)(x[0])
    by_hand = torch.stack(
        [torch.autograd.grad(net(x0 := x[0].clone().requires_grad_())[j], x0)[0] for j in range(3)]
    )
    assert torch.allclose(jacobian, by_hand, atol=1e-12)


@backends
def test_functional_call_takes_values_in_any_layout(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    x = inputs(net, 4)
    constant = {
        name: p.new_full((1,) * p.dim(), 0.25).expand(p.shape) for name, p in net.named_parameters()
    }
    spread = {name: p.detach().repeat_interleave(2, 0)[::2] for name, p in net.named_parameters()}
    expected = copy.deepcopy(net)
    with torch.no_grad():
        for p in expected.parameters():
            p.fill_(0.25)
    assert torch.allclose(functional_call(net, constant, (x,)), expected(x), atol=1e-12)
    assert torch.allclose(functional_call(net, spread, (x,)), net(x), atol=1e-12)


@backends
def test_a_frozen_module_and_hooks_see_what_they_should(net: gn.GrapNet, backend: str) -> None:
    net.execution.use(backend)
    x = inputs(net, 4)
    seen = []
    handle = net.transitions[1].register_forward_hook(lambda module, args, z: seen.append(z))
    net(x)
    handle.remove()
    h = net.layers[1](
        net.execution.plan(0, 4)(x, net.transitions[0].values(), net.layers[1].values())
    )
    z = net.execution.plan(1, 4)(h, net.transitions[1].values(), net.layers[2].values())
    assert torch.allclose(seen[0], z, atol=1e-12)
    net.requires_grad_(False)
    assert not net(x).requires_grad
    assert torch.autograd.grad(net(x.requires_grad_()).sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("grad", [True, False])
def test_hooks_of_all_modules_see_every_layer_and_transition(net: gn.GrapNet, grad: bool) -> None:
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    handles = [
        register_module_forward_pre_hook(lambda module, args: before.append(module)),
        register_module_forward_hook(lambda module, args, output: after.append(module)),
    ]
    try:
        with torch.set_grad_enabled(grad):
            net(inputs(net, 4))
    finally:
        for handle in handles:
            handle.remove()
    order = [net.layers[0]]
    for transition, layer in zip(net.transitions, net.layers[1:], strict=True):
        order += [transition, layer]
    assert before == [net, *order]
    assert after == [*order, net]


def test_a_layer_that_is_compiled_in_place_runs_compiled(net: gn.GrapNet) -> None:
    compiled = []

    def backend(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        compiled.append(module)
        return module.forward

    x = inputs(net, 4)
    with torch.no_grad():
        expected = net(x)
        net.layers[1].compile(backend=backend)
        torch.testing.assert_close(net(x), expected)
    assert compiled
