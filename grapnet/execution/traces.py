"""Traces: how a graph looked at one moment, to tell later without reading it whether it changed."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from grapnet.core._coordinates import Token
from grapnet.core._graph import Graph


@dataclass(frozen=True, eq=False)
class Traces:
    """What an edit, or a write into the coordinates, will have changed.

    Not seen: writes through `.data`, through a numpy array, or by the replay of a CUDA graph.
    """

    graph: weakref.ref[Graph]
    structure: Token
    marks: "tuple[_Mark, ...]"
    steps: int

    @classmethod
    def of(cls, graph: Graph) -> "Traces | None":
        """Returns the present ones; None when torch keeps none, as for a net made under inference
        mode.
        """
        vectors = _vectors(graph)
        if any(vector.is_inference() for vector in vectors):
            return None
        return cls(weakref.ref(graph), graph.structure, tuple(map(_Mark, vectors)), _STEPS.watch())

    def moved(self, graph: Graph) -> bool | None:
        """Says whether the graph was edited, or its coordinates written, since; None if only
        reading can tell.
        """
        if graph.structure is not self.structure:
            return True
        vectors = _vectors(graph)
        if len(vectors) != len(self.marks):
            return True
        still = all(mark.is_on(vector) for mark, vector in zip(self.marks, vectors, strict=True))
        return _STEPS.touched(vectors, self.steps) if still else True


class _Mark:
    """One tensor, its memory and its version counter; it keeps neither alive."""

    __slots__ = ("_state", "_storage", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._state = weakref.ref(tensor), _state(tensor)
        # while we hold this its address is not used again
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def is_on(self, tensor: Tensor) -> bool:
        """Says whether it is the same tensor, on the same memory, and nothing was written through
        it.
        """
        same = self._tensor() is tensor and self._storage.cdata == tensor.untyped_storage()._cdata
        return same and self._state == _state(tensor)


def _state(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _vectors(graph: Graph) -> list[Tensor]:
    """Returns every tensor that holds coordinates; asked before every call, so the empty ones are
    left out.
    """
    stores = (*graph.transitions, *(layer for layer in graph.layers if not layer.is_sensory))
    return [
        vector
        for store in stores
        for vector in (store.parameter, store.frozen_values)
        if vector.numel()
    ]


class _Steps:
    """When each optimizer last stepped: torch's fused ones write Parameters and leave their version
    counters alone.
    """

    def __init__(self) -> None:
        # Optimizers of several threads step at the same time, and one can go at any moment.
        self._lock = threading.RLock()
        self._count = 0
        self._last: dict[int, tuple[weakref.ref[Optimizer], int]] = {}  # by id
        # the last step of an optimizer that is no more: nobody knows what it had
        self._last_of_gone = 0
        self._hook: Any = None

    def watch(self) -> int:
        """Returns how many steps were seen; the first call of the process starts to look."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note)
        return self._count

    def touched(self, vectors: Sequence[Tensor], since: int) -> bool | None:
        """Says whether an optimizer of these tensors stepped after the step numbered `since`; None
        for perhaps.
        """
        if self._count == since:
            return False
        wanted = {id(vector) for vector in vectors}
        last = list(self._last.values())
        stepped = [reference() for reference, step in last if step > since]
        groups = [
            group
            for optimizer in stepped
            if optimizer is not None
            for group in optimizer.param_groups
        ]
        if any(id(parameter) in wanted for group in groups for parameter in group["params"]):
            return True
        return None if self._last_of_gone > since else False

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        key = id(optimizer)
        with self._lock:
            known = self._last.get(key)
            reference = known[0] if known else weakref.ref(optimizer, lambda _: self._forget(key))
            self._last[key] = reference, self._count + 1
            self._count += 1

    def _forget(self, key: int) -> None:
        with self._lock:
            self._last_of_gone = max(self._last_of_gone, self._last.pop(key)[1])


_STEPS = _Steps()
