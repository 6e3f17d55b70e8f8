"""Least squares over Gram matrices: the weights that keep what children received.

All functions take plain tensors. Weights are [children, columns], the bias in the last column, and
a Gram matrix is Σ [h, 1] [h, 1]ᵀ over rows h of what the children read, [columns, columns]. A child
without a bias has an absent cell there.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grapnet.core._errors import GrapNetError

# The shares of the mean diagonal that `choose_damping` compares.
DAMPINGS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
# Children whose right-hand sides are computed together.
_CHILDREN = 1024
# Children that `choose_damping` looks at.
_CHOOSING = 128


def repaired(
    weights: Tensor,
    gram: Tensor,
    leaving: Tensor,
    damping: float,
    *,
    absent: Tensor | None = None,
    frozen: Tensor | None = None,
    bias: bool = True,
    missing: Tensor | None = None,
) -> Tensor:
    """Returns the weights that keep what children receive, in least squares, when cells leave.

    Every child is solved over the cells that it has: with S those that stay and R those that leave,
    W' = W_S + W_R·G[R, S]·(G[S, S] + λI)⁻¹. Absent cells stay 0, frozen ones keep their value, and
    a child that loses nothing keeps its weights exactly. Children with the same cells share one
    factorisation; where all differ, there is one a child.

    With `missing`, children receive in addition what they lack already: W' grows by
    M[:, S]·(G[S, S] + λI)⁻¹.

    Args:
        weights: [children, columns].
        gram: the Gram matrix.
        leaving: the cells that leave, bool [columns] for all children or [children, columns].
        damping: λ as a share of the mean diagonal of the Gram matrix without the bias. It holds
            weights where they are; the bias is not damped.
        absent: cells that do not exist, bool [children, columns].
        frozen: cells whose value stays as it is, bool [children, columns].
        bias: the last column is the bias.
        missing: Σ e [h, 1]ᵀ over the rows, of what the children lack in each, [children, columns].

    Returns:
        [children, columns] in float64, 0 where cells leave or are absent.

    Raises:
        GrapNetError: the damped matrix is not positive definite.
    """
    weights, gram, leaving = _checked(weights, gram.double(), leaving)
    gone = leaving
    if absent is not None:
        weights = weights.masked_fill(absent, 0)
        gone = leaving | absent
    free = ~gone
    if frozen is not None:
        free &= ~frozen
    # What was 0 in all rows has no influence on them.
    free &= gram.diagonal() > 0
    if missing is None:
        free &= (leaving & (weights != 0)).any(1, keepdim=True)
    found = weights.masked_fill(gone, 0)
    penalty = damping_of(gram, damping, bias)
    for children, columns in _alike(free):
        system = gram[columns][:, columns]
        system.diagonal().add_(penalty[columns])
        root = _root(system)
        for part in children.split(_CHILDREN):
            lost = leaving[part].any(0).nonzero().squeeze(1)
            going = torch.where(leaving[part][:, lost], weights[part][:, lost], 0)
            right = going @ gram[lost][:, columns]  # [children, columns]
            if missing is not None:
                right += missing[part][:, columns]
            change = torch.cholesky_solve(right.t(), root)
            found[part[:, None], columns] += change.t()
    return found


def error_of(change: Tensor, gram: Tensor) -> float:
    """Returns the sum over rows and children of the squares that a change of weights makes."""
    change = change.to(gram)
    return float(((change @ gram) * change).sum())


def choose_damping(
    weights: Tensor,
    gram: Tensor,
    held_out: Tensor,
    leaving: Tensor,
    *,
    absent: Tensor | None = None,
    frozen: Tensor | None = None,
    missing: tuple[Tensor, Tensor] | None = None,
    grid: Sequence[float] = DAMPINGS,
) -> float:
    """Returns the damping of a grid whose repaired weights have the smallest error on other rows.

    A damping whose matrix is not positive definite is left out. Of many children, some are looked
    at.

    Args:
        weights: as in `repaired`, and so are `gram`, `leaving`, `absent` and `frozen`.
        held_out: the Gram matrix of the rows that are left out of `gram`.
        missing: what the children lack, for the rows of `gram` and for the others.
        grid: the dampings to compare, in ascending order; of equal ones the largest is returned.

    Raises:
        GrapNetError: no damping of the grid makes the matrix positive definite.
    """
    loses = leaving.expand(weights.shape).any(1)
    if missing is not None:
        loses |= True
    loses = loses.nonzero().squeeze(1)
    some = torch.arange(min(_CHOOSING, len(loses)), device=loses.device)
    some = loses[some * len(loses) // max(1, len(some))]
    before = weights[some].to(gram)
    leaving = leaving.expand(weights.shape)[some]
    if absent is not None:
        absent = absent[some]
        before = before.masked_fill(absent, 0)
    if frozen is not None:
        frozen = frozen[some]
    lacking = None
    if missing is not None:
        lacking = missing[0][some]
    best = None
    least = float("inf")
    problem = None
    for damping in grid:
        try:
            after = repaired(
                before, gram, leaving, damping, absent=absent, frozen=frozen, missing=lacking
            )
        except GrapNetError as error:
            problem = error
            continue
        error = error_of(after - before, held_out)
        if missing is not None:
            # up to what is missing before
            error -= 2 * float(((after - before) * missing[1][some]).sum())
        if error <= least:
            best = damping
            least = error
    if best is None:
        raise problem or GrapNetError("the grid has no finite error on the held-out rows")
    return best


class Sweep(NamedTuple):
    """What `obs_sweep` returns.

    Attributes:
        kept: the cells that stay, bool [children, columns].
        weights: their values in the dtype of the Gram matrix, 0 elsewhere, [children, columns].
    """

    kept: Tensor
    weights: Tensor


def obs_sweep(
    weights: Tensor,
    gram: Tensor,
    *,
    count: int | Tensor | None = None,
    share: float | None = None,
    threshold: float | None = None,
    pattern: tuple[int, int] | None = None,
    leaving: Tensor | None = None,
    absent: Tensor | None = None,
    frozen: Tensor | None = None,
    bias: bool = True,
    block: int = 128,
    damping: float = 0.01,
    spread: Literal["matrix", "block"] = "matrix",
    published: bool = False,
) -> Sweep:
    """Chooses cells to leave, column by column, and lets the columns behind make up for each.

    This is the optimal brain surgeon with the order of columns fixed, as SparseGPT sweeps over the
    Cholesky factor of the inverse Gram matrix: the score of a cell is the squared error that it
    costs when it leaves and all columns behind it compensate. A block of columns chooses its cells
    before it is swept, from weights that have compensated all blocks before.

    Exactly one of `count`, `share`, `threshold`, `pattern` and `leaving` says which cells leave.
    `repaired(weights, gram, ~kept, …)` finds the best weights for the cells that were kept, which
    the sweep does not: it never returns to a column.

    Args:
        weights: [children, columns].
        gram: the Gram matrix, in the dtype to compute in; its scale does not matter.
        count: how many cells leave, or how many of each child, int64 [children]; absent ones are
            not counted.
        share: the same as a share of the cells that can leave, rounded down.
        threshold: let cells leave that cost at most this.
        pattern: (n, m): keep n of m consecutive columns. Absent cells count as left.
        leaving: let these cells leave, bool [columns] or [children, columns].
        absent: cells that do not exist, bool [children, columns].
        frozen: cells whose value stays as it is, bool [children, columns]; they are never chosen.
        bias: the last column is the bias: it is never chosen, and not damped.
        block: the number of columns in a block, a multiple of the m of a pattern.
        damping: added to the diagonal, as a share of its mean.
        spread: how many of a count or share leave in a block: "block" for the same share of every
            block, "matrix" for as many as have the smallest scores of the whole matrix before the
            sweep.
        published: treat ties, the cell at the threshold, and columns that are 0 in all rows as the
            published implementation does: one cell more leaves in every block, cells equal to it
            leave too, and those columns become 0. Its other settings are a float32 Gram matrix
            without bias, `spread="block"`, and the defaults of `block` and `damping`.

    Raises:
        GrapNetError: the damped matrix is not positive definite.
        ValueError: the settings do not go together.
    """
    choices = (count, share, threshold, pattern, leaving)
    if sum(choice is not None for choice in choices) != 1:
        raise ValueError("give one of count=, share=, threshold=, pattern= and leaving=")
    width = gram.shape[0] - bias
    if pattern is not None and (width % pattern[1] or block % pattern[1]):
        raise ValueError(
            f"{pattern[0]} of {pattern[1]} columns divide neither {width} columns nor blocks of"
            f" {block}"
        )
    cells = _Cells.of(weights, gram, leaving, absent, frozen, width)
    # [columns, children], so that a column is in one piece
    work = cells.start.clone()
    dead = gram.diagonal() == 0
    if published:
        work[dead] = 0
    factor = _inverse_factor(gram, dead, damping, width, published)
    depth = factor.diagonal()[:, None].square()
    if not published:
        # What was 0 in all rows costs nothing.
        depth = depth.masked_fill(dead[:, None], torch.inf)
    quotas = None
    if share is not None and spread == "block":
        # Each block is rounded by itself.
        quotas = [int(int(part.sum()) * share) for part in cells.open.split(block)]
        quotas = torch.tensor(quotas)
    elif share is not None:
        count = int(int(cells.open.sum()) * share)
    if count is not None:
        quotas = _quotas(count, cells.open, work.square() / depth, block, spread)
    kept = ~cells.absent
    for first in range(0, len(work), block):
        last = min(first + block, len(work))
        at = slice(first, last)
        out = cells.leaving[at].clone()
        scores = work[at].square() / depth[at]
        if quotas is not None:
            out = _smallest(scores, cells.open[at], quotas[first // block], published)
        elif threshold is not None:
            out = cells.open[at] & (scores <= threshold)
        errors = torch.zeros_like(scores)
        for column in range(first, last):
            row = column - first
            if pattern is not None and column < width and row % pattern[1] == 0:
                group = slice(column, column + pattern[1])
                scores = work[group].square() / depth[group]
                out[row : row + pattern[1]] = cells.beyond(pattern, group, scores)
            wanted = torch.where(cells.frozen[column], cells.start[column], work[column])
            wanted.masked_fill_(out[row] | cells.absent[column], 0)
            errors[row] = (work[column] - wanted) / factor[column, column]
            work[column] = wanted
            # [columns behind in the block, children]
            work[column + 1 : last].addr_(factor[column, column + 1 : last], errors[row], alpha=-1)
        work[last:].addmm_(factor[at, last:].t(), errors, alpha=-1)
        kept[at] &= ~out
    if published:
        kept[dead] = False
    return Sweep(kept.t().contiguous(), work.t().contiguous())


class _Cells(NamedTuple):
    """The cells of a sweep, all [columns, children]."""

    start: Tensor  # their weights before
    leaving: Tensor  # asked to leave
    absent: Tensor
    frozen: Tensor
    open: Tensor  # may be chosen

    @classmethod
    def of(
        cls,
        weights: Tensor,
        gram: Tensor,
        leaving: Tensor | None,
        absent: Tensor | None,
        frozen: Tensor | None,
        width: int,
    ) -> "_Cells":
        """Returns those of `obs_sweep`, of which the first `width` columns can be chosen."""
        nothing = torch.zeros(len(gram), dtype=torch.bool)
        weights, _, leaving = _checked(weights, gram, nothing if leaving is None else leaving)
        missing = torch.zeros_like(leaving)
        if absent is not None:
            missing |= absent.to(gram.device)
        held = torch.zeros_like(leaving)
        if frozen is not None:
            held |= frozen.to(gram.device)
        held &= ~missing
        candidates = ~(missing | held)
        candidates[:, width:] = False
        start = weights.masked_fill(missing, 0)
        parts = (start, leaving & ~missing, missing, held, candidates)
        return cls(*(part.t().contiguous() for part in parts))

    def beyond(self, pattern: tuple[int, int], group: slice, scores: Tensor) -> Tensor:
        """Returns the cells that leave a group of m columns, so that n of them stay."""
        kept, of = pattern
        scores = scores.masked_fill(self.absent[group], -torch.inf)
        scores = scores.masked_fill(self.frozen[group], torch.inf)
        lowest = scores.topk(of - kept, dim=0, largest=False).indices
        found = torch.zeros_like(self.open[group]).scatter_(0, lowest, True)
        return found & self.open[group]


def _quotas(
    count: int | Tensor, candidates: Tensor, scores: Tensor, block: int, spread: str
) -> Tensor:
    """Returns how many cells leave in every block, [blocks] or [blocks, children]."""
    by_child = isinstance(count, Tensor)
    total = torch.as_tensor(count, device=scores.device)
    parts = candidates.split(block)
    available = torch.stack([part.sum(0) for part in parts])  # [blocks, children]
    if not by_child:
        available = available.sum(1)
    room = available.sum(0)
    if bool((total > room).any()) or bool((total < 0).any()):
        raise ValueError(f"of {room.tolist()} cells {total.tolist()} cannot leave")
    if spread == "block":
        # Rounding the running sum down lets the parts add up to the whole.
        reached = available.cumsum(0) * total // room.clamp(min=1)
        return reached.diff(dim=0, prepend=torch.zeros_like(reached[:1]))
    chosen = _smallest(scores, candidates, total, published=False)
    found = torch.stack([part.sum(0) for part in chosen.split(block)])
    return found if by_child else found.sum(1)


def _smallest(scores: Tensor, candidates: Tensor, quota: Tensor, published: bool) -> Tensor:
    """Returns the candidates with the smallest scores: a number of all, or of each column."""
    scores = scores.masked_fill(~candidates, torch.inf)
    if quota.dim():
        ranks = scores.argsort(dim=0).argsort(dim=0)
        return (ranks < quota) & candidates
    number = int(quota)
    if published:
        limit = scores.flatten().sort().values[min(number, scores.numel() - 1)]
        return (scores <= limit) & candidates
    lowest = scores.flatten().topk(number, largest=False).indices
    found = torch.zeros_like(candidates)
    found.view(-1)[lowest] = True
    return found


def column_subset(
    gram: Tensor, norms: Tensor, count: int, *, held: Tensor | None = None, bias: bool = True
) -> Tensor:
    """Returns the columns that describe all others best, chosen one by one.

    Each is the one with the largest part that those before it do not explain, times its norm: a
    pivoted Cholesky factorisation of the weighted Gram matrix. Once nothing is left to explain,
    columns follow by their own size.

    Args:
        gram: the Gram matrix.
        norms: the norm of the outgoing weights of every column but the bias, [n].
        count: how many columns to choose.
        held: columns that stay in any case, bool [n]; they explain others, and are not chosen.
        bias: the last column is the bias, which stays in any case.

    Returns:
        The chosen columns in the order of their choice, int64 [count].
    """
    gram = gram.double()
    scale = norms.to(gram)
    if bias:
        scale = torch.cat([scale, scale.new_ones(1)])
    weighted = gram * scale * scale[:, None]
    size = weighted.diagonal().clone()
    first = torch.zeros(len(weighted), dtype=torch.bool, device=gram.device)
    if held is not None:
        first[: len(held)] = held.to(first.device)
    if bias:
        first[-1] = True
    forced = first.nonzero().squeeze(1).tolist()
    if count > len(weighted) - len(forced):
        raise ValueError(f"{count} of {len(weighted) - len(forced)} columns cannot be chosen")
    left = size.clone()
    # Smaller parts are rounding.
    floor = len(weighted) * torch.finfo(torch.float64).eps * size
    taken = first.clone()
    rows = weighted.new_empty(len(forced) + count, len(weighted))
    found = []
    for number in range(len(rows)):
        if number < len(forced):
            pivot = forced[number]
        else:
            unexplained = torch.where(left > floor, left, 0)
            pivot = int(unexplained.masked_fill(taken, -1).argmax())
            if float(unexplained[pivot]) == 0:
                rest = size.masked_fill(taken, -1).argsort(descending=True)
                found.extend(rest[: count - len(found)].tolist())
                break
            found.append(pivot)
            taken[pivot] = True
        row = rows[number]
        if float(left[pivot]) <= float(floor[pivot]):
            row.zero_()
            continue
        row.copy_(weighted[pivot]).sub_(rows[:number, pivot] @ rows[:number])
        row.div_(left[pivot].sqrt())
        left = (left - row.square()).clamp_(min=0)
    return torch.tensor(found, dtype=torch.int64, device=gram.device)


def _checked(weights: Tensor, gram: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights and the leaving cells of every child on the device of the Gram matrix.

    Weights get its dtype.
    """
    if gram.shape != (weights.shape[1], weights.shape[1]):
        raise ValueError(
            f"weights of shape {list(weights.shape)} need a Gram matrix of {weights.shape[1]}"
            f" columns, got {list(gram.shape)}"
        )
    return weights.to(gram), gram, leaving.to(gram.device).expand(weights.shape)


