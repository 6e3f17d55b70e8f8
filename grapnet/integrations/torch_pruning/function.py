"""Functions that prune one layer alone, under Torch-Pruning's names.

`tp.prune_conv_out_channels(layer, idxs)` changes this layer and no other. To a dependency graph the
same functions are names: which side of a layer to prune. There, one edit of the adopted model does
the work.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from . import ops

# What `from function import *` brings; Torch-Pruning keeps the pruners of layers here alone.
__all__ = [
    "BasePruningFunc",
    "PrunerBox",
    "prune_batchnorm_in_channels",
    "prune_batchnorm_out_channels",
    "prune_conv_in_channels",
    "prune_conv_out_channels",
    "prune_depthwise_conv_in_channels",
    "prune_depthwise_conv_out_channels",
    "prune_embedding_in_channels",
    "prune_embedding_out_channels",
    "prune_groupnorm_in_channels",
    "prune_groupnorm_out_channels",
    "prune_instancenorm_in_channels",
    "prune_instancenorm_out_channels",
    "prune_layernorm_in_channels",
    "prune_layernorm_out_channels",
    "prune_linear_in_channels",
    "prune_linear_out_channels",
    "prune_lstm_in_channels",
    "prune_lstm_out_channels",
    "prune_multihead_attention_in_channels",
    "prune_multihead_attention_out_channels",
    "prune_parameter_in_channels",
    "prune_parameter_out_channels",
    "prune_prelu_in_channels",
    "prune_prelu_out_channels",
]


class BasePruningFunc(ABC):
    """How to prune a layer; the base class of pruners of one's own layers.

    Where `prune_in_channels = prune_out_channels`, the inputs and outputs of a layer are the same
    channels, and are removed together.
    """

    TARGET_MODULES: Any = None

    def __init__(self, pruning_dim: int = 1) -> None:
        self.pruning_dim = pruning_dim

    @abstractmethod
    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes output channels of a layer, and returns it."""

    @abstractmethod
    def prune_in_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes input channels of a layer, and returns it."""

    @abstractmethod
    def get_out_channels(self, layer: Any) -> int | None:
        """Returns the number of output channels."""

    @abstractmethod
    def get_in_channels(self, layer: Any) -> int | None:
        """Returns the number of input channels."""

    def get_out_channel_groups(self, layer: Any) -> int:
        """Returns the number of groups of output channels."""
        return 1

    def get_in_channel_groups(self, layer: Any) -> int:
        """Returns the number of groups of input channels."""
        return 1

    def check(self, layer: Any, idxs: Sequence[int], to_output: bool) -> None:
        """Raises ValueError if some channels do not exist."""
        count = self.get_out_channels(layer) if to_output else self.get_in_channels(layer)
        if count is None:
            return
        missing = [index for index in idxs if not 0 <= index < count]
        if missing:
            raise ValueError(f"{layer} has {count} channels, so {missing} do not exist")

    def __call__(
        self, layer: Any, idxs: Sequence[int], to_output: bool = True, inplace: bool = True
    ) -> Any:
        """Removes channels of a layer, or of a copy of it, and returns it."""
        idxs = sorted(idxs)
        self.check(layer, idxs, to_output)
        if not inplace:
            layer = deepcopy(layer)
        if to_output:
            return self.prune_out_channels(layer, idxs)
        return self.prune_in_channels(layer, idxs)

    def _prune_parameter_and_grad(
        self, weight: nn.Parameter, keep_idxs: Sequence[int], pruning_dim: int
    ) -> nn.Parameter:
        """Returns a Parameter with some entries of another one, and of its gradient."""
        keep = torch.as_tensor(keep_idxs, device=weight.device)
        smaller = nn.Parameter(weight.detach().index_select(pruning_dim, keep))
        smaller.requires_grad_(weight.requires_grad)
        if weight.grad is not None:
            smaller.grad = weight.grad.index_select(pruning_dim, keep)
        return smaller


class _TensorPruner(BasePruningFunc):
    """Prunes layers whose tensors have the channels on known dimensions."""

    # Attributes that are the number of channels.
    counts: tuple[str, ...] = ()

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes output channels of a layer, and returns it."""
        self._remove(layer, idxs, ("weight", "bias", "running_mean", "running_var"))
        return layer

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer: Any) -> int | None:
        """Returns the number of output channels."""
        return getattr(layer, self.counts[0])

    get_in_channels = get_out_channels

    def _remove(self, layer: Any, idxs: Sequence[int], names: Sequence[str], dim: int = 0) -> None:
        """Removes entries of tensors of a layer, and counts its channels again."""
        for name in names:
            tensor = getattr(layer, name, None)
            if tensor is not None:
                setattr(layer, name, self._without(tensor, idxs, dim))
        for name in self.counts:
            setattr(layer, name, getattr(layer, name) - len(set(idxs)))

    def _without(self, tensor: Tensor, idxs: Sequence[int], dim: int) -> Tensor:
        removed = set(idxs)
        keep = [index for index in range(tensor.shape[dim]) if index not in removed]
        if isinstance(tensor, nn.Parameter):
            return self._prune_parameter_and_grad(tensor, keep, dim)
        return tensor.index_select(dim, torch.as_tensor(keep, device=tensor.device))


