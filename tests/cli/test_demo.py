"""The demonstration holds what it claims, and its folder has all of it."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

import grapnet as gn
from grapnet.cli import _demo
from grapnet.cli._main import main

FILES = [
    "demo.json",
    "digits.safetensors",
    "graph-dark.png",
    "graph-light.png",
    "report.html",
]
CHECKS = 16
SMALLER = "Everything gets smaller"
pytestmark = pytest.mark.xdist_group("demo")  # one worker, so that it runs once


@pytest.fixture(scope="module", autouse=True)
def small():
    """A narrower net than the demonstration has, for fewer epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo, "WIDTH", 256)
        patch.setattr(_demo, "EPOCHS", 10)
        # No time is asserted here, and a step of a net this narrow is mostly overhead.
        patch.setattr(_demo, "step_seconds", lambda models, images: [2.0, 1.0])
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demonstration wrote, below a folder that was not there."""
    folder = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    assert main(["demo", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def numbers(folder: Path) -> dict:
    return read(folder)


def read(folder: Path) -> dict:
    return json.loads((folder / "demo.json").read_text())


def rows_of(numbers: dict, title: str) -> list[dict]:
    return list(numbers["chapters"][title]["rows"].values())


def test_all_checks_hold_and_all_files_are_there(folder, numbers):
    assert list(numbers["checks"].values()) == [True] * CHECKS
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert set(numbers["versions"]) == {"grapnet", "torch", "scikit-learn", "python"}


def test_repair_keeps_what_a_cut_alone_loses(numbers):
    before, most, nearly_all = rows_of(numbers, "Remove 75 % of its hidden nodes")
    assert [before["hidden nodes"], most["hidden nodes"]] == [512, 128]
    assert most["parameters"] == 65 * 64 + 65 * 64 + 65 * 9
    assert before["repaired"] > 0.95
    for row in (most, nearly_all):
        assert row["repaired"] > row["not repaired"]
        # The control has learned the same digits in as many epochs.
        assert 0.8 < row["from scratch"] < 1
    assert before["from scratch"] is None


def test_sizes_are_those_of_the_pruned_net(numbers):
    after = numbers["chapters"][SMALLER]["after"]
    assert after["parameters"] == 65 * 64 + 65 * 64 + 65 * 9
    # Two moments of 4 bytes per parameter, and a step per Parameter.
    assert after["optimizer state"] == 8 * after["parameters"] + 4 * 6


def test_only_the_localised_relations_suppress_the_digit(numbers):
    chapter = numbers["chapters"]["Find one class, cut it, undo it"]
    before, cut, same, anywhere, undone = chapter["rows"].values()
    assert 0 < chapter["relations"] < 64
    assert cut["digit 3"] < 0.1 < 0.5 < min(same["digit 3"], anywhere["digit 3"])
    assert cut["change of other logits"] == "0" != anywhere["change of other logits"]
    assert before == undone


def test_the_grown_class_is_learned_beside_frozen_ones(numbers):
    before, grown, trained = rows_of(numbers, "Grow a class that it has never seen")
    assert before["digit 9"] == grown["digit 9"] == 0
    assert trained["digit 9"] > 0.8
    assert trained["frozen"] == before["trainable"]
    assert trained["digits 0 to 8"] > before["digits 0 to 8"] - 0.05


def test_the_checkpoint_is_the_grown_net_with_its_journal(folder, numbers):
    path = folder / "digits.safetensors"
    net = gn.load(path)
    assert net.sizes == [64, 80, 80, 10]
    assert net.owners == ["digit 9"]
    reasons = [row["reason"] for row in rows_of(numbers, "Save and resume")]
    assert [commit.reason for commit in net.history] == reasons
    assert numbers["chapters"]["Save and resume"]["bytes"] == path.stat().st_size


def test_equal_seeds_give_equal_numbers_over_an_earlier_run(numbers, tmp_path):
    (tmp_path / "demo.json").write_text("old")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    again = read(tmp_path)
    assert json.loads(printed.getvalue()) == again
    assert {key for key in again if again[key] != numbers[key]} == {"seconds"}


def test_a_claim_that_does_not_hold_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(_demo, "EPOCHS", 1)
    monkeypatch.setattr(_demo, "step_seconds", lambda models, images: [1.0, 2.0])
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["demo", "--out", str(tmp_path)]) == 1
    assert not all(read(tmp_path)["checks"].values())
    assert "✗" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_report_is_one_page_that_needs_nothing_else(folder):
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<script|<link", source)
    assert source.count("✓") == CHECKS
    assert source.count("data:image/png;base64,") == 2
    # A number and its unit stay on one line.
    assert not re.search(r"\d (%|×|kB|µs)", re.sub(r"<pre.*?</pre>", "", source, flags=re.S))
    for link in re.findall(r'href="([^"]*)"', source):
        assert (folder / link).is_file()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, run):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    ran = run("demo", "--out", taken / "deeper")
    assert (ran.code, ran.out) == (2, "")
    assert taken.read_text() == "mine"


def test_a_missing_library_is_named_before_any_work(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    ran = run("demo", "--out", tmp_path / "out")
    assert ran.code == 2
    assert "grapnet[demo]" in ran.err
    assert list(tmp_path.iterdir()) == []
