"""Downloads from a server of this process: whole and with the right sum, or nothing at all."""

import gzip
import hashlib
import io
import runpy
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from grapnet.data import (
    CIFAR10,
    FASHION,
    DownloadError,
    MissingDataError,
    Source,
    download_cifar10,
    download_fashion,
    find_fashion,
    load_cifar10,
    load_fashion,
)
from grapnet.data.__main__ import main
from tests.data.made_up import write_cifar, write_fashion

CUT = "t10k-labels-idx1-ubyte.gz"  # the last of the four


class Files(SimpleHTTPRequestHandler):
    """Serves a folder; below /cut/ the last file ends half-way, below /unsized/ no length is told
    before.
    """

    def do_GET(self) -> None:
        _, kind, name = self.path.split("/")
        content = (
            (Path(self.directory) / name).read_bytes()
            if (Path(self.directory) / name).is_file()
            else None
        )
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        if kind != "unsized":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if kind == "cut" and name == CUT else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (machine / "served").mkdir()
    return machine / "served"


@pytest.fixture
def address(served: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(served))) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def source_of(folder: Path, url: str) -> Source:
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return Source(
        url, {name: sums[name] for name in sorted(sums, key=lambda name: (name == CUT, name))}
    )


@pytest.fixture
def fashion(served: Path, address: str) -> Source:
    return source_of(
        write_fashion(served, packed=("images", "labels"), first=7), f"{address}/files"
    )


@pytest.fixture
def cifar(served: Path, address: str, machine: Path) -> Source:
    """The archive of a made-up CIFAR-10, with a member that would land outside the folder."""
    batches = write_cifar(machine / "batches")
    (batches / "batches.meta").write_bytes(b"names")
    with tarfile.open(served / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(batches, "cifar-10-batches-py")
        tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    return source_of(served, f"{address}/files/")


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_pinned_files_are_the_originals() -> None:
    assert set(FASHION.md5) == {
        f"{part}-{kind}.gz"
        for part in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    }
    assert len({*FASHION.md5.values(), *CIFAR10.md5.values()}) == 5
    assert all(
        len(bytes.fromhex(md5)) == 16 for md5 in (*FASHION.md5.values(), *CIFAR10.md5.values())
    )
    assert CIFAR10.url.startswith("https://")


def test_nothing_is_downloaded_unless_asked(machine: Path, fashion: Source) -> None:
    with pytest.raises(MissingDataError):
        load_fashion("test", source=fashion)
    images, _ = load_fashion("test", download=True, source=fashion)
    assert images.unique().tolist() == [7]
    assert find_fashion() == machine / "home/.cache/grapnet/FashionMNIST/raw"
    load_fashion("test")


def test_a_download_goes_to_the_folder_or_to_grapnet_data(
    machine: Path, fashion: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPNET_DATA", str(machine / "named"))
    load_fashion("train", machine / "explicit", download=True, source=fashion)
    assert not (machine / "named").exists()
    load_fashion("train", download=True, source=fashion)
    expected = sorted(
        ["FashionMNIST", "FashionMNIST/raw", *(f"FashionMNIST/raw/{name}" for name in fashion.md5)]
    )
    assert left(machine / "explicit") == left(machine / "named") == expected


def test_what_is_there_is_not_downloaded(machine: Path, fashion: Source) -> None:
    write_fashion(machine / "mine", first=1)
    images, _ = load_fashion(
        "test", machine / "mine", download=True, source=fashion.at("http://127.0.0.1:1/none")
    )
    assert images.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("ends early", r"ended after \d+ of \d+ bytes"),
        ("not there", "could not be downloaded: HTTP Error 404"),
        ("wrong sum", "MD5 sum .* should have 0000"),
    ],
)
def test_a_failed_download_leaves_nothing_behind(
    machine: Path, address: str, fashion: Source, fails: str, message: str
) -> None:
    broken = {  # the last file fails, after three that are whole
        "ends early": fashion.at(f"{address}/cut"),
        "not there": Source(fashion.url, {**fashion.md5, "no-such-file.gz": "0" * 32}),
        "wrong sum": Source(fashion.url, {**fashion.md5, CUT: "0" * 32}),
    }[fails]
    before = left(machine)
    with pytest.raises(DownloadError, match=message):
        load_fashion("test", machine / "far/away", download=True, source=broken)
    assert left(machine) == before
    download_fashion(machine / "far/away", source=fashion)
    assert len(left(machine)) == len(before) + 4 + 4  # folders and files


