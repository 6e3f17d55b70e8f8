"""The errors of `grapnet.data`; each is also the built-in error a caller would expect."""

from pathlib import Path

from ..core.errors import GrapNetError


class MissingDataError(GrapNetError, FileNotFoundError):
    """A data set is in none of the places looked at; the message lists them and the commands that
    provide it.

    Attributes:
        folders: that were looked at; none where one file was asked for.
        commands: each of which provides the data.
    """

    folders: tuple[Path, ...] = ()
    commands: tuple[str, ...] = ()


class DataError(GrapNetError, ValueError):
    """A data file is damaged, or not what its name says."""


class DownloadError(GrapNetError, OSError):
    """A file could not be downloaded whole and with its checksum; nothing was left behind."""
