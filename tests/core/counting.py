"""Counts what a commit would do on a GPU: launches, waits, and passes over all relations."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grapnet as gn
from grapnet.core import _index_map

# Operations for whose result the host waits, or whose size depends on numbers.
WAITS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
NO_LAUNCHES = {"_local_scalar_dense", "detach", "new_empty", "empty_like"}
# Methods that copy to the host, which no operation shows where the host is the device.
COPIES = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__}


class Counts(TorchDispatchMode):
    """What happens to the tensors of a net that would be on a GPU, and to all computed from them.

    Attributes:
        launches: operations that are no views.
        waits: the operations that the host waits for, with the line of the library.
        copied: the largest number of entries that was copied to the host.
        passes: operations that read or write at least half as many numbers as there are relations.
    """

    def __init__(self, net: gn.GrapNet, tensors: list[Tensor]) -> None:
        super().__init__()
        self.launches = 0
        self.waits: list[str] = []
        self.copied = 0
        self.passes: list[str] = []
        self._many = max(transition.size for transition in net.transitions) // 2
        # By the memory that they are in, which is kept alive so that nothing else comes there.
        self._memory: dict[int, Any] = {}
        for tensor in tensors:
            self._note(tensor)

    def is_noted(self, tensor: Tensor) -> bool:
        """Returns whether a tensor would be on the GPU."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def wait(self, what: str, copied: int) -> None:
        """Notes an operation that the host waits for."""
        self.waits.append(f"{what} at {_place()}")
        self.copied = max(self.copied, copied)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            self._memory[storage.data_ptr()] = storage

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        noted = [tensor for tensor in read if self.is_noted(tensor)]
        result = func(*args, **kwargs)
        if not noted:
            return result
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if _waits(name, args, kwargs):
            self.wait(name, max(tensor.numel() for tensor in noted))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not func.is_view and name not in NO_LAUNCHES:
            self.launches += 1
            if _touched(name, args, read, written) >= self._many:
                self.passes.append(f"{name} at {_place()}")
        for tensor in written:
            self._note(tensor)
        return result


class _Copies(TorchFunctionMode):
    """Notes what is copied to the host."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in COPIES and self._counts.is_noted(args[0]):
            self._counts.wait(func.__name__, args[0].numel())
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu(monkeypatch: Any) -> Iterator[None]:
    """Runs what runs on a GPU, on the tensors of a CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(_index_map, "_HOSTS", frozenset())
        yield


@contextmanager
def counted(net: gn.GrapNet, *others: Tensor) -> Iterator[Counts]:
    """Counts what happens to the relations, Parameters and gradients of a net, and to others."""
    tensors = list(others)
    for parameter in net.parameters():
        tensors += [parameter.data, *([] if parameter.grad is None else [parameter.grad])]
    for transition in net.transitions:
        tensors += [transition.topology.ptr, transition.topology.child]
    with Counts(net, tensors) as counts, _Copies(counts):
        yield counts


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "_unsafe_index"):
        places = [place for place in args[1] if place is not None]
        return any(place.dtype in (torch.bool, torch.uint8) for place in places)
    return name in WAITS


def _touched(name: str, args: tuple[Any, ...], read: list[Tensor], written: list[Tensor]) -> int:
    """Returns how many numbers an operation reads or writes."""
    # Only what the index names.
    if name.startswith("index_"):
        return args[2].numel()
    # Of the first tensor it takes the kind alone.
    if name.startswith("new_"):
        read = []
    return max(tensor.numel() for tensor in (*read, *written))


def _place() -> str:
    """Returns the file and line of the library that is being executed."""
    frame = sys._getframe(1)
    while frame is not None and "/grapnet/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.rpartition('/grapnet/')[2]}:{frame.f_lineno}"
