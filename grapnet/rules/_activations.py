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
from grapnet.core._layer import LiveNodes
from grapnet.spaces._adopted import Adopted

from ._recorder import NetRecorder, layer_of, plainly
from ._rule import as_names
from ._taps import PASS, Side, Tap, tap_of, watch_taps


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
        return self if index is None else self.mapped(index.carry)

    def copied(self) -> "Moments":
        """Returns an independent copy."""
        return self.mapped(Tensor.clone)

    def chosen(self, rows: Tensor) -> "Moments":
        """Returns those of some nodes."""
        return self.mapped(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> "Moments":
        """Returns them on a device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Moments":
        """Returns them with every tensor changed."""
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
    """Records the mean, the variance and the firing rate of every node of a layer or of a space.

    Every sample has the same weight, and every forward pass counts, with gradients or without. A
    node has the samples since it was added (`counts`); without samples all its numbers are 0.

    In an adopted model every position of an image and every token is a sample, and so is every
    number of a node that has several, as a head has. What is recorded is the input of the first
    module that reads the space after it was written, behind norms and activations.

    Args:
        layer: the number of the layer; 0 is the input of the net. Of an adopted model, the space or
            its name.
        at: the module of an adopted model where to record instead, for a space that many modules
            read and write.
        side: whether the input or the output of the module `at` is recorded.
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

    def __init__(
        self,
        layer: int | str | LiveNodes,
        *,
        at: str | None = None,
        side: Side = "in",
        window: int = 1,
    ) -> None:
        name = _name_of(layer)
        super().__init__((name,), window)
        self.layer = name
        self.at = at
        self.side: Side = side
        self._taps: list[Tap] = []  # of an adopted model

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

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        if not isinstance(net, Adopted):
            return super()._watch(net)
        space = net.spaces[layer_of(net, self.layer)]
        self._taps = [tap_of(net, space, self.at, self.side)]
        return watch_taps(self, net, self._taps)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return [net.layers[layer_of(net, self.layer)]]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if is_new(output):
            with plainly(output.device):
                seen = self._writable(lambda: Activations(0, Moments.of(output)))
                seen.moments = seen.moments.to(output.device)
                seen.moments.see(output.detach())
                seen.samples += len(output)

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the activations of a space."""
        space: Any = self.net.layers[layer_of(self.net, self.layer)]
        self._observe(place, (), self._taps[place].rows(space, tensor.detach()))

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
    """Records the covariance between the nodes of two layers, or of two spaces.

    Every forward pass counts, with gradients or without. A node that was added after the first
    sample has covariance 0 with all others until `clear()`, since pairs of different samples do not
    compare.

    Spaces of an adopted model are recorded where `ActivationRecorder` records them. There they must
    have as many positions or tokens as each other, or `arm` raises GrapNetError.

    Args:
        upper: one layer; of an adopted model, a space or its name.
        lower: the other layer, which may be the same one; the next one by default, and for a space
            the same.
        at: the module of an adopted model where to record instead, or one for each of the spaces,
            None for the default.
        side: whether the input or the output of the modules `at` is recorded.
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
        self,
        upper: int | str | LiveNodes,
        lower: int | str | LiveNodes | None = None,
        *,
        at: str | tuple[str | None, str | None] | None = None,
        side: Side = "in",
        window: int = 1,
        most_cells: int = 2**26,
    ) -> None:
        self.upper = _name_of(upper)
        if lower is not None:
            self.lower = _name_of(lower)
        elif isinstance(self.upper, int):
            self.lower = self.upper + 1
        else:
            self.lower = self.upper
        super().__init__((self.upper, self.lower), window)
        self.at = at if isinstance(at, tuple) else (at, at)
        self.side: Side = side
        self.most_cells = most_cells
        self._taps: list[Tap] = []  # of an adopted model
        # the activations of the first of the two layers in the pass under way
        self._waiting: Tensor | None = None
        # of an adopted model those of both spaces, as long as the other is missing
        self._met: tuple[list[Tensor], list[Tensor]] = ([], [])

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return 0 if self._evidence is None else self._evidence.samples

    def arm(self, net: Graph) -> None:
        """Starts recording a net; raises GrapNetError if its layers have too many pairs."""
        upper, lower = self._numbers(net)
        cells = len(net.layers[upper]) * len(net.layers[lower])
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

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        if not isinstance(net, Adopted):
            return super()._watch(net)
        spaces = [net.spaces[number] for number in self._numbers(net)]
        taps = []
        for space, at in zip(spaces, self.at, strict=True):
            taps.append(tap_of(net, space, at, self.side))
        counts = [tap.rows_of_example(space) for tap, space in zip(taps, spaces, strict=True)]
        if counts[0] != counts[1]:
            raise GrapNetError(
                f"{spaces[0].name} has {counts[0]} positions at {taps[0].path!r}, and"
                f" {spaces[1].name} has {counts[1]} at {taps[1].path!r}, so that they have no"
                " covariance; record them at other modules, at=(…, …)"
            )
        self._taps = taps
        return watch_taps(self, net, [PASS, *taps])

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return [net.layers[n] for n in sorted(set(self._numbers(net)))]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if not is_new(output):
            return
        number, other_number = self._numbers(self.net)
        if place == 0 and number != other_number:
            self._waiting = output.detach()
            return
        other = self._waiting
        self._waiting = None
        if number == other_number:
            other = output
        if other is not None and len(other) == len(output):
            upper, lower = (output, other) if number > other_number else (other, output)
            self._see(upper, lower)

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the activations of a space; the two meet in the same pass of the model."""
        if place == 0:
            self._met = ([], [])
            return
        number = self._numbers(self.net)[place - 1]
        space: Any = self.net.layers[number]
        rows = self._taps[place - 1].rows(space, tensor.detach())
        if not is_new(rows):
            return
        # The model may write into it before it meets the other.
        self._met[place - 1].append(rows.clone())
        if all(self._met):
            upper, lower = (waiting.pop(0) for waiting in self._met)
            if len(upper) == len(lower):
                self._see(upper, lower)

    def _see(self, upper: Tensor, lower: Tensor) -> None:
        with plainly(upper.device):
            self._writable(lambda: Covariances.of(upper, lower)).see(upper.detach(), lower.detach())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Covariances:
        upper = Moments(**seen["upper"]).copied()
        lower = Moments(**seen["lower"]).copied()
        return Covariances(seen["samples"], upper, lower, seen["products"].clone())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_waiting": None, "_met": ([], [])}


def _name_of(layer: int | str | LiveNodes) -> int | str:
    """Returns a layer as its number, a space as its name."""
    names = as_names(layer)
    assert names
    return names[0]


def is_new(output: Tensor) -> bool:
    """Returns whether it has samples that no pass before had.

    Activation checkpointing computes samples again inside a backward pass.
    """
    return len(output) > 0 and current_graph_task_id() == -1