def damping_of(gram: Tensor, damping: float, bias: bool = True) -> Tensor:
    """Returns what damping adds to the diagonal: a share of its mean, and nothing to the bias."""
    found = torch.zeros_like(gram.diagonal())
    width = len(gram) - bias
    if width > 0:
        found[:width] = damping * gram.diagonal()[:width].mean()
    return found


def _alike(free: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields children with the same free columns, and these columns; none without any."""
    patterns, group = free.unique(dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        columns = pattern.nonzero().squeeze(1)
        if len(columns):
            yield (group == number).nonzero().squeeze(1), columns


def _root(system: Tensor) -> Tensor:
    """Returns the lower Cholesky factor of a matrix; raises GrapNetError if it has none."""
    root, failed = torch.linalg.cholesky_ex(system)
    # The squares are what the columns before do not explain; less than rounding is nothing.
    limit = len(system) * torch.finfo(torch.float64).eps * system.diagonal()
    if int(failed) or not bool((root.diagonal().square() > limit).all()):
        raise GrapNetError(
            f"the Gram matrix of {len(system)} columns is not positive definite: some of them are"
            " sums of others, or there are fewer rows than columns. Choose a larger damping=, or"
            " record more rows; nothing was changed"
        )
    return root


def _inverse_factor(
    gram: Tensor, dead: Tensor, damping: float, width: int, published: bool
) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped Gram matrix."""
    system = gram.clone()
    diagonal = system.diagonal()
    if published:
        diagonal[dead] = 1
    mean = diagonal[:width].mean()
    if not published:
        diagonal[dead] = torch.where(mean > 0, mean, 1)
    diagonal[:width] += damping * mean
    inverse = torch.cholesky_inverse(_root(system))
    factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed):
        raise GrapNetError(
            f"the inverse of the Gram matrix of {len(system)} columns is not positive definite in"
            f" {gram.dtype}; choose a larger damping=, nothing was changed"
        )
    return factor
