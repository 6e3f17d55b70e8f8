"""Repair: the weights that let readers receive what they received when nodes or relations leave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError, GrapNetError, StaleError
from grapnet.core._graph import Graph
from grapnet.core._layer import LiveNodes
from grapnet.core._sets import RelationSet
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import covered
from grapnet.spaces._edit import SpaceEdit
from grapnet.spaces._space import Space
from grapnet.spaces._typing import CONTRACTED

from ._cells import linear_of, why_not_linear
from ._gram import GramRecorder
from ._least_squares import DAMPINGS, choose_damping, error_of, repaired
from ._matrices import Matrix, bias_of, matrix_of, spread_rows
from ._rule import as_names

# Where no rows are held out to choose by.
DAMPING = 1e-4
# Children of a reader that the report is measured on.
MEASURED = 64


class Repaired(NamedTuple):
    """What `repair` did to one reader.

    Attributes:
        reader: the transition as "layer 1 → layer 2", or the weight of a module.
        children: the number of children that lose something.
        damping: the damping that was chosen or given.
        lost: the share of the squares of what the children received that the edit alone would
            take, over all recorded rows; of many children, some are measured.
        left: the share that is still missing after the repair; NaN for a module that is called
            several times in a pass, whose later inputs may depend on what it returns.
    """

    reader: str
    children: int
    damping: float
    lost: float
    left: float


@dataclass(eq=False)
class Lack:
    """The difference between what the children of a reader receive in another model and in this
    one, over the recorded rows.

    Attributes:
        products: Σ e [h, 1]ᵀ of what is missing and what is read, [children, columns + 1] float64,
            over the rows to solve for.
        held: the same over the rows that are held out.
        squares: Σ e².
        received: the sum of the squares of what the children of the other model receive.
    """

    products: Tensor
    held: Tensor
    squares: float = 0.0
    received: float = 0.0

    @classmethod
    def none(cls, children: int, columns: int, device: torch.device) -> Lack:
        """Returns that of no rows."""
        products = torch.zeros(children, columns, dtype=torch.float64, device=device)
        return cls(products, torch.zeros_like(products))

    def add(self, rows: Tensor, missing: Tensor, received: Tensor, is_held: Tensor | None) -> None:
        """Adds rows.

        Args:
            rows: what is read, [rows, columns] float64.
            missing: what the children lack, [rows, children] float64.
            received: what those of the other model receive, like `missing`.
            is_held: which rows are held out; None if none are.
        """
        if is_held is None:
            _add_products(self.products, rows, missing)
        else:
            _add_products(self.products, rows[~is_held], missing[~is_held])
            _add_products(self.held, rows[is_held], missing[is_held])
        self.squares += float(missing.square().sum())
        self.received += float(received.double().square().sum())


def _add_products(sums: Tensor, rows: Tensor, missing: Tensor) -> None:
    sums[:, :-1] += missing.t() @ rows
    sums[:, -1] += missing.sum(0)


@dataclass(frozen=True, eq=False)
class Case:
    """The cells of the children of one reader that lose something, the bias last.

    Attributes:
        name: the reader, for messages.
        recorder: what it receives.
        children: the rows of the children, int64.
        weights: [children, columns + 1] float64.
        leaving: bool, like the weights, and so are the others.
        absent: cells that do not exist.
        frozen: cells that keep their value.
        folded: what orphans leave to the biases when the edit commits, [children] float64.
        is_repeated: whether the reader is called several times in a pass.
        lack: what children lack already; None if nothing is known.
    """

    name: str
    recorder: GramRecorder
    children: Tensor
    weights: Tensor
    leaving: Tensor
    absent: Tensor
    frozen: Tensor
    folded: Tensor
    is_repeated: bool
    lack: Lack | None = None

    @classmethod
    def of(
        cls,
        name: str,
        recorder: GramRecorder,
        matrix: Matrix,
        leaving: Tensor,
        children: Tensor,
        folded: Tensor | None = None,
        is_repeated: bool = False,
    ) -> Case:
        """Returns the case of some children of a matrix, given the cells of all that leave."""
        rows = children.to(matrix.weights.device)
        if folded is None:
            folded = torch.zeros_like(matrix.weights[:, -1])
        return cls(
            name,
            recorder,
            children,
            matrix.weights[rows].to(leaving.device),
            leaving[children],
            matrix.absent[rows].to(leaving.device),
            matrix.frozen[rows].to(leaving.device),
            folded[rows].to(leaving.device).double(),
            is_repeated,
        )

    @property
    def free(self) -> Tensor:
        """The cells that can get other values."""
        return ~(self.leaving | self.absent | self.frozen)

    def solve(self, damping: float | None) -> tuple[Tensor, Repaired]:
        """Returns the weights that keep what the children received, and how well they do."""
        seen = self.recorder
        total = seen.total
        if len(total) != self.weights.shape[1]:
            raise GrapNetError(
                f"the Gram matrix for {self.name} has {len(total) - 1} columns, and"
                f" {self.weights.shape[1] - 1} are read"
            )
        device = total.device
        weights = self.weights.to(device)
        leaving = self.leaving.to(device)
        absent = self.absent.to(device)
        frozen = self.frozen.to(device)
        lack = self.lack
        missing = None
        if lack is not None:
            missing = lack.products + lack.held
        cells = {"absent": absent, "frozen": frozen}
        if damping is None:
            dampings = self._dampings(weights, leaving, cells)
        else:
            dampings = [damping]
        found, damping = self._repaired(weights, leaving, dampings, missing, cells)
        if lack is not None:
            return found, self._fitted(found - weights, total, lack, damping)
        some = torch.arange(0, len(weights), max(1, len(weights) // MEASURED), device=device)
        before = weights[some]
        whole = max(error_of(before, total), torch.finfo(torch.float64).tiny)
        # What leaves, without the constants that the commit gives the biases for it.
        going = torch.where(leaving[some], before, 0)
        going[:, -1] -= self.folded.to(device)[some]
        lost = error_of(going, total) / whole
        left = error_of(found[some] - before, total) / whole
        if self.is_repeated:
            left = math.nan
        return found, Repaired(self.name, len(weights), damping, lost, left)

    def _repaired(
        self,
        weights: Tensor,
        leaving: Tensor,
        dampings: Sequence[float],
        missing: Tensor | None,
        cells: dict[str, Any],
    ) -> tuple[Tensor, float]:
        """Returns the weights for the first damping that is large enough, and this one."""
        total = self.recorder.total
        problem = GrapNetError("there is no damping")
        for damping in dampings:
            try:
                found = repaired(weights, total, leaving, damping, missing=missing, **cells)
                return found, damping
            except GrapNetError as error:
                problem = error
        problem.add_note(f"raised for {self.name}")
        raise problem

    def _dampings(self, weights: Tensor, leaving: Tensor, cells: dict[str, Any]) -> list[float]:
        """Returns the damping that rows held out choose, and larger ones: some children choose for
        all of them, and for another one it can be too small.
        """
        least = DAMPING
        seen = self.recorder
        held = seen.held_out_gram
        if held is not None and float(held[-1, -1]) > 0:
            missing = None
            if self.lack is not None:
                missing = (self.lack.products, self.lack.held)
            least = choose_damping(weights, seen.gram, held, leaving, missing=missing, **cells)
        return [damping for damping in DAMPINGS if damping >= least]

    def _fitted(self, change: Tensor, total: Tensor, lack: Lack, damping: float) -> Repaired:
        """Returns how much of what children lacked a change of their weights brings."""
        products = lack.products + lack.held
        left = lack.squares - 2 * float((change * products).sum()) + error_of(change, total)
        whole = max(lack.received, torch.finfo(torch.float64).tiny)
        return Repaired(self.name, len(change), damping, lack.squares / whole, left / whole)


def repair(
    net: Graph,
    edit: Edit,
    evidence: GramRecorder | Iterable[GramRecorder] | Mapping[str, Any],
    *,
    damping: float | None = None,
) -> tuple[Repaired, ...]:
    """Gives the readers of what an open edit removes and cuts the weights that make up for it.

    Call it inside the edit, after all removals, cuts and `remove_orphans`. Readers then receive
    what they received, as closely as least squares over the recorded rows allow: weights of
    relations that stay, and biases, are assigned in the same edit. No relation is created, frozen
    coordinates keep their values, and children that lose nothing are not touched. Orphans leave as
    other nodes do; the constants that `fold_bias=True` gives biases for them are taken into
    account.

    Readers of an adopted model are Linears and convolutions, also those of gated blocks and of
    attention. Nodes under a norm or a softmax over them are refused, because those that stay change
    with those that leave; cuts of relations behind a norm are not.

    Args:
        net: the net, or the adopted model.
        edit: its open edit.
        evidence: recorders of every layer, or of every reader of a space, that loses nodes, orphans
            among them, or relations; other recorders are left out of account.
        damping: how strongly weights are held where they are, as a share of the mean square of the
            columns. By default the one of 1e-6, 1e-5, …, 0.1 with the smallest error on the
            rows that were held out, or 1e-4 if none were, and a larger one where that is too small
            for a child; all rows are solved for then.

    Returns:
        What was done, one entry for each reader.

    Raises:
        StaleError: a recorder is stale.
        EditError: nothing was recorded for a reader, or what leaves cannot be made up for.
        GrapNetError: a matrix is not positive definite.

    Nothing is written into the edit if it raises. What earlier layers lost reaches the layers
    behind them all the same; `refit` corrects that.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 16, 3])
        >>> recorder = GramRecorder(1)
        >>> recorder.arm(net)
        >>> _ = net(torch.randn(256, 4))
        >>> with net.edit() as edit:
        ...     edit.remove_nodes(net.layers[1][:8])
        ...     (done,) = repair(net, edit, recorder)
        >>> done.children, done.left < done.lost
        (3, True)
    """
    readers = writer_of(net, edit, _recorders(evidence))
    cases = readers.cases()
    for case in cases.values():
        reason = case.recorder.stale_reason
        if reason:
            raise StaleError(
                f"the Gram matrix for {case.name} is stale: {reason}. Run data through the net"
                " while the recorder is armed; nothing was repaired"
            )
    found = {}
    done = []
    for key, case in cases.items():
        weights, report = case.solve(damping)
        found[key] = weights.to(case.weights.device)
        done.append(report)
    readers.write(cases, found)
    if done:
        edit.remark(f"repairs {len(done)} readers", children=sum(one.children for one in done))
    return tuple(done)


def gram_recorders(
    net: Graph, layers: int | str | LiveNodes | Iterable[Any] | None = None, **settings: Any
) -> dict[str, GramRecorder]:
    """Returns the recorders that `repair` needs when nodes of some layers leave.

    Args:
        net: the net, or the adopted model.
        layers: numbers of hidden layers, all by default; of an adopted model spaces or their names,
            by default all whose removals can be made up for.
        settings: those of `GramRecorder`.

    Returns:
        By the name of the layer, or of the module that reads the space.

    Raises:
        EditError: removals from one of the spaces cannot be made up for.
    """
    names = as_names(layers)
    if not isinstance(net, Adopted):
        if names is None:
            names = tuple(range(1, len(net.layers) - 1))
        return {f"layer {name}": GramRecorder(name, **settings) for name in names}
    found = {}
    if names is None:
        spaces = [space for space in net.spaces if not space.pins and not why_not_repaired(space)]
    else:
        spaces = [net.space(str(name)) for name in names]
    net.prove(spaces)
    for space in spaces:
        problem = problem_of(net, space)
        if problem and names is None:
            continue
        if problem:
            raise EditError(problem)
        for name in space.readers:
            path = linear_of(net, name).path
            found[path] = GramRecorder(space.name, at=path, **settings)
    return found


def name_of(net: Graph, key: int | str) -> str:
    """Returns how reports call a transition of a net, or the weight of a module."""
    if isinstance(key, str):
        return key
    source, target = net.ends[key]
    return f"layer {source} → layer {target}"


def writer_of(net: Graph, edit: Edit, recorders: Sequence[GramRecorder] = ()) -> Any:
    """Returns what finds the readers that lose something in an open edit, and writes weights."""
    if isinstance(net, Adopted):
        assert isinstance(edit, SpaceEdit)
        return _Readers(net, edit, recorders)
    return _Transitions(net, edit, recorders)


def _recorders(evidence: Any) -> list[GramRecorder]:
    if isinstance(evidence, Mapping):
        evidence = evidence.values()
    if isinstance(evidence, GramRecorder):
        evidence = [evidence]
    return [one for one in evidence if isinstance(one, GramRecorder)]


@dataclass(frozen=True, eq=False)
class _Transitions:
    """The transitions of a net, as what reads layers."""

    net: Any
    edit: Edit
    recorders: Sequence[GramRecorder]

    def cases(self) -> dict[int, Case]:
        """Returns those that lose something, by number."""
        drafts = self.edit._drafts()
        found = {}
        for t, (_, target) in enumerate(self.net.ends):
            cuts = drafts.transitions[t].cuts.long()
            children = self._ends(t)[1][cuts]
            # Children that leave with the edit receive nothing.
            cuts = cuts[~drafts.layers[target].gone.to(cuts.device)[children]]
            if len(cuts):
                self.net.execution.require_sum("repair", [t])
                found[t] = self._case(t, cuts, drafts.constants(self.net, t))
        return found

    def _ends(self, t: int) -> tuple[Tensor, Tensor]:
        """Returns the rows of the parent and of the child of every relation, int64."""
        topology = self.net.transitions[t].topology
        return topology.parents().long(), topology.child.long()

    def _case(self, t: int, cuts: Tensor, folded: Tensor) -> Case:
        """Returns the children of a transition that lose relations.

        Args:
            t: the transition.
            cuts: the positions of the relations.
            folded: what orphans leave to the biases, [nodes of the layer of the children].
        """
        source = self.net.ends[t][0]
        name = name_of(self.net, t)
        recorder = next((one for one in self.recorders if one.layer == source), None)
        if recorder is None:
            raise EditError(
                f"nothing was recorded for {name}: pass a GramRecorder({source}) that has seen data"
            )
        parents, children = self._ends(t)
        matrix = matrix_of(self.net, t)
        leaving = torch.zeros_like(matrix.absent)
        leaving[children[cuts], parents[cuts]] = True
        return Case.of(name, recorder, matrix, leaving, children[cuts].unique(), folded)

    def _cells(self, t: int, touched: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the positions of the relations of some children, and the cells that they are in
        [children, parents].
        """
        parents, children = self._ends(t)
        places = torch.full((len(self.net.layers[self.net.ends[t][1]]),), -1).to(touched.device)
        places[touched] = torch.arange(len(touched), device=touched.device)
        own = (places[children] >= 0).nonzero().squeeze(1)
        return own, places[children[own]], parents[own]

    def write(self, cases: dict[int, Case], found: dict[int, Tensor]) -> None:
        """Assigns the weights and biases of transitions.

        What several transitions add to the bias of one child is added up. The commit adds what
        orphans leave to it.
        """
        added: dict[int, Tensor] = {}
        for t, case in cases.items():
            own, rows, columns = self._cells(t, case.children)
            free = case.free[rows, columns]
            relations = RelationSet(self.net, {t: own[free].int()})
            self.edit.assign(relations, found[t][rows, columns][free])
            target = self.net.ends[t][1]
            biases = self.net.layers[target].biases.detach().double()
            total = added.setdefault(target, torch.zeros_like(biases))
            gained = found[t][:, -1] - case.weights[:, -1] - case.folded
            total[case.children] += torch.where(case.free[:, -1], gained, 0)
        for target, change in added.items():
            layer = self.net.layers[target]
            chosen = (change != 0).nonzero().squeeze(1)
            values = (layer.biases.detach().double() + change)[chosen]
            self.edit.assign(layer[chosen.cpu()], values)


