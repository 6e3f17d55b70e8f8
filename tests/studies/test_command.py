"""The command of the studies: processes change nothing, finished seeds stay, files are whole, a
missed bar shows.
"""

import errno
import io
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import grapnet as gn
from grapnet.studies.command import forget, main, run, with_seeds

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


def test_processes_give_what_one_process_gives_and_a_seed_that_fails_keeps_the_others(
    settings, tmp_path, capsys
):
    """Seed 7 fails at once; 1 waits for 4, which is only possible when two run together."""
    trace, kept = Path(settings.trace), tmp_path / "kept"
    (trace / "fail 7").touch()
    (trace / "wait 1").write_text("4")
    with pytest.raises(RuntimeError, match="seed 7 was told to fail"):
        run(STUDY, settings, processes=2, folder=kept)
    assert ran(settings) == {7: 1, 1: 1, 4: 1}
    assert "made_up: 1 of 3, " in capsys.readouterr().err
    (trace / "fail 7").unlink()
    whole = run(STUDY, settings, folder=kept)
    assert ran(settings) == {7: 2, 1: 1, 4: 1}
    # as one process finds it
    assert {**whole, "seconds": 0} == {
        **run(STUDY, settings),
        "seconds": 0,
    }
    assert whole["summary"]["order"] == [7, 1, 4] == [int(seed) for seed in whole["seeds"]]
    assert {row["threads"] for row in whole["seeds"].values()} == {1}


def test_a_result_says_what_made_it(settings):
    before = torch.get_num_threads()
    result = run(STUDY, settings)
    assert result["study"] == "made_up"
    assert result["settings"] == {**asdict(settings), "seeds": [7, 1, 4]}
    assert result["versions"]["grapnet"] == gn.__version__
    assert set(result["versions"]) == {"grapnet", "torch", "numpy", "python"}
    assert result["seeds"]["4"]["pair"] == [4, -4]  # as a reader of the file has it
    assert result["summary"]["mean"] == pytest.approx(
        sum(row["sum"] for row in result["seeds"].values()) / 3
    )
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


OTHERS = [
    b"null",
    b"[1]",
    b"3",
    b"{}",
    b'{"a": 1}',
    b'{"study": "made_up", "seed": 4, "numbers": []}',
]


@pytest.mark.parametrize("damage", [b"", b'{"sum": 1.', b"\xff\xfe", b"[" * 9999, *OTHERS])
def test_a_seed_whose_file_is_damaged_runs_again(settings, tmp_path, damage):
    whole = run(STUDY, settings, folder=tmp_path / "kept")
    (torn,) = (tmp_path / "kept").rglob("4.json")
    torn.write_bytes(damage)
    assert run(STUDY, settings, folder=tmp_path / "kept")["seeds"] == whole["seeds"]
    assert ran(settings) == {7: 1, 1: 1, 4: 2}


def test_a_fresh_run_and_a_result_that_is_written_down_forget_their_seeds_only(settings, tmp_path):
    kept, other = tmp_path / "kept", replace(settings, size=6)
    run(STUDY, other, folder=kept)
    result = run(STUDY, settings, folder=kept)
    run(STUDY, settings, folder=kept, fresh=True)
    assert ran(settings) == {7: 3, 1: 3, 4: 3}
    forget(result, kept)
    run(STUDY, settings, folder=kept)
    assert ran(settings) == {7: 4, 1: 4, 4: 4}
    run(STUDY, other, folder=kept)
    assert ran(settings) == {7: 4, 1: 4, 4: 4}  # those of the other settings were never touched
    for one in (result, run(STUDY, other, folder=kept)):
        forget(one, kept)
    assert not kept.exists()


