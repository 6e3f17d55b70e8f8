"""What the tests of recorders share: a net, passes over it, and everything that a recorder has
seen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import ActivationRecorder, CovarianceRecorder, GradientRecorder

MAKE: dict[str, Callable[[], Any]] = {
    "activations": lambda: ActivationRecorder(1),
    "covariances": lambda: CovarianceRecorder(1, 2),
    "gradients": lambda: GradientRecorder(1, 2),
}


def small_net(sizes: tuple[int, ...] = (5, 7, 4, 3), density: float = 0.7) -> gn.GrapNet:
    """Returns a net with absent relations and mixed activations."""
    torch.manual_seed(0)
    net = gn.GrapNet(list(sizes), density=density, dtype=torch.float64)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
    return net


def batch(net: gn.GrapNet, size: int = 40, seed: int = 0) -> Tensor:
    dtype = net.transitions[0].weight.dtype
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, net.sizes[0], dtype=dtype, generator=draw)


def armed(recorder: Any, net: gn.GrapNet) -> Any:
    recorder.arm(net)
    return recorder


def run(net: gn.GrapNet, size: int = 40, seed: int = 0) -> None:
    """One forward and one backward pass, so that every recorder sees something."""
    net(batch(net, size, seed)).square().sum().backward()


def outputs_of(net: gn.GrapNet, x: Tensor) -> list[np.ndarray]:
    """What every layer returns, computed from the weights alone, with dense matrices."""
    found = [x.double().numpy()]
    h = x.double()
    for t, layer in enumerate(net.layers[1:]):
        relations = net.layers[t].outgoing()
        weights = torch.zeros(len(net.layers[t]), len(layer), dtype=torch.float64)
        rows = net.layers[t].rows(relations.parents).long(), layer.rows(relations.children).long()
        weights[rows] = relations.weights.detach().double()
        z = h @ weights + layer.biases.detach().double()
        parts = [
            {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}[name]
            for name in layer.activations
        ]
        h = torch.stack([part(z[:, n]) for n, part in enumerate(parts)], dim=1)
        found.append(h.numpy())
    return found


def close(found: Tensor, expected: np.ndarray, net: gn.GrapNet) -> bool:
    tolerance = 1e-5 if net.transitions[0].weight.dtype == torch.float32 else 1e-12
    return found.shape == expected.shape and np.allclose(
        found.numpy(), expected, rtol=tolerance, atol=tolerance
    )


def of_relations(recorder: GradientRecorder, relations: gn.RelationSet) -> Tensor:
    return recorder.of(relations.parents, relations.children)


def related(net: gn.GrapNet, t: int) -> Tensor:
    """Returns for every pair whether there is a relation."""
    topology = net.transitions[t].topology
    found = torch.zeros(topology.n_parents, topology.n_children, dtype=torch.bool)
    found[topology.parents().long(), topology.child.long()] = True
    return found


def seen(recorder: Any) -> list[Any]:
    """Returns everything that a recorder has, flat."""
    flat = []
    stack = [recorder.state_dict()]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        else:
            flat.append(item)
    return flat


def equal(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        if not (torch.equal(one, other) if both else one is other or one == other):
            return False
    return True
