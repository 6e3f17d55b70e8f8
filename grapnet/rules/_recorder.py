"""Recorders: what all of them share, and the recorders that a manager's rules have on one net."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from grapnet._torch import remove_forward_hook, untraced
from grapnet.core._change import Change
from grapnet.core._commit import Tracked
from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._index_map import IndexMap
from grapnet.core._journal import Commit
from grapnet.execution._plan import in_transform
from grapnet.spaces._adopted import Adopted

from ._rule import Recorder, RecordingRule, Rule


class Evidence(Protocol):
    """What a recorder has seen, by the rows of its layers."""

    def carried(self, *indexes: IndexMap | None) -> Self:
        """Returns the evidence after rows moved, one map per layer, None where they did not.

        The evidence itself does not change.
        """
        ...

    def copied(self) -> Self:
        """Returns an independent copy."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the evidence as numbers and tensors."""
        ...


@runtime_checkable
class Dependent(Protocol):
    """Evidence that a commit can make worthless, without moving its rows."""

    def after(self, change: Change) -> Self:
        """Returns the evidence after a change of the net, its rows as they were."""
        ...


E = TypeVar("E", bound=Evidence)


@dataclass(frozen=True, eq=False)
class Seen(Generic[E]):
    """Evidence, and the uids of the nodes that its rows are about, one tensor per layer."""

    evidence: E
    uids: list[Tensor]


def _after(layers: tuple[int, ...], seen: Seen[E] | None, commit: Commit) -> Seen[E] | None:
    """Returns what was seen after a commit has moved the rows of the layers."""
    # A recorder that came inside a trial has no state from before it.
    if seen is None or commit.kind == "end":
        return None
    if isinstance(seen.evidence, Dependent):
        seen = Seen(seen.evidence.after(commit.change), seen.uids)
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


