"""A rule's turn: it writes into the open edit of an apply, and is held to the budgets."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.network import GrapNet

from .budget import Budget, enforce
from .roster import Entry
from .rule import Moment


def said_of(step: int | None, task: Any) -> dict[str, Any]:
    """Returns what a caller said about the moment, as the journal keeps it: no step unless one was
    given.
    """
    steps = {} if step is None else {"step": operator.index(step)}
    return (
        steps
        if task is None
        else {**steps, "task": task if isinstance(task, str | int | float) else str(task)}
    )


def in_words(said: Mapping[str, Any]) -> str:
    """Returns that as the end of a sentence.

    Examples:
        >>> in_words(said_of(7, "b")), in_words(said_of(None, None))
        (' at step 7, task b', '')
    """
    return " at " + ", ".join(f"{name} {value}" for name, value in said.items()) if said else ""


def take_turn(
    net: GrapNet, edit: Edit, entry: Entry, budget: Budget, now: Moment, said: Mapping[str, Any]
) -> None:
    """Lets one rule write into the edit, and holds it to its budget and, with those before it, to
    the manager's.

    Args:
        net: the net of the edit.
        edit: the open edit.
        entry: the rule, with the budget of its own.
        budget: the manager's.
        now: when the rule is called; what is left of the budgets is filled in here.
        said: what the journal is told about that moment.
    """
    settled, connected = edit.cuts, edit.n_connections
    within = budget.tightened(entry.budget)
    shared, own = budget.edits, None if entry.budget is None else entry.budget.edits
    cuts = _smaller(own, None if shared is None else shared - len(settled))
    connections = _smaller(None if own is None else connected + own, shared)
    left = _smaller(cuts, None if connections is None else connections - connected)
    edit.remark(entry.name, **said)
    try:
        entry.rule(net, edit, replace(now, budget=Budget(left, within.parents, within.children)))
        if edit.receipt is not None:
            raise EditError(
                "a rule writes into the edit and leaves it to the manager to commit it; this one"
                f" has committed version {net.version}, which net.undo() takes back"
            )
        rule = f"rule {entry.name!r}"
        enforce(net, edit, within, rule=rule, settled=settled, cuts=cuts, connections=connections)
    except Exception as error:
        error.add_note(f"raised by rule {entry.name!r}{in_words(said)}")
        raise


def _smaller(one: int | None, other: int | None) -> int | None:
    """Returns the smaller of two limits, of which None is no limit."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
