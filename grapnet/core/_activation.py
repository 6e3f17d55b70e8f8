"""The activation functions of nodes."""

import functools
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "mish": functional.mish,
    "hardswish": functional.hardswish,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "selu": functional.selu,
    "softplus": functional.softplus,
}

_ADJUSTABLE: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "leaky_relu": lambda slope: functools.partial(functional.leaky_relu, negative_slope=slope),
    "elu": lambda alpha: functools.partial(functional.elu, alpha=alpha),
    "softplus": lambda beta: functools.partial(functional.softplus, beta=beta),
}


def register_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Registers an activation under `name`; checkpoints store the name, not the function.

    Examples:
        >>> register_activation("square", torch.square)
        >>> activation_function("square")(torch.tensor([3.0]))
        tensor([9.])
    """
    if name in ACTIVATIONS and ACTIVATIONS[name] is not function:
        raise ValueError(f"an activation called {name!r} exists already")
    ACTIVATIONS[name] = function


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function called `name`, such as "relu", or "leaky_relu(0.2)" with another slope
    than torch's own.
    """
    function = None
    if isinstance(name, str):
        function = ACTIVATIONS.get(name) or _adjusted(name)
    if function is None:
        known = ", ".join(sorted(ACTIVATIONS))
        adjustable = ", ".join(f"{kind}(number)" for kind in sorted(_ADJUSTABLE))
        raise ValueError(f"unknown activation {name!r}; known are {known}, {adjustable}")
    return function


# Activations whose results are not negative, and those that return such numbers as they are.
_NOT_NEGATIVE = {"relu", "relu6", "sigmoid", "softplus"}
_KEEP_POSITIVE = {"relu", "leaky_relu", "elu"}
# Those whose results are between 0 and 6.
_AT_MOST_SIX = {"relu6", "sigmoid"}


def is_exact_behind(activation: str, before: str, *, is_scaled: bool = False) -> bool:
    """Returns whether an activation is known to return every result of another as it is.

    Args:
        activation: the activation that is applied to the results.
        before: the activation whose results they are.
        is_scaled: whether dropout scales the results.
    """
    setting = setting_of(activation)
    kind = activation if setting is None else setting[0]
    if kind == "identity":
        return True
    if kind in _KEEP_POSITIVE:
        return before in _NOT_NEGATIVE
    return kind == "relu6" and before in _AT_MOST_SIX and not is_scaled


def is_activation(name: object) -> bool:
    """Returns whether an activation of this name exists."""
    return isinstance(name, str) and (name in ACTIVATIONS or _adjusted(name) is not None)


def adjusted_name(kind: str, number: float) -> str:
    """Returns the name of an activation of some kind with its number, the one that `setting_of`
    takes apart.
    """
    return f"{kind}({float(number)!r})"


def setting_of(name: str) -> tuple[str, float] | None:
    """Returns the kind and the number of a name such as "leaky_relu(0.2)", None for any other."""
    found = re.fullmatch(r"([a-z_]+)\(([-+.e0-9]{1,24})\)", name)
    try:
        number = float(found[2]) if found else math.nan
    except ValueError:
        return None
    if found and found[1] in _ADJUSTABLE and math.isfinite(number):
        return (found[1], number)
    return None


@functools.lru_cache(maxsize=256)
def _adjusted(name: str) -> Callable[[Tensor], Tensor] | None:
    setting = setting_of(name)
    return None if setting is None else _ADJUSTABLE[setting[0]](setting[1])
