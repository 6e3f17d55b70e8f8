"""Watcher: hooks on one net, and evidence that follows its commits; what every recorder of this
package is.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap
from grapnet.core._journal import Commit
from grapnet.execution.plan import in_transform
from grapnet.execution.untraced import untraced
from grapnet.network import GrapNet


class Evidence(Protocol):
    """What a recorder has seen, by the rows of its layers."""

    def carried(self, *indexes: IndexMap | None) -> Self:
        """Returns it after rows moved, one map a layer, None where they did not; what it was stays
        as it was.
        """
        ...

    def copied(self) -> Self:
        """Returns one that can be written into without touching this one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns it as numbers and tensors."""
        ...


E = TypeVar("E", bound=Evidence)


class Watcher(ABC, Generic[E]):
    """Watches modules of one net, which it does not keep alive, and keeps its evidence with the
    rows of the nodes.

    It costs nothing while it is not armed. What it sees inside a trial is forgotten when the trial
    ends. A node that returns by undo or redo has what it had, unless something was seen in between:
    then it starts at nothing, like a newborn. A copy of the net, and whatever runs under
    `torch.func`, is not seen. `torch.compile` takes no notice of hooks that come after it has
    compiled a net: arm once before the first step, or set
    `torch._dynamo.config.skip_nnmodule_hook_guards = False`.
    """

    def __init__(self, layers: tuple[int, ...], window: int) -> None:
        if any(not isinstance(n, int) or n < 0 for n in layers):
            raise ValueError(f"layers are whole numbers from 0, got {', '.join(map(repr, layers))}")
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"a window is a whole number of steps from 1, got {window!r}")
        self.window = window
        self._layers = layers  # whose rows the evidence is about
        self._evidence: E | None = None  # None: nothing seen
        self._uids: list[Tensor] = []  # of the nodes that the rows of the evidence are about
        self._unbind()

    def _unbind(self) -> None:
        self._net: weakref.ref[GrapNet] | None = None
        self._release: weakref.finalize | None = None  # takes the hooks away
        # version -> the evidence before its commit, for the way back
        self._kept: dict[int, E | None] = {}
        self._trial: int | None = None  # version of the trial that is under way
        # whether the evidence shares memory with what the end of the trial brings back
        self._shared = False

    @property
    def net(self) -> GrapNet:
        """The net it watches, or did last; raises GrapNetError when there is none."""
        net = None if self._net is None else self._net()
        if net is None:
            raise GrapNetError(
                "this recorder has no net: it was never armed, or its net is gone. Call arm(net)"
                " first"
            )
        return net

    @property
    def armed(self) -> bool:
        """True while it watches."""
        return (
            self._release is not None
            and self._release.alive
            and self._net is not None
            and self._net() is not None
        )

    @property
    @abstractmethod
    def count(self) -> int:
        """How much was seen."""

    def arm(self, net: GrapNet) -> None:
        """Starts to watch; nothing happens when it watches already.

        Raises:
            GrapNetError: it watches another net, or holds evidence about other nodes than this
                net's.
        """
        if self.armed and self.net is net:
            return
        self._require_fit(net)
        self._require_room(net)
        self.bind(net)
        hooks = []
        for place, module in enumerate(self._modules(net)):
            hooks.append(module.register_forward_hook(_Ear(self, place)))  # pyright: ignore[reportArgumentType]
        self._release = weakref.finalize(self, _remove, hooks)
        self._release.atexit = False

    def bind(self, net: GrapNet) -> None:
        """Follows the commits of a net without watching it, so that evidence it is given stays with
        the nodes.

        Raises:
            GrapNetError: it watches another net, or holds evidence about other nodes than this
                net's.
        """
        self._require_fit(net)
        if self._net is None or self._net() is not net:
            self._unbind()
            self._net, self._uids = weakref.ref(net), self._uids_of(net)
            net.follow(self)

    def disarm(self) -> None:
        """Stops to watch and keeps what it has seen."""
        if self._release is not None:
            self._release()

    def clear(self) -> None:
        """Forgets what it has seen."""
        self._evidence, self._shared = None, False
        self._kept = {version: None for version in self._kept if version == self._trial}

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Moves the evidence with the rows; the present one stays as it is, also for the way
        back.
        """
        if self._net is None or self._net() is not graph:
            return lambda: None
        if commit.undoes in self._kept or commit.ends_trial:
            evidence = self._kept.get(commit.undoes)  # pyright: ignore[reportArgumentType]
        else:
            indexes = [commit.nodes.get(n) for n in self._layers]
            moved = any(index is not None and not index.is_identity for index in indexes)
            evidence = (
                self._evidence.carried(*indexes)
                if moved and self._evidence is not None
                else self._evidence
            )
        kept = {
            version: held for version, held in self._kept.items() if graph.journal.keeps(version)
        }
        if not commit.ends_trial:
            kept[commit.version] = self._evidence
        trial = commit.version if graph.open_trial else None

        def install() -> None:
            self._evidence, self._kept, self._trial, self._shared = (
                evidence,
                kept,
                trial,
                trial is not None,
            )
            self._uids = [graph.layers[n].uid for n in self._layers]

        return install

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen as plain numbers and tensors, with the uids of the nodes; not
        whether it is armed.

        What undo would bring back is not among it.
        """
        seen = None if self._evidence is None else self._evidence.copied().state_dict()
        return {"uids": [uids.clone() for uids in self._uids], "evidence": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned; the net it is bound to, now or next, must have
        those nodes.

        Raises:
            CheckpointError: the state is not of such a recorder, or is about other nodes; nothing
                was changed.
        """
        if not isinstance(state, dict) or state.keys() != {"uids", "evidence"}:
            raise CheckpointError("the state of a recorder holds uids and evidence")
        uids, seen = state["uids"], state["evidence"]
        if not isinstance(uids, list | tuple) or not all(
            isinstance(u, Tensor) and u.dim() == 1 for u in uids
        ):
            raise CheckpointError(
                "the uids in the state of a recorder are one list of whole numbers a layer"
            )
        if seen is not None and (not isinstance(seen, dict) or len(uids) != len(self._layers)):
            raise CheckpointError(
                f"the state is about {len(uids)} layers, this recorder about {len(self._layers)}"
            )
        if seen is not None and self._net is not None and not _same(uids, self._uids):
            raise CheckpointError(
                "the state is about other nodes than those of the net that this recorder follows"
            )
        evidence = None if seen is None else self._restored(seen, [len(u) for u in uids])
        self.clear()
        self._evidence, self._uids = (
            evidence,
            self._uids if seen is None else [u.clone() for u in uids],
        )

    @abstractmethod
    def _modules(self, net: GrapNet) -> Sequence[nn.Module]:
        """Returns whose forward calls to watch."""

    @abstractmethod
    def _hear(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Takes in one forward call of the module at a place of `_modules`."""

    @abstractmethod
    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> E:
        """Returns the evidence in a state; raises CheckpointError when it is not for layers of
        these sizes.
        """

    def _require_fit(self, net: GrapNet) -> None:
        """Raises when the net lacks a layer, when another one is watched, or when the evidence is
        about other nodes.
        """
        if self.armed and self.net is not net:
            raise GrapNetError(
                "this recorder watches another net; disarm() it first, and clear() what it has seen"
            )
        if max(self._layers) >= len(net.layers):
            raise ValueError(
                f"the net has layers 0 to {len(net.layers) - 1}, got {list(self._layers)}"
            )
        foreign = self._net is not None and self._net() is not net
        if self._evidence is not None and (foreign or not _same(self._uids, self._uids_of(net))):
            raise GrapNetError(
                "this recorder holds evidence about nodes of another net or version; clear() it"
                " first"
            )

    def _require_room(self, net: GrapNet) -> None:
        """Raises when the net's layers are too large to be watched."""

    def _seen(self) -> E:
        """Returns the evidence; raises GrapNetError while there is none."""
        if self._evidence is None:
            raise GrapNetError(
                f"this {type(self).__name__} has seen nothing yet; arm(net) it and run the net"
            )
        return self._evidence

    def _writable(self, make: Callable[[], E]) -> E:
        """Returns the evidence to write into: outside a trial, what undo could bring back is let
        go.
        """
        if self._trial is None:
            self._kept = {}
        if self._evidence is None:
            self._evidence = make()
        elif self._shared:
            self._evidence = self._evidence.copied()
        self._shared = False
        return self._evidence

    def _uids_of(self, net: GrapNet) -> list[Tensor]:
        return [net.layers[n].uid for n in self._layers]

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self._layers))
        return (
            f"{type(self).__name__}(layers {layers},"
            f" count={self.count}{', watching' if self.armed else ''})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps the settings and the evidence, and watches nothing."""
        hidden = ("_net", "_release", "_kept", "_trial", "_shared")
        return {name: value for name, value in self.__dict__.items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._unbind()


class _Ear:
    """A forward hook that tells a recorder, without keeping it alive, what one module was given and
    said.

    Copying a net copies the hooks on its modules: what stands in the copy is `_leave`, so nobody is
        told.
    """

    def __init__(self, recorder: Watcher[Any], place: int) -> None:
        self._recorder, self._place = weakref.ref(recorder), place

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        recorder = self._recorder()
        # compiled code calls removed hooks too
        if recorder is not None and recorder.armed and not in_transform():
            recorder._hear(self._place, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _left, ()


def _left() -> Any:
    return _leave


@untraced
def _leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Takes itself off the module that calls it."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is _leave]:
        del module._forward_hooks[key]


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Computes without gradients, in full precision and into ordinary tensors, whatever surrounds
    it.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def checked(tensor: Any, shape: Sequence[int], dtype: torch.dtype | None, name: str) -> Tensor:
    """Returns a copy of a tensor of a state; raises CheckpointError when it is none, or of another
    shape or dtype.
    """
    if (
        not isinstance(tensor, Tensor)
        or list(tensor.shape) != list(shape)
        or (dtype and tensor.dtype != dtype)
    ):
        raise CheckpointError(
            f"{name} of a recorder's state is not a tensor of shape {list(shape)} and the right"
            " kind"
        )
    return tensor.detach().clone()