class ConvPruner(_TensorPruner):
    """Prunes convolutions, transposed ones too."""

    TARGET_MODULES = ops.TORCH_CONV

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes output channels of a convolution, and returns it."""
        layer.weight = self._without(layer.weight, idxs, 1 if layer.transposed else 0)
        if layer.bias is not None:
            layer.bias = self._without(layer.bias, idxs, 0)
        layer.out_channels -= len(set(idxs))
        return layer

    def prune_in_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes input channels of a convolution, and returns it.

        All groups of a convolution lose the same channels: those that the first group loses.
        """
        removed = set(idxs)
        per_group = layer.in_channels // layer.groups
        if not layer.transposed:
            removed = {index for index in removed if index < per_group}
        layer.weight = self._without(layer.weight, sorted(removed), 0 if layer.transposed else 1)
        layer.in_channels -= len(set(idxs))
        return layer

    def get_out_channels(self, layer: Any) -> int:
        """Returns the number of output channels."""
        return layer.out_channels

    def get_in_channels(self, layer: Any) -> int:
        """Returns the number of input channels."""
        return layer.in_channels

    def get_out_channel_groups(self, layer: Any) -> int:
        """Returns the number of groups."""
        return layer.groups

    get_in_channel_groups = get_out_channel_groups


class DepthwiseConvPruner(_TensorPruner):
    """Prunes convolutions with one channel a group."""

    TARGET_MODULES = ops.TORCH_CONV
    counts = ("out_channels", "in_channels", "groups")


class LinearPruner(_TensorPruner):
    """Prunes linear layers."""

    TARGET_MODULES = ops.TORCH_LINEAR

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes output features of a linear layer, and returns it."""
        self._remove(layer, idxs, ("weight", "bias"))
        layer.out_features -= len(set(idxs))
        return layer

    def prune_in_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes input features of a linear layer, and returns it."""
        self._remove(layer, idxs, ("weight",), 1)
        layer.in_features -= len(set(idxs))
        return layer

    def get_out_channels(self, layer: Any) -> int:
        """Returns the number of output features."""
        return layer.out_features

    def get_in_channels(self, layer: Any) -> int:
        """Returns the number of input features."""
        return layer.in_features


class BatchnormPruner(_TensorPruner):
    """Prunes batch norms, with their running statistics."""

    TARGET_MODULES = ops.TORCH_BATCHNORM
    counts = ("num_features",)


class InstanceNormPruner(_TensorPruner):
    """Prunes instance norms."""

    TARGET_MODULES = ops.TORCH_INSTANCENORM
    counts = ("num_features",)


class GroupNormPruner(_TensorPruner):
    """Prunes group norms; the number of groups stays."""

    TARGET_MODULES = ops.TORCH_GROUPNORM
    counts = ("num_channels",)

    def get_out_channel_groups(self, layer: Any) -> int:
        """Returns the number of groups."""
        return layer.num_groups

    get_in_channel_groups = get_out_channel_groups


class PReLUPruner(_TensorPruner):
    """Prunes PReLUs that have one slope per channel."""

    TARGET_MODULES = ops.TORCH_PRELU
    counts = ("num_parameters",)

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes slopes, unless all channels share one, and returns the layer."""
        if layer.num_parameters > 1:
            self._remove(layer, idxs, ("weight",))
        return layer

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer: Any) -> int | None:
        """Returns the number of slopes; None if all channels share one."""
        return layer.num_parameters if layer.num_parameters > 1 else None

    get_in_channels = get_out_channels


class LayernormPruner(_TensorPruner):
    """Prunes the last dimension of layer norms."""

    TARGET_MODULES = ops.TORCH_LAYERNORM

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes entries of the last dimension, and returns the layer."""
        self._remove(layer, idxs, ("weight", "bias"), len(layer.normalized_shape) - 1)
        last = layer.normalized_shape[-1] - len(set(idxs))
        layer.normalized_shape = (*layer.normalized_shape[:-1], last)
        return layer

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer: Any) -> int:
        """Returns the size of the last dimension."""
        return layer.normalized_shape[-1]

    get_in_channels = get_out_channels


