"""RulesCallback: rules run in a Lightning Trainer as in a plain loop, whatever its options."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import grapnet as gn
from grapnet.integrations.lightning import RulesCallback
from grapnet.rules import ActivationRecorder, Every, EveryTask
from tests.integrations.lightning_classifier import (
    BATCHES,
    WARNINGS,
    Classifier,
    assert_same,
    data,
    epoch_of,
    fit,
    manager,
    trainer,
)

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # one worker imports it
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
]


def test_it_trains_as_a_plain_loop_does() -> None:
    module = Classifier()
    fit(module, epochs=2)

    plain, rules = Classifier(), manager()
    (optimizer,), (scheduler,) = plain.configure_optimizers()
    gn.attach(optimizer, plain.net)
    rules.start(plain.net)
    for step in range(2 * BATCHES):
        x, y = list(data())[step % BATCHES]
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
        last = step % BATCHES == BATCHES - 1
        rules.apply(plain.net, step, task=step // BATCHES if last else None)
        if last:
            scheduler.step()
    assert_same(module.state_dict(), plain.state_dict())
    assert [commit.reason for commit in module.net.history] == [
        commit.reason for commit in plain.net.history
    ]


def steps_of(net: gn.GrapNet) -> list[int]:
    return [commit.operations[0]["step"] for commit in net.history]


def cut_one(net: gn.GrapNet, edit: gn.Edit, now: Any) -> None:
    edit.cut(net.layers[0].outgoing().smallest(count=1))


def cutting(**options: Any) -> gn.RuleManager:
    rules = gn.RuleManager()
    rules.inject(cut_one, **options)
    return rules


def test_rules_wait_for_the_optimizer_when_gradients_accumulate() -> None:
    module = Classifier()
    made = fit(module, rules=cutting(), accumulate_grad_batches=4)  # steps after batches 4 and 6
    assert steps_of(module.net) == [0, 1]
    assert made.global_step == 2


class TwoOptimizers(Classifier):
    """Steps both of its optimizers in every batch, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.encoder.parameters()),
            torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9),
        ]


def test_several_optimizers_that_are_stepped_by_hand_make_one_step() -> None:
    module = TwoOptimizers()
    made = fit(module, rules=cutting(), limit_train_batches=4)
    assert steps_of(module.net) == [0, 1, 2, 3]
    assert made.global_step == 8


def test_an_epoch_can_be_the_step() -> None:
    module, callback = Classifier(), RulesCallback(cutting(schedule=Every(2)), every="epoch")
    trainer(callback, epochs=3).fit(module, data())
    assert steps_of(module.net) == [0, 2]
    assert callback.step == 3


def test_a_task_ends_also_where_no_optimizer_steps() -> None:
    class Seldom(TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 4 == 0:
                super().training_step(batch, batch_idx)

    module = Seldom()
    fit(module, rules=cutting(schedule=EveryTask()))  # steps after batches 1 and 5, of 6
    assert [commit.reason for commit in module.net.history] == ["cut_one at step 2, task 0"]


class Witness:
    """A rule that tells what its recorder has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def recorders(self, net: gn.GrapNet) -> dict[str, Any]:
        return {"seen": ActivationRecorder(0)}

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, now: Any) -> None:
        self.seen.append(now.evidence["seen"].count)


def test_recorders_see_training_batches_and_nothing_that_is_held_out(tmp_path: Path) -> None:
    witness, rules = Witness(), gn.RuleManager()
    rules.inject(witness, schedule=EveryTask())
    module, made = (
        Classifier(),
        trainer(RulesCallback(rules, task=epoch_of), epochs=2, val_check_interval=2),
    )
    made.fit(module, data(), data(2))
    assert witness.seen == [8 * BATCHES, 8 * BATCHES]
    made.test(module, data(), verbose=False)
    made.predict(module, data())
    made.fit_loop.max_epochs = 3
    made.fit(module, data(), data(2))
    assert witness.seen == [8 * BATCHES] * 3


class Pair(Classifier):
    """Two nets, of which one is known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = nn.Sequential(gn.GrapNet([6, 10, 8], dtype=torch.float64), nn.Tanh())
        self.same = self.head["net"]


def test_every_net_has_its_manager_and_its_place(tmp_path: Path) -> None:
    rules = {"encoder.0": cutting(), "head.net": cutting(schedule=Every(2))}
    module = Pair()
    fit(module, rules=rules).save_checkpoint(tmp_path / "pair.ckpt")
    assert steps_of(module.encoder[0]) == [0, 1, 2, 3, 4, 5]
    assert steps_of(module.net) == [0, 2, 4]
    other = Pair()
    callback = RulesCallback({"encoder.0": cutting(), "head.net": cutting(schedule=Every(2))})
    trainer(callback, epochs=2).fit(other, data(), ckpt_path=tmp_path / "pair.ckpt")
    assert steps_of(other.encoder[0]) == [*range(12)]
    assert other.same is other.net
    assert steps_of(other.net) == [0, 2, 4, 6, 8, 10]


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"Pair has 'encoder\.0', 'head\.net'; give managers by name"
    ):
        trainer(RulesCallback(cutting())).fit(Pair(), data())
    with pytest.raises(ValueError, match=r"a net at 'tail', and Classifier has 'head\.net'"):
        trainer(RulesCallback({"tail": cutting()})).fit(Classifier(), data())
    with pytest.raises(ValueError, match="one net, and Classifier has none"):
        trainer(RulesCallback(cutting())).fit(Classifier(nn.Linear(8, 3)), data())
    rules = cutting()
    with pytest.raises(ValueError, match="give every net its own"):
        RulesCallback({"a": rules, "b": rules})
    with pytest.raises(ValueError, match='"step" or "epoch", got \'batch\''):
        RulesCallback(rules, every="batch")  # pyright: ignore[reportArgumentType]


class Wrapping(DDPStrategy):
    """Would wrap the module as DDP does, and starts no processes."""

    def _configure_launcher(self) -> None:
        """Launches nothing."""

    def setup_environment(self) -> None:
        """Opens no port."""


def test_what_cannot_follow_edits_is_refused() -> None:
    for averaging in (StochasticWeightAveraging(0.01), WeightAveraging(), EMAWeightAveraging()):
        module, name = Classifier(), type(averaging).__name__
        with pytest.raises(ValueError, match=rf"^{name} averages .*gn\.attach\(averaged, net\)"):
            trainer(averaging, RulesCallback(cutting())).fit(module, data())
        assert module.net.version == 0
    with pytest.raises(ValueError, match=r"one device, and this trainer uses Wrapping.*devices=1"):
        trainer(RulesCallback(cutting()), strategy=Wrapping(), devices=1).fit(Classifier(), data())


def test_mixed_precision() -> None:
    module, source = Classifier().float(), data()
    source.collate_fn = lambda rows: [
        part.float() if part.is_floating_point() else part for part in default_collate(rows)
    ]
    made = trainer(RulesCallback(manager(), task=epoch_of), epochs=2, precision="bf16-mixed")
    made.fit(module, source, source)
    assert len(module.net.history) > 3
    assert module.net.transitions[0].weight.dtype == torch.float32
    gn.check(module.net)


def test_without_lightning_the_error_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "grapnet.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r'needs lightning.*pip install "grapnet\[lightning\]"'):
        importlib.import_module("grapnet.integrations.lightning")
