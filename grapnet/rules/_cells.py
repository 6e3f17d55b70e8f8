"""Linear layers of adopted models: what each number of their weight is multiplied with.

A cell is one number that a child sums over: an input of a Linear, or one of the places that a
kernel covers. Weights are seen as [out, in, *kernel], whatever the layout of the module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grapnet._torch import reversed_padding
from grapnet.core._errors import EditError
from grapnet.core._opened import plain_class
from grapnet.spaces._adopted import Adopted

from ._taps import paths_of

_CONVOLUTIONS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
# Linears of transformers with a forward of their own: the dimension of the weight that has the
# children.
_OTHERS = {"Conv1D": 1, "FalconLinear": 0}


@dataclass(frozen=True)
class Linear:
    """A module that is a Linear or a convolution without groups, and its weight.

    Attributes:
        path: the module.
        name: the weight.
        out_dim: the dimension of the weight that has the children; the other of the first two has
            the parents.
    """

    path: str
    name: str
    out_dim: int

    def module(self, net: Adopted) -> Any:
        """Returns the module."""
        return net.model.get_submodule(self.path)

    def canonical(self, whole: Tensor) -> Tensor:
        """Returns a tensor of the shape of the weight as [out, in, *kernel]."""
        return whole.movedim(self.out_dim, 0)

    def native(self, whole: Tensor) -> Tensor:
        """Returns a tensor [out, in, *kernel] in the layout of the weight."""
        return whole.movedim(0, self.out_dim)


def why_not_linear(net: Adopted, name: str) -> str:
    """Returns why a tensor is not the weight of a Linear or of a convolution that can be recorded;
    empty if it is.
    """
    paths = paths_of(net, [name])
    if len(paths) > 1:
        return f"{name} belongs to several modules: {', '.join(paths)}"
    module: Any = net.model.get_submodule(paths[0])
    kind = type(module).__name__
    is_known = _is_matrix(module) or is_convolution(module)
    if not name.endswith("weight") or not is_known or getattr(module, "groups", 1) != 1:
        groups = f" of {module.groups} groups" if getattr(module, "groups", 1) != 1 else ""
        return (
            f"{name} belongs to a {kind}{groups}, and only Linears and convolutions without groups"
            " that are not transposed are recorded"
        )
    if paths[0] not in net._typed.inputs or paths[0] not in net._typed.outputs:
        return f"{paths[0]} is not called as a module, or not with the same axes each time"
    return ""


def linear_of(net: Adopted, name: str) -> Linear:
    """Returns the module of a weight; raises EditError with the reason if there is none."""
    problem = why_not_linear(net, name)
    if problem:
        raise EditError(problem)
    (path,) = paths_of(net, [name])
    kind = type(net.model.get_submodule(path)).__name__
    return Linear(path, name, _OTHERS.get(kind, 0))


def _is_matrix(module: nn.Module) -> bool:
    kind: Any = plain_class(module)
    is_other = kind.__name__ in _OTHERS and kind.__module__.startswith("transformers.")
    return is_other or kind.forward is nn.Linear.forward


def is_convolution(module: nn.Module) -> bool:
    kind: Any = plain_class(module)
    return kind.forward in _CONVOLUTIONS


def laid_out(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the input of a module as its cells are taken from: [rows, in] of a Linear, [batch,
    in, *image] of a convolution, with its padding.
    """
    if not is_convolution(module):
        return x.reshape(-1, x.shape[-1])
    convolution: Any = module
    x = with_batch(convolution, x)
    mode = convolution.padding_mode
    if mode == "zeros":
        mode = "constant"
    return functional.pad(x, reversed_padding(convolution), mode=mode)


def with_batch(module: nn.Module, tensor: Tensor) -> Tensor:
    """Returns an input or output of a module with one dimension of samples: [rows, nodes] of a
    Linear, [batch, nodes, *image] of a convolution.
    """
    if not is_convolution(module):
        return tensor.reshape(-1, tensor.shape[-1])
    convolution: Any = module
    if tensor.dim() == len(convolution.kernel_size) + 1:
        return tensor.unsqueeze(0)
    return tensor


