"""Weights that torch.nn.utils.prune has pruned away, or that are zero: frozen, or absent
relations.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import grapnet as gn

from .models import train


def l1(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "weight", 0.5)


def biases(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "bias", 3)
    prune.l1_unstructured(module[2], "weight", 5)


def iterated(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "weight", 0.3)
    prune.random_unstructured(module[0], "weight", 0.4)
    prune.ln_structured(module[0], "weight", 1, n=1, dim=1)


def everywhere(module: nn.Sequential) -> None:
    prune.global_unstructured(
        [(module[0], "weight"), (module[2], "weight")], prune.L1Unstructured, amount=0.8
    )


def everything(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "weight", 1.0)


WAYS = [l1, biases, iterated, everywhere, everything]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=0.1)


def pruned_entries(module: nn.Sequential) -> int:
    return sum(
        int((buffer == 0).sum())
        for name, buffer in module.named_buffers()
        if name.endswith("_mask")
    )


def require_same_weights(net: gn.GrapNet, module: nn.Module, tolerance: float = 1e-13) -> None:
    linears = [part for part in net.to_module() if isinstance(part, nn.Linear)]
    for mine, theirs in zip(
        linears, (m for m in module.modules() if isinstance(m, nn.Linear)), strict=True
    ):
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=0, atol=tolerance)
        torch.testing.assert_close(mine.bias, theirs.bias, rtol=0, atol=tolerance)


@pytest.mark.parametrize("drop_zeros", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_like_that_of_the_pruned_model(way, drop_zeros):
    module = mlp()
    twin = mlp()
    for one in (module, twin):  # torch cannot copy a pruned module
        torch.manual_seed(1)
        way(one)
    optimizer = adam(module.parameters())
    other = adam(twin.parameters())
    train(module, optimizer, range(3))
    train(twin, other, range(3))
    pruned = pruned_entries(module)
    net = gn.from_module(module, optimizer, drop_zeros=drop_zeros)
    gn.check(net)
    pruned_biases = int((module[0].bias_mask == 0).sum()) if hasattr(module[0], "bias_mask") else 0
    assert net.count().frozen == (pruned_biases if drop_zeros else pruned)
    assert net.count().relations == 5 * 7 + 7 * 3 - (pruned - pruned_biases if drop_zeros else 0)
    assert sum(p.numel() for p in net.parameters()) == 5 * 7 + 7 + 7 * 3 + 3 - pruned
    train(net, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    # pruning computes the weights ahead of a forward pass
    twin(torch.zeros(1, 5, dtype=torch.float64))
    require_same_weights(net, twin)


@pytest.mark.parametrize("drop_zeros", [False, True])
def test_a_pruned_model_is_grafted_and_comes_back_plain(drop_zeros):
    model, twin = (nn.Sequential(mlp(), nn.LayerNorm(3).double()) for _ in range(2))
    for one in (model, twin):
        torch.manual_seed(1)
        iterated(one[0])
        optimizer = adam(one.named_parameters())
        train(one, optimizer, range(2))
    model, twin = twin, model  # the optimizer is that of the second
    (net,) = gn.graft(model, "0", optimizer, drop_zeros=drop_zeros).values()
    assert optimizer.param_groups[0]["param_names"][:4] == [
        "0.layers.1.bias",
        "0.layers.2.bias",
        "0.transitions.0.weight",
        "0.transitions.1.weight",
    ]
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x))
    assert net.count().relations == 56 - (
        int((twin[0][0].weight_mask == 0).sum()) if drop_zeros else 0
    )
    gn.ungraft(model, optimizer=optimizer)
    assert list(model.state_dict()) == [
        "0.0.weight",
        "0.0.bias",
        "0.2.weight",
        "0.2.bias",
        "1.weight",
        "1.bias",
    ]
    assert optimizer.param_groups[0]["param_names"][:2] == ["0.0.weight", "0.0.bias"]
    torch.testing.assert_close(model(x), twin(x))
    assert torch.equal(model[0][0].weight, twin[0][0].weight)


@pytest.mark.parametrize("drop_zeros", [False, True])
def test_zeroed_weights_without_pruning(drop_zeros):
    module = mlp()
    with torch.no_grad():
        module[0].weight[module[0].weight.abs() < 0.2] = 0.0
        module[2].bias.zero_()
    zeros = int((module[0].weight == 0).sum())
    assert 0 < zeros < 35
    optimizer = adam(module.parameters())
    net = gn.from_module(module, optimizer, drop_zeros=drop_zeros)
    assert net.count().relations == 56 - (zeros if drop_zeros else 0)
    assert net.count().frozen == 0  # a zero that nobody pruned trains, when it stays
    twin = copy.deepcopy(module)
    absent = twin[0].weight == 0
    twin[0].weight.register_hook(
        lambda gradient: gradient.masked_fill(absent, 0.0) if drop_zeros else gradient
    )
    other = adam(twin.parameters())
    train(net, optimizer, range(3))
    train(twin, other, range(3))
    require_same_weights(net, twin)
    assert bool((twin[0].weight[absent] == 0).all()) == drop_zeros


def test_a_pruned_weight_that_is_unfrozen_trains_again():
    module = mlp()
    l1(module)
    optimizer = adam(module.parameters())
    train(module, optimizer, range(2))
    net = gn.from_module(module, optimizer)
    held = net.layers[0].outgoing()
    with net.edit(reason="give them another chance") as edit:
        edit.unfreeze(held)
    assert net.count().frozen == 0
    train(net, optimizer, range(2, 4))
    assert bool((net.layers[0].outgoing().weights != 0).all())
