"""A small net with absent relations, batches for it, and a pass that leaves gradients."""

import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules.gradients import GradientRecorder

F64 = torch.float64


def patchy_net() -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet([6, 9, 8, 3], density=0.6, dtype=F64)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
    return net


def armed(recorder: GradientRecorder, net: gn.GrapNet) -> GradientRecorder:
    recorder.arm(net)
    return recorder


def batch(size: int = 11, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(size, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def run(net: gn.GrapNet, size: int = 11, seed: int = 0) -> None:
    net(batch(size, seed, net.transitions[0].weight.dtype)).square().sum().backward()


def related(net: gn.GrapNet, t: int) -> Tensor:
    """Says for every pair whether there is a relation."""
    found, relations = (
        torch.zeros(len(net.layers[t]), len(net.layers[t + 1]), dtype=torch.bool),
        net.layers[t].outgoing(),
    )
    found[
        net.layers[t].rows(relations.parents).long(),
        net.layers[t + 1].rows(relations.children).long(),
    ] = True
    return found
