"""GrapNet: neural networks whose structure is data you can edit while they train."""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("grapnet")
except _metadata.PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

if _typing.TYPE_CHECKING:
    from ._api import *  # noqa: F403
else:
    # The public names are imported when the first of them is used, and torch with them, so that
    # `grapnet --help` does not wait for torch.

    def __getattr__(name):
        if name == "__all__":
            # `from grapnet import *` leaves Python's open alone.
            return [name for name in (*_import_names(), "continual") if name != "open"]
        if name == "continual":
            return _importlib.import_module("grapnet.continual")
        if not name.startswith("_"):
            _import_names()
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        _import_names()
        return sorted({*globals(), "continual"})

    def _import_names():
        api = _importlib.import_module("grapnet._api")
        names = {name: value for name, value in vars(api).items() if not name.startswith("_")}
        for name, value in names.items():
            globals().setdefault(name, value)  # one may have been replaced
        return names
