"""What several rules ask alike: which transitions they work on, and what their recorders have
seen.
"""

from collections.abc import Iterable
from typing import Any

from grapnet.core._errors import EditError
from grapnet.network import GrapNet

from .rule import Moment


def given_transitions(transitions: Any) -> tuple[int, ...] | None:
    """Returns the setting of a rule as numbers, None for its default; raises EditError for anything
    else.
    """
    if transitions is None:
        return None
    numbers = tuple(transitions) if isinstance(transitions, Iterable) else (transitions,)
    if not all(isinstance(t, int) for t in numbers):
        raise EditError(f"transitions are given as numbers, got {transitions!r}")
    return numbers


def chosen_transitions(net: GrapNet, transitions: Any, default: range | None = None) -> list[int]:
    """Returns the numbers of a net's transitions in order, all of them by default; negative ones
    count from the end.
    """
    count = len(net.transitions)
    given = given_transitions(transitions)
    numbers = given if given is not None else range(count) if default is None else default
    outside = [t for t in numbers if not -count <= t < count]
    if outside:
        raise EditError(
            f"the net has transitions 0 to {count - 1}, so there are no transitions {outside}"
        )
    return sorted({t % count for t in numbers})


def seen_evidence(now: Moment, name: str, rule: str) -> Any:
    """Returns the recorder of that name; raises EditError when it is missing or has seen
    nothing.
    """
    recorder = now.evidence.get(name)
    if recorder is None or recorder.count == 0:
        raise EditError(
            f"{rule} has seen no {name}. Let a RuleManager arm its recorders while the net trains,"
            " or arm them yourself, run the net and pass them on: Moment(evidence=recorders)"
        )
    return recorder