def test_fewer_seeds_are_the_first_ones_and_reach_no_bar(settings, tmp_path, capsys):
    study, path = replace(STUDY, settings=settings), tmp_path / "made_up.json"
    assert command("--seeds", 2, "--check", "--json", path, study=study) == 1
    captured = capsys.readouterr()
    line = "MISSED seeds: 2 of 3; the bars are for all of them"
    assert captured.err.splitlines()[-1] == line
    assert captured.out.splitlines()[-1] == f"{line}."
    assert json.loads(path.read_text())["settings"]["seeds"] == [7, 1]
    assert ran(settings) == {7: 1, 1: 1}
    assert command("--from", path, "--check", study=study) == 1  # nor does it once it is a file
    assert command("--seeds", 3, "--check", study=study) == 0
    assert command("--seeds", 9, "--check", study=study) == 0


def test_fewer_than_two_seeds_are_refused(settings, capsys):
    with pytest.raises(SystemExit, match="2"):
        command("--seeds", 1, study=replace(STUDY, settings=settings))
    assert "at least 2, without which nothing has a spread, got 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least 2 seeds"):
        with_seeds(settings, 1)
    assert ran(settings) == {}


def test_a_log_and_tensorboard_get_the_numbers_of_every_seed(settings, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, board = tmp_path / "log.jsonl", tmp_path / "board"
    study = replace(STUDY, settings=settings)
    assert (
        command("--log", log, "--tensorboard", board, "--resume", tmp_path / "kept", study=study)
        == 0
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["event"], line["done"], line["total"]) for line in lines] == [
        ("begin", 0, 3),
        ("advance", 1, 3),
        ("advance", 2, 3),
        ("advance", 3, 3),
        ("end", 3, 3),
    ]
    result = run(STUDY, settings)
    sums = [line["values"]["sum"] for line in lines[1:4]]
    assert sums == [row["sum"] for row in result["seeds"].values()]
    assert [line["values"]["seed"] for line in lines[1:4]] == [7, 1, 4]
    curve = EventAccumulator(str(board)).Reload().Scalars("made_up/sum")
    assert [event.value for event in curve] == pytest.approx(sums)
    assert command("--log", log, "--resume", tmp_path / "kept", study=study) == 0
    again = [json.loads(line) for line in log.read_text().splitlines()][5:]
    assert [(line["event"], line["done"]) for line in again] == [
        ("begin", 0),
        ("skip", 3),
        ("end", 3),
    ]


def test_ctrl_c_without_a_folder_says_how_to_keep_seeds(settings, capsys):
    def interrupted(settings: Settings, seed: int) -> dict:
        if seed == 1:
            raise KeyboardInterrupt
        return STUDY.one_seed(settings, seed)

    assert command(study=replace(STUDY, settings=settings, one_seed=interrupted)) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == (
        "made_up: interrupted after 1 of 3 seeds, and none is kept; --resume FOLDER keeps them"
    )


def test_the_json_takes_the_place_of_the_old_one_whole(tmp_path, capsys):
    path = tmp_path / "results" / "made_up.json"
    path.parent.mkdir()
    path.write_text("old\n")
    os.link(path, tmp_path / "old")
    assert command("--json", path) == 0
    # another file was put in its place: no reader saw half of one
    assert (tmp_path / "old").read_text() == "old\n"
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
    progress, *lines = captured.err.splitlines()
    assert progress.startswith("made_up: 1 of 1, ")
    assert lines == [
        "MISSED seeds: 1 of 3; the bars are for all of them",
        "MISSED size: 2 numbers, the bar is 5",
    ]
    assert "MISSED size" not in captured.out
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


def test_a_plot_is_drawn_as_its_name_says(tmp_path, capsys):
    assert command("--plot", tmp_path / "new" / "sums.svg") == 0
    text = (tmp_path / "new" / "sums.svg").read_text()
    assert all(f">seed {seed}</text>" in text for seed in (7, 1, 4))
    for name, start in (("sums.PNG", b"\x89PNG"), ("sums.pdf", b"%PDF")):
        assert command("--fast", "--plot", tmp_path / name) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    # nothing partial is left
    assert sorted(os.listdir(tmp_path)) == [
        "new",
        "sums.PNG",
        "sums.pdf",
    ]