class EmbeddingPruner(_TensorPruner):
    """Prunes the width of embeddings."""

    TARGET_MODULES = ops.TORCH_EMBED
    counts = ("embedding_dim",)

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Removes entries of all vectors, and returns the layer."""
        self._remove(layer, idxs, ("weight",), 1)
        return layer

    prune_in_channels = prune_out_channels


class ParameterPruner(_TensorPruner):
    """Prunes Parameters that belong to no layer of torch, on the dimension `pruning_dim`."""

    TARGET_MODULES = ops.TORCH_PARAMETER

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Returns a Parameter without some entries."""
        return self._without(layer, idxs, self.pruning_dim)

    prune_in_channels = prune_out_channels

    def get_out_channels(self, layer: Any) -> int:
        """Returns the size of the dimension."""
        return layer.shape[self.pruning_dim]

    get_in_channels = get_out_channels


class _GraphPruner(_TensorPruner):
    """Names the channels of layers that cannot be pruned alone."""

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            f"{type(layer).__name__} cannot be pruned alone; build a DependencyGraph of the model"
        )

    prune_in_channels = prune_out_channels


class MultiheadAttentionPruner(_GraphPruner):
    """Names the width of attentions; a dependency graph prunes it."""

    TARGET_MODULES = ops.TORCH_MHA
    counts = ("embed_dim",)


class LSTMPruner(_GraphPruner):
    """Names the units of LSTMs, which stay as they are."""

    TARGET_MODULES = ops.TORCH_LSTM
    counts = ("hidden_size",)


PrunerBox: dict[ops.OPTYPE, BasePruningFunc] = {
    ops.OPTYPE.CONV: ConvPruner(),
    ops.OPTYPE.LINEAR: LinearPruner(),
    ops.OPTYPE.BN: BatchnormPruner(),
    ops.OPTYPE.DEPTHWISE_CONV: DepthwiseConvPruner(),
    ops.OPTYPE.PRELU: PReLUPruner(),
    ops.OPTYPE.LN: LayernormPruner(),
    ops.OPTYPE.EMBED: EmbeddingPruner(),
    ops.OPTYPE.PARAMETER: ParameterPruner(),
    ops.OPTYPE.MHA: MultiheadAttentionPruner(),
    ops.OPTYPE.LSTM: LSTMPruner(),
    ops.OPTYPE.GN: GroupNormPruner(),
    ops.OPTYPE.IN: InstanceNormPruner(),
}

prune_conv_out_channels = PrunerBox[ops.OPTYPE.CONV].prune_out_channels
prune_conv_in_channels = PrunerBox[ops.OPTYPE.CONV].prune_in_channels
prune_depthwise_conv_out_channels = PrunerBox[ops.OPTYPE.DEPTHWISE_CONV].prune_out_channels
prune_depthwise_conv_in_channels = PrunerBox[ops.OPTYPE.DEPTHWISE_CONV].prune_in_channels
prune_linear_out_channels = PrunerBox[ops.OPTYPE.LINEAR].prune_out_channels
prune_linear_in_channels = PrunerBox[ops.OPTYPE.LINEAR].prune_in_channels
prune_batchnorm_out_channels = PrunerBox[ops.OPTYPE.BN].prune_out_channels
prune_batchnorm_in_channels = PrunerBox[ops.OPTYPE.BN].prune_in_channels
prune_layernorm_out_channels = PrunerBox[ops.OPTYPE.LN].prune_out_channels
prune_layernorm_in_channels = PrunerBox[ops.OPTYPE.LN].prune_in_channels
prune_groupnorm_out_channels = PrunerBox[ops.OPTYPE.GN].prune_out_channels
prune_groupnorm_in_channels = PrunerBox[ops.OPTYPE.GN].prune_in_channels
prune_instancenorm_out_channels = PrunerBox[ops.OPTYPE.IN].prune_out_channels
prune_instancenorm_in_channels = PrunerBox[ops.OPTYPE.IN].prune_in_channels
prune_prelu_out_channels = PrunerBox[ops.OPTYPE.PRELU].prune_out_channels
prune_prelu_in_channels = PrunerBox[ops.OPTYPE.PRELU].prune_in_channels
prune_embedding_out_channels = PrunerBox[ops.OPTYPE.EMBED].prune_out_channels
prune_embedding_in_channels = PrunerBox[ops.OPTYPE.EMBED].prune_in_channels
prune_parameter_out_channels = PrunerBox[ops.OPTYPE.PARAMETER].prune_out_channels
prune_parameter_in_channels = PrunerBox[ops.OPTYPE.PARAMETER].prune_in_channels
prune_multihead_attention_out_channels = PrunerBox[ops.OPTYPE.MHA].prune_out_channels
prune_multihead_attention_in_channels = PrunerBox[ops.OPTYPE.MHA].prune_in_channels
prune_lstm_out_channels = PrunerBox[ops.OPTYPE.LSTM].prune_out_channels
prune_lstm_in_channels = PrunerBox[ops.OPTYPE.LSTM].prune_in_channels
