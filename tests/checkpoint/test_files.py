"""Where and how files are written: links, folders, permissions, several writers and readers, full
disks.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import grapnet as gn

from .files import edited_net


def numbered(number: int, sizes: tuple[int, ...] = (4, 3)) -> gn.GrapNet:
    net = gn.GrapNet(sizes)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(number)
    return net


def number(path: Path) -> int:
    (found,) = {
        x for parameter in gn.load(path).parameters() for x in parameter.detach().unique().tolist()
    }
    return int(found)


def test_a_missing_file_is_a_missing_file(tmp_path):
    for read in (gn.load, gn.restore):
        with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*none"):
            read(tmp_path / "none")


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(gn.errors.CheckpointError, match=r"container: .* is not a file"):
            gn.load(path)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        gn.save(tmp_path, numbered(1))


@pytest.mark.parametrize("content", [b"", b"hello", b"torch", b"safetensors"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "plain"
    path.write_bytes(content)
    if content == b"safetensors":
        save_file(torch.nn.Linear(3, 2).state_dict(), path)
    if content == b"torch":
        torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    for read in (gn.load, gn.restore):
        with pytest.raises(gn.errors.CheckpointError):
            read(path)


def test_content_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync = os.fsync
    replace = os.replace

    def note_fsync(handle: int) -> None:
        calls.append("folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else "file")
        fsync(handle)

    def note_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    gn.save(tmp_path / "net", numbered(1))
    assert calls == ["file", "rename", "folder"]


def test_a_failed_save_leaves_the_earlier_file_alone(tmp_path, monkeypatch):
    gn.save(tmp_path / "net", numbered(1))
    before = (tmp_path / "net").read_bytes()
    for extra in (lambda: 0, object(), {"a": [1, {2, 3}]}, torch.zeros(2).to_sparse(), 10**5000):
        with pytest.raises(gn.errors.CheckpointError, match=r"^extras"):
            gn.save(tmp_path / "net", numbered(2), extra=extra)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: os.stat("/none"))
            with pytest.raises(OSError, match="/none"):
                gn.save(tmp_path / "net", numbered(2))
    assert (tmp_path / "net").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


@pytest.fixture
def no_file_beyond_3000_bytes() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_an_os_error(tmp_path, no_file_beyond_3000_bytes):
    gn.save(tmp_path / "net", numbered(1))
    with pytest.raises(OSError, match="could not be written"):
        gn.save(tmp_path / "net", gn.GrapNet([300, 30]))
    assert number(tmp_path / "net") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def test_a_loaded_net_does_not_depend_on_the_file(tmp_path):
    net, _ = edited_net()
    gn.save(tmp_path / "net", net, undo=True, table=torch.arange(1000.0))
    loaded = gn.load(tmp_path / "net")
    data = gn.restore(tmp_path / "net")
    (tmp_path / "net").write_bytes(bytes(100))  # in place: a mapped file would now be gone
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), net.parameters(), strict=True)
    )
    assert torch.equal(data["table"], torch.arange(1000.0))
    loaded.undo()
    gn.check(loaded)


def test_several_writers_of_one_path_leave_one_whole_file(tmp_path):
    nets = [numbered(n, (100, 100)) for n in range(4)]
    threads = [
        threading.Thread(target=lambda n=n: [gn.save(tmp_path / "net", n) for _ in range(5)])
        for n in nets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number(tmp_path / "net") in range(4)
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def test_another_process_can_read_while_files_are_replaced(tmp_path):
    gn.save(tmp_path / "net", numbered(0, (300, 300)))
    program = (
        "import sys, grapnet as gn\nwhile True:\n    print(*{x for p in"
        " gn.load(sys.argv[1]).parameters() for x in p.detach().unique().tolist()}, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "net")]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    seen = [reader.stdout.readline()]  # it has started
    for n in range(1, 60):
        gn.save(tmp_path / "net", numbered(n, (300, 300)))
    reader.send_signal(signal.SIGTERM)
    out, errors = reader.communicate()
    assert errors == ""
    # a mixture would be two numbers: no float
    numbers = [float(line) for line in [*seen, *out.splitlines()[:-1]]]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 5


def test_a_document_that_could_not_be_read_back_is_not_written(tmp_path):
    gn.save(tmp_path / "net", numbered(1))
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "net", numbered(2), much="x" * 100_000_000)
    assert number(tmp_path / "net") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
