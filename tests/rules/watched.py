"""What the tests of recorders share: a net, passes over it, and everything that a recorder has
seen.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules.gradients import GradientRecorder
from grapnet.rules.recorders import ActivationRecorder, CovarianceRecorder

MAKE: dict[str, Callable[[], Any]] = {
    "activations": lambda: ActivationRecorder(1),
    "covariances": lambda: CovarianceRecorder(1, 2),
    "gradients": lambda: GradientRecorder(1, 2),
}


def small_net() -> gn.GrapNet:
    """Returns a net of four layers, two of them hidden, with mixed activations."""
    torch.manual_seed(0)
    net = gn.GrapNet([5, 7, 4, 3], density=0.7, dtype=torch.float64)
    with net.edit() as edit:
        edit.set_activation(net.layers[1][::2], "tanh")
    return net


def batch(net: gn.GrapNet, size: int = 40, seed: int = 0) -> Tensor:
    dtype = net.transitions[0].weight.dtype
    return torch.randn(size, 5, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def armed(recorder: Any, net: gn.GrapNet) -> Any:
    recorder.arm(net)
    return recorder


def run(net: gn.GrapNet, size: int = 40, seed: int = 0) -> None:
    """One forward and one backward pass, so that every recorder sees something."""
    net(batch(net, size, seed)).square().sum().backward()


def said(net: gn.GrapNet, x: Tensor) -> list[np.ndarray]:
    """What every layer says, computed from the weights alone, with dense matrices."""
    found, h = [x.double().numpy()], x.double()
    for t, layer in enumerate(net.layers[1:]):
        relations, weights = (
            net.layers[t].outgoing(),
            torch.zeros(len(net.layers[t]), len(layer), dtype=torch.float64),
        )
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


def seen(recorder: Any) -> list[Any]:
    """Everything a recorder has, flat."""
    flat, stack = [], [recorder.state_dict()]
    while stack:
        item = stack.pop()
        stack += (
            list(item.values())
            if isinstance(item, dict)
            else item
            if isinstance(item, list | tuple)
            else []
        )
        flat += [] if isinstance(item, dict | list | tuple) else [item]
    return flat


def equal(first: list[Any], second: list[Any]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b is None or a == b
        for a, b in pairs
    )
