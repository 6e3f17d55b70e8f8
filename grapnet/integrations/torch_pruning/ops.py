"""The kinds of layers, under Torch-Pruning's names, and the axes of their tensors."""

from enum import IntEnum
from typing import Any, Literal

from torch import nn

from grapnet._torch import BatchNorm, Convolution, InstanceNorm

Side = Literal["out", "in"]

# Torch-Pruning's names of the classes of layers.
TORCH_CONV = Convolution
TORCH_BATCHNORM = BatchNorm
TORCH_PRELU = nn.PReLU
TORCH_LINEAR = nn.Linear
TORCH_EMBED = nn.Embedding
TORCH_PARAMETER = nn.Parameter
TORCH_LAYERNORM = nn.LayerNorm
TORCH_MHA = nn.MultiheadAttention
TORCH_LSTM = nn.LSTM
TORCH_GROUPNORM = nn.GroupNorm
TORCH_INSTANCENORM = InstanceNorm


class OPTYPE(IntEnum):
    """The kind of a layer; the numbers are those of Torch-Pruning."""

    CONV = 0
    BN = 1
    LINEAR = 2
    PRELU = 3
    DEPTHWISE_CONV = 4
    CUSTOMIZED = 7
    ELEMENTWISE = 8
    LN = 9
    EMBED = 10
    PARAMETER = 11
    MHA = 12
    LSTM = 13
    GN = 15
    IN = 16


_CLASSES: dict[OPTYPE, type] = {
    OPTYPE.CONV: TORCH_CONV,
    OPTYPE.DEPTHWISE_CONV: TORCH_CONV,
    OPTYPE.BN: TORCH_BATCHNORM,
    OPTYPE.PRELU: TORCH_PRELU,
    OPTYPE.LINEAR: TORCH_LINEAR,
    OPTYPE.LN: TORCH_LAYERNORM,
    OPTYPE.EMBED: TORCH_EMBED,
    OPTYPE.PARAMETER: TORCH_PARAMETER,
    OPTYPE.MHA: TORCH_MHA,
    OPTYPE.LSTM: TORCH_LSTM,
    OPTYPE.GN: TORCH_GROUPNORM,
    OPTYPE.IN: TORCH_INSTANCENORM,
}


def module2type(module: Any) -> OPTYPE:
    """Returns the kind of a layer or Parameter; ELEMENTWISE if it is none of them."""
    for kind, layer in _CLASSES.items():
        if isinstance(module, layer):
            if kind == OPTYPE.CONV and is_depthwise(module):
                return OPTYPE.DEPTHWISE_CONV
            return kind
    return OPTYPE.ELEMENTWISE


def type2class(kind: OPTYPE) -> type:
    """Returns the class of the layers of a kind."""
    return _CLASSES.get(kind, nn.Module)


def is_depthwise(module: Any) -> bool:
    """Returns whether a convolution has one channel in each of its groups."""
    return module.groups == module.out_channels and module.out_channels > 1


def axis_of(module: nn.Module, side: Side) -> tuple[str, int] | None:
    """Returns the tensor and the dimension that have the output or input channels of a layer; None
    if the layer is of no known kind.

    Examples:
        >>> axis_of(nn.Conv2d(3, 8, 1), "out"), axis_of(nn.ConvTranspose2d(3, 8, 1), "out")
        (('weight', 0), ('weight', 1))
    """
    kind = module2type(module)
    if kind in (OPTYPE.CONV, OPTYPE.LINEAR):
        is_first = side == "out"
        if getattr(module, "transposed", False):
            is_first = not is_first
        return ("weight", 0) if is_first else ("weight", 1)
    if kind in (OPTYPE.DEPTHWISE_CONV, OPTYPE.PRELU, OPTYPE.GN):
        return "weight", 0
    if kind in (OPTYPE.BN, OPTYPE.IN):
        if module.weight is None:
            return "running_mean", 0
        return "weight", 0
    if kind == OPTYPE.LN:
        return "weight", len(module.normalized_shape) - 1  # pyright: ignore[reportArgumentType]
    if kind == OPTYPE.EMBED:
        return "weight", 1
    if kind == OPTYPE.MHA:
        # The width that an attention reads is also the width that it writes.
        return "in_proj_weight" if module.in_proj_weight is not None else "q_proj_weight", 1
    return None


def side_of(module: nn.Module, tensor: str, dim: int) -> Side | None:
    """Returns which channels of a layer a dimension of one of its tensors has; None for tensors
    that follow another one, as biases do.
    """
    if axis_of(module, "out") == (tensor, dim):
        return "out"
    if axis_of(module, "in") == (tensor, dim):
        return "in"
    return None
