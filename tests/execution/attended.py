"""Nets that run with attention, and the same by the dense reference."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.core._transition import Topology

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


def dense_attention(
    x: Tensor, values: Tensor, key: Tensor, query: Tensor, topology: Topology, bias: Tensor
) -> Tensor:
    """Computes attention over all pairs, with -inf for absent relations.

    Args:
        x: the outputs of the parents, [batch, n_parents].
        values: the weights in the order of the relations.
        key: one number per parent.
        query: one number per child.
        topology: the relations.
        bias: one number per child.
    """
    pairs = topology.parents().long(), topology.child.long()
    related = torch.zeros(
        topology.n_parents, topology.n_children, dtype=torch.bool, device=x.device
    )
    related[pairs] = True
    weights = values.new_zeros(related.shape).index_put(pairs, values)
    scores = x[:, :, None] * key[:, None] * query  # [batch, n_parents, n_children]
    shares = scores.masked_fill(~related, -torch.inf).softmax(1).masked_fill(~related, 0)
    return (shares * x[:, :, None] * weights).sum(1) + bias


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
