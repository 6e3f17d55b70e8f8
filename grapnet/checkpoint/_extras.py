"""Extras of a checkpoint: states of objects, generators and plain data, restored into objects or
moved by the edits of an opened checkpoint.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Optimizer
from torch.optim.swa_utils import AveragedModel

from grapnet.core._errors import CheckpointError, GrapNetError, OptimizerError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.following._optimizers import (
    Slots,
    attach,
    set_undo_slots,
    slot_owners,
    undo_slots,
)
from grapnet.following._state import OF_TORCH, mark_followed, record_of, refuse_stale_state
from grapnet.spaces import Adopted

from ._codec import Fields, decode, encode, entry

Revert = Callable[[], None]
# These hold inputs, which no edit changes.
_INDEPENDENT = ("ReservoirMemory", "BalancedMemory")
# These keep tensors of other shapes than their Parameters have.
_OTHER_SHAPES = (Adafactor, LBFGS)


def where(name: str) -> str:
    """Returns the name of an extra in the file and in errors."""
    return f"extras.{name}" if name.isidentifier() else f"extras[{name!r}]"


def prefix_of(place: str) -> str:
    """Returns the prefix of a net's Parameter names in a model; empty for a single net."""
    return f"{place}." if place else ""


@dataclass
class Extra:
    """One extra in a file.

    Attributes:
        kind: "generator", "state" or "data".
        made_by: the name of the class.
        shapes: the shapes of an optimizer's Parameters, or None.
        slots: the optimizer state that undo restores, by version and Parameter.
        owners: the names of the nets' Parameters, with their positions in the optimizer.
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
        """Returns the extra for a value.

        Args:
            value: an object with `state_dict()`, a generator, or plain data.
            nets: those of the file, by place.
            undo: whether to keep the optimizer state that undo restores.
        """
        slots: dict[int, Slots] = {}
        owners: dict[str, int] = {}
        if isinstance(value, Optimizer):
            refuse_stale_state(value)
            for place, net in nets.items():
                prefix = prefix_of(place)
                for parameter, n in slot_owners(value, net).items():
                    owners[prefix + parameter] = n
                saved = net.journal._saved_versions()
                for version, kept in undo_slots(value, net).items() if undo else ():
                    if version not in saved:
                        continue
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
        slots = decode(part.get("slots"), f"{prefix}slots", fields)
        if type(slots) is not dict or any(type(kept) is not dict for kept in slots.values()):
            raise CheckpointError(f"{prefix}slots: expected states by version")
        shapes = part.get("shapes")
        if not isinstance(shapes, list | None):
            raise CheckpointError(f"{prefix}shapes: expected those of an optimizer's parameters")
        owners = entry(part, "owners", dict, prefix)
        most = len(shapes or ())
        if any(type(n) is not int or not 0 <= n < most for n in owners.values()):
            raise CheckpointError(f"{prefix}owners: expected places of parameters by name")
        content = decode(part.get("tree"), where(name), fields)
        return cls(kind, made_by, shapes, slots, owners, content)


def require_fit(name: str, target: Any, extra: Extra) -> None:
    """Raises if an object differs from the saved one in kind, class or shapes."""
    kind = _kind(target)
    given = type(target).__name__
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
    shapes = _shapes(target)
    if extra.shapes != shapes:
        raise CheckpointError(
            f"{where(name)}: was saved for parameters of the shapes {str(extra.shapes)[:200]}, and"
            f" the optimizer has {str(shapes)[:200]}. Create it after loading, with the same"
            " groups, from the Parameters of the net or model"
        )


class Target(NamedTuple):
    """An object and the state for it."""

    field: str  # of the file, for errors
    what: Any
    state: Any
    # its parts, to restore one by one
    modules: Sequence[nn.Module] | None = None


def restore_all(targets: Sequence[Target], undo: list[Revert] | None = None) -> None:
    """Loads the state of every object; if one fails, all are restored and CheckpointError names it.

    Args:
        targets: the objects.
        undo: functions that revert earlier steps; those for the objects are appended.
    """
    # Optimizers come last: an attached one that loads its state has followed every edit.
    target = None
    undo = [] if undo is None else undo
    try:
        for target in sorted(targets, key=lambda target: isinstance(target.what, Optimizer)):
            if target.modules is None:
                undo.append(_remembered(target.what))
            else:
                undo.append(remember_modules(target.modules))
            _set_state(target.what, target.state)
        for target in targets:
            if isinstance(target.what, Optimizer):
                mark_followed(target.what)
    except BaseException as error:
        revert_all(undo)
        if target is None or not isinstance(error, Exception):
            raise
        if isinstance(error, CheckpointError):  # a manager of rules names what does not fit
            raise CheckpointError(f"{target.field}: {error}") from None
        raise CheckpointError(
            f"{target.field}: its state does not fit the object ({error!r})"
        ) from error


def revert_all(undo: Sequence[Revert]) -> None:
    """Reverts everything, the last step first."""
    for revert in reversed(undo):
        with contextlib.suppress(Exception):  # the others are reverted too
            revert()


def restore_slots(optimizer: Optimizer, extra: Extra, places: Iterable[str]) -> None:
    """Loads the optimizer state that undo restores for the nets at these places."""
    nets = []
    for prefix in map(prefix_of, places):
        slots = {version: within(prefix, kept) for version, kept in extra.slots.items()}
        # A file without slots leaves those of a session.
        if slots:
            nets.append((slots, within(prefix, extra.owners)))
    set_undo_slots(optimizer, nets)


def within(prefix: str, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the values whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }


def remember_structure(modules: Iterable[nn.Module]) -> Revert:
    """Returns a function that restores the current attributes and parts of every module."""
    listed = list(modules)
    owned: list[dict[str, Any]] = []
    for module in listed:
        parts = (vars(module), module._modules, module._parameters, module._buffers)
        # a scripted module has no dicts of parts
        owned += [part for part in parts if isinstance(part, dict)]
    before = [dict(part) for part in owned]

    def revert() -> None:
        for part, content in zip(owned, before, strict=True):
            part.clear()
            part.update(content)

    return revert


def remember_modules(modules: Iterable[nn.Module]) -> Revert:
    """Returns a function that restores structure, values and extra states of modules, one by one.

    A `load_state_dict` that has just failed would fail again, and so would one into a tensor that
    cannot be written.
    """
    listed = list(modules)
    structure = remember_structure(listed)
    memory = {}
    extras = []
    for module in listed:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor):
                storage = tensor.untyped_storage()
                memory[storage.data_ptr()] = storage
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras.append((module, copy.deepcopy(module.get_extra_state())))
    contents = [(storage, storage.clone()) for storage in memory.values()]

    def revert() -> None:
        structure()
        for storage, content in contents:
            storage.copy_(content)
        for module, extra in extras:
            # it may refuse even its own state; the others are restored
            with contextlib.suppress(Exception):
                module.set_extra_state(extra)

    return revert


def _remembered(target: Any) -> Revert:
    """Returns a function that restores the current state."""
    if isinstance(target, Optimizer):  # loading puts other dicts in place and leaves these alone
        present = {"state": target.state, "param_groups": target.param_groups}
        return partial(_restore_record, target, present, dict(record_of(target).layouts))
    if isinstance(target, nn.Module) and not any(
        isinstance(part, Graph) for part in target.modules()
    ):
        return remember_modules(target.modules())
    state = copy.deepcopy(_state(target))
    attributes = dict(getattr(target, "__dict__", {}))

    def revert() -> None:
        held = getattr(target, "__dict__", {})
        try:
            _set_state(target, state)
        except Exception:  # an object may refuse even its own state
            held.update(attributes)
        for name in held.keys() - attributes.keys():  # a scheduler takes over whatever it is given
            delattr(target, name)

    return revert


def _restore_record(
    optimizer: Optimizer, present: dict[str, Any], layouts: dict[int, object]
) -> None:
    """Restores the state of an optimizer, and the record of the coordinates that it belongs to."""
    vars(optimizer).update(present)
    record = record_of(optimizer)
    record.layouts = layouts
    record.compared = (-1, -1)


def _kind(value: Any) -> str:
    return "generator" if isinstance(value, torch.Generator) else "state"


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
        options = []
        if isinstance(target, Optimizer):
            options = [set(group) for group in target.param_groups]
        target.load_state_dict(state)
        if isinstance(target, Optimizer):
            _keep_types(target, state)
            _require_fit(target, options)


def _require_fit(optimizer: Optimizer, options: list[set[str]]) -> None:
    """Raises CheckpointError if an option is missing, or if a tensor has another shape than its
    Parameter: fused steps would write outside of it.
    """
    for n, (group, own) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        missing = sorted(own - group.keys())
        if missing:
            raise CheckpointError(f"param_groups[{n}]: {', '.join(missing)} missing")
    if type(optimizer) not in OF_TORCH or isinstance(optimizer, _OTHER_SHAPES):
        return
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{key!r} has shape {list(value.shape)}, its Parameter {list(parameter.shape)}"
                )


def _keep_types(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restores the dtype of single numbers: loading casts them to that of their Parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() == 0:
                loaded = optimizer.state[parameter][key]
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)


class Moved:
    """The Parameters that commits have moved in one net since its checkpoint was opened.

    Attributes:
        parameters: names of Parameters whose coordinates moved.
        sizes: the sizes of the vectors that moved.
    """

    follower_name = "gn.open"

    def __init__(self, net: Graph) -> None:
        self.parameters: set[str] = set()
        self.sizes: set[int] = set()
        net.follow(self)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Returns the assignment that notes a commit."""
        return partial(self._note, commit)

    def _note(self, commit: Commit) -> None:
        for name, index in commit.parameters.items():
            if not index.is_identity:
                self.parameters.add(name)
        for part in (commit.nodes, commit.relations, commit.parameters):
            self.sizes |= {index.old_size for index in part.values() if not index.is_identity}
        self.sizes.discard(0)


