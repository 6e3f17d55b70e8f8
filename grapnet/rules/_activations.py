"""Recorders of activations: means, variances, firing rates, covariances; streaming, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._torch import current_graph_task_id
from grapnet.core._errors import GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap

from ._recorder import NetRecorder, plainly
from ._rule import require_net


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

    @classmethod
    def of(cls, activations: Tensor) -> "Moments":
        """Returns those of no samples, for a layer with such activations."""
        numbers = torch.zeros(
            2, activations.shape[-1], dtype=torch.int64, device=activations.device
        )
        sums = torch.zeros(3, activations.shape[-1], dtype=torch.float64, device=activations.device)
        return cls(*numbers.unbind(), *sums.unbind())

    def see(self, activations: Tensor) -> Tensor:
        """Adds a batch [batch, n], and returns how far each sample is from the origins."""
        exact = activations.double()
        newborn = self.counts == 0
        if bool(newborn.any()):
            constant = exact.amin(0) == exact.amax(0)
            origin = torch.where(constant, exact[0], exact.mean(0))
            self.origin = torch.where(newborn, origin, self.origin)
        apart = exact - self.origin
        self.counts += len(activations)
        self.fired += (activations > 0).sum(0)
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
        return self if index is None else self._mapped(index.carry)

    def copied(self) -> "Moments":
        """Returns an independent copy."""
        return self._mapped(Tensor.clone)

    def to(self, device: torch.device) -> "Moments":
        """Returns them on a device."""
        return self._mapped(lambda tensor: tensor.to(device))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Moments":
        return Moments(*map(change, vars(self).values()))


@dataclass(eq=False)
class Activations:
    """What an ActivationRecorder has seen."""

    samples: int
    moments: Moments

    def carried(self, *indexes: IndexMap | None) -> "Activations":
        """Returns it after rows moved."""
        return Activations(self.samples, self.moments.carried(*indexes))

    def copied(self) -> "Activations":
        """Returns an independent copy."""
        return Activations(self.samples, self.moments.copied())

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        return {"samples": self.samples, **vars(self.moments)}


class ActivationRecorder(NetRecorder[Activations]):
    """Records the mean, the variance and the firing rate of every node of a layer.

    Every sample has the same weight, and every forward pass counts, with gradients or without. A
    node has the samples since it was added (`counts`); without samples all its numbers are 0.

    Args:
        layer: the number of the layer; 0 is the input of the net.
        window: the number of steps that it records before its rule is due.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([2, 3])
        >>> recorder = ActivationRecorder(0)
        >>> recorder.arm(net)
        >>> _ = net(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> (
        ...     recorder.count,
        ...     recorder.mean.tolist(),
        ...     recorder.variance.tolist(),
        ...     recorder.firing_rate.tolist(),
        ... )
        (2, [2.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    """

    def __init__(self, layer: int, *, window: int = 1) -> None:
        super().__init__((layer,), window)
        self.layer = layer

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return 0 if self._evidence is None else self._evidence.samples

    @property
    def counts(self) -> Tensor:
        """How many samples of every node were seen, [n] int64."""
        return self._seen().moments.counts.clone()

    @property
    def mean(self) -> Tensor:
        """The mean of every node, [n] float64."""
        return self._seen().moments.mean

    @property
    def variance(self) -> Tensor:
        """The variance of every node, divided by the number of samples, [n] float64; exactly 0 if
        it is constant.
        """
        return self._seen().moments.variance

    @property
    def firing_rate(self) -> Tensor:
        """The share of samples in which the activation of every node is above 0, [n] float64."""
        moments = self._seen().moments
        return moments.fired / moments.counts.clamp(min=1).double()

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        require_net(net, "ActivationRecorder")
        return [net.layers[self.layer]]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if _is_new(output):
            with plainly(output.device):
                seen = self._writable(lambda: Activations(0, Moments.of(output)))
                seen.moments = seen.moments.to(output.device)
                seen.moments.see(output.detach())
                seen.samples += len(output)

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Activations:
        moments = {name: part.clone() for name, part in seen.items() if name != "samples"}
        return Activations(seen["samples"], Moments(**moments))


@dataclass(eq=False)
class Covariances:
    """What a CovarianceRecorder has seen."""

    samples: int
    upper: Moments
    lower: Moments
    products: Tensor  # [n_upper, n_lower] float64, Σ (h_i - origin_i)(h_j - origin_j)

    @classmethod
    def of(cls, upper: Tensor, lower: Tensor) -> "Covariances":
        """Returns those of no samples, for two layers with such activations."""
        products = torch.zeros(
            upper.shape[-1], lower.shape[-1], dtype=torch.float64, device=upper.device
        )
        return cls(0, Moments.of(upper), Moments.of(lower), products)

    def see(self, upper: Tensor, lower: Tensor) -> None:
        """Adds a batch of activations of both layers."""
        device = upper.device
        self.upper = self.upper.to(device)
        self.lower = self.lower.to(device)
        self.products = self.products.to(device)
        self.products.addmm_(self.upper.see(upper).t(), self.lower.see(lower))
        self.samples += len(upper)

    def covariance(self) -> Tensor:
        """Returns [n_upper, n_lower], 0 where a node has not been there from the first sample to
        the last.
        """
        parts = [
            torch.where(m.counts == self.samples, m.first / self.samples, 0)
            for m in (self.upper, self.lower)
        ]
        whole = [(m.counts == self.samples).double() for m in (self.upper, self.lower)]
        found = (self.products / self.samples).sub_(torch.outer(*parts))
        return found.mul_(whole[0][:, None]).mul_(whole[1])

    def carried(self, *indexes: IndexMap | None) -> "Covariances":
        """Returns it after rows moved."""
        upper, lower = indexes
        products = self.products if upper is None else upper.carry(self.products)
        products = products if lower is None else lower.carry(products.t()).t().contiguous()
        return Covariances(
            self.samples, self.upper.carried(upper), self.lower.carried(lower), products
        )

    def copied(self) -> "Covariances":
        """Returns an independent copy."""
        return Covariances(
            self.samples, self.upper.copied(), self.lower.copied(), self.products.clone()
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        return {
            "samples": self.samples,
            "upper": dict(vars(self.upper)),
            "lower": dict(vars(self.lower)),
            "products": self.products,
        }


class CovarianceRecorder(NetRecorder[Covariances]):
    """Records the covariance between the nodes of two layers.

    Every forward pass counts, with gradients or without. A node that was added after the first
    sample has covariance 0 with all others until `clear()`, since pairs of different samples do not
    compare.

    Args:
        upper: one layer.
        lower: the other layer, which may be the same one; the next one by default.
        window: the number of steps that it records before its rule is due.
        most_cells: the largest number of pairs of nodes, of 8 bytes each; `arm` raises GrapNetError
            for more.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([2, 3])
        >>> recorder = CovarianceRecorder(0, 0)
        >>> recorder.arm(net)
        >>> _ = net(torch.tensor([[1.0, 5.0], [-1.0, 5.0]]))
        >>> recorder.correlation().tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """

    def __init__(
        self, upper: int, lower: int | None = None, *, window: int = 1, most_cells: int = 2**26
    ) -> None:
        lower = upper + 1 if lower is None else lower
        super().__init__((upper, lower), window)
        self.upper = upper
        self.lower = lower
        self.most_cells = most_cells
        # the activations of the first of the two layers in the pass under way
        self._waiting: Tensor | None = None

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return 0 if self._evidence is None else self._evidence.samples

    def arm(self, net: Graph) -> None:
        """Starts recording a net; raises GrapNetError if its layers have too many pairs."""
        cells = len(net.layers[self.upper]) * len(net.layers[self.lower])
        if cells > self.most_cells:
            raise GrapNetError(
                f"layers {self.upper} and {self.lower} have {cells:,} pairs of nodes (limit"
                f" {self.most_cells:,}); raise most_cells= if there is memory for 8 bytes each"
            )
        super().arm(net)

    def covariance(self) -> Tensor:
        """Returns the covariances, divided by the number of samples, [n_upper, n_lower] float64."""
        return self._seen().covariance()

    def correlation(self) -> Tensor:
        """Returns the correlations, [n_upper, n_lower] float64; exactly 0 where a variance is 0."""
        seen = self._seen()
        scales = [m.variance.sqrt() for m in (seen.upper, seen.lower)]
        inverse = [torch.where(scale > 0, 1 / scale, 0) for scale in scales]
        return seen.covariance().mul_(inverse[0][:, None]).mul_(inverse[1]).clamp_(-1, 1)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        require_net(net, "CovarianceRecorder")
        return [net.layers[n] for n in sorted({self.upper, self.lower})]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not _is_new(output):
            return
        if place == 0 and self.upper != self.lower:
            self._waiting = output.detach()
            return
        other = self._waiting
        self._waiting = None
        if self.upper == self.lower:
            other = output
        if other is not None and len(other) == len(output):
            upper, lower = (output, other) if self.upper > self.lower else (other, output)
            with plainly(output.device):
                self._writable(lambda: Covariances.of(upper, lower)).see(
                    upper.detach(), lower.detach()
                )

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Covariances:
        upper = Moments(**seen["upper"]).copied()
        lower = Moments(**seen["lower"]).copied()
        return Covariances(seen["samples"], upper, lower, seen["products"].clone())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_waiting": None}


def _is_new(output: Tensor) -> bool:
    """Returns whether it has samples that no pass before had.

    Activation checkpointing computes samples again inside a backward pass.
    """
    return len(output) > 0 and current_graph_task_id() == -1
