"""RuleManager: which rules change a net, when, in what order and how much, one transaction an
apply.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._journal import Commit
from grapnet.network import GrapNet

from .budget import Budget
from .preview import Preview, preview
from .recorder_set import RecorderSet
from .roster import (
    Entry,
    Roster,
    require_budget,
    require_net,
    require_rule,
    require_same,
    require_schedule,
)
from .rule import Moment, Rule
from .schedule import Every, Schedule
from .settings import describe, set_state, state_of, title
from .turn import in_words, said_of, take_turn


class RuleManager:
    """Holds rules in order and applies those that are due, all of them in one transaction; every
    net has its own.

    Everything random comes from a generator of its own, so that runs with equal seeds make equal
    commits. The generator moves on with every `apply` in which a rule drew from it, also when
    nothing was changed; a dry run and an `apply` that raises leave it where it was. A copy, pickled
    or not, has what the recorders have seen, for the first net that it is given, and watches
    nothing until `start(net)`.

    Args:
        seed: of the generator.
        budget: what all rules of one `apply` together must keep within.
        allow_dead: commit even if a transition loses its last relation or an output its last
            parent; otherwise `apply`, a dry run too, raises EditError. `Budget(parents=1)` keeps
            the last parents instead.

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

    def __init__(
        self,
        *,
        seed: int = 0,
        budget: Budget = Budget(),  # noqa: B008 (it is frozen)
        allow_dead: bool = False,
    ) -> None:
        require_budget(budget)
        self.budget = budget
        self.allow_dead = allow_dead
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
        """Puts another rule in the place of one, with its schedule and budget, and returns the old
        one.
        """
        require_rule(rule)
        entry = self._roster[name]
        other = replace(entry, rule=rule)
        self._roster.exchange(entry, other)
        self._arm_new(name, lambda: self._roster.exchange(other, entry))
        return entry.rule

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

    def never_due(self, steps: int) -> list[str]:
        """Returns the names of enabled rules that cannot be due at any of the first `steps`
        steps.
        """
        return [
            entry.name
            for entry in self._roster.enabled
            if not entry.schedule.may_be_due(0, steps - 1)
        ]

    def start(self, net: GrapNet, step: int | None = None) -> None:
        """Lets the recorders watch that the next steps need; call it before training begins or goes
        on.

        Args:
            net: the net.
            step: of the next `apply`; the one after the last by default, 0 at first.
        """
        require_net(net)
        step = self._step(step)
        self._adopt(self._made(net))
        self._arm(step)

    @contextmanager
    def recording(self, net: GrapNet) -> Iterator[None]:
        """Lets all recorders of enabled rules watch inside the block: run the data through the net
        there.
        """
        self._adopt(self._made(net))
        with self._recorders.watching([(entry.name, entry.rule) for entry in self._roster.enabled]):
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Lets no recorder watch inside the block, as while the net is validated; those go on that
        watched before.
        """
        with self._recorders.pausing():
            yield

    @overload
    def apply(
        self,
        net: GrapNet,
        step: int | None = ...,
        *,
        task: Any = ...,
        dry_run: Literal[False] = ...,
        probe: None = ...,
    ) -> Commit | None: ...
    @overload
    def apply(
        self,
        net: GrapNet,
        step: int | None = ...,
        *,
        task: Any = ...,
        dry_run: Literal[True],
        probe: Tensor | None = ...,
    ) -> Preview: ...
    def apply(
        self,
        net: GrapNet,
        step: int | None = None,
        *,
        task: Any = None,
        dry_run: bool = False,
        probe: Tensor | None = None,
    ) -> Commit | Preview | None:
        """Applies the enabled rules that are due, in order, as one commit; call it after
        `optimizer.step()`.

        Args:
            net: the net.
            step: the number of the training step; the one after the last by default, 0 at first.
                The journal tells only a step that was given.
            task: the task that begins or has ended, for rules and schedules that go by tasks.
            dry_run: only say what would happen. Like every edit it belongs between two training
                steps: a backward through a forward pass of before it raises.
            probe: inputs on which a dry run compares the output.

        Returns:
            The commit, or None when no rule was due or nothing was to change; a Preview for a dry
            run.

        Raises:
            EditError: a transition would lose its last relation or an output its last parent, and
                the manager does not allow it.
            Exception: whatever a rule raises, with a note that names it. Net, optimizers,
                generator, recorders, and the state of rules that have `state_dict` and
                `load_state_dict` are as before.
        """
        require_net(net)
        now, said = Moment(self._step(step), task), said_of(step, task)
        if probe is not None and not dry_run:
            raise ValueError("probe= is for a dry run; say dry_run=True")
        due = [entry for entry in self._roster.enabled if entry.schedule.is_due(now.step, task)]
        recorders, names = self._made(net), tuple(entry.name for entry in due)

        def write(edit: Edit) -> None:
            for entry in due:
                evidence = recorders.seen(entry.name, entry.rule)
                take_turn(net, edit, entry, self.budget, replace(now, evidence=evidence), said)

        if dry_run:
            with recorders.aside(), self._rewound(due, always=True):
                waiting = "" if due else self._roster.waiting(now.step)
                return preview(
                    net,
                    names,
                    write,
                    generator=self._generator,
                    allow_dead=self.allow_dead,
                    probe=probe,
                    waiting=waiting,
                )
        commit = None
        if due:
            by = ", ".join(names)
            edit = net.edit(
                by + in_words(said),
                by=by,
                generator=self._generator,
                allow_dead=self.allow_dead,
            )
            with self._rewound(due), edit:
                write(edit)
                commit = edit.commit()
        self._adopt(recorders)
        for name in names:
            recorders.clear(name)
        self._arm(now.step + 1)
        return commit

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data and tensors: the rules with their settings and states, and where the
        generator is.

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
                    "arguments": entry.unchanged(state),
                    "state": state,
                    "recorders": recorders.get(entry.name, {}),
                }
                for entry, state in ((entry, state_of(entry.rule)) for entry in self._roster)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the order, the switches and the states of rules that were injected like those
        that were saved.

        Call `start(net)` afterwards, so that those recorders watch which did when it was saved.

        Raises:
            CheckpointError: the rules differ in name, class, settings, schedule or budget; nothing
                was changed.
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
        rows = [
            f"  {e.name}: {e.rule!r}, {e.schedule!r}{'' if e.enabled else ', disabled'}"
            for e in self._roster
        ]
        return "\n".join(["RuleManager(", *rows, ")"]) if rows else "RuleManager()"

    def _step(self, step: int | None) -> int:
        """Returns the number of a step, which is the one after the last where none is given."""
        return (self._next_step or 0) if step is None else operator.index(step)

    @contextmanager
    def _rewound(self, due: list[Entry], *, always: bool = False) -> Iterator[None]:
        """Puts the generator and the states of rules back when the block raises, or always."""
        generator = self._generator.get_state()
        states = [(entry.rule, copy.deepcopy(state_of(entry.rule))) for entry in due]
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                self._generator.set_state(generator)
                for rule, state in states:
                    set_state(rule, state)

    def _made(self, net: GrapNet) -> RecorderSet:
        """Returns recorders on a net for all enabled rules, made before anything happens, since
        that may raise.
        """
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
        """Lets those recorders watch whose rule may be due within their window, beginning with
        `step`.
        """
        self._next_step = step
        for entry in self._roster.enabled:
            may_be_due = entry.schedule.may_be_due
            self._recorders.arm(
                entry.name, entry.rule, lambda r, may=may_be_due: may(step, step + r.window - 1)
            )

    def _arm_again(self) -> None:
        """Lets recorders of rules that came while a net trains watch from now on."""
        if self._next_step is not None and self._recorders.net is not None:
            self._arm(self._next_step)

    def _arm_new(self, name: str, back: Callable[[], None]) -> None:
        """Arms the recorders of a rule that has come; if that raises, calls `back` and leaves those
        it had.
        """
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
            set_state(entry.rule, part["state"])
            if not entry.enabled:
                self._recorders.drop(entry.name)
        self._recorders.load_state_dict(
            {part["name"]: part["recorders"] for part in state["rules"]}
        )
        self._next_step = state["next_step"]
        self._arm_again()