@dataclass(frozen=True, eq=False)
class _Readers:
    """The modules of an adopted model that read spaces."""

    net: Adopted
    edit: SpaceEdit
    recorders: Sequence[GramRecorder]

    def cases(self) -> dict[str, Case]:
        """Returns those that lose something, by the names of their weights."""
        gone: dict[int, np.ndarray] = {}
        names: dict[str, None] = {}
        removed = self.edit._with_orphans().removed_rows(self.net.layers)
        # What else changes with the readers is known once values were compared.
        self.net.prove(self.net.spaces[number] for number in removed)
        for number, rows in removed.items():
            space = self.net.spaces[number]
            problem = problem_of(self.net, space)
            if problem:
                raise EditError(problem)
            names.update(dict.fromkeys(space.readers))
            gone[space._atom] = np.zeros(len(space), dtype=bool)
            gone[space._atom][rows.numpy()] = True
        wishes = self.edit._all_wishes()
        for name, wish in wishes.items():
            if wish.cut:
                names[name] = None
        found = {}
        for name in names:
            cut = []
            if name in wishes:
                cut = wishes[name].cut
            case = self._case(name, gone, cut)
            if case is not None:
                found[name] = case
        return found

    def _case(self, name: str, gone: dict[int, np.ndarray], cut: list[Tensor]) -> Case | None:
        """Returns the children of a weight that lose something; None if there are none.

        Args:
            name: the weight.
            gone: the nodes that leave, bools by the atom of their space.
            cut: the rows of the weight that are cut, see `Pattern`.
        """
        net = self.net
        problem = why_not_linear(net, name)
        if problem:
            raise EditError(f"what {name} loses cannot be made up for: {problem}")
        linear = linear_of(net, name)
        recorder = None
        for one in self.recorders:
            if one.reader is not None and one.reader.name == name:
                recorder = one
        pattern = net._pattern_of(name)
        cuts = torch.zeros(len(pattern.kinds), dtype=torch.bool)
        for rows in cut:
            cuts[rows] = True
        leaving = spread_rows(net, linear, cuts)
        axes = net._typed.axes[name]
        sizes = net._atom_sizes()
        columns = torch.from_numpy(covered(axes[1 - linear.out_dim], gone, sizes))
        kernel = leaving.shape[1] // len(columns)
        leaving |= columns.repeat_interleave(kernel)
        matrix = matrix_of(net, name)
        leaving &= ~matrix.absent[:, :-1].cpu()
        left = torch.from_numpy(covered(axes[linear.out_dim], gone, sizes))
        touched = (leaving.any(1) & ~left).nonzero().squeeze(1)
        if len(touched) == 0:
            return None
        if recorder is None:
            space = next(one.name for one in net.spaces if name in one.readers)
            raise EditError(
                f"nothing was recorded for {name}: pass a GramRecorder({space!r},"
                f" at={linear.path!r}) that has seen data"
            )
        leaving = torch.cat([leaving, torch.zeros_like(leaving[:, :1])], 1)
        is_repeated = linear.path in net._typed.repeated
        return Case.of(name, recorder, matrix, leaving, touched, is_repeated=is_repeated)

    def write(self, cases: dict[str, Case], found: dict[str, Tensor]) -> None:
        """Assigns the weights and biases of modules."""
        grids = self.net._grids()
        for name, case in cases.items():
            linear = linear_of(self.net, name)
            whole = linear.canonical(grids[name].whole)
            table = whole.flatten(1).to("cpu", torch.float64, copy=True)
            table[case.children] = torch.where(
                case.free[:, :-1], found[name][:, :-1], table[case.children]
            )
            if bool(case.free[:, :-1].any()):
                values = linear.native(table.view(whole.shape)).to(whole)
                self.edit.assign(grids[name].parameter, values)
            if bool(case.free[:, -1].any()):
                bias = grids[bias_of(linear)]
                values = bias.whole.to("cpu", torch.float64, copy=True)
                values[case.children] = torch.where(
                    case.free[:, -1], found[name][:, -1], values[case.children]
                )
                self.edit.assign(bias.parameter, values.to(bias.whole))


def why_not_repaired(space: Space) -> str:
    """Returns why removals from a space cannot be made up for by its readers; empty if they can."""
    for mark in space._marks:
        if mark.startswith("normalised"):
            return "a norm is taken over its nodes, so that all of them change with those that stay"
    if space.verdict == "differs":
        return "the nodes that stay change with those that leave"
    if CONTRACTED in space._marks:
        return "activations read it, and not tensors alone"
    if not space.readers:
        return "no tensor reads it"
    return ""


def problem_of(net: Adopted, space: Space) -> str:
    """Returns the message for a space whose removals cannot be made up for; empty if they can."""
    problem = why_not_repaired(space)
    for name in space.readers:
        problem = problem or why_not_linear(net, name)
    if not problem:
        return ""
    return f"removals from {space.name} cannot be repaired: {problem}"
