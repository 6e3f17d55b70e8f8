"""RulesCallback: rules run in a Lightning Trainer as in a plain loop, and Lightning's checkpoints
hold edited nets.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

import grapnet as gn
from grapnet.integrations.lightning import RulesCallback, load_nets, nets_in, save_nets
from grapnet.rules import (
    ActivationRecorder,
    At,
    Every,
    EveryTask,
    FreezeOwner,
    GrowForTask,
    PruneWeakest,
    Rewire,
)

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # one worker imports it
    # Lightning warns about itself, and about loaders as small as these.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to"),
]
BATCHES = 6
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Classifier(L.LightningModule):
    """A small encoder and a net behind it, in float64."""

    def __init__(self, net: gn.GrapNet | nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.ModuleDict({"net": gn.GrapNet([8, 12, 3]) if net is None else net})
        self.double()

    @property
    def net(self) -> Any:
        return self.head["net"]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("age", float(self.current_epoch))
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def data(seed: int = 1) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(8 * BATCHES, 6, generator=source, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(3, (8 * BATCHES,), generator=source)), 8)


def manager() -> gn.rules.RuleManager:
    """Returns rules that prune, rewire by recorded gradients, grow at random and freeze."""
    rules = gn.rules.RuleManager(seed=3)
    rules.add(PruneWeakest(0.2), schedule=At(1, 8))
    rules.add(Rewire(fraction=0.3), schedule=Every(3, start=2))
    rules.add(GrowForTask(nodes=2, classes_per_task=1), schedule=EveryTask())
    rules.add(FreezeOwner("task-0"), schedule=At(7))
    return rules


def trainer(*callbacks: L.Callback, epochs: int = 1, **options: Any) -> Any:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return L.Trainer(
        max_epochs=epochs, callbacks=[*callbacks], enable_checkpointing=saves, **QUIET, **options
    )


def epoch_of(trainer: L.Trainer) -> int:
    return trainer.current_epoch


def fit(module: L.LightningModule, epochs: int = 1, rules: Any = None, **options: Any) -> Any:
    callback = RulesCallback(manager() if rules is None else rules, task=epoch_of)
    made = trainer(callback, epochs=epochs, **options)
    made.fit(module, data(), data(2))
    return made


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, whatever lies in lists and dicts."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict | list | tuple):
        keys = one if isinstance(one, dict) else range(len(one))
        assert len(one) == len(other)
        for key in keys:
            assert_same(one[key], other[key])
    else:
        assert one == other


def test_it_trains_as_a_plain_loop_does() -> None:
    module = Classifier()
    fit(module, epochs=2)

    plain = Classifier()
    rules = manager()
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


def cut_one(net: gn.GrapNet, edit: gn.Edit, context: Any) -> None:
    edit.cut(net.layers[0].outgoing().smallest(count=1))


def cutting(**options: Any) -> gn.rules.RuleManager:
    rules = gn.rules.RuleManager()
    rules.add(cut_one, **options)
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
    module = Classifier()
    callback = RulesCallback(cutting(schedule=Every(2)), every="epoch")
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

    def __call__(self, net: gn.GrapNet, edit: gn.Edit, context: Any) -> None:
        self.seen.append(context.evidence["seen"].count)


def test_recorders_see_training_batches_and_nothing_that_is_held_out(tmp_path: Path) -> None:
    witness = Witness()
    rules = gn.rules.RuleManager()
    rules.add(witness, schedule=EveryTask())
    module = Classifier()
    made = trainer(RulesCallback(rules, task=epoch_of), epochs=2, val_check_interval=2)
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


def test_one_manager_serves_all_nets(tmp_path: Path) -> None:
    module = Pair()
    fit(module, rules=cutting(schedule=Every(2))).save_checkpoint(tmp_path / "pair.ckpt")
    other = Pair()
    callback = RulesCallback(cutting(schedule=Every(2)))
    trainer(callback, epochs=2).fit(other, data(), ckpt_path=tmp_path / "pair.ckpt")
    for net in (other.encoder[0], other.net):
        assert steps_of(net) == [0, 2, 4, 6, 8, 10]
        assert net.history[-1].joint is not None


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'tail'"):
        trainer(RulesCallback({"tail": cutting()})).fit(Classifier(), data())
    with pytest.raises(ValueError, match="Classifier has none"):
        trainer(RulesCallback(cutting())).fit(Classifier(nn.Linear(8, 3)), data())
    rules = cutting()
    with pytest.raises(ValueError, match="all nets"):
        RulesCallback({"a": rules, "b": rules})


class Wrapping(DDPStrategy):
    """Would wrap the module as DDP does, and starts no processes."""

    def _configure_launcher(self) -> None:
        """Launches nothing."""

    def setup_environment(self) -> None:
        """Opens no port."""


def test_what_cannot_follow_edits_is_refused() -> None:
    for averaging in (StochasticWeightAveraging(0.01), WeightAveraging(), EMAWeightAveraging()):
        module = Classifier()
        name = type(averaging).__name__
        with pytest.raises(ValueError, match=f"^{name} "):
            trainer(averaging, RulesCallback(cutting())).fit(module, data())
        assert module.net.version == 0
    with pytest.raises(ValueError, match="Wrapping"):
        trainer(RulesCallback(cutting()), strategy=Wrapping(), devices=1).fit(Classifier(), data())


def test_mixed_precision() -> None:
    module = Classifier().float()
    source = data()
    source.collate_fn = lambda rows: [
        part.float() if part.is_floating_point() else part for part in default_collate(rows)
    ]
    made = trainer(RulesCallback(manager(), task=epoch_of), epochs=2, precision="bf16-mixed")
    made.fit(module, source, source)
    assert len(module.net.history) > 3
    assert module.net.transitions[0].weight.dtype == torch.float32
    gn.check(module.net)


class LoadsItsNets(Classifier):
    """What a module does whose `load_from_checkpoint` is to work."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        load_nets(self, checkpoint)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=["plain", "accumulated, clipped"],
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = Classifier()
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    first = trainer(RulesCallback(manager(), task=epoch_of), saves, epochs=3, **options)
    first.fit(whole, data(), data(2))
    for epoch in (0, 1):
        resumed = Classifier()
        rules = manager()
        second = trainer(RulesCallback(rules, task=epoch_of), epochs=3, **options)
        second.fit(
            resumed, data(), data(2), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", weights_only=True
        )
        assert [commit.reason for commit in resumed.net.history] == [
            commit.reason for commit in whole.net.history
        ]
        assert_same(resumed.state_dict(), whole.state_dict())
        assert_same(second.optimizers[0].state_dict(), first.optimizers[0].state_dict())
        assert_same(rules.state_dict(), first.callbacks[0].rules.state_dict())
        gn.check(resumed.net)
    assert whole.net.sizes == [8, 18, 3]
    assert len(whole.net.history) >= 5
    assert options or whole.net.count().frozen > 0


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
def test_a_checkpoint_from_the_middle_of_an_epoch_goes_on_there(tmp_path: Path) -> None:
    x, y = next(iter(data()))
    # Lightning begins its loaders again
    alike = DataLoader(TensorDataset(x.repeat(6, 1), y.repeat(6)), 8)
    whole = Classifier()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer(RulesCallback(manager(), task=epoch_of), saves, epochs=2).fit(whole, alike, alike)
    resumed = Classifier()
    again = trainer(RulesCallback(manager(), task=epoch_of), epochs=2)
    again.fit(resumed, alike, alike, ckpt_path=tmp_path / "step=4.ckpt")
    assert [commit.reason for commit in resumed.net.history] == [
        commit.reason for commit in whole.net.history
    ]
    assert_same(resumed.state_dict(), whole.state_dict())


