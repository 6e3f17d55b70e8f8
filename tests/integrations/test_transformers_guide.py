"""The guide's code runs, and so does the example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gpt2_ffn import Settings, main

pytestmark = pytest.mark.xdist_group("transformers")

GUIDE = Path(__file__).parents[2] / "docs/guides/transformers.md"


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(GUIDE.name), "exec"), {})


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


def test_torchs_own_layers_need_no_other_library() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None; from torch import nn; "
        "from grapnet.integrations.transformers import graft_ffn; "
        "print(len(graft_ffn(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12)))[0].hidden))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "12\n"
