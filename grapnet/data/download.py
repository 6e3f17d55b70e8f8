"""Downloading files whole and with the right checksum, or not at all."""

import hashlib
import http.client
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import DownloadError

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without an answer

# file name, bytes so far, bytes in all where the server says
Report = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Source:
    """Where the files of a data set come from, and the MD5 sum that each has to have."""

    url: str  # of the folder that holds them
    md5: Mapping[str, str]  # by file name

    def at(self, url: str) -> "Source":
        """Returns the same files, with the same sums, at another address."""
        return replace(self, url=url)


def fetch(source: Source, folder: Path, report: Report | None = None) -> None:
    """Downloads every file of a source into an existing folder.

    Raises:
        DownloadError: a file does not arrive, ends early or has another sum.
    """
    for name, md5 in source.md5.items():
        address = f"{source.url.rstrip('/')}/{name}"
        try:
            _fetch_one(address, md5, folder / name, report)
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # ValueError: not an address
            if isinstance(error, DownloadError):
                raise
            raise DownloadError(
                f"{address} could not be downloaded: {error or type(error).__name__}"
            ) from error


def _fetch_one(address: str, md5: str, path: Path, report: Report | None) -> None:
    digest, size = hashlib.md5(usedforsecurity=False), 0
    with urllib.request.urlopen(address, timeout=TIMEOUT) as answer, path.open("wb") as file:
        length = answer.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            if report is not None:
                report(path.name, size, total)
    if total is not None and size != total:
        raise DownloadError(
            f"{address} ended after {size:,} of {total:,} bytes; nothing was kept. Try again"
        )
    if digest.hexdigest() != md5:
        raise DownloadError(
            f"{address} has the MD5 sum {digest.hexdigest()} and should have {md5}; nothing was"
            " kept. The file changed on the way or at its source"
        )


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Gives a folder on the target's file system that is gone afterwards; the target itself is not
    made.
    """
    there = target.absolute()
    while not there.exists():
        there = there.parent
    with tempfile.TemporaryDirectory(prefix=".grapnet-", dir=there) as stage:
        yield Path(stage)


def place(stage: Path, names: Iterable[str], target: Path) -> None:
    """Moves files of a staging folder into the target folder, which is made when it does not
    exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        os.replace(stage / name, target / name)
