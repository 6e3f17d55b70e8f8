"""Blocks that an edit inserts and removes, and the numbers of a model that count them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from grapnet.core._errors import EditError

# Words in the names of numbers and lists that count blocks, and of indices of blocks.
_COUNTING = re.compile("layer|block|depth", re.IGNORECASE)
_INDEXING = re.compile("layer|block|depth|idx|index", re.IGNORECASE)
# Parts of a model that a counter may name; it then counts the blocks of that part alone.
_PARTS = ("encoder", "decoder", "vision", "text", "audio")


@dataclass(frozen=True)
class Insertion:
    """A copy of a block that comes behind it."""

    path: str  # of the container
    after: int
    copies_state: bool  # of attached optimizers
    owner: str | None

    def without_values(self) -> "Insertion":
        """Returns itself: it has no values."""
        return self


@dataclass(frozen=True)
class Removal:
    """A block that leaves."""

    path: str
    index: int

    def without_values(self) -> "Removal":
        """Returns itself: it has no values."""
        return self


Asked = Insertion | Removal


def container_of(model: nn.Module, path: str) -> nn.Sequential | nn.ModuleList:
    """Returns a container of blocks; raises EditError if there is none at the path."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        raise EditError(f"the model has no module {path!r}") from None
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        raise EditError(
            f"blocks are inserted and removed in an nn.Sequential or nn.ModuleList, and"
            f" {path or 'the model'!r} is a {type(found).__name__}"
        )
    return found


def place_in(container: nn.Sequential | nn.ModuleList, path: str, index: int) -> int:
    """Returns the index of a block, counted from 0; raises EditError if there is none."""
    count = len(container)
    if not isinstance(index, int) or not -count <= index < count:
        raise EditError(f"{path or 'the model'!r} has {count} blocks, got index {index!r}")
    return index % count


@dataclass(eq=False)
class Slot:
    """One block of a container after the edit.

    Attributes:
        origin: the index of the block before the edit; of the copied block for a new one.
        block: the block itself; it is made when the edit has passed.
        asked: what asks for a new block; None for one that stays.
    """

    origin: int
    block: nn.Module
    asked: Insertion | None = None


@dataclass(frozen=True, eq=False)
class Outer:
    """The block of another container that a container is inside of, as in a stage of stages."""

    block: nn.Module
    index: int
    count: int  # of the blocks of the other container


