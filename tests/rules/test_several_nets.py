"""One manager for all nets of a model: one transaction, recorders per net, one budget."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import Budget, CovarianceSifter, Every, Rewire, RuleContext, RuleManager
from tests.fingerprint import fingerprint

from .own_rules import CutMoreEachTime, CutRandom, CutWeakest, Fail, journal


def make_model(seed: int = 0) -> nn.Sequential:
    """Returns a model with two nets, the second of which has a quarter of the relations."""
    generator = torch.Generator().manual_seed(seed)
    first = gn.GrapNet([6, 8, 8], density=0.75, generator=generator)
    second = gn.GrapNet([8, 2, 4], generator=generator)
    return nn.Sequential(first, nn.Tanh(), second)


def nets_of(model: nn.Module) -> list[gn.GrapNet]:
    return [part for part in model.modules() if isinstance(part, gn.GrapNet)]


def relations(model: nn.Module) -> list[int]:
    return [net.count().relations for net in nets_of(model)]


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, manager: RuleManager, number: int) -> Any:
    model(batch(number)).square().sum().backward()
    return manager.apply(model, number)


def test_a_model_is_changed_in_one_transaction_that_undo_takes_back() -> None:
    model = make_model()
    manager = RuleManager()
    manager.add(CutWeakest(3))
    before = relations(model)
    commits = manager.apply(model, 7)
    assert list(commits) == ["0", "2"]
    assert [commit.reason for commit in commits.values()] == ["CutWeakest at step 7"] * 2
    assert [commit.joint.parts for commit in commits.values()] == [2, 2]
    assert relations(model) == [count - 3 for count in before]
    gn.undo(*nets_of(model))
    assert relations(model) == before


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model,
        lambda model: {"0": model[0], "2": model[2]},
        lambda model: [model[0], model[2]],
    ],
    ids=["model", "mapping", "sequence"],
)
def test_nets_are_given_in_a_model_by_name_or_one_after_the_other(
    given: Callable[[Any], Any],
) -> None:
    model = make_model()
    manager = RuleManager()
    manager.add(CutRandom(2))
    before = relations(model)
    assert len(manager.apply(given(model), 0)) == 2
    assert relations(model) == [count - 2 for count in before]
    manager.disable("CutRandom")
    assert manager.apply(given(model), 1) == {}


def test_a_net_that_does_not_change_has_no_commit() -> None:
    def cut_wide(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        if net.sizes[0] == 6:
            edit.cut(net.layers[0].outgoing().smallest(count=2))

    model = make_model()
    manager = RuleManager()
    manager.add(cut_wide)
    commits = manager.apply(model)
    assert list(commits) == ["0"]
    assert commits["0"].joint is None
    assert [net.version for net in nets_of(model)] == [1, 0]


def test_a_rule_that_raises_for_one_net_changes_none() -> None:
    def fail_narrow(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        if net.sizes[0] == 8:
            Fail()(net, edit, context)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for net in nets_of(model):
        gn.attach(optimizer, net)
    manager = RuleManager()
    manager.add(CutRandom(2))
    manager.add(CutMoreEachTime())
    manager.add(fail_narrow)
    before = [fingerprint(net, optimizer) for net in nets_of(model)]
    state = str(manager.state_dict())
    with pytest.raises(ZeroDivisionError) as caught:
        manager.apply(model, 3)
    assert caught.value.__notes__ == ["raised by rule 'fail_narrow' at step 3"]
    assert [fingerprint(net, optimizer) for net in nets_of(model)] == before
    assert str(manager.state_dict()) == state
    manager.remove("fail_narrow")
    assert len(manager.apply(model, 3)) == 2


def test_a_budget_counts_the_relations_of_all_nets() -> None:
    model = make_model()
    before = relations(model)
    seen = []

    def look(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        seen.append(context.budget.edits)

    manager = RuleManager(budget=Budget(edits=30))
    manager.add(CutWeakest(1000))
    manager.add(look)
    manager.apply(model)
    lost = [count - after for count, after in zip(before, relations(model), strict=True)]
    assert sum(lost) == 30
    # by the sizes of the nets
    assert lost[0] > 2 * lost[1] > 0
    assert seen == [0, 0]


def test_what_one_net_leaves_of_a_budget_goes_to_the_next() -> None:
    def cut_narrow(net: gn.GrapNet, edit: gn.Edit, context: RuleContext) -> None:
        if net.sizes[0] == 8:
            edit.cut(net.layers[0].outgoing())

    model = make_model()
    before = relations(model)
    manager = RuleManager(budget=Budget(edits=8))
    manager.add(cut_narrow, budget=Budget(edits=5))
    manager.apply(model)
    assert relations(model) == [before[0], before[1] - 5]


def test_every_net_has_recorders_of_its_own() -> None:
    model = make_model()
    manager = RuleManager()
    manager.add(CovarianceSifter(transitions=0, window=2), schedule=Every(4, start=3))
    manager.start(model)
    for number in range(3):
        assert step(model, manager, number) == {}
    states = manager.state_dict()["recorders"]
    assert [state["net"] for state in states] == ["0", "2"]
    shapes = []
    for state in states:
        (seen,) = state["rules"]["CovarianceSifter"].values()
        shapes.append(tuple(seen["evidence"]["products"].shape))
    assert shapes == [(6, 8), (8, 2)]
    assert list(step(model, manager, 3)) == ["0", "2"]


def run(model: nn.Module, manager: RuleManager, steps: range) -> list[Any]:
    for number in steps:
        step(model, manager, number)
    return [journal(net) for net in nets_of(model)]


def managed(seed: int = 0) -> RuleManager:
    manager = RuleManager(seed=seed, budget=Budget(edits=20))
    manager.add(Rewire(grow="gradient", window=3), schedule=Every(4, start=3))
    manager.add(CovarianceSifter(transitions=0, fraction=0.2, window=5), schedule=Every(6, start=5))
    return manager


@pytest.mark.parametrize("live", [False, True])
def test_a_restored_run_of_several_nets_goes_on_bit_by_bit(tmp_path: Path, live: bool) -> None:
    model = make_model()
    manager = managed()
    manager.start(model)
    run(model, manager, range(5))
    gn.save(tmp_path / "run", model, history="full", rules=manager)
    expected = run(model, manager, range(5, 12))
    other = make_model(1)
    restored = managed(seed=9)
    gn.restore(tmp_path / "run", into=other)
    if live:
        restored.start(other)
    gn.restore(tmp_path / "run", rules=restored)
    restored.start(other)
    assert run(other, restored, range(5, 12)) == expected
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_evidence_of_several_nets_is_not_given_to_others() -> None:
    model = make_model()
    manager = managed()
    manager.start(model)
    run(model, manager, range(2))
    restored = managed()
    restored.load_state_dict(manager.state_dict())
    with pytest.raises(gn.errors.CheckpointError, match="'2'"):
        restored.start([model[0], model[2]])
    restored.start(model)
    assert str(restored.state_dict()) == str(manager.state_dict())


def test_a_copy_has_the_evidence_of_all_nets() -> None:
    model = make_model()
    manager = managed()
    manager.start(model)
    run(model, manager, range(3))
    twin, copied = copy.deepcopy((model, manager))
    copied.start(twin)
    assert run(twin, copied, range(3, 9)) == run(model, manager, range(3, 9))


def test_a_dry_run_adds_up_the_nets_and_leaves_no_trace() -> None:
    model = make_model()
    manager = managed()
    manager.start(model)
    run(model, manager, range(3))
    model(batch(3)).square().sum().backward()
    before = [net.count() for net in nets_of(model)]
    with torch.no_grad():
        output = model(batch(9))
    preview = manager.apply(model, 3, dry_run=True, probe=batch(9))
    assert [net.count() for net in nets_of(model)] == before
    assert preview.before.relations == sum(count.relations for count in before)
    commits = manager.apply(model, 3)
    assert preview.cut == sum(c.change.counts()["relations_removed"] for c in commits.values())
    assert preview.after.relations == sum(relations(model))
    with torch.no_grad():
        assert preview.output_change == float((model(batch(9)) - output).abs().max())
    with pytest.raises(TypeError):
        manager.apply(nets_of(model), 4, dry_run=True, probe=batch())


def test_going_over_to_other_nets_drops_the_recorders_of_the_first() -> None:
    model = make_model()
    other = make_model(1)
    manager = managed()
    manager.start(model)
    run(model, manager, range(2))
    manager.start(other)
    assert not any(part._forward_hooks for part in model.modules())
    assert any(part._forward_hooks for part in other.modules())
    del other
    gc.collect()
    manager.start(model)
    assert any(part._forward_hooks for part in model.modules())
