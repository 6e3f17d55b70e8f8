"""`python -m grapnet.data fashion|cifar10`: says where a data set is, or downloads it when asked
to.
"""

import argparse
import sys
from collections.abc import Sequence

from .cifar import CIFAR10, download_cifar10, find_cifar10, load_cifar10
from .download import Source
from .errors import DataError
from .fashion import FASHION, download_fashion, find_fashion, load_fashion

SETS = {
    "fashion": (find_fashion, download_fashion, load_fashion),
    "cifar10": (find_cifar10, download_cifar10, load_cifar10),
}


def main(arguments: Sequence[str] | None = None, sources: dict[str, Source] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 1 when the set is not there, is damaged
    or did not arrive.
    """
    sources = sources or {"fashion": FASHION, "cifar10": CIFAR10}
    parser = argparse.ArgumentParser(prog="python -m grapnet.data", description=__doc__)
    parser.add_argument("name", choices=tuple(SETS), help="the data set")
    parser.add_argument(
        "--download", metavar="FOLDER", help="download it into FOLDER, in torchvision's layout"
    )
    parser.add_argument(
        "--mirror", metavar="URL", help="an address that has the original files; sums stay pinned"
    )
    chosen = parser.parse_args(arguments)
    if chosen.mirror and not chosen.download:
        parser.error("--mirror goes with --download FOLDER")
    find, download, load = SETS[chosen.name]
    source = sources[chosen.name].at(chosen.mirror) if chosen.mirror else sources[chosen.name]
    try:
        found = find(chosen.download)
        if found is None and chosen.download:
            found = download(chosen.download, source=source, report=_progress)
        load("test", found)  # which says what is missing or damaged
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(found)
    return 0


def _progress(name: str, size: int, total: int | None) -> None:
    """Writes one line a file that counts up on a screen, and only its end elsewhere."""
    done = size == total
    if done or sys.stderr.isatty():
        of = f" of {total / 1e6:.1f}" if total else ""
        print(
            f"\r{name}: {size / 1e6:.1f}{of} MB",
            end="\n" if done else "",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
