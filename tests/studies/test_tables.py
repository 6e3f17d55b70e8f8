"""All tables at once: figures beside the paper's, verdicts that can go either way, and every miss
by name.
"""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grapnet.studies import all as studies
from grapnet.studies import localization, mlp_equivalence, tables
from grapnet.studies.figures import Figure, at
from grapnet.studies.published import ARTEFACTS

COMMITTED = Path(__file__).parent.parent.parent / "results"
FAST = ("localization", "attention_audit", "mlp_equivalence", "tiny_transformer")  # the quickest


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    """The JSON of some fast runs, by the name of their study."""
    folder = tmp_path_factory.mktemp("fast")
    assert studies.main(["--fast", "--results", str(folder), *FAST]) == 0
    return {name: (folder / f"{name}.json").read_text() for name in FAST}


@pytest.fixture
def folder(made, tmp_path) -> Path:
    for name, text in made.items():
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


def full(name: str, text: str) -> dict:
    """Returns a fast result that claims the settings of a full run."""
    return {**json.loads(text), "settings": studies.registered(name).settings}


def localized(text: str, **means: float) -> dict:
    """Returns a result of localization whose base accuracies are those given, with a spread of 0.1
    over ten seeds.
    """
    result = full("localization", text)
    one = next(iter(result["seeds"].values()))
    result["seeds"] = {str(20 + n): copy.deepcopy(one) for n in range(10)}
    for n, numbers in enumerate(result["seeds"].values()):
        numbers["base"] = {head: [mean + 0.1 * (-1) ** n] * 5 for head, mean in means.items()}
    return result


@pytest.mark.parametrize("name", FAST)
def test_every_published_figure_is_found_in_what_the_study_writes(folder, name):
    found = tables.report(name, folder)
    assert [row.figure for row in found.rows] == list(ARTEFACTS[name].figures)
    assert found.rows
    assert found.table == studies.registered(name).table(
        json.loads((folder / f"{name}.json").read_text())
    )


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_every_figure_and_the_settings_of_a_full_run(path):
    if path.stem in studies.NAMES:
        assert tables.report(path.stem, COMMITTED).problems == []
    else:
        assert path.stem in {"rigl_fashion", "soak"}  # which are no studies


@pytest.mark.parametrize(
    ("mean", "agrees"),
    [(98.26, True), (98.01, True), (98.51, True), (97.99, False), (98.53, False), (50.0, False)],
)
def test_a_mean_passes_within_the_published_interval_only(folder, made, mean, agrees):
    (folder / "localization.json").write_text(
        json.dumps(localized(made["localization"], apart=mean, grown=50.0))
    )
    base, *_ = tables.report("localization", folder).rows
    assert base.figure.name == "base pair accuracy"
    assert base.agrees is agrees
    assert base.ours == pytest.approx(mean)


def test_a_row_shows_paper_interval_mean_deviation_and_confidence(folder, made, capsys):
    (folder / "localization.json").write_text(
        json.dumps(localized(made["localization"], apart=98.1, grown=50.0))
    )
    tables.main(["--results", str(folder)])
    row = (
        "| base pair accuracy | 98.26 ± 0.25 | [98.01, 98.51] | 98.10 ± 0.11 | [98.02, 98.18] | 10"
        " | pass |"
    )
    # 0.1·√(10/9) = 0.105, and 2.262·0.105/√10 = 0.075
    assert row in capsys.readouterr().out.splitlines()


def test_a_difference_shows_the_p_of_its_test(folder, made, capsys):
    result = localized(made["localization"], apart=98.1, grown=50.0)
    for n, numbers in enumerate(result["seeds"].values()):
        numbers["cuts"]["owned"]["target"] = [48.2 + 0.1 * (-1) ** n] * 5
        numbers["cuts"]["owned"]["other"] = [0.0] * 5
    (folder / "localization.json").write_text(json.dumps(result))
    tables.main(["--results", str(folder)])
    (row,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| localization margin | 48.26 ±")
    ]
    assert re.fullmatch(
        r"\| localization margin \| 48.26 ± 0.25, p = 6.8e-22 \| \S+ \S+ \| 48.20 ± 0.11, p ="
        r" \S+e-25 .*",
        row,
    )