@pytest.fixture
def edited(tmp_path: Path) -> tuple[Classifier, Path]:
    """A module whose net was grown, cut and frozen, and a checkpoint of it."""
    module = Classifier()
    path = tmp_path / "edited.ckpt"
    fit(module, epochs=2).save_checkpoint(path)
    assert module.net.sizes == [8, 16, 3]
    assert module.net.count().frozen > 0
    return module, path


def test_evaluation_takes_the_nets_of_a_checkpoint(edited: tuple[Classifier, Path]) -> None:
    module, path = edited
    fresh = Classifier()
    predicted = trainer(RulesCallback()).predict(fresh, data(), ckpt_path=path)
    module.eval()
    with torch.no_grad():
        assert_same(predicted, [module(x) for x, _ in data()])
    for run in ("validate", "test"):
        fresh = Classifier()
        getattr(trainer(RulesCallback()), run)(fresh, data(), ckpt_path=path, verbose=False)
        assert_same(fresh.state_dict(), module.state_dict())


def test_the_best_of_a_run_comes_back_into_the_module_that_went_on(tmp_path: Path) -> None:
    module = Classifier()
    rules = manager()
    best = ModelCheckpoint(tmp_path, monitor="age", mode="min")  # the first epoch
    made = trainer(RulesCallback(rules, task=epoch_of), best, epochs=3)
    made.fit(module, data(), data(2))
    assert module.net.sizes == [8, 18, 3]
    made.test(module, data(), ckpt_path="best", verbose=False)
    assert module.net.sizes == [8, 14, 3]
    assert rules.state_dict()["next_step"] == made.callbacks[0].step == 6
    gn.check(module.net)


def test_load_from_checkpoint_works_for_a_module_that_loads_its_nets(
    edited: tuple[Classifier, Path],
) -> None:
    module, path = edited
    assert_same(LoadsItsNets.load_from_checkpoint(path).state_dict(), module.state_dict())
    with pytest.raises(gn.errors.TopologyError, match=r"head\.net\.layers\.1"):
        Classifier.load_from_checkpoint(path)


def test_checkpoints_of_weights_alone_hold_the_nets(tmp_path: Path) -> None:
    module = Classifier()
    saves = ModelCheckpoint(tmp_path, filename="in", save_weights_only=True)
    made = trainer(RulesCallback(manager(), task=epoch_of), saves)
    made.fit(module, data(), data(2))
    made.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    for name in ("in.ckpt", "after.ckpt"):
        assert "optimizer_states" not in torch.load(tmp_path / name, weights_only=True)
        assert_same(
            LoadsItsNets.load_from_checkpoint(tmp_path / name).state_dict(), module.state_dict()
        )


