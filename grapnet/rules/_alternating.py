"""Choices that use the whole Gram matrix: cells by alternating steps, columns by elimination.

Weights are [children, columns], the bias in the last column, as in `_least_squares`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._least_squares import Sweep, damping_of

# The penalty of the first round, and by what it grows while the choice changes or has settled.
FIRST_PENALTY = 0.1
FAST_GROWTH = 1.3
SLOW_GROWTH = 1.1
# The rounds between two looks at the choice, and the share of cells that may still change.
ROUNDS = 3
SETTLED = 1e-3
# A column that varies less than this share of its mean square is constant: products of float32
# rows are not more accurate.
CONSTANT = 1e-5


def alternate(
    weights: Tensor,
    gram: Tensor,
    *,
    count: int | Tensor | None = None,
    pattern: tuple[int, int] | None = None,
    absent: Tensor | None = None,
    frozen: Tensor | None = None,
    bias: bool = True,
    damping: float = 0.01,
    rounds: int = 100,
) -> Sweep:
    """Chooses cells to leave by alternating between least squares and the largest cells.

    One copy of the weights minimises the squared error of what the children receive, another has
    only the cells that stay. A growing penalty pulls the two together (the alternating direction
    method of multipliers, as in ALPS, Meng et al. 2024). Unlike a sweep, a cell that left in one
    round can return in a later one. The weights that are returned solve the least squares problem
    over the cells that stay.

    Args:
        weights: [children, columns].
        gram: the Gram matrix, in the dtype to compute in.
        count: how many cells leave, or how many of each child, int64 [children]; or
        pattern: (n, m): keep n of m consecutive columns. Absent cells count as left.
        absent: cells that do not exist, bool [children, columns].
        frozen: cells whose value stays as it is, bool [children, columns]; they are never chosen.
        bias: the last column is the bias: it is never chosen, and not damped.
        damping: added to the diagonal, as a share of its mean; it holds weights where they are.
        rounds: the number of rounds.

    Raises:
        ValueError: the settings do not go together, or more cells are to leave than there are.
    """
    if (count is None) == (pattern is None):
        raise ValueError("give one of count= and pattern=")
    if gram.shape != (weights.shape[1], weights.shape[1]):
        raise ValueError(
            f"weights of shape {list(weights.shape)} need a Gram matrix of {weights.shape[1]}"
            f" columns, got {list(gram.shape)}"
        )
    nothing = torch.zeros(weights.shape, dtype=torch.bool, device=gram.device)
    absent = nothing if absent is None else absent.to(gram.device)
    frozen = nothing if frozen is None else frozen.to(gram.device) & ~absent
    start = weights.to(gram).masked_fill(absent, 0)
    width = len(gram) - bias
    choice = _Choice(absent[:, :width], frozen[:, :width], count, pattern)
    moments = gram[:width, :width]
    if bias and not bool((absent | frozen)[:, width].any()):
        moments = _deviations(gram)
    kept = ~absent
    kept[:, :width] = _settled_choice(start[:, :width], moments, choice, damping, rounds)
    return Sweep(kept, solved(start, gram, kept, frozen, bias=bias, damping=damping))


def _deviations(gram: Tensor) -> Tensor:
    """Returns the moments of the deviations from the means, [columns, columns] without the bias.

    A free bias makes up for the means, so that only deviations count. Those of a constant column
    are rounding, which would be taken for signals once columns are scaled.
    """
    moments = gram[:-1, :-1]
    means = gram[:-1, -1]
    found = moments - torch.outer(means, means) / gram[-1, -1]
    is_constant = found.diagonal() <= CONSTANT * moments.diagonal()
    return found.masked_fill(is_constant, 0).masked_fill(is_constant[:, None], 0)


class _Choice:
    """Which cells stay, given one size for each, [children, columns]."""

    def __init__(
        self,
        absent: Tensor,
        frozen: Tensor,
        count: int | Tensor | None,
        pattern: tuple[int, int] | None,
    ) -> None:
        self.absent = absent
        self.frozen = frozen
        self.pattern = pattern
        candidates = ~(absent | frozen)
        self.by_child = isinstance(count, Tensor)
        if pattern is not None:
            if absent.shape[1] % pattern[1]:
                raise ValueError(f"groups of {pattern[1]} do not divide {absent.shape[1]} columns")
            return
        room = candidates.sum(1)
        if not self.by_child:
            room = room.sum()
        stay = room - torch.as_tensor(count, device=room.device)
        if bool((stay < 0).any()) or bool((stay > room).any()):
            raise ValueError(f"of {room.tolist()} cells {(room - stay).tolist()} cannot leave")
        # Frozen cells rank first.
        held = frozen.sum(1) if self.by_child else frozen.sum()
        self.stay = stay + held

    def __call__(self, sizes: Tensor) -> Tensor:
        """Returns the cells that stay: all frozen ones, and the largest."""
        sizes = sizes.masked_fill(self.absent, -1).masked_fill(self.frozen, torch.inf)
        found = torch.zeros_like(self.absent)
        if self.pattern is not None:
            kept, of = self.pattern
            groups = sizes.unflatten(1, (-1, of))
            largest = groups.topk(kept, dim=2).indices
            found = found.unflatten(1, (-1, of)).scatter_(2, largest, True).flatten(1)
            return (found | self.frozen) & ~self.absent
        if self.by_child:
            ranks = sizes.argsort(dim=1, descending=True).argsort(dim=1)
            return ranks < self.stay[:, None]
        largest = sizes.flatten().topk(int(self.stay)).indices
        found.view(-1)[largest] = True
        return found


def _settled_choice(
    start: Tensor, moments: Tensor, choice: _Choice, damping: float, rounds: int
) -> Tensor:
    """Returns the cells that stay after so many rounds, [children, columns] bool."""
    # In units of the columns' own size, so that one penalty fits all. A column without any counts
    # for nothing.
    size = moments.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(size > 0, 1 / size, 0)
    system = moments * inverse * inverse[:, None]
    system.diagonal().add_(damping)
    values, vectors = torch.linalg.eigh(system)
    # Rounding may leave eigenvalues below those of the damping.
    values = values.clamp(min=damping)
    target = start * size
    pull = target @ system
    present = target.clone()
    dual = torch.zeros_like(target)
    penalty = FIRST_PENALTY
    kept = choice(present.abs())
    for number in range(rounds):
        solved = ((pull + penalty * present - dual) @ vectors / (values + penalty)) @ vectors.t()
        wanted = solved + dual / penalty
        before = kept
        kept = choice(wanted.abs())
        present = torch.where(choice.frozen, target, wanted.masked_fill(~kept, 0))
        dual += penalty * (solved - present)
        if number % ROUNDS == ROUNDS - 1:
            changed = float((kept != before).double().mean())
            penalty *= FAST_GROWTH if changed > SETTLED else SLOW_GROWTH
    return kept


def solved(
    start: Tensor, gram: Tensor, kept: Tensor, frozen: Tensor, *, bias: bool, damping: float
) -> Tensor:
    """Returns the least squares weights of every child over the cells that it keeps.

    All children are solved together by conjugate gradients, preconditioned by the diagonal: one
    product with the Gram matrix a step, where factorising would take one matrix a child.

    Args:
        start: the weights whose products with the rows are to be kept, [children, columns].
        gram: the Gram matrix, in the dtype to compute in.
        kept: the cells that stay, bool [children, columns].
        frozen: those of them that keep their values.
        bias: the last column is the bias, which is not damped.
        damping: added to the diagonal, as a share of its mean; it holds weights where they are.
    """
    penalty = damping_of(gram, damping, bias)
    free = kept & ~frozen & (gram.diagonal() > 0)
    found = start.masked_fill(~kept, 0)
    # What the children miss, seen by the cells that can make up for it.
    residual = ((start - found) @ gram).masked_fill(~free, 0)
    limit = residual.square().sum(1) * torch.finfo(gram.dtype).eps
    inverse = 1 / (gram.diagonal() + penalty).clamp(min=torch.finfo(gram.dtype).tiny)
    scaled = residual * inverse
    direction = scaled.clone()
    energy = (residual * scaled).sum(1, keepdim=True)
    for _ in range(len(gram)):
        if bool((residual.square().sum(1) <= limit).all()):
            break
        image = (direction @ gram + direction * penalty).masked_fill(~free, 0)
        curvature = (direction * image).sum(1, keepdim=True)
        step = torch.where(curvature > 0, energy / curvature, 0)
        found += step * direction
        residual -= step * image
        scaled = residual * inverse
        following = (residual * scaled).sum(1, keepdim=True)
        direction = scaled + direction * torch.where(energy > 0, following / energy, 0)
        energy = following
    return found


class Reader(NamedTuple):
    """One matrix that reads the nodes of a layer.

    Attributes:
        weights: [children, columns], the bias in the last column.
        gram: the Gram matrix of what it reads.
        columns: the columns of every node, int64 [nodes, k].
    """

    weights: Tensor
    gram: Tensor
    columns: Tensor


def elimination_costs(
    readers: Sequence[Reader], may_leave: Tensor, *, damping: float = 1e-4
) -> Tensor:
    """Returns what nodes cost that leave one after the other, each time the cheapest.

    It is the optimal brain surgeon for whole nodes: a node costs the squared error that it adds to
    what the children of all readers receive, after the columns that stay have compensated for it.
    Weights and inverses are updated before the next node leaves. That takes as many steps as nodes
    may leave, with all columns of the readers in each.

    Args:
        readers: what reads the nodes.
        may_leave: bool [nodes].
        damping: added to the diagonal, as a share of its mean without the bias.

    Returns:
        The cost of every node as a running maximum in the order in which they leave, so that the
        smallest are those that leave together; infinite for a node that stays. [nodes] float64.
    """
    left = [_Left(reader, damping) for reader in readers]
    found = torch.full(may_leave.shape, torch.inf, dtype=torch.float64)
    waiting = may_leave.cpu().clone()
    highest = 0.0
    for _ in range(int(waiting.sum())):
        cost = torch.stack([part.costs() for part in left]).sum(0).cpu()
        node = int(cost.masked_fill(~waiting, torch.inf).argmin())
        # Larger than all before, so that the order is that of leaving.
        highest = max(math.nextafter(highest, math.inf), float(cost[node]))
        found[node] = highest
        waiting[node] = False
        for part in left:
            part.eliminate(node)
    return found


class _Left:
    """What is left of a reader while nodes leave."""

    def __init__(self, reader: Reader, damping: float) -> None:
        gram = reader.gram.double()
        system = gram.clone()
        diagonal = system.diagonal()
        mean = diagonal[:-1].mean()
        diagonal[:-1] += damping * torch.where(mean > 0, mean, 1.0)
        self.inverse = torch.linalg.inv(system)
        self.weights = reader.weights.to(gram).clone()
        self.columns = reader.columns.to(gram.device)
        # the nodes that the rows of `columns` are about; some of them have left
        self.count = len(self.columns)
        self.nodes = torch.arange(self.count, device=gram.device)
        self.is_gone = torch.zeros(self.count, dtype=torch.bool, device=gram.device)

    def costs(self) -> Tensor:
        """Returns what each node costs if it leaves next, [nodes]; 0 for one that has left."""
        weights = self.weights[:, self.columns]  # [children, nodes, k]
        if self.columns.shape[1] == 1:
            depth = self.inverse.diagonal()[self.columns[:, 0]]
            found = weights[:, :, 0].square().sum(0) / depth
        else:
            blocks = self.inverse[self.columns[:, :, None], self.columns[:, None, :]]
            products = torch.einsum("cnk,cnl->nkl", weights, weights)
            found = torch.linalg.solve(blocks, products).diagonal(dim1=1, dim2=2).sum(1)
        found = found.masked_fill(self.is_gone, 0)
        return found.new_zeros(self.count).index_copy(0, self.nodes, found)

    def eliminate(self, node: int) -> None:
        """Lets the columns of a node leave, and those that stay compensate."""
        place = int((self.nodes == node).nonzero())
        at = self.columns[place]
        rows = self.inverse[at]  # [k, columns]
        solved = torch.linalg.solve(rows[:, at], rows)
        self.weights -= self.weights[:, at] @ solved
        self.inverse -= rows.t() @ solved
        # Rounding aside, they are 0; the blocks of nodes that have left must stay invertible.
        self.weights[:, at] = 0
        self.inverse[at] = 0
        self.inverse[:, at] = 0
        self.inverse[at, at] = 1
        self.is_gone[place] = True
        if 4 * int(self.is_gone.sum()) > len(self.nodes) > 64:
            self._forget()

    def _forget(self) -> None:
        """Leaves out the columns of nodes that have left, which later steps need not update."""
        stays = torch.ones(len(self.inverse), dtype=torch.bool, device=self.inverse.device)
        stays[self.columns[self.is_gone].reshape(-1)] = False
        places = stays.cumsum(0) - 1
        self.columns = places[self.columns[~self.is_gone]]
        self.nodes = self.nodes[~self.is_gone]
        self.is_gone = self.is_gone[~self.is_gone]
        self.inverse = self.inverse[stays][:, stays]
        self.weights = self.weights[:, stays]