@pytest.mark.parametrize(("cuts", "agrees"), [(96, True), (95, False)])
def test_counts_pass_when_they_are_the_same_for_every_seed(folder, made, cuts, agrees):
    result = localized(made["localization"], apart=98.0, grown=50.0)
    result["seeds"]["23"]["cuts"]["owned"]["removed"] = [[cuts] * 3] * 5
    (folder / "localization.json").write_text(json.dumps(result))
    assert tables.report("localization", folder).rows[-1].agrees is agrees


@pytest.mark.parametrize(
    ("difference", "agrees"), [(1.19e-7, True), (0.0, True), (1.3e-7, False), (2.0, False)]
)
def test_rounding_errors_pass_up_to_the_papers(folder, made, difference, agrees):
    result = full("mlp_equivalence", made["mlp_equivalence"])
    for numbers in result["seeds"].values():
        for found in numbers["float32"].values():
            found["reference"]["values"] = 0.0
    result["seeds"]["1"]["float32"]["GELU"]["reference"]["values"] = difference
    (folder / "mlp_equivalence.json").write_text(json.dumps(result))
    row = tables.report("mlp_equivalence", folder).rows[0]
    assert (row.ours, row.agrees) == (difference, agrees)


def test_a_figure_without_a_published_interval_is_not_judged():
    assert Figure("accuracy", 87.19, at("accuracy")).published is None
    assert Figure("gain", 12.08, at("gain"), std=3.0, interval=(8.89, 15.26)).published == (
        8.89,
        15.26,
    )


def test_check_names_missing_results_and_other_settings(folder, capsys):
    assert tables.main(["--results", str(folder), "--check"]) == 1
    lines = capsys.readouterr().err.splitlines()
    for name in studies.NAMES:
        mine = [line for line in lines if line.startswith(f"MISSED {name}: ")]
        assert mine
        if name in FAST:
            assert "made with other settings: " in mine[0]
        else:
            (line,) = mine
            assert (
                f"{name}.json is missing. Make it: python -m grapnet.studies.{name} --json" in line
            )
    (tiny,) = [line for line in lines if "tiny_transformer" in line]
    assert tiny.endswith("train 256 instead of 1024, epochs 2 instead of 12")
    # without --check nothing is asked of the results
    assert tables.main(["--results", str(folder)]) == 0


def test_check_passes_what_reaches_its_bars_and_names_one_that_is_missed(
    folder, made, monkeypatch, capsys
):
    monkeypatch.setattr(studies, "NAMES", ("mlp_equivalence", "tiny_transformer"))
    result = full("mlp_equivalence", made["mlp_equivalence"])
    assert mlp_equivalence.missed(result) == []
    (folder / "mlp_equivalence.json").write_text(json.dumps(result))
    tiny = full("tiny_transformer", made["tiny_transformer"])
    (folder / "tiny_transformer.json").write_text(json.dumps(tiny))
    assert tables.main(["--results", str(folder), "--check"]) == 0
    assert capsys.readouterr().err == ""
    tiny["cut"]["left"]["gradient"] = 1024
    (folder / "tiny_transformer.json").write_text(json.dumps(tiny))
    assert tables.main(["--results", str(folder), "--check"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "MISSED tiny_transformer: gradient holds 1024 relations of 992\n"
    assert "- **MISSED** gradient holds 1024 relations of 992" in captured.out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"settings": {}}', "base pair accuracy: not in the result"),
    ],
)
def test_a_file_of_another_form_is_a_problem_and_no_traceback(folder, text, named):
    (folder / "localization.json").write_text(text)
    found = tables.report("localization", folder)
    assert any(named in line for line in found.problems)
    assert found.rows == []


def test_a_number_that_is_none_is_a_problem(folder, made):
    result = localized(made["localization"], apart=float("nan"), grown=50.0)
    (folder / "localization.json").write_text(json.dumps(result))
    (line,) = tables.report("localization", folder).problems
    assert line.startswith("base pair accuracy: not in the result")


