"""Checkpoints that commands write: under the name that was asked for, once, and never over others
by chance.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import grapnet as gn

from .edited import content
from .full_disk import no_file_beyond
from .nobody import as_nobody, open_folder

Ask = Callable[..., list[object]]


@pytest.fixture(params=["cut", "convert"])
def ask(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Ask:
    """Returns the words of a command that writes a checkpoint of some thousand bytes."""
    if request.param == "cut":
        return lambda *words: ["cut", checkpoint, "--owner", "task-1", *words]
    torch.save(nn.Sequential(nn.Linear(30, 40)).state_dict(), tmp_path / "mlp.pt")
    return lambda *words: ["convert", tmp_path / "mlp.pt", *words]


def test_a_full_disk_is_told_of_the_path_that_was_given(ask, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ((), ("--force",)):
        before = content(tmp_path)
        with no_file_beyond(1000):
            done = run(*ask("-o", "new", *options))
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("grapnet: 'new' could not be written (")
        assert done.err.splitlines()[1].startswith("hint: make room")
        assert content(tmp_path) == before
        (tmp_path / "new").write_text("mine")


def test_a_file_is_synced_once_and_its_folder_once(ask, tmp_path, run, monkeypatch):
    synced, fsync = [], os.fsync

    def note_fsync(handle: int) -> None:
        synced.append("folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note_fsync)
    assert run(*ask("-o", tmp_path / "new")).code == 0
    assert synced == ["file", "folder"]
    gn.check(gn.load(tmp_path / "new"))


def test_what_somebody_else_writes_just_before_the_end_stays(ask, tmp_path, run, monkeypatch):
    new, fsync = tmp_path / "new", os.fsync

    def sync_slowly(handle: int) -> None:
        fsync(handle)
        new.write_text("theirs")

    monkeypatch.setattr(os, "fsync", sync_slowly)
    before = content(tmp_path)
    done = run(*ask("-o", new))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"grapnet: {new} exists already\n")
    assert content(tmp_path) == before | {"new": b"theirs"}


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_write_protected_file_is_not_written_over(ask, checkpoint, tmp_path, run, mode):
    new, link = tmp_path / "new", tmp_path / "link"
    new.write_text("mine")
    link.symlink_to(new)
    before = content(tmp_path)
    new.chmod(mode)
    for path in (new, link):
        done = run(*ask("-o", path, "--force"))
        assert (done.code, done.out) == (2, "")
        assert (
            done.err
            == f"grapnet: {path} is write-protected\nhint: chmod u+w {path}, or choose another"
            " name: -o\n"
        )
    new.chmod(0o644)
    assert content(tmp_path) == before
    assert run(*ask("-o", link, "--force")).code == 0
    gn.check(gn.load(new))


def test_a_write_protected_file_is_not_edited_in_place(checkpoint, tmp_path, run):
    before = content(tmp_path)
    checkpoint.chmod(0o444)
    for options in ((), ("--force",), ("--dry-run",)):
        done = run("cut", checkpoint, "--owner", "task-1", "--in-place", *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"grapnet: {checkpoint} is write-protected\n")
    assert content(tmp_path) == before


def test_a_file_in_a_folder_that_can_only_be_read_is_refused_before_the_work(checkpoint, run):
    with open_folder() as folder:
        inner, link, words = folder / "inner", folder / "link", ["--owner", "task-9", "--in-place"]
        inner.mkdir()
        path = Path(shutil.copy(checkpoint, inner))
        link.symlink_to(path)
        # which is found at work
        assert "no node has the owner 'task-9'" in run("cut", path, *words).err
        path.chmod(0o666)
        inner.chmod(0o555)
        with as_nobody():
            refused = [run("cut", one, *words) for one in (path, link)]
        inner.chmod(0o755)
    for done in refused:
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"grapnet: {inner}: no file can be written into this folder\n")


def test_a_dash_is_no_file_unless_it_is_written_as_a_path(ask, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    done = run(*ask("-o", "-"))
    assert (done.code, done.out, content(tmp_path)) == (2, "", before)
    assert done.err.splitlines()[1] == "hint: name a file; ./- is one"
    assert run(*ask("-o", "./-")).code == 0
    gn.check(gn.load("-"))
