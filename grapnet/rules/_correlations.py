"""The recorder of the correlations across a weight of an adopted model, number by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import Expression, covered

from ._activations import Moments, is_new
from ._cells import cells, linear_of, why_not_linear, with_batch
from ._recorder import NetRecorder, plainly
from ._taps import PASS, Tap, following_tap, watch_taps


@dataclass(frozen=True)
class Sides:
    """The two axes of a weight, and the spaces whose nodes they have.

    Attributes:
        children: the axis of the children.
        parents: the axis of the parents.
        atoms: the atoms of the spaces, in the order of the layers of the recorder.
        sizes: the sizes of all atoms.
    """

    children: Expression
    parents: Expression
    atoms: tuple[int, ...]
    sizes: tuple[int, ...]

    def sized(self, sizes: Sequence[int | None]) -> Sides:
        """Returns them with other sizes of the spaces, None for the present one."""
        found = list(self.sizes)
        for atom, size in zip(self.atoms, sizes, strict=True):
            if size is not None:
                found[atom] = size
        return replace(self, sizes=tuple(found))

    def staying(self, axis: Expression, indexes: Sequence[IndexMap | None]) -> Tensor:
        """Returns the positions of an axis that stay when nodes leave."""
        leaving = {}
        for atom, index in zip(self.atoms, indexes, strict=True):
            if index is not None:
                leaving[atom] = np.zeros(index.old_size, np.bool_)
                leaving[atom][index.removed.cpu().numpy()] = True
        return torch.from_numpy(np.flatnonzero(~covered(axis, leaving, self.sizes)))


@dataclass(eq=False)
class CellSums:
    """Sums over samples of how children and what they sum over are apart from their origins.

    What one number of the weight is multiplied with depends on its place in the kernel; a Linear
    has one place.
    """

    children: Moments  # of [out]
    cells: list[Moments]  # of [in], for each place of the kernel
    products: Tensor  # [places, out, in] float64, Σ (h - origin)(x - origin)

    @classmethod
    def of(cls, module: nn.Module, x: Tensor, h: Tensor) -> CellSums:
        """Returns those of no samples.

        Args:
            module: the module.
            x: its input.
            h: its children, [samples, out].
        """
        found = [Moments.of(rows) for rows in cells(module, x)]
        n_in = len(found[0].counts)
        return cls(Moments.of(h), found, h.new_zeros(len(found), h.shape[1], n_in))

    def see(self, module: nn.Module, x: Tensor, h: Tensor) -> None:
        """Adds a batch, given as in `of`."""
        apart = self.children.see(h)
        for place, rows in enumerate(cells(module, x)):
            self.products[place].addmm_(apart.t(), self.cells[place].see(rows))

    def correlation(self, samples: int) -> Tensor:
        """Returns the correlations, [out, in, places]; exactly 0 where a variance is 0."""
        mean = self.children.first / samples
        scale = _inverse(self.children.variance)
        found = []
        for place, moments in enumerate(self.cells):
            part = self.products[place] / samples - torch.outer(mean, moments.first / samples)
            found.append(part * torch.outer(scale, _inverse(moments.variance)))
        return torch.stack(found, 2).clamp_(-1, 1)

    def chosen(self, out: Tensor, into: Tensor) -> CellSums:
        """Returns those of some children and parents."""
        moments = [part.chosen(into) for part in self.cells]
        return CellSums(self.children.chosen(out), moments, self.products[:, out][:, :, into])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> CellSums:
        """Returns them with every tensor changed."""
        moments = [part.mapped(change) for part in self.cells]
        return CellSums(self.children.mapped(change), moments, change(self.products))

    def state_dict(self) -> dict[str, Any]:
        """Returns them as tensors, [places, in] of cells."""
        stacked = {}
        for name in vars(self.children):
            stacked[name] = torch.stack([getattr(part, name) for part in self.cells])
        return {"children": dict(vars(self.children)), "cells": stacked, "products": self.products}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> CellSums:
        """Returns what `state_dict` returned, as independent copies."""
        moments = []
        for place in range(len(state["products"])):
            own = {name: part[place].clone() for name, part in state["cells"].items()}
            moments.append(Moments(**own))
        return cls(Moments(**state["children"]).copied(), moments, state["products"].clone())


@dataclass(eq=False)
class Covariations:
    """What a TensorCorrelationRecorder has seen."""

    sides: Sides
    samples: int = 0
    sums: CellSums | None = None

    def see(self, module: nn.Module, x: Tensor, h: Tensor) -> None:
        """Adds a batch: the input of a module, and its children where it returns them."""
        x = x.double()
        h = with_batch(module, h.double()).movedim(1, -1)
        h = h.reshape(-1, h.shape[-1])  # [samples, out]
        if self.sums is None:
            self.sums = CellSums.of(module, x, h)
        elif self.sums.products.device != h.device:
            self.sums = self.sums.mapped(lambda tensor: tensor.to(h.device))
        self.sums.see(module, x, h)
        self.samples += len(h)

    def carried(self, *indexes: IndexMap | None) -> Covariations:
        """Returns what is left after nodes have come or gone: nothing, once some have come."""
        sides = self.sides.sized([index and index.new_size for index in indexes])
        if any(index is not None and len(index.inserted) for index in indexes):
            return Covariations(sides)
        if self.sums is None:
            return Covariations(sides, self.samples)
        device = self.sums.products.device
        out = self.sides.staying(self.sides.children, indexes).to(device)
        into = self.sides.staying(self.sides.parents, indexes).to(device)
        return Covariations(sides, self.samples, self.sums.chosen(out, into))

    def copied(self) -> Covariations:
        """Returns an independent copy."""
        copied = None if self.sums is None else self.sums.mapped(Tensor.clone)
        return Covariations(self.sides, self.samples, copied)

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        sums = None if self.sums is None else self.sums.state_dict()
        return {"samples": self.samples, "sums": sums}


def _inverse(variance: Tensor) -> Tensor:
    """Returns 1 over the standard deviation, 0 where that is 0."""
    scale = variance.sqrt()
    return torch.where(scale > 0, 1 / scale, 0)


class TensorCorrelationRecorder(NetRecorder[Covariations]):
    """Records the correlation across every number of a weight of an adopted model.

    That is the correlation between what the number is multiplied with, and the child where it is
    read next, behind norms and activations. Where it is pooled or flattened before, the output of
    the module counts instead. Every position that a kernel comes to, and every token, is a sample.
    Relations that were cut are recorded like the others. Evidence follows the removal of nodes,
    and starts over when nodes are added.

    Args:
        net: the adopted model.
        transition: the number of the tensor in `net.transitions`; the weight of a Linear, or of a
            convolution without groups.
        window: the number of steps that it records before its rule is due.

    Raises:
        EditError: the tensor is of another kind.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> net = gn.adopt(model, torch.randn(2, 3, 9, 9))
        >>> recorder = TensorCorrelationRecorder(net, 0)
        >>> recorder.arm(net)
        >>> _ = model(torch.randn(2, 3, 9, 9))
        >>> recorder.count, recorder.correlation().shape, recorder.strengths().shape
        (98, torch.Size([8, 3, 3, 3]), torch.Size([3, 8]))
    """

    def __init__(self, net: Adopted, transition: int, *, window: int = 1) -> None:
        weight = net.transitions[transition]
        problem = why_not_recorded(net, transition)
        if problem:
            raise EditError(f"there are no correlations across {weight.name}: {problem}")
        layers = []
        for number, space in enumerate(net.spaces):
            if any(tensor == weight.name for tensor, _ in space._members):
                layers.append(number)
        super().__init__(tuple(layers), window)
        self.transition = transition
        self._linear = linear_of(net, weight.name)
        self._kernel = weight.grid.shape[2:]
        axes = net._typed.axes[weight.name]
        atoms = tuple(net.spaces[number]._atom for number in layers)
        out_dim = self._linear.out_dim
        sizes = tuple(net._atom_sizes())
        self._sides = Sides(axes[out_dim], axes[1 - out_dim], atoms, sizes)
        self._taps: list[Tap] = []
        # the inputs of the module in the pass under way whose children were not read yet
        self._inputs: list[Tensor] = []

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return 0 if self._evidence is None else self._evidence.samples

    def correlation(self) -> Tensor:
        """Returns the correlations in the shape of the weight, float64; exactly 0 where a variance
        is 0.
        """
        seen = self._seen()
        if seen.sums is None:
            raise GrapNetError(
                "this TensorCorrelationRecorder has seen nothing since nodes were added"
            )
        found = seen.sums.correlation(seen.samples)
        return self._linear.native(found.reshape(*found.shape[:2], *self._kernel))

    def strengths(self) -> Tensor:
        """Returns the |correlation| of every pair of nodes, [parents, children]; of a relation with
        several numbers it is the root of their mean square.
        """
        weight: Any = self.net.transitions[self.transition]
        return weight.norms(self.correlation()) / weight._payload**0.5

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        self._taps = _taps(net, self.transition)
        return watch_taps(self, net, [PASS, *self._taps])

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return ()

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Does nothing: taps watch instead."""

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the module, and then what its children become."""
        if place == 0:
            self._inputs = []
            return
        if not is_new(tensor):
            return
        if place == 1:
            # The model may write into it before the children are read.
            self._inputs.append(tensor.detach().clone())
            return
        if not self._inputs:
            return
        x = self._inputs.pop(0)
        net: Any = self.net
        module = self._linear.module(net)
        with plainly(tensor.device):
            seen = self._writable(self._nothing)
            seen.see(module, x, tensor.detach())

    def _nothing(self) -> Covariations:
        net = self.net
        sizes = [len(net.layers[number]) for number in self._numbers(net)]
        return Covariations(self._sides.sized(sizes))

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> Covariations:
        restored = Covariations(self._sides.sized(sizes), seen["samples"])
        if seen["sums"] is not None:
            restored.sums = CellSums.restored(seen["sums"])
        return restored

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inputs": []}


def why_not_recorded(net: Adopted, transition: int) -> str:
    """Returns why no correlations across a weight can be recorded; empty if they can."""
    weight = net.transitions[transition]
    problem = why_not_linear(net, weight.name)
    if not problem and len(_taps(net, transition)) < 2:
        problem = "its module does not return the children as such"
    return problem


def _taps(net: Adopted, transition: int) -> list[Tap]:
    """Returns the input of the module of a weight, and where its children are recorded."""
    weight = net.transitions[transition]
    linear = linear_of(net, weight.name)
    inputs = net._typed.inputs[linear.path]
    found = [Tap(linear.path, "in", -1, tuple(inputs))]
    children = following_tap(net, net.spaces[weight.target], linear.path)
    if children is not None:
        found.append(children)
    return found
