"""What an edit did, or would do: a net counted before and after."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grapnet as gn


@dataclass(frozen=True)
class Counted:
    """A net counted layer by layer and transition by transition.

    Attributes:
        version: of the net.
        nodes: of every layer.
        frozen_biases: of every layer.
        relations: of every transition.
        frozen_relations: of every transition.
        orphans: hidden nodes without parents.
        bytes: of coordinates and wiring.
    """

    version: int
    nodes: tuple[int, ...]
    frozen_biases: tuple[int, ...]
    relations: tuple[int, ...]
    frozen_relations: tuple[int, ...]
    orphans: int
    bytes: int

    @classmethod
    def of(cls, net: gn.GrapNet) -> "Counted":
        """Counts a net."""
        return cls(
            version=net.version,
            nodes=tuple(net.sizes),
            frozen_biases=tuple(0 if layer.is_sensory else len(layer.frozen_at) for layer in net.layers),
            relations=tuple(store.size for store in net.transitions),
            frozen_relations=tuple(len(store.frozen_at) for store in net.transitions),
            orphans=sum(int((store.topology.fan_in() == 0).sum()) for store in net.transitions[:-1]),
            bytes=net.count().bytes,
        )


@dataclass(frozen=True)
class Effect:
    """The difference between a net and what it was.

    Attributes:
        before: the net as it was.
        after: the net as it is.
        removed: relations that went, of every transition.
        added: relations that came, of every transition.
    """

    before: Counted
    after: Counted
    removed: tuple[int, ...]
    added: tuple[int, ...]

    @classmethod
    def since(cls, before: Counted, net: gn.GrapNet) -> "Effect":
        """Returns what has happened to a net since it was counted."""
        commits = [commit for commit in net.history if commit.version > before.version]
        moved = [[c.relations[t] for c in commits if t in c.relations] for t in range(len(net.transitions))]
        return cls(
            before,
            Counted.of(net),
            removed=tuple(sum(len(index.removed) for index in maps) for maps in moved),
            added=tuple(sum(len(index.inserted) for index in maps) for maps in moved),
        )

    @property
    def is_empty(self) -> bool:
        """True when nothing was committed."""
        return self.before.version == self.after.version

    def data(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns it for people, as lines."""
        before, after = self.before, self.after
        rows = [
            (
                f"nodes of layer {n}",
                before.nodes[n],
                after.nodes[n],
                _frozen(before.frozen_biases, after.frozen_biases, n),
            )
            for n in range(len(after.nodes))
        ]
        rows += [
            (
                f"relations {t} to {t + 1}",
                before.relations[t],
                after.relations[t],
                _frozen(before.frozen_relations, after.frozen_relations, t),
            )
            for t in range(len(after.relations))
        ]
        rows += [("orphans", before.orphans, after.orphans, ""), ("bytes of the net", before.bytes, after.bytes, "")]
        lines = [f"{'':<20}{'before':>14}{'after':>14}{'change':>14}{'frozen':>20}"]
        lines += [f"{what:<20}{a:>14,}{b:>14,}{_change(b - a):>14}{frozen:>20}" for what, a, b, frozen in rows]
        return [line.rstrip() for line in lines]


def _change(number: int) -> str:
    return f"{number:+,}" if number else "-"


def _frozen(before: Sequence[int], after: Sequence[int], place: int) -> str:
    a, b = before[place], after[place]
    return f"{a:,} -> {b:,}" if a != b else f"{a:,}" if a else ""
