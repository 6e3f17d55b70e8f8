"""The examples of every --help run as printed, one after the other, on the files that the README's
quickstart makes.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from grapnet.cli.main import commands

KNOWN = commands()
# they write what others read
EDITS = [name for name, command in KNOWN.items() if command.group == "Change a net"]
OTHERS = ["diff", "history", "plot", "export", "convert", "inspect"]
CODES = {"diff": 1}  # they differ
# what `grapnet demo` writes, and what test_export.py runs
ELSEWHERE = (
    "runs/demo/",
    "--to onnx",
    "--to torch",
)


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the README's Python writes, and with plain weights for `convert`."""
    monkeypatch.chdir(tmp_path)
    readme = Path(__file__).parents[2] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks[:3]:
        exec(block, names)
    mlp = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.Linear(8, 3))
    save_file(mlp.state_dict(), "mlp.safetensors")
    for name in ("pruned.pt", "deep.pt"):
        torch.save(mlp.state_dict(), name)
    classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)
    )
    torch.save(
        nn.ModuleDict({"body": nn.Conv2d(3, 4, 3), "classifier": classifier}).state_dict(), "cnn.pt"
    )
    return tmp_path


def test_the_examples_of_help_run_as_printed(quickstart: Path, run) -> None:
    assert {"net.safetensors", "model.safetensors"} <= {path.name for path in quickstart.iterdir()}
    for name in EDITS + OTHERS:
        for example in KNOWN[name].examples:
            if not any(place in example for place in ELSEWHERE):
                ran = run(*shlex.split(example))
                assert (ran.code, ran.err) == (CODES.get(name, 0), ""), (example, ran.out, ran.err)
