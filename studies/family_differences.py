"""The paper's grown head, and how far its family blocks are from the reference in values and
gradients.
"""

from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.learning import seen_class_cross_entropy
from grapnet.rules import GrowForTask, Moment


def grow(net: gn.GrapNet, task: int, nodes: int, generator: torch.Generator | None = None) -> None:
    """Adds the nodes of a task, related to the two classes of each task up to it."""
    with net.edit(reason="grow", generator=generator) as edit:
        GrowForTask(layer=1, nodes=nodes, classes_per_task=2)(net, edit, Moment(task=task))


def family_differences(
    x: Tensor, y: Tensor, *, nodes: int, cut: float, seed: int
) -> dict[str, Any]:
    """Returns how far family is from the reference on the head of five tasks, before and after
    relations are cut.

    Args:
        x: inputs [batch, 49], in the dtype to compute in.
        y: class numbers [batch].
        nodes: grown a task.
        cut: share of the relations of each transition to cut, the weakest.
        seed: of the weights.
    """
    net = gn.GrapNet([x.shape[1], 0, 10], dtype=x.dtype)
    generator = torch.Generator().manual_seed(seed)
    for task in range(5):
        grow(net, task, nodes, generator)
    found: dict[str, Any] = {"families": [len(net.execution.families(t)) for t in (0, 1)]}
    found |= {"relations": [net.count().relations], "before": _differences(net, x, y)}
    with net.edit(reason="the weakest") as edit:
        for layer in (0, 1):
            edit.cut(net.layers[layer].outgoing().smallest(fraction=cut))
    found["relations"].append(net.count().relations)
    return {**found, "after": _differences(net, x, y)}


def _differences(net: gn.GrapNet, x: Tensor, y: Tensor) -> dict[str, float]:
    """Returns the largest differences between family and reference, and the largest values."""
    results = []
    for backend in ("family", "reference"):
        net.execution.use(backend)
        output = net(x)
        gradients = torch.autograd.grad(
            seen_class_cross_entropy(output, y, range(10)), list(net.parameters())
        )
        results.append((output.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    (output, gradient), (expected, expected_gradient) = results
    return {
        "forward": float((output - expected).abs().max()),
        "gradient": float((gradient - expected_gradient).abs().max()),
        "largest output": float(expected.abs().max()),
        "largest gradient": float(expected_gradient.abs().max()),
    }
