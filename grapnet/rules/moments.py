"""Moments: streaming sums from which means and variances come out exactly, whatever the scale."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from grapnet.core._index_map import IndexMap

from .watcher import checked


@dataclass(eq=False)
class Moments:
    """Sums over samples of how far every node is from its origin, a point close to its mean.

    The origin is the mean of the node's first batch, or its very value if that is constant: large
    means cancel nothing, and what never changes has sums of exactly 0.
    """

    counts: Tensor  # [n] int64, samples of each node
    fired: Tensor  # [n] int64, those with an activation above 0
    origin: Tensor  # [n] float64
    first: Tensor  # [n] float64, Σ (h - origin)
    second: Tensor  # [n] float64, Σ (h - origin)²
    settled: bool = field(default=False, kw_only=True)  # whether every node has its origin

    @classmethod
    def of(cls, said: Tensor) -> "Moments":
        """Returns those of no samples, for nodes that say things like `said`."""
        numbers = torch.zeros(2, said.shape[-1], dtype=torch.int64, device=said.device)
        sums = torch.zeros(3, said.shape[-1], dtype=torch.float64, device=said.device)
        return cls(*numbers.unbind(), *sums.unbind())

    @classmethod
    def restored(cls, state: dict[str, Any], size: int) -> "Moments":
        """Returns those of a state dict."""
        kinds = {"counts": torch.int64, "fired": torch.int64}
        names = [part.name for part in fields(cls) if not part.kw_only]
        return cls(*(checked(state.get(n), [size], kinds.get(n, torch.float64), n) for n in names))

    def see(self, said: Tensor) -> Tensor:
        """Adds a batch [batch, n], and returns how far each sample is from the origins."""
        exact = said.double()
        if not self.settled:
            constant = exact.amin(0) == exact.amax(0)
            origin = torch.where(constant, exact[0], exact.mean(0))
            self.origin = torch.where(self.counts == 0, origin, self.origin)
            self.settled = True
        apart = exact - self.origin
        self.counts += len(said)
        self.fired += (said > 0).sum(0)
        self.first += apart.sum(0)
        self.second += apart.square().sum(0)
        return apart

    @property
    def mean(self) -> Tensor:
        """The mean of every node, 0 without samples."""
        return self.origin + self.first / self.counts.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The variance of every node over its samples (divided by their number), exactly 0 if it is
        constant.
        """
        counts = self.counts.clamp(min=1)
        return (self.second / counts - (self.first / counts).square()).clamp(min=0)

    def carried(self, index: IndexMap | None) -> "Moments":
        """Returns them after rows moved; newborn nodes have none."""
        if index is None:
            return self
        settled = self.settled and len(index.inserted) == 0
        return Moments(
            *(index.carry(tensor) for tensor in self.tensors().values()), settled=settled
        )

    def copied(self) -> "Moments":
        """Returns an independent copy."""
        return Moments(
            *(tensor.clone() for tensor in self.tensors().values()), settled=self.settled
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns what a state dict holds."""
        return {part.name: getattr(self, part.name) for part in fields(self) if not part.kw_only}

    def to(self, device: torch.device) -> "Moments":
        """Returns them on a device."""
        if self.first.device == device:
            return self
        return Moments(
            *(tensor.to(device) for tensor in self.tensors().values()), settled=self.settled
        )
