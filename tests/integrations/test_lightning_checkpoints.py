"""Lightning's own checkpoints hold edited nets and their rules, and a module of the first shape
takes them back.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grapnet as gn
from grapnet.integrations.lightning import RulesCallback, load_nets, nets_in, save_nets
from grapnet.rules import PruneWeakest
from tests.integrations.lightning_classifier import (
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
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, callbacks used to create"
    ),
]


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
    whole, saves = Classifier(), ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    first = trainer(RulesCallback(manager(), task=epoch_of), saves, epochs=3, **options)
    first.fit(whole, data(), data(2))
    for epoch in (0, 1):
        resumed, rules = Classifier(), manager()
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
    whole, saves = (
        Classifier(),
        ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
    )
    trainer(RulesCallback(manager(), task=epoch_of), saves, epochs=2).fit(whole, alike, alike)
    resumed = Classifier()
    again = trainer(RulesCallback(manager(), task=epoch_of), epochs=2)
    again.fit(resumed, alike, alike, ckpt_path=tmp_path / "step=4.ckpt")
    assert [commit.reason for commit in resumed.net.history] == [
        commit.reason for commit in whole.net.history
    ]
    assert_same(resumed.state_dict(), whole.state_dict())


def test_without_the_callback_the_resume_fails(tmp_path: Path) -> None:
    fit(Classifier()).save_checkpoint(tmp_path / "edited.ckpt")
    with pytest.raises(
        gn.TopologyError, match=r"head\.net\.layers\.1.*wired differently.*RulesCallback.*load_nets"
    ):
        trainer(epochs=2).fit(Classifier(), data(), ckpt_path=tmp_path / "edited.ckpt")


@pytest.fixture
def edited(tmp_path: Path) -> tuple[Classifier, Path]:
    """A module whose net was grown, cut and frozen, and a checkpoint of it."""
    module, path = Classifier(), tmp_path / "edited.ckpt"
    fit(module, epochs=2).save_checkpoint(path)
    assert module.net.sizes == [8, 16, 3]
    assert module.net.count().frozen > 0
    return module, path


def test_evaluation_takes_the_nets_of_a_checkpoint(edited: tuple[Classifier, Path]) -> None:
    module, path = edited
    fresh = Classifier()
    said = trainer(RulesCallback()).predict(fresh, data(), ckpt_path=path)
    module.eval()
    with torch.no_grad():
        assert_same(said, [module(x) for x, _ in data()])
    for run in ("validate", "test"):
        fresh = Classifier()
        getattr(trainer(RulesCallback()), run)(fresh, data(), ckpt_path=path, verbose=False)
        assert_same(fresh.state_dict(), module.state_dict())


def test_the_best_of_a_run_comes_back_into_the_module_that_went_on(tmp_path: Path) -> None:
    module, rules = Classifier(), manager()
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
    with pytest.raises(gn.TopologyError, match="wired differently"):
        Classifier.load_from_checkpoint(path)


def test_checkpoints_of_weights_alone_hold_the_nets(tmp_path: Path) -> None:
    module, saves = Classifier(), ModelCheckpoint(tmp_path, filename="in", save_weights_only=True)
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
    fresh, made = Classifier(dense()), trainer(RulesCallback(manager(), task=epoch_of), epochs=2)
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
    with pytest.raises(
        gn.OptimizerError, match=r"parameters of the net at 'head\.net'.*configure_optimizers"
    ):
        trainer(RulesCallback(manager(), task=epoch_of), epochs=2).fit(
            Early(), data(), data(2), ckpt_path=tmp_path / "early.ckpt"
        )


def test_other_rules_than_those_of_the_checkpoint_are_refused(
    edited: tuple[Classifier, Path],
) -> None:
    rules = gn.RuleManager(seed=3)
    rules.inject(PruneWeakest(0.3))
    with pytest.raises(gn.CheckpointError, match="PruneWeakest"):
        trainer(RulesCallback(rules), epochs=3).fit(
            Classifier(), data(), data(2), ckpt_path=edited[1]
        )


def test_nets_keep_device_mode_and_what_is_not_trained() -> None:
    module, checkpoint = Classifier(), {}
    with module.net.edit() as edit:
        edit.cut(module.net.layers[0].outgoing().smallest(fraction=0.5))
    save_nets(module, checkpoint)
    other = Classifier().eval()
    other.net.layers[1].bias.requires_grad_(False)
    found = load_nets(other, checkpoint)
    assert found == nets_in(other) == {"head.net": other.net}
    assert other.net.count().relations == 8 * 12 // 2 + 12 * 3
    assert [name for name, p in other.net.named_parameters() if not p.requires_grad] == [
        "layers.1.bias"
    ]
    assert not other.net.training
    assert load_nets(other, {}) == {}


def test_a_checkpoint_of_a_compiled_net_resumes_in_a_module_without(tmp_path: Path) -> None:
    module, rules = Classifier(), manager()
    net, first = module.net, fit(module, rules=rules)
    module.head["net"] = torch.compile(net, backend="eager")
    first.save_checkpoint(tmp_path / "compiled.ckpt")
    resumed, again = Classifier(), manager()
    second = trainer(RulesCallback(again, task=epoch_of))
    second.fit(resumed, data(), data(2), ckpt_path=tmp_path / "compiled.ckpt")  # no epoch is left
    assert_same(dict(resumed.net.state_dict()), dict(net.state_dict()))
    assert_same(second.optimizers[0].state_dict(), first.optimizers[0].state_dict())
    assert_same(again.state_dict(), rules.state_dict())


@pytest.mark.parametrize("trouble", ["damaged", "elsewhere", "compiled"])
def test_a_load_that_fails_leaves_the_module_as_it_was(trouble: str) -> None:
    module, checkpoint = Classifier(), {}
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
    told = {
        "damaged": "sha256",
        "elsewhere": "tail.net",
        "compiled": r"'other\._orig_mod' was compiled by torch",
    }
    with pytest.raises(gn.GrapNetError, match=told[trouble]):
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
