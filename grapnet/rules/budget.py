"""Budgets: how much one apply may change, and how few parents and children it may leave a node."""

from dataclasses import dataclass

from grapnet.core.errors import EditError


@dataclass(frozen=True)
class Budget:
    """What a rule must not exceed in one `apply`.

    Attributes:
        edits: the most relations cut, and the most relations connected; None for any number.
        parents: the fewest parents that cuts leave a node, unless it has fewer already.
        children: the fewest children that cuts leave a node, unless it has fewer already.
    """

    edits: int | None = None
    parents: int = 0
    children: int = 0

    def __post_init__(self) -> None:
        for name in ("edits", "parents", "children"):
            number = getattr(self, name)
            if number is None and name == "edits":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise EditError(f"a budget's {name} is a whole number, not negative, got {number!r}")
