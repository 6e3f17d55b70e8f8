"""`grapnet report`: results of all folders beside the paper, each with its file, and every miss by
name.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from grapnet.studies import all as studies

COMMITTED = Path(__file__).parent.parent.parent / "results"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of one's own with some results that came with the code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("localization", "mlp_equivalence", "tiny_transformer"):
        shutil.copy(COMMITTED / f"{name}.json", tmp_path / "results")
    return tmp_path


def changed(path: Path, to: Path, **settings: object) -> None:
    """Writes a result that claims other settings."""
    result = json.loads(path.read_text())
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps({**result, "settings": {**result["settings"], **settings}}))


def test_the_committed_results_are_reported_study_by_study(run):
    code, out, _ = run("report", "--results", COMMITTED)
    assert code == 0
    title, *rows = out.split("\n\n")[0].splitlines()
    assert title.split() == ["study", "published", "intervals", "met", "bars", "from"]
    assert [row.split()[0] for row in rows] == list(studies.NAMES)
    assert all(
        row.endswith(f"{COMMITTED / name}.json")
        for name, row in zip(studies.NAMES, rows, strict=True)
    )
    assert re.fullmatch(
        rf"localization +5 of 5 +all reached +{COMMITTED}/localization.json", rows[0]
    )


def test_check_names_every_missed_bar(run, here):
    code, out, _ = run("report", "--check", "tiny_transformer", "localization")
    assert code == 0
    assert "2 of 2 reach every bar." in out
    assert "MISSED" not in out
    result = json.loads((here / "results/tiny_transformer.json").read_text())
    result["cut"]["left"]["gradient"] = 1024
    (here / "results/tiny_transformer.json").write_text(json.dumps(result))
    code, out, _ = run("report", "--check", "tiny_transformer", "localization")
    assert code == 1
    assert "1 of 2 reach every bar." in out
    assert out.splitlines()[-1] == "MISSED tiny_transformer: gradient holds 1024 relations of 992"
    code, out, _ = run("report", "--check", "--json", "tiny_transformer")
    assert code == 1
    assert json.loads(out)["studies"]["tiny_transformer"]["missed"] == [
        "gradient holds 1024 relations of 992"
    ]
    assert run("report", "tiny_transformer").code == 0  # nobody asked


def test_a_study_without_a_result_is_told_and_how_to_make_one(run, here):
    code, out, _ = run("report", "--check")
    assert code == 1
    assert re.search(r"^sifter +– +no result +–$", out, flags=re.MULTILINE)
    assert re.search("MISSED no result: .*sifter.*; grapnet study NAME makes one", out)
    assert "3 of 12 reach every bar." in out


def test_a_local_result_comes_before_the_committed_one_unless_it_is_of_a_short_run(run, here):
    local = here / "runs/studies/mlp_equivalence.json"
    changed(here / "results/mlp_equivalence.json", local)
    told = json.loads(run("report", "--json").out)["studies"]
    assert told["mlp_equivalence"]["file"] == "runs/studies/mlp_equivalence.json"
    assert told["localization"]["file"] == "results/localization.json"
    assert told["sifter"]["file"] is None
    changed(here / "results/mlp_equivalence.json", local, seeds=[0, 1])
    code, out, _ = run("report", "mlp_equivalence", "--check")
    assert code == 0
    assert out.splitlines()[1].endswith(" results/mlp_equivalence.json")
    (line,) = [line for line in out.splitlines() if line.startswith("passed over ")]
    reason = "made with other settings: seeds [0, 1] instead of"
    assert line.startswith(f"passed over runs/studies/mlp_equivalence.json: {reason}")
    (here / "results/mlp_equivalence.json").unlink()
    # where there is no other, it is judged all the same
    code, out, _ = run("report", "mlp_equivalence", "--check")
    assert code == 1
    assert f"MISSED mlp_equivalence: {reason}" in out
    assert out.splitlines()[1].endswith(" runs/studies/mlp_equivalence.json")


def test_given_folders_are_the_only_ones_and_the_first_comes_first(run, here):
    for folder in ("a", "b"):
        changed(here / "results/localization.json", here / folder / "localization.json")
    told = json.loads(run("report", "--results", "b", "--results", "a", "--json").out)["studies"]
    assert told["localization"]["file"] == "b/localization.json"
    assert told["mlp_equivalence"]["file"] is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"settings": []}',
        '{"settings": {}, "seeds": [1]}',
        "[" * 9999,
        '{"settings": {}, "a": -1e308}',
    ],
)
def test_a_damaged_result_is_told_and_another_one_used(run, here, text):
    (here / "runs/studies").mkdir(parents=True)
    (here / "runs/studies/localization.json").write_text(text)
    code, out, _ = run("report", "localization", "--check")
    assert code == 0
    assert (
        "passed over runs/studies/localization.json: runs/studies/localization.json cannot be"
        " read: " in out
    )
    (here / "results/localization.json").unlink()
    code, out, _ = run("report", "localization", "--check")
    assert code == 1
    assert "MISSED localization: runs/studies/localization.json cannot be read: " in out


def test_without_any_result_one_line_says_how_to_make_one(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("report", "--html", "page.html")
    assert (code, out) == (2, "")
    assert (
        err == "grapnet: there is no result in runs/studies or results\n"
        "hint: grapnet study NAME makes one in runs/studies; --results FOLDER looks elsewhere\n"
    )
    assert os.listdir(tmp_path) == []
    assert "hint: grapnet study sifter makes one" in run("report", "sifter").err


def test_the_page_needs_nothing_else_and_shows_every_plot(run, here):
    names = ("localization", "tiny_transformer")
    for folder in ("a", "b"):
        (here / folder).mkdir()
    code, out, _ = run("report", *names, "--html", "a/page.html", "--markdown", "b/tables.md")
    assert code == 0
    assert out.splitlines()[-2:] == ["Written: b/tables.md", "Written: a/page.html"]
    page, text = (here / "a/page.html").read_text(), (here / "b/tables.md").read_text()
    assert "<svg" not in text
    assert "Result: results/localization.json" in text
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|https?:|src=", page)
    plots = re.findall(r'<div class="wide"><svg class="plot".*?</svg></div>', page)
    assert len(plots) == 2
    for plot in plots:
        least, wide = (
            int(found)
            for found in re.search(r'style="min-width:(\d+)pt;max-width:(\d+)pt"', plot).groups()
        )
        # what is wider than the window scrolls and can still be read
        assert 0.6 * wide < least < wide
        for used in re.findall(r'(?:url\(|href=")#([^)"]+)', plot):
            assert f'id="{used}"' in plot  # nothing is borrowed from another picture
    assert "target-pair drop" in page
    # tables scroll instead of overflowing
    assert page.count("<table>") == page.count('<div class="wide"><table>')
    assert os.listdir(here / "a") == ["page.html"]
    assert run("report", *names, "--html", "a/page.html").code == 2  # it is there
    assert run("report", *names, "--html", "a/page.html", "--force").code == 0
    assert run("report", *names, "--html", "c", "--markdown", "c").code == 2


def test_without_matplotlib_the_page_has_no_plots(run, here, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert run("report", "localization", "--html", "page.html").code == 0
    page = (here / "page.html").read_text()
    assert 'class="plot"' not in page
    assert page.count("<svg") == 1  # the intervals, which need no library


def test_what_cannot_be_written_or_found_is_refused(run, here):
    (here / "folder").mkdir()
    code, out, err = run("report", "--html", "folder")
    assert (code, out) == (2, "")
    assert err.startswith("grapnet: folder is a folder\n")
