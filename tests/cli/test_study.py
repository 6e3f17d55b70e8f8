"""`grapnet study`: lists, runs, writes, keeps and goes on; what cannot be done is said before any
seed runs.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grapnet.data import places
from grapnet.studies import all as studies
from grapnet.studies import tabular, tiny_transformer
from grapnet.studies.published import ARTEFACTS

from ..studies.made_up import STUDY, Settings

LONG = "n" * 300  # characters, which no file system takes


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of one's own, in which the study called tabular is a made-up one that runs in no
    time.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").mkdir()
    settings = Settings(trace=str(tmp_path / "trace"))
    fast = replace(settings, size=2, seeds=(7, 1))
    monkeypatch.setattr(
        tabular, "STUDY", replace(STUDY, name="tabular", settings=settings, fast=fast)
    )
    return tmp_path


def ran(here: Path) -> dict[str, int]:
    return {
        path.name: len(path.read_text().splitlines())
        for path in (here / "trace").iterdir()
        if path.name.isdigit()
    }


def test_without_a_name_the_studies_are_listed(run):
    code, out, _ = run("study")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(studies.NAMES)
    assert "  localization         Table 1: relations owned by one task are cut" in out
    told = json.loads(run("study", "--json").out)
    assert list(told["studies"]) == list(studies.NAMES)
    assert all(told["studies"].values())


@pytest.mark.parametrize("command", ["study", "report"])
def test_an_unknown_study_is_refused_with_what_was_meant(run, here, command):
    refused = run(command, "tabular", "localisation")
    assert refused == (
        2,
        "",
        (
            "grapnet: there is no study 'localisation'\nhint: did you mean localization? grapnet"
            " study lists them\n"
        ),
    )
    assert (
        run(command, "zzz").err
        == "grapnet: there is no study 'zzz'\nhint: grapnet study lists them\n"
    )
    assert ran(here) == {}


def test_a_study_writes_its_result_and_its_plot_and_forgets_its_seeds(run, here):
    code, out, err = run("study", "tabular", "--processes", 1)
    assert code == 0
    result = json.loads((here / "runs/studies/tabular.json").read_text())
    assert result["settings"]["seeds"] == [7, 1, 4]
    assert out.startswith(f"## tabular\n\n{STUDY.table(result)}\n\n")
    assert out.endswith("Written: runs/studies/tabular.json and runs/studies/tabular.svg\n")
    assert "MISSED" not in out
    assert sorted(os.listdir(here / "runs/studies")) == ["tabular.json", "tabular.svg"]
    assert err.splitlines()[-1].startswith("tabular: 3 of 3, ")


def test_the_outcome_is_one_json_object(run, here, monkeypatch):
    bad = replace(tabular.STUDY, summarise=lambda settings, seeds: {"p": [float("nan"), 1.0]})
    monkeypatch.setattr(tabular, "STUDY", bad)
    code, out, _ = run("study", "tabular", "--processes", 1, "--json", "--out", "else where")
    assert code == 0
    told = json.loads(out)["studies"]["tabular"]
    assert told.pop("seconds") >= 0
    assert told == {
        "file": "else where/tabular.json",
        "plot": "else where/tabular.svg",
        "seeds": [7, 1, 4],
        "missed": [],
        "summary": {"p": [None, 1.0]},  # JSON has no NaN
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ["--fast"],
            ["a fast run, on little or made-up data, only shows", "size: 2 numbers, the bar is 5"],
        ),
        (["--seeds", 2], ["seeds: 2 of 3; "]),
    ],
)
def test_a_short_run_reaches_no_bar(run, here, options, named):
    code, out, _ = run("study", "tabular", "--processes", 1, "--check", *options)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("MISSED ")]
    assert len(lines) == len(named)
    assert all(line.startswith(f"MISSED {words}") for line, words in zip(lines, named, strict=True))
    assert ran(here) == {"7": 1, "1": 1}
    assert run("study", "tabular", "--processes", 1, *options).code == 0  # nobody asked


def test_a_short_run_does_not_take_the_place_of_a_full_one(run, here, monkeypatch):
    monkeypatch.setattr(
        "grapnet.studies.tables.ARTEFACTS", {"tabular": replace(ARTEFACTS["tabular"], figures=())}
    )
    assert run("study", "tabular", "--processes", 1, "--check").code == 0
    before = (here / "runs/studies/tabular.json").read_bytes()
    for options in (["--fast"], ["--seeds", 2]):
        code, out, err = run("study", "tabular", "--processes", 1, *options)
        assert (code, out) == (2, "")
        assert (
            err
            == "grapnet: runs/studies/tabular.json is of a full run, whose place a shorter one does"
            " not take\nhint: choose another --out\n"
        )
    assert (here / "runs/studies/tabular.json").read_bytes() == before
    assert ran(here) == {"7": 1, "1": 1, "4": 1}
    assert run("study", "tabular", "--processes", 1).code == 0  # a full one does
    assert run("study", "tabular", "--fast", "--out", "short").code == 0


def test_an_interrupted_study_says_how_to_go_on_and_does(run, here, monkeypatch):
    whole = tabular.STUDY

    def interrupted(settings: Settings, seed: int) -> dict:
        if seed == 4:
            raise KeyboardInterrupt
        return whole.one_seed(settings, seed)

    monkeypatch.setattr(tabular, "STUDY", replace(whole, one_seed=interrupted))
    code, out, err = run("study", "tabular", "tiny_transformer", "--processes", 1)
    assert (code, out) == (130, "")
    assert err.splitlines()[-2:] == [
        (
            "tabular: interrupted after 2 of 3 seeds, kept in runs/studies/seeds; the same command"
            " goes on from them"
        ),
        "grapnet: interrupted",
    ]
    assert os.listdir(here / "runs/studies") == ["seeds"]
    told = run("study", "tabular", "--processes", 1, "--fresh").err
    assert "the same command without --fresh goes on from them" in told
    monkeypatch.setattr(tabular, "STUDY", whole)
    assert (
        run("study", "tabular", "--fast", "--out", "short", "--resume", "runs/studies/seeds").code
        == 0
    )
    assert ran(here) == {"7": 3, "1": 3}  # another run neither uses nor loses what is kept
    code, _, err = run("study", "tabular", "--processes", 1)
    assert code == 0
    assert re.search(
        r"^tabular: 2 of 3, [\d:]+ so far, 2 of them kept in runs/studies/seeds$",
        err,
        flags=re.MULTILINE,
    )
    assert ran(here) == {"7": 3, "1": 3, "4": 1}
    assert sorted(os.listdir(here / "runs/studies")) == ["tabular.json", "tabular.svg"]


def test_a_fresh_run_does_not_go_on(run, here):
    (here / "trace/fail 4").touch()
    code, _, err = run("study", "tabular", "--processes", 1)
    assert code == 2
    assert "grapnet: RuntimeError: seed 4 was told to fail\n" in err
    (here / "trace/fail 4").unlink()
    assert run("study", "tabular", "--processes", 1, "--fresh").code == 0
    assert ran(here) == {"7": 2, "1": 2, "4": 2}


def test_studies_log_to_one_file(run, here):
    options = ["--fast", "--log", "log.jsonl", "--tensorboard", "board"]
    code, out, _ = run("study", "tabular", "tiny_transformer", *options)
    assert code == 0
    assert "\n\n## tiny_transformer\n\n| figure |" in out
    lines = [json.loads(line) for line in (here / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line["title"] == "tabular"] == [
        "begin",
        "advance",
        "advance",
        "end",
    ]
    assert len(os.listdir(here / "board")) == 1


@pytest.fixture
def no_data(here, monkeypatch) -> None:
    """No data set is anywhere."""
    for name in ("HOME", "XDG_CACHE_HOME", "GRAPNET_DATA"):
        monkeypatch.setenv(name, str(here / "nothing"))
    monkeypatch.setattr(places, "PREFIXES", ())


@pytest.mark.usefixtures("no_data")
def test_a_missing_data_set_is_told_with_what_provides_it(run, here):
    code, out, err = run("study", "localization", "--processes", 1)
    assert (code, out) == (2, "")
    first, second = [line for line in err.splitlines() if not line.startswith("localization: ")]
    assert re.fullmatch(r"grapnet: Fashion-MNIST was not found; looked in \d+ folders", first)
    assert second.startswith(
        "hint: sudo apt install dataset-fashion-mnist, or: python -m grapnet.data fashion"
    )
    assert second.endswith("; grapnet doctor --verbose lists the folders that were looked at")
    assert not (here / "runs").exists()


@pytest.mark.usefixtures("no_data")
def test_of_several_studies_one_without_data_is_left_out_and_told(run, here):
    code, out, _ = run("study", "localization", "tabular", "--processes", 1, "--json")
    told = json.loads(out)["studies"]
    assert code == 1
    assert told["localization"]["error"].startswith("Fashion-MNIST was not found;")
    assert told["tabular"]["seeds"] == [7, 1, 4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seeds", 1], "--seeds is at least 2, without which nothing has a spread, got 1"),
        (["--processes", 0], "--processes is at least 1, got 0"),
        (["--out", "taken"], "taken is a file; name a folder"),
        (["--out", "taken/in/it"], "taken is a file; name a folder"),
        (["--out", "trace/away"], "trace/away: no file can be written there: File exists"),
        (
            ["--resume", f"new/{LONG}"],
            f"new/{LONG}: no file can be written there: File name too long",
        ),
        (["--tensorboard", "taken"], "taken is a file; name a folder"),
        (["--log", "trace"], "trace: Is a directory"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_seed_runs(run, here, options, named):
    (here / "taken").write_text("taken")
    (here / "trace/away").symlink_to("nowhere")
    code, out, err = run("study", "tabular", *options)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f"grapnet: {named}"
    assert ran(here) == {}
    assert sorted(os.listdir(here)) == ["taken", "trace"]


def test_without_matplotlib_there_is_no_plot_unless_it_is_insisted_on(run, here, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    code, _, err = run("study", "tabular", "--plot")
    assert code == 2
    assert err.splitlines() == [
        "grapnet: --plot needs matplotlib, which is not installed",
        'hint: pip install "grapnet[studies]"',
    ]
    assert ran(here) == {}
    code, out, _ = run("study", "tabular", "--processes", 1)
    assert code == 0
    assert out.endswith("Written: runs/studies/tabular.json\n")
    assert os.listdir(here / "runs/studies") == ["tabular.json"]


def test_the_fast_form_of_the_study_without_seeds_is_its_own(tmp_path):
    tiny_transformer.main(["--fast", "--json", str(tmp_path / "tiny.json")])
    written = json.loads((tmp_path / "tiny.json").read_text())
    assert studies.registered("tiny_transformer").made(True, 3, processes=2) == written
