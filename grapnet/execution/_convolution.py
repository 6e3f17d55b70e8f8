"""Sparse convolutions on a CPU: the kernels of the sparse backend over shifted images.

Padded images lie channel by channel, one sample behind the other, so that a cell of a kernel reads
a channel that begins some places later. What is computed at places where the kernel would leave its
image is left out of the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from grapnet.core._transition import Topology

from . import _native
from ._plan import needs_plain_operations


@dataclass(frozen=True, eq=False)
class Kernels:
    """The relations of a convolution, cell by cell.

    Attributes:
        shape: the shape of the weight, [written, read, *kernel].
        by_writer: from every channel that is written to the cells that it reads, which are numbered
            channel by channel.
        by_reader: from every channel that is read to the cells that read it, in the same way.
        order: the kernels in the order of the channels that they read, [kernels] int64.
        back: the way back.
    """

    shape: tuple[int, ...]
    by_writer: Topology
    by_reader: Topology
    order: Tensor
    back: Tensor

    @classmethod
    def of(cls, live: np.ndarray, shape: tuple[int, ...]) -> "Kernels":
        """Returns the relations of a weight, of which `live` has one bool per kernel."""
        writer, reader = np.nonzero(live)
        order = np.argsort(reader, kind="stable")
        cells = math.prod(shape[2:])
        return cls(
            shape,
            _by_cell(writer, reader, cells, shape[:2]),
            _by_cell(reader[order], writer[order], cells, shape[1::-1]),
            torch.from_numpy(order),
            torch.from_numpy(np.argsort(order)),
        )

    @property
    def n_cells(self) -> int:
        """The number of cells that exist."""
        return self.by_writer.n_relations


def _by_cell(
    parents: np.ndarray, children: np.ndarray, cells: int, sizes: Sequence[int]
) -> Topology:
    """Returns the wiring of kernels, sorted by parent, to their cells."""
    ptr = np.zeros(sizes[0] + 1, dtype=np.int32)
    np.cumsum(np.bincount(parents, minlength=sizes[0]) * cells, out=ptr[1:])
    child = (children[:, None] * cells + np.arange(cells)).reshape(-1).astype(np.int32)
    return Topology(torch.from_numpy(ptr), torch.from_numpy(child), sizes[1] * cells)


@dataclass(frozen=True, eq=False)
class Frame:
    """The places of a batch of padded images, and where in them the result is.

    Attributes:
        batch: the number of images.
        padded: the sizes of a padded image.
        padding: the rows before and behind an image, in every dimension.
        written: the sizes of the result.
        shifts: where each cell of a kernel reads, in places, [cells] int32.
    """

    batch: int
    padded: tuple[int, ...]
    padding: tuple[int, ...]
    written: tuple[int, ...]
    shifts: Tensor

    @classmethod
    def of(
        cls,
        x: Tensor,
        kernel: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> "Frame":
        """Returns the frame of a convolution without strides."""
        sizes = x.shape[2:]
        padded = tuple(size + 2 * more for size, more in zip(sizes, padding, strict=True))
        reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        written = tuple(size - more for size, more in zip(padded, reach, strict=True))
        strides = [math.prod(padded[dim + 1 :]) for dim in range(len(padded))]
        shifts = []
        for cell in product(*map(range, kernel)):
            steps = zip(cell, dilation, strides, strict=True)
            shifts.append(sum(at * step * stride for at, step, stride in steps))
        found = torch.tensor(shifts, dtype=torch.int32)
        return cls(x.shape[0], padded, tuple(padding), written, found)

    @property
    def places(self) -> int:
        """The number of places of a channel."""
        return self.batch * math.prod(self.padded)

    @property
    def slack(self) -> int:
        """How many places the last cell reads behind the first."""
        return int(self.shifts[-1])

    def read(self, images: Tensor, first: Sequence[int], slack: int) -> tuple[Tensor, Tensor]:
        """Returns images, [batch, channels, *sizes], channel by channel with zeros around them: all
        of the memory, with some places more, and the places [channels, batch, *padded].

        Args:
            images: the images.
            first: where an image begins in its padded one.
            slack: how many places stand before those of the first channel.
        """
        channels = images.shape[1]
        size = channels * self.places
        memory = _native.room(images.new_empty(0), size + self.slack).zero_()
        places = memory[slack : slack + size].view(channels, self.batch, *self.padded)
        inside = self._inside(places, first, images.shape[2:])
        inside.copy_(images.transpose(0, 1))
        return memory, places

    def images(self, places: Tensor, first: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Returns the images in the places of channels, [channels, places]."""
        places = places.view(-1, self.batch, *self.padded)
        return self._inside(places, first, sizes).transpose(0, 1).contiguous()

    def _inside(self, places: Tensor, first: Sequence[int], sizes: Sequence[int]) -> Tensor:
        for dim, (start, size) in enumerate(zip(first, sizes, strict=True)):
            places = places.narrow(dim + 2, start, size)
        return places


