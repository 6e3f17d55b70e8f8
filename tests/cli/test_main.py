"""What all commands share: the table of contents, --json, refusals of one line and a hint, and exit
codes.
"""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import grapnet as gn
from grapnet.cli import inspect
from grapnet.cli.command import Command, CommandError, Outcome
from grapnet.cli.files import writing
from grapnet.cli.main import GROUPS, commands, main, parser

Run = Callable[..., Any]  # the fixture `run`: (code, out, err)
ARGUMENTS = {  # what a command needs beside its files, so that only the files are at fault
    "cut": ("--owner", "task-1"),
    "freeze": ("--owner", "task-1"),
    "unfreeze": ("--owner", "task-0"),
    "remove": ("--owner", "task-1"),
    "set-owner": ("--owner", "task-1", "--to", "other"),
    "prune": ("--fraction", "0.1"),
    "export": ("--to", "torch"),
}
WRITTEN = {"plot": "written.svg"}  # what a command may write, where the name matters
KNOWN = commands()


def actions(command: Command) -> list[argparse.Action]:
    alone = argparse.ArgumentParser()
    command.configure(alone)
    return alone._actions


def files(command: Command) -> int:
    """Returns how many files a command reads."""
    return sum(not action.option_strings and action.type is Path for action in actions(command))


def lacking_nothing(command: Command, path: Path) -> list[object]:
    """Returns arguments that lack nothing, with `path` as every file."""
    new = path.with_name(WRITTEN.get(command.name, "written"))
    output = (
        ["-o", new]
        if any("--output" in action.option_strings for action in actions(command))
        else []
    )
    return [command.name, *[path] * files(command), *ARGUMENTS.get(command.name, ()), *output]


READERS = [name for name, command in KNOWN.items() if files(command)]


def require_refusal(ran: Any, *named: object) -> None:
    """Asserts that a command was refused in one line that names these, and a hint."""
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first.startswith("grapnet: ")
    assert second.startswith("hint: ")
    assert all(str(one) in first for one in named)


@pytest.fixture(autouse=True)
def same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts what a command may set for its process back, and lets it write nowhere else."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


