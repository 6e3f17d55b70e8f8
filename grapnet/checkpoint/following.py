"""Extras of an opened checkpoint that follow the edits of its nets, stay as they are, or refuse."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from grapnet.core._errors import CheckpointError, GrapNetError, OptimizerError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.following.optimizers import attach, set_undo_slots, undo_slots
from grapnet.network import GrapNet

from .extras import Extra, prefix_of, where

# What these hold is about inputs, which no edit changes.
_INDEPENDENT = ("ReservoirMemory", "BalancedMemory")


class Moved:
    """What the commits since a checkpoint was opened have moved in one net.

    Attributes:
        parameters: names of Parameters whose coordinates came, left or moved.
        sizes: how many coordinates or nodes each vector had that moved.
    """

    def __init__(self, net: GrapNet) -> None:
        self.parameters: set[str] = set()
        self.sizes: set[int] = set()
        net.follow(self)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Returns what notes a commit."""
        return partial(self._note, commit)

    def _note(self, commit: Commit) -> None:
        for name, index in commit.parameters.items():
            if not index.is_identity:
                self.parameters.add(name)
        for part in (commit.nodes, commit.relations, commit.parameters):
            self.sizes |= {index.old_size for index in part.values() if not index.is_identity}
        self.sizes.discard(0)


class Following(Protocol):
    """What becomes of one extra while one net is edited."""

    how: str  # "followed" or "kept"

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        """Brings an extra to what it is after the edits.

        Args:
            extra: what the file held, in a copy that may change.
            moved: what the edits moved.
            undo: whether to keep what undo needs.

        Raises:
            CheckpointError: it cannot follow.
        """
        ...


def follow(name: str, extra: Extra, net: GrapNet, place: str) -> Following:
    """Returns what takes an extra through the edits of a net.

    Args:
        name: of the extra.
        extra: what the file holds about it.
        net: the net to be edited.
        place: of the net in its model, "" when it is all of the file.
    """
    if extra.kind == "generator" or extra.made_by in _INDEPENDENT:
        return _Kept(name, extra, is_independent=True)
    if extra.shapes is not None:
        return _follow_optimizer(name, extra, net, place)
    if extra.made_by == AveragedModel.__name__ and not place:
        averaged = AveragedModel(net)
        try:
            averaged.load_state_dict(extra.content)
            attach(averaged, net)
        except (GrapNetError, RuntimeError, ValueError, TypeError, AttributeError):
            # It may be the average of a model around the net: the sizes of its tensors decide.
            return _Kept(name, extra)
        return _Average(averaged)
    return _Kept(name, extra)


def _follow_optimizer(name: str, extra: Extra, net: GrapNet, place: str) -> Following:
    prefix = prefix_of(place)
    mine = [n for n, _ in net.named_parameters() if prefix + n in extra.owners]
    if not mine:
        return _Kept(name, extra, is_independent=True)
    try:
        return _Optimizer(name, extra, net, prefix, mine)
    except (OptimizerError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return _Refusing(_refusal(name, extra, reason), set(mine))


class _Kept:
    """An extra that stays as it is, unless one of its arrays may hold a value a coordinate of what
    was moved.
    """

    how = "kept"

    def __init__(self, name: str, extra: Extra, *, is_independent: bool = False) -> None:
        self._name = name
        self._extra = extra
        self._is_independent = is_independent

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        """Raises CheckpointError when an array has a length that coordinates or nodes had."""
        if self._is_independent:
            return
        for shape in _shapes(self._extra.content):
            if moved.sizes & set(shape):
                reason = f"it holds an array of shape {list(shape)}, which may be about the net"
                raise _refusal(self._name, self._extra, reason)


class _Refusing:
    """The state of an optimizer that cannot follow; it stays valid where none of its Parameters
    moved.
    """

    how = "kept"

    def __init__(self, error: CheckpointError, parameters: set[str]) -> None:
        self._error = error
        self._parameters = parameters

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        """Raises CheckpointError when a Parameter moved that the optimizer holds."""
        if moved.parameters & self._parameters:
            raise self._error


class _Optimizer:
    """The state of an optimizer of torch.optim, in an optimizer over the net's Parameters alone
    that is attached to the net.
    """

    how = "followed"

    def __init__(
        self, name: str, extra: Extra, net: GrapNet, prefix: str, names: Sequence[str]
    ) -> None:
        kind = getattr(torch.optim, extra.made_by, None)
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            raise OptimizerError("its class is not one of torch.optim")
        self._name = name
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
        """Puts the state after the edits in the place of that before them; other Parameters keep
        theirs.
        """
        parameters = dict(self._net.named_parameters())
        if parameters.keys() != self._known:
            raise _refusal(self._name, extra, "Parameters came or left with a backend")
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
        order: list[torch.nn.Parameter] = []
        first = 0
        for saved in extra.content["param_groups"]:
            places = range(first, first + len(saved["params"]))
            first += len(saved["params"])
            mine = [held[place] for place in places if place in held]
            if mine:
                options = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
                groups.append({**options, "params": mine})
                order += mine
        make: Any = kind
        optimizer = make(groups)
        for place, parameter in held.items():
            saved = extra.content["state"].get(self._numbers[place], {})
            optimizer.state[parameter] = dict(saved)
        slots = {}
        for version, kept in extra.slots.items():
            mine = {n: s for n, s in kept.items() if n.startswith(self._prefix)}
            slots[version] = {n.removeprefix(self._prefix): s for n, s in mine.items()}
        numbers = {id(parameter): n for n, parameter in enumerate(order)}
        owners = {name: numbers[id(parameters[name])] for name in self._places}
        set_undo_slots(optimizer, [(slots, owners)])
        return optimizer


class _Average:
    """An averaged copy of the net, attached to it."""

    how = "followed"

    def __init__(self, averaged: AveragedModel) -> None:
        self._averaged = averaged

    def update(self, extra: Extra, moved: Moved, *, undo: bool) -> None:
        """Puts the average after the edits in the place of that before them."""
        extra.content = self._averaged.state_dict()


def _refusal(name: str, extra: Extra, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{where(name)}: this {extra.made_by[:60]} cannot follow the edit: {reason}. Leave it as it"
        f' is with keep=["{name}"], or leave it out with drop=["{name}"]'
    )


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