def test_a_result_of_fewer_seeds_counts_only_where_there_is_no_full_one(folder, tmp_path):
    whole = json.loads((COMMITTED / "mlp_equivalence.json").read_text())
    short = tmp_path / "short"
    short.mkdir()
    seeds = dict(list(whole["seeds"].items())[:2])
    settings = {**whole["settings"], "seeds": whole["settings"]["seeds"][:2]}
    (short / "mlp_equivalence.json").write_text(
        json.dumps({**whole, "seeds": seeds, "settings": settings})
    )
    alone = tables.report("mlp_equivalence", short)
    assert alone.problems == [
        "made with other settings: seeds [0, 1] instead of [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    ]
    assert (alone.path, alone.passed_over) == (short / "mlp_equivalence.json", ())
    both = tables.report("mlp_equivalence", short, COMMITTED)
    assert both.problems == []
    assert both.path == COMMITTED / "mlp_equivalence.json"
    assert both.passed_over == (f"{alone.path}: {alone.problems[0]}",)
    first = tables.report("mlp_equivalence", COMMITTED, short)
    assert (first.path, first.passed_over) == (both.path, ())


def test_where_the_data_lay_does_not_matter_but_other_settings_do():
    wanted = {"features": "here", "seeds": [1, 2], "regime": {"lr": 0.1, "batch": 64}}
    same = {**wanted, "features": "elsewhere"}
    assert tables.differences(wanted, same) == []
    assert tables.differences(wanted, {**wanted, "features": "made-up"}) == [
        "features made-up instead of here"
    ]
    other = {"features": "here", "seeds": [1], "regime": {"lr": 0.1, "batch": 32}, "more": True}
    named = [
        "seeds [1] instead of [1, 2]",
        "regime.batch 32 instead of 64",
        "more True instead of nothing",
    ]
    assert tables.differences(wanted, other) == named


IN_ASCII = """
import locale, sys
assert locale.getencoding() != "UTF-8" and sys.stdout.encoding != "utf-8"
from grapnet.studies import localization, tables
from grapnet.studies.command import main
from grapnet.studies.drawing import drawn
from grapnet.studies.picture import inline
results, folder = sys.argv[1:]
written = ["--markdown", f"{folder}/t.md", "--html", f"{folder}/t.html"]
assert tables.main(["--results", results, *written]) == 0
assert main(localization.STUDY, ["--from", f"{results}/localization.json"]) == 0
assert chr(177) in inline(drawn(lambda result, axes: axes.set_title(chr(177)), {"settings": {}}))
"""


def test_where_a_machine_prefers_ascii_files_are_utf_8_and_what_is_printed_is_spelled(tmp_path):
    in_ascii = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for name in ("t.md", "t.html"):
        (tmp_path / name).write_text("old")
    command = [sys.executable, "-c", IN_ASCII, COMMITTED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=in_ascii)
    assert (done.returncode, done.stderr) == (0, "")
    assert all("±" in (tmp_path / name).read_text(encoding="utf-8") for name in ("t.md", "t.html"))
    assert "\\xb1" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["t.html", "t.md"]


def test_markdown_and_html_hold_every_table(folder, capsys):
    assert (
        tables.main(
            [
                "--results",
                str(folder),
                "--markdown",
                f"{folder}/a/t.md",
                "--html",
                f"{folder}/b/t.html",
            ]
        )
        == 0
    )
    text, html = (folder / "a/t.md").read_text(), (folder / "b/t.html").read_text()
    assert capsys.readouterr().out == text
    for name in studies.NAMES:
        assert f"\n## {ARTEFACTS[name].title}\n\n{ARTEFACTS[name].words}" in text
        assert f"<h2>{ARTEFACTS[name].title}</h2>" in html
    for row in localization.ROWS.values():
        assert f"| {row} |" in text  # the controls stand beside the figures
        assert f"<td>{row}</td>" in html
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|src=", html)
    assert (
        html.count("<table>")
        == html.count("</table>")
        == len(re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE))
    )
    assert not re.search(r"<p>\s*[|#-]", html)
    assert "<svg" not in text
    # of localization: the others have no interval to draw
    (drawn,) = re.findall(r"<svg.*?</svg>", html)
    # made-up images lie outside of all three
    assert drawn.count("<circle") == drawn.count('fill="none"') == 3
    assert ">base pair accuracy</text>" in drawn
