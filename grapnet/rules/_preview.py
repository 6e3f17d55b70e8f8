"""Preview: what a dry run returns, from a trial that leaves no trace."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._torch import pytree
from grapnet.core._edit import Edit
from grapnet.core._evaluating import evaluating
from grapnet.core._graph import Count, Graph
from grapnet.core._journal import Commit
from grapnet.spaces._adopted import Adopted

from ._rule import Nets, count_orphans

# Inputs on which outputs are compared, or a function that measures the model.
Probe = Tensor | Callable[[nn.Module], Any]


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
        spaces: for every space of an adopted model that would change, its nodes before and after.
        measured: what a function given as the probe returned before and after; None without one.
    """

    rules: tuple[str, ...]
    before: Count
    after: Count
    cut: int
    connected: int
    orphans: int
    output_change: float | None
    operations: tuple[dict[str, Any], ...]
    spaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    measured: tuple[float, float] | None = None

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

    @property
    def macs(self) -> int:
        """The change in the multiply-adds of a forward pass."""
        return self.after.macs - self.before.macs

    def __str__(self) -> str:
        title = "dry run: no rule is due"
        if self.rules:
            title = f"dry run of {', '.join(self.rules)}"
        lines = [title, f"{'':<12}{'before':>14}{'after':>14}{'change':>14}"]
        rows = {"nodes": "nodes", "relations": "relations", "parameters": "trainable"}
        rows["flops"] = "flops"
        # Of an adopted model whose nodes alone change, the relations tell nothing.
        has_relations = bool(self.cut or self.connected or not self.spaces)
        if not has_relations:
            rows = {"nodes": "nodes", "parameters": "parameters", "macs": "macs"}
        for label, name in rows.items():
            before = getattr(self.before, name)
            after = getattr(self.after, name)
            lines.append(f"{label:<12}{before:>14,}{after:>14,}{after - before:>+14,}")
        for name, (before, after) in self.spaces.items():
            lines.append(f"{name}: {before:,} → {after:,} nodes")
        last = []
        if has_relations:
            last.append(f"cut {self.cut:,}, connected {self.connected:,}, orphans {self.orphans:,}")
        if self.output_change is not None:
            last.append(f"output change {self.output_change:.3g}")
        if self.measured is not None:
            last.append("measured {:.4g} → {:.4g}".format(*self.measured))
        if last:
            lines.append(", ".join(last))
        return "\n".join(lines)

    __repr__ = __str__


def preview(
    model: Nets,
    nets: Mapping[str, Graph],
    trial: Any,
    write: Callable[[Sequence[Edit]], None],
    probe: Probe | None,
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
            after = _output(model, probe)
            counts = [receipt.counts for receipt in receipts]
            operations = [step for receipt in receipts for step in receipt.operations]
            return Preview(
                rules=rules,
                before=before,
                after=_total(nets.values()),
                cut=sum(count.get("relations_removed", 0) for count in counts),
                connected=sum(count.get("relations_added", 0) for count in counts),
                orphans=sum(_orphans(net) for net in nets.values()),
                output_change=_difference(output, after),
                operations=tuple(operations),
                spaces=_changed_spaces(nets, [edit.receipt for edit in edits]),
                measured=_measured(output, after),
            )
    finally:
        # The commit that follows gives newborn nodes the same uids as without a dry run.
        for net, uid in zip(nets.values(), uids, strict=True):
            net._next_uid = uid


def _total(nets: Iterable[Graph]) -> Count:
    columns = zip(*(astuple(net.count()) for net in nets), strict=True)
    return Count(*map(sum, columns))


def _orphans(net: Graph) -> int:
    numbers: Iterable[int] = range(1, len(net.layers) - 1)
    if isinstance(net, Adopted):
        numbers = net._orphanages()
    return sum(count_orphans(net, number) for number in numbers)


def _changed_spaces(
    nets: Mapping[str, Graph], receipts: Sequence[Commit | None]
) -> dict[str, tuple[int, int]]:
    """Returns the sizes of the spaces of adopted models that change, before and after."""
    found = {}
    for (name, net), receipt in zip(nets.items(), receipts, strict=True):
        if receipt is None or not isinstance(net, Adopted):
            continue
        for number, change in receipt.change.layers.items():
            if not change.index.is_identity:
                space = net.spaces[number].name
                if name:
                    space = f"{name}: {space}"
                found[space] = (change.index.old_size, change.index.new_size)
    return found


def _output(model: Nets, probe: Probe | None) -> Any:
    """Returns what the probe makes of a model: its output, or the number of a function."""
    if probe is None:
        return None
    if not isinstance(model, nn.Module):
        raise TypeError("probe= is run through a model: apply(model, dry_run=True, probe=x)")
    if isinstance(model, Adopted):
        model = model.model
    with evaluating(model), torch.no_grad():
        if isinstance(probe, Tensor):
            return model(probe)
        return float(probe(model))


def _measured(before: Any, after: Any) -> tuple[float, float] | None:
    if isinstance(before, float):
        return before, after
    return None


def _difference(before: Any, after: Any) -> float | None:
    """Returns the largest difference of the tensors of two outputs; None if they have none, or
    of other shapes.
    """
    largest = None
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    for one, other in pairs:
        if not isinstance(one, Tensor) or one.numel() == 0:
            continue
        if one.shape != other.shape:
            return None
        largest = max(largest or 0.0, float((other - one).abs().max()))
    return largest
