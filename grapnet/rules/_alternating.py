"""Choices that use the whole Gram matrix: cells by alternating steps, columns by elimination.

Weights are [children, columns], the bias in the last column, as in `_least_squares`.
"""

import torch
from torch import Tensor

from ._least_squares import Sweep

# The penalty of the first round, and by what it grows while the choice changes or has settled.
FIRST_PENALTY = 0.1
FAST_GROWTH = 1.3
SLOW_GROWTH = 1.1
# The rounds between two looks at the choice, and the share of cells that may still change.
ROUNDS = 3
SETTLED = 1e-3


def alternate(
    weights: Tensor,
    gram: Tensor,
    *,
    count: int | Tensor | None = None,
    pattern: tuple[int, int] | None = None,
    absent: Tensor | None = None,
    frozen: Tensor | None = None,
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
        gram: the Gram matrix, the bias in the last row and column, in the dtype to compute in.
        count: how many cells leave, or how many of each child, int64 [children]; or
        pattern: (n, m): keep n of m consecutive columns. Absent cells count as left.
        absent: cells that do not exist, bool [children, columns].
        frozen: cells whose value stays as it is, bool [children, columns]; they are never chosen.
        damping: added to the diagonal, as a share of its mean; it holds weights where they are.
            The bias is not damped.
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
    width = len(gram) - 1
    choice = _Choice(absent[:, :width], frozen[:, :width], count, pattern)
    moments = gram[:width, :width]
    if not bool((absent | frozen)[:, width].any()):
        # A free bias makes up for the means, so that only deviations from them count.
        means = gram[:width, width]
        moments = moments - torch.outer(means, means) / gram[width, width]
    kept = ~absent
    kept[:, :width] = _settled_choice(start[:, :width], moments, choice, damping, rounds)
    return Sweep(kept, _solved(start, gram, kept, frozen, damping))


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
    # In units of the columns' own size, so that one penalty fits all.
    size = moments.diagonal()
    size = torch.where(size > 0, size, 1).sqrt()
    system = moments / size / size[:, None]
    system.diagonal().add_(damping)
    values, vectors = torch.linalg.eigh(system)
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


def _solved(start: Tensor, gram: Tensor, kept: Tensor, frozen: Tensor, damping: float) -> Tensor:
    """Returns the least squares weights of every child over the cells that it keeps.

    All children are solved together by conjugate gradients, preconditioned by the diagonal: one
    product with the Gram matrix a step, where factorising would take one matrix a child.
    """
    penalty = torch.zeros_like(gram.diagonal())
    penalty[:-1] = damping * gram.diagonal()[:-1].mean()
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


def eliminate(
    weights: Tensor,
    gram: Tensor,
    count: int,
    *,
    held: Tensor | None = None,
    damping: float = 1e-4,
) -> Tensor:
    """Returns the columns whose loss the others make up for best, chosen one by one.

    It is the optimal brain surgeon for whole columns: each time the column leaves that adds the
    least to the squared error of what the children receive, after the columns that stay have
    compensated for it; weights and inverse are updated before the next. That takes as many steps as
    columns leave, with one matrix of all columns each.

    Args:
        weights: [children, columns].
        gram: the Gram matrix.
        count: how many columns leave.
        held: columns that stay in any case, bool [n]; the bias always stays.
        damping: added to the diagonal, as a share of its mean without the bias.

    Returns:
        The columns that leave in the order of their choice, int64 [count].
    """
    gram = gram.double()
    width = len(gram) - 1
    stays = torch.zeros(width, dtype=torch.bool, device=gram.device)
    if held is not None:
        stays |= held.to(gram.device)
    if not 0 <= count <= width - int(stays.sum()):
        raise ValueError(f"of {width - int(stays.sum())} columns {count} cannot leave")
    system = gram.clone()
    diagonal = system.diagonal()
    mean = diagonal[:width].mean()
    diagonal[:width] += damping * torch.where(mean > 0, mean, 1)
    inverse = torch.linalg.inv(system)
    work = weights.double().clone()
    found = torch.empty(count, dtype=torch.int64, device=gram.device)
    for number in range(count):
        cost = work[:, :width].square().sum(0) / inverse.diagonal()[:width]
        column = cost.masked_fill(stays, torch.inf).argmin()
        row = inverse[column].clone()
        work.addr_(work[:, column] / row[column], row, alpha=-1)
        inverse.addr_(row, row / row[column], alpha=-1)
        # It has left: no later step reads more than this one entry.
        inverse[column, column] = 1
        stays[column] = True
        found[number] = column
    return found
