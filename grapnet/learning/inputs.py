"""What streams, memories and measurements accept: examples, classes, whole numbers."""

import operator
from typing import Any

import torch
from torch import Tensor

# that torch can count with
_WHOLE = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def require_examples(x: Any, y: Any, logits: Any = None) -> None:
    """Raises where inputs, class numbers and logits are not tensors of one row an example.

    Raises:
        TypeError: one is no tensor, or y does not hold whole numbers.
        ValueError: y has another shape than [n], or the others have not as many rows.
    """
    parts = {"x": x, "y": y} if logits is None else {"x": x, "y": y, "logits": logits}
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{name} is a tensor, got {type(part).__name__}; torch.as_tensor({name}) makes one"
            )
    if y.dtype not in _WHOLE:
        raise TypeError(
            f"y holds class numbers, which are whole, got {y.dtype}; y.long() makes them so"
        )
    if y.dim() != 1:
        hint = "; of one-hot rows take y.argmax(1)" if y.dim() == 2 else ""
        raise ValueError(f"y is [n], one class number an example, got {list(y.shape)}{hint}")
    if any(part.dim() == 0 or len(part) != len(y) for part in parts.values()):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
        raise ValueError(f"an example is one row of each part, got {shapes}")


def class_groups(tasks: Any) -> list[tuple[int, ...]]:
    """Returns the classes of every task as plain numbers.

    Raises:
        TypeError: they are not groups of whole numbers.
        ValueError: there is no task, one has no classes, or a number is negative.
    """
    try:
        groups = [tuple(operator.index(number) for number in group) for group in tasks]
    except TypeError:
        raise TypeError(
            "the classes of tasks come in groups, such as [(0, 1), (2, 3)] or stream.classes, got"
            f" {tasks!r}"
        ) from None
    if (
        not groups
        or not all(groups)
        or any(not 0 <= number < 2**63 for group in groups for number in group)
    ):
        raise ValueError(
            f"every task has classes, which are numbers from 0 to 2^63 - 1, got {groups}"
        )
    return groups


def whole(number: Any, what: str, least: int = 1) -> int:
    """Returns a whole number as Python has it; raises ValueError for anything else."""
    try:
        found = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = None
    if found is None or found < least:
        raise ValueError(f"{what} is a whole number, at least {least}, got {number!r}")
    return found
