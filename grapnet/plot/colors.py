"""Colours that people with any colour vision tell apart, on a light and on a dark ground."""

from collections.abc import Iterable
from itertools import count

LineStyle = str | tuple[float, tuple[float, ...]]  # as matplotlib has it
NOBODY = "#8c8c8c"  # of nodes without an owner
POSITIVE, NEGATIVE = "#7a68c0", "#c97a16"  # of weights
CUT, CUT_ON_DARK = "#e5383b", "#ff7a70"
# in the order in which as few as there are differ most; tests measure it for every kind of colour
# vision
_COLORS = (
    *("#0072b2", "#e69f00", "#44bbbb", "#884466", "#446600", "#9999ff", "#ee3355"),
    *("#3300ee", "#9966ff", "#ccbbee", "#cc00aa", "#99ccbb", "#005533", "#aa0044"),
    *("#bb7700", "#aacc66", "#bb9977", "#554477", "#777744", "#8833ff", "#7700aa"),
    *("#ee5588", "#558866", "#3399cc", "#cc0011", "#00dd99", "#aa77aa", "#666688"),
)
_CLEAR = 7  # of them are clearly apart; lines of more differ in their style too
_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))


def owner_colors(owners: Iterable[str | None]) -> dict[str | None, str]:
    """Returns one colour an owner, in order of appearance; nodes without one are grey.

    Every colour is the same for the same owners in the same order. They repeat after 28.

    Examples:
        >>> owner_colors(["task-1", None, "task-2", "task-1"])
        {'task-1': '#0072b2', None: '#8c8c8c', 'task-2': '#e69f00'}
    """
    numbers = _numbers(owners).items()
    return {
        owner: NOBODY if number is None else _COLORS[number % len(_COLORS)]
        for owner, number in numbers
    }


def owner_styles(owners: Iterable[str | None]) -> dict[str | None, LineStyle]:
    """Returns the style of an owner's line, in order of appearance: the first seven are solid, the
    next dashed, …

    Examples:
        >>> styles = owner_styles([None, *"abcdefgh"])
        >>> styles[None], styles["a"], styles["g"], styles["h"]
        ('-', '-', '-', '--')
    """
    return {
        owner: _STYLES[(number or 0) // _CLEAR % len(_STYLES)]
        for owner, number in _numbers(owners).items()
    }


def is_dark(color: str) -> bool:
    """Says whether light text reads better on a colour than dark text.

    Examples:
        >>> is_dark("#0072b2"), is_dark("#e69f00")
        (True, False)
    """
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5


def _numbers(owners: Iterable[str | None]) -> dict[str | None, int | None]:
    """Returns which owner each is, in order of appearance; None is nobody."""
    numbers = count()
    return {owner: None if owner is None else next(numbers) for owner in dict.fromkeys(owners)}
