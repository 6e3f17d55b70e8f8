"""FeedForward: the nets of one feed-forward block, and the hidden units that they share."""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.convert import Part


@dataclass(frozen=True, eq=False)
class FeedForward:
    """A feed-forward block of a Transformer: one net with a hidden layer, or several that share
    their hidden units.

    Of several, the last one reads the units that the others compute: gate, up, down. Edit single
    relations in the nets themselves; whole units come and go here, in all nets or in none.

    Attributes:
        name: of the block, in the model.
        nets: its nets.
        packed: whether the first of two nets has two nodes for every unit, the gates first and then
            the values.
    """

    name: str
    nets: tuple[gn.GrapNet, ...]
    packed: bool = False

    @property
    def net(self) -> gn.GrapNet:
        """The net of a block that is one."""
        if len(self.nets) > 1:
            raise AttributeError(f"{self.name!r} is {len(self.nets)} nets: handle.nets")
        return next(iter(self.nets))

    @property
    def hidden(self) -> gn.NodeSet:
        """The hidden units, as the live layer of nodes that the last net reads them from."""
        return self.nets[-1].layers[-2]

    @torch.no_grad()
    def importance(self) -> Tensor:
        """Returns how much every hidden unit may matter: the product of the norms of its incoming
        and outgoing weights.

        The weights are those of the relations that it has, its gate's as well, so a unit that lost
        all of one side counts 0. Biases do not count, and neither does what comes in; gradients do
        not flow.

        Returns:
            One number a unit, [n_hidden], in the order of `handle.hidden`.
        """
        norms = []  # each [copies, n_hidden]
        for net, (layer, copies) in zip(self.nets, self._layers(), strict=True):
            shape = copies, len(self.hidden)
            if layer.index > 0:
                before = net.transitions[layer.index - 1]
                norms.append(_norms(before.values(), before.child, shape))
            if layer.index < len(net.transitions):
                after = net.transitions[layer.index]
                norms.append(_norms(after.values(), after.topology.parents(), shape))
        return torch.cat(norms).prod(0)

    def remove_hidden(
        self,
        units: Any,
        *,
        reason: str = "remove hidden units",
        by: str | None = None,
        allow_dead: bool = False,
    ) -> tuple[gn.Commit, ...]:
        """Removes hidden units from all nets in one transaction; an error anywhere leaves every net
        as it was.

        Args:
            units: rows from 0 to `len(handle.hidden) - 1`, one bool a unit, or nodes of any one of
                the nets, such as `handle.hidden[:3]`.
            reason: why; it stands in every net's journal.
            by: which rule or person edits.
            allow_dead: as for `net.edit`; True to remove all of them.

        Returns:
            The receipt of every net; none when there was nothing to remove.

        Raises:
            EditError: there are no such units, they are all that a Conv1D has, which cannot run
                without any, or the nets do not share theirs any more; nothing was changed.
        """
        rows, count = self._rows(units), len(self.hidden)
        if 0 < len(rows) == count and any(
            part.transposed for net in self.nets for part in _parts(net)
        ):
            raise gn.EditError(
                f"these are all hidden units of {self.name!r}, and the Conv1Ds that gn.ungraft puts"
                " back there cannot run without any; leave one"
            )
        together = gn.edit_together(*self.nets, reason=reason, by=by, allow_dead=allow_dead)
        with together as edits:
            for edit, (layer, copies) in zip(edits, self._layers(), strict=True):
                nodes = layer[torch.cat([rows + number * count for number in range(copies)])]
                edit.remove_nodes(nodes, interface=True)
        return tuple(edit.receipt for edit in edits if edit.receipt is not None)

    def add_hidden(
        self,
        count: int,
        *,
        incoming: str = "linear",
        outgoing: str = "zero",
        owner: str | None = None,
        reason: str = "add hidden units",
        by: str | None = None,
    ) -> tuple[gn.Commit, ...]:
        """Adds hidden units behind the others, related to every input and output, in all nets in
        one transaction.

        Args:
            count: how many.
            incoming: how their incoming weights are drawn; see `edit.connect`.
            outgoing: the same of the outgoing ones. With "zero" the block computes at first what it
                did before.
            owner: a tag to select them by.
            reason: why; it stands in every net's journal.
            by: which rule or person edits.

        Raises:
            EditError: the block keeps two rows of one matrix for a unit, and units cannot come at
                the end of both.
        """
        if self.packed:
            raise gn.EditError(
                f"{self.name!r} has gate and up in one matrix, so units cannot be added at its end"
            )
        with gn.edit_together(*self.nets, reason=reason, by=by) as edits:
            for edit, net, (layer, _) in zip(edits, self.nets, self._layers(), strict=True):
                number = layer.index
                bias = None if _has_no_bias(net, layer) else "linear"
                units = edit.add_nodes(number, count, owner=owner, bias=bias)
                if number > 0:
                    edit.connect(net.layers[number - 1], units, weights=incoming)
                if number < len(net.layers) - 1:
                    edit.connect(units, net.layers[number + 1], weights=outgoing)
        return tuple(edit.receipt for edit in edits if edit.receipt is not None)

    def undo(self) -> tuple[gn.Commit, ...]:
        """Takes the last transaction over the block back, in all nets or in none; see
        `gn.undo_together`.
        """
        return gn.undo_together(*self.nets)

    def redo(self) -> tuple[gn.Commit, ...]:
        """Takes the last undo back; see `gn.redo_together`."""
        return gn.redo_together(*self.nets)

    def __repr__(self) -> str:
        return (
            f"FeedForward({self.name!r}, {len(self.hidden)} hidden units,"
            f" {', '.join(map(repr, self.nets))})"
        )

    def _layers(self) -> list[tuple[Any, int]]:
        """Returns for every net the layer of nodes that hidden units are in it, and how many nodes
        each unit is.
        """
        if len(self.nets) == 1:
            return [(self.net.layers[1], 1)]
        layers = [*(net.layers[-1] for net in self.nets[:-1]), self.hidden]
        copies = [2 if self.packed and layer is layers[0] else 1 for layer in layers]
        if any(
            len(layer) != each * len(self.hidden)
            for layer, each in zip(layers, copies, strict=True)
        ):
            told = ", ".join(
                f"{len(layer) / each:g}" for layer, each in zip(layers, copies, strict=True)
            )
            raise gn.EditError(
                f"the nets of {self.name!r} share their hidden units, and have {told} of them: one"
                " was edited alone. Take that back: net.undo(alone=True)"
            )
        return list(zip(layers, copies, strict=True))

    def _rows(self, units: Any) -> Tensor:
        """Returns rows of hidden units, each once, in order; raises EditError when there are no
        such units.
        """
        layers, count = self._layers(), len(self.hidden)
        nodes = _as_nodes(units)
        if nodes is not None:
            for layer, _ in layers:
                if nodes.graph is layer.graph:
                    found = nodes.rows_by_layer()
                    if set(found) <= {layer.index}:
                        return (
                            found.get(layer.index, torch.empty(0)).long() % max(count, 1)
                        ).unique()
                    raise gn.EditError(
                        f"nodes of layers {sorted(found)} are not all hidden units of {self.name!r}"
                    )
            raise gn.EditError(f"the nodes are in none of the nets of {self.name!r}")
        try:
            rows = torch.as_tensor(units, device="cpu").reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise gn.EditError(
                f"hidden units are given by row, one bool each, or as nodes: {error}"
            ) from None
        if rows.dtype == torch.bool:
            if len(rows) != count:
                raise gn.EditError(
                    f"{self.name!r} has {count} hidden units, and {len(rows)} bools were given"
                )
            return rows.nonzero().flatten()
        if len(rows) == 0:
            return rows.long()
        if rows.is_floating_point() or rows.is_complex():
            raise gn.EditError(
                f"hidden units are given by row, one bool each, or as nodes, not as {rows.dtype}"
            )
        rows = rows.long()
        outside = rows[(rows < -count) | (rows >= count)]
        if len(outside):
            raise gn.EditError(
                f"{self.name!r} has {count} hidden units, so there is no unit {int(outside[0])}"
            )
        return (rows % count).unique()


