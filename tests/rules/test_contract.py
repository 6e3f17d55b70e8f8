"""One contract for every rule, on every shape of graph."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet import rules
from grapnet.rules import Budget, Every, RuleManager
from tests.execution.graphs import SHAPES

RULES: dict[str, Callable[[], Any]] = {
    "GrowForTask": lambda: rules.GrowForTask(layer=1, nodes=3, outputs={0: (0,)}),
    "GrowWidth": lambda: rules.GrowWidth(layer=1, nodes=2),
    "GrowWidth net2net": lambda: rules.GrowWidth(layer=1, nodes=2, init="net2net"),
    "GrowWidth gradmax": lambda: rules.GrowWidth(layer=1, nodes=2, init="gradmax"),
    "FreezeOwner": lambda: rules.FreezeOwner("half"),
    "PruneWeakest": lambda: rules.PruneWeakest(0.3),
    "PruneWeakest of every node": lambda: rules.PruneWeakest(0.5, scope="node"),
    "PruneWeakest gradually": lambda: rules.PruneWeakest(
        sparsity=rules.GradualSchedule(0.9, begin=0, end=10)
    ),
    "CovarianceSifter": lambda: rules.CovarianceSifter(transitions=(0, 1)),
    "RemoveOrphans": lambda: rules.RemoveOrphans(),
    "Rewire SET": lambda: rules.Rewire(grow="random"),
    "Rewire RigL": lambda: rules.Rewire(grow="gradient", decay_until=100),
    "Rewire SRigL": lambda: rules.Rewire(grow="gradient", decay_until=100, fan_in="constant"),
    "SplitIntoFamilies": lambda: rules.SplitIntoFamilies(0, families=2),
}
STEP = 2  # the first at which a rule is due, after three steps of training


class Run:
    """A net of some shape that has trained for three steps, with one rule injected."""

    def __init__(self, shape: str, rule: str, *, seed: int = 0, budget: Budget = Budget()) -> None:  # noqa: B008
        self.net = SHAPES[shape].build(torch.float64)
        with self.net.edit("owners") as edit:
            edit.set_owner(self.net.layers[1][: len(self.net.layers[1]) // 2], "half")
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        gn.attach(self.optimizer, self.net)
        self.manager = RuleManager(seed=seed)
        self.manager.inject(RULES[rule](), schedule=Every(10, start=STEP), budget=budget)
        self.manager.start(self.net)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(16, self.net.sizes[0], generator=generator, dtype=torch.float64)
        self.targets = torch.randn(16, self.net.sizes[-1], generator=generator, dtype=torch.float64)
        for step in range(STEP):
            self.train()
            assert self.manager.apply(self.net, step) is None
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        (self.net(self.inputs) - self.targets).square().sum().backward()
        self.optimizer.step()

    def apply(self, **options: Any) -> Any:
        """Applies the rule; returns the error when it refuses."""
        try:
            return self.manager.apply(self.net, STEP, task=0, **options)
        except gn.GrapNetError as error:
            return error

    def state(self) -> list[Tensor]:
        """Returns everything that must not change by accident."""
        net = self.net
        found = [
            *net.state_dict().values(),
            *(layer.uid for layer in net.layers),
            torch.tensor(net.version),
        ]
        found += [
            t for store in net.transitions for t in (store.topology.ptr, store.topology.child)
        ]
        slots = [self.optimizer.state[p] for p in net.parameters()]
        return [t.clone() for t in found] + [slot.clone() for s in slots for slot in s.values()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_its_contract(rule: str, shape: str) -> None:
    run, twin = Run(shape, rule), Run(shape, rule)
    before, count = run.state(), run.net.count()
    for one in (run, twin):
        _call_alone(one, rule)
    assert equal(run.state(), before)  # it writes into the edit and never commits

    preview = run.apply(dry_run=True, probe=run.inputs)
    assert equal(run.state(), before)  # a dry run leaves no trace
    # of a copy, since recorders watch the net
    outputs = copy.deepcopy(run.net)(run.inputs).detach()

    commit = run.apply()
    if isinstance(commit, Exception):
        assert str(commit) == str(preview)
        assert equal(run.state(), before)  # a refusal changes nothing
        return
    after = run.net.count()
    assert not isinstance(preview, Exception)
    assert (preview.before, preview.after) == (count, after)
    assert preview.relations == after.relations - count.relations
    assert preview.parameters == after.trainable - count.trainable
    orphans = [
        run.net.transitions[n - 1].topology.fan_in() == 0 for n in range(1, len(run.net.layers) - 1)
    ]
    assert preview.orphans == sum(int(found.sum()) for found in orphans)
    if preview.output_change is not None:
        assert preview.output_change == pytest.approx(
            (run.net(run.inputs) - outputs).abs().max().item(), abs=1e-12
        )
    gn.check(run.net)

    twin.apply()
    assert equal(run.state(), twin.state())  # equal seeds, equal commits
    if commit is None:
        assert equal(run.state(), before)
        return
    assert commit.operations[0]["text"] == run.manager.names[0]  # the journal names the rule
    run.net.undo()
    assert equal(run.state()[: len(run.net.state_dict())], before[: len(run.net.state_dict())])
    run.train()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_within_its_budget(rule: str, shape: str) -> None:
    run = Run(shape, rule, budget=Budget(edits=4, parents=1, children=1))
    net = run.net
    parents = {
        int(uid): n
        for t, s in enumerate(net.transitions)
        for uid, n in _counted(net, t + 1, s.topology.fan_in())
    }
    children = {
        int(uid): n
        for t, s in enumerate(net.transitions)
        for uid, n in _counted(net, t, s.topology.degrees)
    }
    commit = run.apply()
    if commit is None or isinstance(commit, Exception):
        return
    gone = {int(uid) for change in commit.change.layers.values() for uid in change.gone.uids}
    cuts, connected = [], 0
    for change in commit.change.transitions.values():
        connected += len(change.born)
        ends = zip(change.gone.parents.tolist(), change.gone.children.tolist(), strict=True)
        # not what left with a node
        cuts += [(parent, child) for parent, child in ends if not {parent, child} & gone]
    assert len(cuts) <= 4
    assert connected <= 4
    for before, lost in (
        (children, [parent for parent, _ in cuts]),
        (parents, [child for _, child in cuts]),
    ):
        assert all(before[uid] - lost.count(uid) >= 1 for uid in lost), (
            "a cut was a node's last relation"
        )


def _call_alone(run: Run, rule: str) -> None:
    """Calls a rule in an edit that takes effect only when it is committed."""
    made = RULES[rule]()
    evidence = made.recorders(run.net) if hasattr(made, "recorders") else {}
    for recorder in evidence.values():
        recorder.arm(run.net)
    (run.net(run.inputs) - run.targets).square().sum().backward()
    for recorder in evidence.values():
        recorder.disarm()
    with run.net.edit(trial=True) as edit, suppress(gn.GrapNetError):
        made(run.net, edit, rules.Moment(step=STEP, task=0, evidence=evidence))
    assert edit.receipt is None


def _counted(net: gn.GrapNet, layer: int, counts: Tensor) -> list[tuple[int, int]]:
    return list(zip(net.layers[layer].uid.tolist(), counts.tolist(), strict=True))
