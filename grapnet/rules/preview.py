"""Preview: what a dry run says that a commit would do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._graph import Count
from grapnet.execution.evaluating import evaluating
from grapnet.network import GrapNet


@dataclass(frozen=True, repr=False)
class Preview:
    """What the rules that are due would do to a net; nothing of it has happened.

    Attributes:
        rules: the names of the rules that were due, in order.
        before: the size of the net.
        after: the size it would have.
        cut: how many relations would go, those of removed nodes included.
        connected: how many would come.
        orphans: how many hidden nodes would have no parents.
        output_change: the largest |difference| of an output on the probe, without dropout; None
            without a probe, without outputs, and when their number would change.
        operations: what was asked for, as it would stand in the journal.
        waiting: when no rule was due, at which step that was and which one comes next; empty
            otherwise.
    """

    rules: tuple[str, ...]
    before: Count
    after: Count
    cut: int
    connected: int
    orphans: int
    output_change: float | None
    operations: tuple[dict[str, Any], ...]
    waiting: str = ""

    @property
    def relations(self) -> int:
        """The change in the number of relations."""
        return self.after.relations - self.before.relations

    @property
    def nodes(self) -> int:
        """The change in the number of nodes."""
        return self.after.nodes - self.before.nodes

    @property
    def parameters(self) -> int:
        """The change in the number of trainable coordinates."""
        return self.after.trainable - self.before.trainable

    @property
    def flops(self) -> int:
        """The change in the operations of a forward pass of one sample."""
        return self.after.flops - self.before.flops

    def __str__(self) -> str:
        rows = [
            ("nodes", "nodes"),
            ("relations", "relations"),
            ("parameters", "trainable"),
            ("flops", "flops"),
        ]
        lines = [
            f"dry run of {', '.join(self.rules)}" if self.rules else f"dry run: {self.waiting}",
            f"{'':<12}{'before':>14}{'after':>14}{'change':>14}",
        ]
        for label, name in rows:
            before, after = getattr(self.before, name), getattr(self.after, name)
            lines.append(f"{label:<12}{before:>14,}{after:>14,}{after - before:>+14,}")
        output = "" if self.output_change is None else f", output change {self.output_change:.3g}"
        lines.append(
            f"cut {self.cut:,}, connected {self.connected:,}, orphans {self.orphans:,}{output}"
        )
        return "\n".join(lines)

    __repr__ = __str__


def preview(
    net: GrapNet,
    rules: tuple[str, ...],
    write: Callable[[Edit], None],
    *,
    generator: torch.Generator,
    allow_dead: bool,
    probe: Tensor | None = None,
    waiting: str = "",
) -> Preview:
    """Returns what an edit would do, from a trial that leaves no trace in the net.

    Args:
        net: the net.
        rules: who writes into the edit.
        write: lets them.
        generator: source of the random numbers for newborn weights.
        allow_dead: as for the edit that would follow.
        probe: inputs to compare the output on.
        waiting: what to say when there are no rules.
    """
    before, output, next_uid = net.count(), _output(net, probe), net.next_uid
    reason = f"dry run of {', '.join(rules)}"
    try:
        with net.edit(reason, trial=True, generator=generator, allow_dead=allow_dead) as edit:
            write(edit)
            receipt = edit.commit()
            counts = {} if receipt is None else receipt.counts
            return Preview(
                rules=rules,
                before=before,
                after=net.count(),
                cut=counts.get("relations_removed", 0),
                connected=counts.get("relations_added", 0),
                orphans=sum(int((t.topology.fan_in() == 0).sum()) for t in net.transitions[:-1]),
                output_change=_difference(output, _output(net, probe)),
                operations=() if receipt is None else receipt.operations,
                waiting=waiting,
            )
    finally:
        # the commit that follows gives newborn nodes the same uids as without a dry run
        net.next_uid = next_uid


def _output(net: GrapNet, probe: Tensor | None) -> Tensor | None:
    if probe is None:
        return None
    with evaluating(net):
        return net(probe)


def _difference(before: Tensor | None, after: Tensor | None) -> float | None:
    if before is None or after is None or before.shape != after.shape or before.numel() == 0:
        return None
    return float((after - before).abs().max())
