"""A checkpoint opened for an edit of one of its nets: all else in it is written again as it was, or
follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grapnet as gn
from grapnet.checkpoint import container
from grapnet.checkpoint.extras import prefix_of, read_extra
from grapnet.checkpoint.fields import Fields, entry
from grapnet.checkpoint.history import Kept, keeps_undo, kept_history
from grapnet.checkpoint.model import read_places
from grapnet.checkpoint.net import describe_net, rebuild_net
from grapnet.core.graph import Graph

from .carried import Carried, Moved, carry
from .command import CommandError
from .files import reading


class Edits:
    """The commits of a net, whole; its journal may keep less of them."""

    def __init__(self, net: gn.GrapNet) -> None:
        self.commits: list[gn.Commit] = []
        net.follow(self)

    def prepare(self, graph: Graph, commit: gn.Commit) -> Callable[[], None]:
        """Returns what notes a commit."""
        return partial(self.commits.append, commit)


@dataclass
class Opened:
    """A checkpoint, the net of it that is to be edited, and what takes the extras along.

    Attributes:
        net: the net.
        place: where it stands in its model; "" when it is all of the file.
        undo: whether the file keeps what undo needs.
        history: how much of every commit the file keeps.
        carried: the extras, by name.
        dropped: the extras that are left out.
        edits: what has happened to the net since.
    """

    net: gn.GrapNet
    place: str
    undo: bool
    history: Kept
    carried: dict[str, Carried]
    dropped: tuple[str, ...]
    edits: Edits
    _document: dict[str, Any]
    _tensors: dict[str, Tensor]
    _prefix: str  # of the net's tensors
    _owned: dict[str, set[str]]  # extra -> the names of its tensors

    def content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the file after the edits that were made.

        Raises:
            CommandError: an extra cannot follow them.
        """
        moved = _moved(self.edits.commits)
        parts = dict(self._document["extras"])
        tensors = {
            name: tensor for name, tensor in self._tensors.items() if not self._is_of_net(name)
        }
        for name in self.dropped:
            del parts[name]
            tensors = {
                key: tensor for key, tensor in tensors.items() if key not in self._owned[name]
            }
        for name, carried in self.carried.items():
            described = carried.describe(parts[name], moved, undo=self.undo)
            if described is not None:
                tensors = {
                    key: tensor for key, tensor in tensors.items() if key not in self._owned[name]
                }
                parts[name], added = described
                tensors |= added
        own: dict[str, Tensor] = {}
        with torch.no_grad():
            described = describe_net(self.net, own, undo=self.undo, history=self.history)
        tensors |= {self._prefix + name: tensor for name, tensor in own.items()}
        return self._with_net({**self._document, "extras": parts}, described), tensors

    def _with_net(self, document: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
        if not self.place:
            return {**document, **described}
        parts = [
            {**part, **described} if self.place in part["places"] else part
            for part in document["nets"]
        ]
        return {**document, "nets": parts}

    def _is_of_net(self, name: str) -> bool:
        if self.place:
            return name.startswith(self._prefix)
        return not any(name in names for names in self._owned.values())


def open_checkpoint(
    path: Path, *, place: str | None, undo: bool | None, drop: Sequence[str], keep: Sequence[str]
) -> Opened:
    """Returns a checkpoint with one net made from it, ready to be edited.

    Args:
        path: the file.
        place: of the net in its model; may be left out where there is one.
        undo: whether to keep what undo needs; as the file does by default.
        drop: names of extras to leave out.
        keep: names of extras to leave as they are.

    Raises:
        CommandError: there is no such file, net or extra, one is to be left out and kept, or the
            file is damaged.
    """
    for name in drop:
        if name in keep:
            raise CommandError(
                f"--drop {name} and --keep {name} contradict each other", "leave one out"
            )
    with reading(path):
        document, tensors = container.read(path)
        net, place, prefix, part = _net_of(document, tensors, place)
        has_undo = keeps_undo(part["journal"])
        history = kept_history(part["journal"])
        extras, owned = {}, {}
        for name, part in entry(document, "extras", dict, "").items():
            own = Fields(tensors)
            extras[name], owned[name] = read_extra(name, part, own), own.read
    for option, names in (("drop", drop), ("keep", keep)):
        for name in names:
            if name not in extras:
                raise CommandError(
                    f"--{option} {name}: not in {path}",
                    f"it holds: {', '.join(extras) or 'no extras'}",
                )
    if has_undo is None:  # an older file: it names owners where it keeps undo
        named = any(
            name.startswith(prefix_of(place)) for extra in extras.values() for name in extra.owners
        )
        has_undo = bool(net.journal.undoable or net.journal.redoable or named)
    stays = {name: extra for name, extra in extras.items() if name not in drop}
    carried = {
        name: carry(name, extra, net, place, keep=name in keep) for name, extra in stays.items()
    }
    wanted = has_undo if undo is None else undo
    dropped, edits = tuple(dict.fromkeys(drop)), Edits(net)
    return Opened(
        net, place, wanted, history, carried, dropped, edits, document, tensors, prefix, owned
    )


def open_net(path: Path, place: str | None) -> gn.GrapNet:
    """Returns one net of a checkpoint, by its place where the file holds a model; raises as
    `open_checkpoint` does.
    """
    with reading(path):
        return _net_of(*container.read(path), place)[0]


def _net_of(
    document: dict[str, Any], tensors: dict[str, Tensor], wanted: str | None
) -> tuple[gn.GrapNet, str, str, dict[str, Any]]:
    """Returns a net, its place, what the names of its tensors begin with, and how it was
    described.
    """
    place, number = _chosen(read_places(document), wanted, is_model="nets" in document)
    prefix = f"nets.{number}." if place else ""
    part = document["nets"][number] if place else document
    return rebuild_net(part, Fields(tensors).under(prefix)), place, prefix, part


def _moved(commits: Sequence[gn.Commit]) -> Moved:
    """Returns what commits have moved: rows of layers, relations, trainable coordinates."""
    maps = [
        index
        for c in commits
        for part in (c.nodes, c.relations, c.parameters)
        for index in part.values()
    ]
    names = {name for c in commits for name, index in c.parameters.items() if not index.is_identity}
    return Moved(names, {index.old_size for index in maps if not index.is_identity} - {0})


def _chosen(places: list[list[str]], wanted: str | None, *, is_model: bool) -> tuple[str, int]:
    """Returns the place and the number of the net to edit; "" and 0 where the file holds a net and
    no model.
    """
    if not is_model:
        if wanted:
            raise CommandError(
                f"--net {wanted}: this file holds one net and no model", "leave out --net"
            )
        return "", 0
    listed = ", ".join(names[0] for names in places)
    if wanted is None:
        if len(places) > 1:
            raise CommandError(
                f"this file holds a model with {len(places)} nets", f"say --net, one of: {listed}"
            )
        return places[0][0], 0
    for number, names in enumerate(places):
        if wanted in names:
            return names[0], number
    raise CommandError(f"--net {wanted}: no net stands there", f"nets stand at: {listed}")