def _as_nodes(units: Any) -> gn.NodeSet | None:
    """Returns nodes as a NodeSet, None for what are no nodes."""
    if isinstance(units, gn.NodeSet):
        return units
    nodes = [units] if isinstance(units, gn.GrapNode) else units
    if (
        isinstance(nodes, list | tuple)
        and nodes
        and all(isinstance(node, gn.GrapNode) for node in nodes)
    ):
        return functools.reduce(operator.or_, (node.as_set() for node in nodes))
    return None


def _norms(weights: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns the norm of the weights of each row, in single precision or better, in this shape."""
    squares = weights.to(torch.promote_types(weights.dtype, torch.float32)).square()
    return squares.new_zeros(math.prod(shape)).index_add(0, rows, squares).sqrt().view(shape)


def _parts(net: gn.GrapNet) -> tuple[Part, ...]:
    """Returns the linear modules that a net stands for, one a transition; none where it does not
    know.
    """
    return () if net.origin is None else net.origin.chain.parts


def _has_no_bias(net: gn.GrapNet, layer: Any) -> bool:
    """Says whether a layer stands for a Linear without bias: every bias is zero and frozen, and
    there was none.
    """
    if layer.is_sensory or len(layer.frozen_at) < len(layer) or bool(layer.biases.any()):
        return False
    for part in _parts(net)[layer.index - 1 : layer.index]:
        for start, module in net.origin.replaced.items():
            if start in ("", part.path) or part.path.startswith(f"{start}."):
                linear = module.get_submodule(part.path.removeprefix(start).removeprefix("."))
                return getattr(linear, "bias", None) is None
    return len(layer) > 0
