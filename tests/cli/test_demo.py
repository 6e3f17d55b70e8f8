"""The demonstration shows what it says, and its folder holds all of it."""

import base64
import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import grapnet as gn
from grapnet.cli.main import main
from grapnet.demo.display import Display
from grapnet.demo.heads import FAST, Settings
from grapnet.demo.run import written_at_once
from grapnet.demo.story import checks
from grapnet.demo.words import summary

FILES = [
    "accuracy_matrix.png",
    "demo.json",
    "digits.safetensors",
    "graph.png",
    "report.html",
    "timeline.png",
]
TASKS = 5
pytestmark = pytest.mark.xdist_group("demo")  # one worker, so that the demo runs once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one fast run wrote, into a folder below one that was not there; printed.json is what it
    printed.
    """
    out = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as printed:
        patch.setattr("sys.stdout", printed)
        code = main(["demo", "--fast", "--out", str(out), "--json"])
        (out.parent / "printed.json").write_text(printed.getvalue())
    assert code == 0
    return out


@pytest.fixture(scope="module")
def numbers(folder: Path) -> dict:
    return json.loads((folder / "demo.json").read_text())


def test_files_are_there_and_the_json_is_what_was_printed(folder, numbers):
    assert sorted(path.name for path in folder.iterdir()) == FILES == numbers["files"]
    assert json.loads((folder.parent / "printed.json").read_text()) == numbers
    assert {"grapnet", "torch", "scikit-learn", "python"} == set(numbers["versions"])
    assert (numbers["settings"]["seed"], numbers["settings"]["updates"]) == (0, FAST.updates)


def test_grows_task_by_task_and_learns(numbers):
    tasks = numbers["growth"]["tasks"]
    assert [task["relations"] for task in tasks] == [(64 + 2) * 32 * n for n in range(1, TASKS + 1)]
    assert [task["version"] for task in tasks] == [1, 2, 3, 4, 5]
    assert 0.6 < numbers["growth"]["seen_class"] < 0.95  # chance: 0.1
    assert 0.9 < numbers["growth"]["task_local"] <= 1  # chance: 0.5


def test_compares_heads_of_as_many_parameters_on_the_same_seeds(numbers):
    comparison = numbers["comparison"]
    heads = comparison["heads"]
    assert set(heads) == {"dense", "control", "own", "seen"}
    assert comparison["seeds"] == [0, 1]
    for head in heads.values():
        assert abs(head["parameters"] / heads["own"]["parameters"] - 1) < 0.07
        assert len(head["seen_class"]) == 2
        assert all(40 < accuracy < 97 for accuracy in head["seen_class"])
    assert heads["own"]["seen_class"][0] == pytest.approx(
        100 * numbers["growth"]["seen_class"], abs=1e-9
    )
    differences = [
        a - b
        for a, b in zip(heads["own"]["seen_class"], heads["control"]["seen_class"], strict=True)
    ]
    assert comparison["differences"]["own - control"]["mean"] == pytest.approx(sum(differences) / 2)
    assert f"{sum(differences) / 2:+.1f} [" in comparison["verdict"]
    # after few updates, as the report says
    assert heads["control"]["mean"] > heads["own"]["mean"] + 2


def test_only_the_cut_task_falls_and_undo_is_bit_identical(numbers):
    cut = numbers["cut"]
    drops = [before - after for before, after in zip(cut["before"], cut["after"], strict=True)]
    assert drops[cut["task"] - 1] > 0.4
    assert [drop for n, drop in enumerate(drops, 1) if n != cut["task"]] == [0, 0, 0, 0]
    assert cut["changed_tasks"] == [cut["task"]]
    assert cut["relations"] == [10560, 10560 - 2 * 32, 10560]
    assert cut["undone"] == cut["before"]
    assert cut["undo_restored"] == {"logits": True, "parameters": True, "Adam's moments": True}
    assert cut["seen_class_after"] < cut["seen_class_undone"] == numbers["growth"]["seen_class"]


def test_frozen_coordinates_do_not_drift_and_others_do(numbers):
    freeze = numbers["freeze"]
    assert freeze["frozen"] == freeze["coordinates"] == 32 * (64 + 2 + 1)
    assert freeze["drift"] == 0 < freeze["other_drift"]


def test_sift_leaves_fewer_relations_and_trains_on(numbers):
    sift = numbers["sift"]
    assert sift["relations"][0] - sift["relations"][1] == sift["planned_cut"] > 10560 // 2
    assert sift["nodes"] == [160, 120]
    assert sift["optimizer_coordinates"] == sift["trainable"]
    assert sift["seen_class"] > sift["seen_class_sifted"]
    assert sift["seen_class"] > 0.88
    assert abs(sift["seen_class"] - sift["seen_class_not_sifted"]) < 0.06


def test_all_views_agree(numbers):
    views = numbers["views"]
    assert {"auto", "reference", "dense", "family", "sparse", "snapshot"} == {
        *views["differences"],
        *views["refused"],
    }
    assert (
        views["largest"]
        == max(views["differences"].values())
        < 1e-5 * max(1, views["largest_logit"])
    )
    assert views["largest_logit"] > 1


def test_checkpoint_is_the_sifted_net_and_undo_in_a_copy_brings_the_relations_back(folder, numbers):
    saved, sift = numbers["saved"], numbers["sift"]
    assert saved["loaded_equal"]
    assert saved["original_untouched"]
    assert saved["relations"] == sift["relations"][::-1]
    net = gn.load(folder / "digits.safetensors")
    assert (net.version, net.count().relations) == (9, sift["relations"][1])
    assert [commit.reason for commit in net.history] == [
        commit["reason"] for commit in numbers["history"]
    ]
    assert saved["bytes"] == (folder / "digits.safetensors").stat().st_size
    # as it prints
    assert [task["owner"] for task in numbers["growth"]["tasks"]] == [
        f"task-{n}" for n in range(1, 6)
    ]
    assert set(net.layers[1].owners) == {f"task-{n}" for n in range(1, 6)}
    assert net.history[-1].reason == "CovarianceSifter, PruneWeakest"  # nobody told a step


def test_every_claim_is_checked_and_would_be_found_wrong(numbers):
    assert list(numbers["checks"].values()) == [True] * 8
    wrong = {
        "cut": {"changed_tasks": [3, 4], "undo_restored": {"logits": False}},
        "freeze": {"drift": 1e-9},
        "sift": {"planned_cut": 1, "optimizer_coordinates": [1, 1]},
        "views": {"largest": 0.1},
        "saved": {"loaded_equal": False, "original_untouched": False},
    }
    assert not any(
        checks({name: {**numbers[name], **part} for name, part in wrong.items()}).values()
    )


class Tags(HTMLParser):
    """Gathers which tags are open, which addresses a page names, and what a reader sees of it."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "srcset", "href")
        ]
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_is_one_page_that_needs_nothing_else(folder, numbers):
    source = (folder / "report.html").read_text(encoding="utf-8")
    page = Tags()
    page.feed(source)
    page.close()
    assert page.open == []
    assert not page.names & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", source)
    assert "prefers-color-scheme: dark" in source
    assert len(page.addresses) == 12  # three pictures, light and dark, wide and narrow
    pictures = [
        base64.b64decode(address.removeprefix("data:image/png;base64,"))
        for address in page.addresses
    ]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {(folder / name).read_bytes() for name in FILES if name.endswith("png")} == set(
        pictures[3::4]
    )
    assert len(set(pictures)) == 12
    widths = [int.from_bytes(picture[16:20], "big") for picture in pictures]
    assert all(widths[n] == widths[n + 1] < widths[n + 2] == widths[n + 3] for n in (0, 4, 8))
    assert source.count("<table>") == source.count('<div class="wide"><table>') == 5
    assert numbers["comparison"]["verdict"] in page.text
    # in the journal; who did it is its reason
    assert source.count("CovarianceSifter, PruneWeakest</td>") == 1
    assert f"{numbers['sift']['relations'][0]:,} → {numbers['sift']['relations'][1]:,}" in page.text


