"""One contract for every rule, on every shape of graph."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet import rules
from grapnet.rules import Budget, Every, RuleManager
from tests.execution.graphs import SHAPES

RULES: dict[str, Callable[[], Any]] = {
    "GrowForTask": lambda: rules.GrowForTask(nodes=3, outputs={0: (0,)}),
    "GrowWidth": lambda: rules.GrowWidth(layers=1, nodes=2),
    "GrowWidth net2net": lambda: rules.GrowWidth(layers=1, nodes=2, init="net2net"),
    "GrowWidth gradmax": lambda: rules.GrowWidth(layers=1, nodes=2, init="gradmax"),
    "GrowWidth tiny": lambda: rules.GrowWidth(layers=1, nodes=2, init="tiny", scale=1e-3),
    "GrowBest": lambda: rules.GrowBest(nodes=2, scale=1e-3),
    "FreezeOwner": lambda: rules.FreezeOwner("half"),
    "PruneWeakest": lambda: rules.PruneWeakest(0.3),
    "PruneWeakest of every node": lambda: rules.PruneWeakest(0.5, scope="owner"),
    "PruneWeakest gradually": lambda: rules.PruneWeakest(
        sparsity=rules.GradualSchedule(0.9, begin=0, end=10)
    ),
    "PruneWeakest tiles": lambda: rules.PruneWeakest(0.3, tile=16),
    "PruneWeakest by Wanda": lambda: rules.PruneWeakest(0.4, by="wanda"),
    "PruneWeakest by Fisher": lambda: rules.PruneWeakest(0.3, by="fisher", keep=2),
    "PruneWeakest at random": lambda: rules.PruneWeakest(0.3, by="random"),
    "PruneWeakest 1:2": lambda: rules.PruneWeakest(pattern=(1, 2)),
    "PruneNodes": lambda: rules.PruneNodes(0.3),
    "PruneNodes by Taylor": lambda: rules.PruneNodes(0.3, by="taylor"),
    "PruneNodes by parameters": lambda: rules.PruneNodes(parameters=0.8, scope="model"),
    "PruneNodes by macs": lambda: rules.PruneNodes(macs=0.7, multiple=2),
    "CovarianceSifter": lambda: rules.CovarianceSifter(transitions=(0, 1)),
    "CovarianceSifter of the model": lambda: rules.CovarianceSifter((0, 1), 0.2, scope="model"),
    "RemoveOrphans": lambda: rules.RemoveOrphans(),
    "Rewire SET": lambda: rules.Rewire(grow="random"),
    "Rewire RigL": lambda: rules.Rewire(grow="gradient", decay_until=100),
    "Rewire constant": lambda: rules.Rewire(grow="gradient", decay_until=100, scope="child"),
    "Rewire of owners": lambda: rules.Rewire(grow="gradient", decay_until=100, scope="owner"),
    "Rewire of the model": lambda: rules.Rewire(grow="gradient", decay_until=100, scope="model"),
    "SRigL": lambda: rules.SRigL(decay_until=100),
    "Rewire SET of tiles": lambda: rules.Rewire(tile=16),
    "Rewire RigL of tiles": lambda: rules.Rewire(grow="gradient", decay_until=100, tile=16),
    "SplitIntoFamilies": lambda: rules.SplitIntoFamilies(0, families=2),
}


def recording(rule: Any) -> bool:
    return bool(hasattr(rule, "recorders") and rule.recorders(gn.GrapNet([4, 4, 4, 4])))


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
        self.manager.add(RULES[rule](), schedule=Every(10, start=STEP), budget=budget)
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
        except gn.errors.GrapNetError as error:
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
    run = Run(shape, rule)
    twin = Run(shape, rule)
    before = run.state()
    count = run.net.count()
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


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_changes_some_net_and_says_why(rule: str) -> None:
    for shape in SHAPES:
        commit = Run(shape, rule).apply()
        if commit is not None and not isinstance(commit, Exception):
            break
    else:
        pytest.fail("it has changed no net of any shape")
    # the first remark is the manager's
    remarks = [one for one in commit.operations if one["operation"] == "remark"]
    assert len(remarks) > 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_within_its_budget(rule: str, shape: str) -> None:
    run = Run(shape, rule, budget=Budget(edits=4, parents=1, children=1))
    net = run.net
    relations = net.select().outgoing()
    parents = Counter(relations.children.tolist())  # of each node
    children = Counter(relations.parents.tolist())
    commit = run.apply()
    if commit is None or isinstance(commit, Exception):
        return
    gone = {int(uid) for change in commit.change.layers.values() for uid in change.gone.uids}
    cuts = []
    connected = 0
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
    with run.net.edit(trial=True) as edit, suppress(gn.errors.GrapNetError):
        made(run.net, edit, rules.RuleContext(step=STEP, task=0, evidence=evidence))
    assert edit.receipt is None


def test_every_rule_is_here() -> None:
    public = [getattr(rules, name) for name in rules.__all__]
    known = {kind.__name__ for kind in public if is_dataclass(kind) and "__call__" in vars(kind)}
    assert known == {name.split()[0] for name in RULES}


@pytest.mark.parametrize("rule", [name for name, make in RULES.items() if recording(make())])
def test_a_rule_without_its_evidence_is_refused(rule: str) -> None:
    net = SHAPES["tiles"].build(torch.float64)
    made = RULES[rule]()
    for evidence in ({}, made.recorders(net)):
        with pytest.raises(gn.errors.EditError, match="evidence"), net.edit() as edit:
            made(net, edit, rules.RuleContext(evidence=evidence))
    assert net.version == 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (rules.GrowForTask, {"nodes": 0, "classes_per_task": 2}),
        (rules.GrowForTask, {"nodes": 1, "classes_per_task": 2, "classes": "all"}),
        (rules.GrowForTask, {"nodes": 1}),
        (rules.GrowForTask, {"nodes": 1, "classes_per_task": 2, "outputs": {0: [1]}}),
        (rules.GrowForTask, {"nodes": 1, "classes_per_task": 2, "parents": 0.0}),
        (rules.GrowWidth, {"layers": 1, "nodes": 0}),
        (rules.GrowWidth, {"layers": 1, "nodes": 1, "init": "random"}),
        (rules.GrowWidth, {"layers": 1, "nodes": 1, "noise": 1.0}),
        (rules.GrowWidth, {"layers": 1, "nodes": 1, "scale": 0.0}),
        (rules.PruneWeakest, {}),
        (rules.PruneWeakest, {"fraction": 0.1, "sparsity": 0.1}),
        (rules.PruneWeakest, {"fraction": 1.1}),
        (rules.PruneWeakest, {"sparsity": -0.5}),
        (rules.PruneWeakest, {"fraction": 0.5, "scope": "layer"}),
        (rules.PruneWeakest, {"fraction": 0.5, "by": "l1"}),
        (rules.PruneWeakest, {"fraction": 0.5, "compare": "rank"}),
        (rules.PruneWeakest, {"fraction": 0.5, "by": rules.Wanda}),
        (rules.PruneWeakest, {"fraction": 0.5, "by": 3}),
        (rules.PruneWeakest, {"fraction": 0.5, "keep": -1}),
        (rules.PruneWeakest, {"fraction": 0.5, "pattern": (2, 4)}),
        (rules.PruneWeakest, {"pattern": (3, 2)}),
        (rules.PruneWeakest, {"pattern": (2, 4), "scope": "model"}),
        (rules.PruneWeakest, {"fraction": 0.5, "tile": 16, "by": "wanda", "scope": "child"}),
        (rules.PruneWeakest, {"fraction": 0.5, "tile": 16, "by": "obs"}),
        (rules.PruneWeakest, {"fraction": 0.5, "tile": 48}),
        (rules.PruneWeakest, {"fraction": 0.5, "tile": 16.0}),
        (rules.PruneWeakest, {"fraction": 0.5, "tile": 16, "scope": "owner"}),
        (rules.GradualSchedule, {"final": 0.5, "begin": 0, "end": 9, "initial": 0.6}),
        (rules.GradualSchedule, {"final": 1.5, "begin": 0, "end": 9}),
        (rules.GradualSchedule, {"final": 0.5, "begin": 9, "end": 9}),
        (rules.PruneNodes, {}),
        (rules.PruneNodes, {"fraction": 0.5, "macs": 0.5}),
        (rules.PruneNodes, {"fraction": 1.5}),
        (rules.PruneNodes, {"macs": 1.5}),
        (rules.PruneNodes, {"latency": 2}),
        (rules.PruneNodes, {"fraction": 0.95}),
        (rules.PruneNodes, {"fraction": 0.5, "multiple": 0}),
        (rules.PruneNodes, {"fraction": 0.5, "scope": "layer"}),
        (rules.PruneNodes, {"fraction": 0.5, "by": "wanda"}),
        (rules.PruneNodes, {"fraction": 0.5, "keep": -1}),
        (rules.PruneNodes, {"macs": 0.5, "keep": 1.5}),
        (rules.CovarianceSifter, {"fraction": 1.5}),
        (rules.Rewire, {"fraction": -0.1}),
        (rules.Rewire, {"grow": "magic"}),
        (rules.Rewire, {"scope": 3}),
        (rules.Rewire, {"compare": "median"}),
        (rules.Rewire, {"keep": 1.5}),
        (rules.Rewire, {"tile": 16, "keep": 0.1}),
        (rules.CovarianceSifter, {"scope": "space"}),
        (rules.CovarianceSifter, {"keep": -1}),
        (rules.CovarianceSifter, {"by": "obs"}),
        (rules.CovarianceSifter, {"by": rules.OBS()}),
        (rules.CovarianceSifter, {"compare": "median"}),
        (rules.Rewire, {"decay_until": 0}),
        (rules.Rewire, {"tile": 8}),
        (rules.Rewire, {"tile": 16, "scope": "child"}),
        (rules.SplitIntoFamilies, {"transitions": 0, "families": 0}),
    ],
)
def test_wrong_settings_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(gn.errors.EditError):
        kind(**settings)


@pytest.mark.parametrize(
    "rule",
    [
        rules.PruneWeakest(0.5, transitions=3),
        rules.Rewire(transitions=-4),
        rules.CovarianceSifter(transitions=3),
        rules.SplitIntoFamilies(3, families=2),
    ],
)
def test_a_transition_that_is_not_there_is_refused(rule: Any) -> None:
    net = gn.GrapNet([4, 4, 4, 4])
    with pytest.raises(gn.errors.EditError, match=r"\[-?[34]\]"), net.edit() as edit:
        rule(net, edit, rules.RuleContext())


@pytest.mark.parametrize(
    "rule",
    ["PruneWeakest", "PruneWeakest of every node", "Rewire SET", "Rewire RigL", "Rewire constant"],
)
def test_a_weight_that_is_no_number_is_refused_and_nothing_is_cut(rule: str) -> None:
    run = Run("random 1 %", rule)
    with torch.no_grad():
        run.net.transitions[0].weight[3] = float("nan")
    version = run.net.version
    with pytest.raises(ValueError, match="NaN"):
        run.manager.apply(run.net, STEP)
    assert run.net.version == version
