"""What the project asks pip for is on the public index."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    ROOT / "pyproject.toml",
    *sorted(ROOT.glob("*.txt")),
    *sorted(ROOT.glob(".github/**/*.yml")),
]


def local_labels(text: str) -> list[str]:
    """Returns the versions with a local label, such as 2.13.0+cpu, which no public index has."""
    return re.findall(r"[=<>~]=?\s*([\w.]+\+[\w.]+)", text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_version_has_a_local_label(path: Path) -> None:
    assert local_labels(path.read_text()) == []


def test_a_local_label_would_be_found() -> None:
    assert ROOT / "constraints.txt" in FILES
    pins = 'torch==2.13.0+cpu ; sys_platform == "linux"\nnumpy>=2.4.0\nother >= 1.0+cu128\n'
    assert local_labels(pins) == ["2.13.0+cpu", "1.0+cu128"]
