"""GradMax on adopted models: new nodes whose incoming weights are 0 and have large gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grapnet._torch import current_graph_task_id
from grapnet.core._errors import EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import Atom
from grapnet.spaces._probe import run_copy
from grapnet.spaces._space import Space
from grapnet.spaces._typing import CONTRACTED

from ._cells import Linear, linear_of, spread, unfolded, why_not_linear, with_batch
from ._gradients import BackwardRecorder, TensorGradients, has_finite_product
from ._recorder import plainly
from ._taps import PASS, Tap, watch_taps

# Numbers of unfolded inputs and gradients that are computed at a time.
CELLS = 2**24


class SpaceGradientRecorder(BackwardRecorder[TensorGradients]):
    """Records, for a space of an adopted model, the gradients that a new node would receive.

    The gradient of the incoming weights of a node whose activation has slope 1 is this matrix times
    the outgoing weights of the node. A cell above is what an incoming weight is multiplied with, at
    a position that the writer computes; a cell below is a number of the weight of a reader. Of a
    Linear the cells are its inputs and outputs, of a convolution each with all places of the
    kernel. The matrix is averaged over the recorded backward passes, and starts over when
    nodes above or below are added or removed. Gradients that are not finite are left out and
    counted (`left_out`).

    Args:
        net: the adopted model.
        space: the space, or its name: one Linear or convolution writes it, Linears or convolutions
            read it, and only an activation lies between.
        window: the number of steps that it records before its rule is due.

    Raises:
        EditError: the space is of another kind.

    Examples:
        >>> import grapnet as gn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> net = gn.adopt(model, torch.randn(2, 3, 9, 9))
        >>> recorder = SpaceGradientRecorder(net, "0")
        >>> recorder.arm(net)
        >>> model(torch.randn(2, 3, 9, 9)).sum().backward()
        >>> recorder.count, recorder.matrix().shape
        (1, torch.Size([27, 36]))
    """

    def __init__(self, net: Adopted, space: Space | str, *, window: int = 1) -> None:
        if isinstance(space, str):
            space = net.space(space)
        problem = why_not_steepest(net, space)
        if problem:
            raise EditError(f"GradMax cannot grow {space.name}: {problem}")
        tensors = {*space.writers, *space.readers}
        layers = []
        for number, other in enumerate(net.spaces):
            has_cells = any(name in tensors for name, _ in other._members)
            if has_cells and other is not space:
                layers.append(number)
        super().__init__(tuple(layers), window)
        self.space = space.name
        self._writer = writer_of(net, space)
        self._readers = readers_of(net, space)
        self._forget()

    def matrix(self) -> Tensor:
        """Returns the gradients, [cells above, cells below], reader after reader."""
        seen = self._seen()
        if seen.total is None:
            raise GrapNetError(
                "this SpaceGradientRecorder has seen nothing since nodes came or went beside its"
                " space"
            )
        if any(self._inputs):
            raise GrapNetError(
                f"a module that reads {self.space} was called less often in the last pass than the"
                f" one that writes it, {self._writer.path}, so that its gradients cannot be matched"
                " with their inputs"
            )
        return seen.total / seen.count

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        taps = [PASS, Tap(self._writer.path, "in", -1, ())]
        for reader in self._readers:
            taps.append(Tap(reader.path, "out", -1, ()))
        self._forget()
        return watch_taps(self, net, taps)

    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        return ()

    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Does nothing: taps watch instead."""

    def _forget(self) -> None:
        # for each reader, the inputs of the writer in the pass under way that it has not read yet
        self._inputs: list[list[Tensor]] = [[] for _ in self._readers]

    def _tapped(self, place: int, tensor: Tensor) -> None:
        """Takes in the input of the writer, and then the output of each reader."""
        if place == 0:
            self._forget()
            return
        if not torch.is_grad_enabled():
            return
        if place == 1:
            x = tensor.detach().clone()
            for waiting in self._inputs:
                waiting.append(x)
            return
        waiting = self._inputs[place - 2]
        if waiting and tensor.requires_grad:
            tensor.register_hook(self._receiver(waiting.pop(0), place - 2))

    def _record(self, gradient: Tensor, *seen: Any) -> None:
        # the input of the writer, and which of the readers the gradient is of
        x, number = seen
        net: Any = self.net
        writer = self._writer.module(net)
        reader = self._readers[number].module(net)
        dtype = torch.promote_types(torch.promote_types(x.dtype, gradient.dtype), torch.float32)
        with plainly(gradient.device):
            x = x.to(dtype)
            gradient = gradient.to(dtype)
            if not has_finite_product(x, gradient):
                self.left_out += 1
                return
            part = across(writer, reader, x, gradient)
            widths = [_cells_below(net, linear) for linear in self._readers]
            whole = part.new_zeros(len(part), sum(widths))
            start = sum(widths[:number])
            whole[:, start : start + widths[number]] = part
            self._writable(TensorGradients).see(whole, current_graph_task_id())

    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> TensorGradients:
        total = None if seen["total"] is None else seen["total"].clone()
        return TensorGradients(total, seen["count"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inputs": [[] for _ in self._readers]}


def across(writer: nn.Module, reader: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the sum over samples and positions of cells above times cells below, [cells above,
    cells below].

    Args:
        writer: the module that writes a space.
        reader: a module that reads it.
        x: the input of the writer.
        gradient: of the output of the reader.
    """
    x = with_batch(writer, x)
    gradient = with_batch(reader, gradient)
    total = None
    step = max(1, CELLS // max(1, x[0].numel() + gradient[0].numel()))
    for start in range(0, len(x), step):
        above = unfolded(writer, x[start : start + step])
        below = spread(reader, gradient[start : start + step], above.shape[2:])
        part = _as_rows(above).t() @ _as_rows(below)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _as_rows(cells: Tensor) -> Tensor:
    """Returns [batch, cells, *image] as [rows, cells]."""
    return cells.movedim(1, -1).reshape(-1, cells.shape[1])


def why_not_steepest(net: Adopted, space: Space) -> str:
    """Returns why GradMax is not defined for a space; empty if it is."""
    if len(space.writers) != 1:
        return f"one tensor must write it, and these do: {', '.join(space.writers) or 'none'}"
    if not space.readers or CONTRACTED in space._marks:
        return "activations read it, and not tensors alone"
    for name in (*space.writers, *space.readers):
        problem = why_not_linear(net, name)
        if problem:
            return problem
    writer = writer_of(net, space)
    output = net._typed.outputs[writer.path]
    if _node_axes(space, output) != 1:
        return f"its nodes have several positions in the output of {writer.path}"
    for reader in readers_of(net, space):
        if net._typed.inputs[reader.path] != output:
            return f"{reader.path} does not read it in the shape in which {writer.path} writes it"
        if getattr(reader.module(net), "padding_mode", "zeros") != "zeros":
            return f"{reader.path} pads with other numbers than 0"
    own = f"{writer.path}.bias".lstrip(".")
    others = [name for name in space.riders if name != own]
    if others:
        return f"a norm or another tensor lies between, with an entry per node: {others[0]}"
    return ""


def _node_axes(space: Space, axes: Sequence[Any]) -> int:
    """Returns how many axes are the nodes of a space, and nothing else."""
    return sum(axis == Atom(space._atom) for axis in axes)


def writer_of(net: Adopted, space: Space) -> Linear:
    """Returns the module that writes a space."""
    return linear_of(net, space.writers[0])


def readers_of(net: Adopted, space: Space) -> list[Linear]:
    """Returns the modules that read a space."""
    return [linear_of(net, name) for name in space.readers]


def _cells_below(net: Adopted, reader: Linear) -> int:
    """Returns how many numbers a reader has for each node."""
    shape = list(net._grids()[reader.name].shape)
    del shape[1 - reader.out_dim]
    return math.prod(shape)


def values_of_steepest(
    net: Adopted, space: Space, directions: Tensor, bias: float
) -> Mapping[str, Tensor]:
    """Returns the entries of new nodes in all tensors, as `SpaceEdit.add_nodes` takes them.

    Args:
        net: the model.
        space: the space that grows.
        directions: the outgoing weights of every new node, [nodes, cells below].
        bias: their bias, where the writer has one.
    """
    count = len(directions)
    writer = writer_of(net, space)
    shape = list(net._grids()[writer.name].shape)
    shape[writer.out_dim] = count
    values = {writer.name: torch.zeros(shape)}
    for name in space.riders:
        values[name] = torch.full((count,), bias, dtype=torch.float64)
    start = 0
    for reader in readers_of(net, space):
        width = _cells_below(net, reader)
        shape = list(reader.canonical(net._grids()[reader.name].whole).shape)
        part = directions[:, start : start + width]
        start += width
        part = part.reshape(count, shape[0], *shape[2:]).transpose(0, 1)  # [out, nodes, *kernel]
        values[reader.name] = reader.native(part).contiguous()
    return values


def rising_bias(net: Adopted, space: Space) -> float:
    """Returns a bias too small to change a sum, at which what lies between the writer of a space
    and its readers has a slope.

    Raises:
        EditError: it does not pass through 0 with a slope.
    """
    bias = 0.0
    if space.riders:
        dtype = net._grids()[space.riders[0]].tensor.dtype
        bias = max(2.0**-100, torch.finfo(dtype).tiny)
    for value, slopes in rises(net, space, bias):
        if value > 1e3 * bias or float(slopes.abs().max()) == 0:
            hint = ""
            if not space.riders:
                hint = "; a bias of its writer would give a ReLU one"
            raise EditError(
                f"GradMax needs an activation behind {space.name} that passes through 0 with a"
                f' slope, and this one does not{hint}; use init="zero_outgoing"'
            )
        if float(slopes.max() - slopes.min()) > 1e-6 * float(slopes.abs().max()):
            raise EditError(
                f"GradMax needs the same activation behind {space.name} at every position, and here"
                ' positions are mixed or weighted; use init="zero_outgoing"'
            )
    return bias


def rises(net: Adopted, space: Space, start: float) -> list[tuple[float, Tensor]]:
    """Returns for each reader the largest number that it gets from a node whose writer returns
    `start`, and the slope there, position by position.
    """
    writer = writer_of(net, space)
    found: list[tuple[float, Tensor]] = []
    (dim,) = [d for d, a in enumerate(net._typed.outputs[writer.path]) if a == Atom(space._atom)]
    places: list[Tensor] = []

    def put(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        place = torch.full_like(output.select(dim, 0), start).requires_grad_()
        places.append(place)
        others = output.detach().narrow(dim, 1, output.shape[dim] - 1)
        return torch.cat([place.unsqueeze(dim), others], dim)

    def take(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        inputs = [*args, *kwargs.values()]
        x = inputs[0]
        node = x.select(dim, 0)
        # Where positions are mixed, what comes back is no multiple of what goes in.
        sent = torch.linspace(1, 2, node.numel(), dtype=node.dtype).view_as(node)
        (received,) = torch.autograd.grad(
            node, places[-1], sent, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        found.append((node.abs().max().item(), (received / sent).detach()))

    def prepare(model: nn.Module) -> None:
        model.get_submodule(writer.path).register_forward_hook(put)
        for reader in readers_of(net, space):
            module = model.get_submodule(reader.path)
            module.register_forward_pre_hook(take, with_kwargs=True)

    with torch.enable_grad():
        run_copy(net, prepare)
    return found
