"""Colours that people with any colour vision tell apart, on a light and on a dark ground."""

from collections.abc import Iterable

NOBODY = "#8c8c8c"  # of nodes without an owner
POSITIVE, NEGATIVE = "#7a68c0", "#c97a16"  # of weights
CUT, CUT_ON_DARK = "#e5383b", "#ff7a70"
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")  # Okabe and Ito's, yellow darker
_SHADES = (0.0, 0.4, -0.35, 0.65)  # towards white, or black where negative


def owner_colors(owners: Iterable[str | None]) -> dict[str | None, str]:
    """Returns one colour an owner, in order of appearance; nodes without one are grey.

    Every colour is the same for the same owners in the same order. They repeat after 28.

    Examples:
        >>> owner_colors(["task-1", None, "task-2", "task-1"])
        {'task-1': '#0072b2', None: '#8c8c8c', 'task-2': '#e69f00'}
    """
    found: dict[str | None, str] = {}
    number = 0
    for owner in dict.fromkeys(owners):
        found[owner] = NOBODY if owner is None else _color(number)
        number += owner is not None
    return found


def is_dark(color: str) -> bool:
    """Says whether light text reads better on a colour than dark text.

    Examples:
        >>> is_dark("#0072b2"), is_dark("#e69f00")
        (True, False)
    """
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def _color(number: int) -> str:
    hue, shade = _HUES[number % len(_HUES)], _SHADES[number // len(_HUES) % len(_SHADES)]
    parts = [int(hue[n : n + 2], 16) for n in (1, 3, 5)]
    goal = 255 if shade > 0 else 0
    return "#" + "".join(f"{round(part + (goal - part) * abs(shade)):02x}" for part in parts)
