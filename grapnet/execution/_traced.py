"""What torch.compile has to know of a net or of an opened weight before it traces a forward pass.

A trace reads plans as it finds them: their classes and flags become guards, their tensors inputs of
the compiled code. So it must find the plans made. And once sizes have changed, it has to take the
sizes of all tensors for variables, those of other nets in the same code too: else the first edit
of every net would compile the model again. `trace` does both, at the time of tracing.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from grapnet._torch import let_sizes_vary, run_while_tracing, traced_frame
from grapnet.core._coordinates import Coordinates

# What is compiled in one piece, by the number that torch gives to it.
_together: dict[int, "weakref.WeakSet[Tracing]"] = {}
_by_handle: "weakref.WeakValueDictionary[int, Tracing]" = weakref.WeakValueDictionary()


class Tracing:
    """The tie between a part of a model and the compiled code that runs it.

    Args:
        prepare: makes the plans that a trace is going to read, given what `trace` was given;
            returns all that holds tensors whose sizes an edit may change.

    Attributes:
        handle: an empty tensor that stands for the part in a trace. A number or an object would
            become a guard, and compiled code would serve one part alone.
    """

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self.handle = torch.empty(0, device="cpu")
        # Whoever prepares owns this object.
        self._prepare = weakref.WeakMethod(prepare)
        self._varies = False
        self._frames: set[int] = set()
        _by_handle[id(self.handle)] = self

    def note_change(self) -> None:
        """Notes that sizes change: the next trace of whatever is compiled together with this part
        takes sizes for variables.
        """
        for frame in self._frames:
            for part in _together.get(frame, ()):
                part._varies = True

    def begin(self, *key: Any) -> None:
        """Prepares for a trace."""
        prepare = self._prepare()
        assert prepare is not None, "the part that is traced is gone"
        read = prepare(*key)
        frame = traced_frame()
        if frame is not None:
            _together.setdefault(frame, weakref.WeakSet()).add(self)
            self._frames.add(frame)
        if self._varies:
            for tensor in tensors_in(read):
                let_sizes_vary(tensor)


@run_while_tracing
def trace(handle: Tensor, *key: Any) -> bool:
    """Prepares the part of a model that a handle stands for.

    torch.compile calls it when it meets it in a trace; compiled code does not.
    """
    _by_handle[id(handle)].begin(*key)
    return True


def tensors_in(part: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields the tensors that plans and other objects hold, at any depth."""
    if seen is None:
        seen = set()
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part
        return
    held: Any = ()
    if isinstance(part, Coordinates):
        held = (part._parameters, part._buffers, part.vector)
    elif isinstance(part, Mapping):
        held = part.values()
    elif isinstance(part, list | tuple):
        held = part
    elif isinstance(part, FunctionType):
        held = [cell.cell_contents for cell in part.__closure__ or ()]
    elif type(part).__module__.partition(".")[0] != "torch":
        held = getattr(part, "__dict__", {}).values()
    for inner in list(held):
        yield from tensors_in(inner, seen)