class Stack:
    """The blocks of one container, before the edit and after it."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path = path
        self.outer = _outer_of(model, path)
        container = container_of(model, path)
        self.container = container
        self.blocks = list(container)
        self.keys = list(container._modules)
        self.slots = [Slot(index, block) for index, block in enumerate(self.blocks)]
        self.new_keys = self.keys

    def change(self, asked: Sequence[Asked]) -> None:
        """Inserts and removes blocks."""
        removed = {one.index for one in asked if isinstance(one, Removal)}
        inserted = [one for one in asked if isinstance(one, Insertion)]
        if len(removed) == len(self.blocks):
            raise EditError(f"{self.path or 'the model'!r} would be left without blocks")
        self.slots = []
        for index, block in enumerate(self.blocks):
            if index not in removed:
                self.slots.append(Slot(index, block))
            for one in inserted:
                if one.after == index:
                    self.slots.append(Slot(index, block, one))
        self.new_keys = self._keys_after()

    def _keys_after(self) -> list[str]:
        """Returns the names of the blocks after the edit: they are counted."""
        found = re.fullmatch(r"(.*?)(\d+)", self.keys[0])
        if found is not None:
            stem = found[1]
            first = int(found[2])
            if self.keys == [f"{stem}{first + n}" for n in range(len(self.keys))]:
                return [f"{stem}{first + n}" for n in range(len(self.slots))]
        raise EditError(
            f"the blocks of {self.path or 'the model'!r} have names of their own ({self.keys[0]!r},"
            " …), so that blocks can neither come nor leave"
        )

    @property
    def prefix(self) -> str:
        """What the names of all tensors of the container begin with."""
        return f"{self.path}." if self.path else ""

    def path_before(self, index: int) -> str:
        """Returns the path of a block before the edit."""
        return f"{self.prefix}{self.keys[index]}"

    def path_after(self, number: int) -> str:
        """Returns the path of a block after the edit."""
        return f"{self.prefix}{self.new_keys[number]}"

    @property
    def removed(self) -> list[int]:
        """The indices of the blocks that leave."""
        staying = {slot.origin for slot in self.slots if slot.asked is None}
        return [index for index in range(len(self.blocks)) if index not in staying]

    def modules(self, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
        """Returns the content of the container after the edit, with these blocks."""
        found = self.container._modules.copy()
        found.clear()
        found.update(zip(self.new_keys, blocks, strict=True))
        return found


def _outer_of(model: nn.Module, path: str) -> Outer | None:
    """Returns what a container is inside of, the innermost; None if there is no such block."""
    while path:
        path, _, key = path.rpartition(".")
        container = model.get_submodule(path)
        if isinstance(container, nn.Sequential | nn.ModuleList):
            index = list(container._modules).index(key)
            return Outer(container[index], index, len(container))
    return None


class Stacks:
    """The containers of one edit."""

    def __init__(self, model: nn.Module, asked: Sequence[Asked]) -> None:
        self._found: dict[str, Stack] = {}
        # What the model returns stays the same in one case, and does not in the other.
        if len({type(one) for one in asked}) > 1:
            raise EditError("an edit inserts blocks or removes them; do both in two edits")
        for one in asked:
            if one.path not in self._found:
                self._found[one.path] = Stack(model, one.path)
        for path in self._found:
            for other in self._found:
                if path != other and f"{other}.".startswith(f"{path}." if path else ""):
                    raise EditError(f"{other!r} is inside of {path!r}; change them in two edits")
        for stack in self:
            stack.change([one for one in asked if one.path == stack.path])

    def __iter__(self) -> Iterator[Stack]:
        return iter(self._found.values())

    def of(self, slot: Slot) -> Stack:
        """Returns the container of a slot."""
        return next(stack for stack in self if slot in stack.slots)

    def new_slots(self) -> Iterator[tuple[Stack, int, Slot, Insertion]]:
        """Yields the blocks that come: container, index after the edit, slot, and what asks."""
        for stack in self:
            for number, slot in enumerate(stack.slots):
                if slot.asked is not None:
                    yield stack, number, slot, slot.asked

    def origin(self, name: str) -> tuple[str, Slot | None]:
        """Returns what a name after the edit was before it, and the block in which it is; for a
        new block the name in the block that it copies.
        """
        for stack in self:
            key, rest = _split(name, stack.prefix)
            if key in stack.new_keys:
                slot = stack.slots[stack.new_keys.index(key)]
                return f"{stack.path_before(slot.origin)}{rest}", slot
        return name, None

    def renamed(self, name: str) -> str | None:
        """Returns what a name is after the edit; None if it leaves with its block."""
        for stack in self:
            key, rest = _split(name, stack.prefix)
            if key in stack.keys:
                index = stack.keys.index(key)
                for number, slot in enumerate(stack.slots):
                    if slot.origin == index and slot.asked is None:
                        return f"{stack.path_after(number)}{rest}"
                return None
        return name


def _split(name: str, prefix: str) -> tuple[str | None, str]:
    """Returns the key of a block in a name, and what comes behind it."""
    if not name.startswith(prefix):
        return None, ""
    # The names of spaces end with marks, as in "2.conv:in" and "2.conv#2".
    found = re.match(r"[^.:#]+", name[len(prefix) :])
    if found is None:
        return None, ""
    return found[0], name[len(prefix) + found.end() :]


@dataclass(frozen=True, eq=False)
class Number:
    """A counter, an index or a list of a model that follows its blocks."""

    holder: Any  # a module, or an object that a module holds, such as a config
    name: str
    before: Any
    after: Any


def indices(stack: Stack) -> list[Number]:
    """Returns the indices of blocks that stay and move, such as `layer_idx`."""
    found = []
    for number, slot in enumerate(stack.slots):
        if slot.asked is None:
            for module, name, value in own_indices(stack, number, slot.block):
                if getattr(module, name) != value:
                    found.append(Number(module, name, getattr(module, name), value))
    return found


def own_indices(stack: Stack, number: int, block: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """Returns the indices inside of a block of a container, with the values that they have there
    after the edit.

    A number is an index if it has such a name, and grows by one from each block to the next.
    """
    found = []
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and _INDEXING.search(name):
                start = _start_of(stack, path, name)
                if start is not None:
                    found.append((module, name, start + number))
    return found


def _start_of(stack: Stack, path: str, name: str) -> int | None:
    """Returns what an index is in the first block; None if it does not count the blocks."""
    starts = set()
    for index, block in enumerate(stack.blocks):
        for own, module in block.named_modules():
            if own == path and type(vars(module).get(name)) is int:
                starts.add(vars(module)[name] - index)
    if len(starts) != 1:
        return None
    (start,) = starts
    # With one block alone, nothing but the name shows whether it counts.
    if len(stack.blocks) == 1 and (start != 0 or not re.search("idx|index", name)):
        return None
    return start


def counters(model: nn.Module, stack: Stack) -> Iterator[Number]:
    """Yields numbers that are the number of blocks, and lists with an entry for each, of the
    modules around a container and of the objects that they hold, such as a config.
    """
    count = len(stack.blocks)
    holders: dict[int, Any] = {}
    path = stack.path
    while True:
        module = model.get_submodule(path)
        holders[id(module)] = module
        for name, value in vars(module).items():
            is_plain = not name.startswith("_") and not isinstance(value, type | nn.Module | Tensor)
            if is_plain and hasattr(value, "__dict__") and not callable(value):
                holders[id(value)] = value
        if not path:
            break
        path, _, _ = path.rpartition(".")
    for holder in holders.values():
        for name, value in list(vars(holder).items()):
            if name.startswith("_"):
                continue
            if type(value) is int and value == count:
                yield Number(holder, name, value, len(stack.slots))
            elif isinstance(value, list | tuple) and _COUNTING.search(name):
                entries = _entries_after(stack, value)
                if entries is not None and isinstance(value, tuple):
                    yield Number(holder, name, value, tuple(entries))
                elif entries is not None:
                    yield Number(holder, name, value, entries)


def _entries_after(stack: Stack, entries: Sequence[Any]) -> list[Any] | None:
    """Returns a list after the edit that counts the blocks, as `depths` does those of every stage,
    or has an entry for each, as `layer_types` has; None for any other list.
    """
    count = len(stack.blocks)
    outer = stack.outer
    if outer is not None and len(entries) == outer.count:
        if entries[outer.index] != count:
            return None
        found = list(entries)
        found[outer.index] = len(stack.slots)
        return found
    if len(entries) != count:
        return None
    return [entries[slot.origin] for slot in stack.slots]


def is_named(number: Number, stack: Stack) -> bool:
    """Returns whether a number follows the blocks of a container by its name.

    In a model of several parts, `num_decoder_layers` counts blocks of the decoder alone.
    """
    name = number.name
    if not _COUNTING.search(name):
        return False
    if any(part in name and part not in stack.path for part in _PARTS):
        return False
    # With as many stages as blocks, a number of both may count the stages.
    outer = stack.outer
    if outer is not None and type(number.before) is int and outer.count == number.before:
        is_inside = any(number.holder is module for module in outer.block.modules())
        if not is_inside:
            return False
    # Where another number names the part of the container, this one is of another part.
    for part in _PARTS:
        if part in stack.path and part not in name:
            for other in vars(number.holder):
                if part in other and _COUNTING.search(other):
                    return False
    return True
