"""Gate gradients: how a loss changes when a node's output is scaled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grapnet.core._grid import Grid
from grapnet.core._opened import watch

from ._space import Space

if TYPE_CHECKING:
    from ._adopted import Adopted


def gate_gradients(
    net: "Adopted", spaces: Sequence[Space], loss: Callable[[], Tensor]
) -> dict[Space, Tensor]:
    """Returns the derivative of a loss by a gate of 1 on every node, [nodes] in float64 on the CPU.

    A gate multiplies what the readers of a node get from it: a gate of 0 removes the node. So minus
    the derivative is, to first order, by how much the loss grows without the node. The gradients of
    Parameters stay as they are.

    Args:
        net: the adopted model.
        spaces: some of its spaces, which tensors read.
        loss: runs the model and returns one number.

    Examples:
        >>> import grapnet as gn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        >>> x = torch.randn(8, 3)
        >>> net = gn.adopt(model, x)
        >>> found = gate_gradients(net, [net.space("0")], lambda: model(x).sum())
        >>> sent = model[1].weight[0] * model[0](x).sum(0)  # what each node adds to the sum
        >>> torch.allclose(found[net.space("0")].float(), sent, atol=1e-5)
        True
    """
    places = {space: _reader_places(net, space) for space in spaces}
    names = dict.fromkeys(name for own in places.values() for name, _ in own)
    grids = {name: net._grids()[name] for name in names}
    gradients = _gradients(grids, loss)
    found = {}
    for space, own in places.items():
        total = torch.zeros(len(space), dtype=torch.float64)
        for (name, dim), at in own.items():
            products = grids[name].whole.double() * gradients[name].double()
            others = [d for d in range(products.dim()) if d != dim]
            by_position = products.sum(others) if others else products
            total += by_position.cpu()[at].sum(1)
        found[space] = total
    return found


def _reader_places(net: "Adopted", space: Space) -> dict[tuple[str, int], Tensor]:
    """Returns where the nodes of a space are in the Parameters that read them."""
    found = {}
    for (name, dim), at in space.places().items():
        if net._grids()[name].is_parameter and net._role(space, name, dim) == "reader":
            found[name, dim] = at
    return found


def _gradients(grids: dict[str, Grid], loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of tensors, cells that are cut or frozen included."""
    computed: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, grid in grids.items():
            stack.enter_context(_requiring_gradients(grid))
            if grid.opened is None:
                computed[name] = [grid.parameter]
            else:
                # Its cells are in the tensors that the module computes in every forward pass.
                computed[name] = []
                stack.callback(watch(grid.parameter, computed[name].append))
        with torch.enable_grad():
            value = loss()
            inputs = [tensor for tensors in computed.values() for tensor in tensors]
            # A tensor that this run did not read has no gradient.
            given = list(torch.autograd.grad(value, inputs, allow_unused=True))
    found = {}
    for name, tensors in computed.items():
        total = torch.zeros_like(grids[name].whole)
        for _ in tensors:
            gradient = given.pop(0)
            if gradient is not None:
                total += gradient
        found[name] = total
    return found


@contextmanager
def _requiring_gradients(grid: Grid) -> Iterator[None]:
    """Lets a Parameter require gradients for a while."""
    before = grid.parameter.requires_grad
    grid.parameter.requires_grad_(True)
    try:
        yield
    finally:
        grid.parameter.requires_grad_(before)
