"""Costs of a model as a function of the sizes of its spaces: Parameters, multiply-adds, latency.

A twin of the model runs once and every matrix product, convolution and attention notes the axes
over which it multiplies. Axes are expressions over spaces, so the number of multiply-adds after an
edit is arithmetic, and no model is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from grapnet.core._errors import EditError

from ._axes import Axis, Expression, Numbers, atoms_of, size_of
from ._discovery import Example, _run, make_twin
from ._probe import copy_without
from ._typing import Typing

if TYPE_CHECKING:
    from ._adopted import Adopted

# Runs of a copy that are timed, after some that are not.
REPEATS = 9
WARM_UP = 2

Product = tuple[Axis, ...]  # the axes over which an operation multiplies and adds
# Products with a vector and of two matrices: which argument is the left factor.
_VECTORS = {"mv": 0, "dot": 0, "vdot": 0, "addmv": 1}
_MATRICES = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_addmm_activation"), 1),
}


def _products(typing: Typing, name: str, args: tuple[Any, ...], out: Any) -> list[Product]:
    """Returns the axes of the products of one operation; most have none."""
    if name in _VECTORS:
        return [tuple(typing.of(args[_VECTORS[name]]))]
    if name in _MATRICES:
        # [..., n, k] times [..., k, m]
        left = _MATRICES[name]
        return [(*typing.of(args[left]), typing.of(args[left + 1])[-1])]
    if name == "linear":
        return [(*typing.of(args[0]), typing.of(args[1])[0])]
    if name in ("convolution", "_convolution", "convolution_overrideable"):
        # The whole weight for every position of the output; of the input, if it is transposed.
        placed = args[0] if args[6] else out
        batch, _, *positions = typing.of(placed)
        return [(*typing.of(args[1]), batch, *positions)]
    if "scaled_dot_product" in name:
        # Queries [..., n, d] with keys [..., m, d], and the result with values [..., m, e].
        *rows, inner = typing.of(args[0])
        columns = typing.of(args[1])[-2]
        return [(*rows, columns, inner), (*rows, columns, typing.of(args[2])[-1])]
    return []


class _Counting(Typing):
    """A typing that also notes the products of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.is_counting = False
        self.products: list[Product] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.is_counting:
            name = func._schema.name.rpartition("::")[2]
            self.products += _products(self, name, args, out)
        return out


class Costs:
    """What a model costs, for any sizes of its atoms.

    Args:
        tensors: the axes of every Parameter.
        scalars: the number of Parameters without an axis.
        products: the axes of every product, over atoms of their own.
        atoms: for each of these own atoms its size, and the atom of the model that it is, or None.
        single: atoms of the model that had one index, which broadcasts, and so are in no product.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[Expression, ...]],
        scalars: int,
        products: Iterable[tuple[Expression, ...]],
        atoms: Sequence[tuple[int, int | None]],
        single: Iterable[int],
    ) -> None:
        self._tensors = list(tensors)
        self._scalars = scalars
        self._products = list(products)
        self._atoms = list(atoms)
        self._single = list(single)

    def holds_for(self, sizes: Sequence[int]) -> bool:
        """Returns whether these costs are known for some sizes."""
        return all(sizes[atom] == 1 for atom in self._single)

    def parameters(self, sizes: Sequence[int]) -> int:
        """Returns the number of weights, frozen ones included."""
        total = self._scalars
        for axes in self._tensors:
            total += prod(size_of(axis, sizes) for axis in axes)
        return total

    def macs(self, sizes: Sequence[int]) -> int:
        """Returns the multiply-adds of one forward pass of the first example."""
        own = []
        for size, atom in self._atoms:
            own.append(size if atom is None else sizes[atom])
        total = 0
        for axes in self._products:
            total += prod(size_of(axis, own) for axis in axes)
        return total


def measured(net: Adopted) -> Costs:
    """Returns the costs of a model, from one run of a twin of it.

    Raises:
        EditError: the model runs with other axes than when it was adopted.
    """
    typing = _Counting()
    for training in net._typed.modes:
        for number, example in enumerate(net._gates.examples):
            typing.is_counting = number == 0 and not typing.products
            _run_twin(net.model, typing, example, training)
    sizes = net._atom_sizes()
    numbers = Numbers()
    known: dict[int, int] = {}
    for name, axes in typing.named.items():
        for axis, expression in zip(axes, net._typed.axes[name], strict=True):
            # What has the same name and axis is the same atom, in the same order.
            expressions = atoms_of(numbers.frozen(axis))
            leaves = list(numbers)
            own = [atom for atom in expressions if leaves[atom].size > 1]
            theirs = [atom for atom in atoms_of(expression) if sizes[atom] > 1]
            if len(own) != len(theirs):
                raise EditError(
                    f"the operations of the model cannot be counted: {name} has other axes than"
                    " when it was adopted"
                )
            known.update(zip(own, theirs, strict=True))
    products = []
    for axes in typing.products:
        products.append(tuple(numbers.frozen(axis) for axis in axes))
    tensors = []
    scalars = 0
    for name, grid in net._stores().items():
        if name in net._typed.axes:
            tensors.append(net._typed.axes[name])
        else:
            scalars += prod(grid.shape)
    atoms = [(leaf.size, known.get(number)) for leaf, number in numbers.items()]
    single = [atom for atom, size in enumerate(sizes) if size == 1]
    return Costs(tensors, scalars, products, atoms, single)


def _run_twin(model: nn.Module, typing: _Counting, example: Example, training: bool) -> None:
    """Runs a twin of the model, or one with contents where it cannot run without."""
    before = len(typing.products)
    twin = make_twin(model)
    try:
        _run(twin, typing, twin.imitate(example), training)
    except Exception:
        del typing.products[before:]
        _run(make_twin(model, real=True), typing, example, training)


def latency(net: Adopted, leaving: Mapping[int, np.ndarray]) -> float:
    """Returns the seconds of a forward pass of the first example without some nodes.

    A copy of the model runs in evaluation mode, without gradients, where the model is: the
    fastest of a few runs after a warm-up, since other work on the machine only ever adds time.

    Args:
        net: the adopted model.
        leaving: the rows of the nodes to leave out, by atom.

    Raises:
        EditError: the model cannot run without these nodes.
    """
    model, _, _ = copy_without(net, leaving, _shared)
    model.eval()
    example = net._gates.examples[0]
    wait: Callable[[], None] = _nothing
    if net.device.type == "cuda":
        wait = torch.cuda.synchronize
    times = []
    with torch.no_grad():
        for run in range(WARM_UP + REPEATS):
            wait()
            start = time.perf_counter()
            model(*example.args, **example.kwargs)
            wait()
            if run >= WARM_UP:
                times.append(time.perf_counter() - start)
    return min(times)


def _nothing() -> None:
    """Waits for nothing: a CPU has finished when a call returns."""


def _shared(tensor: Tensor, content: Tensor) -> Tensor:
    """Returns the content for a copy that only reads Parameters, but may write buffers."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(content, requires_grad=False)
    return content.clone()
