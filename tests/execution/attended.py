"""Nets that run with attention, and the same by the dense reference."""

from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.execution.attention import dense_attention

DTYPES = (torch.float64, torch.float32)


def attended(
    sizes: list[int], seed: int = 0, *, density: float = 0.7, **options: Any
) -> gn.GrapNet:
    """Returns a net all of whose transitions run with attention."""
    generator = torch.Generator().manual_seed(seed)
    options = {"activation": "tanh", "dtype": torch.float64, **options}
    net = gn.GrapNet(sizes, density=density, generator=generator, **options)
    net.execution.use("attention", generator=generator)
    return net


def inputs(net: gn.GrapNet, batch: int = 9) -> Tensor:
    shape = (batch, net.sizes[0])
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype_of(net)
    )


def dtype_of(net: gn.GrapNet) -> torch.dtype:
    return net.transitions[0].weight.dtype


def by_reference(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Runs every transition by the dense reference."""
    for t, transition in enumerate(net.transitions):
        key, query, bias = (
            net.columns[f"key_{t}"].value,
            net.columns[f"query_{t}"].value,
            net.layers[t + 1].biases,
        )
        z = dense_attention(x, transition.values(), key, query, transition.topology, bias)
        x = net.layers[t + 1](z)
    return x


def results(net: gn.GrapNet, forward: Any, x: Tensor) -> dict[str, Tensor]:
    """Returns output, loss and the gradient of everything, by name."""
    x = x.clone().requires_grad_()
    output = forward(x)
    loss = (
        output * torch.linspace(-1, 2, output.numel(), dtype=x.dtype).view_as(output)
    ).sum() + output.square().sum()
    named = {"x": x, **dict(net.named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), found, strict=True)
    }
    return {"output": output.detach(), "loss": loss.detach(), **gradients}


def nearness(net: gn.GrapNet, batch: int) -> float:
    """Returns how far two ways to compute a result may be apart, relative to its largest number.

    In float32 every addition may round by one unit: over the parents of a child twice, for its
    shares and for its sum, over the children of a parent likewise on the way back, and over the
    batch; another two passes give room for terms that are larger than their sum.
    """
    if dtype_of(net) == torch.float64:
        return 1e-12
    additions = batch + 2 * sum(net.sizes[:-1]) + 2 * sum(net.sizes[1:])
    return 3 * additions * torch.finfo(torch.float32).eps


def difference(net: gn.GrapNet, x: Tensor) -> float:
    """Returns the largest difference from the dense reference, relative to the largest value of
    each result.
    """
    fast, slow = results(net, net, x), results(net, lambda h: by_reference(net, h), x)
    assert all(bool(torch.isfinite(value).all()) for value in fast.values())
    gaps = [
        (fast[name] - slow[name]).abs().max() / slow[name].abs().max().clamp(min=1e-30)
        for name in fast
        if fast[name].numel()
    ]
    return max((float(gap) for gap in gaps), default=0.0)


def trained(
    optimizer: Any = torch.optim.Adam, **options: Any
) -> tuple[gn.GrapNet, torch.optim.Optimizer]:
    """Returns an attended net that took three steps, and its optimizer, attached before it was
    attended.
    """
    torch.manual_seed(0)
    net = gn.GrapNet([6, 5, 4], activation="tanh", density=0.8, dtype=torch.float64)
    made = optimizer(net.parameters(), **{"lr": 0.01, **options})
    gn.attach(made, net)
    net.execution.use("attention")
    for _ in range(3):
        step(net, made)
    return net, made


def step(net: gn.GrapNet, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = (net(inputs(net)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
