"""The runner of Torch-Pruning's test files: what it calls passed, and how it runs a file."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tools.torch_pruning_tests import functions_of, last_line, main, without_weights

FILES = {
    "test_functions.py": (
        "import torch_pruning as tp\n"
        "def test_names():\n"
        "    assert tp.DependencyGraph.__module__.startswith('grapnet')\n"
        "def helper():\n"
        "    raise AssertionError\n"
        "if __name__ == '__main__':\n"
        "    raise AssertionError('run as a script')\n"
    ),
    "test_script.py": "if __name__ == '__main__':\n    raise ValueError('as a script')\n",
    "drawing.py": "raise AssertionError\n",
}


def test_files_run_as_pytest_would_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    results = tmp_path / "results.json"
    command = ["runner", "--checkout", str(tmp_path), "--json", str(results)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main() == 1
    found = {row["file"]: row for row in json.loads(results.read_text())["files"]}
    assert list(found) == ["test_functions.py", "test_script.py"]
    assert (found["test_functions.py"]["passed"], found["test_script.py"]["passed"]) == (
        True,
        False,
    )
    assert found["test_script.py"]["problem"] == "ValueError: as a script"
    assert "1 of 2 files pass" in capsys.readouterr().out


def test_functions_are_those_that_pytest_collects(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("def test_a(): ...\ndef b(): ...\nif True:\n    pass\ndef test_c(): ...\n")
    assert functions_of(path) == ["test_a", "test_c"]
    assert last_line("one\ntwo\n\n") == "two"
    assert last_line("") == ""


def test_trained_weights_are_drawn_alike() -> None:
    build = without_weights(lambda: nn.Linear(3, 3))
    one = build(pretrained=True)
    state = torch.get_rng_state()
    other = build(weights="DEFAULT")
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(build().weight, one.weight)
