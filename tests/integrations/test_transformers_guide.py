"""The guide's code runs, and so does the example."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt2_ffn import Settings, main
from grapnet.integrations.transformers import ffn_handles, graft_ffn
from tests.integrations.tiny_transformers import gpt2

pytestmark = pytest.mark.xdist_group("transformers")

GUIDE = Path(__file__).parents[2] / "docs/guides/transformers.md"


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE.name), "exec"), names)


def test_what_the_guide_says_of_a_model_that_is_still_grafted(tmp_path: Path) -> None:
    """Were it not so, the guide would warn of nothing."""
    model, ids = gpt2().eval(), torch.arange(3, 9)[None]
    (handle, _) = graft_ffn(model)
    model.save_pretrained(tmp_path)  # pyright: ignore
    again = type(model).from_pretrained(tmp_path).eval()  # pyright: ignore
    assert ffn_handles(again) == []
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)  # pyright: ignore
    written = again.transformer.h[0].mlp.c_fc.weight.flatten()
    assert not torch.equal(
        written.sort().values, handle.net.transitions[0].weight.flatten().sort().values
    )
    assert not torch.allclose(again(ids).logits, model(ids).logits, atol=1e-3)


def test_the_example_prunes_and_learns_on(tmp_path: Path) -> None:
    settings = Settings(steps=25)
    result = main(settings, tmp_path / "gpt2.safetensors")
    losses = result["losses"]
    assert isinstance(losses, dict)
    assert losses["after the cut"] < losses["at first"] < 3.2  # guessing costs log(24)
    assert result["restored_bit_for_bit"]
    assert result["hidden"] == settings.hidden - settings.units
    assert result["relations"] == 2 * 2 * settings.width * (settings.hidden - settings.units) // 2
    assert str(result["text"]).startswith("the grap")
