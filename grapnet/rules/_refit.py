"""refit: the weights with which readers receive what they receive in another model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from grapnet._torch import uncompiled, untraced, without_compiled_calls
from grapnet.core._errors import EditError
from grapnet.core._evaluating import evaluating
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import covered
from grapnet.spaces._statistics import call_of, require_repeatable

from ._cells import linear_of, why_not_linear, with_batch
from ._gram import GramRecorder, LayerOrigin, limit_matrices, origin_of
from ._matrices import key_of, matrix_of
from ._recorder import plainly
from ._repair import Case, Lack, Repaired, name_of, writer_of
from ._rule import chosen_transitions, nets_of

# The share of what children receive up to which nothing is missing.
_NOTHING = 1e-14


def refit(
    model: Any,
    original: Any,
    batches: Iterable[Any],
    *,
    transitions: int | str | Iterable[int | str] | None = None,
    damping: float | None = None,
    rows: int | None = None,
    most_cells: int | None = None,
) -> tuple[Repaired, ...]:
    """Gives readers the weights with which their children receive what they receive in another
    model.

    `repair` makes up for what leaves one layer, given what the layer sends. Errors of earlier
    layers are still there, and grow from layer to layer. `refit` runs both models on the same
    batches and solves one reader after the other by least squares: from what it reads in `model`,
    to what its children receive in `original`, so that each corrects what those before it left
    over. It matters where most of a model was removed.

    No relation is created, and frozen coordinates keep their values. Readers are Linears and
    convolutions, as for `repair`, that are called once in a pass; others are left as they are. Both
    models are in evaluation mode meanwhile. Every reader is one commit; those that lack nothing are
    not touched.

    Args:
        model: a net, the graph of an adopted model, or a model with nets inside.
        original: a copy of it from before the edits: `copy.deepcopy(model)`. A copy that is made
            later can be undone.
        batches: what both models run on, once for each reader, as for `gn.prune`.
        transitions: the numbers of transitions, or names of weights, of every net; all by default.
        damping: as for `repair`.
        rows: how many rows of a pass are recorded, evenly spaced; all by default.
        most_cells: how many numbers the statistics of a reader may have, as for `gn.prune`.

    Returns:
        What was done, in the order of the calls, one entry for each reader that changed: `lost` is
        the share of the squares of what its children receive in `original` that was missing, and
        `left` what is still missing.

    Raises:
        EditError: `original` is no copy of `model`, or has other nodes than those that left; or a
            transition is named that cannot be refitted.
        GrapNetError: the statistics of a reader have too many numbers.
        TypeError: `batches` can be run only once.

    Readers before an error or an interrupt are refitted.

    Examples:
        >>> import copy
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 32, 32, 3])
        >>> original = copy.deepcopy(net)
        >>> batches = [torch.randn(256, 4)]
        >>> _ = gn.prune(net, batches, nodes=0.75)
        >>> [(done.reader, done.left < done.lost) for done in refit(net, original, batches)]
        [('layer 1 → layer 2', True), ('layer 2 → layer 3', True)]
    """
    fitting = Fitting.of(model, original, batches, damping, rows, most_cells)
    found = []
    for reader in fitting.readers(transitions):
        solution = fitting.solve(reader)
        if solution is not None:
            with reader.net.edit(f"refit {reader.name}", by="refit") as edit:
                solution.write(edit)
            found.append(solution.report)
    return tuple(found)


class Reader(NamedTuple):
    """A transition of a net, or a weight of an adopted model, and the same in the original."""

    name: str
    net: Any
    original: Any
    key: Any


class Solution(NamedTuple):
    """The weights of a reader, and what they are worth."""

    write: Callable[[Any], None]  # into an open edit
    report: Repaired


@dataclass(frozen=True, eq=False)
class Fitting:
    """Two models that run on the same batches."""

    model: nn.Module
    original: nn.Module
    # the graphs of both, by name
    nets: dict[str, Any]
    originals: dict[str, Any]
    batches: Iterable[Any]
    damping: float | None
    rows: int | None
    most_cells: int | None

    @classmethod
    def of(
        cls,
        model: Any,
        original: Any,
        batches: Iterable[Any],
        damping: float | None,
        rows: int | None,
        most_cells: int | None,
    ) -> Fitting:
        """Returns that of a model and its original; raises EditError if that has other nets."""
        require_repeatable(batches)
        nets = nets_of(model)
        try:
            originals = nets_of(original)
        except ValueError:
            originals = {}
        if list(nets) != list(originals):
            raise EditError(
                "original is no copy of the model with its graph: pass copy.deepcopy of the net, or"
                " of what gn.adopt returned, from before the edits"
            )
        for name, net in nets.items():
            if net is originals[name]:
                raise EditError("original is the model itself; pass a copy from before the edits")
        return cls(
            _runs(model), _runs(original), nets, originals, batches, damping, rows, most_cells
        )

    def readers(self, transitions: Any = None) -> list[Reader]:
        """Returns what can be refitted, in the order in which the original calls it.

        Raises:
            EditError: a transition is named that cannot be, or there are no batches.
        """
        found = []
        for name, net in self.nets.items():
            original = self.originals[name]
            keys: dict[int | str, None] = {}
            for t in chosen_transitions(net, transitions):
                problem = _why_not(net, t)
                if not problem:
                    keys[key_of(net, t)] = None
                elif transitions is not None:
                    raise EditError(f"transition {t} cannot be refitted: {problem}")
            for key in keys:
                label = name_of(net, key)
                if name:
                    label = f"{name}: {label}"
                found.append(Reader(label, net, original, key))
        return self._in_order_of_calls(found)

    def _in_order_of_calls(self, readers: list[Reader]) -> list[Reader]:
        calls: dict[int, int] = {}
        ends = []
        for number, reader in enumerate(readers):

            def note(sums: Tensor, number: int = number) -> None:
                calls.setdefault(number, len(calls))

            ends.append(_watch_sums(reader.original, reader.key, note))
        try:
            with evaluating(self.original), torch.no_grad():
                for batch in self.batches:
                    _run(self.original, batch)
                    break
                else:
                    raise EditError("there are no batches to run the models on")
        finally:
            for end in ends:
                end()
        order = sorted(range(len(readers)), key=lambda number: calls.get(number, len(readers)))
        return [readers[number] for number in order]

    def solve(self, reader: Reader) -> Solution | None:
        """Returns the weights of a reader; None if it lacks nothing, or the batches do not reach
        it.

        Raises:
            TooManyNumbers: its statistics have too many numbers.
        """
        children = _children(reader)
        if _is_unchanged(reader, children):
            return None
        net = reader.net
        waiting: list[Tensor] = []
        aim = _Aim(net, reader.key, self.rows, waiting)
        limit_matrices(net, aim, self.most_cells)
        ends = [
            _watch_sums(
                reader.original, reader.key, lambda sums: waiting.append(sums[:, children])
            ),
            _watch_sums(net, reader.key, aim.compare),
        ]
        aim.arm(net)
        try:
            with evaluating(self.original), evaluating(self.model), torch.no_grad():
                for batch in self.batches:
                    waiting.clear()
                    _run(self.original, batch)
                    _run(self.model, batch)
        finally:
            aim.disarm()
            for end in ends:
                end()
        lack = aim.lack
        if lack is None or lack.squares <= _NOTHING * lack.received:
            return None
        matrix = matrix_of(net, reader.key)
        every = torch.arange(len(matrix.weights))
        nothing = torch.zeros_like(matrix.absent, device="cpu")
        case = Case.of(reader.name, aim, matrix, nothing, every)
        case = replace(case, lack=lack)
        weights, report = case.solve(self.damping)
        weights = weights.to(case.weights.device)

        def write(edit: Any) -> None:
            writer_of(net, edit).write({reader.key: case}, {reader.key: weights})

        return Solution(write, report)


def _run(model: nn.Module, batch: Any) -> None:
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    args, kwargs = call_of(batch, device)
    with without_compiled_calls(model):
        model(*args, **kwargs)


def _runs(model: Any) -> nn.Module:
    return uncompiled(model.model if isinstance(model, Adopted) else model)


def _why_not(net: Any, t: int) -> str:
    """Returns why a transition cannot be refitted; empty if it can."""
    if isinstance(net, Adopted):
        name = net.transitions[t].name
        problem = why_not_linear(net, name)
        if not problem and linear_of(net, name).path in net._typed.repeated:
            problem = "it is called several times in a pass, and reads what depends on itself"
        return problem
    policy = net.execution.policies().get(t)
    return f"it runs with {policy.name}, and not as a sum" if policy else ""


class _Aim(GramRecorder):
    """Records what a reader reads, and what its children lack beside another model.

    Args:
        net: the net.
        key: the reader.
        rows: how many rows of a pass are recorded.
        waiting: what the children receive in the other model, call by call, which runs first.

    Attributes:
        lack: what was missing; None if nothing was recorded.
    """

    def __init__(self, net: Any, key: Any, rows: int | None, waiting: list[Tensor]) -> None:
        if isinstance(net, Adopted):
            weight = next(one for one in net.transitions if one.name == key)
            super().__init__(net.spaces[weight.source].name, at=linear_of(net, key).path, rows=rows)
        else:
            super().__init__(net.ends[key][0], rows=rows)
        self.lack: Lack | None = None
        self._waiting = waiting
        self._input: Tensor | None = None

    def _notice_writes(self) -> None:
        # Nothing writes while both models run.
        pass

    def _take(self, tensor: Tensor) -> None:
        # until the children have received what it sends
        self._input = tensor

    def compare(self, sums: Tensor) -> None:
        """Takes in what the children receive in one call, [rows, children]."""
        given = sums[:0]
        if self._waiting:
            given = self._waiting.pop(0)
        if self._input is None:
            return
        if len(given) != len(sums):
            raise EditError(
                f"{self.layer!r} is read {len(sums)} times in the model and {len(given)} times in"
                " the original: which rows there are depends on the weights, so that they cannot be"
                " compared"
            )
        with plainly(sums.device):
            given = given.to(sums.device)
            missing = given.double() - sums.double()
            for rows, at in self._parts(self._input):
                is_held = self._see(rows)
                if self.lack is None:
                    self.lack = Lack.none(missing.shape[1], rows.shape[1] + 1, sums.device)
                self.lack.add(rows.double(), missing[at], given[at], is_held)
        self._input = None


def _watch_sums(graph: Any, key: Any, see: Callable[[Tensor], None]) -> Callable[[], None]:
    """Calls `see` with what the children of a reader receive in each call, [rows, children], and
    returns the function that ends this.
    """
    if isinstance(graph, Adopted):
        module = linear_of(graph, key).module(graph)

        @untraced
        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = with_batch(module, output.detach()).movedim(1, -1)
            see(rows.reshape(-1, rows.shape[-1]))

        return module.register_forward_hook(after).remove

    @untraced
    def before(layer: nn.Module, args: Any) -> None:
        see(args[0].detach().reshape(-1, args[0].shape[-1]))

    layer: nn.Module = graph.layers[graph.ends[key][1]]
    handle = layer.register_forward_pre_hook(before)
    # Compiled code calls no hooks.
    forget = graph.execution._note_recorder()

    def end() -> None:
        handle.remove()
        forget()

    return end


def _children(reader: Reader) -> Tensor:
    """Returns where the children of a reader are among those that it has in the original.

    Raises:
        EditError: the original does not have all of them.
    """
    net = reader.net
    original = reader.original
    if not isinstance(net, Adopted):
        target = net.ends[reader.key][1]
        if list(net.ends) != list(original.ends):
            raise EditError(
                f"{net} and the original have other transitions: {list(net.ends)} and"
                f" {list(original.ends)}"
            )
        return _kept(reader, net.layers[target], original.layers[target]).nonzero().view(-1)
    if reader.key not in original._grids() or len(net.spaces) != len(original.spaces):
        raise _others(reader)
    gone: dict[int, np.ndarray] = {}
    for own, before in zip(net.spaces, original.spaces, strict=True):
        gone[before._atom] = ~_kept(reader, own, before).numpy()
    axis = original._typed.axes[reader.key][linear_of(original, reader.key).out_dim]
    left = covered(axis, gone, original._atom_sizes())
    return torch.from_numpy(np.flatnonzero(~left))


def _kept(reader: Reader, layer: Any, before: Any) -> Tensor:
    """Returns which nodes of a layer of the original are still there."""
    kept = torch.isin(before.uid, layer.uid)
    if not torch.equal(before.uid[kept], layer.uid):
        raise _others(reader)
    return kept


def _others(reader: Reader) -> EditError:
    return EditError(
        f"{reader.name} has nodes that the original does not have; refit before nodes are added,"
        " or pass a copy from after that"
    )


def _is_unchanged(reader: Reader, children: Tensor) -> bool:
    """Returns whether all that the children of a reader receive is as in the original."""
    net = reader.net
    original = reader.original
    if isinstance(net, Adopted):
        weight = next(one for one in net.transitions if one.name == reader.key)
        origin: Any = origin_of(net, weight.source, linear_of(net, reader.key).path)
        pairs = [_matrices(reader, reader.key, children)]
        for name in sorted(origin.tensors):
            pairs.append((net._grids()[name].whole, original._grids()[name].whole))
        return _are_equal(pairs)
    if net.execution.policies():
        return False
    target = net.ends[reader.key][1]
    origin = LayerOrigin.of(net, target)
    for number in origin.above:
        if not _same_activations(net.layers[number], original.layers[number]):
            return False
    pairs = []
    for t, to in origin.entering:
        rows = children
        if to != target:
            rows = torch.arange(len(original.layers[to]))
        pairs.append(_matrices(reader, t, rows))
    return _are_equal(pairs)


def _matrices(reader: Reader, key: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights of a transition, biases included, and those of some rows of it in the
    original.
    """
    own = matrix_of(reader.net, key).weights
    return own, matrix_of(reader.original, key).weights[rows.to(own.device)]


def _same_activations(layer: Any, other: Any) -> bool:
    own = layer._roster.kinds
    others = other._roster.kinds
    if [kind.function for kind in own] != [kind.function for kind in others]:
        return False
    return _are_equal((one.rows, two.rows) for one, two in zip(own, others, strict=True))


def _are_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    for one, other in pairs:
        if one.shape != other.shape or not torch.equal(one, other):
            return False
    return True
