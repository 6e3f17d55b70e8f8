"""`grapnet doctor`: what is there is told, what is missing and optional is no failure, what is
broken is.
"""

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.cli import checkup
from grapnet.execution import native
from grapnet.execution.reference import Reference, ReferencePlan
from tests.plot.effort import lines_run

Run = Callable[..., Any]  # the fixture `run`: (code, out, err)


def findings(run: Run, code: int = 0) -> dict[str, dict]:
    found = run("doctor", "--json")
    assert (found.code, found.err) == (code, "")
    told = json.loads(found.out)
    assert told["healthy"] is (code == 0)
    return {one["name"]: one for one in told["findings"]}


def test_a_machine_without_anything_optional_is_healthy(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("healthy (self-check: ")
    assert [name for name, one in findings(run).items() if one["state"] == "failed"] == []


def test_versions_and_features_are_those_of_this_machine(run: Run) -> None:
    found = findings(run)
    assert found["grapnet"]["told"] == gn.__version__
    assert torch.__version__ in found["torch"]["told"]
    assert torch.backends.cpu.get_cpu_capability() in found["CPU"]["told"]
    assert str(torch.get_num_threads()) in found["threads"]["told"]
    assert found["CUDA"]["state"] == ("ok" if torch.cuda.is_available() else "absent")


def test_missing_kernels_are_told_with_what_to_do_and_are_no_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(run)["compiled kernels"]["state"] == ("absent" if native.missing else "ok")
    monkeypatch.setattr(
        native, "missing", "the compiled kernels are not installed; install a C++ compiler"
    )
    assert findings(run)["compiled kernels"] == {
        "section": "Library",
        "name": "compiled kernels",
        "state": "absent",
        "told": "the compiled kernels are not installed; install a C++ compiler",
    }


def test_extras_are_told_with_the_command_that_installs_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = [
        "torch>=2",
        'torch<3; extra == "one"',
        'no-such-library>=1; extra == "two"',
        'ruff; extra == "lint"',
    ]
    monkeypatch.setattr("grapnet.cli.doctor.metadata.requires", lambda name: required)
    found = findings(run)
    # The version of the package, which a build for CUDA has without its label.
    installed = f"torch {metadata.version('torch')}"
    assert (found["one"]["state"], found["one"]["told"]) == ("ok", installed)
    assert found["two"]["told"] == 'lacks no-such-library. Run: pip install "grapnet[two]"'
    assert (found["two"]["state"], "lint" in found) == ("absent", False)


def test_the_self_check_is_short_and_finds_a_backend_that_computes_wrongly(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(checkup.STEPS) == [
        "edit and undo",
        "backends agree",
        "optimizer follows",
        "save and load",
    ]
    assert set(checkup.check_up(torch.device("cpu")).values()) == {""}
    assert lines_run(lambda: checkup.check_up(torch.device("cpu"))) < 1_000_000
    assert json.loads(run("doctor", "--json").out)["seconds"] > 0

    class Off(ReferencePlan):
        """Adds a hair to every value."""

        def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
            return super().__call__(x, values, bias + 1e-6)

    monkeypatch.setattr(Reference, "prepare", lambda self, topology: Off(topology))
    found = findings(run, code=1)["backends agree"]
    assert (found["state"], found["told"].split()[0]) == ("failed", "reference")


def test_a_step_that_raises_is_told_and_the_others_still_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> str:
        raise OSError("no room on the disk\nat all")

    monkeypatch.setitem(checkup.STEPS, "edit and undo", broken)
    found = findings(run, code=1)
    assert found["edit and undo"]["told"] == "OSError: no room on the disk"
    assert found["save and load"]["state"] == "ok"


def test_a_net_that_cannot_even_be_built_is_told_and_not_raised(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(net: gn.GrapNet) -> None:
        raise gn.InvariantError("ptr does not ascend")

    monkeypatch.setattr(gn, "check", broken)
    states = {name: one["state"] for name, one in findings(run, code=1).items()}
    assert {name: states[name] for name in checkup.STEPS} == dict.fromkeys(checkup.STEPS, "failed")