class Following:
    """How one extra changes while one net is edited; this one has nothing to do with the net."""

    how = "kept"  # or "followed"

    def __init__(self, name: str) -> None:
        self._name = name

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        """Updates an extra after the edits.

        Args:
            extra: a copy of the saved extra, which is modified.
            moved: the moved Parameters.
            undo: whether to keep what undo needs.

        Raises:
            CheckpointError: it cannot follow.
        """

    def _refusal(self, extra: Extra, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{where(self._name)}: this {extra.made_by[:60]} cannot follow the edit: {reason}."
            f' Leave it as it is with keep=["{self._name}"], or leave it out with'
            f' drop=["{self._name}"]'
        )


def follow(name: str, extra: Extra, net: Graph, place: str) -> Following:
    """Returns the follower of an extra for a net, at a place in its model; "" for a single net."""
    if extra.kind == "generator" or extra.made_by in _INDEPENDENT:
        return Following(name)
    if extra.shapes is not None:
        return _follow_optimizer(name, extra, net, place)
    if extra.made_by == AveragedModel.__name__ and not place:
        averaged = AveragedModel(net.model if isinstance(net, Adopted) else net)
        try:
            averaged.load_state_dict(extra.content)
            attach(averaged, net)
        except (GrapNetError, RuntimeError, ValueError, TypeError, AttributeError):
            # It may be the average of a model around the net: the sizes of its tensors decide.
            return _Other(name)
        return _Average(name, averaged)
    return _Other(name)


