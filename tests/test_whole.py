"""Files written whole: what a failure, a link, a permission and another writer do to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grapnet.whole import whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_error_inside_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (path.read_text(), names(tmp_path)) == ("before", ["file"])
    with whole(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert (path.read_text(), names(tmp_path)) == ("after", ["file"])


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to("file")
    with whole(link) as partial:
        partial.write_text("after")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o640)


def test_only_the_first_of_two_may_take_a_free_name(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write_late() -> None:
        with whole(path, replace=False) as late:
            late.write_text("late")
            with whole(path, replace=False) as early:
                early.write_text("early")

    with pytest.raises(FileExistsError):
        write_late()
    assert (path.read_text(), names(tmp_path)) == ("early", ["file"])


def test_a_file_system_without_links_gives_the_name_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    test_only_the_first_of_two_may_take_a_free_name(tmp_path)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a device, a pipe or a socket"), whole(pipe):
        pytest.fail("the block ran")
    assert pipe.is_fifo()


def test_a_place_that_cannot_hold_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none"), whole(tmp_path / "none" / "file"):
        pytest.fail("the block ran")
    with pytest.raises(IsADirectoryError, match="is a folder"), whole(tmp_path):
        pytest.fail("the block ran")
    assert names(tmp_path) == []


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    program = (
        "import os, sys, signal\nfrom grapnet.whole import whole\n"
        "with whole(sys.argv[1]) as partial:\n"
        "    partial.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, os.fspath(path)]).returncode == -9
    assert path.read_text() == "before"
    assert [name for name in names(tmp_path) if not (name.startswith(".grapnet.") and name.endswith(".partial"))] == [
        "file"
    ]