def test_equal_seeds_give_equal_numbers_and_an_earlier_run_is_replaced(
    folder, numbers, tmp_path, run, monkeypatch
):
    out = tmp_path / "again"
    out.mkdir()
    (out / "demo.json").write_text("old")
    (out / "mine.txt").write_text("kept")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    ran = run("demo", "--fast", "--out", "again")
    assert (ran.code, torch.get_num_threads()) == (0, threads)
    again = json.loads((out / "demo.json").read_text())
    assert {path.name for path in out.iterdir()} == {*FILES, "mine.txt"}
    assert {key for key in numbers if numbers[key] != again[key]} == {"folder", "seconds"}
    assert "8 of 8 checks held" in ran.out
    told, freeze, sift = " ".join(ran.out.split()), again["freeze"], again["sift"]
    assert again["comparison"]["verdict"] in told
    assert freeze["seen_class_before"] < freeze["seen_class"] == sift["seen_class_before"]
    shares = (
        f"{100 * freeze['seen_class_before']:.1f} % before and {100 * freeze['seen_class']:.1f} %"
        " after"
    )
    assert (
        f"From here on the net trains on all digits at once, no longer task by task: {shares}"
        in told
    )
    assert "\x1b" not in ran.err
    assert len(re.findall(r"task \d/5: .* accuracy .* relations .* version \d", ran.err)) == TASKS


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_folder_is_refused_before_any_work(tmp_path, run, below):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    ran = run("demo", "--fast", "--out", taken / below)
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err
        == f"grapnet: {taken} is a file, not a folder\nhint: name a folder to write into: --out"
        " FOLDER\n"
    )
    assert taken.read_text() == "mine"


