"""What was captured before an edit works after it: Parameters, hooks and copies."""

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch

import grapnet as gn

from .test_stale_backward import KINDS, made, x


@pytest.fixture
def net() -> gn.GrapNet:
    """A net that has been edited once, so that there is something to undo."""
    return made("reference")


def test_an_edit_keeps_flags_and_missing_gradients(net: gn.GrapNet) -> None:
    net.transitions[0].requires_grad_(False)
    net(x()).sum().backward()
    net.layers[1].bias.grad = None
    for kind in ("cut", "add nodes", "exchange", "freeze", "set activation", "undo", "trial"):
        KINDS[kind].edit(net)
        assert [t.weight.requires_grad for t in net.transitions] == [False, True]
        assert net.transitions[0].weight.grad is net.layers[1].bias.grad is None
        assert net.transitions[1].weight.grad.shape == net.transitions[1].weight.shape


def test_hooks_on_parameters_survive(net: gn.GrapNet) -> None:
    seen: list[str] = []
    weight = net.transitions[0].weight
    weight.register_hook(lambda grad: seen.append(f"gradient {len(grad)}"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"accumulated {len(p.grad)}"))
    alive = net(x()).sum()
    for action in ("cut", "add nodes", "freeze", "undo"):
        KINDS[action].edit(net)
        seen.clear()
        net(x()).sum().backward()
        assert seen == [f"gradient {len(weight)}", f"accumulated {len(weight)}"], action
    del alive


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_is_independent_and_follows_nobody(
    net: gn.GrapNet, duplicate: Callable[[gn.GrapNet], gn.GrapNet]
) -> None:
    versions: list[int] = []

    class Follower:
        def prepare(self, graph: gn.GrapNet, commit: gn.Commit) -> Callable[[], None]:
            return lambda: versions.append(commit.version)

    follower = Follower()
    net.follow(follower)
    KINDS["freeze"].edit(net)
    twin = duplicate(net)
    assert torch.equal(twin(x()), net(x()))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for action in ("undo", "add nodes", "cut", "trial"):
        KINDS[action].edit(twin)
        gn.check(twin)
    twin.layers[1].biases = 7.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert (versions, net.version, twin.version) == ([2], 2, 5)
    assert [c.version for c in twin.history] == [1, 2, 3, 4, 5]
    assert (twin.layers[1][0].layer, net.layers[1].graph is net, twin.layers[1].graph is twin) == (
        1,
        True,
        True,
    )
    KINDS["undo"].edit(net)
    assert versions == [2, 3]
    del follower
    gc.collect()
    KINDS["cut"].edit(net)
    assert versions == [2, 3]  # followers are held weakly