def test_help_is_a_table_of_contents(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    lines = out.splitlines()
    headings = [lines.index(f"{group}:") for group in GROUPS]
    assert headings == sorted(headings)
    for command in KNOWN.values():
        line = next(n for n, text in enumerate(lines) if text.split()[:1] == [command.name])
        heading = max(n for n in headings if n < line)
        assert lines[heading] == f"{command.group}:"
        assert command.about in lines[line]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", KNOWN)
def test_every_command_explains_itself_with_examples_that_parse(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    for option in ("--json", "--seed", "--device", "--threads"):
        assert option in out
    assert KNOWN[name].examples
    for example in KNOWN[name].examples:
        assert example.split()[0] == name
        assert f"grapnet {example}" in out
        parser(KNOWN).parse_args(example.split())


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version")[:2] == (0, f"grapnet {gn.__version__}\n")


def test_an_unknown_command_is_refused_and_none_shows_the_help(run: Run) -> None:
    ran = run("inspct")
    require_refusal(ran, "'inspct'")
    assert (
        ran.err.splitlines()[1] == "hint: did you mean grapnet inspect? grapnet --help lists them"
    )
    assert run("zzz").err.splitlines()[1] == "hint: grapnet --help lists them"
    code, out, err = run()
    assert (code, err) == (2, "")
    assert out == run("--help").out


BAD = ["--device=nowhere", "--device=meta", "--device=cuda:4096"]
BAD += ["--threads=0", "--threads=2147483648", "--threads=several", "--seed=-1", "--seed=1.5"]


@pytest.mark.parametrize("name", KNOWN)
def test_every_command_refuses_bad_shared_options(run: Run, checkpoint: Path, name: str) -> None:
    before = checkpoint.read_bytes(), sorted(checkpoint.parent.iterdir())
    for bad in BAD:
        require_refusal(run(*lacking_nothing(KNOWN[name], checkpoint), bad), *bad.split("="))
    assert (checkpoint.read_bytes(), sorted(checkpoint.parent.iterdir())) == before


def test_seed_and_threads_take_effect(run: Run, checkpoint: Path) -> None:
    assert run("inspect", checkpoint, "--seed", 5, "--threads", 1).code == 0
    assert (torch.initial_seed(), torch.get_num_threads()) == (5, 1)


def test_a_refused_option_leaves_the_others_without_effect(run: Run, checkpoint: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    require_refusal(run("inspect", checkpoint, "--threads", 2, "--device", "nowhere"))
    assert (torch.initial_seed(), torch.get_num_threads()) == (7, 1)


def test_the_commands_that_read_files_are_known() -> None:
    assert {"inspect", "history", "diff", "plot", "cut", "undo", "export", "convert"} <= set(
        READERS
    )
    assert files(KNOWN["diff"]) == 2
    assert files(KNOWN["doctor"]) == 0


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_is_refused(run: Run, missing_checkpoint: Path, name: str) -> None:
    require_refusal(run(*lacking_nothing(KNOWN[name], missing_checkpoint)), missing_checkpoint)
    assert list(missing_checkpoint.parent.iterdir()) == []


@pytest.mark.parametrize("name", READERS)
def test_a_folder_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    require_refusal(run(*lacking_nothing(KNOWN[name], tmp_path / "folder")), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_as_no_file(run: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    require_refusal(
        run(*lacking_nothing(KNOWN[name], tmp_path / "pipe")), f"{tmp_path / 'pipe'} is no file"
    )


def test_a_name_that_is_too_long_is_refused_as_such(run: Run, checkpoint: Path) -> None:
    long = checkpoint.with_name("a" * 300)
    for words in (
        ["inspect", long],
        ["cut", long, "--all", "--in-place"],
        ["cut", checkpoint, "--all", "-o", long],
    ):
        ran = run(*words)
        require_refusal(ran, long)
        assert ran.err.splitlines()[1] == "hint: choose a shorter name"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_checkpoint_is_refused_and_left_alone(
    run: Run, damaged_checkpoint: Path, name: str
) -> None:
    before = damaged_checkpoint.read_bytes()
    require_refusal(run(*lacking_nothing(KNOWN[name], damaged_checkpoint)), damaged_checkpoint)
    assert damaged_checkpoint.read_bytes() == before
    assert list(damaged_checkpoint.parent.iterdir()) == [damaged_checkpoint]


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_something_else_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    for content in (b"", b"no safetensors at all", b"\xff" * 64):
        (tmp_path / "other").write_bytes(content)
        require_refusal(run(*lacking_nothing(KNOWN[name], tmp_path / "other")), tmp_path / "other")
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
            ("other", content)
        ]


@pytest.mark.parametrize("name", [name for name in READERS if name != "convert"])
def test_plain_weights_are_refused_with_the_command_that_converts_them(
    run: Run, tmp_path: Path, name: str
) -> None:
    weights = {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}
    save_file(weights, tmp_path / "mlp.safetensors")
    torch.save(weights, tmp_path / "mlp.pt")
    for path in sorted(tmp_path.iterdir()):
        ran = run(*lacking_nothing(KNOWN[name], path))
        require_refusal(ran)
        assert ran.err.startswith(f"grapnet: {path} ")
        assert "header" not in ran.err  # the parser's words
        hint = ran.err.splitlines()[1]
        assert hint == f"hint: for the plain weights of an MLP: grapnet convert {path}"
        assert run(*hint.partition("grapnet ")[2].split(), "--force").code == 0


# which reads plain weights
@pytest.mark.parametrize("name", [name for name in READERS if name != "convert"])
def test_a_whole_checkpoint_is_not_refused_and_json_is_one_object(
    run: Run, checkpoint: Path, name: str
) -> None:
    before = checkpoint.read_bytes()
    code, out, _ = run(*lacking_nothing(KNOWN[name], checkpoint), "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)
    assert checkpoint.read_bytes() == before


def answer(
    monkeypatch: pytest.MonkeyPatch, run_command: Callable[[argparse.Namespace], Outcome]
) -> None:
    """Makes `grapnet inspect FILE` do something else."""
    (command,) = inspect.COMMANDS
    told = command.__class__(
        command.name, command.about, command.group, command.configure, run_command
    )
    monkeypatch.setattr(inspect, "COMMANDS", (told,))


def test_the_answer_no_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, lambda given: Outcome("no", {"answer": "no"}, code=1))
    assert run("inspect", "file") == (1, "no\n", "")
    assert run("inspect", "file", "--json") == (1, '{\n "answer": "no"\n}\n', "")


@pytest.mark.parametrize(
    ("error", "first", "hint"),
    [
        (CommandError("cannot", "do this"), "cannot", "do this"),
        (CommandError("cannot"), "cannot", "grapnet inspect --help"),
        (gn.EditError("wrong slots\nand more"), "wrong slots", "grapnet inspect --help"),
        (
            ImportError('Run: pip install "grapnet[plot]"'),
            'Run: pip install "grapnet[plot]"',
            "grapnet doctor",
        ),
        (
            OSError(errno.EACCES, "Denied", "/a/file"),
            "/a/file: Denied",
            "hint: see who may read and write it",
        ),
        (
            OSError(errno.EPERM, "Denied", "/a/file"),
            "/a/file: Denied",
            "hint: see who may read and write it",
        ),
        (
            OSError(errno.EROFS, "Read-only", "/a/file"),
            "/a/file: Read-only",
            "hint: that place can only be read",
        ),
        (OSError(errno.ENOSPC, "Full", "/a/file"), "/a/file: Full", "hint: make room"),
        (OSError(errno.EDQUOT, "Full", "/a/file"), "/a/file: Full", "hint: make room"),
        (
            OSError("'a' could not be written (Full (os error 28))"),
            "'a' could not be written (Full (os error 28))",
            "room",
        ),
        (OSError(errno.EIO, "Broken", "/a/file"), "/a/file: Broken", "grapnet inspect --help"),
    ],
)
def test_expected_errors_are_one_line_and_a_hint(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, first: str, hint: str
) -> None:
    def fail(given: argparse.Namespace) -> Outcome:
        raise error

    answer(monkeypatch, fail)
    ran = run("inspect", "file")
    require_refusal(ran)
    told, advice = ran.err.splitlines()
    assert told == f"grapnet: {first}"
    assert hint in advice


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "nothing"),
        ("inspct",),
        ("inspect",),
        ("inspect", "nothing", "--seed", "x"),
        ("inspect", "a", "b"),
    ],
)
def test_with_json_a_refusal_is_one_object_too(run: Run, arguments: tuple[str, ...]) -> None:
    plain = run(*arguments)
    require_refusal(plain)
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (2, plain.err)
    told = json.loads(out)
    assert [f"grapnet: {told['error']}", f"hint: {told['hint']}"] == err.splitlines()


def test_what_a_command_does_not_take_is_refused_with_its_own_help(run: Run) -> None:
    ran = run("inspect", "file", "more", "--most")
    require_refusal(ran, "more --most")
    assert ran.err.splitlines()[1].endswith(
        "with commas, such as a,b; grapnet inspect --help tells what it takes"
    )
    ran = run("inspect", "file", "--most")
    assert ran.err.splitlines()[1] == "hint: grapnet inspect --help tells what it takes"


def test_control_characters_do_not_reach_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, lambda given: Outcome("an \x1b[31mowner\nand – more", {"owner": "\x1b"}))
    assert run("inspect", "file").out == "an \\x1b[31mowner\nand – more\n"
    assert json.loads(run("inspect", "file", "--json").out) == {"owner": "\x1b"}


