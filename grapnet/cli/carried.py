"""What a file holds beside the net, on its way through an edit: it follows, stays as it is, or
stops the edit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet.checkpoint.extras import Extra, prefix_of, where
from grapnet.checkpoint.tree import encode
from grapnet.learning.optim import set_undo_slots, undo_slots

from .columns import counted
from .command import CommandError
from .places import places_of

# what these hold is about inputs, which no edit here changes
_APART = (
    "ReservoirMemory",
    "BalancedMemory",
)


class Carried(Protocol):
    """One extra of a file."""

    how: str  # for people: followed, or kept

    def describe(self, part: dict[str, Any], moved: "Moved", *, undo: bool) -> "Described | None":
        """Returns the extra after the edit, None when it is as before; raises CommandError when
        nobody can say.

        Args:
            part: how the file described it.
            moved: what the edit moved.
            undo: whether the file keeps what undo needs.
        """
        ...


class Moved(NamedTuple):
    """What an edit moved."""

    parameters: set[str]  # names of the net's Parameters whose coordinates are others, or elsewhere
    sizes: set[int]  # how many coordinates or nodes each vector had that it moved


class Cleared(NamedTuple):
    """How many coordinates of a net an optimizer keeps no state for any more, and how many start
    with clean state.
    """

    left_out: int
    clean: int

    def __str__(self) -> str:
        parts = [f"the state of {counted(self.left_out, 'frozen coordinate')} is left out"] * bool(
            self.left_out
        )
        parts += [f"state starts clean for {counted(self.clean, 'coordinate')}"] * bool(self.clean)
        return ", ".join(parts)


Described = tuple[dict[str, Any], dict[str, Tensor]]  # JSON, and the tensors it names


def carry(name: str, extra: Extra, net: gn.GrapNet, place: str, *, keep: bool) -> Carried:
    """Returns what takes an extra through the edits of a net.

    Args:
        name: of the extra.
        extra: what the file says about it.
        net: the net to be edited; what can follow it is attached.
        place: of the net in its model, "" when it is all of the file.
        keep: whether to leave the extra as it is, whatever it is about.
    """
    if keep or extra.kind == "generator" or extra.made_by in _APART:
        return AsItIs(name, extra, trusted=True)
    if extra.shapes is not None:
        found = None
        try:
            found = places_of(name, extra, net, prefix_of(place))
            return (
                FollowingOptimizer(name, extra, net, place, found)
                if found
                else AsItIs(name, extra, trusted=True)
            )
        except CommandError as error:
            return Staying(error, None if found is None else set(found))
    if extra.made_by == AveragedModel.__name__ and not place:
        averaged = AveragedModel(net)
        try:
            averaged.load_state_dict(extra.content)
            gn.attach(averaged, net)
        except (gn.GrapNetError, RuntimeError, ValueError, TypeError, AttributeError):
            # of a model around the net, say: left to the sizes of its tensors
            return AsItIs(name, extra)
        return FollowingAverage(name, averaged)
    return AsItIs(name, extra)


class AsItIs:
    """An extra that stays as it is, unless one of its arrays may hold a value a coordinate of what
    was moved.
    """

    how = "kept"

    def __init__(self, name: str, extra: Extra, *, trusted: bool = False) -> None:
        self._name, self._extra, self._trusted = name, extra, trusted

    def describe(self, part: dict[str, Any], moved: Moved, *, undo: bool) -> Described | None:
        """Returns None; raises CommandError when an array has a length that coordinates or nodes
        had.
        """
        shapes = (
            []
            if self._trusted
            else [shape for shape in _shapes(self._extra.content) if moved.sizes & set(shape)]
        )
        if shapes:
            raise CommandError(
                f"{self._name!r} ({self._extra.made_by[:60]}) holds an array of shape"
                f" {list(shapes[0])}, which may be about what this edit moves, and it cannot"
                " follow",
                f"--keep {self._name} leaves it as it is, --drop {self._name} leaves it out",
            )
        return None


class Staying:
    """The state of an optimizer that cannot follow, which is as good as before where none of its
    Parameters moved.

    Args:
        error: why it cannot follow.
        parameters: names of those of the net that it holds; None when nobody knows.
    """

    how = "kept"

    def __init__(self, error: CommandError, parameters: set[str] | None) -> None:
        self._error, self._parameters = error, parameters

    def describe(self, part: dict[str, Any], moved: Moved, *, undo: bool) -> Described | None:
        """Returns None; raises CommandError when a Parameter moved that the optimizer may hold."""
        if moved.parameters if self._parameters is None else moved.parameters & self._parameters:
            raise self._error
        return None


class FollowingOptimizer:
    """The state of an optimizer of torch.optim, attached to the net in an optimizer made for it."""

    how = "followed"

    def __init__(
        self, name: str, extra: Extra, net: gn.GrapNet, place: str, places: dict[str, int]
    ) -> None:
        self._name, self._extra, self._net, self._prefix = name, extra, net, prefix_of(place)
        # names of the net's Parameters -> places among all of the optimizer's
        self._places = places
        self._numbers = [
            number for group in extra.content["param_groups"] for number in group["params"]
        ]
        self._optimizer = self._made()
        try:
            gn.attach(self._optimizer, net)
        except gn.OptimizerError as error:
            raise cannot_follow(name, extra, str(error)) from None

    def describe(self, part: dict[str, Any], moved: Moved, *, undo: bool) -> Described | None:
        """Returns its state after the edit, with that of other Parameters as it was."""
        content, parameters = self._extra.content, dict(self._net.named_parameters())
        state, shapes = dict(content["state"]), list(part["shapes"])
        for name, place in self._places.items():
            shapes[place] = list(parameters[name].shape)
            if self._numbers[place] in state:
                state[self._numbers[place]] = dict(self._optimizer.state[parameters[name]])
        slots = {
            v: {n: s for n, s in kept.items() if not self._is_mine(n)}
            for v, kept in self._extra.slots.items()
        }
        for version, kept in undo_slots(self._optimizer, self._net).items() if undo else ():
            slots.setdefault(version, {}).update({self._prefix + n: s for n, s in kept.items()})
        tensors: dict[str, Tensor] = {}
        described = {
            **part,
            "shapes": shapes,
            "slots": encode(
                {v: kept for v, kept in slots.items() if kept},
                f"{where(self._name)}.slots",
                tensors,
            ),
            "owners": (
                part["owners"]
                | {self._prefix + name: place for name, place in self._places.items()}
            ),
            "tree": encode({**content, "state": state}, where(self._name), tensors),
        }
        return described, tensors

    def cleared(self, commits: Sequence[gn.Commit]) -> Cleared:
        """Returns what freezing and unfreezing has done to its state; undo and redo bring theirs
        along.
        """
        parameters, left_out, clean = dict(self._net.named_parameters()), 0, 0
        for commit in commits:
            turned = commit.counts["coordinates_turned"] if commit.undoes is None else 0
            for name, index in commit.parameters.items() if turned else ():
                state = (
                    self._optimizer.state.get(parameters[name], {}) if name in self._places else {}
                )
                if any(
                    isinstance(value, Tensor) and value.shape == parameters[name].shape
                    for value in state.values()
                ):
                    left_out, clean = left_out + len(index.removed), clean + len(index.inserted)
        return Cleared(left_out, clean)

    def _made(self) -> Optimizer:
        """Returns an optimizer of the saved class, over the net's Parameters alone, with their
        state.
        """
        make = _maker(self._extra.made_by)
        if make is None:
            raise cannot_follow(self._name, self._extra, "its class is not one of torch.optim")
        parameters, content = dict(self._net.named_parameters()), self._extra.content
        held = {place: parameters[name] for name, place in self._places.items()}
        groups, first = [], 0
        for saved in content["param_groups"]:
            mine = [
                held[place] for place in range(first, first + len(saved["params"])) if place in held
            ]
            first += len(saved["params"])
            options = {
                key: value for key, value in saved.items() if key not in ("params", "param_names")
            }
            groups += [{**options, "params": mine}] if mine else []
        try:
            optimizer = make(groups)
        except (TypeError, ValueError, RuntimeError) as error:
            raise cannot_follow(self._name, self._extra, str(error)) from None
        for place, parameter in held.items():
            optimizer.state[parameter] = dict(content["state"].get(self._numbers[place], {}))
        order = {
            id(parameter): n
            for n, parameter in enumerate(p for group in groups for p in group["params"])
        }
        slots = {
            version: {
                name.removeprefix(self._prefix): s
                for name, s in kept.items()
                if self._is_mine(name)
            }
            for version, kept in self._extra.slots.items()
        }
        set_undo_slots(
            optimizer, [(slots, {name: order[id(parameters[name])] for name in self._places})]
        )
        return optimizer

    def _is_mine(self, name: str) -> bool:
        return name.startswith(self._prefix)


class FollowingAverage:
    """An averaged copy of the net."""

    how = "followed"

    def __init__(self, name: str, averaged: AveragedModel) -> None:
        self._name, self._averaged = name, averaged

    def describe(self, part: dict[str, Any], moved: Moved, *, undo: bool) -> Described | None:
        """Returns its state after the edit."""
        tensors: dict[str, Tensor] = {}
        return {
            **part,
            "tree": encode(self._averaged.state_dict(), where(self._name), tensors),
        }, tensors


def cannot_follow(name: str, extra: Extra, reason: str) -> CommandError:
    """Returns the error of an optimizer's state that would be lost."""
    told = (reason.strip().splitlines() or [""])[0]
    return CommandError(
        f"{name!r} ({extra.made_by[:60]}) holds state of the net that cannot follow an edit:"
        f" {told}",
        f"--drop {name} leaves it out; or edit in Python, with the optimizer attached",
    )


def _maker(name: str) -> Callable[..., Optimizer] | None:
    """Returns the class of torch.optim that is called so, None when there is none."""
    kind = getattr(torch.optim, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Optimizer) else None


def _shapes(value: Any) -> Iterator[Sequence[int]]:
    """Yields the shape of every array in a tree."""
    if isinstance(value, Tensor | np.ndarray):
        yield tuple(value.shape)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _shapes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _shapes(item)