def _follow_optimizer(name: str, extra: Extra, net: Graph, place: str) -> Following:
    prefix = prefix_of(place)
    mine = [n for n, _ in net.named_parameters() if prefix + n in extra.owners]
    if not mine:
        return Following(name)
    try:
        return _Optimizer(name, extra, net, prefix, mine)
    except (OptimizerError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        return _Refusing(name, str(error) or type(error).__name__, set(mine))


class _Other(Following):
    """An extra that stays unchanged, unless an array in it has a length that coordinates or nodes
    had.
    """

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        for shape in _array_shapes(extra.content):
            if moved.sizes & set(shape):
                reason = f"it holds an array of shape {list(shape)}, which may be about the net"
                raise self._refusal(extra, reason)


class _Refusing(Following):
    """The state of an optimizer that cannot follow; it stays valid if none of its Parameters
    moved.
    """

    def __init__(self, name: str, reason: str, parameters: set[str]) -> None:
        super().__init__(name)
        self._reason = reason
        self._parameters = parameters

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        if moved.parameters & self._parameters:
            raise self._refusal(extra, self._reason)


class _Average(Following):
    """An averaged copy of the net, attached to it."""

    how = "followed"

    def __init__(self, name: str, averaged: AveragedModel) -> None:
        super().__init__(name)
        self._averaged = averaged

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        extra.content = self._averaged.state_dict()


class _Optimizer(Following):
    """The state of an optimizer of torch.optim, in an optimizer over the net's Parameters alone
    that is attached to the net.
    """

    how = "followed"

    def __init__(
        self, name: str, extra: Extra, net: Graph, prefix: str, names: Sequence[str]
    ) -> None:
        kind = getattr(torch.optim, extra.made_by, None)
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            raise OptimizerError("its class is not one of torch.optim")
        super().__init__(name)
        self._net = net
        self._known = {n for n, _ in net.named_parameters()}
        self._prefix = prefix
        self._places = {name: extra.owners[prefix + name] for name in names}
        # what the saved state calls the parameters, in order
        self._numbers: list[Any] = []
        for group in extra.content["param_groups"]:
            self._numbers += group["params"]
        self._optimizer = self._made(kind, extra)
        attach(self._optimizer, net)

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        # Parameters outside the net keep their state.
        parameters = dict(self._net.named_parameters())
        if parameters.keys() != self._known:
            raise self._refusal(extra, "Parameters came or left with a backend")
        assert extra.shapes is not None
        extra.shapes = list(extra.shapes)
        state = dict(extra.content["state"])
        for name, place in self._places.items():
            extra.shapes[place] = list(parameters[name].shape)
            if self._numbers[place] in state:
                state[self._numbers[place]] = dict(self._optimizer.state[parameters[name]])
        extra.content = {**extra.content, "state": state}
        others = {}
        for version, kept in extra.slots.items():
            others[version] = {n: s for n, s in kept.items() if not n.startswith(self._prefix)}
        if undo:
            for version, kept in undo_slots(self._optimizer, self._net).items():
                mine = {self._prefix + n: slot for n, slot in kept.items()}
                others.setdefault(version, {}).update(mine)
        extra.slots = {version: kept for version, kept in others.items() if kept}

    def _made(self, kind: type[Optimizer], extra: Extra) -> Optimizer:
        """Returns an optimizer of the saved class with the state of the net's Parameters."""
        parameters = dict(self._net.named_parameters())
        held = {}
        for name, place in self._places.items():
            assert extra.shapes is not None
            if extra.shapes[place] != list(parameters[name].shape):
                raise OptimizerError("it holds state of the net as it was before another edit")
            held[place] = parameters[name]
        groups = []
        numbers: dict[int, int] = {}  # in the new optimizer, by place in the saved one
        first = 0
        for saved in extra.content["param_groups"]:
            places = range(first, first + len(saved["params"]))
            first += len(saved["params"])
            mine = [place for place in places if place in held]
            if mine:
                options = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
                groups.append({**options, "params": [held[place] for place in mine]})
                for place in mine:
                    numbers[place] = len(numbers)
        make: Any = kind
        optimizer = make(groups)
        for place, parameter in held.items():
            saved = extra.content["state"].get(self._numbers[place], {})
            optimizer.state[parameter] = dict(saved)
        slots = {version: within(self._prefix, kept) for version, kept in extra.slots.items()}
        owners = {name: numbers[place] for name, place in self._places.items()}
        set_undo_slots(optimizer, [(slots, owners)])
        return optimizer


def _array_shapes(value: Any) -> Iterator[Sequence[int]]:
    """Yields the shape of every array in a tree."""
    if isinstance(value, Tensor | np.ndarray):
        yield tuple(value.shape)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _array_shapes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _array_shapes(item)
