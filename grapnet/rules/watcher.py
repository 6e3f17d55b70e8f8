"""Watcher: hooks on one net, and evidence that follows its commits; the base of all recorders."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from grapnet.core._change import IndexMap
from grapnet.core._commit import Tracked
from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._journal import Commit
from grapnet.execution.plan import in_transform
from grapnet.execution.untraced import untraced
from grapnet.network import GrapNet


class Evidence(Protocol):
    """What a recorder has seen, by the rows of its layers."""

    def carried(self, *indexes: IndexMap | None) -> Self:
        """Returns the evidence after rows moved, one map a layer, None where they did not; this one
        stays as it is.
        """
        ...

    def copied(self) -> Self:
        """Returns an independent copy."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the evidence as numbers and tensors."""
        ...


E = TypeVar("E", bound=Evidence)


@dataclass(frozen=True, eq=False)
class Seen(Generic[E]):
    """Evidence, and the uids of the nodes that its rows are about, one tensor a layer."""

    evidence: E
    uids: list[Tensor]


def _after(layers: tuple[int, ...], seen: Seen[E] | None, commit: Commit) -> Seen[E] | None:
    """Returns what was seen after a commit has moved the rows of the layers."""
    # A recorder that came inside a trial has no state from before it.
    if seen is None or commit.kind == "end":
        return None
    changes = [commit.change.layers.get(n) for n in layers]
    if all(change is None or change.index.is_identity for change in changes):
        return seen
    indexes = []
    moved_uids = []
    for change, uids in zip(changes, seen.uids, strict=True):
        if change is None:
            indexes.append(None)
            moved_uids.append(uids)
        else:
            indexes.append(change.index)
            moved_uids.append(change.index.carry(uids, change.born.uids))
    return Seen(seen.evidence.carried(*indexes), moved_uids)


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
        self._net: weakref.ref[GrapNet] | None = None
        self._release: weakref.finalize | None = None  # takes the hooks away
        self._track(None, None)

    def _track(self, seen: Seen[E] | None, net: GrapNet | None) -> None:
        """Puts `seen` in place, to follow a net; what undo would bring back is dropped."""
        tracked: Tracked[Seen[E] | None, Seen[E] | None]
        tracked = Tracked(seen, carry=partial(_after, self._layers))
        if net is not None:
            net.follow(tracked)
        self._tracked = tracked

    @property
    def net(self) -> GrapNet:
        """The net it watches, or did last; raises GrapNetError when there is none."""
        net = self._alive()
        if net is None:
            raise GrapNetError(
                "this recorder has no net: it was never armed, or its net is gone. Call arm(net)"
                " first"
            )
        return net

    @property
    def armed(self) -> bool:
        """True while it watches."""
        watches = self._release is not None and self._release.alive
        return watches and self._alive() is not None

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
            hooks.append(module.register_forward_hook(_Hook(self, place)))  # pyright: ignore[reportArgumentType]
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
        if self._alive() is not net:
            self._track(self._tracked.state, net)
            self._release = None
            self._net = weakref.ref(net)

    def disarm(self) -> None:
        """Stops to watch and keeps what it has seen."""
        if self._release is not None:
            self._release()

    def clear(self) -> None:
        """Forgets what it has seen."""
        self._track(None, self._alive())

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen as plain numbers and tensors, with the uids of the nodes.

        Whether it is armed, and what undo would bring back, are not included.
        """
        seen = self._tracked.state
        if seen is None:
            return {"uids": [], "evidence": None}
        uids = [uids.clone() for uids in seen.uids]
        return {"uids": uids, "evidence": seen.evidence.copied().state_dict()}

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
        net = self._alive()
        if seen is not None and net is not None and not _same(uids, self._uids_of(net)):
            raise CheckpointError(
                "the state is about other nodes than those of the net that this recorder follows"
            )
        loaded = None
        if seen is not None:
            evidence = self._restored(seen, [len(u) for u in uids])
            loaded = Seen(evidence, [u.clone() for u in uids])
        self.clear()
        self._track(loaded, net)

    @abstractmethod
    def _modules(self, net: GrapNet) -> Sequence[nn.Module]:
        """Returns the modules whose forward calls to watch."""

    @abstractmethod
    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
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
        seen = self._tracked.state
        foreign = self._net is not None and self._net() is not net
        if seen is not None and (foreign or not _same(seen.uids, self._uids_of(net))):
            raise GrapNetError(
                "this recorder holds evidence about nodes of another net or version; clear() it"
                " first"
            )

    def _require_room(self, net: GrapNet) -> None:
        """Raises when the net's layers are too large to be watched."""

    @property
    def _evidence(self) -> E | None:
        """What was seen; None if nothing was."""
        seen = self._tracked.state
        if seen is None:
            return None
        return seen.evidence

    def _seen(self) -> E:
        """Returns the evidence; raises GrapNetError while there is none."""
        if self._evidence is None:
            raise GrapNetError(
                f"this {type(self).__name__} has seen nothing yet; arm(net) it and run the net"
            )
        return self._evidence

    def _writable(self, make: Callable[[], E]) -> E:
        """Returns the evidence to write into; outside a trial, what undo would bring back is
        dropped.
        """
        seen = self._tracked.state
        if seen is None:
            seen = Seen(make(), self._uids_of(self.net))
        elif self._tracked.in_trial:
            # The end of the trial brings back the evidence before it, which must not change.
            seen = Seen(seen.evidence.copied(), seen.uids)
        self._tracked.learn(seen)
        return seen.evidence

    def _alive(self) -> GrapNet | None:
        """Returns the net that it follows; None without one, or once it is gone."""
        if self._net is None:
            return None
        return self._net()

    def _uids_of(self, net: GrapNet) -> list[Tensor]:
        return [net.layers[n].uid for n in self._layers]

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self._layers))
        return (
            f"{type(self).__name__}(layers {layers},"
            f" count={self.count}{', watching' if self.armed else ''})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings and the evidence: a copy watches nothing."""
        hidden = ("_net", "_release", "_tracked")
        state = {name: value for name, value in self.__dict__.items() if name not in hidden}
        return {**state, "seen": self._tracked.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        seen = state.pop("seen")
        vars(self).update(state, _net=None, _release=None)
        self._track(seen, None)


class _Hook:
    """A forward hook that hands the input and output of one module to a recorder, which it does not
    keep alive.

    Copying a net copies the hooks on its modules: the copy gets `_leave` instead, which no recorder
    knows.
    """

    def __init__(self, recorder: Watcher[Any], place: int) -> None:
        self._recorder, self._place = weakref.ref(recorder), place

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        recorder = self._recorder()
        # compiled code calls removed hooks too
        if recorder is not None and recorder.armed and not in_transform():
            recorder._observe(self._place, args, output)

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
