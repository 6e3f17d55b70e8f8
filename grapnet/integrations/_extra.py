"""Imports of optional modules, with an error that names what to install."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Returns an optional module; raises ImportError with the `pip install` command if it is
    missing.

    Args:
        module: its name, such as "transformers" or "sklearn.base".
        extra: the extra of grapnet that installs it.

    Examples:
        >>> require("no_such_library", "plot")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ImportError: this needs no_such_library, which is not installed. ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # it is there, and something that it needs is not
        raise ImportError(
            f'this needs {top}, which is not installed. Run: pip install "grapnet[{extra}]"',
            name=top,
        ) from None
