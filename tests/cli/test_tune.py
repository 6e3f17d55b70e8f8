"""`grapnet tune`: what it measures is what `auto` reads."""

import json
from pathlib import Path

import pytest

import grapnet as gn
from grapnet.cli._main import main
from grapnet.execution import _costs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_costs, "_known", {})
    return tmp_path / "cache"


SMALL = ["--size", "32x16", "--size", "16x16", "--batch", "2", "--precision", "float32"]


def test_tune_writes_what_auto_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *SMALL, "--json"]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert shown.err.splitlines()[-1].startswith("measured 32×16 after")
    assert Path(data["path"]).parent == folder
    (one,) = data["tables"]
    assert one["precision"] == "float32"
    assert one["training"]["sparse"]["cells"] == [16 * 16, 32 * 16]
    _costs._known.clear()
    net = gn.GrapNet([24, 16], density=0.3)
    (row,) = net.execution.describe()
    assert row["costs"] == f"tuned here on {one['date']}"


def test_tune_shows_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "batch 2" in text
    assert text.splitlines()[-1].startswith(f"written to {folder}")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--size", "16"],
        ["--size", "0x16"],
        ["--batch", "0"],
        ["--precision", "float8"],
        ["--precision", "tf32"],
        ["--device", "meta"],
    ],
)
def test_tune_refuses_what_it_cannot_measure(
    wrong: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *wrong]) == 2
    assert capsys.readouterr().err.startswith("grapnet: ")
    assert not folder.exists()
