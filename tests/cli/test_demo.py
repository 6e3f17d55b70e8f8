"""The demonstration holds what it claims, and its folder has all of it."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

import grapnet as gn
from grapnet.cli._main import main

FILES = [
    "accuracy_matrix.png",
    "demo.json",
    "digits.safetensors",
    "graph.png",
    "report.html",
    "timeline.png",
]
pytestmark = pytest.mark.xdist_group("demo")  # one worker, so that it runs once


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


def test_all_checks_hold_and_all_files_are_there(folder, numbers):
    assert list(numbers["checks"].values()) == [True] * 8
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert set(numbers["versions"]) == {"grapnet", "torch", "scikit-learn", "python"}


def test_grows_task_by_task_and_learns(numbers):
    rows = list(numbers["grow"]["rows"].values())
    assert [row["relations"] for row in rows] == [(64 + 2) * 32 * n for n in range(1, 6)]
    assert 0.7 < rows[-1]["all"] < 0.95  # chance: 0.1
    assert min(rows[-1][f"task-{n}"] for n in range(1, 6)) > 0.9  # chance: 0.5


def test_only_the_cut_task_falls_and_undo_brings_it_back(numbers):
    before, after, undone = numbers["cut"]["rows"].values()
    assert before == undone
    assert after["relations"] == before["relations"] - 64 * 32
    assert after["task-3"] < 0.6
    assert {name for name in before if before[name] != after[name]} == {
        "relations",
        "all",
        "task-3",
    }


def test_the_sifted_net_learns_on(numbers):
    before, sifted, trained = numbers["sift"]["rows"].values()
    assert (before["hidden"], sifted["hidden"]) == (160, 120)
    assert sifted["relations"] < before["relations"] / 2
    assert trained["all"] > 0.93


def test_the_checkpoint_is_the_sifted_net_with_its_journal(folder, numbers):
    path = folder / "digits.safetensors"
    net = gn.load(path)
    assert net.count().relations == numbers["sift"]["rows"]["trained on"]["relations"]
    reasons = [row["reason"] for row in numbers["save"]["rows"].values()]
    assert [commit.reason for commit in net.history] == reasons
    assert set(net.owners) == {f"task-{n}" for n in range(1, 6)}
    assert numbers["save"]["bytes"] == path.stat().st_size


def test_equal_seeds_give_equal_numbers_over_an_earlier_run(numbers, tmp_path):
    (tmp_path / "demo.json").write_text("old")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    again = read(tmp_path)
    assert json.loads(printed.getvalue()) == again
    assert {key for key in again if again[key] != numbers[key]} == {"seconds"}


def test_the_report_is_one_page_that_needs_nothing_else(folder):
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<script|<link", source)
    assert source.count("✓") == 8
    assert source.count('<img src="data:image/png;base64,') == 3


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
