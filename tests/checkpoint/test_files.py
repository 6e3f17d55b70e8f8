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


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none' to save into"):
        gn.save(tmp_path / "none" / "net", numbered(1))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(gn.CheckpointError, match=r"container: .* is not a file"):
            gn.load(path)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        gn.save(tmp_path, numbered(1))


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x02}q\x00.", b"\x80\x02" + 6 * b"\0" + b"{"]
)
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "net").write_bytes(content)
    with pytest.raises(gn.CheckpointError, match=r"container: .* is not a whole safetensors file"):
        gn.load(tmp_path / "net")


def test_a_refusal_repeats_the_reason_of_the_container(tmp_path):
    (tmp_path / "net").write_bytes(b"hello")
    with pytest.raises(gn.CheckpointError) as refused:
        gn.load(tmp_path / "net")
    reason = str(refused.value.__cause__).splitlines()[0]
    assert len(reason) > 0
    assert reason in str(refused.value)


@pytest.mark.parametrize("kind", ["zip", "pickle", "safetensors"])
def test_plain_weights_are_told_how_to_become_a_net(tmp_path, kind):
    state, path = torch.nn.Linear(3, 2).state_dict(), tmp_path / "plain"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    for read in (gn.load, gn.restore):
        with pytest.raises(
            gn.CheckpointError, match=r"gn\.from_module\(module\).*grapnet convert FILE"
        ) as refused:
            read(path)
        assert "header" not in str(refused.value)


def test_arguments_in_the_order_of_torch_are_explained(tmp_path):
    with pytest.raises(TypeError, match=r"gn\.save\(path, net\)"):
        gn.save(numbered(1), tmp_path / "net")  # pyright: ignore[reportArgumentType]


def test_a_path_may_be_bare_or_long_or_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n, path in enumerate(["net", "n" * 255, "ü" * 127, Path("a b.ckpt")]):
        gn.save(path, numbered(n))
        assert number(Path(path)) == n


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_is_followed(tmp_path, dangling):
    (tmp_path / "runs").mkdir()
    target, link = tmp_path / "runs" / "one", tmp_path / "latest"
    if not dangling:
        gn.save(target, numbered(1))
    link.symlink_to(target)
    gn.save(link, numbered(2))
    assert link.is_symlink()
    assert number(target) == number(link) == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["latest", "one", "runs"]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_permissions_are_those_of_the_umask_or_of_the_replaced_file(tmp_path, umask):
    gn.save(tmp_path / "net", numbered(1))
    assert (tmp_path / "net").stat().st_mode & 0o777 == 0o640
    (tmp_path / "net").chmod(0o600)
    gn.save(tmp_path / "net", numbered(1))
    assert (tmp_path / "net").stat().st_mode & 0o777 == 0o600


def test_content_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

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
        with pytest.raises(gn.CheckpointError, match=r"^extras"):
            gn.save(tmp_path / "net", numbered(2), extra=extra)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: os.stat("/none"))
            with pytest.raises(OSError, match="/none"):
                gn.save(tmp_path / "net", numbered(2))
    assert (tmp_path / "net").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def test_a_document_that_could_not_be_read_back_is_not_written(tmp_path):
    gn.save(tmp_path / "net", numbered(1))
    with pytest.raises(
        gn.CheckpointError, match=r"metadata: [0-9,]+ bytes .* give long lists as tensors"
    ):
        gn.save(tmp_path / "net", numbered(2), much="x" * 100_000_000)
    assert number(tmp_path / "net") == 1
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
    loaded, data = gn.load(tmp_path / "net"), gn.restore(tmp_path / "net")
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
