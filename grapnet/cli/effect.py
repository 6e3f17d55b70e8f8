"""What an edit did, or would do: a net counted before and after."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import grapnet as gn

from .childless import hidden_nodes
from .columns import Cell, table
from .retagged import Retagged, Tags, retagged, told_of_owners


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
        childless: hidden nodes without children.
        bytes: of coordinates and wiring.
    """

    version: int
    nodes: tuple[int, ...]
    frozen_biases: tuple[int, ...]
    relations: tuple[int, ...]
    frozen_relations: tuple[int, ...]
    orphans: int
    childless: int
    bytes: int

    @classmethod
    def of(cls, net: gn.GrapNet) -> "Counted":
        """Counts a net."""
        return cls(
            version=net.version,
            nodes=tuple(net.sizes),
            frozen_biases=tuple(
                0 if layer.is_sensory else len(layer.frozen_at) for layer in net.layers
            ),
            relations=tuple(store.size for store in net.transitions),
            frozen_relations=tuple(len(store.frozen_at) for store in net.transitions),
            orphans=sum(
                int((store.topology.fan_in() == 0).sum()) for store in net.transitions[:-1]
            ),
            childless=len(hidden_nodes(net, childless=True)),
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
        owners: nodes that have another owner.
    """

    before: Counted
    after: Counted
    removed: tuple[int, ...]
    added: tuple[int, ...]
    owners: tuple[Retagged, ...]

    @classmethod
    def of(
        cls, before: Counted, tags: Tags, net: gn.GrapNet, commits: Sequence[gn.Commit]
    ) -> "Effect":
        """Returns what commits have done to a net that was counted, and whose owners were noted,
        before them.
        """
        moved = [
            [c.relations[t] for c in commits if t in c.relations]
            for t in range(len(net.transitions))
        ]
        return cls(
            before,
            Counted.of(net),
            removed=tuple(sum(len(index.removed) for index in maps) for maps in moved),
            added=tuple(sum(len(index.inserted) for index in maps) for maps in moved),
            owners=tuple(retagged(tags, net)),
        )

    @property
    def is_empty(self) -> bool:
        """True when nothing was committed."""
        return self.before.version == self.after.version

    def data(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return asdict(self) | {"owners": [change._asdict() for change in self.owners]}

    def __str__(self) -> str:
        versions = f"version {self.before.version} → {self.after.version}"
        moved = any(self.removed) or any(self.added)
        return versions + (
            f", relations cut {sum(self.removed):,}, added {sum(self.added):,}" if moved else ""
        )

    def lines(self) -> list[str]:
        """Returns it for people, as lines; counts only where one of them is another."""
        told = told_of_owners(list(self.owners))
        return (
            told
            if replace(self.before, version=self.after.version) == self.after
            else [*self._counts(), *told]
        )

    def _counts(self) -> list[str]:
        a, b = self.before, self.after
        biases = [_turned(*counts) for counts in zip(a.frozen_biases, b.frozen_biases, strict=True)]
        weights = [
            _turned(*counts) for counts in zip(a.frozen_relations, b.frozen_relations, strict=True)
        ]
        rows = [
            (f"nodes of layer {n}", a.nodes[n], b.nodes[n], biases[n]) for n in range(len(b.nodes))
        ]
        rows += [
            (f"relations {t} → {t + 1}", x, b.relations[t], weights[t])
            for t, x in enumerate(a.relations)
        ]
        rows += [("orphans (no parents)", a.orphans, b.orphans, "")]
        rows += [
            ("hidden, no children", a.childless, b.childless, ""),
            ("bytes of the net", a.bytes, b.bytes, ""),
        ]
        shown: list[list[Cell]] = [
            [what, x, y, _change(y - x), frozen] for what, x, y, frozen in rows
        ]
        titles = ["", "before", "after", "change", "frozen"]
        if not any(row[-1] for row in shown):
            titles, shown = titles[:-1], [row[:-1] for row in shown]
        return table(titles, shown)


def _change(number: int) -> str:
    return f"{number:+,}" if number else "-"


def _turned(before: int, after: int) -> str:
    return f"{before:,} → {after:,}" if before != after else f"{before:,}" if after else ""
