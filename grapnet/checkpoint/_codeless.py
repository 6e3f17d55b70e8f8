"""The graph of an adopted model from its file alone, without the code of the model.

Its spaces, axes and tensors are in the file, so that everything that needs no forward pass works:
looking, comparing, drawing, cutting and freezing relations, owners, undo and redo. Sizes of
spaces cannot change: only the code tells which numbers of modules follow, such as `num_heads`.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from grapnet.core._change import AttributeChange, Change, DepthChange
from grapnet.core._errors import CheckpointError, EditError
from grapnet.core._layer import Roster
from grapnet.core._opened import holders_of, set_opened
from grapnet.spaces import Adopted
from grapnet.spaces._axes import Expression
from grapnet.spaces._costs import Costs
from grapnet.spaces._discovery import AtomRecord, Typed
from grapnet.spaces._gates import Gates

from ._adopted import SavedModel
from ._codec import Fields, entry
from ._journal import is_number, rebuild_journal
from ._model import EXTRA

Places = tuple[tuple[str, int], ...]  # tensors with one of their dimensions each


class Codeless(Adopted):
    """An adopted model whose modules hold their tensors and numbers, and cannot run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises EditError."""
        raise _without_code("run the model")

    def _foreseen(
        self, change: Change, before: list[int], after: list[int]
    ) -> list[AttributeChange]:
        raise _without_code("add or remove nodes")

    def _deepened(self, asked: Any) -> Change:
        raise _without_code("insert or remove blocks")

    def _same_depth(self, change: DepthChange) -> DepthChange:
        raise _without_code("insert or remove blocks")

    def _macs(self) -> int:
        # Unknown: only the code tells what the model computes.
        return 0

    def _current_costs(self) -> Costs:
        raise _without_code("count multiply-adds")

    def prove(self, spaces: Iterable[Any]) -> None:
        """Raises EditError."""
        raise _without_code("compare values")

    def _attribute(self, path: str, name: str) -> Any:
        try:
            # A number that only the journal names is set when all commits are read.
            return vars(self.model.get_submodule(path)).get(name, 0)
        except AttributeError:
            return 0


class _Part(nn.Module):
    """A module without its code."""


class _PartWithState(_Part):
    """A module that has an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Any = None

    def get_extra_state(self) -> Any:
        """Returns the state of the file."""
        return self._state

    def set_extra_state(self, state: Any) -> None:
        """Takes a state of a file."""
        self._state = state


def rebuild_codeless(document: Any, fields: Fields) -> Codeless:
    """Returns the graph of an adopted model; raises CheckpointError, with the field, if the file
    is invalid.
    """
    saved = SavedModel.read(document, fields)
    model = _parts_of(saved)
    typed = _typed_of(saved)
    net = Codeless(model, typed, Gates(model, typed, []))
    if [space._atom for space in net.spaces] != [space.atom for space in saved.spaces]:
        raise CheckpointError("adopted.spaces: do not follow from the axes")
    for space, kept in zip(net.spaces, saved.spaces, strict=True):
        space.name = kept.name
        space._proof = kept.proof
        space._enrol(Roster.of_space(kept.uids, kept.owners))
    net._next_uid = saved.next_uid
    net._version = saved.version
    for one in saved.numbers:
        _set_number(model, one.module, one.name, one.now)
        net._first_numbers[one.module, one.name] = one.first
    net.journal = rebuild_journal(
        entry(document, "journal", dict, ""), fields, net, saved.version, saved.next_uid
    )
    # The last commit that has set a number tells what it is.
    for commit in net.journal.commits:
        for change in commit.change.attributes:
            _set_number(model, change.module, change.name, change.after)
    return net


def _set_number(model: nn.Module, path: str, name: str, value: Any) -> None:
    part = _part_at(model, path)
    if hasattr(part, name) and not is_number(getattr(part, name)):
        raise CheckpointError(f"adopted.numbers: {path}.{name} is not the name of a number")
    setattr(part, name, value)


def _parts_of(saved: SavedModel) -> nn.Module:
    """Returns modules without code that hold the tensors of a file under their names."""
    model = _Part()
    held: dict[str, Tensor] = {}
    for name, value in saved.state.items():
        path, _, own = name.rpartition(".")
        if own == EXTRA:
            part = _part_at(model, path)
            part.__class__ = _PartWithState
            part.set_extra_state(value)
            continue
        first = saved.ties.get(name, name)
        if first not in held:
            held[first] = value
            if first not in saved.buffers:
                is_trained = value.is_floating_point() and first not in saved.fixed
                held[first] = nn.Parameter(value, requires_grad=is_trained)
        part = _part_at(model, path)
        kept = part._parameters if isinstance(held[first], nn.Parameter) else part._buffers
        kept[own] = held[first]
    holders = holders_of(model)
    for name, opened in saved.opened.items():
        having = holders.get(id(held.get(name)))
        if having is None:
            raise CheckpointError(f"adopted.opened: {name!r} is the name of no Parameter")
        for module, own in having:
            set_opened(module, own, opened)
    return model


def _part_at(model: nn.Module, path: str) -> Any:
    """Returns the module at a path, which is made if it does not exist."""
    part = model
    for name in path.split(".") if path else ():
        inside = part._modules.get(name)
        if inside is None:
            inside = _Part()
            part._modules[name] = inside
        part = inside
    return part


def _typed_of(saved: SavedModel) -> Typed:
    """Returns the axes of a file as discovery would."""
    records = [AtomRecord(size, (), frozenset()) for size in saved.first.sizes]
    writers = {}
    readers = {}
    for space in saved.spaces:
        records[space.atom] = AtomRecord(saved.first.sizes[space.atom], space.pins, space.marks)
        writers[space.atom] = space.writers
        readers[space.atom] = space.readers
    axes = saved.first.axes
    outputs = _by_module(writers.values(), axes)
    inputs = _by_module(readers.values(), axes)
    return Typed(
        tuple(records),
        axes,
        readers,
        writers,
        outputs,
        inputs,
        unread=(),
        unknown=(),
        grouped=saved.grouped,
    )


def _by_module(
    places: Iterable[Places], axes: Mapping[str, tuple[Expression, ...]]
) -> dict[str, tuple[Expression, ...]]:
    """Returns the axes of tensors by the modules that have the tensors."""
    found: dict[str, tuple[Expression, ...]] = {}
    for tensor, dim in itertools.chain.from_iterable(places):
        path = tensor.rpartition(".")[0]
        found[path] = (*found.get(path, ()), axes[tensor][dim])
    return found


def _without_code(verb: str) -> EditError:
    return EditError(
        f"cannot {verb}: this graph is that of a file, without the code of its model. Restore the"
        " file into an adopted model: gn.restore(path, into=net)"
    )
