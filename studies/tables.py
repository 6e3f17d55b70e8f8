"""The Markdown of the studies: tables, and numbers as they print them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def grid(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Returns a table whose first `left` columns are aligned left and the others right.

    Examples:
        >>> print(grid(("head", "accuracy"), [("ours", "80.91")]))
        | head | accuracy |
        |---|---:|
        | ours | 80.91 |
    """
    marks = ["---"] * left + ["---:"] * (len(titles) - left)
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(marks)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def spread(figure: Sequence[float]) -> str:
    """Returns a mean and a standard deviation.

    Examples:
        >>> spread([-0.001, 0.25])
        '0.00 ± 0.25'
    """
    mean, std, *_ = figure
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(mean, 2) + 0.0:.2f} ± {std:.2f}"


def interval(difference: Mapping[str, Any]) -> str:
    """Returns the mean and the interval of a `Paired`, as a result holds it.

    Examples:
        >>> interval({"mean": 12.0, "low": 9.4, "high": 14.6})
        '+12.00 [9.40, 14.60]'
    """
    mean = difference["mean"] + 0.0
    return f"{mean:+.2f} [{difference['low']:.2f}, {difference['high']:.2f}]"
