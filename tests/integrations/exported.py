"""Nets and models to export: randomly edited, convolutional, a transformer, tied."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import grapnet as gn

ACTIVATIONS = [
    "relu",
    "gelu",
    "tanh",
    "sigmoid",
    "silu",
    "leaky_relu",
    "elu",
    "softplus",
    "identity",
]
ACTIVATIONS += ["gelu_tanh", "quick_gelu", "mish", "selu", "relu6", "hardswish", "leaky_relu(0.2)"]


def random_net(seed: int) -> gn.GrapNet:
    """Returns a net of random sizes after three random edits: cuts, removed and grown nodes, mixed
    activations.
    """
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes = draw.integers(2, 10, size=draw.integers(2, 5)).tolist()
    kinds = draw.choice(ACTIVATIONS, size=len(sizes) - 1).tolist()
    net = gn.GrapNet(sizes, activation=kinds, density=float(draw.uniform(0.4, 1)))
    for _ in range(3):
        with net.edit(allow_dead=True) as edit:
            n = int(draw.integers(1, len(net.layers)))
            layer, above = net.layers[n], net.layers[n - 1]
            edit.cut(above.outgoing().smallest(fraction=float(draw.uniform(0, 0.4))))
            edit.set_activation(layer[: len(layer) // 2], str(draw.choice(ACTIVATIONS)))
            edit.freeze(layer[-1], outgoing=False)
            if n < len(net.layers) - 1:
                edit.remove_nodes(layer[0])
                grown = edit.add_nodes(
                    n, int(draw.integers(1, 4)), activation=str(draw.choice(ACTIVATIONS))
                )
                edit.connect(above[::2], grown)
                edit.connect(grown, net.layers[n + 1][:2])
    with net.edit(
        allow_dead=True
    ) as edit:  # a node that nobody leads to, and one that leads nowhere
        edit.cut(net.layers[-1][0].incoming())
        edit.cut(net.layers[0][-1].outgoing())
    return net


class SideBySide(nn.Module):
    """Several nets, each with an input and an output of its own: writing one file takes less time
    than writing each.
    """

    def __init__(self, nets: list[gn.GrapNet]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(net(x) for net, x in zip(self.nets, xs, strict=True))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, net.sizes[0]) for net in self.nets)


class Block(nn.Module):
    """A transformer layer of one's own: attention, and a net as its position-wise FFN."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = gn.GrapNet([width, hidden, width], activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.ffn(self.second(x))


class Tied(nn.Module):
    """One net in two places, and one Parameter of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = gn.GrapNet([4, 3, 4])
        self.scale = self.same = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x) * self.scale) * self.same


def prune(net: gn.GrapNet) -> None:
    with net.edit(reason="half of it", allow_dead=True) as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=0.5))
        edit.set_activation(net.layers[-1][:2], "tanh")


def convolutional() -> tuple[nn.Module, Tensor]:
    net = gn.GrapNet([72, 8, 3])
    prune(net)
    norm = nn.BatchNorm2d(2)
    norm(torch.randn(8, 2, 5, 5))  # statistics of its own
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Dropout(0.5), net), torch.randn(
        4, 1, 8, 8
    )


def transformer() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), Block(8, 16))
    prune(model[1].ffn)
    return model, torch.randn(3, 5, 4)


def tied() -> tuple[nn.Module, Tensor]:
    model = Tied()
    prune(model.first)
    return model, torch.randn(4, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    build.__name__: build for build in (convolutional, transformer, tied)
}
