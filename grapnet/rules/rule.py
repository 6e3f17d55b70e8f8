"""What a rule is: settings plus one method that writes into an open edit and never commits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from grapnet.core._edit import Edit
from grapnet.network import GrapNet

from .budget import Budget


@runtime_checkable
class Recorder(Protocol):
    """Gathers evidence while a net trains: armed by the manager only for the steps that a rule
    needs.

    A recorder follows the commits of the net it watches, so that what it has seen belongs to the
    right nodes. Where it has a `count`, the manager refuses to call its rule while that is 0; where
    it has `state_dict` and `load_state_dict`, what it has seen is part of a checkpoint.
    """

    window: int  # how many steps before its rule is due it watches

    def arm(self, net: GrapNet) -> None:
        """Starts to watch; nothing happens when it watches already."""
        ...

    def disarm(self) -> None:
        """Stops to watch and keeps what it has seen."""
        ...

    def clear(self) -> None:
        """Forgets what it has seen."""
        ...


@dataclass(frozen=True)
class Moment:
    """When a rule is called, and with what.

    Attributes:
        step: the step that `RuleManager.apply` was told.
        task: the task that it was told, None without.
        budget: what the rule must not exceed; the manager holds it to that.
        evidence: what the rule's recorders have seen, by the names that its `recorders` gave them.
    """

    step: int = 0
    task: Any = None
    budget: Budget = field(default_factory=Budget)
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Rule(Protocol):
    """Settings, usually a frozen dataclass, plus one method.

    It reads the net as it was when the edit began, writes operations into the edit, and draws
    whatever is random from `edit.generator`. It never commits.
    """

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Writes what it wants into the edit."""
        ...


@runtime_checkable
class RecordingRule(Rule, Protocol):
    """A rule that needs evidence."""

    def recorders(self, net: GrapNet) -> dict[str, Recorder]:
        """Returns the recorders that it wants armed, by the names under which `now.evidence` has
        them.
        """
        ...