def cells(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Yields, for each place of the kernel, what its weights are multiplied with, [samples, in].

    A sample is a row of a Linear, which has one place, or a position that a convolution comes to.

    Args:
        module: the module.
        x: its input.
    """
    x = laid_out(module, x)
    if not is_convolution(module):
        yield x
        return
    convolution: Any = module
    kernel = convolution.kernel_size
    # [batch, *image, in], so that the rows of every place are copied in one piece
    x = x.movedim(1, -1).contiguous()
    for place in product(*map(range, kernel)):
        at: list[slice] = [slice(None)]
        for dim, number in enumerate(place):
            # where the kernel is put, and so this place of it
            first = convolution.dilation[dim] * number
            reach = convolution.dilation[dim] * (kernel[dim] - 1)
            stop = first + x.shape[1 + dim] - reach
            at.append(slice(first, stop, convolution.stride[dim]))
        yield x[tuple(at)].reshape(-1, x.shape[-1])


def unfolded(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the cells of every position that a module computes.

    Returns:
        [rows, in] of a Linear, [batch, in · kernel, *image] of a convolution, where the image is
        the one that it returns.

    Args:
        module: the module.
        x: its input.
    """
    x = laid_out(module, x)
    if not is_convolution(module):
        return x
    convolution: Any = module
    kernels = _unit_kernels(convolution, x)  # [kernel, 1, *kernel]
    kernels = kernels.repeat(x.shape[1], *[1] * (kernels.dim() - 1))
    none = [0] * len(convolution.kernel_size)
    return torch.convolution(
        x,
        kernels,
        None,
        list(convolution.stride),
        none,
        list(convolution.dilation),
        False,
        none,
        x.shape[1],
    )


def spread(module: nn.Module, gradient: Tensor, image: Sequence[int]) -> Tensor:
    """Returns what every number of the weight of one parent would send back to that parent.

    The gradient of a parent is the sum of the weights that read it, each times one of these.

    Returns:
        [rows, out] of a Linear, [batch, out · kernel, *image] of a convolution.

    Args:
        module: the module.
        gradient: of its output, as `with_batch` returns it.
        image: the size of the image that a convolution reads, without its padding.
    """
    if not is_convolution(module):
        return gradient
    convolution: Any = module
    kernels = _unit_kernels(convolution, gradient).transpose(0, 1)  # [1, kernel, *kernel]
    kernels = kernels.repeat(gradient.shape[1], *[1] * (kernels.dim() - 1))
    kernel = list(convolution.kernel_size)
    stride = list(convolution.stride)
    dilation = list(convolution.dilation)
    # The padding as [before, after] of every dimension of the image; the module has it reversed.
    flat = reversed_padding(convolution)
    pads = [(flat[2 * d], flat[2 * d + 1]) for d in reversed(range(len(kernel)))]
    left_over = []
    for dim, size in enumerate(image):
        covered = (gradient.shape[2 + dim] - 1) * stride[dim] + dilation[dim] * (kernel[dim] - 1)
        left_over.append(size + sum(pads[dim]) - covered - 1)
    found = torch.convolution(
        gradient,
        kernels,
        None,
        stride,
        [0] * len(kernel),
        dilation,
        True,
        left_over,
        gradient.shape[1],
    )
    for dim, size in enumerate(image):
        found = found.narrow(2 + dim, pads[dim][0], size)
    return found


def _unit_kernels(convolution: Any, like: Tensor) -> Tensor:
    """Returns one kernel for every cell, 1 there and 0 elsewhere, [kernel, 1, *kernel]."""
    kernel = tuple(convolution.kernel_size)
    count = math.prod(kernel)
    return torch.eye(count, dtype=like.dtype, device=like.device).view(count, 1, *kernel)
