"""The activation functions that nodes name."""

import difflib
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
# -> here
_ELSEWHERE = {
    "logistic": "sigmoid",
    "swish": "silu",
    "linear": "identity",
    "gelu_new": "gelu_tanh",
}


def register_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Makes `name` an activation that nodes can have; checkpoints store the name, never the
    function.

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
    function = ACTIVATIONS.get(name) if isinstance(name, str) else None
    function = _adjusted(name) if function is None and isinstance(name, str) else function
    if function is None:
        known = ", ".join(sorted(ACTIVATIONS))
        adjustable = ", ".join(f"{kind}(number)" for kind in sorted(_ADJUSTABLE))
        near = _nearest(str(name))
        hint = f", but {near!r} is" if near else ""
        raise ValueError(f"no activation is called {name!r}{hint}; known are {known}, {adjustable}")
    return function


def is_activation(name: object) -> bool:
    """Says whether nodes can have an activation of this name."""
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
    return (
        (found[1], number) if found and found[1] in _ADJUSTABLE and math.isfinite(number) else None
    )


def _nearest(name: str) -> str | None:
    """Returns what other libraries' name of an activation, or one with a slip in it, is called
    here.
    """
    plain = name.strip().lower()
    return _ELSEWHERE.get(plain) or next(
        iter(difflib.get_close_matches(plain, ACTIVATIONS, n=1, cutoff=0.7)), None
    )


@functools.lru_cache(maxsize=256)
def _adjusted(name: str) -> Callable[[Tensor], Tensor] | None:
    setting = setting_of(name)
    return None if setting is None else _ADJUSTABLE[setting[0]](setting[1])
