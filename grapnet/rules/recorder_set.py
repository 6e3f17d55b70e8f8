"""RecorderSet: the recorders that a manager's rules have on one net, and which of them watch."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grapnet.core._errors import CheckpointError, GrapNetError
from grapnet.network import GrapNet

from .rule import Recorder, RecordingRule, Rule
from .settings import same


class RecorderSet:
    """Makes every rule's recorders once, when they are first needed, and keeps only a weak
    reference to the net.

    A recorder that has `bind` follows the net from then on, watching or not. A copy of the set has
    the states of the recorders and no net.

    Args:
        net: whom they watch; without one it only holds saved states.
        saved: states of recorders, by rule and name, that they take over when they are made.
        second: whether the manager has turned to this net from another one, which is alive.
    """

    def __init__(
        self,
        net: GrapNet | None = None,
        saved: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        second: bool = False,
    ) -> None:
        self._net = None if net is None else weakref.ref(net)
        self._second = second
        self._saved = dict(saved or {})
        self._recorders: dict[str, dict[str, Recorder]] = {}
        self._watching: set[tuple[str, str]] = set()

    @property
    def net(self) -> GrapNet | None:
        """The net, while it is alive."""
        return None if self._net is None else self._net()

    def on(self, net: GrapNet) -> "RecorderSet":
        """Returns this set, or an empty one when it is about another net; saved states go to the
        first net.
        """
        if self.net is net:
            return self
        return RecorderSet(
            net, self._saved if self._net is None else None, second=self.net is not None
        )

    def of(self, name: str, rule: Rule) -> dict[str, Recorder]:
        """Returns the recorders of a rule, by the names that it gave them; none for a rule that
        needs none.
        """
        if name in self._recorders:
            return self._recorders[name]
        net = self.net
        if net is None:
            return {}
        made = rule.recorders(net) if isinstance(rule, RecordingRule) else {}
        for recorder in made.values():
            _bind(recorder, net)
        for key, state in self._saved.get(name, {}).items():
            try:
                _restore(made[key], state)
            except CheckpointError as error:
                error.add_note(
                    f"raised for recorder {key!r} of rule {name!r}; disable() and enable() let it"
                    " forget"
                )
                raise
        self._saved.pop(name, None)
        self._recorders[name] = made
        return made

    def seen(self, name: str, rule: Rule) -> dict[str, Recorder]:
        """Returns the recorders of a rule that is due; raises GrapNetError when one of them has
        seen nothing.
        """
        recorders = self.of(name, rule)
        for key, recorder in recorders.items():
            if getattr(recorder, "count", None) == 0:
                if left_out := getattr(recorder, "left_out", 0):
                    raise GrapNetError(
                        f"rule {name!r} is due, and its recorder {key!r} has left out all"
                        f" {left_out} gradients that it was shown, which were not finite. Lower the"
                        " scale of the loss, or let it watch more steps"
                    )
                if self._second:
                    raise GrapNetError(
                        f"rule {name!r} is due, and its recorder {key!r} has seen nothing of this"
                        " net: a manager keeps the schedules and the evidence of one net, and this"
                        " one has turned to it from another. Give every net a manager of its own"
                    )
                raise GrapNetError(
                    f"rule {name!r} is due, and its recorder {key!r} has seen nothing. Call"
                    " manager.start(net) before the first step, or run data through the net inside"
                    " `with manager.recording(net):`"
                )
        return recorders

    def arm(self, name: str, rule: Rule, wanted: Callable[[Recorder], bool]) -> None:
        """Lets those recorders of a rule watch for which `wanted` is true, and no others."""
        net = self.net
        for key, recorder in self.of(name, rule).items():
            if net is not None and wanted(recorder):
                recorder.arm(net)
                self._watching.add((name, key))
            elif (name, key) in self._watching:
                recorder.disarm()
                self._watching.discard((name, key))

    def clear(self, name: str) -> None:
        """Lets the recorders of a rule forget what they have seen."""
        self._saved.pop(name, None)
        for recorder in self._recorders.get(name, {}).values():
            recorder.clear()

    def drop(self, name: str) -> None:
        """Stops the recorders of a rule and lets go of them."""
        for key, recorder in self._recorders.pop(name, {}).items():
            recorder.disarm()
            self._watching.discard((name, key))
        self._saved.pop(name, None)

    @contextmanager
    def renewed(self, name: str) -> Iterator[None]:
        """Lets a rule get other recorders inside the block; if that raises, it has those from
        before, as they were.
        """
        recorders, saved = self._recorders.pop(name, None), self._saved.pop(name, None)
        watching = {pair for pair in self._watching if pair[0] == name}
        self._watching -= watching
        try:
            yield
        except BaseException:
            self.drop(name)
            self._recorders |= {} if recorders is None else {name: recorders}
            self._saved |= {} if saved is None else {name: saved}
            self._watching |= watching
            raise
        for recorder in (recorders or {}).values():
            recorder.disarm()

    def drop_all(self) -> None:
        """Stops all recorders and lets go of them."""
        for name in [*self._recorders]:
            self.drop(name)

    @contextmanager
    def watching(self, rules: Iterable[tuple[str, Rule]]) -> Iterator[None]:
        """Lets all recorders of some rules watch inside the block; afterwards those watch that did
        before.
        """
        before, rules = set(self._watching), list(rules)
        try:
            for name, rule in rules:
                self.arm(name, rule, lambda _: True)
            yield
        finally:
            self._put_back(before)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Lets no recorder watch inside the block; afterwards those watch that did before."""
        before = set(self._watching)
        try:
            for name, key in sorted(before):
                self._recorders[name][key].disarm()
            self._watching.clear()
            yield
        finally:
            self._put_back(before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keeps a trial from the recorders: they do not watch it, and have seen afterwards what
        they had before.
        """
        states = copy.deepcopy(self.state_dict())
        with self.pausing():
            try:
                yield
            finally:
                for name, recorders in self._recorders.items():
                    for key, recorder in recorders.items():
                        state = states.get(name, {}).get(key)
                        if not same(state, _state(recorder)):
                            _restore(recorder, state)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Returns the state of every recorder that has one, by rule and name."""
        made = {
            name: {key: _state(recorder) for key, recorder in recorders.items()}
            for name, recorders in self._recorders.items()
        }
        return {**self._saved, **made}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives recorders their states back; those that are not made yet take theirs over when they
        are.
        """
        for name, recorders in self._recorders.items():
            for key, recorder in recorders.items():
                recorder.clear()
                _restore(recorder, state.get(name, {}).get(key))
        self._saved = {
            name: dict(states) for name, states in state.items() if name not in self._recorders
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(saved=state["saved"])

    def _put_back(self, before: set[tuple[str, str]]) -> None:
        net = self.net
        # others were let go of
        before = {(name, key) for name, key in before if key in self._recorders.get(name, {})}
        for name, key in sorted(self._watching - before):
            self._recorders[name][key].disarm()
        for name, key in sorted(before - self._watching):
            if net is not None:
                self._recorders[name][key].arm(net)
        self._watching = before


def _bind(recorder: Any, net: GrapNet) -> None:
    if hasattr(recorder, "bind"):
        recorder.bind(net)


def _has_state(recorder: Any) -> bool:
    return hasattr(recorder, "state_dict") and hasattr(recorder, "load_state_dict")


def _state(recorder: Any) -> Any:
    return recorder.state_dict() if _has_state(recorder) else None


def _restore(recorder: Any, state: Any) -> None:
    if state is not None and _has_state(recorder):
        recorder.load_state_dict(state)
