"""RuleManager: which rules change nets, when, in what order and how much."""

import copy
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._edit import edit as edit_nets
from grapnet.core._errors import CheckpointError, EditError, GrapNetError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit

from ._budget import Budget, enforce
from ._preview import Preview, Probe, preview
from ._recorder import RecorderSet, set_state, state_of
from ._rule import Every, Nets, Recorder, Rule, RuleContext, Schedule, Scheduled, nets_of


class RuleError(GrapNetError, LookupError):
    """A manager has no rule of that name, or has one already; nothing was changed."""


@dataclass(eq=False)
class _Entry:
    """One rule of a manager."""

    name: str
    rule: Rule
    schedule: Schedule
    budget: Budget | None
    enabled: bool

    def description(self) -> dict[str, Any]:
        """Returns what must be equal for a saved state to fit, as plain data."""
        return {
            "rule": _describe(self.rule),
            "schedule": _describe(self.schedule),
            "budget": _describe(self.budget),
        }


class RuleManager:
    """Holds rules in order and applies those that are due in one transaction.

    It works on one net, or on all nets of a model: every rule is called once for each net, the
    edits commit together, and a budget counts the relations of all nets. All random numbers come
    from the manager's own generator, so runs with equal seeds make equal commits. A dry run and an
    `apply` that raises do not advance the generator. A copy, pickled or not, has the evidence of
    the recorders, for the first nets that it gets, and records nothing until `start`.

    Args:
        seed: the seed of the generator.
        budget: the budget of all rules of one `apply` together.
        allow_dead: commit even if a transition loses its last relation or an output its last
            parent; otherwise `apply` raises EditError, also for a dry run. `Budget(parents=1)`
            keeps the last parents instead.

    Examples:
        >>> import grapnet as gn
        >>> def halve(net, edit, context):
        ...     edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
        >>> manager = RuleManager()
        >>> manager.add(halve, schedule=Every(10, start=10))
        'halve'
        >>> net = gn.GrapNet([8, 4, 2])
        >>> manager.apply(net, 0) is None
        True
        >>> manager.apply(net, 10)
        Commit(version=1, 'halve at step 10', by halve: relations_removed 16)
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        budget: Budget = Budget(),  # noqa: B008 (it is frozen)
        allow_dead: bool = False,
    ) -> None:
        self.budget = budget
        self.allow_dead = allow_dead
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._entries: list[_Entry] = []
        self._recorders: dict[str, RecorderSet] = {}  # by the names of the nets
        # States of recorders, by net and rule, that wait for their nets.
        self._saved: dict[str, Mapping[str, Any]] = {}
        self._next_step: int | None = None  # None before the first start or apply
        # Inside `recording` and `pausing`: whether all recorders watch, or none.
        self._watching: bool | None = None

    def add(
        self,
        rule: Rule | Scheduled,
        *,
        name: str | None = None,
        schedule: Schedule | None = None,
        budget: Budget | None = None,
        before: str | None = None,
        after: str | None = None,
        enabled: bool = True,
    ) -> str:
        """Adds a rule at the end, or before or after another one; returns its name.

        Args:
            rule: the rule, or rule and schedule in one, such as `rigl(steps=1000)`.
            name: its name; by default that of its class, with a number if that is taken.
            schedule: when it is due; every step by default.
            budget: its budget, in addition to that of the manager.
            before: the name of the rule that comes after it.
            after: the name of the rule that comes before it.
            enabled: False to add it disabled.
        """
        if isinstance(rule, Scheduled):
            if schedule is not None:
                raise TypeError("the rule brings its schedule; leave out schedule=")
            rule, schedule = rule
        elif schedule is None:
            schedule = Every(1)
        if isinstance(rule, type):
            raise TypeError(f"add an object, {rule.__name__}(…), not the class")
        if name is None:
            name = self._free_name(_title(rule))
        if name in self:
            raise RuleError(f"a rule is called {name!r} already; replace() puts another there")
        if before is not None and after is not None:
            raise RuleError(f"say before= or after=, not both; got {before!r} and {after!r}")
        place = len(self)
        if before is not None:
            place = self._place(before)
        elif after is not None:
            place = self._place(after) + 1
        entry = _Entry(name, rule, schedule, budget, enabled)
        if enabled:
            self._give_recorders(entry)
        self._entries.insert(place, entry)
        return name

    def replace(self, name: str, rule: Rule) -> Rule:
        """Replaces a rule, keeping its schedule and budget; returns the old one."""
        place = self._place(name)
        entry = self._entries[place]
        other = replace(entry, rule=rule)
        if other.enabled:
            self._give_recorders(other)
        self._entries[place] = other
        return entry.rule

    def enable(self, name: str) -> None:
        """Enables a rule."""
        entry = self._entry(name)
        if not entry.enabled:
            self._give_recorders(entry)
            entry.enabled = True

    def disable(self, name: str) -> None:
        """Disables a rule; its recorders stop and forget what they have seen."""
        self._entry(name).enabled = False
        self._drop_recorders(name)

    def remove(self, name: str) -> Rule:
        """Removes a rule and returns it."""
        entry = self._entry(name)
        self._drop_recorders(name)
        self._entries.remove(entry)
        return entry.rule

    def reorder(self, names: Iterable[str]) -> None:
        """Puts the rules into the order of `names`, which contains each of them once."""
        names = list(names)
        entries = [self._entry(name) for name in names]
        if sorted(names) != sorted(self.names):
            raise RuleError(f"an order names every rule once ({self._known()}), got {names}")
        self._entries = entries

    @property
    def names(self) -> list[str]:
        """The names of the rules, in the order in which they are applied."""
        return [entry.name for entry in self._entries]

    def is_enabled(self, name: str) -> bool:
        """Returns whether a rule is enabled."""
        return self._entry(name).enabled

    def never_due(self, steps: int) -> list[str]:
        """Returns the names of enabled rules that cannot be due in the first `steps` steps."""
        return [e.name for e in self._enabled() if not e.schedule.may_be_due(0, steps - 1)]

    def start(self, model: Nets, step: int | None = None) -> None:
        """Arms the recorders that the next steps need; call it before training starts or resumes.

        Args:
            model: the net, or the nets, as for `apply`.
            step: of the next `apply`; the one after the last by default, 0 at first.
        """
        step = self._step(step)
        self._adopt(self._made(nets_of(model)))
        self._next_step = step
        self._arm()

    @contextmanager
    def recording(self, model: Nets) -> Iterator[None]:
        """Arms all recorders of enabled rules inside the block: run the data through there."""
        self._adopt(self._made(nets_of(model)))
        with self._while_watching(True):
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Disarms all recorders inside the block, for instance while a net is validated."""
        with self._while_watching(False):
            yield

    @overload
    def apply(
        self,
        model: Nets,
        step: int | None = ...,
        *,
        task: Any = ...,
        dry_run: Literal[True],
        probe: Probe | None = ...,
    ) -> Preview: ...
    @overload
    def apply(  # pyright: ignore[reportOverlappingOverload]
        self,
        model: Graph,
        step: int | None = ...,
        *,
        task: Any = ...,
        dry_run: Literal[False] = ...,
    ) -> Commit | None: ...
    @overload
    def apply(
        self,
        model: Nets,
        step: int | None = ...,
        *,
        task: Any = ...,
        dry_run: Literal[False] = ...,
    ) -> dict[str, Commit]: ...
    def apply(
        self,
        model: Nets,
        step: int | None = None,
        *,
        task: Any = None,
        dry_run: bool = False,
        probe: Probe | None = None,
    ) -> Commit | dict[str, Commit] | Preview | None:
        """Applies the enabled rules that are due, in order, in one transaction.

        Call it after `optimizer.step()`. Rules are called one after the other, each of them for
        every net.

        Args:
            model: the net; a model, whose nets are found, or that was adopted; or nets by name or
                in a sequence.
            step: the number of the training step; the one after the last by default, 0 at first.
                The journal holds only a step that was given.
            task: the task that begins or has ended, for rules and schedules that go by tasks.
            dry_run: only return what would happen. Like every edit it belongs between two training
                steps: a backward through a forward pass before it raises.
            probe: inputs of the model on which a dry run compares the output; or a function of the
                model that returns a number, such as its accuracy. It is called before and after, in
                evaluation mode; it must leave the model as it is.

        Returns:
            For a net, the commit, or None when no rule was due or nothing was to change. For
            several nets, the commits by the names of the nets that changed. For a dry run, a
            Preview.

        Raises:
            EditError: a transition would lose its last relation or an output its last parent, and
                the manager does not allow it.
            Exception: whatever a rule raises, with a note that names it. Nets, optimizers,
                generator, recorders, and the state of rules that have `state_dict` and
                `load_state_dict` are as before.
        """
        nets = nets_of(model)
        context = RuleContext(self._step(step), task)
        if probe is not None and not dry_run:
            raise ValueError("probe= is for a dry run; say dry_run=True")
        due = [e for e in self._enabled() if e.schedule.is_due(context.step, task)]
        by = ", ".join(entry.name for entry in due)
        details = _details(step, task)
        recorders = self._made(nets)

        def write(edits: Sequence[Edit]) -> None:
            for entry in due:
                self._call(entry, nets, edits, recorders, context, details)

        def together(reason: str, *, trial: bool = False) -> Any:
            return edit_nets(
                *nets.values(),
                reason=reason,
                by=by,
                trial=trial,
                generator=self._generator,
                allow_dead=self.allow_dead,
            )

        if dry_run:
            parts = [entry.rule for entry in due]
            for own in recorders.values():
                parts += own.foreign()
            with self.pausing(), self._rewound(parts, always=True):
                trial = together(f"dry run of {by}", trial=True)
                names = tuple(entry.name for entry in due)
                return preview(model, nets, trial, write, probe, names)
        commits: dict[str, Commit] = {}
        if due:
            with (
                self._rewound([entry.rule for entry in due]),
                together(by + _in_words(details)) as edits,
            ):
                write(edits)
            for name, edit in zip(nets, edits, strict=True):
                if edit.receipt is not None:
                    commits[name] = edit.receipt
        self._adopt(recorders)
        for own in recorders.values():
            for entry in due:
                own.clear(entry.name)
        self._next_step = context.step + 1
        self._arm()
        if isinstance(model, Graph):
            return commits.get("")
        return commits

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data and tensors: the rules with their settings and states, the generator,
        and the recorders as far as they have `state_dict` and `load_state_dict`.
        """
        rules = []
        for entry in self._entries:
            part = {"name": entry.name, "enabled": entry.enabled, **entry.description()}
            rules.append({**part, "state": state_of(entry.rule)})
        states = self._recorded()
        return {
            "generator": self._generator.get_state(),
            "next_step": self._next_step,
            "budget": _describe(self.budget),
            "rules": rules,
            "recorders": [{"net": net, "rules": part} for net, part in states.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the order and the states of the rules, and whether they are enabled.

        Call `start` afterwards, which arms the recorders again.

        Raises:
            CheckpointError: the rules differ in name, class, schedule or budget, or in the fields
                of a dataclass; or there is evidence about other nets. Nothing was changed.
        """
        _require_same("the manager's budget", state["budget"], _describe(self.budget))
        saved = {part["name"]: part for part in state["rules"]}
        if sorted(saved) != sorted(self.names):
            raise CheckpointError(
                f"the state holds the rules {', '.join(saved) or 'none'}, and {self._known()}."
                " Add the same rules under the same names, and load it then"
            )
        for entry in self._entries:
            for what, present in entry.description().items():
                _require_same(f"the {what} of {entry.name!r}", saved[entry.name][what], present)
        present = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except BaseException:
            self._load(present)
            raise

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Rule]:
        return iter([entry.rule for entry in self._entries])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Rule:
        return self._entry(name).rule

    def __repr__(self) -> str:
        rows = []
        for entry in self._entries:
            disabled = "" if entry.enabled else ", disabled"
            rows.append(f"  {entry.name}: {entry.rule!r}, {entry.schedule!r}{disabled}")
        if not rows:
            return "RuleManager()"
        return "\n".join(["RuleManager(", *rows, ")"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_saved": self._recorded(), "_recorders": {}, "_watching": None}

    def _call(
        self,
        entry: _Entry,
        nets: Mapping[str, Graph],
        edits: Sequence[Edit],
        recorders: Mapping[str, RecorderSet],
        context: RuleContext,
        details: Mapping[str, Any],
    ) -> None:
        """Lets one rule write into the edits of all nets, within its budget and the manager's.

        The relations that a budget has left are shared out by the size of the nets; what a net
        does not use goes to those after it.
        """
        budget = self.budget.tightened(entry.budget)
        own = None if entry.budget is None else entry.budget.edits
        evidence = {name: recorders[name].evidence(entry.name) for name in nets}
        # One net gets all of a budget, whatever its size.
        sizes = [1]
        if len(nets) > 1:
            sizes = [_size(net) for net in nets.values()]
        cuts = _Allowance(self.budget.edits, own, [len(edit.cuts) for edit in edits])
        connections = _Allowance(self.budget.edits, own, [edit.n_connections for edit in edits])
        for place, (name, net) in enumerate(nets.items()):
            edit = edits[place]
            settled = edit.cuts
            connected = edit.n_connections
            cuts_left = cuts.share(sizes[place], sum(sizes[place:]))
            connections_left = connections.share(sizes[place], sum(sizes[place:]))
            left = _smallest(cuts_left, connections_left)
            within = Budget(left, budget.parents, budget.children)
            edit.remark(entry.name, **details)
            before = len(edit._operations)
            try:
                entry.rule(net, edit, replace(context, budget=within, evidence=evidence[name]))
                if edit.receipt is not None:
                    raise EditError(
                        "a rule writes into the edit and leaves it to the manager to commit it;"
                        f" this one has committed version {net.version}, which net.undo() takes"
                        " back"
                    )
                limit = None if connections_left is None else connected + connections_left
                asked = len(edit.cuts)
                enforce(net, edit, budget, settled=settled, cuts=cuts_left, connections=limit)
                written = [operation["operation"] for operation in edit._operations[before:]]
                if len(edit.cuts) < asked and "assign" in written:
                    raise EditError(
                        f"the budget allows {len(edit.cuts):,} of {asked:,} cuts, and this rule has"
                        " assigned weights that go with all of them, as repair does. Let the rule"
                        " cut within context.budget, with weakest_within for example"
                    )
            except Exception as error:
                error.add_note(f"raised by rule {entry.name!r}{_in_words(details)}")
                raise
            cuts.use(len(edit.cuts) - len(settled))
            connections.use(edit.n_connections - connected)

    def _step(self, step: int | None) -> int:
        """Returns the number of a step, the one after the last where none is given."""
        if step is None:
            return self._next_step or 0
        return operator.index(step)

    @contextmanager
    def _rewound(self, parts: Sequence[Any], *, always: bool = False) -> Iterator[None]:
        """Restores the generator and the states of some parts if the block raises, or always."""
        generator = self._generator.get_state()
        states = [(part, copy.deepcopy(state_of(part))) for part in parts]
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                self._generator.set_state(generator)
                for part, state in states:
                    set_state(part, state)

    def _enabled(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.enabled]

    def _entry(self, name: str) -> _Entry:
        return self._entries[self._place(name)]

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise RuleError(f"no rule is called {name!r}; {self._known()}")
        return self.names.index(name)

    def _free_name(self, wanted: str) -> str:
        name = wanted
        number = 2
        while name in self:
            name = f"{wanted} {number}"
            number += 1
        return name

    def _known(self) -> str:
        return f"the manager has {', '.join(self.names) or 'none'}"

    def _recorded(self) -> dict[str, Mapping[str, Any]]:
        """Returns the states of the recorders, by net and rule."""
        if not self._recorders:
            return self._saved
        return {name: recorders.state_dict() for name, recorders in self._recorders.items()}

    def _made(self, nets: Mapping[str, Graph]) -> dict[str, RecorderSet]:
        """Returns the recorders of all enabled rules; they are made first, since that may raise."""
        saved = _by_net(self._saved, list(nets))
        made = {}
        for name, net in nets.items():
            own = RecorderSet(net)
            for present in self._recorders.values():
                if present.net is net:
                    own = present
            states = saved.get(name, {})
            for entry in self._enabled():
                own.make(entry.name, entry.rule, states.get(entry.name, {}))
            made[name] = own
        return made

    def _adopt(self, recorders: dict[str, RecorderSet]) -> None:
        """Goes over to these recorders, and drops those of other nets."""
        for own in self._recorders.values():
            if own not in recorders.values():
                own.drop_all()
        self._recorders = recorders
        self._saved = {}

    def _arm(self) -> None:
        """Arms those recorders whose rule may be due within their window from the next step on."""
        for recorders in self._recorders.values():
            for entry in self._enabled():
                recorders.arm(entry.name, self._wanted(entry))

    def _wanted(self, entry: _Entry) -> Callable[[Recorder], bool]:
        """Returns the function that tells whether a recorder of a rule watches the next step."""

        def wanted(recorder: Recorder) -> bool:
            if self._watching is not None:
                return self._watching
            step = self._next_step
            return step is not None and entry.schedule.may_be_due(step, step + recorder.window - 1)

        return wanted

    @contextmanager
    def _while_watching(self, everything: bool) -> Iterator[None]:
        """Arms all recorders of enabled rules inside the block, or none."""
        before = self._watching
        self._watching = everything
        try:
            self._arm()
            yield
        finally:
            self._watching = before
            self._arm()

    def _give_recorders(self, entry: _Entry) -> None:
        """Gives a rule recorders of its own; where one raises, everything stays as it was."""
        prepared = []
        try:
            for recorders in self._recorders.values():
                prepared.append(recorders.prepare(entry.rule))
                recorders.arm_all(prepared[-1], self._wanted(entry))
        except BaseException:
            for made in prepared:
                for recorder in made.values():
                    recorder.disarm()
            raise
        self._drop_recorders(entry.name)
        for recorders, made in zip(self._recorders.values(), prepared, strict=True):
            recorders.install(entry.name, made)

    def _drop_recorders(self, name: str) -> None:
        for recorders in self._recorders.values():
            recorders.drop(name)
        for net, states in self._saved.items():
            self._saved[net] = {rule: state for rule, state in states.items() if rule != name}

    def _load(self, state: Mapping[str, Any]) -> None:
        saved = {part["net"]: part["rules"] for part in state["recorders"]}
        by_net = _by_net(saved, list(self._recorders))
        self._generator.set_state(state["generator"])
        self.reorder(part["name"] for part in state["rules"])
        for entry, part in zip(self._entries, state["rules"], strict=True):
            entry.enabled = bool(part["enabled"])
            set_state(entry.rule, part["state"])
            if not entry.enabled:
                self._drop_recorders(entry.name)
        for name, recorders in self._recorders.items():
            for entry in self._enabled():
                recorders.make(entry.name, entry.rule, {})
            recorders.load_state_dict(by_net.get(name, {}))
        if not self._recorders:
            self._saved = saved
        self._next_step = state["next_step"]
        self._arm()


class _Allowance:
    """How many relations one rule may still cut, or connect, in all nets together.

    Args:
        shared: the limit of the manager, for all rules of one `apply`; None for none.
        own: the limit of the rule; None for none.
        used: how many the rules before it have asked for, net by net.
    """

    def __init__(self, shared: int | None, own: int | None, used: list[int]) -> None:
        rest = None if shared is None else shared - sum(used)
        self._left = _smallest(rest, own)

    def share(self, size: int, total: int) -> int | None:
        """Returns the share of a net in what is left; None for any number."""
        if self._left is None:
            return None
        return self._left * size // total

    def use(self, count: int) -> None:
        """Takes off what was asked for."""
        if self._left is not None:
            self._left -= count


def _size(net: Graph) -> int:
    """Returns the number of nodes and relations, by which nets share a budget."""
    nodes = sum(len(layer) for layer in net._own_layers)
    return nodes + sum(transition.size for transition in net.transitions)


def _smallest(*limits: int | None) -> int | None:
    """Returns the smallest of some limits, of which None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _by_net(
    saved: Mapping[str, Mapping[str, Any]], names: list[str]
) -> Mapping[str, Mapping[str, Any]]:
    """Returns saved states by the names of nets; where there is one, its name does not matter.

    Raises:
        CheckpointError: a state is about a net that is not among them.
    """
    if len(saved) == len(names) == 1:
        return dict(zip(names, saved.values(), strict=True))
    missing = [name for name, states in saved.items() if states and name not in names]
    if missing and names:
        raise CheckpointError(
            f"the recorders that were saved watched the nets {missing}, and these are {names}"
        )
    return saved


def _details(step: int | None, task: Any) -> dict[str, Any]:
    """Returns the step and the task that a caller gave, as the journal keeps them."""
    details: dict[str, Any] = {}
    if step is not None:
        details["step"] = operator.index(step)
    if task is not None:
        details["task"] = task if isinstance(task, str | int | float) else str(task)
    return details


def _in_words(details: Mapping[str, Any]) -> str:
    """Returns details as the end of a sentence.

    Examples:
        >>> _in_words({"step": 7, "task": "b"}), _in_words({})
        (' at step 7, task b', '')
    """
    if not details:
        return ""
    return " at " + ", ".join(f"{name} {value}" for name, value in details.items())


def _title(thing: Any) -> str:
    """Returns the name of an object's class, or of a function."""
    return getattr(thing, "__name__", type(thing).__name__)


def _describe(thing: Any) -> dict[str, Any]:
    """Returns the class of an object and, of a dataclass, its fields, as plain data.

    Examples:
        >>> _describe(Every(100, until=500))
        {'class': 'Every', 'settings': {'steps': 100, 'start': 0, 'until': 500}}
    """
    settings = {}
    if is_dataclass(thing) and not isinstance(thing, type):
        settings = {part.name: _plain(getattr(thing, part.name)) for part in fields(thing)}
    return {"class": _title(thing), "settings": settings}


def _plain(value: Any) -> Any:
    """Returns a setting as plain data; an object of another kind is described."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(item) for item in value]
    return _describe(value)


def _require_same(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises CheckpointError when two descriptions differ."""
    # As text, a list equals a tuple and NaN equals NaN.
    before = json.dumps(saved, sort_keys=True)
    after = json.dumps(present, sort_keys=True)
    if before != after:
        raise CheckpointError(f"{what} is not the one that was saved: it was {before}, is {after}")