def test_a_missing_library_is_named_before_any_work(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    ran = run("demo", "--fast", "--out", tmp_path / "out")
    assert ran.code == 2
    assert ran.err.startswith(
        'grapnet: this needs sklearn, which is not installed. Run: pip install "grapnet[demo]"'
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_folder_as_it_was(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "demo.json").write_text("old")

    def interrupted(out: Path) -> None:
        with written_at_once(out) as partial:
            (partial / "demo.json").write_text("half of")
            raise KeyboardInterrupt

    for out in (kept, tmp_path / "a" / "b"):
        with pytest.raises(KeyboardInterrupt):
            interrupted(out)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "kept",
        "kept/demo.json",
    ]
    assert (kept / "demo.json").read_text() == "old"


def test_what_is_printed_fits_a_terminal_of_eighty_columns(numbers):
    lines = summary({**numbers, "folder": "runs/demo"}).splitlines()
    assert max(map(len, lines)) < 80
    assert lines[-2].startswith(
        "runs/demo/report.html shows it all; beside it accuracy_matrix.png, demo.json"
    )


def test_a_folder_in_the_place_of_a_file_is_refused_before_any_is_replaced(tmp_path):
    (tmp_path / "demo.json").write_text("old")
    (tmp_path / "report.html").mkdir()

    def write() -> None:
        with written_at_once(tmp_path) as partial:
            for name in ("demo.json", "report.html"):
                (partial / name).write_text("new")

    with pytest.raises(IsADirectoryError, match=r"report.html' is a folder"):
        write()
    assert (tmp_path / "demo.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "report.html"]


def test_what_another_run_has_not_finished_stays(tmp_path):
    others = tmp_path / f".partial-{os.getpid()}"  # processes of two machines may have one number
    others.mkdir()
    (others / "demo.json").write_text("theirs")
    with written_at_once(tmp_path) as first, written_at_once(tmp_path) as second:
        (first / "demo.json").write_text("first")
        (second / "demo.json").write_text("second")
    assert (tmp_path / "demo.json").read_text() == "first"  # which came last
    assert (others / "demo.json").read_text() == "theirs"


def test_a_terminal_gets_one_line_that_is_written_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.StringIO()
    with Display(stream, live=True, pause=0) as display:
        display.show(lambda: "first " * 20)
        display.show(lambda: "second")
        display.keep("stays")
        display.show(lambda: "last")
    shown = stream.getvalue().split("\r\x1b[2K")
    assert shown == ["", ("first " * 20)[:29], "second", "stays\n", "last", ""]


def test_the_live_line_is_not_asked_for_more_often_than_it_is_shown():
    asked = []
    for live, pause in ((False, 0), (True, 60)):
        display = Display(io.StringIO(), live=live, pause=pause)
        for number in range(3):
            display.show(lambda number=number: asked.append(number) or "")
    assert asked == [0]


def test_a_stream_without_the_signs_gets_plain_ones():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = Display(stream, live=False)
    display.keep(f"{display.bar(0.5)} ± 1")
    assert raw.getvalue() == b"##########---------- ? 1\n"


def test_the_full_run_compares_several_seeds():
    assert Settings().seeds >= 3
