"""Recorders of what criteria need: inputs of weights, squared gradients per sample, and activations
times gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._torch import current_graph_task_id
from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap
from grapnet.core._layer import LiveNodes
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import positions

from ._activations import is_new
from ._cells import (
    Linear,
    cells,
    is_convolution,
    linear_of,
    unfolded,
    why_not_linear,
    with_batch,
)
from ._correlations import Sides
from ._gradients import BackwardRecorder, GradientRecorder, TensorGradients, has_finite_product
from ._recorder import NetRecorder, layer_of, plainly
from ._rule import as_names
from ._taps import Tap, tap_of, watch_taps

# Numbers of gradients of single samples that are computed at a time.
CELLS = 2**24


@dataclass(eq=False)
class CellSquares:
    """What an InputRecorder has seen: sums of squares over samples."""

    sides: Sides
    samples: int = 0
    total: Tensor | None = None  # [places of the kernel, in] float64

    def see(self, module: nn.Module, x: Tensor) -> None:
        """Adds the input of a module."""
        squares = []
        rows = 0
        for part in cells(module, x):
            rows = len(part)
            squares.append(part.double().square().sum(0))
        found = torch.stack(squares)
        if self.total is None:
            self.total = torch.zeros_like(found)
        self.total = self.total.to(found.device).add_(found)
        self.samples += rows

    def carried(self, *indexes: IndexMap | None) -> CellSquares:
        """Returns what is left after nodes have come or gone: nothing, once some have come."""
        sides = self.sides.sized([index and index.new_size for index in indexes])
        if any(index is not None and len(index.inserted) for index in indexes):
            return CellSquares(sides)
        if self.total is None:
            return CellSquares(sides, self.samples)
        into = self.sides.staying(self.sides.parents, indexes).to(self.total.device)
        return CellSquares(sides, self.samples, self.total[:, into])

    def copied(self) -> CellSquares:
        """Returns an independent copy."""
        total = None if self.total is None else self.total.clone()
        return CellSquares(self.sides, self.samples, total)

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        return {"samples": self.samples, "total": self.total}


class InputRecorder(NetRecorder[CellSquares]):
    """Records the mean square of what every number of a weight of an adopted model is multiplied
    with.

    Of a Linear that is its input; of a convolution it is what each place of the kernel comes to.
    Every position and every token is a sample. Evidence follows the removal of nodes, and
    starts over when nodes are added.

    Args:
        net: the adopted model.
        transition: the number of the tensor in `net.transitions`; the weight of a Linear, or of a
            convolution without groups.
        window: the number of steps that it records before its rule is due.

    Raises:
        EditError: the tensor is of another kind.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> net = gn.adopt(model, torch.randn(4, 2))
        >>> recorder = InputRecorder(net, 0)
        >>> recorder.arm(net)
        >>> _ = model(torch.tensor([[3.0, 1.0], [-3.0, 0.0]]))
        >>> recorder.count, recorder.mean_squares()[0].tolist()
        (2, [9.0, 0.5])
    """

    def __init__(self, net: Adopted, transition: int, *, window: int = 1) -> None:
        name = net.transitions[transition].name
        self._linear = linear_of(net, name)
        layers = []
        for number, space in enumerate(net.spaces):
            if any(tensor == name for tensor, _ in space._members):
                layers.append(number)
        super().__init__(tuple(layers), window)
        self.transition = transition
        self._kernel = net.transitions[transition].grid.shape[2:]
        axes = net._typed.axes[name]
        atoms = tuple(net.spaces[number]._atom for number in layers)
        out_dim = self._linear.out_dim
        sizes = tuple(net._atom_sizes())
        self._sides = Sides(axes[out_dim], axes[1 - out_dim], atoms, sizes)

    @property
    def count(self) -> int:
        """How many samples were seen."""
        return 0 if self._evidence is None else self._evidence.samples

    def mean_squares(self) -> Tensor:
        """Returns the mean squares in the shape of the weight, float64; the same ones for every
        child.
        """
        seen = self._seen()
        if seen.total is None:
            raise GrapNetError("this InputRecorder has seen nothing since nodes were added")
        net: Any = self.net
        found = (seen.total / seen.samples).t()  # [in, places]
        shape = self._linear.canonical(net._grids()[self._linear.name].whole).shape
        return self._linear.native(found.reshape(1, -1, *self._kernel).expand(shape))

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        return watch_taps(self, net, [Tap(self._linear.path, "in", -1, ())])

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return ()

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Does nothing: taps watch instead."""

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the module."""
        if not is_new(tensor):
            return
        net: Any = self.net
        with plainly(tensor.device):
            self._writable(self._nothing).see(self._linear.module(net), tensor.detach())

    def _nothing(self) -> CellSquares:
        net = self.net
        return CellSquares(self._sides.sized([len(net.layers[n]) for n in self._numbers(net)]))

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> CellSquares:
        total = None if seen["total"] is None else seen["total"].clone()
        return CellSquares(self._sides.sized(sizes), seen["samples"], total)


class FisherRecorder(GradientRecorder):
    """Records F_ij = Σ (h_i · dL/dz_j)² over the rows of the batch for all pairs of nodes of two
    layers of a net.

    A sample is a row of the batch, so that h_i · dL/dz_j is the gradient of the relation for this
    sample alone, as far as rows do not influence each other. With a loss that is a mean, it is the
    gradient of the sample's share in it. F is averaged over the recorded backward passes. It
    records what a `GradientRecorder` records, and reads alike: `of`, `matrix`.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([2, 1])
        >>> recorder = FisherRecorder(0)
        >>> recorder.arm(net)
        >>> net(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).sum().backward()
        >>> recorder.matrix().tolist()
        [[10.0], [4.0]]
    """

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        (h,) = seen
        dtype = torch.promote_types(torch.promote_types(h.dtype, gradient.dtype), torch.float32)
        with plainly(gradient.device):
            super()._record(gradient.to(dtype).square(), h.to(dtype).square())


class TensorFisherRecorder(BackwardRecorder[TensorGradients]):
    """Records the sum over samples of the squared gradient of every number of a weight of an
    adopted model.

    A sample is an entry of the first dimension of what the module receives: a row of the batch,
    with all its positions and tokens. F is averaged over the recorded backward passes; each call of
    a module counts by itself. Nodes that come or go let it begin anew. Gradients that are not
    finite are left out and counted (`left_out`).

    Args:
        net: the adopted model.
        transition: the number of the tensor in `net.transitions`; the weight of a Linear, or of a
            convolution without groups.
        window: the number of steps that it records before its rule is due.

    Raises:
        EditError: the tensor is of another kind.
    """

    def __init__(self, net: Adopted, transition: int, *, window: int = 1) -> None:
        name = net.transitions[transition].name
        self._linear: Linear = linear_of(net, name)
        layers = []
        for number, space in enumerate(net.spaces):
            if any(tensor == name for tensor, _ in space._members):
                layers.append(number)
        super().__init__(tuple(layers), window)
        self.transition = transition
        self._input: Tensor | None = None  # of the module in the call under way

    def fisher(self) -> Tensor:
        """Returns F in the shape of the weight, relations that were cut included."""
        seen = self._seen()
        if seen.total is None:
            raise GrapNetError(
                "this TensorFisherRecorder has seen nothing since the nodes of its tensor changed"
            )
        return seen.total / seen.count

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        path = self._linear.path
        self._input = None
        return watch_taps(self, net, [Tap(path, "in", -1, ()), Tap(path, "out", -1, ())])

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return ()

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Does nothing: taps watch instead."""

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the module, and waits for the gradient of its output."""
        if not torch.is_grad_enabled():
            return
        if place == 0:
            # The model may write into it before the backward pass.
            self._input = tensor.detach().clone()
            return
        x = self._input
        self._input = None
        if x is not None and tensor.requires_grad:
            tensor.register_hook(self._receiver(x))

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        (x,) = seen
        net: Any = self.net
        dtype = torch.promote_types(torch.promote_types(x.dtype, gradient.dtype), torch.float32)
        with plainly(gradient.device):
            x = x.to(dtype)
            gradient = gradient.to(dtype)
            if not has_finite_product(x, gradient):
                self.left_out += 1
                return
            squares = squared_gradients(self._linear.module(net), x, gradient)
            shape = self._linear.canonical(net._grids()[self._linear.name].whole).shape
            whole = self._linear.native(squares.reshape(shape)).contiguous()
            self._writable(TensorGradients).see(whole, current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> TensorGradients:
        total = None if seen["total"] is None else seen["total"].clone()
        return TensorGradients(total, seen["count"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_input": None}


def squared_gradients(module: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the sum over samples of the squared gradients of a weight, [out, in · kernel].

    Args:
        module: a Linear or a convolution.
        x: its input, whose first dimension has the samples.
        gradient: of its output.
    """
    if is_convolution(module):
        x = with_batch(module, x)
        gradient = with_batch(module, gradient)
    elif x.dim() == 1:
        x = x.unsqueeze(0)
        gradient = gradient.unsqueeze(0)
    total = None
    # Unfolding a convolution's input multiplies its size.
    step = max(1, CELLS // max(1, 32 * x[0].numel()))
    for start in range(0, len(x), step):
        above = x[start : start + step]
        below = gradient[start : start + step]
        if is_convolution(module):
            above = unfolded(module, above).movedim(1, -1)
            below = below.movedim(1, -1)
        found = _sum_of_squares(_by_sample(above), _by_sample(below))
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _by_sample(table: Tensor) -> Tensor:
    """Returns [samples, …, nodes] as [samples, positions, nodes]."""
    return table.reshape(len(table), -1, table.shape[-1])


def _sum_of_squares(above: Tensor, below: Tensor) -> Tensor:
    """Returns Σ over samples of (belowᵀ·above)², of [samples, positions, in] and [samples,
    positions, out].
    """
    if above.shape[1] == 1:
        # of one position the square of the product is the product of the squares
        return below.squeeze(1).square().t() @ above.squeeze(1).square()
    total = above.new_zeros(below.shape[2], above.shape[2])
    step = max(1, CELLS // max(1, total.numel()))
    for start in range(0, len(above), step):
        part = slice(start, start + step)
        each = torch.bmm(below[part].transpose(1, 2), above[part])  # [samples, out, in]
        total += each.square_().sum(0)
    return total


@dataclass(eq=False)
class NodeSums:
    """What a SaliencyRecorder has seen: a sum over samples for each node."""

    total: Tensor  # [n] float64
    samples: int = 0
    count: int = 0  # of backward passes
    task: int = -1  # which backward pass was the last

    def see(self, saliency: Tensor, task: int) -> None:
        """Adds |a·g| of a batch, [batch, n]."""
        self.total = self.total.to(saliency.device).add_(saliency.double().sum(0))
        self.samples += len(saliency)
        self.count += task != self.task
        self.task = task

    def carried(self, *indexes: IndexMap | None) -> NodeSums:
        """Returns them after rows moved; newborn nodes have 0."""
        (index,) = indexes
        total = self.total if index is None else index.carry(self.total)
        return NodeSums(total, self.samples, self.count, self.task)

    def copied(self) -> NodeSums:
        """Returns an independent copy."""
        return NodeSums(self.total.clone(), self.samples, self.count, self.task)

    def state_dict(self) -> dict[str, Any]:
        """Returns them as numbers and tensors."""
        return {"total": self.total, "samples": self.samples, "count": self.count}


class SaliencyRecorder(BackwardRecorder[NodeSums]):
    """Records |a·dL/da| of every node of a layer or of a space, averaged over samples.

    That is how much the loss changes, in first order, if the node is set to 0. Where a node has
    several positions or tokens in a sample, a·dL/da is summed over them first; a sample is a row
    of the batch. In an adopted model it records where `ActivationRecorder` does. Forward passes
    from before an edit or before `arm` do not count. Gradients that are not finite are left out and
    counted (`left_out`).

    Args:
        layer: the number of a layer behind the input; of an adopted model, the space or its name.
        window: the number of steps that it records before its rule is due.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([2, 3, 1])
        >>> recorder = SaliencyRecorder(1)
        >>> recorder.arm(net)
        >>> net(torch.randn(8, 2)).sum().backward()
        >>> recorder.count, recorder.saliency().shape
        (1, torch.Size([3]))
    """

    def __init__(self, layer: int | str | LiveNodes, *, window: int = 1) -> None:
        names = as_names(layer)
        assert names
        super().__init__((names[0],), window)
        self.layer = names[0]
        self._taps: list[Tap] = []  # of an adopted model

    def saliency(self) -> Tensor:
        """Returns the mean |a·dL/da| of every node, [n] float64."""
        seen = self._seen()
        return seen.total / max(1, seen.samples)

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        if not isinstance(net, Adopted):
            return super()._watch(net)
        self._taps = [tap_of(net, net.spaces[layer_of(net, self.layer)])]
        return watch_taps(self, net, self._taps)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return [net.layers[layer_of(net, self.layer)]]

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(self._receiver(output.detach()))

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Waits for the gradient of the activations of a space."""
        self._observe(place, (), tensor)

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        (activations,) = seen
        with plainly(gradient.device):
            product = activations.double() * gradient.double()
            if not bool(product.isfinite().all()):
                self.left_out += 1
                return
            saliency = self._by_node(product).abs()
            n_nodes = saliency.shape[1]
            sums = self._writable(
                lambda: NodeSums(torch.zeros(n_nodes, dtype=torch.float64, device=product.device))
            )
            sums.see(saliency, current_graph_task_id())

    def _by_node(self, product: Tensor) -> Tensor:
        """Returns the sum over the positions of every node in every sample, [batch, n]."""
        net: Any = self.net
        if not isinstance(net, Adopted):
            return product
        tap = self._taps[0]
        space = net.spaces[layer_of(net, self.layer)]
        at = torch.from_numpy(positions(tap.axes[tap.dim], space._atom, net._atom_sizes()))
        table = product.movedim(tap.dim, -1)
        if table.dim() > 2:
            table = table.flatten(1, -2).sum(1)
        elif table.dim() == 1:
            table = table.unsqueeze(0)
        return table[:, at.to(table.device)].sum(2)  # [batch, nodes, positions of a node]

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> NodeSums:
        return NodeSums(seen["total"].clone(), seen["samples"], seen["count"])


def why_no_inputs(net: Graph, transition: int) -> str:
    """Returns why what a transition reads cannot be recorded number by number; empty if it can."""
    if not isinstance(net, Adopted):
        return ""
    return why_not_linear(net, net.transitions[transition].name)


def why_no_activations(net: Graph, layer: int) -> str:
    """Returns why the activations of a layer or space cannot be recorded; empty if they can."""
    if not isinstance(net, Adopted):
        return ""
    try:
        tap_of(net, net.spaces[layer])
    except (GrapNetError, EditError) as error:
        return str(error)
    return ""