class _Evidence(Tracked[Seen[E] | None, Seen[E] | None]):
    """What a recorder has seen.

    Its layers have numbers, which change where layers come or leave: that is possible while the
    recorder is not armed and has seen nothing.
    """

    def __init__(
        self, recorder: "NetRecorder[E]", layers: tuple[int, ...], seen: Seen[E] | None
    ) -> None:
        carry = partial(_after, layers)
        super().__init__(seen, carry=carry, name=type(recorder).__name__)
        self._recorder = weakref.ref(recorder)

    @property
    def follows_depth(self) -> bool:
        """True if nothing depends on the numbers of the layers."""
        recorder = self._recorder()
        return self.state is None and (recorder is None or not recorder.armed)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Computes what was seen after a commit; returns the assignments that install it."""
        install = super().prepare(graph, commit)
        recorder = self._recorder()
        if recorder is None:
            return install
        recorder._before_commit()
        return partial(_install_and_note, install, self._recorder)


def _install_and_note(
    install: Callable[[], None], reference: "weakref.ref[NetRecorder[Any]]"
) -> None:
    install()
    recorder = reference()
    if recorder is not None:
        recorder._after_commit()


class NetRecorder(ABC, Generic[E]):
    """Base of the library's recorders: hooks on one net, and evidence that follows its commits.

    It costs nothing while it is not armed, and does not keep the net alive. The end of a trial
    drops what was recorded inside it. Undo and redo restore the evidence of a node, unless
    something was recorded in between; then it starts without evidence, like a new node. Copies of
    the net and passes under `torch.func` are not recorded. While a recorder is armed on a net,
    compiled code runs the net eagerly, whether it was armed before or after compiling; with
    `fullgraph=True`, torch raises an error that says so. In adopted models `torch.compile` ignores
    hooks that are added after it has compiled: arm once before the first step, or set
    `torch._dynamo.config.skip_nnmodule_hook_guards = False`.
    """

    def __init__(self, layers: tuple[int | str, ...], window: int) -> None:
        numbers = [layer for layer in layers if isinstance(layer, int)]
        if min(numbers, default=0) < 0 or window < 1:
            raise ValueError(
                f"layers count from 0 and a window of steps from 1, got {layers} and {window}"
            )
        self.window = window
        # whose rows the evidence is about: numbers, or names of spaces
        self._layers = layers
        self._net: weakref.ref[Graph] | None = None
        self._release: weakref.finalize | None = None  # takes the hooks away
        self._track(None, None)

    def _track(self, seen: Seen[E] | None, net: Graph | None) -> None:
        """Puts `seen` in place, to follow a net; what undo would bring back is dropped."""
        numbers = ()
        if net is not None:
            numbers = self._numbers(net)
        tracked = _Evidence(self, numbers, seen)
        if net is not None:
            net.follow(tracked)
        self._tracked = tracked

    @property
    def net(self) -> Graph:
        """The net that it watches, or watched last; raises GrapNetError when there is none."""
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

    def arm(self, net: Graph) -> None:
        """Starts to watch a net; does nothing when it watches already.

        Raises:
            GrapNetError: it watches another net, or holds evidence about nodes of another net.
        """
        if self.armed and self.net is net:
            return
        self.bind(net)
        ends = self._watch(net)
        execution = getattr(net, "execution", None)
        if execution is not None:
            ends.append(execution._note_recorder())
        self._release = weakref.finalize(self, _call_all, ends)
        self._release.atexit = False

    def _watch(self, net: Any) -> list[Callable[[], None]]:
        """Installs what watches a net, and returns the functions that remove it."""
        found = []
        for place, module in enumerate(self._modules(net)):
            hook = module.register_forward_hook(_Hook(self, place))  # pyright: ignore[reportArgumentType]
            found.append(hook.remove)
        return found

    def bind(self, net: Graph) -> None:
        """Follows the commits of a net without watching it, so that evidence stays with the nodes.

        Raises:
            GrapNetError: it watches another net, or holds evidence about nodes of another net.
        """
        self._require_fit(net)
        if self._alive() is not net:
            self._track(self._tracked.state, net)
            self._release = None
            self._net = weakref.ref(net)

    def disarm(self) -> None:
        """Stops watching and keeps what it has seen."""
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
        """Takes over what `state_dict` returned; the net that it follows must have those nodes.

        Raises:
            CheckpointError: the state is about other nodes; nothing was changed.
        """
        loaded = None
        net = self._alive()
        if state["evidence"] is not None:
            uids = [own.clone() for own in state["uids"]]
            if net is not None and not _same(uids, self._uids_of(net)):
                raise CheckpointError(
                    "the state is about other nodes than those of the net that this recorder"
                    " follows"
                )
            loaded = Seen(self._restored(state["evidence"], [len(own) for own in uids]), uids)
        self.clear()
        self._track(loaded, net)

    def _before_commit(self) -> None:
        """Is called while a commit is prepared."""

    def _after_commit(self) -> None:
        """Is called when a commit has changed the net."""

    @abstractmethod
    def _modules(self, net: Graph) -> Sequence[nn.Module]:
        """Returns the modules whose forward calls to watch."""

    @abstractmethod
    def _observe(self, place: int, args: tuple[Any, ...], output: Tensor) -> None:
        """Takes in one forward call of the module at a place of `_modules`."""

    @abstractmethod
    def _restored(self, seen: dict[str, Any], sizes: list[int]) -> E:
        """Returns the evidence in a state, for layers of these sizes."""

    def _require_fit(self, net: Graph) -> None:
        """Raises when a layer is missing, another net is watched, or the evidence is foreign."""
        if self.armed and self.net is not net:
            raise GrapNetError(
                "this recorder watches another net; disarm() it first, and clear() what it has seen"
            )
        if max(self._numbers(net)) >= len(net.layers):
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

    @property
    def _evidence(self) -> E | None:
        """What was seen; None if nothing was."""
        seen = self._tracked.state
        return None if seen is None else seen.evidence

    def _seen(self) -> E:
        """Returns the evidence; raises GrapNetError while there is none."""
        if self._evidence is None:
            raise GrapNetError(
                f"this {type(self).__name__} has seen nothing yet; arm(net) it and run the net"
            )
        return self._evidence

    def _writable(self, make: Callable[[], E]) -> E:
        """Returns the evidence to write into.

        Outside a trial, what undo would bring back is dropped.
        """
        seen = self._tracked.state
        if seen is None:
            seen = Seen(make(), self._uids_of(self.net))
        elif self._tracked.in_trial:
            # The end of the trial brings back the evidence before it, which must not change.
            seen = Seen(seen.evidence.copied(), seen.uids)
        self._tracked.learn(seen)
        return seen.evidence

    def _alive(self) -> Graph | None:
        """Returns the net that it follows; None without one, or once it is gone."""
        return None if self._net is None else self._net()

    def _numbers(self, net: Graph) -> tuple[int, ...]:
        """Returns the numbers of its layers, or of its spaces, in a net."""
        return tuple(layer_of(net, layer) for layer in self._layers)

    def _uids_of(self, net: Graph) -> list[Tensor]:
        return [net.layers[n].uid for n in self._numbers(net)]

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self._layers))
        watching = ", watching" if self.armed else ""
        return f"{type(self).__name__}(layers {layers}, count={self.count}{watching})"

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
    """A forward hook that passes the input and output of one module to a recorder.

    It does not keep the recorder alive. Copying a net copies the hooks on its modules: the hooks of
    the copy belong to no recorder and take themselves off when they are called.
    """

    def __init__(self, recorder: NetRecorder[Any] | None, place: int) -> None:
        self._recorder = None if recorder is None else weakref.ref(recorder)
        self._place = place

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._recorder is None:
            remove_forward_hook(module, self)
            return
        recorder = self._recorder()
        # Compiled code calls removed hooks too.
        if recorder is not None and recorder.armed and not in_transform():
            recorder._observe(self._place, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._place)


def layer_of(net: Graph, layer: int | str) -> int:
    """Returns the number of a layer, or of a space by its name."""
    if isinstance(layer, int):
        return layer
    if not isinstance(net, Adopted):
        raise ValueError(f"{layer!r} is the name of a space; layers of a net have numbers")
    return net.space(layer).index


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Computes without gradients, in full precision and into ordinary tensors, in any context."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class RecorderSet:
    """The recorders of a manager's rules on one net, which it does not keep alive.

    Every rule's recorders are made once. One that has `bind` follows the net from then on, armed or
    not.
    """

    def __init__(self, net: Graph) -> None:
        self._net = weakref.ref(net)
        self._rules: dict[str, dict[str, Recorder]] = {}

    @property
    def net(self) -> Graph | None:
        """The net, while it is alive."""
        return self._net()

    def make(self, name: str, rule: Rule, states: Mapping[str, Any]) -> None:
        """Makes the recorders of a rule, unless they are there; they take saved states over."""
        if name in self._rules:
            return
        made = self.prepare(rule)
        for key, state in states.items():
            try:
                set_state(made[key], state)
            except CheckpointError as error:
                error.add_note(
                    f"raised for recorder {key!r} of rule {name!r}; disable() and enable() discard"
                    " what it has seen"
                )
                raise
        self._rules[name] = made

    def prepare(self, rule: Rule) -> dict[str, Recorder]:
        """Returns recorders for a rule, which follow the net."""
        net = self.net
        if net is None or not isinstance(rule, RecordingRule):
            return {}
        made: dict[str, Any] = dict(rule.recorders(net))
        for recorder in made.values():
            if hasattr(recorder, "bind"):
                recorder.bind(net)
        return made

    def install(self, name: str, prepared: dict[str, Recorder]) -> None:
        """Puts prepared recorders in the place of those that a rule has."""
        self.drop(name)
        self._rules[name] = prepared

    def evidence(self, name: str) -> dict[str, Recorder]:
        """Returns the recorders of a rule that is due; raises GrapNetError when one is empty."""
        for key, recorder in self._rules[name].items():
            if getattr(recorder, "count", None) == 0:
                left_out = ""
                if getattr(recorder, "left_out", 0):
                    left_out = " but gradients that are not finite, which were left out"
                raise GrapNetError(
                    f"rule {name!r} is due, and its recorder {key!r} has seen nothing of this net"
                    f"{left_out}. Call manager.start(net) before the first step, or run data"
                    " through the net inside `with manager.recording(net):`. Give start() and"
                    " apply() all nets at once: switching to other nets discards what was recorded"
                )
        return dict(self._rules[name])

    def arm(self, name: str, wanted: Callable[[Recorder], bool]) -> None:
        """Arms the recorders of a rule that are wanted, and disarms the others."""
        self.arm_all(self._rules[name], wanted)

    def arm_all(
        self, recorders: Mapping[str, Recorder], wanted: Callable[[Recorder], bool]
    ) -> None:
        """Arms those of some recorders that are wanted, and disarms the others."""
        net = self.net
        for recorder in recorders.values():
            if net is not None and wanted(recorder):
                recorder.arm(net)
            else:
                recorder.disarm()

    def foreign(self) -> list[Recorder]:
        """Returns the recorders that may not follow the end of a trial: all but the library's."""
        found = [recorder for part in self._rules.values() for recorder in part.values()]
        return [recorder for recorder in found if not isinstance(recorder, NetRecorder)]

    def clear(self, name: str) -> None:
        """Makes the recorders of a rule forget what they have seen."""
        for recorder in self._rules[name].values():
            recorder.clear()

    def drop(self, name: str) -> None:
        """Disarms the recorders of a rule and forgets them."""
        for recorder in self._rules.pop(name, {}).values():
            recorder.disarm()

    def drop_all(self) -> None:
        """Disarms all recorders and forgets them."""
        for name in [*self._rules]:
            self.drop(name)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Returns the state of every recorder that has one, by rule and name."""
        states: dict[str, Mapping[str, Any]] = {}
        for name, recorders in self._rules.items():
            states[name] = {key: state_of(recorder) for key, recorder in recorders.items()}
        return states

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores the recorders; those without a state forget what they have seen."""
        for name, recorders in self._rules.items():
            for key, recorder in recorders.items():
                recorder.clear()
                set_state(recorder, state.get(name, {}).get(key))


def state_of(part: Any) -> Any:
    """Returns the state of a rule or recorder that keeps one and takes it back; None of others."""
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    return None


def set_state(part: Any, state: Any) -> None:
    """Gives a rule or recorder the state that it had, if it had one."""
    if state is not None:
        part.load_state_dict(state)
