"""Pruning: what gn.prune did, and the way back."""

from __future__ import annotations

from typing import NamedTuple

from grapnet.core._errors import HistoryError
from grapnet.core._graph import Graph


class Stage(NamedTuple):
    """One layer or transition of a run, or one reader that was refitted.

    Attributes:
        name: what was pruned, or "refit" and the reader.
        leaving: how many nodes or relations left.
        present: how many there were; of a reader, how many children.
        assigned: how many weights and biases got another value.
        seconds: how long it took; 0 for a stage of an earlier call.
    """

    name: str
    leaving: int
    present: int
    assigned: int
    seconds: float


class Skipped(NamedTuple):
    """A layer, space or transition that a run leaves as it is.

    Attributes:
        name: what was left out.
        reason: why the criterion cannot score it, or the repair cannot make up for it.
    """

    name: str
    reason: str


class Pruning:
    """What `gn.prune` did, and the way back.

    Attributes:
        nets: the nets, or the graph of an adopted model, by name.
        stages: what left, layer by layer.
        skipped: what was left out, and why.
        before: the score of the probe before; None without a probe.
        after: the score of the probe afterwards.
        undo_bytes: an upper estimate of the bytes that undo keeps.
    """

    def __init__(
        self, nets: dict[str, Graph], skipped: tuple[Skipped, ...], undo_bytes: int
    ) -> None:
        self.nets = nets
        self.stages: tuple[Stage, ...] = ()
        self.skipped = skipped
        self.before: float | None = None
        self.after: float | None = None
        self.undo_bytes = undo_bytes
        self._limits = {name: net.journal.undo_limit for name, net in nets.items()}
        # the versions that stages have led to, by net
        self._versions: dict[str, list[int]] = {name: [] for name in nets}

    def undo(self) -> None:
        """Reverts all of it, the last stage first, and gives the nets their undo limits back.

        Raises:
            HistoryError: a net was edited or undone since, or its journal has dropped a stage;
                nothing was changed.
        """
        for name, net in self.nets.items():
            versions = self._versions[name]
            places = net.journal.undoable[len(net.journal.undoable) - len(versions) :]
            last = [net.journal.commits[place].version for place in places]
            if last != versions:
                raise HistoryError(
                    f"the last commits that undo can revert lead to versions {last}, and those of"
                    f" this pruning to {versions}: the net was edited or undone since, or"
                    " accept() dropped some"
                )
        for name, net in reversed(self.nets.items()):
            for _ in self._versions[name]:
                net.undo()
            self._versions[name] = []
        self.accept()

    def accept(self) -> None:
        """Keeps the pruned model, and gives the nets their undo limits back.

        What undo needs of stages beyond the limit is dropped.
        """
        for name, net in self.nets.items():
            net.journal.undo_limit = self._limits[name]

    def __repr__(self) -> str:
        lines = []
        for stage in self.stages:
            if stage.leaving == 0 and stage.name.startswith("refit "):
                lines.append(f"  {stage.name}: {stage.assigned:,} weights and biases")
                continue
            lines.append(f"  {stage.name}: {stage.leaving:,} of {stage.present:,} removed")
        for part in self.skipped:
            lines.append(f"  {part.name}: skipped, {part.reason}")
        if self.before is not None and self.after is not None:
            lines.append(f"  score: {self.before:.4g} before, {self.after:.4g} afterwards")
        return "\n".join(["Pruning(", *lines, ")"])
