"""What two files hold beside their nets, compared by name: optimizers, schedules, plain data, the
rest of a model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .contents import Kept

_SHOWN = 3  # values that are named as examples on a screen


class Beside(NamedTuple):
    """One thing that was saved beside the nets, in two files.

    Attributes:
        state: equal, differs, only in A, or only in B.
        values: the places inside it at which it differs, such as `['state'][0]['exp_avg']`.
    """

    state: str
    values: list[str]

    def __str__(self) -> str:
        named = [place for place in self.values if place]  # the thing itself has no name in it
        more = ", …" if len(named) > _SHOWN else ""
        return f"{self.state} ({', '.join(named[:_SHOWN])}{more})" if named else self.state


def compare_beside(a: Sequence[Kept], b: Sequence[Kept]) -> dict[str, Beside]:
    """Returns, by name, how what two files hold beside their nets compares, bit for bit.

    What undo needs of an optimizer is not looked at, as little as the journals of nets.
    """
    mine, others = ({one.name: one for one in side} for side in (a, b))
    found = {}
    for name in dict.fromkeys([*mine, *others]):
        if name not in others or name not in mine:
            found[name] = Beside(f"only in {'A' if name in mine else 'B'}", [])
        elif mine[name].made_by != others[name].made_by:
            found[name] = Beside(
                f"differs: {mine[name].made_by[:60]} and {others[name].made_by[:60]}", []
            )
        else:
            values = _differing(mine[name].content, others[name].content)
            found[name] = Beside("differs" if values else "equal", values)
    return found


def _differing(first: Any, second: Any) -> list[str]:
    """Returns the places at which two trees are not the same."""
    mine, others = dict(_leaves(first)), dict(_leaves(second))
    places = dict.fromkeys([*mine, *others])
    return [
        place
        for place in places
        if place not in mine or place not in others or mine[place] != others[place]
    ]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, object]]:
    """Yields every value of a tree with its place, in a form that is equal where the bits are."""
    if isinstance(value, dict | list | tuple):
        yield place, type(value).__name__
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value).cpu().contiguous()
        yield (
            place,
            (
                str(value.dtype),
                tuple(value.shape),
                tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
            ),
        )
    else:
        yield place, repr(value)  # NaN is like itself, and 0 is not -0
