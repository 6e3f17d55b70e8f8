"""Nets, samples and a reference for closed-form readouts."""

from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.continual.readout import ClosedFormReadout

SIZES = [5, 12, 4]


def make_net(
    *, density: float = 1.0, sizes: list[int] | None = None, dtype: torch.dtype = torch.float64
) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(3)
    return gn.GrapNet(
        sizes or SIZES, density=density, activation="tanh", dtype=dtype, generator=generator
    )


def batch(n: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, 2 * (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()


def watching(net: gn.GrapNet, **settings: Any) -> ClosedFormReadout:
    readout = ClosedFormReadout(net, **settings)
    for x, y in zip(*(part.split(25) for part in batch()), strict=True):
        readout.update(x, y)
    return readout


def hidden(net: gn.GrapNet, x: Tensor) -> Tensor:
    """Returns what layer 1 says, computed from a dense matrix."""
    return torch.tanh(x @ matrix(net, 0) + net.layers[1].biases.detach())


def matrix(net: gn.GrapNet, layer: int) -> Tensor:
    relations, (upper, lower) = net.layers[layer].outgoing(), net.layers[layer : layer + 2]
    found = torch.zeros(len(upper), len(lower), dtype=torch.float64)
    found[upper.rows(relations.parents).long(), lower.rows(relations.children).long()] = (
        relations.weights.detach()
    )
    return found


def reference(h: Tensor, y: Tensor, ridge: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns weights and bias of one output by the centred normal equations."""
    centred = h - h.mean(0)
    eye = torch.eye(h.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(centred.T @ centred + ridge * eye, centred.T @ (y - y.mean()))
    return weight, y.mean() - h.mean(0) @ weight


def is_solved(net: gn.GrapNet, h: Tensor, y: Tensor, tolerance: float = 1e-8) -> bool:
    """Says whether every output has what the reference gives over its own parents."""
    weights, biases = matrix(net, 1), net.layers[2].biases.detach()
    relations = net.layers[1].outgoing()
    for c, uid in enumerate(net.layers[2].uids):
        parents = net.layers[1].rows(relations.parents[relations.children == uid]).long()
        weight, bias = reference(h[:, parents], (y == c).double())
        if not torch.allclose(weights[parents, c], weight, rtol=0, atol=tolerance):
            return False
        if not torch.allclose(biases[c], bias, rtol=0, atol=tolerance):
            return False
    return True


def shrink(net: gn.GrapNet) -> None:
    with net.edit(reason="shrink") as edit:
        edit.remove_nodes(net.layers[1][[1, 4]])
        edit.cut(net.layers[0][0].outgoing(to=net.layers[1][0]))
