"""SymmetricSum: a sum of outer products that stores each number of the symmetric matrix once."""

from typing import Any

import torch
from torch import Tensor

from grapnet.core.errors import CheckpointError


class SymmetricSum:
    """Σ h hᵀ as n(n+1)/2 numbers in two rectangles (LAPACK's rectangular full packed format).

    The square falls into two blocks on the diagonal and one below it. The lower half of the first
    block and the upper half of the second fill one rectangle, so adding a batch is three matrix
    products and no index. The numbers rest in `dtype`; what is added and what is returned is
    float64.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.size = size
        self._cut = first = (size + 1) // 2
        self._below = torch.zeros(size - first, first, dtype=dtype, device=device)
        self._halves = torch.zeros(first + 1 - size % 2, first, dtype=dtype, device=device)

    @property
    def numbers(self) -> int:
        """How many numbers are stored."""
        return self._below.numel() + self._halves.numel()

    @property
    def last(self) -> float:
        """The last number on the diagonal."""
        return float((self._second if self.size > 1 else self._first)[-1, -1])

    @property
    def last_column(self) -> Tensor:
        """The last column of the matrix, [n]."""
        if self.size == 1:
            return self._halves[0].double()
        return torch.cat([self._below[-1], self._second[:, -1]]).double()

    def add(self, h: Tensor, sign: int = 1) -> None:
        """Adds, or takes away, the outer products of the rows of `h` [batch, n]."""
        first, second = h.split([self._cut, self.size - self._cut], dim=1)
        self._below.add_(second.t() @ first, alpha=sign)
        self._first.add_((first.t() @ first).tril_(), alpha=sign)
        self._second.add_((second.t() @ second).triu_(), alpha=sign)

    def add_sum(self, other: "SymmetricSum") -> None:
        """Adds another sum of the same size."""
        self._below.add_(other._below.to(self._below.device))
        self._halves.add_(other._halves.to(self._halves.device))

    def square(self) -> Tensor:
        """Returns the whole matrix, [n, n]."""
        first, second, cut = self._first.tril(), self._second.triu(), self._cut
        found = self._below.new_empty(self.size, self.size, dtype=torch.float64)
        found[:cut, :cut] = first + first.tril(-1).t()
        found[cut:, cut:] = second + second.triu(1).t()
        found[cut:, :cut], found[:cut, cut:] = self._below, self._below.t()
        return found

    def rearranged(self, source: Tensor) -> "SymmetricSum":
        """Returns the sum of other rows: `source` names the present row of each, -1 for one that is
        all zero.
        """
        known = (source >= 0).double()
        square = (
            self.square()[source.clamp(min=0)][:, source.clamp(min=0)]
            .mul_(known)
            .mul_(known[:, None])
        )
        found = SymmetricSum(len(source), square.device, self._below.dtype)
        cut = found._cut
        found._below.copy_(square[cut:, :cut])
        found._first.add_(square[:cut, :cut].tril())
        found._second.add_(square[cut:, cut:].triu())
        return found

    def copied(self) -> "SymmetricSum":
        """Returns an independent copy."""
        found = SymmetricSum(0, self._below.device)
        found.size, found._cut = self.size, self._cut
        found._below, found._halves = self._below.clone(), self._halves.clone()
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the two rectangles."""
        return {"below": self._below.clone(), "halves": self._halves.clone()}

    def load_state_dict(self, state: Any) -> None:
        """Takes over what `state_dict` returned; raises CheckpointError when it is of another size
        or not finite.
        """
        for name, mine in (("below", self._below), ("halves", self._halves)):
            found = state.get(name) if isinstance(state, dict) else None
            if (
                not isinstance(found, Tensor)
                or found.shape != mine.shape
                or found.dtype != mine.dtype
            ):
                raise CheckpointError(
                    f"{name} of a sum is not a {mine.dtype} tensor of shape {list(mine.shape)}"
                )
            if not bool(found.isfinite().all()):
                raise CheckpointError(f"{name} of a sum holds numbers that are not finite")
        self._below.copy_(state["below"])
        self._halves.copy_(state["halves"])

    @property
    def _first(self) -> Tensor:
        """The first block, of which the lower half counts."""
        return self._halves if self.size % 2 else self._halves[1:]

    @property
    def _second(self) -> Tensor:
        """The second block, of which the upper half counts."""
        return self._halves[:-1, 1:] if self.size % 2 else self._halves[:-1]