def test_without_standard_error_nothing_of_it_goes_to_standard_output(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    assert main(["inspct"]) == 2
    sys.stderr.close()
    assert capsys.readouterr().out == ""


def test_a_bug_is_told_in_one_line_and_shown_when_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(given: argparse.Namespace) -> Outcome:
        raise ZeroDivisionError("by \x1b")

    answer(monkeypatch, fail)
    code, out, err = run("inspect", "file")
    assert (code, out) == (2, "")
    assert err.startswith(
        "grapnet: ZeroDivisionError: by \\x1b\nhint: GRAPNET_TRACEBACK=1 shows where"
    )
    monkeypatch.setenv("GRAPNET_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "file"])


def test_what_stdout_cannot_take_does_not_end_a_command_half_way(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "grapnet", "inspect", str(checkpoint)]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 -> 1" in done.stdout


def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(given: argparse.Namespace) -> Outcome:
        raise KeyboardInterrupt

    answer(monkeypatch, interrupt)
    assert run("inspect", "file") == (130, "", "grapnet: interrupted\n")


def test_sigterm_is_143_and_leaves_nothing_half_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(given: argparse.Namespace) -> Outcome:
        with writing(tmp_path / "new", force=False) as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
        return Outcome("done")

    def caught(given: argparse.Namespace) -> Outcome:
        try:
            return written(given)
        except BaseException as error:
            raise RuntimeError("as torch's exporters do") from error

    for run_command in (written, caught):
        answer(monkeypatch, run_command)
        assert run("inspect", "file") == (143, "", "")
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_reader_who_left_is_no_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["inspect", str(checkpoint)]) == 130


def test_the_installed_command_and_the_module_are_this_one():
    (installed,) = entry_points(group="console_scripts", name="grapnet")
    assert installed.load() is main
    done = subprocess.run(
        [sys.executable, "-m", "grapnet", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"grapnet {gn.__version__}\n")
