"""The errors of `grapnet.data`; each is also the built-in error a caller would expect."""

from ..core.errors import GrapNetError


class MissingDataError(GrapNetError, FileNotFoundError):
    """A data set is in none of the places looked at; the message lists them and the commands that provide it."""


class DataError(GrapNetError, ValueError):
    """A data file is damaged, or not what its name says."""


class DownloadError(GrapNetError, OSError):
    """A file could not be downloaded whole and with its checksum; nothing was left behind."""
