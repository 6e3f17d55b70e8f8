"""OBS and Alternating: the relations that cost least leave, and the others get weights that
compensate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from grapnet.core._errors import EditError
from grapnet.core._graph import Graph
from grapnet.core._index_map import flatnonzero
from grapnet.core._sets import RelationSet
from grapnet.spaces._adopted import Adopted

from ._alternating import alternate, solved
from ._budget import positions_in, weakest_places
from ._cells import linear_of
from ._criteria import WINDOW, Assignment, Choice, Evidence, by_transition, free_of, seen
from ._gram import GramRecorder
from ._least_squares import Sweep, obs_sweep, repaired
from ._matrices import cells_of, key_of, matrix_of
from ._rule import Recorder
from ._saliency import why_no_inputs
from ._scopes import Comparison, Quota, Scope, compared, narrowed


def matrix_recorders(net: Any, relations: RelationSet, **settings: Any) -> dict[str, GramRecorder]:
    """Returns a recorder of the Gram matrix of what each transition of some relations reads.

    Args:
        net: the net, or the adopted model.
        relations: the relations.
        settings: those of `GramRecorder`.
    """
    found: dict[str, GramRecorder] = {}
    for t, _ in by_transition(relations):
        name = _evidence(net, t)
        if name in found:
            continue
        if isinstance(net, Adopted):
            weight = net.transitions[t]
            path = linear_of(net, weight.name).path
            space = net.spaces[weight.source].name
            found[name] = GramRecorder(space, at=path, **settings)
        else:
            found[name] = GramRecorder(net.ends[t][0], **settings)
    return found


@dataclass(frozen=True)
class Surgeon:
    """Base of the criteria that choose relations by a Gram matrix, and assign those that stay.

    Attributes:
        bias: let biases compensate, too, where they are free.
        damping: added to the diagonal of the Gram matrix, as a share of its mean.
        window: the number of steps to record.
    """

    bias: bool = True
    damping: float = 0.01
    window: int = WINDOW
    scope: ClassVar[Scope] = "transition"
    comparison: ClassVar[Comparison] = "score"
    # rules and gn.prune need no repair behind it
    assigns: ClassVar[bool] = True

    def recorders(self, net: Any, candidates: Any) -> dict[str, Recorder]:
        """Returns a recorder of the Gram matrix of what each transition reads."""
        return dict(matrix_recorders(net, candidates, window=self.window, held_out=0.0))

    def refusal(self, net: Any, number: int) -> str:
        """Returns why a tensor is not the weight of a Linear or convolution."""
        return why_no_inputs(net, number)

    def choose(
        self, net: Any, candidates: Any, evidence: Evidence, count: int | Quota, /
    ) -> Choice:
        """Returns the relations that leave, and the weights of those that stay."""
        candidates = free_of(candidates)
        if len(candidates) == 0:
            return Choice(candidates)
        quota = Quota.of(count)
        tables = list(self._tables(net, candidates, evidence))
        sweeps: list[Sweep | None] = [None] * len(tables)
        if self._is_swept(quota, tables):
            parts = []
            shares = _shares_of(tables, quota)
            for n, (table, counts) in enumerate(zip(tables, shares, strict=True)):
                sweep = self._swept(table, counts, quota)
                sweeps[n] = sweep
                parts.append(~sweep.kept[:, : table.width].reshape(-1)[table.cells[:, 0]])
            marks = _limited(torch.cat(parts), tables, quota, self.damping)
        else:
            costs = [table.costs(self.damping) for table in tables]
            how = quota.compare or self.comparison
            key = compared(torch.cat(costs), [len(part) for part in costs], how)
            marks = torch.zeros(len(candidates), dtype=torch.bool, device=key.device)
            marks[quota.places(key).long()] = True
        assigned = self._assigned(tables, sweeps, marks)
        return Choice(candidates[marks.to(net.device)], tuple(assigned))

    def _tables(self, net: Any, candidates: RelationSet, evidence: Evidence) -> Iterator[_Table]:
        """Yields one table for each weight matrix; candidates of one follow each other."""
        by_matrix: dict[Any, list[int]] = {}
        for t, _ in by_transition(candidates):
            by_matrix.setdefault(key_of(net, t), []).append(t)
        for transitions in by_matrix.values():
            recorder = seen(evidence, _evidence(net, transitions[0]), self)
            if recorder.is_stale:
                raise EditError(
                    f"{type(self).__name__} needs {_evidence(net, transitions[0])} as it is, and"
                    f" what was recorded is stale: {recorder.stale_reason}. Run data through the"
                    " net after the last step, inside `with manager.recording(net):`"
                )
            yield self._table(net, transitions, candidates, recorder.gram)

    def _table(
        self, net: Any, transitions: list[int], candidates: RelationSet, gram: Tensor
    ) -> _Table:
        return _Table.of(net, transitions, candidates, gram, self.bias)

    def _is_swept(self, quota: Quota, tables: list[_Table]) -> bool:
        """Returns whether the sweep itself can choose what leaves."""
        for table in tables:
            if table.cells.shape[1] != 1 or len(table.transitions) > 1:
                return False
            if quota.pattern is not None and not self._divides(table.width, quota.pattern[1]):
                return False
        if quota.groups is None:
            return len(tables) == 1
        return quota.scope in ("child", "transition")

    def _divides(self, width: int, group: int) -> bool:
        """Returns whether so many columns are whole groups."""
        return width % group == 0

    def _swept(self, table: _Table, counts: Tensor, quota: Quota) -> Sweep:
        """Returns what a sweep makes of one matrix, of whose groups so many relations leave."""
        # Relations that are no candidates stay, as frozen ones do.
        may_leave = table.is_candidate
        options: dict[str, Any] = {}
        if quota.pattern is not None:
            options["pattern"] = quota.pattern
        elif quota.scope == "child" and quota.groups is not None:
            options["count"] = torch.minimum(counts.to(may_leave.device), may_leave.sum(1))
        else:
            options["count"] = min(int(counts[0]), int(may_leave.sum()))
        return self._sweep(table, ~may_leave & ~table.absent, **options)

    def _sweep(self, table: _Table, frozen: Tensor, **options: Any) -> Sweep:
        """Returns what stays of a matrix, and its weights.

        Args:
            table: the matrix.
            frozen: the cells that keep their values.
            options: which cells leave: `count`, `pattern` or `leaving`, as for `obs_sweep`.
        """
        raise NotImplementedError

    def _assigned(
        self, tables: list[_Table], sweeps: list[Sweep | None], marks: Tensor
    ) -> list[Assignment]:
        """Returns the numbers of all that stays and changes."""
        found: list[Assignment] = []
        # of a layer of a net, into which several transitions may lead
        changes: dict[int, Tensor] = {}
        start = 0
        for table, sweep in zip(tables, sweeps, strict=True):
            leaving = table.marked(marks[start : start + len(table.cells)])
            start += len(table.cells)
            if not bool(leaving.any()):
                continue
            chosen = sweep is not None and bool((~sweep.kept & ~table.absent == leaving).all())
            others = ~(table.is_candidate | table.absent | table.frozen)
            if sweep is None or not chosen or bool(others[:, : table.width].any()):
                sweep = self._sweep(table, table.frozen, leaving=leaving)
            found += table.assignments(sweep.weights, leaving)
            if table.has_bias:
                change = sweep.weights[:, -1] - table.weights[:, -1]
                table.add_bias(change, changes, found)
        for layer, change in changes.items():
            at = change.nonzero().view(-1)
            nodes = tables[0].net.layers[layer]
            values = nodes.values().detach().double() + change.to(nodes.values().device)
            found.append(Assignment(nodes[at.cpu()], values[at]))
        return [part for part in found if len(part.values)]


@dataclass(frozen=True)
class OBS(Surgeon):
    """The optimal brain surgeon (Hassibi and Stork, 1993) in the sweep over columns of SparseGPT
    (Frantar and Alistarh, 2023).

    A relation leaves if it costs its child little once all others compensate for it, and those that
    stay get the weights that do so: the choice assigns them. It needs the Gram matrix of what
    each transition reads, recorded after the last training step: a stale one is refused.

    Relations of one number are chosen block by block, while the columns behind compensate. It ranks
    the relations of a transition together by default; the scopes "child" and a pattern are swept
    alike. In other scopes, and where a relation has several numbers, relations are chosen by
    Σ w²/[H⁻¹]ᵢᵢ at once, and the sweep compensates all of them.

    Attributes:
        bias: let biases compensate, too, where they are free.
        damping: added to the diagonal of the Gram matrix, as a share of its mean.
        window: the number of steps to record.
        block: how many columns are chosen at a time.
        spread: how the relations of a transition that leave are shared out over the blocks:
            "matrix" by their costs before the sweep, "block" in equal shares.
        solve: solve for the weights of the relations that stay once all are chosen. The sweep
            itself never returns to a column, so that those before a relation do not compensate.
        published: compute as the published implementation does: in the precision of the weights,
            without bias, with `spread="block"`.
    """

    block: int = 128
    spread: Literal["matrix", "block"] = "matrix"
    solve: bool = False
    published: bool = False

    def _table(
        self, net: Any, transitions: list[int], candidates: RelationSet, gram: Tensor
    ) -> _Table:
        if self.published:
            gram = gram.to(net.transitions[transitions[0]].weight.dtype)
            return _Table.of(net, transitions, candidates, gram, has_bias=False)
        return super()._table(net, transitions, candidates, gram)

    def _divides(self, width: int, group: int) -> bool:
        return width % group == 0 and self.block % group == 0

    def _sweep(self, table: _Table, frozen: Tensor, **options: Any) -> Sweep:
        if self.published and isinstance(options.get("count"), int):
            room = int(table.is_candidate.sum())
            options = {"share": options["count"] / max(1, room)}
        frozen = table.with_own_bias(frozen)
        shared: dict[str, Any] = {"bias": table.has_bias, "damping": self.damping}
        found = obs_sweep(
            table.weights,
            table.gram,
            absent=table.absent,
            frozen=frozen,
            block=self.block,
            spread="block" if self.published else self.spread,
            published=self.published,
            **shared,
            **options,
        )
        if self.solve:
            weights = solved(table.weights, table.gram, found.kept, frozen, **shared)
            found = found._replace(weights=weights)
        return found


@dataclass(frozen=True)
class Alternating(Surgeon):
    """Alternating steps of least squares and of keeping the largest weights (ALPS, Meng et al.,
    2024).

    It needs what `OBS` needs, and assigns as it does. A relation that left in one round can return
    in a later one, so that more of the function is kept where few relations stay. It takes longer.
    Relations of several numbers, and those of scopes other than "transition" and "child", are
    chosen as by `OBS`; the weights of those that stay are solved for.

    Attributes:
        bias: let biases compensate, too, where they are free.
        damping: added to the diagonal of the Gram matrix, as a share of its mean.
        window: the number of steps to record.
        rounds: the number of rounds.
    """

    rounds: int = 100

    def _sweep(self, table: _Table, frozen: Tensor, **options: Any) -> Sweep:
        shared: dict[str, Any] = {
            "absent": table.absent,
            "frozen": table.with_own_bias(frozen),
            "bias": table.has_bias,
            "damping": self.damping,
        }
        leaving = options.pop("leaving", None)
        if leaving is None:
            options["rounds"] = self.rounds
            return alternate(table.weights, table.gram, **shared, **options)
        weights = repaired(table.weights, table.gram, leaving, **shared)
        return Sweep(~(leaving | table.absent), weights)


@dataclass(frozen=True, eq=False)
class _Table:
    """One weight matrix, with the bias as its last column if it is to compensate.

    Attributes:
        net: the net.
        transitions: the transitions whose relations it has.
        weights: [children, columns].
        gram: [columns, columns].
        cells: the numbers of the candidates as child · width + column, [n, k] int64.
        absent: the cells that do not exist, bool [children, columns].
        frozen: the cells that keep their values.
        width: the number of columns without the bias.
    """

    net: Any
    transitions: list[int]
    weights: Tensor
    gram: Tensor
    cells: Tensor
    absent: Tensor
    frozen: Tensor
    width: int

    @classmethod
    def of(
        cls,
        net: Any,
        transitions: list[int],
        candidates: RelationSet,
        gram: Tensor,
        has_bias: bool,
    ) -> _Table:
        """Returns the table of some transitions, all of one matrix."""
        device = gram.device
        weights, absent, frozen = matrix_of(net, key_of(net, transitions[0]))
        width = weights.shape[1] - 1
        free = ~(absent | frozen)[:, -1]
        if not has_bias or not bool(free.any()):
            weights = weights[:, :width]
            absent = absent[:, :width]
            frozen = frozen[:, :width]
            gram = gram[:width, :width]
        cells = []
        for t in transitions:
            cells.append(cells_of(net, t, positions_in(candidates, t, net.device)))
        return cls(
            net,
            transitions,
            weights.to(gram),
            gram,
            torch.cat(cells).to(device),
            absent.to(device),
            frozen.to(device),
            width,
        )

    @property
    def has_bias(self) -> bool:
        """Whether the last column is the bias."""
        return self.weights.shape[1] > self.width

    def with_own_bias(self, frozen: Tensor) -> Tensor:
        """Returns frozen cells with the biases that are frozen themselves, and no others: a bias is
        never chosen, and compensates where it is free.
        """
        if not self.has_bias:
            return frozen
        frozen = frozen.clone()
        frozen[:, -1] = self.frozen[:, -1]
        return frozen

    @property
    def is_candidate(self) -> Tensor:
        """Which cells may leave, bool [children, columns]."""
        return self.marked(torch.ones(len(self.cells), dtype=torch.bool, device=self.cells.device))

    def marked(self, marks: Tensor) -> Tensor:
        """Returns the cells of the candidates that are marked, bool [children, columns]."""
        found = torch.zeros_like(self.absent)
        at = self.cells[marks.to(self.cells.device)].reshape(-1)
        found[at // self.width, at % self.width] = True
        return found

    def at(self, table: Tensor, cells: Tensor) -> Tensor:
        """Returns the entries of a table at some cells, of the same shape."""
        return table[cells // self.width, cells % self.width]

    def costs(self, damping: float) -> Tensor:
        """Returns what each candidate costs if it alone leaves: Σ w²/[H⁻¹]ᵢᵢ."""
        system = self.gram.double().clone()
        diagonal = system.diagonal()
        is_dead = diagonal == 0
        mean = diagonal[: self.width].mean()
        diagonal[is_dead] = torch.where(mean > 0, mean, 1.0)
        diagonal[: self.width] += damping * mean
        root, failed = torch.linalg.cholesky_ex(system)
        if int(failed):
            raise EditError(
                f"the Gram matrix of {len(system)} columns is not positive definite; choose a"
                " larger damping=, or record more rows"
            )
        depth = torch.cholesky_inverse(root).diagonal()
        # What was 0 in all rows costs nothing.
        cost = self.weights.double().square() / depth.masked_fill(is_dead, torch.inf)
        return self.at(cost, self.cells).sum(1)

    def assignments(self, weights: Tensor, leaving: Tensor) -> list[Assignment]:
        """Returns the weights that have changed, of relations that stay, one entry per
        transition.
        """
        found = []
        for t in self.transitions:
            every = torch.arange(self.net.transitions[t].size, dtype=torch.int32)
            every = every.to(self.net.device)
            cells = cells_of(self.net, t, every).to(self.cells.device)
            changed = (self.at(weights, cells) != self.at(self.weights, cells)).any(1)
            changed &= ~self.at(leaving, cells).any(1)
            at = flatnonzero(changed.to(self.net.device))
            values = self.at(weights, cells[changed])
            found.append(Assignment(RelationSet(self.net, {t: at}), values))
        return found

    def add_bias(self, change: Tensor, changes: dict[int, Tensor], found: list[Assignment]) -> None:
        """Adds what biases change by: to that of a layer, or as an assignment of a Parameter."""
        transition = self.net.transitions[self.transitions[0]]
        if isinstance(self.net, Adopted):
            module = linear_of(self.net, transition.name).module(self.net)
            found.append(Assignment(module.bias, module.bias.detach().double() + change))
            return
        earlier = changes.get(transition.target)
        changes[transition.target] = change if earlier is None else earlier + change


def _shares_of(tables: list[_Table], quota: Quota) -> list[Tensor]:
    """Returns how many relations leave of the groups of each table: its children, or all of it."""
    if quota.pattern is not None:
        # The pattern says it.
        return [quota.counts] * len(tables)
    sizes = [1] * len(tables)
    if quota.scope == "child" and quota.groups is not None:
        sizes = [len(table.weights) for table in tables]
    return list(quota.counts.split(sizes))


def _limited(marks: Tensor, tables: list[_Table], quota: Quota, damping: float) -> Tensor:
    """Returns marks without those that limits spare."""
    at = flatnonzero(marks)
    is_within = quota.most is None or len(at) <= quota.most
    if is_within and not quota.limits:
        return marks
    key = torch.cat([table.costs(damping) for table in tables])[at.long()]
    most = len(at) if quota.most is None else min(len(at), quota.most)
    some = weakest_places(key, most, narrowed(quota.limits, at))
    found = torch.zeros_like(marks)
    found[at[some.long()].long()] = True
    return found


def _evidence(net: Graph, t: int) -> str:
    """Returns the name of the evidence about what a transition reads."""
    if isinstance(net, Adopted):
        return f"Gram matrix of {linear_of(net, net.transitions[t].name).path}"
    return f"Gram matrix of layer {net.ends[t][0]}"
