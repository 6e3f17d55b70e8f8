"""What all commands share: help, errors, JSON and exit codes; and the doctor."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grapnet as gn
import grapnet.cli._doctor
import grapnet.cli._inspect
from grapnet.cli._main import commands, main, parser

from .conftest import Ran

Run = Callable[..., Ran]
KNOWN = commands()


@pytest.mark.parametrize("name", KNOWN)
def test_every_command_explains_itself_with_examples_that_parse(name: str, run: Run) -> None:
    done = run(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert KNOWN[name].examples
    for example in KNOWN[name].examples:
        assert example in done.out
        assert parser(KNOWN).parse_args(shlex.split(example)).command == name


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"grapnet {gn.__version__}\n"


def test_without_a_command_the_help_is_printed(run: Run) -> None:
    done = run()
    assert (done.code, done.out, done.err) == (2, run("--help").out, "")


@pytest.mark.parametrize(
    "words",
    [
        "inspect net.safetensors",
        "inspect model.safetensors",
        "inspect net.safetensors --owner task-1",
        "history net.safetensors --details",
        "diff earlier.safetensors net.safetensors",
        "diff net.safetensors model.safetensors",
        "plot net.safetensors",
        "cut net.safetensors --owner task-1 --dry-run",
        "cut net.safetensors --owner task-1 --layer 2 --dry-run",
        "undo net.safetensors --dry-run",
        "export net.safetensors --to graphml",
        "convert mlp.pt",
        "inspect missing.safetensors",
        "inspect",
    ],
)
@pytest.mark.usefixtures("folder")
def test_json_is_one_object_and_has_the_exit_code_of_the_text(words: str, run: Run) -> None:
    text = run(*words.split())
    for path in Path.cwd().glob("*"):
        if path.suffix in (".png", ".graphml") or "grapnet" in path.name:
            path.unlink()
    done = run(*words.split(), "--json")
    outcome = json.loads(done.out)
    assert isinstance(outcome, dict)
    assert (done.code, done.err) == (text.code, text.err)
    if done.code == 2:
        assert done.err == f"grapnet: {outcome['error']}\nhint: {outcome['hint']}\n"


@pytest.mark.usefixtures("folder")
def test_inspect_has_the_numbers_of_the_net_and_of_the_file(run: Run) -> None:
    outcome = json.loads(run("inspect", "net.safetensors", "--json").out)
    net = gn.load("net.safetensors")
    found = outcome["nets"][""]
    count = net.count()
    assert outcome["bytes"] == Path("net.safetensors").stat().st_size
    assert 0 < sum(outcome["sizes"].values()) < outcome["bytes"]
    assert (found["sizes"], found["version"]) == (net.sizes, net.version)
    assert (found["relations"], found["frozen"]) == (count.relations, count.frozen)
    assert sum(owner["nodes"] for owner in found["owners"]) == count.nodes
    assert sum(owner["outgoing"] for owner in found["owners"]) == count.relations


@pytest.mark.usefixtures("folder")
def test_diff_finds_one_changed_bit_and_nothing_else(run: Run) -> None:
    net = gn.load("net.safetensors")
    gn.save("same.safetensors", net)
    done = json.loads(run("diff", "net.safetensors", "same.safetensors", "--json").out)
    assert done["equal"]
    relations = net.select(owner="task-1").outgoing()[:1]
    relations.weights = torch.nextafter(relations.weights.detach(), torch.tensor(9.0))
    gn.save("other.safetensors", net)
    done = json.loads(run("diff", "net.safetensors", "other.safetensors", "--json").out)
    assert list(done["nets"][""]["differences"]) == ["weights"]
    assert done["nets"][""]["differences"]["weights"]["changed"] == 1


@pytest.mark.usefixtures("folder")
def test_an_unknown_device_is_an_error(run: Run) -> None:
    assert run("inspect", "bare.safetensors", "--device", "nonsense").code == 2


@pytest.mark.usefixtures("folder")
def test_control_characters_of_a_name_do_not_reach_the_terminal(run: Run) -> None:
    net = gn.GrapNet([2, 2])
    with net.edit(reason="\x1b[2J") as edit:
        edit.set_owner(net.layers[1], "\x1b]0;title\x07")
    gn.save("net.safetensors", net)
    for command in ("inspect", "history"):
        printed = run(command, "net.safetensors").out
        assert "\x1b" not in printed
        assert "\\x1b" in printed


@pytest.mark.usefixtures("folder")
def test_a_bug_is_one_line_and_a_traceback_when_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: Path) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(grapnet.cli._inspect, "open_file", broken)
    done = run("inspect", "net.safetensors")
    assert (done.code, done.err.splitlines()[0]) == (2, "grapnet: ZeroDivisionError: a bug")
    monkeypatch.setenv("GRAPNET_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "net.safetensors"])


@pytest.mark.usefixtures("folder")
def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grapnet.cli._inspect, "open_file", interrupted)
    assert run("inspect", "net.safetensors").code == 130


@pytest.mark.usefixtures("folder")
def test_a_closed_pipe_and_a_terminal_without_unicode_are_no_errors() -> None:
    command = [sys.executable, "-m", "grapnet", "inspect", "net.safetensors"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (130, b"")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"0 \\u2192 1" in done.stdout


@pytest.mark.usefixtures("folder")
def test_the_examples_of_edits_run_as_printed(run: Run) -> None:
    for name, command in KNOWN.items():
        if command.group == "Change a net":
            for example in command.examples:
                done = run(*shlex.split(example))
                assert (done.code, done.err) == (0, ""), (name, example)


def test_the_doctor_finds_this_machine_healthy(run: Run) -> None:
    outcome = json.loads(run("doctor", "--json").out)
    assert outcome["healthy"]
    found = {one["name"]: one for one in outcome["findings"]}
    assert found["torch"]["text"].startswith(torch.__version__)
    assert {one["state"] for one in outcome["findings"]} <= {"ok", "absent"}
    text = run("doctor")
    assert text.code == 0
    assert re.search(r"^healthy", text.out, flags=re.MULTILINE)


def test_the_doctor_names_a_step_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: gn.GrapNet, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(5, 4, dtype=torch.float64)

    monkeypatch.setattr(gn.GrapNet, "walk", wrong)
    done = run("doctor", "--json")
    assert done.code == 1
    failed = [one["name"] for one in json.loads(done.out)["findings"] if one["state"] == "failed"]
    assert failed == ["backends agree"]
