"""Optimizers that keep copies of the weights, nested state, hidden state, or another optimizer."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adam, Optimizer, RMSprop, Rprop

import grapnet as gn

from .plain import grow, train


class Anchored(Optimizer):
    """SGD that is pulled towards a copy of the weights."""

    def __init__(self, parameters: Iterable[Tensor], name: str = "anchor") -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.name = name

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.name not in state:
                state[self.name] = parameter.clone()
            parameter.sub_(parameter.grad, alpha=0.01)
            parameter.lerp_(state[self.name], 0.1)


class Nested(Optimizer):
    """SGD whose momenta are in a container."""

    def __init__(self, parameters: Iterable[Tensor], kind: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = torch.zeros_like(parameter)
            if "momenta" in state:
                momentum = next(iter(tensors(state["momenta"])))
            momentum.mul_(0.9).add_(parameter.grad)
            state["momenta"] = self.kind(momentum)
            parameter.sub_(momentum, alpha=0.01)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def drawn_net() -> gn.GrapNet:
    generator = torch.Generator().manual_seed(0)
    return gn.GrapNet([5, 4, 3], activation="tanh", dtype=torch.float64, generator=generator)


def attached(make: Any, **settings: Any) -> tuple[gn.GrapNet, Optimizer]:
    net = drawn_net()
    optimizer = make(net.parameters())
    gn.attach(optimizer, net, **settings)
    train(net, optimizer, range(3))
    return net, optimizer


@pytest.mark.parametrize("newborn", ["zero", "mean"])
@pytest.mark.parametrize("make", [Anchored, ASGD], ids=["given", "known"])
def test_a_copy_of_the_weights_starts_from_the_newborn_weight(make: Any, newborn: Any) -> None:
    copies = None if make is ASGD else ["anchor"]
    net, optimizer = attached(make, copies=copies, newborn=newborn)
    entry = "ax" if make is ASGD else "anchor"
    weight = net.transitions[0].weight
    before = optimizer.state[weight][entry].clone()
    grow(net)
    # Two relations behind the four that each of the five inputs had.
    values = weight.detach().view(5, 6)
    moved = optimizer.state[weight][entry].view(5, 6)
    assert torch.equal(moved[:, 4:], values[:, 4:])
    assert torch.equal(moved[:, :4], before.view(5, 4))
    net.undo()
    assert torch.equal(optimizer.state[weight][entry], before)


def test_a_copy_starts_from_the_value_of_an_unfrozen_weight() -> None:
    net, optimizer = attached(Anchored, copies=["anchor"])
    weight = net.transitions[0].weight
    with net.edit() as edit:
        edit.freeze(net.layers[0][0].outgoing())
    train(net, optimizer, range(3))
    with net.edit() as edit:
        edit.unfreeze(net.layers[0][0].outgoing())
    assert torch.equal(optimizer.state[weight]["anchor"][:4], weight.detach()[:4])


def test_a_copy_moves_with_a_bias_that_takes_a_constant() -> None:
    net, optimizer = attached(Anchored, copies=["anchor"])
    bias = net.layers[2].bias
    distance = bias.detach() - optimizer.state[bias]["anchor"]
    before = bias.detach().clone()
    with net.edit() as edit:
        edit.cut(net.layers[1][0].incoming())
        edit.remove_orphans(fold_bias=True)
    assert not torch.allclose(bias, before)
    torch.testing.assert_close(bias.detach() - optimizer.state[bias]["anchor"], distance)


def test_an_unknown_copy_stops_the_edit_and_goes_on_once_it_is_named() -> None:
    net, optimizer = attached(Anchored)
    # By now no weight is near to where it started, and the first steps have shown it already.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-3.0)
    with pytest.raises(gn.errors.OptimizerError, match="anchor"):
        grow(net)
    assert net.version == 0
    gn.attach(optimizer, net, copies=["anchor"])
    grow(net)
    train(net, optimizer, range(2))


class Correlated(Optimizer):
    """Takes no step; an entry of its state is computed from the weights."""

    entry = "average"
    compute = staticmethod(torch.clone)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.entry] = self.compute(parameter.detach())


@pytest.mark.parametrize(
    ("kind", "entry"),
    [(SGD, "momentum_buffer"), (RMSprop, "grad_avg"), (Adadelta, "acc_delta"), (Rprop, "prev")],
)
def test_what_torch_knows_of_gradients_is_no_copy_however_near_it_is(kind: Any, entry: str) -> None:
    # As momentum is at first, where the loss is the square of the weights.
    make = type("OfTorch", (Correlated, kind), {"entry": entry})
    net, _ = attached(lambda parameters: make(parameters, lr=0.01))
    grow(net)


def shifted_at_zeros(weights: Tensor) -> Tensor:
    return torch.where(weights == 0, 0.001, weights)


UNLIKE = {
    # The distance is two thirds of its length.
    "too far": lambda weights: 0.6 * weights,
    "where the weights are 0": shifted_at_zeros,
}


@pytest.mark.parametrize("how", UNLIKE)
def test_an_entry_that_is_only_like_the_weights_stops_no_edit(how: str) -> None:
    net = drawn_net()
    with torch.no_grad():
        net.transitions[0].weight[:16] = 0.0
    make = type("Unlike", (Correlated,), {"compute": staticmethod(UNLIKE[how])})
    optimizer = make(net.parameters(), {"lr": 0.01})
    gn.attach(optimizer, net)
    train(net, optimizer, range(2))
    grow(net)
    assert net.version == 1


def test_a_user_can_say_that_nothing_is_a_copy() -> None:
    net, optimizer = attached(Anchored, copies=())
    grow(net)
    weight = net.transitions[0].weight
    assert not optimizer.state[weight]["anchor"].view(5, 6)[:, 4:].any()


def test_one_name_alone_is_refused() -> None:
    net = drawn_net()
    with pytest.raises(TypeError, match="copies"):
        gn.attach(Anchored(net.parameters()), net, copies="anchor")


CONTAINERS = {
    "list": lambda momentum: [momentum],
    "dict": lambda momentum: {0.9: momentum},
    "tuple in a dict": lambda momentum: {"first": (momentum, 3)},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_state_in_containers_follows(kind: str) -> None:
    net, optimizer = attached(lambda p: Nested(p, CONTAINERS[kind]))
    plain, momentum = attached(lambda p: SGD(p, lr=0.01, momentum=0.9))
    for one in (net, plain):
        with one.edit() as edit:
            edit.cut(one.layers[0][1].outgoing())
            edit.cut(one.layers[1][0].outgoing(slots=[0]))
        train(one, optimizer if one is net else momentum, range(3))
        one.undo()
        train(one, optimizer if one is net else momentum, range(3))
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_state_in_containers_that_has_not_followed_refuses_to_step(kind: str) -> None:
    net = drawn_net()
    optimizer = Nested(net.parameters(), CONTAINERS[kind])
    train(net, optimizer, range(2))
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
        edit.connect(net.layers[0][0], net.layers[0][0].children[0])
    with pytest.raises(gn.errors.OptimizerError):
        train(net, optimizer, range(1))


class Hidden(SGD):
    """SGD with numbers of the coordinates in an attribute."""

    def __init__(self, parameters: Iterable[nn.Parameter], hide: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.hidden = hide(self.param_groups[0]["params"])


HIDDEN = {
    "flat": lambda ps: torch.zeros(sum(p.numel() for p in ps)),
    "by Parameter": lambda ps: {id(p): {"momentum": torch.zeros_like(p)} for p in ps},
    "weights alone": lambda ps: [torch.zeros_like(p) for p in ps if p.dim() == 2],
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_numbers_of_the_coordinates_in_an_attribute_stop_the_edit(kind: str) -> None:
    net, _ = attached(lambda p: Hidden(p, HIDDEN[kind]))
    with pytest.raises(gn.errors.OptimizerError, match="hidden"):
        grow(net)
    assert net.version == 0


def test_numbers_of_the_coordinates_beside_the_state_of_parameters_stop_the_edit() -> None:
    net, optimizer = attached(Adam)
    optimizer.state["trac"] = {p: p.detach().clone().view(-1) for p in net.parameters()}  # pyright: ignore[reportArgumentType]
    with pytest.raises(gn.errors.OptimizerError, match="trac"):
        grow(net)
    assert net.version == 0


@pytest.mark.parametrize(
    "hide", [lambda ps: torch.zeros(4), lambda ps: list(ps), lambda ps: {"betas": [0.9]}]
)
def test_other_attributes_do_not(hide: Any) -> None:
    net, _ = attached(lambda p: Hidden(p, hide))
    grow(net)


def test_one_number_in_an_attribute_is_none_of_a_single_coordinate() -> None:
    net = gn.GrapNet.from_relations([2, 1], [([0], [0])], dtype=torch.float64)
    optimizer = Hidden(net.parameters(), lambda ps: torch.tensor(0.5))
    gn.attach(optimizer, net)
    train(net, optimizer, range(2))
    with net.edit() as edit:
        edit.connect(net.layers[0][1], net.layers[1])
    train(net, optimizer, range(2))


class Slow(Optimizer):
    """Lookahead: an optimizer around another, with slow weights of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.optimizer.step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "slow_param" not in state:
                state["slow_param"] = parameter.clone()
            state["slow_param"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow_param"])


def test_a_wrapper_follows_with_its_own_state_and_that_of_what_it_wraps() -> None:
    net, optimizer = attached(lambda parameters: Slow(Adam(parameters)))
    weight = net.transitions[0].weight
    grow(net)
    slow = optimizer.state[weight]["slow_param"].view(5, 6)
    assert torch.equal(slow[:, 4:], weight.detach().view(5, 6)[:, 4:])
    moments = optimizer.optimizer.state[weight]["exp_avg"].view(5, 6)  # pyright: ignore[reportAttributeAccessIssue]
    assert not moments[:, 4:].any()
    train(net, optimizer, range(2))
    gn.detach(optimizer, net)
    grow(net)
    with pytest.raises(gn.errors.OptimizerError):
        train(net, optimizer, range(1))


class Prepared(Optimizer):
    """Wraps an optimizer as accelerate's `prepare` does: it is one, and the inner one steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrapper", [True, False], ids=["wrapper", "inner"])
def test_an_optimizer_that_another_library_wraps_follows(wrapper: bool) -> None:
    net = drawn_net()
    optimizer = Prepared(Adam(net.parameters()))
    gn.attach(optimizer if wrapper else optimizer.optimizer, net)
    weight = net.transitions[0].weight
    for _ in range(2):
        net(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        grow(net)
        assert optimizer.state[weight]["exp_avg"].shape == weight.shape


def test_an_optimizer_that_steps_in_a_gradient_hook_follows() -> None:
    net = drawn_net()
    for parameter in net.parameters():
        optimizer = Adam([parameter], lr=0.01)
        gn.attach(optimizer, net)

        def step(hooked: Tensor, optimizer: Adam = optimizer) -> None:
            optimizer.step()
            hooked.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    x = torch.ones(2, 5, dtype=torch.float64)
    net(x).square().sum().backward()
    grow(net)
    before = [p.detach().clone() for p in net.parameters()]
    net(x).square().sum().backward()
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