def test_a_grafted_part_goes_over_the_dense_one(tmp_path: Path) -> None:
    def dense() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))

    module = Classifier(dense())
    gn.graft(module, "head.net")
    fit(module).save_checkpoint(tmp_path / "grafted.ckpt")
    fresh = Classifier(dense())
    made = trainer(RulesCallback(manager(), task=epoch_of), epochs=2)
    made.fit(fresh, data(), data(2), ckpt_path=tmp_path / "grafted.ckpt")
    assert fresh.net.sizes == [8, 16, 3]
    parts: Any = gn.ungraft(fresh)["head.net"]
    assert [type(part) for part in parts] == [nn.Linear, nn.ReLU, nn.Linear]


class Early(Classifier):
    """Makes its optimizer too early."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def test_an_optimizer_that_holds_the_parameters_of_before_is_refused(tmp_path: Path) -> None:
    module = Early()
    fit(module).save_checkpoint(tmp_path / "early.ckpt")
    with pytest.raises(gn.errors.OptimizerError, match=r"'head\.net'"):
        trainer(RulesCallback(manager(), task=epoch_of), epochs=2).fit(
            Early(), data(), data(2), ckpt_path=tmp_path / "early.ckpt"
        )


def test_other_rules_than_those_of_the_checkpoint_are_refused(
    edited: tuple[Classifier, Path],
) -> None:
    rules = gn.rules.RuleManager(seed=3)
    rules.add(PruneWeakest(0.3))
    with pytest.raises(gn.errors.CheckpointError, match="PruneWeakest"):
        trainer(RulesCallback(rules), epochs=3).fit(
            Classifier(), data(), data(2), ckpt_path=edited[1]
        )


def test_a_checkpoint_of_a_compiled_net_resumes_in_a_module_without(tmp_path: Path) -> None:
    module = Classifier()
    rules = manager()
    net = module.net
    first = fit(module, rules=rules)
    module.head["net"] = torch.compile(net, backend="eager")
    first.save_checkpoint(tmp_path / "compiled.ckpt")
    resumed = Classifier()
    again = manager()
    second = trainer(RulesCallback(again, task=epoch_of))
    second.fit(resumed, data(), data(2), ckpt_path=tmp_path / "compiled.ckpt")  # no epoch is left
    assert_same(dict(resumed.net.state_dict()), dict(net.state_dict()))
    assert_same(second.optimizers[0].state_dict(), first.optimizers[0].state_dict())
    assert_same(again.state_dict(), rules.state_dict())


@pytest.mark.parametrize("trouble", ["damaged", "elsewhere", "compiled"])
def test_a_load_that_fails_leaves_the_module_as_it_was(trouble: str) -> None:
    module = Classifier()
    checkpoint = {}
    module.other = gn.GrapNet([2, 2])
    if trouble == "compiled":
        module.other = torch.compile(module.other, backend="eager")
    save_nets(module, checkpoint)
    part, other = checkpoint["grapnet"]
    if trouble == "elsewhere":
        other["name"] = "tail.net"
    if trouble == "damaged":
        file = part["file"].clone()
        file[-5] += 1
        other["file"] = file
    before = module.net
    named = {"damaged": "sha256", "elsewhere": "tail.net", "compiled": r"'other\._orig_mod'"}
    with pytest.raises(gn.errors.GrapNetError, match=named[trouble]):
        load_nets(module, checkpoint)
    assert module.net is before


def test_a_module_that_was_fitted_can_be_copied_and_pickled(
    edited: tuple[Classifier, Path],
) -> None:
    module, _ = edited
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(other.state_dict(), module.state_dict())
        checkpoint: dict[str, Any] = {}
        other.on_save_checkpoint(checkpoint)
        module.on_load_checkpoint(checkpoint)


def test_the_callback_leaves_the_module_its_own_hooks(tmp_path: Path) -> None:
    class Counts(Classifier):
        loads = saves = 0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saves += 1

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loads += 1
            assert nets_in(self)["head.net"].sizes == [8, 14, 3]

    module = Counts()
    fit(module).save_checkpoint(tmp_path / "a.ckpt")
    other = Counts()
    trainer(RulesCallback()).validate(other, data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert (module.saves, other.loads) == (1, 1)


class Dropping(Classifier):
    """Drops, and keeps the random state as the guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers[1].dropout = 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["random"])


def test_a_lightning_run_with_dropout_goes_on_bit_for_bit_as_the_guide_says(tmp_path: Path) -> None:
    whole = Dropping()
    fit(whole, epochs=2)
    fit(Dropping(), epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    resumed = Dropping()
    torch.manual_seed(1)
    callback = RulesCallback(manager(), task=epoch_of)
    trainer(callback, epochs=2).fit(resumed, data(), data(2), ckpt_path=tmp_path / "half.ckpt")
    assert_same(resumed.state_dict(), whole.state_dict())
