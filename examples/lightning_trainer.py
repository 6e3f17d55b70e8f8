"""The plain loop's model in a Lightning Trainer: rules by a callback, checkpoints by Lightning,
stop and go on.

`python -m examples.lightning_trainer` trains half-way, resumes in objects made afresh, and tests
the best model.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import grapnet as gn
from examples import plain_loop
from grapnet.integrations.lightning import RulesCallback, load_nets


@dataclass
class Settings(plain_loop.Settings):
    """The same training, cut in two."""

    out: Path = Path("runs/lightning_trainer")


class Classifier(L.LightningModule):
    """A LightningModule like any other: it knows nothing of rules."""

    def __init__(self, hidden: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.encoder = plain_loop.encoder()
        self.head = gn.GrapNet([64, hidden, 10])

    def forward(self, x: Tensor) -> Tensor:
        """Returns ten scores for every image."""
        return self.head(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the accuracy, for ModelCheckpoint to choose by."""
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, which the callback attaches to the net."""
        return torch.optim.Adam(self.parameters(), self.learning_rate)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lets `Classifier.load_from_checkpoint` work without a trainer."""
        load_nets(self, checkpoint)


def main(settings: Settings | None = None) -> dict[str, float]:
    """Trains half-way, goes on from the checkpoint, and tests the best model; returns the numbers
    it prints.
    """
    settings = settings or Settings()
    L.seed_everything(settings.seed, verbose=False)
    train, held_out = plain_loop.read(settings.images)
    test = held_out[0][:200], held_out[1][:200]
    chooses = TensorDataset(held_out[0][200:], held_out[1][200:])  # which model is the best
    loaders = (
        DataLoader(TensorDataset(*train), settings.batch, shuffle=True),
        DataLoader(chooses, 200),
    )
    for epochs in (settings.epochs // 2, settings.epochs):
        resumes = epochs == settings.epochs
        # dense, whatever the checkpoint holds
        module = Classifier(settings.hidden, settings.learning_rate)
        dense = module.head.count().relations
        trainer = L.Trainer(
            max_epochs=epochs,
            callbacks=[
                RulesCallback(plain_loop.rules(settings)),
                ModelCheckpoint(
                    settings.out,
                    monitor="accuracy",
                    mode="max",
                    save_last=True,
                    enable_version_counter=False,
                ),
            ],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, *loaders, ckpt_path=settings.out / "last.ckpt" if resumes else None)
        net = module.head  # the one that training has left; loading puts others in its place
        print(
            f"after {epochs} epochs: {net.count().relations:,} of {dense:,} relations,"
            f" {len(net.history)} changes"
        )

    (scores,) = trainer.test(
        module, DataLoader(TensorDataset(*test), 200), ckpt_path="best", verbose=False
    )
    loaded = Classifier.load_from_checkpoint(settings.out / "last.ckpt")
    result = {
        "accuracy_of_the_best": scores["accuracy"],
        "accuracy_of_the_last": plain_loop.accuracy(loaded.eval(), test),
        "relations_before": dense,
        "relations": net.count().relations,
        "changes": len(net.history),
    }
    print(
        f"accuracy {result['accuracy_of_the_best']:.1%}, of the last"
        f" {result['accuracy_of_the_last']:.1%}"
    )
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    main()
