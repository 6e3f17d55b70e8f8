"""Roster: the rules of a manager by name and in order, each with its schedule and budget."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.network import GrapNet

from .budget import Budget
from .rule import Rule
from .schedule import Schedule, next_step
from .settings import arguments, describe, differences, differing, same


class RuleError(GrapNetError, LookupError):
    """A manager has no rule of that name, or has one already; nothing was changed."""


@dataclass(eq=False)
class Entry:
    """One rule of a roster."""

    name: str
    rule: Rule
    schedule: Schedule
    budget: Budget | None
    enabled: bool
    injected: dict[str, Any] = field(init=False)  # the arguments of the rule, as they were then

    def __post_init__(self) -> None:
        self.injected = arguments(self.rule)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # an entry that was pickled before they were kept has none
        vars(self).update({"injected": {}, **state})

    def description(self) -> dict[str, Any]:
        """Returns what must be equal for a saved state to fit, as plain data."""
        return {
            "rule": describe(self.rule),
            "schedule": describe(self.schedule),
            "budget": describe(self.budget),
        }

    def unchanged(self, state: Any) -> dict[str, Any]:
        """Returns the arguments of the rule that are as they were when it was injected, so none
        that it counts in.

        Args:
            state: of the rule; what comes back with it is left out as well.
        """
        present, kept = arguments(self.rule), state if isinstance(state, Mapping) else {}
        return {
            name: value
            for name, value in self.injected.items()
            if name in present and name not in kept and same(value, present[name])
        }


class Roster:
    """Entries in order; names are unique."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [entry.name for entry in self._entries]

    @property
    def enabled(self) -> list[Entry]:
        """The entries that are switched on, in order."""
        return [entry for entry in self._entries if entry.enabled]

    def add(self, entry: Entry, before: str | None, after: str | None) -> None:
        """Puts an entry before or behind the one that is named, or behind all."""
        if before is not None and after is not None:
            raise RuleError(f"say before= or after=, not both; got {before!r} and {after!r}")
        if entry.name in self.names:
            raise RuleError(
                f"a rule is called {entry.name!r} already ({self.known()}); replace() puts another"
                " in its place"
            )
        place = len(self) if after is None else self._place(after) + 1
        self._entries.insert(place if before is None else self._place(before), entry)

    def exchange(self, entry: Entry, other: Entry) -> None:
        """Puts an entry in the place of another."""
        self._entries[self._entries.index(entry)] = other

    def remove(self, name: str) -> None:
        """Takes an entry out."""
        del self._entries[self._place(name)]

    def reorder(self, names: Iterable[str]) -> None:
        """Puts the entries into the order of `names`, which has every one of them once."""
        names = list(names)
        entries = [self[name] for name in names]
        if sorted(names) != sorted(self.names):
            raise RuleError(
                f"an order names every rule once ({self.known()}), got {', '.join(names) or 'none'}"
            )
        self._entries = entries

    def free_name(self, wanted: str) -> str:
        """Returns a name that is not taken: the wanted one, or that with a number."""
        name, number = wanted, 2
        while name in self.names:
            name, number = f"{wanted} {number}", number + 1
        return name

    def known(self) -> str:
        """Says in words which rules there are."""
        return (
            f"the manager has {', '.join(self.names)}" if self._entries else "the manager has none"
        )

    def waiting(self, step: int) -> str:
        """Says in words, for a step at which no rule is due, which one comes next, and when."""
        found = [(next_step(entry.schedule, step + 1), entry) for entry in self.enabled]
        coming = [(when, entry) for when, entry in found if when is not None]
        if not coming:
            return f"no rule is due at step {step} or later"
        when, entry = min(coming, key=lambda pair: pair[0])
        surely = "" if entry.schedule.is_due(when, None) else " at the earliest"
        return f"no rule is due at step {step}; next comes {entry.name}, at step {when}{surely}"

    def require_fit(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises CheckpointError when saved entries, by name, are not like these."""
        if sorted(saved) != sorted(self.names):
            raise CheckpointError(
                f"the state holds the rules {', '.join(saved) or 'none'}, and {self.known()}."
                " Inject the same rules under the same names, and load it then"
            )
        for entry in self:
            for what, present in entry.description().items():
                require_same(f"the {what} of {entry.name!r}", saved[entry.name][what], present)
            held = saved[entry.name].get("arguments", {})
            # one that is missing has changed since, or another name
            both = held.keys() & entry.injected.keys()
            _refuse(
                f"the rule of {entry.name!r}",
                differing(
                    {name: held[name] for name in both},
                    {name: entry.injected[name] for name in both},
                ),
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self._place(name)]

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise RuleError(f"no rule is called {name!r}; {self.known()}")
        return self.names.index(name)


def require_same(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises CheckpointError, saying how two descriptions differ."""
    _refuse(what, differences(saved, present))


def _refuse(what: str, found: list[str]) -> None:
    """Raises CheckpointError when differences were found."""
    if found:
        raise CheckpointError(f"{what} is not the one that was saved: {'; '.join(found)}")


def require_net(net: Any) -> None:
    """Raises TypeError for what is not a net itself."""
    if not isinstance(net, GrapNet):
        kind = type(net).__name__
        raise TypeError(
            f"the net comes first: manager.apply(net, step); got {kind}. Give the GrapNet, not a"
            " wrapper"
        )


def require_rule(rule: Any) -> None:
    """Raises TypeError for what cannot be a rule."""
    if inspect.isclass(rule):
        raise TypeError(f"a rule is an object, {rule.__name__}(…) with its settings, not the class")
    if not callable(rule):
        raise TypeError(f"a rule is an object that is called with (net, edit, now), got {rule!r}")


def require_schedule(schedule: Any) -> None:
    """Raises TypeError for what cannot be a schedule."""
    if inspect.isclass(schedule) or not (
        hasattr(schedule, "is_due") and hasattr(schedule, "may_be_due")
    ):
        raise TypeError(
            f"schedule= takes a schedule, such as Every(100) or At(0), got {schedule!r}"
        )


def require_budget(budget: Any) -> None:
    """Raises TypeError for what is no budget."""
    if not isinstance(budget, Budget):
        raise TypeError(
            f"budget= takes a Budget, such as Budget(edits=100, parents=1), got {budget!r}"
        )
