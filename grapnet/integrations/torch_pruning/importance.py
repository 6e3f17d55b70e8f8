"""Importances of the channels of a group, under Torch-Pruning's names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .dependency import Group, GroupItem
from .ops import OPTYPE, TORCH_BATCHNORM, TORCH_CONV

Normalizer = str | Callable[[Tensor], Tensor] | None

TARGETS = (TORCH_CONV, nn.Linear, TORCH_BATCHNORM, nn.LayerNorm)
# Torch-Pruning's Taylor importance does not count batch norms.
TAYLOR_TARGETS = (TORCH_CONV, nn.Linear, nn.LayerNorm)


class Importance(ABC):
    """Returns one number for every node of a group; the smallest are pruned first."""

    @abstractmethod
    def __call__(self, group: Group) -> Tensor | None:
        """Returns the scores, [nodes]; None if the group has nothing to judge by."""


class GroupMagnitudeImportance(Importance):
    """The sums of |w|^p over the weights of each node, by layer, reduced over the layers.

    Depthwise convolutions do not count, as in Torch-Pruning.

    Args:
        p: the power.
        group_reduction: how layers are combined: "mean", "sum", "max", "prod", "first", "gate" (the
            last one), or None for one row per layer.
        normalizer: what the scores of a group are divided by: "mean", "sum", "max",
            "standarization" (to 0 to 1), "gaussian", "sentinel_0.5" (the median), "lamp", a
            function, or None.
        bias: whether biases count, as layers of their own.
        target_types: the classes of layers that count.
    """

    def __init__(
        self,
        p: float = 2,
        group_reduction: str | None = "mean",
        normalizer: Normalizer = "mean",
        bias: bool = False,
        target_types: Sequence[type] = TARGETS,
    ) -> None:
        self.p = p
        self.group_reduction = group_reduction
        self.normalizer = normalizer
        self.bias = bias
        self.target_types = tuple(target_types)

    @torch.no_grad()
    def __call__(self, group: Group) -> Tensor | None:
        """Returns the scores, [nodes]."""
        layers = []
        for item in group:
            if not isinstance(item.dep.layer, self.target_types):
                continue
            layers.extend(self._of_layer(group, item))
        if not layers:
            return None
        return self._normalize(self._reduce(layers))

    def _of_layer(self, group: Group, item: GroupItem) -> list[Tensor]:
        """Returns the scores of one layer, and those of its bias if it counts."""
        found = []
        weight = item.weight
        is_depthwise = item.dep.target.type == OPTYPE.DEPTHWISE_CONV
        if isinstance(weight, nn.Parameter) and not is_depthwise:
            found.append(self._scored(group, item, weight, item.dim))
            bias = getattr(item.dep.layer, "bias", None)
            # Inputs of a layer have no bias: it has as many entries as there are outputs.
            writes = group._DG.is_out_channel_pruning_fn(item.dep.handler)
            if self.bias and writes and bias is not None:
                found.append(self._scored(group, item, bias, 0))
        return [scores for scores in found if scores is not None]

    def _scored(
        self, group: Group, item: GroupItem, weight: nn.Parameter, dim: int
    ) -> Tensor | None:
        """Returns the sums over the entries of a tensor that belong to each node, [nodes]."""
        entries = self._entries(weight)
        if entries is None:
            return None
        by_channel = entries.movedim(dim, 0).flatten(1).sum(1) if entries.dim() > 1 else entries
        return _by_node(group, item, by_channel)

    def _entries(self, weight: nn.Parameter) -> Tensor | None:
        """Returns what each entry of a tensor is worth; None if that is unknown."""
        return weight.abs().pow(self.p)

    def _reduce(self, layers: Sequence[Tensor]) -> Tensor:
        """Returns the scores of layers as one."""
        stacked = torch.stack([scores.float() for scores in layers])
        if self.group_reduction is None:
            return stacked
        if self.group_reduction == "mean":
            return stacked.mean(0)
        if self.group_reduction == "sum":
            return stacked.sum(0)
        if self.group_reduction == "max":
            return stacked.amax(0)
        if self.group_reduction == "prod":
            return stacked.prod(0)
        if self.group_reduction == "first":
            return stacked[0]
        if self.group_reduction == "gate":
            return stacked[-1]
        raise ValueError(f"there is no group_reduction {self.group_reduction!r}")

    def _normalize(self, scores: Tensor) -> Tensor:
        """Returns scores that can be compared with those of other groups."""
        tiny = 1e-8
        if self.normalizer is None:
            return scores
        if not isinstance(self.normalizer, str):
            return self.normalizer(scores)
        if self.normalizer == "sum":
            return scores / scores.sum()
        if self.normalizer == "mean":
            return scores / scores.mean()
        if self.normalizer == "max":
            return scores / scores.max()
        if self.normalizer == "standarization":
            return (scores - scores.min()) / (scores.max() - scores.min() + tiny)
        if self.normalizer == "gaussian":
            return (scores - scores.mean()) / (scores.std() + tiny)
        if self.normalizer.startswith("sentinel"):
            share = float(self.normalizer.partition("_")[2])
            rank = min(int(share * len(scores)), len(scores) - 1)
            return scores / (scores.sort().values[rank] + tiny)
        if self.normalizer == "lamp":
            # Each score is divided by the sum of itself and all larger ones.
            ascending, order = scores.sort()
            larger = ascending.flip(0).cumsum(0).flip(0)
            return torch.empty_like(scores).index_copy_(0, order, ascending / larger)
        raise ValueError(f"there is no normalizer {self.normalizer!r}")


class MagnitudeImportance(GroupMagnitudeImportance):
    """GroupMagnitudeImportance."""


class BNScaleImportance(GroupMagnitudeImportance):
    """The scales of batch norms (Network Slimming, https://arxiv.org/abs/1708.06519)."""

    def __init__(
        self, group_reduction: str | None = "mean", normalizer: Normalizer = "mean"
    ) -> None:
        super().__init__(1, group_reduction, normalizer, target_types=(TORCH_BATCHNORM,))


class LAMPImportance(GroupMagnitudeImportance):
    """Magnitudes, each divided by the sum of all that are not smaller
    (https://arxiv.org/abs/2010.07611).
    """

    def __init__(
        self,
        p: float = 2,
        group_reduction: str | None = "mean",
        normalizer: Normalizer = "lamp",
        bias: bool = False,
    ) -> None:
        super().__init__(p, group_reduction, normalizer, bias)


class FPGMImportance(GroupMagnitudeImportance):
    """Distances to the other channels of the layer: the geometric median goes first
    (https://arxiv.org/abs/1811.00250).
    """

    def __init__(
        self,
        p: float = 2,
        group_reduction: str | None = "mean",
        normalizer: Normalizer = "mean",
        bias: bool = False,
    ) -> None:
        super().__init__(p, group_reduction, normalizer, bias, (TORCH_CONV, nn.Linear))

    def _scored(
        self, group: Group, item: GroupItem, weight: nn.Parameter, dim: int
    ) -> Tensor | None:
        channels = weight.movedim(dim, 0).reshape(weight.shape[dim], -1).abs().pow(self.p)
        channels = channels[torch.as_tensor(item.idxs, device=weight.device)]
        distances = torch.cdist(channels[None], channels[None])[0].sum(0)
        numbers = torch.as_tensor(item.root_idxs, device=weight.device)
        return distances.new_zeros(group.n_nodes).index_add_(0, numbers, distances)


class RandomImportance(Importance):
    """Random numbers between 0 and 1."""

    def __call__(self, group: Group) -> Tensor:
        """Returns the scores, [nodes]."""
        return torch.rand(group.n_nodes)


class GroupTaylorImportance(GroupMagnitudeImportance):
    """|w · dw|, the change of the loss to first order; needs the gradients of a backward pass.

    Args:
        group_reduction: see GroupMagnitudeImportance.
        normalizer: see GroupMagnitudeImportance.
        multivariable: whether the products of a node are added before their absolute value.
        bias: whether biases count.
        target_types: the classes of layers that count.
    """

    def __init__(
        self,
        group_reduction: str | None = "mean",
        normalizer: Normalizer = "mean",
        multivariable: bool = False,
        bias: bool = False,
        target_types: Sequence[type] = TAYLOR_TARGETS,
    ) -> None:
        super().__init__(1, group_reduction, normalizer, bias, target_types)
        self.multivariable = multivariable

    def __call__(self, group: Group) -> Tensor | None:
        """Returns the scores, [nodes].

        Raises:
            RuntimeError: no layer of the group has a gradient.
        """
        scores = super().__call__(group)
        if scores is None and any(isinstance(i.dep.layer, self.target_types) for i in group):
            raise RuntimeError(
                f"{type(self).__name__} needs gradients: run loss.backward() before pruner.step()"
            )
        return scores

    def _entries(self, weight: nn.Parameter) -> Tensor | None:
        if weight.grad is None:
            return None
        products = weight * weight.grad
        if self.multivariable:
            return products
        return products.abs()

    def _scored(
        self, group: Group, item: GroupItem, weight: nn.Parameter, dim: int
    ) -> Tensor | None:
        scores = super()._scored(group, item, weight, dim)
        if scores is None:
            return None
        return scores.abs()


class TaylorImportance(GroupTaylorImportance):
    """GroupTaylorImportance."""


class GroupHessianImportance(GroupTaylorImportance):
    """w² · h, the change of the loss to second order, with squared gradients of single examples for
    the diagonal h of the Hessian (Optimal Brain Damage).

    Call `zero_grad` once, and `accumulate_grad(model)` after the backward pass of every example.
    Without, the gradients that the Parameters have are taken for h, as Torch-Pruning does.
    """

    def __init__(
        self,
        group_reduction: str | None = "mean",
        normalizer: Normalizer = "mean",
        bias: bool = False,
        target_types: Sequence[type] = TARGETS,
    ) -> None:
        super().__init__(group_reduction, normalizer, False, bias, target_types)
        self._squares: dict[nn.Parameter, Tensor] = {}
        self._counts: dict[nn.Parameter, int] = {}

    def zero_grad(self) -> None:
        """Forgets the squared gradients."""
        self._squares = {}
        self._counts = {}

    def accumulate_grad(self, model: nn.Module) -> None:
        """Adds the squares of the gradients that a model has."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                before = self._squares.get(parameter, 0)
                self._squares[parameter] = before + parameter.grad.square()
                self._counts[parameter] = self._counts.get(parameter, 0) + 1

    def _entries(self, weight: nn.Parameter) -> Tensor | None:
        curvature = weight.grad
        if weight in self._squares and self._squares[weight].shape == weight.shape:
            curvature = self._squares[weight] / self._counts[weight]
        if curvature is None:
            return None
        return weight.square() * curvature


class HessianImportance(GroupHessianImportance):
    """GroupHessianImportance."""


class OBDCImportance(GroupMagnitudeImportance):
    """Not provided: the Kronecker-factored Fisher information of EigenDamage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "OBDCImportance is not provided; use HessianImportance, the diagonal of the same"
        )


def _by_node(group: Group, item: GroupItem, by_channel: Tensor) -> Tensor:
    """Returns the sums over the channels of each node, [nodes]."""
    channels = by_channel[torch.as_tensor(item.idxs, device=by_channel.device)]
    numbers = torch.as_tensor(item.root_idxs, device=by_channel.device)
    return channels.new_zeros(group.n_nodes).index_add_(0, numbers, channels).cpu()
