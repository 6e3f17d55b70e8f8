"""The training loops that people copy run: the examples on few images, and the guide."""

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from examples import lightning_trainer, plain_loop
from grapnet.integrations.lightning import RulesCallback
from grapnet.rules import At, PruneWeakest
from tests.integrations.lightning_classifier import (
    WARNINGS,
    Classifier,
    data,
    epoch_of,
    fit,
    manager,
    trainer,
)
from tests.test_documents import python_blocks

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # one worker imports it
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
GUIDE = Path(__file__).parents[2] / "docs/guides/training-loops.md"
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
    said = io.StringIO()
    with redirect_stdout(said):
        result = lightning_trainer.main(lightning_trainer.Settings(out=tmp_path, **SMALL))
    assert result["accuracy_of_the_best"] > 0.6
    assert result["accuracy_of_the_last"] > 0.5
    assert result["relations"] == round(0.1 * result["relations_before"])
    plain = plain_loop.main(plain_loop.Settings(out=tmp_path, **SMALL))
    assert result["changes"] == plain["changes"]
    assert said.getvalue().startswith("after 2 epochs: ")


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    drawn = []
    for block in python_blocks(GUIDE.read_text()):
        exec(compile(block, GUIDE.name, "exec"), names)
        drawn.append(torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1])  # what was saved, and what came back
    assert not torch.equal(drawn[1], drawn[2])
    assert len(names["resumed"].head.history) == 3


class Dropping(Classifier):
    """Drops, and keeps the random state as the guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers[1].dropout = 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["random"])


class Forgetting(Dropping):
    """Leaves the random state in the checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes nothing back."""


def test_a_lightning_run_with_dropout_goes_on_bit_for_bit_as_the_guide_says(tmp_path: Path) -> None:
    whole = Dropping()
    fit(whole, epochs=2)
    fit(Dropping(), epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    for resumed in (Dropping(), Forgetting()):
        torch.manual_seed(1)
        callback = RulesCallback(manager(), task=epoch_of)
        trainer(callback, epochs=2).fit(resumed, data(), data(2), ckpt_path=tmp_path / "half.ckpt")
        same = [
            torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
        ]
        assert all(same) == (type(resumed) is Dropping)


class GraftingLate(Classifier):
    """Makes its head editable after the first epoch, and applies rules by itself, as the guide
    says.
    """

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 3, dtype=torch.float64))
        self.rules: gn.RuleManager | None = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            (net,) = gn.graft(self, "head.net", optimizer=optimizer.optimizer).values()
            self.rules = gn.RuleManager()
            self.rules.inject(PruneWeakest(0.5), schedule=At(2))
            self.rules.start(net)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.rules is not None:
            self.rules.apply(self.net, batch_idx)


def test_a_net_that_is_grafted_in_a_hook_has_its_rules_in_the_module() -> None:
    with pytest.raises(ValueError, match="one manager is for one net, and GraftingLate has none"):
        trainer(RulesCallback(gn.RuleManager())).fit(GraftingLate(), data())
    module = GraftingLate()
    trainer(RulesCallback(), epochs=2).fit(module, data())
    assert [commit.reason for commit in module.net.history] == ["PruneWeakest at step 2"]


PROGRAMS = ("plain_loop", "lightning_trainer", "sklearn_estimator")


@pytest.mark.parametrize("name", PROGRAMS)
def test_asking_an_example_for_help_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GUIDE.parents[2] / f"examples/{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(path), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert path.read_text().splitlines()[0].strip('"') in said
    assert list(tmp_path.iterdir()) == []
