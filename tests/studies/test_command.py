"""The command of the studies: processes change nothing, finished seeds stay, files are whole, a missed bar shows."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import grapnet as gn
from grapnet.studies.command import main, run

from .made_up import STUDY, Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    trace = tmp_path / "trace"
    trace.mkdir()
    return Settings(trace=str(trace))


def ran(settings: Settings) -> dict[int, int]:
    """Returns how often each seed ran, which the seeds wrote down themselves."""
    files = [path for path in Path(settings.trace).iterdir() if path.name.isdigit()]
    return {int(path.name): len(path.read_text().splitlines()) for path in files}


def command(*arguments: object, study=STUDY) -> int:
    return main(study, ["--processes", "1", *map(str, arguments)])


def test_processes_give_what_one_process_gives(settings, capsys):
    serial = run(STUDY, settings)
    (Path(settings.trace) / "wait 7").write_text("4")  # the first seed waits for the last: only possible together
    parallel = run(STUDY, settings, processes=2)
    assert {**parallel, "seconds": 0} == {**serial, "seconds": 0}
    assert parallel["summary"]["order"] == [7, 1, 4] == [int(seed) for seed in parallel["seeds"]]
    assert {row["threads"] for row in parallel["seeds"].values()} == {1}
    assert ran(settings) == {7: 2, 1: 2, 4: 2}
    progress = capsys.readouterr().err.splitlines()
    assert progress[:3] == [f"made_up: seed {seed} done, {i} of 3" for i, seed in enumerate((7, 1, 4), start=1)]
    assert progress[3] == "made_up: seed 1 done, 1 of 3"  # though 7 began before it


def test_a_result_says_what_made_it(settings):
    before = torch.get_num_threads()
    result = run(STUDY, settings)
    assert result["study"] == "made_up"
    assert result["settings"] == {**asdict(settings), "seeds": [7, 1, 4]}
    assert result["versions"]["grapnet"] == gn.__version__
    assert set(result["versions"]) == {"grapnet", "torch", "numpy", "python"}
    assert result["seeds"]["4"]["pair"] == [4, -4]  # as a reader of the file has it
    assert result["summary"]["mean"] == pytest.approx(sum(row["sum"] for row in result["seeds"].values()) / 3)
    assert torch.get_num_threads() == before


def test_finished_seeds_do_not_run_again(settings, tmp_path):
    first = run(STUDY, settings, folder=tmp_path / "kept")
    again = run(STUDY, settings, folder=tmp_path / "kept")
    assert ran(settings) == {7: 1, 1: 1, 4: 1}
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    run(STUDY, settings)
    assert ran(settings) == {7: 2, 1: 2, 4: 2}  # without the folder nothing is kept


def test_other_settings_run_every_seed_again(settings, tmp_path):
    first = run(STUDY, settings, folder=tmp_path / "kept")
    other = run(STUDY, replace(settings, size=6), folder=tmp_path / "kept")
    assert ran(settings) == {7: 2, 1: 2, 4: 2}
    assert other["summary"]["mean"] != first["summary"]["mean"]
    run(STUDY, settings, folder=tmp_path / "kept")
    assert ran(settings) == {7: 2, 1: 2, 4: 2}  # those of the first settings are still there


def test_a_failing_seed_keeps_those_before_it(settings, tmp_path):
    cause = Path(settings.trace) / "fail 4"
    cause.touch()
    with pytest.raises(RuntimeError, match="seed 4 was told to fail"):
        run(STUDY, settings, folder=tmp_path / "kept")
    cause.unlink()
    result = run(STUDY, settings, folder=tmp_path / "kept")
    assert ran(settings) == {7: 1, 1: 1, 4: 2}
    assert result["summary"] == run(STUDY, settings)["summary"]


def test_a_seed_whose_file_is_torn_runs_again(settings, tmp_path):
    whole = run(STUDY, settings, folder=tmp_path / "kept")
    (torn,) = (tmp_path / "kept").rglob("4.json")
    torn.write_text(torn.read_text()[:20])
    assert run(STUDY, settings, folder=tmp_path / "kept")["seeds"] == whole["seeds"]
    assert ran(settings) == {7: 1, 1: 1, 4: 2}


def test_the_json_takes_the_place_of_the_old_one_whole(tmp_path, capsys):
    path = tmp_path / "results" / "made_up.json"
    path.parent.mkdir()
    path.write_text("old\n")
    os.link(path, tmp_path / "old")
    assert command("--json", path) == 0
    assert (tmp_path / "old").read_text() == "old\n"  # another file was put in its place: no reader saw half of one
    assert os.listdir(path.parent) == ["made_up.json"]
    result = json.loads(path.read_text())
    assert result["settings"]["seeds"] == [7, 1, 4]
    assert capsys.readouterr().out == STUDY.table(result) + "\n"


def test_a_study_that_fails_leaves_the_old_json(settings, tmp_path):
    path = tmp_path / "made_up.json"
    path.write_text("old\n")
    (Path(settings.trace) / "fail 1").touch()
    with pytest.raises(RuntimeError, match="seed 1"):
        command("--json", path, study=replace(STUDY, settings=settings))
    assert path.read_text() == "old\n"


def test_check_names_the_missed_bars_and_exits_1(capsys):
    assert command("--fast", "--check") == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["made_up: seed 7 done, 1 of 1", "MISSED size: 2 numbers, the bar is 5"]
    assert "MISSED" not in captured.out
    assert command("--check") == 0
    assert "MISSED" not in capsys.readouterr().err


def test_without_check_a_missed_bar_does_not_matter(capsys):
    assert command("--fast") == 0
    captured = capsys.readouterr()
    assert "MISSED" not in captured.err
    assert captured.out.startswith("| seed | sum |")


def test_resume_is_an_option_of_the_command(settings, tmp_path):
    study = replace(STUDY, settings=settings)
    for _ in range(2):
        assert command("--resume", tmp_path / "kept", study=study) == 0
    assert ran(settings) == {7: 1, 1: 1, 4: 1}


def test_help_says_what_the_study_is_for(capsys):
    with pytest.raises(SystemExit, match="0"):
        command("--help")
    assert "Sums of random numbers" in capsys.readouterr().out


def test_a_seed_that_fails_beside_others_keeps_them_all(settings, tmp_path):
    cause = Path(settings.trace) / "fail 7"
    cause.touch()
    with pytest.raises(RuntimeError, match="seed 7 was told to fail"):
        run(STUDY, settings, processes=2, folder=tmp_path / "kept")
    cause.unlink()
    run(STUDY, settings, folder=tmp_path / "kept")
    assert ran(settings) == {7: 2, 1: 1, 4: 1}