def convolved(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    kernels: Kernels,
    frame: Frame,
    plain: Callable[..., Tensor],
) -> Tensor:
    """Returns the convolution of x [batch, channels, *sizes] with some kernels.

    Args:
        x: the images.
        values: the kernels that exist, [kernels, cells].
        bias: one per channel that is written.
        kernels: between which channels they are.
        frame: the places of the images.
        plain: computes the same from x, values and bias by operations of torch, for derivatives of
            derivatives and batches of gradients.
    """
    return _Convolved.apply(x, values, bias, kernels, frame, plain)


class _Convolved(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        kernels: Kernels,
        frame: Frame,
        plain: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, values, bias)
        ctx.plan = kernels, frame, plain
        wiring = kernels.by_writer
        shifted = _shifted(frame.read(x, frame.padding, 0)[0], frame, frame.shifts)
        z = _native.sum_of_shifted(shifted, values.view(-1), bias, wiring.ptr, wiring.child)
        return frame.images(z, (0,) * len(frame.written), frame.written)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dz,) = gradients
        x, values, _ = ctx.saved_tensors
        kernels, frame, plain = ctx.plan
        for_x, for_values, for_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or needs_plain_operations(dz):
            return *_plain_gradients(ctx, dz, plain), None, None, None
        dx = dw = dbias = None
        zeros = (0,) * len(frame.written)
        # The cells of a kernel read behind a place, so their gradients come from places before it.
        memory, places = frame.read(dz, zeros, frame.slack)
        if for_x:
            wiring = kernels.by_reader
            turned = values.index_select(0, kernels.order).view(-1)
            shifted = _shifted(memory, frame, frame.slack - frame.shifts)
            found = _native.sum_of_shifted(shifted, turned, None, wiring.ptr, wiring.child)
            dx = frame.images(found, frame.padding, x.shape[2:])
        if for_values:
            wiring = kernels.by_writer
            shifted = _shifted(frame.read(x, frame.padding, 0)[0], frame, frame.shifts)
            dw = _native.weights_of_shifted(shifted, places, wiring.ptr, wiring.child)
            dw = dw.view(values.shape).to(values.dtype)
        if for_bias:
            dbias = dz.sum([0, *range(2, dz.dim())])
        return dx, dw, dbias, None, None, None


def _shifted(memory: Tensor, frame: Frame, shifts: Tensor) -> _native.Shifted:
    return _native.Shifted(memory, shifts, frame.places, frame.places)


def _plain_gradients(ctx: Any, dz: Tensor, plain: Callable[..., Tensor]) -> list[Tensor | None]:
    """Returns the gradients by operations of torch, which have derivatives themselves."""
    inputs = ctx.saved_tensors
    wanted = []
    for needed, tensor in zip(ctx.needs_input_grad[:3], inputs, strict=True):
        if needed:
            wanted.append(tensor)
    creates = torch.is_grad_enabled()
    with torch.enable_grad():
        z = plain(*inputs)
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=creates))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
