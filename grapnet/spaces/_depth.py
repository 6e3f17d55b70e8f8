"""Depth: the change of a graph when blocks of its model are added or removed.

A `Plan` shows that the model runs with its blocks after the edit, and which of its numbers change.
The description of the model is then built again; spaces that stay keep their nodes, names and
verdicts.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grapnet.core._change import BlockParameter, DepthChange, Labels
from grapnet.core._errors import EditError
from grapnet.core._grid import Grid, named_grids
from grapnet.core._layer import Roster

from ._blocks import Asked, Insertion, Number, Slot, Stacks, own_indices
from ._discovery import Typed
from ._gates import Gates
from ._grouped import relations_of
from ._plan import Match, Plan, copied_block, others_have, set_to_zero, stream_of
from ._space import Space, spaces_of

if TYPE_CHECKING:
    from ._adopted import Adopted


@dataclass(frozen=True, eq=False)
class Build:
    """A model at one depth: its blocks and numbers, and what the graph knows of it.

    Attributes:
        net: the graph, held weakly.
        blocks: the containers with their contents.
        numbers: the objects, names and values of numbers.
        spaces: the spaces, in order.
        records: the attributes that each space has at this depth.
        attributes: the attributes that the graph has at this depth.
    """

    net: "weakref.ref[Adopted]"
    blocks: tuple[tuple[nn.Module, dict[str, nn.Module]], ...]
    numbers: tuple[tuple[Any, str, Any], ...]
    spaces: list[Space]
    records: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Build":
        return self

    def installs(self) -> list[Callable[[], None]]:
        """Returns the assignments that bring the model and the graph to this depth."""
        net = self.net()
        assert net is not None
        found: list[Callable[[], None]] = []
        for container, modules in self.blocks:
            found.append(partial(vars(container).__setitem__, "_modules", modules))
        for holder, name, value in self.numbers:
            found.append(partial(setattr, holder, name, value))
        for space, record in zip(self.spaces, self.records, strict=True):
            found.append(partial(vars(space).update, record))
        found.append(partial(vars(net).__setitem__, "_spaces", self.spaces))
        found.append(partial(vars(net).update, self.attributes))
        return found


def deepened(net: "Adopted", asked: Sequence[Asked]) -> DepthChange:
    """Returns the change that inserts and removes blocks; the model is not touched.

    Raises:
        EditError: the model would not run, or a new block would change what it returns.
    """
    stacks = Stacks(net.model, asked)
    for one in asked:
        index = one.after if isinstance(one, Insertion) else one.index
        _require_stream(net._typed, stacks, one.path, index)
    plan = Plan(net, stacks)
    numbers, typed, match = plan.fit()
    zeros = plan.zeros(typed)
    _make_blocks(net.model, stacks, zeros)
    change = _Result(net, stacks, numbers, typed, match, plan).change()
    return replace(change, asked=tuple(asked))


def _require_stream(typed: Typed, stacks: Stacks, path: str, index: int) -> None:
    """Raises EditError unless a block writes the spaces that it reads."""
    stack = next(stack for stack in stacks if stack.path == path)
    block = stack.path_before(index)
    if not stream_of(typed, block):
        raise EditError(
            f"the output of {block} has other nodes than its input, so that the model needs it as"
            " it is; only blocks that write the space which they read, as residual blocks do, come"
            " and leave"
        )


def _make_blocks(model: nn.Module, stacks: Stacks, zeros: dict[Slot, list[str]]) -> None:
    """Makes the blocks that come, with their indices and zeros."""
    for stack, number, slot, _ in stacks.new_slots():
        slot.block = copied_block(model, stack.blocks[slot.origin])
        for module, name, value in own_indices(stack, number, slot.block):
            setattr(module, name, value)
        set_to_zero(slot.block, zeros[slot])


class _Result:
    """The graph after an edit of blocks that passed."""

    def __init__(
        self,
        net: "Adopted",
        stacks: Stacks,
        numbers: list[Number],
        typed: Typed,
        match: Match,
        plan: Plan,
    ) -> None:
        self._net = net
        self._stacks = stacks
        self._numbers = numbers
        self._match = match
        self._typed = self._with_first_sizes(typed)
        self._plan = plan
        # As many spaces as the graph will have, in order, over the atoms of the plan.
        self._made = spaces_of(typed)
        self._spaces = self._spaces_after()

    def change(self) -> DepthChange:
        """Returns the change."""
        before = set(map(id, self._net.spaces))
        after = set(map(id, self._spaces))
        coming = [space for space in self._spaces if id(space) not in before]
        leaving = [space for space in self._net.spaces if id(space) not in after]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        came = [stack.path_after(number) for stack, number, _, _ in self._stacks.new_slots()]
        left = []
        for stack in self._stacks:
            left += [stack.path_before(index) for index in stack.removed]
        renamed = {}
        for name in self._net._stores():
            other = self._stacks.renamed(name)
            if other is not None and other != name:
                renamed[name] = other
        return DepthChange(
            came=tuple(came),
            left=tuple(left),
            born=torch.cat([none, *(space.uid for space in coming)]),
            gone=torch.cat([none, *(space.uid for space in leaving)]),
            renamed=renamed,
            coming=tuple(self._coming()),
            leaving=tuple(self._leaving()),
            before=self._build_before(),
            after=self._build_after(),
        )

    def _with_first_sizes(self, typed: Typed) -> Typed:
        """Returns the axes with the sizes that the spaces had when the model was adopted."""
        atoms = list(typed.atoms)
        for new, old in self._match.origins.items():
            atoms[new] = replace(atoms[new], size=self._net._typed.atoms[old].size)
        return replace(typed, atoms=tuple(atoms))

    def _spaces_after(self) -> list[Space]:
        """Returns the spaces after the edit: those that stay as they are, and new ones."""
        by_atom = {space._atom: space for space in self._net.spaces}
        next_uid = self._net._next_uid
        found: list[Space] = []
        for made in self._made:
            old = self._match.origins.get(made._atom)
            stays = old is not None and self._match.same.get(old) == made._atom
            origin = by_atom.get(old) if old is not None else None
            count = len(made)
            if origin is not None and len(origin) == 1:
                # The plan has more, to tell it from other single nodes.
                count = 1
            if stays and origin is not None and len(origin) == count:
                found.append(origin)
                continue
            uids = torch.arange(next_uid, next_uid + count, device="cpu")
            next_uid += count
            made._enrol(Roster.of_space(uids, Labels.uniform(self._owner(made), count)))
            made._bind(self._net)
            found.append(made)
        self._name(found)
        return found

    def _name(self, spaces: list[Space]) -> None:
        """Gives spaces that stay their names, as far as the modules that they are named after keep
        theirs, and new ones names that no other has.
        """
        names: dict[Space, str] = {}
        for space, made in zip(spaces, self._made, strict=True):
            if space is not made:
                name = self._stacks.renamed(space.name)
                if name is not None:
                    names[space] = name
        taken = set(names.values())
        for space, made in zip(spaces, self._made, strict=True):
            name = names.get(space)
            if name is None:
                stem = made.name.partition("#")[0]
                name = stem
                repeats = 1
                while name in taken:
                    repeats += 1
                    name = f"{stem}#{repeats}"
                taken.add(name)
            made.name = name

    def _owner(self, made: Space) -> str | None:
        """Returns the tag for the nodes of a new space."""
        for name, _ in made._members:
            _, slot = self._stacks.origin(name)
            if slot is not None and slot.asked is not None:
                return slot.asked.owner
        return None

    def _coming(self) -> Iterator[BlockParameter]:
        """Yields the Parameters of new blocks, each beside the one that it copies."""
        for stack, number, slot, asked in self._stacks.new_slots():
            outside = {id(parameter) for parameter in self._net.model.parameters()}
            path = stack.path_after(number)
            copied = dict(stack.blocks[slot.origin].named_parameters())
            for name, parameter in slot.block.named_parameters():
                if id(parameter) not in outside:
                    full = f"{path}.{name}"
                    yield BlockParameter(full, path, parameter, copied[name], asked.copies_state)

    def _leaving(self) -> Iterator[BlockParameter]:
        """Yields the Parameters of removed blocks, each beside that of a neighbour that stays."""
        for stack in self._stacks:
            staying = [slot for slot in stack.slots if slot.asked is None]
            for index in stack.removed:
                nearest = min(staying, key=lambda slot: abs(slot.origin - index))
                beside = dict(nearest.block.named_parameters())
                outside = others_have(self._net.model, stack.blocks[index])
                path = stack.path_before(index)
                for name, parameter in stack.blocks[index].named_parameters():
                    if id(parameter) not in outside:
                        full = f"{path}.{name}"
                        yield BlockParameter(full, path, parameter, beside.get(name))

    def _build_before(self) -> Build:
        net = self._net
        blocks = [(stack.container, stack.container._modules) for stack in self._stacks]
        names = ("_typed", "_gates", "_grids_held", "_weights", "_channels", "_first_numbers")
        attributes = {name: vars(net)[name] for name in names}
        return Build(
            weakref.ref(net),
            tuple(blocks),
            tuple((n.holder, n.name, n.before) for n in self._numbers),
            net.spaces,
            tuple(_record(space) for space in net.spaces),
            {**attributes, "_costs": None},
        )

    def _build_after(self) -> Build:
        net = self._net
        blocks = []
        for stack in self._stacks:
            modules = stack.modules([slot.block for slot in stack.slots])
            blocks.append((stack.container, modules))
        gates = Gates(self._plan.model, self._typed, net._gates.examples)
        gates._learned = list(net._gates._learned)
        weights, channels = relations_of(net, self._typed, self._made)
        attributes = {
            "_typed": self._typed,
            "_gates": gates,
            "_grids_held": self._grids(),
            "_weights": weights,
            "_channels": channels,
            "_first_numbers": self._first_numbers(),
            "_costs": None,
        }
        return Build(
            weakref.ref(net),
            tuple(blocks),
            tuple((n.holder, n.name, n.after) for n in self._numbers),
            self._spaces,
            tuple(_record(made) for made in self._made),
            attributes,
        )

    def _grids(self) -> dict[str, Grid]:
        """Returns the tensors of the model after the edit, in the order of the plan."""
        found = {}
        new: dict[Slot, dict[str, Grid]] = {}
        for name in named_grids(self._plan.model):
            source, slot = self._stacks.origin(name)
            if slot is None or slot.asked is None:
                found[name] = self._net._grids_held[source]
                continue
            if slot not in new:
                new[slot] = named_grids(slot.block)
            stack = self._stacks.of(slot)
            inside = source.removeprefix(f"{stack.path_before(slot.origin)}.")
            found[name] = new[slot][inside]
        return found

    def _first_numbers(self) -> dict[tuple[str, str], Any]:
        """Returns the numbers that edits have changed, as they were at adoption, by their places
        after the edit.
        """
        found: dict[tuple[str, str], Any] = {}
        for (path, name), value in self._net._first_numbers.items():
            after = self._stacks.renamed(path)
            if after is not None:
                found[after, name] = value
        for path, _ in self._plan.model.named_modules():
            source, slot = self._stacks.origin(path)
            if slot is not None and slot.asked is not None:
                for (other, name), value in self._net._first_numbers.items():
                    if other == source:
                        found[path, name] = value
        return found


def _record(space: Space) -> dict[str, Any]:
    """Returns the attributes of a space that depend on the blocks of the model."""
    names = ("name", "pins", "writers", "readers", "riders", "_atom", "_marks", "_members")
    return {name: vars(space)[name] for name in names}
