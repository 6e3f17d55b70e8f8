"""Nets that run with attention, and the same by the dense reference."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.execution._attention import dense_attention

from .figures import differences, inputs, results

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


def by_reference(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Runs every transition by the dense reference; a layer adds up what enters it."""
    outputs = [x]
    for number, layer in enumerate(net.layers):
        if number == 0:
            continue
        z = layer.biases.expand(len(x), -1)
        for t in net.entering(number):
            transition = net.transitions[t]
            z = z + dense_attention(
                outputs[transition.source],
                transition.values(),
                net.columns[f"key_{t}"].value,
                net.columns[f"query_{t}"].value,
                transition.topology,
                torch.zeros_like(layer.biases),
            )
        outputs.append(layer(z))
    return outputs[-1]


def nearness(net: gn.GrapNet, batch: int) -> float:
    """Returns how far two ways to compute a result may be apart, relative to its largest number.

    In float32 every addition may round by one unit: over the parents of a child twice, for its
    shares and for its sum, over the children of a parent likewise on the way back, and over the
    batch; another two passes give room for terms that are larger than their sum.
    """
    if net.transitions[0].weight.dtype == torch.float64:
        return 1e-12
    additions = batch + 2 * sum(net.sizes[:-1]) + 2 * sum(net.sizes[1:])
    return 3 * additions * torch.finfo(torch.float32).eps


def difference(net: gn.GrapNet, x: Tensor) -> float:
    """Returns the largest difference from the dense reference, relative to the largest value of
    each result.
    """
    found = results(net, x)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())
    wanted = results(net, x, partial(by_reference, net))
    return max(off / max(largest, 1e-30) for _, off, largest in differences(found, wanted))


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
    loss = (net(inputs(net, 9)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
