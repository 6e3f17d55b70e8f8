"""Preview: what a dry run returns, from a trial that leaves no trace."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor, nn

from grapnet._network import GrapNet
from grapnet.core._edit import Edit
from grapnet.core._graph import Count
from grapnet.execution._evaluating import evaluating

from ._rule import Nets, count_orphans


@dataclass(frozen=True, repr=False)
class Preview:
    """What the rules that are due would do, in all nets together; nothing of it has happened.

    Attributes:
        rules: the names of the rules that are due, in order.
        before: the size of the nets.
        after: the size they would have.
        cut: how many relations would go, those of removed nodes included.
        connected: how many would come.
        orphans: how many hidden nodes would have no parents.
        output_change: the largest |difference| of an output on the probe, without dropout; None
            without a probe, without outputs, and when their number would change.
        operations: the operations as the journal would hold them.
    """

    rules: tuple[str, ...]
    before: Count
    after: Count
    cut: int
    connected: int
    orphans: int
    output_change: float | None
    operations: tuple[dict[str, Any], ...]

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
        title = "dry run: no rule is due"
        if self.rules:
            title = f"dry run of {', '.join(self.rules)}"
        lines = [title, f"{'':<12}{'before':>14}{'after':>14}{'change':>14}"]
        columns = {"nodes": "nodes", "relations": "relations", "parameters": "trainable"}
        for label, name in {**columns, "flops": "flops"}.items():
            before = getattr(self.before, name)
            after = getattr(self.after, name)
            lines.append(f"{label:<12}{before:>14,}{after:>14,}{after - before:>+14,}")
        last = f"cut {self.cut:,}, connected {self.connected:,}, orphans {self.orphans:,}"
        if self.output_change is not None:
            last += f", output change {self.output_change:.3g}"
        return "\n".join([*lines, last])

    __repr__ = __str__


def preview(
    model: Nets,
    nets: Mapping[str, GrapNet],
    trial: Any,
    write: Callable[[Sequence[Edit]], None],
    probe: Tensor | None,
    rules: tuple[str, ...],
) -> Preview:
    """Returns what edits would do, from a trial that leaves no trace in the nets."""
    before = _total(nets.values())
    output = _output(model, probe)
    uids = [net._next_uid for net in nets.values()]
    try:
        with trial as edits:
            write(edits)
            edits[0].commit()
            receipts = [edit.receipt for edit in edits if edit.receipt is not None]
            counts = [receipt.counts for receipt in receipts]
            operations = [step for receipt in receipts for step in receipt.operations]
            return Preview(
                rules=rules,
                before=before,
                after=_total(nets.values()),
                cut=sum(count.get("relations_removed", 0) for count in counts),
                connected=sum(count.get("relations_added", 0) for count in counts),
                orphans=sum(_orphans(net) for net in nets.values()),
                output_change=_difference(output, _output(model, probe)),
                operations=tuple(operations),
            )
    finally:
        # The commit that follows gives newborn nodes the same uids as without a dry run.
        for net, uid in zip(nets.values(), uids, strict=True):
            net._next_uid = uid


def _total(nets: Iterable[GrapNet]) -> Count:
    columns = zip(*(astuple(net.count()) for net in nets), strict=True)
    return Count(*map(sum, columns))


def _orphans(net: GrapNet) -> int:
    return sum(count_orphans(net, number) for number in range(1, len(net.layers) - 1))


def _output(model: Nets, probe: Tensor | None) -> Tensor | None:
    if probe is None:
        return None
    if not isinstance(model, nn.Module):
        raise TypeError("probe= is run through a model: apply(model, dry_run=True, probe=x)")
    with evaluating(model):
        return model(probe)


def _difference(before: Tensor | None, after: Tensor | None) -> float | None:
    if before is None or after is None or before.shape != after.shape or before.numel() == 0:
        return None
    return float((after - before).abs().max())
