"""The demonstration holds what it claims, and its folder has all of it."""

import base64
import contextlib
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import grapnet as gn
from grapnet.cli.main import main

PICTURES = ["accuracy_matrix.png", "graph.png", "timeline.png"]
FILES = sorted([*PICTURES, "demo.json", "digits.safetensors", "report.html"])
pytestmark = pytest.mark.xdist_group("demo")  # one worker, so that both forms run once


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What both forms wrote: one below a folder that was not there, one over an earlier run."""
    plain = tmp_path_factory.mktemp("plain") / "runs" / "demo"
    assert main(["demo", "--out", str(plain)]) == 0
    heads = tmp_path_factory.mktemp("heads")
    (heads / "demo.json").write_text("old")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", "--out", str(heads), "--heads", "2", "--json"]) == 0
    assert json.loads(printed.getvalue()) == read(heads)
    return {"plain": plain, "heads": heads}


@pytest.fixture(params=["plain", "heads"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


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
    assert abs(trained["all"] - numbers["sift"]["unsifted"]) < 0.04


def test_the_checkpoint_is_the_sifted_net_with_its_journal(folder, numbers):
    path = folder / "digits.safetensors"
    net = gn.load(path)
    assert net.count().relations == numbers["sift"]["rows"]["trained on"]["relations"]
    reasons = [row["reason"] for row in numbers["save"]["rows"].values()]
    assert [commit.reason for commit in net.history] == reasons
    assert set(net.owners) == {f"task-{n}" for n in range(1, 6)}
    assert numbers["save"]["bytes"] == path.stat().st_size


def test_heads_are_compared_when_asked(folders):
    assert "compare" not in read(folders["plain"])
    rows = read(folders["heads"])["compare"]["rows"]
    assert set(rows) == {"grown", "dense", "scaled"}
    assert all(0.7 < row["accuracy"] < 0.97 for row in rows.values())
    for kind in ("dense", "scaled"):
        ahead = rows["grown"]["accuracy"] - rows[kind]["accuracy"]
        assert rows[kind]["grown ahead by"] == pytest.approx(ahead)
        assert rows[kind]["from"] < ahead < rows[kind]["to"]


def test_equal_seeds_give_equal_numbers(folders):
    plain = read(folders["plain"])
    heads = read(folders["heads"])
    assert {key for key in plain if plain[key] != heads[key]} == {"seconds"}


class Page(HTMLParser):
    """Collects the tags and addresses of a page, and checks that every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href"):
                self.addresses.append(value or "")
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else(folder):
    source = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", source)
    assert source.count("✓") == 8
    pictures = []
    for address in page.addresses:
        start, _, content = address.partition(",")
        assert start == "data:image/png;base64"
        pictures.append(base64.b64decode(content))
    # each of them dark, then light as the file
    assert len(set(pictures)) == 6
    assert set(pictures[1::2]) == {(folder / name).read_bytes() for name in PICTURES}


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
