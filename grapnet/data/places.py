"""Where data sets may lie, in the order in which they are looked for."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import MissingDataError

# of the system's packages, each once
PREFIXES = tuple(dict.fromkeys((sys.prefix, sys.base_prefix, "/usr")))


@dataclass(frozen=True)
class Place:
    """A folder that may hold a data set, why it is looked at, and which of the files it has and
    lacks.
    """

    folder: Path
    reason: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]


def user_path(path: str | Path) -> Path:
    """Returns a path as the user means it, with `~` replaced by the home folder."""
    return Path(os.path.expanduser(path))


def default_root() -> Path:
    """Returns where a download goes when no folder is named: `GRAPNET_DATA`, or a folder of the
    user's cache.
    """
    named = os.environ.get("GRAPNET_DATA")
    return user_path(named) if named else _cache() / "grapnet"


def present(folder: Path, name: str, *, packed: bool = False) -> Path | None:
    """Returns a file of a folder, or else, where it may be `packed`, its `.gz`; None if there is
    none to be seen.
    """
    names = (name, f"{name}.gz") if packed else (name,)
    return next((folder / one for one in names if os.path.isfile(folder / one)), None)


def places(
    folder: str | Path | None, layouts: Sequence[str], files: Sequence[str], *, packed: bool = False
) -> list[Place]:
    """Returns the folders that may hold a data set, in order.

    A root that the user named may hold the files itself. A root that is only guessed is never read
    directly, because other data sets use the same file names; there, only folders called after the
    data set count.

    Args:
        folder: the only root to look at; None stands for `GRAPNET_DATA`, the roots that
            torchvision's users have, and the system's.
        layouts: folders below a root that are called after the data set.
        files: the names that all have to be there.
        packed: whether a file may also be there as `.gz`.
    """
    found = []
    for root, reason, named in _roots(folder):
        for candidate in [root] * named + [root / layout for layout in layouts]:
            has = tuple(name for name in files if present(candidate, name, packed=packed))
            found.append(
                Place(candidate, reason, has, tuple(name for name in files if name not in has))
            )
    return found


def missing(
    title: str, looked: Sequence[Place], files: Sequence[str], commands: Sequence[str]
) -> MissingDataError:
    """Returns the error of a data set that is nowhere: where it was looked for and what would
    provide it.
    """
    lines = [f"{title} was not found; looked in {len(looked)} folders"]
    lines += [f"Its files are {', '.join(files)}, and these folders do not have them all:"]
    for place in looked:
        partly = f" lacks {', '.join(place.lacks)}" if place.has else ""
        lines.append(f"  {place.folder} ({place.reason}){partly}")
    lines += ["Any one of these provides them:", *(f"  {command}" for command in commands)]
    error = MissingDataError("\n".join(lines))
    error.folders, error.commands = tuple(place.folder for place in looked), tuple(commands)
    return error


def _cache() -> Path:
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def _roots(folder: str | Path | None) -> list[tuple[Path, str, bool]]:
    """Returns the roots, why each is looked at, and whether the user named it."""
    if folder is not None:
        return [(user_path(folder), "the folder that was asked for", True)]
    named = os.environ.get("GRAPNET_DATA")
    first = [(user_path(named), "GRAPNET_DATA", True)] if named else []
    kept = [
        Path("data"),
        Path("datasets"),
        *(user_path(path) for path in ("~/data", "~/datasets", "~")),
    ]
    kept += [_cache() / "grapnet", _cache(), _cache() / "torch", _cache() / "torchvision"]
    system = [Path(prefix) / "share/datasets" for prefix in PREFIXES]
    guessed = [(root, "torchvision's layout", False) for root in kept]
    return first + guessed + [(root, "a system package", False) for root in system]
