"""Settings of rules: what of a rule has to be the same when its state is restored, and what is its
own affair.
"""

import pickle
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.rules.manager import RuleManager
from grapnet.rules.rule import Moment

from .own_rules import CutWeakest, small_net


def one(rule: Any) -> RuleManager:
    manager = RuleManager()
    manager.inject(rule, name="rule")
    return manager


class Level(IntEnum):
    LOW, HIGH = 1, 2


class Plain:
    """A rule of a plain class, which counts its calls and has a memory of its own."""

    def __init__(
        self, count: int, level: Level = Level.LOW, inner: Any = None, calls: int = 0
    ) -> None:
        self.count, self.level, self.inner, self.calls = count, level, inner, calls
        self.made, self.seen = object(), torch.zeros(2)

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
        self.calls += 1
        edit.cut(net.layers[0].outgoing().smallest(count=self.count))


class PlainWithState(Plain):
    """One that brings its calls back."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def cut(net: gn.GrapNet, edit: gn.Edit, now: Moment, count: int = 1) -> None:
    edit.cut(net.layers[0].outgoing().smallest(count=count))


def freeze(net: gn.GrapNet, edit: gn.Edit, now: Moment) -> None:
    edit.freeze(net.layers[0].outgoing())


PLAIN = {
    "attribute": (lambda: Plain(2), lambda: Plain(3), "count was 2 and is 3"),
    "member of an enum": (lambda: Plain(2), lambda: Plain(2, Level.HIGH), "level was 1 and is 2"),
    "nested": (
        lambda: Plain(2, inner=CutWeakest(2)),
        lambda: Plain(2, inner=CutWeakest(3)),
        "inner was .* and is",
    ),
    "list": (
        lambda: Plain(2, inner=[1, {"a": 2}]),
        lambda: Plain(2, inner=[1, {"a": 3}]),
        "inner was .* and is",
    ),
    "nothing": (lambda: Plain(2, inner="a"), lambda: Plain(2), "inner was 'a' and is None"),
    "beside a state": (
        lambda: PlainWithState(2),
        lambda: PlainWithState(3),
        "count was 2 and is 3",
    ),
    "keyword of a partial": (
        lambda: partial(cut, count=2),
        lambda: partial(cut, count=3),
        "keywords was .*2.* and is",
    ),
    "function of a partial": (
        lambda: partial(cut),
        lambda: partial(freeze),
        "func was 'cut' and is 'freeze'",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("ran", [False, True])
def test_settings_of_any_kind_of_rule_are_compared(tmp_path: Path, name: str, ran: bool) -> None:
    make, other, message = PLAIN[name]
    net, saved = small_net(), one(make())
    if ran:
        saved.apply(net, 0)
    gn.save(tmp_path / "run", net, rules=saved)
    with pytest.raises(
        gn.CheckpointError, match=rf"^extras\.rules: the rule of 'rule' is not .*{message}"
    ):
        gn.restore(tmp_path / "run", rules=one(other()))
    gn.restore(tmp_path / "run", rules=one(make()))  # control: one that fits


@pytest.mark.parametrize("kind", [Plain, PlainWithState])
def test_what_a_rule_counts_is_no_setting(tmp_path: Path, kind: type[Plain]) -> None:
    rule, net = kind(1), small_net()
    saved = one(rule)
    gn.save(tmp_path / "first", net, rules=saved)
    saved.apply(net, 0)
    gn.save(tmp_path / "second", net, rules=saved)
    assert rule.calls == 1
    for file in ("first", "second"):
        gn.restore(tmp_path / file, rules=saved)
        gn.restore(tmp_path / file, rules=one(kind(1)))
    gn.restore(tmp_path / "second", rules=one(rule))  # injected anew after it has counted
    if kind is PlainWithState:
        gn.restore(tmp_path / "first", rules=one(rule))
        assert rule.calls == 0


def test_a_rule_that_was_replaced_is_compared_as_it_was_injected() -> None:
    saved = one(Plain(2))
    saved.replace("rule", Plain(3))
    with pytest.raises(gn.CheckpointError, match="count was 3 and is 2"):
        one(Plain(2)).load_state_dict(saved.state_dict())
    one(Plain(3)).load_state_dict(saved.state_dict())


def test_a_state_of_before_arguments_were_compared_fits() -> None:
    state = one(Plain(2)).state_dict()
    del state["rules"][0]["arguments"]
    one(Plain(3)).load_state_dict(state)


class Grown(Plain):
    """The rule in a later version of a program."""

    def __init__(self, amount: int) -> None:
        super().__init__(amount)
        self.amount = amount


Grown.__name__ = "Plain"
ODD = {
    "numpy's kinds": [np.complex64(1), np.datetime64("2026-01-01"), np.longdouble(1), np.ones(2)],
    "a number that no file holds": 10**5000,
    "a list that is long": list(range(1000)),
    "lists in lists": [[[[[[1]]]]]] * 2,
    "keys that are no texts": {float("nan"): 1},
    "a module": nn.Linear(2, 2),
    "a tensor": torch.ones(2),
    "a function": cut,
}


@pytest.mark.parametrize("name", ODD)
def test_arguments_that_are_no_few_plain_values_are_not_kept(tmp_path: Path, name: str) -> None:
    saved, net = one(Plain(2, inner=ODD[name])), small_net()
    gn.save(tmp_path / "run", net, rules=saved)
    assert saved.state_dict()["rules"][0]["arguments"] == {"count": 2, "level": 1, "calls": 0}
    gn.restore(tmp_path / "run", rules=one(Plain(2)))


def test_what_a_rule_holds_beside_its_arguments_is_its_own_affair() -> None:
    rule = Plain(2)
    vars(rule).update(started=1.0, _n=3, _torchdynamo_wrapper_id=id(rule))
    state = one(rule).state_dict()
    assert state["rules"][0]["arguments"] == {"count": 2, "level": 1, "inner": None, "calls": 0}
    one(Plain(2)).load_state_dict(state)
    one(Grown(2)).load_state_dict(state)  # an argument that has another name now is not compared


def test_a_manager_that_was_pickled_before_arguments_were_kept_goes_on() -> None:
    manager = one(Plain(2))
    (entry,) = manager._roster
    del entry.injected
    again = pickle.loads(pickle.dumps(manager))
    assert again.state_dict()["rules"][0]["arguments"] == {}
