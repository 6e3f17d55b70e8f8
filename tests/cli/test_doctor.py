"""`grapnet doctor`: what is there is told, what is missing and optional is no failure, what is
broken is.
"""

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
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


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides the data sets of this machine."""
    for name in ("HOME", "XDG_CACHE_HOME", "GRAPNET_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("grapnet.data.places.PREFIXES", (str(tmp_path / "prefix"),))
    monkeypatch.chdir(tmp_path)


def test_a_machine_without_anything_optional_is_healthy(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("healthy (self-check: ")
    assert "Fashion-MNIST, CIFAR-10" in last
    assert [name for name, one in findings(run).items() if one["state"] == "failed"] == []


def test_versions_and_features_are_those_of_this_machine(run: Run) -> None:
    found = findings(run)
    assert found["grapnet"]["told"] == gn.__version__
    assert torch.__version__ in found["torch"]["told"]
    assert torch.backends.cpu.get_cpu_capability() in found["CPU"]["told"]
    assert str(torch.get_num_threads()) in found["threads"]["told"]
    assert found["CUDA"]["state"] == ("ok" if torch.cuda.is_available() else "absent")


def test_every_folder_where_data_was_looked_for_is_listed(run: Run, tmp_path: Path) -> None:
    found = findings(run)
    for name, folder in (
        ("Fashion-MNIST", "FashionMNIST/raw"),
        ("CIFAR-10", "cifar-10-batches-py"),
    ):
        assert found[name]["state"] == "absent"
        listed = "\n".join(found[name]["details"])
        for root in (tmp_path, tmp_path / "grapnet", tmp_path / "prefix/share/datasets"):
            assert str(root / folder) in listed
        assert "--download data" in listed
        assert listed.count("\n") >= 10


def test_a_missing_data_set_takes_one_line_unless_more_is_asked_for(
    run: Run, tmp_path: Path
) -> None:
    plain, verbose = run("doctor").out.splitlines(), run("doctor", "--verbose").out
    for name in ("Fashion-MNIST", "CIFAR-10"):
        (at,) = [n for n, line in enumerate(plain) if line.split()[:2] == ["–", name]]
        assert re.search(
            r"not found; looked in \d\d folders: grapnet doctor --verbose lists them$", plain[at]
        )
        assert plain[at + 1].split()[:2] in ([], ["–", "CIFAR-10"])
    assert f"{tmp_path / 'prefix/share/datasets/FashionMNIST/raw'} (a system package)" in verbose
    assert "sudo apt install dataset-fashion-mnist" in verbose


def test_a_damaged_data_set_is_a_failure(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").write_bytes(b"no images")
    assert findings(run, code=1)["Fashion-MNIST"]["state"] == "failed"
    assert run("doctor").out.splitlines()[-1].startswith("1 of ")


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
        "details": [],
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


def test_the_folder_for_data_is_told_and_not_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPNET_DATA", str(tmp_path / "later"))
    assert findings(run)["data folder"]["told"] == f"{tmp_path / 'later'} (made when needed)"
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GRAPNET_DATA", str(tmp_path / "file/below"))
    assert findings(run)["data folder"]["state"] == "absent"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


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
