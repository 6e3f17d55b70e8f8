"""RuleManager: which rules change a net, when, in what order and how much, one transaction an apply."""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor

from grapnet.core.edit import Edit
from grapnet.core.errors import EditError
from grapnet.core.journal import Commit
from grapnet.network import GrapNet

from .budget import Budget, enforce
from .preview import Preview, preview
from .recorder_set import RecorderSet
from .roster import Entry, Roster, require_budget, require_net, require_rule, require_same, require_schedule
from .rule import Moment, Rule
from .schedule import Every, Schedule
from .settings import describe, title


class RuleManager:
    """Holds rules in order and applies those that are due, all of them in one transaction; every net has its own.

    Everything random comes from a generator of its own, so that runs with equal seeds make equal commits. The generator
    moves on with every `apply` in which a rule drew from it, also when nothing was changed; a dry run and an `apply`
    that raises leave it where it was. A copy, pickled or not, has what the recorders have seen, for the first net that
    it is given, and watches nothing until `start(net)`.

    Args:
        seed: of the generator.
        budget: what all rules of one `apply` together must keep within.

    Examples:
        >>> def halve(net, edit, now):
        ...     edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
        >>> manager, net = RuleManager(), GrapNet([8, 4, 2])
        >>> manager.inject(halve, schedule=Every(10, start=10))
        'halve'
        >>> manager.apply(net, 0) is None
        True
        >>> manager.apply(net, 10)
        Commit(version=1, 'halve at step 10', by halve: relations_removed 16)
    """

    def __init__(self, *, seed: int = 0, budget: Budget = Budget()) -> None:  # noqa: B008 (it is frozen)
        require_budget(budget)
        self.budget = budget
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._roster = Roster()
        self._recorders = RecorderSet()
        self._next_step: int | None = None  # None before the first start or apply

    def inject(
        self,
        rule: Rule,
        *,
        name: str | None = None,
        schedule: Schedule = Every(1),  # noqa: B008 (it is frozen)
        budget: Budget | None = None,
        before: str | None = None,
        after: str | None = None,
        enabled: bool = True,
    ) -> str:
        """Adds a rule, behind the others unless told otherwise, and returns its name.

        Args:
            rule: the rule.
            name: to call it by; the name of its class by default, with a number when that is taken.
            schedule: when it is due.
            budget: what it must keep within, beside the manager's own.
            before: the name of the rule to put it before.
            after: the name of the rule to put it behind.
            enabled: False to add it switched off.
        """
        require_rule(rule)
        require_schedule(schedule)
        if budget is not None:
            require_budget(budget)
        name = self._roster.free_name(title(rule)) if name is None else str(name)
        self._roster.add(Entry(name, rule, schedule, budget, enabled), before, after)
        self._arm_new(name, lambda: self._roster.remove(name))
        return name

    def replace(self, name: str, rule: Rule) -> Rule:
        """Puts another rule in the place of one, with its schedule and budget, and returns the old one."""
        require_rule(rule)
        entry = self._roster[name]
        old, entry.rule = entry.rule, rule
        self._arm_new(name, lambda: setattr(entry, "rule", old))
        return old

    def enable(self, name: str) -> None:
        """Switches a rule on."""
        entry = self._roster[name]
        if not entry.enabled:
            entry.enabled = True
            self._arm_new(name, lambda: setattr(entry, "enabled", False))

    def disable(self, name: str) -> None:
        """Switches a rule off; its recorders stop to watch and forget what they have seen."""
        self._roster[name].enabled = False
        self._recorders.drop(name)

    def remove(self, name: str) -> Rule:
        """Takes a rule out and returns it."""
        entry = self._roster[name]
        self._recorders.drop(name)
        self._roster.remove(name)
        return entry.rule

    def reorder(self, names: Iterable[str]) -> None:
        """Puts the rules into the order of `names`, which has every one of them once."""
        self._roster.reorder(names)

    @property
    def names(self) -> list[str]:
        """The names of the rules, in the order in which they are applied."""
        return self._roster.names

    def is_enabled(self, name: str) -> bool:
        """Says whether a rule is switched on."""
        return self._roster[name].enabled

    def start(self, net: GrapNet, step: int | None = None) -> None:
        """Lets the recorders watch that the next steps need; call it before training begins or goes on.

        Args:
            net: the net.
            step: of the next `apply`; the one after the last by default, 0 at first.
        """
        require_net(net)
        step = (self._next_step or 0) if step is None else operator.index(step)
        self._adopt(self._made(net))
        self._arm(step)

    @contextmanager
    def recording(self, net: GrapNet) -> Iterator[None]:
        """Lets all recorders of enabled rules watch inside the block: run the data through the net there."""
        self._adopt(self._made(net))
        with self._recorders.watching([(entry.name, entry.rule) for entry in self._roster.enabled]):
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Lets no recorder watch inside the block, as while the net is validated; those go on that watched before."""
        with self._recorders.pausing():
            yield

    @overload
    def apply(
        self, net: GrapNet, step: int, *, task: Any = None, dry_run: Literal[False] = False, probe: None = None
    ) -> Commit | None: ...
    @overload
    def apply(
        self, net: GrapNet, step: int, *, task: Any = None, dry_run: Literal[True], probe: Tensor | None = None
    ) -> Preview: ...
    def apply(
        self, net: GrapNet, step: int, *, task: Any = None, dry_run: bool = False, probe: Tensor | None = None
    ) -> Commit | Preview | None:
        """Applies the enabled rules that are due, in order, as one commit; call it after `optimizer.step()`.

        Args:
            net: the net.
            step: the number of the training step.
            task: the task that ended with this step, for rules and schedules that go by tasks.
            dry_run: only say what would happen. Like every edit it belongs between two training steps: a backward
                through a forward pass of before it raises.
            probe: inputs on which a dry run compares the output.

        Returns:
            The commit, or None when no rule was due or nothing was to change; a Preview for a dry run.

        Raises:
            Exception: whatever a rule raises, with a note that names it. Net, optimizers, generator, recorders, and the
                state of rules that have `state_dict` and `load_state_dict` are as before.
        """
        require_net(net)
        step = operator.index(step)
        if probe is not None and not dry_run:
            raise ValueError("probe= is for a dry run; say dry_run=True")
        due = [entry for entry in self._roster.enabled if entry.schedule.is_due(step, task)]
        recorders, names = self._made(net), tuple(entry.name for entry in due)

        def write(edit: Edit) -> None:
            for entry in due:
                self._write(net, edit, entry, step, task, recorders)

        if dry_run:
            with recorders.aside(), self._rewound(due, always=True):
                return preview(net, names, write, generator=self._generator, probe=probe)
        commit = None
        if due:
            reason = f"{', '.join(names)} at step {step}" + ("" if task is None else f", task {task}")
            with self._rewound(due), net.edit(reason, by=", ".join(names), generator=self._generator) as edit:
                write(edit)
                commit = edit.commit()
        self._adopt(recorders)
        for name in names:
            recorders.clear(name)
        self._arm(step + 1)
        return commit

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data and tensors: the rules with their settings and states, and where the generator is.

        Recorders are part of it as far as they have `state_dict` and `load_state_dict`.
        """
        recorders = self._recorders.state_dict()
        return {
            "generator": self._generator.get_state(),
            "next_step": self._next_step,
            "budget": describe(self.budget),
            "rules": [
                {
                    "name": entry.name,
                    "enabled": entry.enabled,
                    **entry.description(),
                    "state": _state(entry.rule),
                    "recorders": recorders.get(entry.name, {}),
                }
                for entry in self._roster
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the order, the switches and the states of rules that were injected like those that were saved.

        Call `start(net)` afterwards, so that those recorders watch which did when it was saved.

        Raises:
            CheckpointError: the rules differ in name, class, settings, schedule or budget; nothing was changed.
        """
        require_same("the manager's budget", state["budget"], describe(self.budget))
        self._roster.require_fit({part["name"]: part for part in state["rules"]})
        present = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except BaseException:
            self._load(present)
            raise

    def __len__(self) -> int:
        return len(self._roster)

    def __iter__(self) -> Iterator[Rule]:
        return iter([entry.rule for entry in self._roster])

    def __contains__(self, name: object) -> bool:
        return name in self._roster.names

    def __getitem__(self, name: str) -> Rule:
        return self._roster[name].rule

    def __repr__(self) -> str:
        rows = [f"  {e.name}: {e.rule!r}, {e.schedule!r}{'' if e.enabled else ', disabled'}" for e in self._roster]
        return "\n".join(["RuleManager(", *rows, ")"]) if rows else "RuleManager()"

    def _write(self, net: GrapNet, edit: Edit, entry: Entry, step: int, task: Any, recorders: RecorderSet) -> None:
        """Lets one rule write into the edit, and holds it to its budget and, with those before it, to the manager's."""
        settled, connected = edit.cuts, edit.n_connections
        within = self.budget.tightened(entry.budget)
        shared, own = self.budget.edits, None if entry.budget is None else entry.budget.edits
        cuts = _smaller(own, None if shared is None else shared - len(settled))
        connections = _smaller(None if own is None else connected + own, shared)
        left = _smaller(cuts, None if connections is None else connections - connected)
        details = {} if task is None else {"task": task if isinstance(task, str | int | float) else str(task)}
        edit.remark(entry.name, step=step, **details)
        evidence = recorders.seen(entry.name, entry.rule)
        try:
            entry.rule(net, edit, Moment(step, task, Budget(left, within.parents, within.children), evidence))
            if edit.receipt is not None:
                raise EditError(
                    "a rule writes into the edit and leaves it to the manager to commit it; this one has committed "
                    f"version {net.version}, which net.undo() takes back"
                )
            rule = f"rule {entry.name!r}"
            enforce(net, edit, within, rule=rule, settled=settled, cuts=cuts, connections=connections)
        except Exception as error:
            error.add_note(f"raised by rule {entry.name!r} at step {step}")
            raise

    @contextmanager
    def _rewound(self, due: list[Entry], *, always: bool = False) -> Iterator[None]:
        """Puts the generator and the states of rules back when the block raises, or always."""
        generator = self._generator.get_state()
        states = [(entry.rule, copy.deepcopy(_state(entry.rule))) for entry in due]
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                self._generator.set_state(generator)
                for rule, state in states:
                    _set_state(rule, state)

    def _made(self, net: GrapNet) -> RecorderSet:
        """Returns recorders on a net for all enabled rules, made before anything happens, since that may raise."""
        recorders = self._recorders.on(net)
        for entry in self._roster.enabled:
            recorders.of(entry.name, entry.rule)
        return recorders

    def _adopt(self, recorders: RecorderSet) -> None:
        """Goes over to the recorders of another net."""
        if recorders is not self._recorders:
            self._recorders.drop_all()
            self._recorders = recorders

    def _arm(self, step: int) -> None:
        """Lets those recorders watch whose rule may be due within their window, beginning with `step`."""
        self._next_step = step
        for entry in self._roster.enabled:
            may_be_due = entry.schedule.may_be_due
            self._recorders.arm(entry.name, entry.rule, lambda r, may=may_be_due: may(step, step + r.window - 1))

    def _arm_again(self) -> None:
        """Lets recorders of rules that came while a net trains watch from now on."""
        if self._next_step is not None and self._recorders.net is not None:
            self._arm(self._next_step)

    def _arm_new(self, name: str, back: Callable[[], None]) -> None:
        """Arms the recorders of a rule that has come; if that raises, calls `back` and leaves those it had."""
        try:
            with self._recorders.renewed(name):
                self._arm_again()
        except BaseException:
            back()
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._roster.reorder(part["name"] for part in state["rules"])
        for entry, part in zip(self._roster, state["rules"], strict=True):
            entry.enabled = bool(part["enabled"])
            _set_state(entry.rule, part["state"])
            if not entry.enabled:
                self._recorders.drop(entry.name)
        self._recorders.load_state_dict({part["name"]: part["recorders"] for part in state["rules"]})
        self._next_step = state["next_step"]
        self._arm_again()


def _smaller(one: int | None, other: int | None) -> int | None:
    """Returns the smaller of two limits, of which None is no limit."""
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _state(rule: Any) -> Any:
    return rule.state_dict() if hasattr(rule, "state_dict") and hasattr(rule, "load_state_dict") else None


def _set_state(rule: Any, state: Any) -> None:
    if state is not None:
        rule.load_state_dict(state)
