"""Nets to take snapshots of, and what the tests of snapshots do with them."""

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn


def cube(z: Tensor) -> Tensor:
    return z**3


gn.execution.register_activation("test_snapshot.cube", cube)


def full(**kwargs) -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], **kwargs)


def ragged(**kwargs) -> gn.GrapNet:
    return gn.GrapNet([6, 5, 4, 3], density=0.4, **kwargs)


def mixed(**kwargs) -> gn.GrapNet:
    net = gn.GrapNet([6, 5, 4, 3], activation="gelu", **kwargs)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
        edit.set_activation(net.layers[1][1], "test_snapshot.cube")
        edit.set_activation(net.layers[3][:1], "sigmoid")
    return net


def cut(**kwargs) -> gn.GrapNet:
    """Frozen, pruned, grown, with a node that nobody leads to and one that leads nowhere."""
    net = full(**kwargs)
    with net.edit() as edit:
        edit.freeze(net.layers[1][1:3])
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.3))
        edit.cut(net.layers[1][0].incoming())
        edit.cut(net.layers[2][1].outgoing())
        edit.connect(net.layers[1], edit.add_nodes(2, 2, bias="linear"))
    return net


def narrow(**kwargs) -> gn.GrapNet:
    return gn.GrapNet.from_relations(
        [3, 0, 2], [([], []), ([], [])], biases=[[], [0.5, -1.5]], **kwargs
    )


GRAPHS = {build.__name__: build for build in (full, ragged, mixed, cut, narrow)}
every_graph = pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS)


def inputs(net: gn.GrapNet, *batch: int) -> Tensor:
    return torch.randn(
        *batch, net.sizes[0], dtype=net.transitions[0].weight.dtype, device=net.device
    )


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def addresses(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(module) if tensor.numel()}
