"""The activation functions that nodes name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "softplus": functional.softplus,
}


def register_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Makes `name` an activation that nodes can have; checkpoints store the name, never the function.

    Examples:
        >>> register_activation("square", torch.square)
        >>> activation_function("square")(torch.tensor([3.0]))
        tensor([9.])
    """
    if name in ACTIVATIONS and ACTIVATIONS[name] is not function:
        raise ValueError(f"an activation called {name!r} exists already")
    ACTIVATIONS[name] = function


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function called `name`."""
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"no activation is called {name!r}; known are {known}") from None
