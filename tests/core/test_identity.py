"""What was captured before an edit works after it: Parameters, hooks and copies."""

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import grapnet as gn

Action = Callable[[gn.GrapNet], object]


@pytest.fixture
def net() -> gn.GrapNet:
    """A net that has been edited once, so that there is something to undo."""
    torch.manual_seed(0)
    net = gn.GrapNet([4, 3, 2])
    with net.edit(reason="first") as edit:
        edit.cut(net.layers[0][3], slots=[2])
    return net


def x(*, grad: bool = False) -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_(grad)


def edited(operation: Callable[[gn.GrapNet, gn.Edit], object], *, trial: bool = False) -> Action:
    def action(net: gn.GrapNet) -> None:
        with net.edit(reason="change", trial=trial) as edit:
            operation(net, edit)
            edit.commit()

    return action


def swap_one(net: gn.GrapNet, edit: gn.Edit) -> None:
    """As many relations as before, in the same places of the array."""
    edit.cut(net.layers[0][0], slots=[-1])
    edit.connect(net.layers[0][0], net.layers[0][0].children[-1])


def grow(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.connect(net.layers[0], edit.add_nodes(1, 2))


ACTIONS: dict[str, Action] = {
    "cut": edited(lambda net, edit: edit.cut(net.layers[0][0], slots=[0])),
    "grow": edited(grow),
    "equal sizes": edited(swap_one),
    "freeze only": edited(lambda net, edit: edit.freeze(net.layers[1][0])),
    "names only": edited(lambda net, edit: edit.set_activation(net.layers[1], "tanh")),
    "undo": lambda net: net.undo(),
    "trial": edited(lambda net, edit: edit.cut(net.layers[0][0], slots=[0]), trial=True),
}


def test_parameters_keep_their_identity_through_every_edit(net: gn.GrapNet) -> None:
    parameters, modules = list(net.parameters()), [*net.layers, *net.transitions]
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
    )
    gn.attach(optimizer, net)
    for name, action in ACTIONS.items():
        loss = net(x()).sum()
        action(net)
        assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True)), name
        assert all(a is b for a, b in zip([*net.layers, *net.transitions], modules, strict=True)), (
            name
        )
        optimizer.zero_grad()
        net(x()).square().sum().backward()
        assert nn.utils.clip_grad_norm_(parameters, 1e-3) > 0
        assert torch.stack([p.grad.norm() for p in parameters]).norm() <= 1.001e-3
        values = [p.detach().clone() for p in parameters]
        optimizer.step()
        assert any(
            not torch.equal(p, value) for p, value in zip(net.parameters(), values, strict=True)
        )
        del loss


def test_an_edit_keeps_flags_and_missing_gradients(net: gn.GrapNet) -> None:
    net.transitions[0].requires_grad_(False)
    net(x()).sum().backward()
    net.layers[1].bias.grad = None
    for action in ACTIONS.values():
        action(net)
        assert [t.weight.requires_grad for t in net.transitions] == [False, True]
        assert net.transitions[0].weight.grad is net.layers[1].bias.grad is None
        assert net.transitions[1].weight.grad.shape == net.transitions[1].weight.shape


def test_hooks_on_parameters_survive(net: gn.GrapNet) -> None:
    seen: list[str] = []
    weight = net.transitions[0].weight
    weight.register_hook(lambda grad: seen.append(f"gradient {len(grad)}"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"accumulated {len(p.grad)}"))
    alive = net(x()).sum()
    for action in ("cut", "grow", "freeze only", "undo"):
        ACTIONS[action](net)
        seen.clear()
        net(x()).sum().backward()
        assert seen == [f"gradient {len(weight)}", f"accumulated {len(weight)}"], action
    del alive


def test_functional_call_uses_the_parameters_it_is_given(net: gn.GrapNet) -> None:
    ACTIONS["freeze only"](net)
    doubled = {name: (2 * p).detach().requires_grad_() for name, p in net.named_parameters()}
    expected = copy.deepcopy(net)
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(2)
    output = functional_call(net, doubled, (x(),))
    assert torch.allclose(output, expected(x()))
    assert not torch.allclose(output, net(x()))
    output.sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in doubled.values())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_is_independent_and_follows_nobody(
    net: gn.GrapNet, duplicate: Callable[[gn.GrapNet], gn.GrapNet]
) -> None:
    told: list[int] = []

    class Follower:
        def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
            return lambda: told.append(commit.version)

    follower = Follower()
    net.follow(follower)
    ACTIONS["freeze only"](net)
    twin = duplicate(net)
    assert torch.equal(twin(x()), net(x()))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for action in ("undo", "grow", "cut", "trial"):
        ACTIONS[action](twin)
        gn.check(twin)
    twin.layers[1].biases = 7.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert (told, net.version, twin.version) == ([2], 2, 5)
    assert [c.version for c in twin.history] == [1, 2, 3, 4, 5]
    assert (twin.layers[1][0].layer, net.layers[1].graph is net, twin.layers[1].graph is twin) == (
        1,
        True,
        True,
    )
    ACTIONS["undo"](net)
    assert told == [2, 3]
    del follower
    gc.collect()
    ACTIONS["cut"](net)
    assert told == [2, 3]  # followers are held weakly
