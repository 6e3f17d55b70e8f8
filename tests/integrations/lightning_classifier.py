"""A module with a net inside for tests of Lightning, its data, its rules, and trainers that say
nothing.
"""

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import grapnet as gn
from grapnet.integrations.lightning import RulesCallback
from grapnet.rules import At, Every, EveryTask, FreezeOwner, GrowForTask, PruneWeakest, Rewire

BATCHES = 6
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
WARNINGS = (  # of Lightning, about itself and about loaders as small as these
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)


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


def manager() -> gn.RuleManager:
    """Returns rules that prune, rewire by recorded gradients, grow at random and freeze."""
    rules = gn.RuleManager(seed=3)
    rules.inject(PruneWeakest(0.2), schedule=At(1, 8))
    rules.inject(Rewire(fraction=0.3), schedule=Every(3, start=2))
    rules.inject(GrowForTask(layer=1, nodes=2, classes_per_task=1), schedule=EveryTask())
    rules.inject(FreezeOwner("task-0"), schedule=At(7))
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
