"""What is saved beside the net: states of objects, generators and plain data."""

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grapnet.core._errors import CheckpointError
from grapnet.core._graph import Graph
from grapnet.following.optimizers import (
    Slots,
    refuse_stale_state,
    set_undo_slots,
    slot_owners,
    undo_slots,
)

from .codec import Fields, decode, encode, entry
from .optimizers import require_state
from .rollback import GoBack, remember_modules


def where(name: str) -> str:
    """Returns what an extra is called in the file and in errors."""
    return f"extras.{name}" if name.isidentifier() else f"extras[{name!r}]"


def prefix_of(place: str) -> str:
    """Returns what stands before the names of a net's Parameters in a model; nothing where the net
    is all of it.
    """
    return f"{place}." if place else ""


@dataclass
class Extra:
    """What a file holds about one object or value that was saved beside the nets.

    Attributes:
        kind: "generator", "state" or "data".
        made_by: the name of the class.
        shapes: those of an optimizer's parameters; None for anything else.
        slots: what undo gives back to an optimizer, by version and Parameter.
        owners: names of the nets' Parameters, with their places among the optimizer's.
        content: a state, or plain data.
    """

    kind: str
    made_by: str
    shapes: list[list[int]] | None
    slots: dict[int, Slots]
    owners: dict[str, int]
    content: Any

    @classmethod
    def of(cls, value: Any, nets: Mapping[str, Graph], *, undo: bool) -> "Extra":
        """Returns what a file is to hold about a value.

        Args:
            value: an object with `state_dict()`, a generator, or plain data.
            nets: those of the file, by place.
            undo: whether to keep the optimizer state that undo gives back.
        """
        slots: dict[int, Slots] = {}
        owners: dict[str, int] = {}
        if isinstance(value, Optimizer):
            refuse_stale_state(value)
            for place, net in nets.items():
                prefix = prefix_of(place)
                for parameter, n in slot_owners(value, net).items():
                    owners[prefix + parameter] = n
                for version, kept in undo_slots(value, net).items() if undo else ():
                    mine = {prefix + parameter: state for parameter, state in kept.items()}
                    slots.setdefault(version, {}).update(mine)
        kind = _kind(value)
        if kind == "state" and not hasattr(value, "state_dict"):
            kind = "data"
        content = value if kind == "data" else _state(value)
        return cls(kind, type(value).__name__, _shapes(value), slots, owners, content)

    def describe(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Puts its tensors into `tensors` and returns the rest as JSON."""
        return {
            "kind": self.kind,
            "class": self.made_by,
            "shapes": self.shapes,
            "slots": encode(self.slots, f"{where(name)}.slots", tensors),
            "owners": self.owners,
            "tree": encode(self.content, where(name), tensors),
        }

    @classmethod
    def read(cls, name: str, part: Any, fields: Fields) -> "Extra":
        """Returns an extra of a file; raises CheckpointError, naming the field, for anything
        else.
        """
        prefix = f"{where(name)}."
        kind = entry(part, "kind", str, prefix)
        made_by = entry(part, "class", str, prefix)
        if kind not in ("generator", "state", "data"):
            raise CheckpointError(f"{prefix}kind: expected generator, state or data")
        for key in ("shapes", "slots", "tree"):
            if key not in part:
                raise CheckpointError(f"{prefix}{key}: missing")
        slots = decode(part["slots"], f"{prefix}slots", fields)
        if not _are_slots(slots):
            raise CheckpointError(f"{prefix}slots: expected vectors by version, parameter and name")
        shapes = part["shapes"]
        if not isinstance(shapes, list | None):
            raise CheckpointError(f"{prefix}shapes: expected those of an optimizer's parameters")
        owners = entry(part, "owners", dict, prefix)
        most = len(shapes or ())
        if any(type(n) is not int or not 0 <= n < most for n in owners.values()):
            raise CheckpointError(f"{prefix}owners: expected places of parameters by name")
        content = decode(part["tree"], where(name), fields)
        return cls(kind, made_by, shapes, slots, owners, content)


def require_fit(name: str, target: Any, extra: Extra) -> None:
    """Raises when an object is not of the kind, the class or the shapes that were saved."""
    kind, given = _kind(target), type(target).__name__
    if kind == "state" and not hasattr(target, "load_state_dict"):
        raise TypeError(
            f"{name}= takes an object with load_state_dict() or a torch.Generator, not a value of"
            f" type {given}"
        )
    if extra.kind == "data":
        raise CheckpointError(
            f"{where(name)}: was saved as plain data, which gn.restore(path) returns"
        )
    if (extra.kind, extra.made_by) != (kind, given):
        raise CheckpointError(
            f"{where(name)}: was saved from the class {extra.made_by[:60]}, not from {given}"
        )
    saved, present = extra.shapes or [], _shapes(target) or []
    if saved != present:
        n = next(
            (n for n, (a, b) in enumerate(zip(saved, present, strict=False)) if a != b),
            min(len(saved), len(present)),
        )
        first, second = (
            str(shapes[n]) if n < len(shapes) else "none" for shapes in (saved, present)
        )
        raise CheckpointError(
            f"{where(name)}: was saved for {len(saved)} parameters and the optimizer has"
            f" {len(present)}; number {n} was of shape {first[:60]} and is {second}. Make it, with"
            " the same groups, from the parameters of the net or the model once that is loaded"
        )


class Target(NamedTuple):
    """An object and the state for it."""

    field: str  # of the file, for errors
    what: Any
    state: Any
    # those that it consists of, to be put back one by one
    modules: Sequence[nn.Module] | None = None


def restore_all(targets: Sequence[Target], undo: list[GoBack] | None = None) -> None:
    """Gives every object its state; when one refuses, all of them are as before and CheckpointError
    names it.

    Args:
        targets: the objects.
        undo: what puts earlier steps back; gets what puts the objects back.
    """
    # optimizers come last: loading one makes it forget that it has not followed an edit
    target = None
    undo = [] if undo is None else undo
    try:
        for target in sorted(targets, key=lambda target: isinstance(target.what, Optimizer)):
            undo.append(
                _remembered(target.what)
                if target.modules is None
                else remember_modules(target.modules)
            )
            _set_state(target.what, target.state)
    except BaseException as error:
        go_back_all(undo)
        if target is None or not isinstance(error, Exception):
            raise
        if isinstance(error, CheckpointError):  # a manager of rules says itself what does not fit
            raise CheckpointError(f"{target.field}: {error}") from None
        raise CheckpointError(
            f"{target.field}: its state does not fit the object ({error!r})"
        ) from error


def go_back_all(undo: Sequence[GoBack]) -> None:
    """Puts everything back, the last step first."""
    for go_back in reversed(undo):
        with contextlib.suppress(Exception):  # all the others go back too
            go_back()


def restore_slots(optimizer: Optimizer, extra: Extra, places: Iterable[str]) -> None:
    """Gives an optimizer what undo gives back to the coordinates of the nets at these places."""
    nets = []
    for prefix in map(prefix_of, places):
        slots = {version: _within(prefix, kept) for version, kept in extra.slots.items()}
        # a file without leaves those of a session
        nets += [(slots, _within(prefix, extra.owners))] if slots else []
    set_undo_slots(optimizer, nets)


def _within(prefix: str, named: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }


def _remembered(target: Any) -> GoBack:
    """Returns a function that puts the present state back."""
    if isinstance(target, Optimizer):  # loading puts other dicts in place and leaves these alone
        present = {"state": target.state, "param_groups": target.param_groups}
        return lambda: vars(target).update(present)
    if isinstance(target, nn.Module) and not any(
        isinstance(part, Graph) for part in target.modules()
    ):
        return remember_modules(target.modules())
    state, attributes = copy.deepcopy(_state(target)), dict(getattr(target, "__dict__", {}))

    def go_back() -> None:
        held = getattr(target, "__dict__", {})
        try:
            _set_state(target, state)
        except Exception:  # an object may refuse even its own state
            held.update(attributes)
        for name in held.keys() - attributes.keys():  # a scheduler takes over whatever it is given
            delattr(target, name)

    return go_back


def _kind(value: Any) -> str:
    return "generator" if isinstance(value, torch.Generator) else "state"


def _are_slots(slots: Any) -> bool:
    """Says whether something is what `undo_slots` returns."""
    if not isinstance(slots, dict) or any(
        type(v) is not int or not isinstance(p, dict) for v, p in slots.items()
    ):
        return False
    names = [(name, states) for parameters in slots.values() for name, states in parameters.items()]
    if any(type(name) is not str or not isinstance(states, dict) for name, states in names):
        return False
    values = [(key, value) for _, states in names for key, value in states.items()]
    return all(
        type(key) is str and isinstance(value, Tensor) and value.dim() == 1 for key, value in values
    )


def _shapes(value: Any) -> list[list[int]] | None:
    if not isinstance(value, Optimizer):
        return None
    return [list(p.shape) for group in value.param_groups for p in group["params"]]


def _state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state)
    else:
        groups = getattr(target, "param_groups", [])
        target.load_state_dict(state)
        if isinstance(target, Optimizer):
            _keep_types(target, state)
            require_state(target, groups)


def _keep_types(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Puts single numbers back in the type they were saved in: loading casts them to that of their
    parameter.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() == 0:
                loaded = optimizer.state[parameter][key]
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
