"""OuterProducts: sums of hᵀ·dz over backward passes, one number for every pair of nodes, computed
when asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grapnet.core._index_map import IndexMap

# of the rectangle that are computed at a time: fewer rows make the matrix product slower
CELLS = 2**22
GATHER = 256  # a gradient alone costs as much as this many in a matrix product


@dataclass(eq=False)
class OuterProducts:
    """Sums over backward passes of hᵀ·dz, as the factors or, where that is smaller, as the
    product.
    """

    shape: tuple[int, int]  # n_upper, n_lower
    count: int = 0
    task: int = -1  # which backward pass was the last
    # h [batch, n_upper], dz [batch, n_lower]
    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    matrix: Tensor | None = None  # [n_upper, n_lower], of factors that are not kept

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "task": -1}  # another process numbers its passes anew

    def see(self, said: Tensor, received: Tensor, task: int) -> None:
        """Adds the two factors of a backward pass; several of the same pass count once."""
        self.factors.append((said, received))
        self.count += task != self.task
        self.task = task
        if sum(len(h) for h, _ in self.factors) * sum(self.shape) > self.shape[0] * self.shape[1]:
            said, received = self.joined()
            matrix = said.new_zeros(self.shape) if self.matrix is None else self.matrix.to(said)
            self.matrix, self.factors = matrix.addmm_(said.t(), received), []

    def joined(self) -> tuple[Tensor, Tensor]:
        """Returns the factors of all passes, one after the other."""
        if len(self.factors) > 1:
            said, received = (torch.cat(parts) for parts in zip(*self.factors, strict=True))
            self.factors = [(said, received)]
        return self.factors[0]

    def parents(self, rows: Tensor | slice) -> Tensor:
        """Returns the gradients of all relations from some upper nodes, [rows, n_lower]."""
        known = None if self.matrix is None else self.matrix[rows]
        if self.factors:
            said, received = self.joined()
            product = said[:, rows].t() @ received
            return (product if known is None else product.add_(known)).div_(self.count)
        assert known is not None, "nothing was seen"
        return known / self.count

    def children(self, rows: slice) -> Tensor:
        """Returns the gradients of all relations to some lower nodes, [rows, n_upper]."""
        known = None if self.matrix is None else self.matrix[:, rows].t()
        if self.factors:
            said, received = self.joined()
            product = received[:, rows].t() @ said
            return (product if known is None else product.add_(known)).div_(self.count)
        assert known is not None, "nothing was seen"
        return known.contiguous().div(self.count)

    def at(self, parents: Tensor, children: Tensor) -> Tensor:
        """Returns the gradients of pairs of rows."""
        if not self.factors and self.matrix is not None:
            return self.matrix[parents, children] / self.count
        owners, place = parents.unique(return_inverse=True)
        found = self.factors[0][0].new_empty(len(parents))
        if len(owners) * self.shape[1] > GATHER * len(parents):
            self._gather(parents, children, found)
            return found
        place, order = place.sort()
        step = max(1, CELLS // max(1, self.shape[1]))
        for start in range(0, len(owners), step):
            first, last = torch.searchsorted(
                place, torch.tensor([start, start + step], device=place.device)
            ).tolist()
            cells, chosen = self.parents(owners[start : start + step]), order[first:last]
            found[chosen] = cells[place[first:last] - start, children[chosen]]
        return found

    def _gather(self, parents: Tensor, children: Tensor, found: Tensor) -> None:
        """Computes the gradients of pairs one by one."""
        said, received = (factor.t().contiguous() for factor in self.joined())  # [n, batch]
        step = max(1, CELLS // 16 // max(1, said.shape[1]))
        for start in range(0, len(parents), step):
            p, c = parents[start : start + step], children[start : start + step]
            part = torch.linalg.vecdot(said.index_select(0, p), received.index_select(0, c))
            found[start : start + step] = (
                part if self.matrix is None else part + self.matrix[p, c]
            ) / self.count

    def to(self, device: torch.device) -> "OuterProducts":
        """Returns them on a device."""
        tensors = [*(h for h, _ in self.factors), self.matrix]
        if all(tensor is None or tensor.device == device for tensor in tensors):
            return self
        factors = [(h.to(device), dz.to(device)) for h, dz in self.factors]
        matrix = None if self.matrix is None else self.matrix.to(device)
        return OuterProducts(self.shape, self.count, self.task, factors, matrix)

    def is_finite(self) -> bool:
        """Says whether every number is one."""
        tensors = [factor for pair in self.factors for factor in pair]
        tensors += [] if self.matrix is None else [self.matrix]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def carried(self, *indexes: IndexMap | None) -> "OuterProducts":
        """Returns them after rows moved; newborn nodes have gradients of 0."""
        upper, lower = indexes
        factors = [(_moved(h, upper), _moved(dz, lower)) for h, dz in self.factors]
        matrix = self.matrix if upper is None or self.matrix is None else upper.carry(self.matrix)
        matrix = None if matrix is None else _moved(matrix, lower)
        sizes = [
            size if i is None else i.new_size for size, i in zip(self.shape, indexes, strict=True)
        ]
        return OuterProducts((sizes[0], sizes[1]), self.count, self.task, factors, matrix)

    def copied(self) -> "OuterProducts":
        """Returns an independent copy; factors are never written into."""
        matrix = None if self.matrix is None else self.matrix.clone()
        return OuterProducts(self.shape, self.count, self.task, list(self.factors), matrix)

    def state_dict(self) -> dict[str, Any]:
        """Returns them as numbers and tensors."""
        said, received = self.joined() if self.factors else (None, None)
        return {"count": self.count, "said": said, "received": received, "matrix": self.matrix}


def has_finite_product(said: Tensor, received: Tensor) -> bool:
    """Says whether every number of hᵀ·dz is finite; the product is computed only where a sum could
    overflow.
    """
    if not said.numel() or not received.numel():
        return True
    h, dz = said.abs().amax(), received.abs().amax()
    *factors, bound = torch.stack([h, dz, h * dz * len(said)]).isfinite().tolist()
    if bound or not all(factors):
        return bound
    step = max(1, CELLS // received.shape[1])
    return all(bool((rows.t() @ received).isfinite().all()) for rows in said.split(step, dim=1))


def _moved(factor: Tensor, index: IndexMap | None) -> Tensor:
    """Returns a matrix after its columns moved."""
    return factor if index is None else index.carry(factor.t()).t().contiguous()
