"""The training loops that people copy run on few images."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import grapnet as gn
from examples import lightning_trainer, plain_loop

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # one worker imports it
    # Lightning warns about itself.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
SMALL: dict[str, Any] = {"images": 640, "epochs": 4, "hidden": 48, "every": 5}


def test_the_plain_loop_prunes_learns_and_saves(tmp_path: Path) -> None:
    result = plain_loop.main(plain_loop.Settings(out=tmp_path / "made", **SMALL))
    assert result["accuracy"] > 0.6
    assert result["loaded_accuracy"] == result["accuracy"]
    assert result["relations"] == round(0.1 * result["relations_before"])
    model: Any = nn.Sequential(plain_loop.encoder(), gn.GrapNet([64, 48, 10]))
    gn.restore(tmp_path / "made/run.safetensors", into=model)
    history = model[1].history
    assert len(history) == result["changes"] > 5
    assert {commit.by for commit in history} == {"PruneWeakest", "Rewire"}


def test_lightning_does_the_same_in_two_halves(tmp_path: Path) -> None:
    result = lightning_trainer.main(lightning_trainer.Settings(out=tmp_path, **SMALL))
    assert result["accuracy_of_the_best"] > 0.6
    assert result["accuracy_of_the_last"] > 0.5
    assert result["relations"] == round(0.1 * result["relations_before"])
    plain = plain_loop.main(plain_loop.Settings(out=tmp_path, **SMALL))
    assert result["changes"] == plain["changes"]
