"""Taps: where recorders find the activations of a space in an adopted model."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grapnet._torch import remove_forward_hook, untraced
from grapnet.core._errors import GrapNetError
from grapnet.execution._plan import in_transform
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import Expression, atoms_of, positions, size_of
from grapnet.spaces._copying import outputs_in
from grapnet.spaces._space import Space

Side = Literal["in", "out"]


@dataclass(frozen=True)
class Tap:
    """The first tensor that a module gets or returns, of which one axis has the nodes of a space.

    Attributes:
        path: the module.
        side: "in" for what it gets, "out" for what it returns.
        dim: the dimension of the nodes, counted from the last one: a call may have fewer
            dimensions of samples than the example of `gn.adopt`.
        axes: all axes of the tensor.
    """

    path: str
    side: Side
    dim: int
    axes: tuple[Expression, ...]

    def rows(self, space: Space, tensor: Tensor) -> Tensor:
        """Returns one row for every sample, position and token, [rows, nodes].

        Where a node has several positions on the axis, as a head or a channel behind a flatten,
        each of them is a row.
        """
        at = self._positions(space)
        table = tensor.movedim(self.dim, -1)
        table = table.reshape(-1, table.shape[-1])  # [samples, positions on the axis]
        if at.shape[1] == 1 and len(at) == table.shape[1]:
            return table
        chosen = table[:, at.to(table.device)]  # [samples, nodes, positions of a node]
        return chosen.transpose(1, 2).reshape(-1, len(at))

    def rows_of_example(self, space: Space) -> int:
        """Returns how many rows the example of `gn.adopt` has here."""
        sizes = _sizes(space)
        count = self._positions(space).shape[1]
        for dim, axis in enumerate(self.axes):
            if dim - len(self.axes) != self.dim:
                count *= size_of(axis, sizes)
        return count

    def _positions(self, space: Space) -> Tensor:
        """Returns the positions of the nodes on the axis, [nodes, k]."""
        return torch.from_numpy(positions(self.axes[self.dim], space._atom, _sizes(space)))


# The input of the model itself, where a forward pass begins.
PASS = Tap("", "in", -1, ())


def _sizes(space: Space) -> list[int]:
    net: Any = space.graph
    return net._atom_sizes()


def tap_of(net: Adopted, space: Space, at: str | None = None, side: Side = "in") -> Tap:
    """Returns where the activations of a space are recorded.

    By default that is the input of the first module that reads the nodes, after the first module
    that writes them: behind norms and activations. Where no module gets them as its input, it is
    the output of the module that writes them.

    Args:
        net: the model.
        space: the space.
        at: the module instead of that one.
        side: whether the input or the output of `at` is meant.

    Raises:
        GrapNetError: no module has the nodes there.
    """
    if at is not None:
        tap = _tap_at(net, space, at, side)
        if tap is None:
            raise GrapNetError(
                f"the {side}put of {at!r} does not have the nodes of {space.name}, or the module is"
                " called with different ones; name another module with at= and side="
            )
        return tap
    writers = paths_of(net, space.writers)
    start = min((order_of_call(net, path) for path in writers), default=-1)
    for tap in reader_taps(net, space):
        if order_of_call(net, tap.path) > start:
            return tap
    for path in writers:
        tap = _tap_at(net, space, path, "out")
        if tap is not None:
            return tap
    raise GrapNetError(
        f"no module of the model gets or returns the nodes of {space.name} as such, so that they"
        " cannot be recorded there; name a module that does with at="
    )


def reader_taps(net: Adopted, space: Space) -> list[Tap]:
    """Returns the inputs of the modules that read a space, in the order of their calls."""
    taps = []
    for path in paths_of(net, space.readers):
        tap = _tap_at(net, space, path, "in")
        if tap is not None:
            taps.append(tap)
    return sorted(taps, key=lambda tap: order_of_call(net, tap.path))


def following_tap(net: Adopted, space: Space, path: str) -> Tap | None:
    """Returns where the nodes that a module writes are read next, in the shape that it returns.

    Norms, activations and sums lie between. Where there is no such place, as before a flatten or a
    pooling, it is the output of the module itself; None if that does not have the nodes.
    """
    own = _tap_at(net, space, path, "out")
    if own is None:
        return None
    for tap in reader_taps(net, space):
        if order_of_call(net, tap.path) > order_of_call(net, path) and tap.axes == own.axes:
            return tap
    return own


def called_before(net: Adopted, path: str) -> frozenset[str]:
    """Returns the names of the tensors whose modules are called before a module, or not as modules:
    those that its input may depend on.
    """
    limit = order_of_call(net, path)
    found = []
    for name in net._grids():
        if any(order_of_call(net, holder) < limit for holder in paths_of(net, [name])):
            found.append(name)
    return frozenset(found)


def paths_of(net: Adopted, tensors: Iterable[str]) -> list[str]:
    """Returns the modules that hold some tensors, several for a tied one."""
    found: dict[str, None] = {}
    for name in tensors:
        holders = [module for module, _ in net._grids()[name].holders]
        if len(holders) == 1:
            found[name.rpartition(".")[0]] = None
            continue
        for path, module in net.model.named_modules():
            if any(module is holder for holder in holders):
                found[path] = None
    return list(found)


def _tap_at(net: Adopted, space: Space, path: str, side: Side) -> Tap | None:
    typed = net._typed
    axes = (typed.inputs if side == "in" else typed.outputs).get(path, ())
    for dim, axis in enumerate(axes):
        if space._atom in atoms_of(axis):
            return Tap(path, side, dim - len(axes), tuple(axes))
    return None


def order_of_call(net: Adopted, path: str) -> int:
    """Returns when a module is called, counted in modules; -1 if it is not."""
    # The modules are there in the order of their calls.
    called = net._typed.inputs
    return list(called).index(path) if path in called else -1


class TapHook:
    """A hook of a module that passes the tensor of a tap to a recorder.

    It does not keep the recorder alive. Copying a model copies the hooks of its modules: those of
    the copy belong to no recorder and take themselves off when they are called.
    """

    def __init__(self, recorder: Any, place: int, side: Side) -> None:
        self._recorder = None if recorder is None else weakref.ref(recorder)
        self._place = place
        self._side: Side = side

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        if self._recorder is None:
            remove_forward_hook(module, self)
            return
        recorder = self._recorder()
        # Compiled code calls removed hooks too.
        if recorder is None or not recorder.armed or in_transform():
            return
        given = (args, kwargs) if self._side == "in" else output
        tensor = next(iter(outputs_in(given)), None)
        if tensor is not None:
            recorder._tapped(self._place, tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return TapHook, (None, self._place, self._side)


def watch_taps(recorder: Any, net: Adopted, taps: Sequence[Tap]) -> list[Callable[[], None]]:
    """Passes the tensors of taps to `recorder._tapped(place, tensor)`, and returns the functions
    that end this.
    """
    found: list[Callable[[], None]] = []
    for place, tap in enumerate(taps):
        module = net.model.get_submodule(tap.path)
        hook: Any = TapHook(recorder, place, tap.side)
        if tap.side == "in":
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            handle = module.register_forward_hook(hook, with_kwargs=True)
        found.append(handle.remove)
    return found
