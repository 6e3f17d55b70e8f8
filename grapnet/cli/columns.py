"""Aligned columns for a screen, and the same data as JSON can hold it."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

WIDTH = 100  # characters of a line
_NAME = 32  # characters of a text that others follow
_NOTHING = "–"
# nothing counts as one, among others
_NUMBER = re.compile(r"([+−-]?[\d,.]+(e[+-]\d+)?( %)?\s?)+|[–?-]|")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

Cell = int | float | str | None


def table(titles: Sequence[str], rows: Sequence[Sequence[Cell]], *, indent: int = 2) -> list[str]:
    """Returns lines of aligned columns, none wider than `WIDTH`.

    Whole numbers are counts and get thousands separators; other numbers are shares and are shown in
    per cent; None is a dash. Columns of numbers, also as texts, stand to the right, others to the
    left; a last column of texts is wrapped.

    Examples:
        >>> for line in table(
        ...     ["layer", "nodes", "frozen"], [["hidden", 12345, 0.5], ["output", 10, None]]
        ... ):
        ...     print(line)
          layer    nodes  frozen
          hidden  12,345  50.0 %
          output      10       –
    """
    last = len(titles) - 1
    shown = [[_shown(cell, whole=n == last) for n, cell in enumerate(row)] for row in rows]
    right = [
        bool(rows) and all(_NUMBER.fullmatch(row[n]) for row in shown) for n in range(len(titles))
    ]
    widths = [max(map(len, column)) for column in zip(titles, *shown, strict=True)]
    room = max(WIDTH - indent - sum(widths[:-1]) - 2 * last, 20)
    lines = []
    for row in ([*titles], *shown):
        parts = [
            cell.rjust(w) if r else cell.ljust(w)
            for cell, w, r in zip(row, widths, right, strict=True)
        ]
        if right[last]:
            lines.append(" " * indent + "  ".join(parts))
            continue
        start = " " * indent + "".join(part + "  " for part in parts[:-1])
        wrapped = textwrap.wrap(row[last], room, break_on_hyphens=False) or [""]
        lines += [(start if n == 0 else " " * len(start)) + line for n, line in enumerate(wrapped)]
    return [line.rstrip() for line in lines]


def pairs(told: Mapping[str, str]) -> list[str]:
    """Returns lines of a name and what is told about it, wrapped below itself."""
    return table(["", ""], [[name, text] for name, text in told.items()])[1:]


def in_bytes(count: int) -> str:
    """Returns a number of bytes as people read it.

    Examples:
        >>> in_bytes(512), in_bytes(40_861)
        ('512 bytes', '39.9 KiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count:,} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun.

    Examples:
        >>> counted(1, "relation"), counted(1200, "relation")
        ('1 relation', '1,200 relations')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plain(value: Any) -> Any:
    """Returns data as JSON can hold it: tensors and arrays as lists, and None for a number that is
    not finite.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | None) else str(value)


def _shown(cell: Cell, *, whole: bool) -> str:
    if cell is None:
        return _NOTHING
    if isinstance(cell, str):
        flat = " ".join(cell.split())
        return flat if whole or len(flat) <= _NAME else flat[: _NAME - 1] + "…"
    return f"{cell:,}" if isinstance(cell, int) else f"{100 * cell:.1f} %"
