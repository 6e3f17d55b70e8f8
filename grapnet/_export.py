"""Models with nets inside as plain torch modules, for inference and export."""

import copy
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ._network import GrapNet
from ._torch import forward_hooks
from .core._errors import GrapNetError, PlanError
from .execution._modules import MOST_CELLS
from .execution._snapshot import Snapshot
from .following._watch import has_foreign

Model = TypeVar("Model", bound=nn.Module)


@overload
def snapshot(model: GrapNet, *, most_cells: int = MOST_CELLS) -> Snapshot: ...
@overload
def snapshot(model: Model, *, most_cells: int = MOST_CELLS) -> Model: ...
def snapshot(model: nn.Module, *, most_cells: int = MOST_CELLS) -> nn.Module:
    """Returns a copy of a model in eval mode in which every net is its `net.snapshot()`.

    A net equivalent to one `nn.Linear` becomes that `nn.Linear`, because some modules read its
    `weight` (torch's transformer layers in eval mode). The copy shares no memory with the model.
    For a single net it returns `net.snapshot()`, without hooks.

    Args:
        model: any module with nets inside; one that occurs several times is copied once.
        most_cells: the largest matrix to make of a transition, as for `net.snapshot()`.

    Raises:
        PlanError: a net runs with a policy, has a forward of its own or forward hooks (recorders
            only watch and are fine), or a matrix would be too large; the message names the net.
        ValueError: the model contains no net.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(
        ...     nn.Conv2d(1, 2, 3), nn.Flatten(), gn.GrapNet([8, 5, 3]), gn.GrapNet([3, 2])
        ... )
        >>> gn.snapshot(model)
        Sequential(
          (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1))
          (1): Flatten(start_dim=1, end_dim=-1)
          (2): Snapshot(
            version 0
            (0): Linear(in_features=8, out_features=5, bias=True)
            (1): ReLU()
            (2): Linear(in_features=5, out_features=3, bias=True)
          )
          (3): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    if isinstance(model, GrapNet):
        return model.snapshot(most_cells=most_cells)
    if not isinstance(model, nn.Module):
        raise TypeError(f"a snapshot is taken of an nn.Module, got {type(model).__name__}")
    nets = {name: module for name, module in model.named_modules() if isinstance(module, GrapNet)}
    if not nets:
        raise ValueError(
            f"this {type(model).__name__} contains no GrapNet; copy.deepcopy(model) copies it"
        )
    # What a deepcopy finds under the id of an object it takes for that object's copy.
    places: dict[int, Any] = {
        id(net): _stand_in(name, net, most_cells) for name, net in nets.items()
    }
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            # A forward pass may leave its result on a module (pruned weights, for example), which
            # autograd cannot copy.
            results = [
                value
                for value in vars(module).values()
                if isinstance(value, Tensor) and not value.is_leaf
            ]
            places |= {id(result): result.detach().clone() for result in results}
        return copy.deepcopy(model, places).requires_grad_(False).eval()


def _stand_in(name: str, net: GrapNet, most_cells: int) -> nn.Module:
    """Returns the plain module for a net of the model; errors include its name."""
    if type(net).forward is not GrapNet.forward or "forward" in vars(net):
        raise PlanError(
            f"{name}: {type(net).__name__} has its own forward, which plain modules would lose;"
            " put it in a module that holds the net"
        )
    for part, module in net.named_modules(prefix=name):
        if has_foreign(forward_hooks(module)):
            raise PlanError(
                f"{part} has forward hooks, which plain modules would lose; remove them while the"
                " snapshot is taken, or register them on a module that holds the net"
            )
    try:
        taken = net.snapshot(most_cells=most_cells)
    except GrapNetError as error:
        raise type(error)(f"{name}: {error}") from None
    return taken[0] if len(taken) == 1 else taken