def test_a_failed_download_leaves_what_was_there(
    machine: Path, address: str, fashion: Source
) -> None:
    folder = write_fashion(machine / "mine/FashionMNIST/raw", packed=("images", "labels"), first=1)
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DownloadError, match="ended after"):
        download_fashion(machine / "mine", source=fashion.at(f"{address}/cut"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == contents


def test_a_server_that_tells_no_length_is_checked_by_the_sum(
    machine: Path, address: str, fashion: Source
) -> None:
    seen = []
    target = download_fashion(
        machine / "mine",
        source=fashion.at(f"{address}/unsized"),
        report=lambda *told: seen.append(told),
    )
    assert [(name, total) for name, _, total in seen] == [(name, None) for name in fashion.md5]
    assert load_fashion("test", target)[0].unique().tolist() == [7]


def test_nobody_answers(machine: Path, fashion: Source) -> None:
    before = left(machine)
    for nowhere in ("http://127.0.0.1:1", "no address"):
        with pytest.raises(DownloadError, match="could not be downloaded"):
            download_fashion(machine / "mine", source=fashion.at(nowhere))
    assert left(machine) == before


def test_cifar_is_taken_out_of_its_archive_and_nothing_else_is(
    machine: Path, cifar: Source
) -> None:
    before = left(machine)
    images, labels = load_cifar10("train", machine / "mine", download=True, source=cifar)
    assert (len(images), len(labels)) == (10, 10)
    names = ["batches.meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    assert left(machine / "mine") == [
        "cifar-10-batches-py",
        *(f"cifar-10-batches-py/{name}" for name in names),
    ]
    assert len(left(machine)) == len(before) + 1 + 8


@pytest.mark.parametrize(
    "content", [b"no archive", gzip.compress(b"no archive", mtime=0), "lacks", "folder"]
)
def test_a_wrong_archive_leaves_nothing_behind(
    machine: Path, served: Path, address: str, content: bytes | str
) -> None:
    archive = served / "cifar-10-python.tar.gz"
    if isinstance(content, bytes):
        archive.write_bytes(content)
    else:
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            member.type = tarfile.DIRTYPE if content == "folder" else tarfile.REGTYPE
            tar.addfile(member)
    before = left(machine)
    with pytest.raises(DownloadError, match="cannot be unpacked, nothing was kept"):
        download_cifar10(machine / "mine", source=source_of(served, f"{address}/files"))
    assert left(machine) == before


def test_the_command_downloads_when_asked_and_says_where_it_is(
    machine: Path, fashion: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"fashion": fashion, "cifar10": CIFAR10}
    assert main(["fashion"], sources) == 1
    assert "was not found" in capsys.readouterr().err
    assert main(["fashion", "--download", "data"], sources) == 0
    said = capsys.readouterr()
    assert said.out == "data/FashionMNIST/raw\n"
    assert [line.split(":")[0].strip() for line in said.err.splitlines() if line] == list(
        fashion.md5
    )
    for arguments in (
        ["fashion"],
        ["fashion", "--download", "data", "--mirror", "http://127.0.0.1:1"],
    ):
        assert main(arguments, sources) == 0  # it is there already
        assert capsys.readouterr().out == "data/FashionMNIST/raw\n"


def test_a_mirror_is_held_to_the_pinned_sums(
    machine: Path, fashion: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left(machine)
    # made-up files at that address
    assert main(["fashion", "--download", "data", "--mirror", fashion.url]) == 1
    assert FASHION.md5["train-images-idx3-ubyte.gz"] in capsys.readouterr().err
    assert left(machine) == before
    with pytest.raises(SystemExit):
        main(["fashion", "--mirror", fashion.url])


def test_the_command_runs_as_a_module(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_cifar(machine / "mine", binary=True)
    monkeypatch.setenv("GRAPNET_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", ["grapnet.data", "cifar10"])
    monkeypatch.delitem(sys.modules, "grapnet.data.__main__")
    with pytest.raises(SystemExit) as left_with:
        runpy.run_module("grapnet.data", run_name="__main__")
    assert (left_with.value.code, capsys.readouterr().out) == (0, f"{folder}\n")
