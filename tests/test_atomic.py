"""Atomic writes: what a failure, a link, a permission and another writer do to a file."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from grapnet._atomic import atomic_write
from tests.nobody import as_nobody, open_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_error_inside_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with atomic_write(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (path.read_text(), names(tmp_path)) == ("before", ["file"])
    with atomic_write(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert (path.read_text(), names(tmp_path)) == ("after", ["file"])


@pytest.mark.parametrize("mode", [0o640, 0o755])
def test_links_and_permissions_stay(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    link = tmp_path / "link"
    path.write_text("before")
    path.chmod(mode)
    link.symlink_to("file")
    with atomic_write(link) as partial:
        partial.write_text("after")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", mode)


def test_the_first_file_of_a_link_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    umask = os.umask(0o027)
    try:
        with atomic_write(link) as partial:
            partial.write_text("first")
    finally:
        os.umask(umask)
    assert link.is_symlink()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["file", "link"]


def refuse_to_sync_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def sync_files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync_files_only)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
@pytest.mark.parametrize("replace", [True, False])
def test_a_folder_that_cannot_be_synced_takes_files_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, replace: bool
) -> None:
    refuse_to_sync_folders(monkeypatch, number)
    path = tmp_path / "file"
    with atomic_write(path, replace=replace) as partial:
        partial.write_text("after")
    assert (path.read_text(), names(tmp_path)) == ("after", ["file"])


def test_a_name_that_may_not_be_on_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_sync_folders(monkeypatch, errno.EIO)
    with (
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
        atomic_write(tmp_path / "file") as partial,
    ):
        partial.write_text("after")


def test_a_folder_that_may_be_written_but_not_read_takes_files() -> None:
    with open_folder() as folder:
        box = folder / "box"
        box.mkdir()
        box.chmod(0o333)
        with as_nobody():
            with pytest.raises(PermissionError):
                names(box)
            with atomic_write(box / "file") as partial:
                partial.write_text("after")
        box.chmod(0o700)
        assert ((box / "file").read_text(), names(box)) == ("after", ["file"])


def test_an_error_of_the_system_names_the_path_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught, atomic_write("file") as partial:
        assert not partial.exists()  # and nothing is written
    assert (caught.value.filename, names(tmp_path)) == ("file", [])
    with pytest.raises(FileNotFoundError) as caught, atomic_write("file"):
        Path("other").read_text()
    assert caught.value.filename == "other"


def test_only_the_first_of_two_may_take_a_free_name(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write_late() -> None:
        with atomic_write(path, replace=False) as late:
            late.write_text("late")
            with atomic_write(path, replace=False) as early:
                early.write_text("early")

    with pytest.raises(FileExistsError):
        write_late()
    assert (path.read_text(), names(tmp_path)) == ("early", ["file"])


def test_a_file_system_without_links_gives_the_name_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    test_only_the_first_of_two_may_take_a_free_name(tmp_path)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a device, a pipe or a socket"), atomic_write(pipe):
        pytest.fail("the block ran")
    assert pipe.is_fifo()


def test_a_place_that_cannot_hold_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="none"),
        atomic_write(tmp_path / "none" / "file"),
    ):
        pytest.fail("the block ran")
    with pytest.raises(IsADirectoryError, match="is a folder"), atomic_write(tmp_path):
        pytest.fail("the block ran")
    assert names(tmp_path) == []


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    program = (
        "import os, sys, signal\nfrom grapnet._atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as partial:\n"
        "    partial.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, os.fspath(path)]).returncode == -9
    assert path.read_text() == "before"
    assert [
        name
        for name in names(tmp_path)
        if not (name.startswith(".grapnet.") and name.endswith(".partial"))
    ] == ["file"]
    assert len(names(tmp_path)) == 2
    with atomic_write(path) as partial:
        partial.write_text("after")
    assert names(tmp_path) == ["file"]


def test_a_write_leaves_another_that_still_runs_alone(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "first") as first:
        first.write_text("1")
        with atomic_write(tmp_path / "second") as second:
            second.write_text("2")
    assert names(tmp_path) == ["first", "second"]
