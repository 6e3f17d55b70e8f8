"""What somebody meant who wrote a name that is not there."""

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str]) -> str | None:
    """Returns the one of these names that is most like another, or None where none is like it.

    Examples:
        >>> closest("inspct", ["inspect", "history"])
        'inspect'
        >>> closest("zzz", ["inspect", "history"]) is None
        True
    """
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)
