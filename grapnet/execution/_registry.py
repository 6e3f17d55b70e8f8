"""The registry of backends: which there are, and what a class needs to become one."""

from dataclasses import MISSING, fields
from typing import Any, cast

from grapnet.core._errors import PlanError

from ._attention import Attention
from ._dense import Dense
from ._family import Family
from ._plan import Backend, Policy
from ._policy import require_policy
from ._reference import Reference
from ._sparse import Sparse
from ._tiles import Tiles

BACKENDS: dict[str, type[Backend]] = {}
AUTO = "auto"


def register_backend(backend: type[Backend] | type[Policy]) -> None:
    """Makes a backend or a policy known to `net.execution.use` under its `name`; `auto` does not
    pick it.

    A class that is defined again, as in a notebook, replaces the earlier one; nets keep the earlier
    one until the next `use`.

    Args:
        backend: a frozen dataclass with a `name`, `refusals`, `prepare`, and a default for every
            field; a policy also has `columns` and `not_a_sum`, and no fields.

    Raises:
        TypeError: it is not such a class; nothing is registered.
        ValueError: another backend has that name.
    """
    _require_backend(backend)
    present = BACKENDS.get(backend.name, backend)
    if backend.name == AUTO or _origin(present) != _origin(backend):
        raise ValueError(
            f"a backend called {backend.name!r} exists already; give this one another name"
        )
    # The manager passes the columns of a policy to its plan, by `ColumnPlan`.
    BACKENDS[backend.name] = cast("type[Backend]", backend)


def _require_backend(backend: Any) -> None:
    """Raises TypeError, naming what is missing, for anything but a class that the Backend protocol
    describes.
    """
    if not isinstance(backend, type):
        raise TypeError(f"a backend is registered as a class, got {backend!r}")
    if isinstance(getattr(backend, "name", None), str):
        missing = []
    else:
        missing = ['a string `name: ClassVar[str] = "…"`']
    signatures = ("refusals(self, topology, dtype)", "prepare(self, topology)")
    missing += [s for s in signatures if not callable(getattr(backend, s.partition("(")[0], None))]
    if missing:
        raise TypeError(f"the backend {backend.__name__} lacks {' and '.join(missing)}")
    settings = getattr(backend, "__dataclass_params__", None)
    if settings is None or not settings.frozen:
        raise TypeError(
            f"the backend {backend.__name__} is not a frozen dataclass; add @dataclass(frozen=True)"
        )
    if hasattr(backend, "columns") or hasattr(backend, "not_a_sum"):
        require_policy(backend)
    bare = [
        f.name
        for f in fields(backend)
        if f.init and f.default is MISSING and f.default_factory is MISSING
    ]
    if bare:
        raise TypeError(
            f"options of a backend have defaults, and {backend.__name__} has none for"
            f" {', '.join(bare)}"
        )


def _origin(backend: type) -> tuple[str, str]:
    return backend.__module__, backend.__qualname__


def backend_called(name: str, options: dict[str, Any]) -> tuple[Backend | None, dict[str, Any]]:
    """Returns the backend of that name, None for auto, and how its Parameters start.

    The options of a policy are about its Parameters; all others are settings of the backend.
    """
    names = sorted({AUTO, *BACKENDS})
    if name not in names:
        raise PlanError(f"no backend is called {name!r}; known are {', '.join(names)}")
    backend: Any = BACKENDS.get(name)  # None: auto
    known = []
    if backend is not None:
        known = [option.name for option in fields(backend)]
    columns = getattr(backend, "columns", {})
    if columns:
        known = [*columns, "bound"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise PlanError(
            f"{name} has no option {', '.join(unknown)}; its options are:"
            f" {', '.join(known) or 'none'}"
        )
    if backend is None:
        return None, {}
    if columns:
        return backend(), options
    return backend(**options), {}


for _backend in (Reference, Dense, Family, Sparse, Tiles, Attention):
    register_backend(_backend)
