"""fingerprint: everything about a net and its optimizers that a refused edit must leave
bit-identical.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grapnet import GrapNet


def fingerprint(net: GrapNet, *optimizers: Optimizer) -> dict[str, Any]:
    """Returns contents as bytes and objects by identity: two equal fingerprints mean that nothing
    changed.
    """
    found: dict[str, Any] = {
        "version": net.version,
        "next_uid": net._next_uid,
        "sizes": net.sizes,
        "commits": [Same(commit) for commit in net.history],
        "undoable": (list(net.journal.undoable), list(net.journal.redoable)),
        "structures": [Same(transition._structure) for transition in net.transitions],
        "plans": [Same(net.execution.plan(t).plan) for t in range(len(net.transitions))],
        "output": as_bytes(net(_probe(net))),
    }
    for name, parameter in net.named_parameters():
        found[name] = (Same(parameter), as_bytes(parameter), parameter.requires_grad)
        found[f"{name}.grad"] = (
            Same(parameter.grad),
            None if parameter.grad is None else as_bytes(parameter.grad),
        )
        found[f"{name}.layout"] = Same(getattr(parameter, "grapnet_layout", None))
    for name, buffer in net.named_buffers():
        found[name] = (Same(buffer), as_bytes(buffer))
    for number, layer in enumerate(net.layers):
        found[f"layers.{number}"] = (
            Same(layer),
            layer.uids.tolist(),
            layer.owners,
            layer.activations,
        )
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number}"] = [
            [Same(p) for p in group["params"]] for group in optimizer.param_groups
        ]
        for p, state in optimizer.state.items():
            found[f"optimizer {number} state {id(p)}"] = {
                key: _content(value) for key, value in state.items()
            }
    return found


class Same:
    """Equal only to a wrapper of the same object; keeps the object alive, so that no other takes
    its place.
    """

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.target is self.target

    def __repr__(self) -> str:
        return f"Same({type(self.target).__name__} at {id(self.target):#x})"

    __hash__ = None


def as_bytes(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Returns what tells two tensors apart bit for bit, NaN included."""
    # A tensor of one number may have a stride of 0, which contiguous() keeps.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def _content(value: Any) -> Any:
    return (Same(value), as_bytes(value)) if isinstance(value, Tensor) else value


def _probe(net: GrapNet) -> Tensor:
    width = len(net.layers[0])
    return torch.linspace(-1, 1, 2 * width, dtype=net.transitions[0].weight.dtype).reshape(2, width)