@pytest.mark.parametrize(
    ("name", "named"), [("sums.bmp", "end it in .png, .svg, .pdf"), ("a.svg", "a.svg is a folder")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_any_seed_runs(
    settings, tmp_path, capsys, name, named
):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(SystemExit, match="2"):
        command("--plot", tmp_path / name, study=replace(STUDY, settings=settings))
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert ran(settings) == {}


def test_without_matplotlib_a_plot_is_refused_before_any_seed_runs(
    settings, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    study = replace(STUDY, settings=settings)
    with pytest.raises(SystemExit, match="2"):
        command("--plot", tmp_path / "sums.svg", study=study)
    assert 'Run: pip install "grapnet[studies]"' in capsys.readouterr().err.splitlines()[-1]
    assert ran(settings) == {}
    assert command(study=study) == 0  # all else works without it


def test_a_result_is_read_instead_of_made(settings, tmp_path, capsys):
    study, path = replace(STUDY, settings=settings), tmp_path / "made_up.json"
    assert command("--json", path, study=study) == 0
    printed = capsys.readouterr().out
    assert command("--from", path, "--check", "--plot", tmp_path / "sums.svg", study=study) == 0
    assert capsys.readouterr().out == printed
    assert ran(settings) == {7: 1, 1: 1, 4: 1}
    assert (tmp_path / "sums.svg").stat().st_size > 1000
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {"size": 2}}))
    assert command("--from", path, "--check") == 1
    assert "MISSED size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"", "JSONDecodeError"),
        (b'{"study": "made_up", "seeds"', "JSONDecodeError"),
        (b"\x89PNG\xff", "UnicodeDecodeError"),
        (b"[1, 2]", "it does not say of which study it is"),
        (b'{"study": "sifter"}', "it is one of sifter"),
        (b'{"study": "made_up"}', "KeyError: 'seeds'"),
        (b'{"study": "made_up", "seeds": {"7": 1}, "settings": {"size": 5}}', "TypeError"),
    ],
)
def test_a_file_that_is_no_result_of_the_study_gives_one_line_and_exit_2(
    tmp_path, capsys, content, named
):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    assert command("--from", path, "--plot", tmp_path / "sums.svg") == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"{path} is no result of made_up that can be read: ")
    assert named in line
    assert captured.out == ""
    assert set(os.listdir(tmp_path)) <= {"result.json"}


class Full(io.StringIO):
    """A stream that nothing more can be written to."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_printed_is_not_laid_on_the_file_that_was_read(tmp_path, monkeypatch):
    path = tmp_path / "made_up.json"
    assert command("--json", path) == 0
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        command("--from", path)


def test_signs_that_a_stream_does_not_have_are_spelled(tmp_path, monkeypatch):
    path = tmp_path / "made_up.json"
    assert command("--json", path) == 0
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", stream)
    assert command("--from", path, study=replace(STUDY, table=lambda result: "7×7 → 49 ± 1")) == 0
    stream.flush()
    assert stream.buffer.getvalue() == b"7x7 -> 49 \\xb1 1\n"  # as the command `grapnet` does


def test_a_result_is_either_read_or_made(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command("--fast", "--from", tmp_path / "result.json")
    assert "not allowed with argument" in capsys.readouterr().err
    assert command("--from", tmp_path / "result.json", "--json", tmp_path / "copy.json") == 2
    assert (
        capsys.readouterr().err == "--from runs nothing, so there is nothing for --json to write\n"
    )


def test_a_result_outlives_a_plot_that_fails(tmp_path):
    def broken(result: dict, axes: object) -> None:
        raise ValueError("nothing to draw")

    path = tmp_path / "made_up.json"
    with pytest.raises(ValueError, match="nothing to draw"):
        command("--json", path, "--plot", tmp_path / "sums.svg", study=replace(STUDY, draw=broken))
    assert json.loads(path.read_text())["settings"]["seeds"] == [7, 1, 4]
    assert os.listdir(tmp_path) == ["made_up.json"]
