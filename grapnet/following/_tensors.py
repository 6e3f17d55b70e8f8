"""gn.follow: tensors with one entry per coordinate, which move with the Parameters of a net."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from grapnet.core._commit import Tracked
from grapnet.core._errors import CheckpointError
from grapnet.core._graph import Column, Graph
from grapnet.core._grid_map import CellMap
from grapnet.core._journal import Commit

Newborn = float | Literal["value"]
Entries = dict[str, Tensor]  # by the name of the Parameter


def follow(net: nn.Module, tensors: Mapping[str, Tensor], *, newborn: Newborn = 0.0) -> "Followed":
    """Copies tensors with the shapes of Parameters of a net, and moves the copies with every
    commit.

    The entry of a surviving coordinate moves with it. A new coordinate, grown or unfrozen, starts
    from `newborn`. A removed coordinate, cut or frozen, gets its entry back by undo, by redo or at
    the end of a trial; unfreezing starts from `newborn`.

    Args:
        net: a net, or a model with nets inside; tensors of other Parameters do not change.
        tensors: tensors by the names of `net.named_parameters()`, some or all of them, each of the
            shape of its Parameter and of any dtype, on any device.
        newborn: the entry of a new coordinate: a number, or "value" for the value of the
            coordinate.

    Returns:
        A mapping of the tensors, which follow as long as this object exists.

    Raises:
        TypeError: the module contains no net.
        ValueError: a name is unknown, or a tensor has another shape.

    Examples:
        >>> import torch
        >>> import grapnet as gn
        >>> net = gn.GrapNet([3, 2])
        >>> importances = gn.follow(net, {"layers.1.bias": torch.tensor([5.0, 6.0])})
        >>> with net.edit(reason="one more output") as edit:
        ...     edit.connect(net.layers[0], edit.add_nodes(1, 1))
        >>> importances["layers.1.bias"]
        tensor([5., 6., 0.])
        >>> commit = net.undo()
        >>> importances["layers.1.bias"]
        tensor([5., 6.])
    """
    if isinstance(newborn, str) and newborn != "value":
        raise ValueError(f'newborn is a number or "value", got {newborn!r}')
    graphs = [(name, part) for name, part in net.named_modules() if isinstance(part, Graph)]
    if not graphs:
        raise TypeError(f"this {type(net).__name__} contains no nets to follow")
    parameters = dict(net.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters:
            raise ValueError(f"{name!r} is not a name of named_parameters()")
        _require_shape(name, tensor, parameters[name])
    outside = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    parts: list[Tracked[Entries, Entries]] = []
    for place, graph in graphs:
        prefix = ""
        if place:
            prefix = f"{place}."
        own = [prefix + name for name, _ in graph.named_parameters()]
        entries = {name: outside.pop(name) for name in own if name in outside}
        part = _NetEntries(prefix, entries, newborn)
        graph.follow(part)
        parts.append(part)
    parts.append(Tracked(outside, carry=_stay))
    return Followed(list(tensors), parts)


class Followed(Mapping[str, Tensor]):
    """Tensors that `gn.follow` moves with the Parameters of a net, by the names of these.

    Reading returns the tensor itself, which can be modified; an edit replaces it, so read it again
    afterwards. Assigning copies. A copy of this object is a plain dict, which does not follow.

    `gn.save(path, net, old=followed)` and `gn.restore(path, old=followed)` save the tensors, but
    not what undo would restore: after a restart, restored coordinates start from `newborn`.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Tracked[Entries, Entries]]) -> None:
        self._names = names  # in the order in which they were given
        self._parts = parts  # one for every net, and one for what is in none

    def __getitem__(self, name: str) -> Tensor:
        return self._part(name).state[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor; raises ValueError if its shape differs from the Parameter's."""
        part = self._part(name)
        _require_shape(name, tensor, part.state[name])
        part.replace({**part.state, name: tensor.detach().clone()})

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if any(name in part.state for part in self._parts))

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def state_dict(self) -> Entries:
        """Returns copies of the tensors."""
        return {name: tensor.clone() for name, tensor in self.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            CheckpointError: the state has other names or shapes; nothing was changed.
        """
        shapes = {name: tensor.shape for name, tensor in self.items()}
        if {name: getattr(tensor, "shape", None) for name, tensor in state.items()} != shapes:
            raise CheckpointError("the state belongs to other Parameters, or has other sizes")
        for name, tensor in state.items():
            self[name] = tensor

    def _part(self, name: str) -> Tracked[Entries, Entries]:
        for part in self._parts:
            if name in part.state:
                return part
        raise KeyError(name)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.items())
        return f"Followed({shapes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _NetEntries(Tracked[Entries, Entries]):
    """The tensors that follow one net."""

    def __init__(self, prefix: str, entries: Entries, newborn: Newborn) -> None:
        self._prefix = prefix
        super().__init__(
            entries,
            take=partial(_taken, prefix),
            carry=partial(_carried, prefix, newborn),
            give=partial(_given, prefix),
            name="gn.follow",
        )

    def prepare_columns(
        self, graph: Graph, coming: Sequence[Column], leaving: Sequence[Column]
    ) -> Callable[[], None]:
        """Drops the tensors of removed columns."""
        gone = {self._prefix + column.parameter_name for column in leaving}
        staying = {name: tensor for name, tensor in self.state.items() if name not in gone}
        return partial(self.replace, staying)


def _moves(prefix: str, entries: Entries, commit: Commit) -> Iterator[tuple[str, CellMap]]:
    """Yields the names whose coordinates a commit moves, with their maps."""
    for name in entries:
        index = commit.parameters.get(name.removeprefix(prefix))
        if index is not None and not index.is_identity:
            yield name, index


def _taken(prefix: str, entries: Entries, commit: Commit) -> Entries:
    """Returns the entries of removed coordinates."""
    taken = {}
    for name, index in _moves(prefix, entries, commit):
        taken[name] = index.take(entries[name])
    return taken


def _carried(prefix: str, newborn: Newborn, entries: Entries, commit: Commit) -> Entries:
    """Returns the entries after a commit."""
    moved = dict(entries)
    for name, index in _moves(prefix, entries, commit):
        born = newborn
        if born == "value":
            content = commit.view.content(name.removeprefix(prefix))
            born = index.inverse().take(content)
        moved[name] = index.carry(entries[name], born)
    return moved


def _given(prefix: str, present: Entries, kept: Entries, commit: Commit) -> Entries:
    """Returns the entries with the kept ones at restored coordinates."""
    given = dict(present)
    for name, index in _moves(prefix, present, commit):
        if name in kept and index.n_born:
            # `_carried` has made this tensor for this commit.
            index.give(given[name], kept[name])
    return given


def _stay(entries: Entries, commit: Commit) -> Entries:
    """Returns the entries of Parameters outside of nets, which no commit moves."""
    return entries


def _require_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has the shape {list(like.shape)} at present, got a tensor of shape"
            f" {list(tensor.shape)}"
        )
