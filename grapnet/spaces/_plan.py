"""Plans: a model with other blocks, before an edit inserts or removes them.

A plan is a copy of the model that shares its Parameters. It gets the other blocks, and is
discovered again: every tensor that stays must have the axes that it had, those of a new block the
axes of the block that it copies, and what was read must still be read. If not, as where Llama runs
only `num_hidden_layers` of its layers, numbers of the model that count its blocks follow. Then the
Parameters of a new block that write the stream last are set to 0, and the plan must return what the
model returns, to the bit.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grapnet.core._errors import EditError
from grapnet.core._opened import Opened, opened_of, set_opened

from ._axes import Atom, Expression, atoms_of, size_of
from ._blocks import Number, Slot, Stacks, counters, indices, is_named, own_indices
from ._copying import copy_model, kept_hooks, outputs_in
from ._discovery import Typed, make_twin, undisturbed

if TYPE_CHECKING:
    from ._adopted import Adopted

# Counters without a telling name that may follow together; more than this are not searched for.
_MOST_COUNTERS = 2


class Plan:
    """A copy of the model with the blocks that it has after the edit; Parameters are shared with
    the model, except for those of new blocks.
    """

    def __init__(self, net: "Adopted", stacks: Stacks) -> None:
        self._net = net
        self._stacks = stacks
        self._memo: dict[int, Any] = {id(p): p for p in net.model.parameters()}
        for buffer in net.model.buffers():
            self._memo[id(buffer)] = buffer.detach().clone()
        self.model, _, _ = copy_model(net.model, self._memo, torch.clone, closes=False)
        self.model.eval()
        # The outputs of the model as it is, to compare with.
        self._outputs: list[Tensor] = []
        self._has_values = not any(parameter.is_meta for parameter in net.model.parameters())
        if self._has_values and any(True for _ in stacks.new_slots()):
            self._outputs = self._run()
        self._blocks: dict[Slot, nn.Module] = {}
        self._place_blocks()

    def _place_blocks(self) -> None:
        """Gives the containers of the plan their blocks, with new copies for those that come."""
        for stack in self._stacks:
            blocks = []
            for number, slot in enumerate(stack.slots):
                block = self._memo[id(slot.block)]
                if slot.asked is not None:
                    block = copied_block(self.model, block)
                    for module, name, value in own_indices(stack, number, block):
                        setattr(module, name, value)
                    self._blocks[slot] = block
                blocks.append(block)
            vars(self._memo[id(stack.container)])["_modules"] = stack.modules(blocks)

    def fit(self) -> tuple[list[Number], Typed, "Match"]:
        """Returns the numbers that follow, the axes of the plan, and which of them are those of the
        model.

        Raises:
            EditError: the model cannot run with these blocks.
        """
        places: list[Number] = []
        named: list[Number] = []
        others: list[Number] = []
        for stack in self._stacks:
            places += indices(stack)
            for number in counters(self._net.model, stack):
                # What the plan shares with the model cannot be tried.
                if id(number.holder) not in self._memo:
                    continue
                if is_named(number, stack):
                    named.append(number)
                else:
                    others.append(number)
        counted = {(id(number.holder), number.name) for number in named}
        if len(counted) < len(named):
            raise EditError(
                "a number of the model counts the blocks of several containers that this edit"
                " changes; change them in separate edits"
            )
        tries = [[*places, *named]]
        for count in range(1, _MOST_COUNTERS + 1):
            for more in combinations(others, count):
                tries.append([*places, *named, *more])
        if named:
            tries.append(places)
        first = ""
        for numbers in tries:
            self._set([(n.holder, n.name, n.after) for n in numbers])
            problem, typed, match = self._typed()
            if typed is not None and match is not None:
                return numbers, typed, match
            first = first or problem
            self._set([(n.holder, n.name, n.before) for n in numbers])
        raise EditError(
            "with these blocks the model would not run, or would not be the same, and no change of"
            f" its numbers was found that prevents this: {first}"
        )

    def _set(self, numbers: Sequence[tuple[Any, str, Any]]) -> None:
        """Gives numbers of the plan values, by the objects of the model that have them."""
        for holder, name, value in numbers:
            setattr(self._memo[id(holder)], name, value)

    def _typed(self) -> "tuple[str, Typed | None, Match | None]":
        """Returns the axes of the plan, or why they are not those that the edit leads to."""
        try:
            typed = self._discovered()
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0], None, None
        match = Match(self._net._typed, typed, self._stacks)
        if match.problem:
            return match.problem, None, None
        return "", typed, match

    def _discovered(self) -> Typed:
        """Returns the axes of the plan.

        An index of size 1 broadcasts, so nothing tells the only head of an attention from the only
        one of another. Where a space has one node left, a twin is discovered in which it has as
        many as at first, with the numbers that follow.
        """
        net = self._net
        before = net._atom_sizes()
        after = list(before)
        single = [space for space in net.spaces if len(space) == 1]
        for space in single:
            after[space._atom] = net._typed.atoms[space._atom].size
        if before == after:
            return net._discovered(self.model)
        numbers = net._gates.foresee(net.model, single, before, after)
        twin = make_twin(self.model, real=net._typed.needs_contents)
        for name in twin.tensors():
            source, _ = self._stacks.origin(name)
            if source in net._typed.axes:
                axes = net._typed.axes[source]
                twin.set_shape(name, [size_of(axis, after) for axis in axes])
        for path, module in twin.module.named_modules():
            source, _ = self._stacks.origin(path)
            for number in numbers:
                if number.module == source:
                    setattr(module, number.name, number.after)
        return net._discovered_twin(self.model, twin)

    def zeros(self, typed: Typed) -> dict[Slot, list[str]]:
        """Returns the Parameters of every new block that must be 0, by their names in it, for the
        model to return what it does at present.

        Raises:
            EditError: there are none.
        """
        ends: dict[Slot, list[str]] = {}
        writers: dict[Slot, list[str]] = {}
        for stack, number, slot, _ in self._stacks.new_slots():
            path = stack.path_after(number)
            block = self._blocks[slot]
            writing = _Writing(typed, path, block, shared=others_have(self.model, block))
            writers[slot] = writing.of_writers()
            ends[slot] = writers[slot]
            if self._has_values:
                ends[slot] = writing.of_ends(self._calls(block))
            if not writers[slot]:
                raise EditError(
                    f"no Parameter of {stack.path_before(slot.origin)} alone writes its output, so"
                    " that a copy cannot be made silent"
                )
        if not ends or not self._has_values:
            return ends
        for chosen in (ends, writers):
            self._place_blocks()
            for slot, names in chosen.items():
                set_to_zero(self._blocks[slot], names)
            if self._is_same():
                return chosen
        copied = [self._stacks.of(slot).path_before(slot.origin) for slot in ends]
        paths = ", ".join(copied)
        raise EditError(
            f"a copy of {paths} would change what the model returns, also while everything that it"
            " writes is 0: something outside of the residual path, such as a norm, changes the"
            " stream"
        )

    def _is_same(self) -> bool:
        """Returns whether the plan returns what the model does."""
        found = self._run()
        before = self._outputs
        if len(found) != len(before):
            # A list of hidden states has one entry for each block.
            found = found[:1]
            before = before[:1]
        return all(torch.equal(one, other) for one, other in zip(found, before, strict=True))

    def _run(self) -> list[Tensor]:
        """Returns the tensors that the plan returns for the examples, in evaluation mode."""
        found = []
        for args, kwargs in self._net._gates.examples:
            with torch.no_grad(), undisturbed(list(self.model.parameters())):
                found += outputs_in(self.model(*args, **kwargs))
        return found

    def _calls(self, block: nn.Module) -> "list[_Call]":
        """Returns the calls of modules inside of a block, in order."""
        calls: list[_Call] = []

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(_Call(module, outputs_in((args, kwargs)), outputs_in(output)))

        hooks = []
        for module in block.modules():
            hooks.append(module.register_forward_hook(record, with_kwargs=True))
        try:
            self._run()
        finally:
            for hook in hooks:
                hook.remove()
        return calls


def copied_block(model: nn.Module, block: nn.Module) -> nn.Module:
    """Returns a copy of a block; what it shares with the rest of the model stays shared."""
    memo: dict[int, Any] = {}
    inside = {id(module) for module in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        memo[id(module)] = module
        for value in vars(module).values():
            memo[id(value)] = value
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            memo[id(tensor)] = tensor
    for module in block.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(hooks)] = kept_hooks(hooks)
    return copy.deepcopy(block, memo)


def others_have(model: nn.Module, block: nn.Module) -> set[int]:
    """Returns the ids of the Parameters that other modules of the model have, too."""
    inside = {id(module) for module in block.modules()}
    found = set()
    for module in model.modules():
        if id(module) not in inside:
            found |= {id(tensor) for tensor in module._parameters.values()}
    return found


def set_to_zero(block: nn.Module, names: Sequence[str]) -> None:
    """Sets Parameters of a block to 0, frozen cells included."""
    for name in names:
        path, _, own = name.rpartition(".")
        module = block.get_submodule(path)
        parameter = module._parameters[own]
        assert parameter is not None
        parameter.data.zero_()
        opened = opened_of(module, own)
        if opened is not None:
            silent = Opened(opened.pattern, torch.zeros_like(opened.frozen_values))
            set_opened(module, own, silent)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module, with the tensors that it takes and returns."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Writing:
    """The Parameters with which a new block writes its stream."""

    def __init__(self, typed: Typed, path: str, block: nn.Module, shared: set[int]) -> None:
        self._block = block
        self._prefix = f"{path}."
        self._typed = typed
        self._shared = shared
        self._stream = stream_of(typed, path)
        self._paths = {id(module): own for own, module in block.named_modules()}

    def of_writers(self) -> list[str]:
        """Returns the Parameters that write the stream, and the biases of their modules."""
        found: list[str] = []
        for module in self._writers():
            found += self._parameters(module)
        return found

    def of_ends(self, calls: Sequence[_Call]) -> list[str]:
        """Returns the Parameters of the modules that write the stream last: behind a writer comes
        every module that takes exactly what the one before it returns, as a norm does.
        """
        found: dict[str, None] = {}
        for writer in self._writers():
            last = writer
            outputs: list[Tensor] = []
            for call in calls:
                if call.module is writer:
                    outputs = call.outputs
                elif call.inputs and any(call.inputs[0] is output for output in outputs):
                    outputs = call.outputs
                    if self._parameters(call.module):
                        last = call.module
            found.update(dict.fromkeys(self._parameters(last)))
        return list(found)

    def _writers(self) -> list[nn.Module]:
        """Returns the modules of the block whose Parameters write the stream."""
        found: dict[str, nn.Module] = {}
        for atom in self._stream:
            for name, _ in self._typed.writers.get(atom, ()):
                if name.startswith(self._prefix):
                    path, _, _ = name.removeprefix(self._prefix).rpartition(".")
                    found[path] = self._block.get_submodule(path)
        return list(found.values())

    def _parameters(self, module: nn.Module) -> list[str]:
        """Returns the Parameters of one module that have the stream and do not read it, by their
        names in the block; none if other parts of the model have them, too.
        """
        path = self._paths[id(module)]
        found = []
        for own, parameter in module._parameters.items():
            name = f"{path}.{own}" if path else own
            full = f"{self._prefix}{name}"
            if parameter is None or id(parameter) in self._shared:
                continue
            for dim, axis in enumerate(self._typed.axes.get(full, ())):
                atoms = self._stream & set(atoms_of(axis))
                reads = any((full, dim) in self._typed.readers.get(a, ()) for a in atoms)
                if atoms and not reads:
                    found.append(name)
                    break
        return found


def stream_of(typed: Typed, path: str) -> set[int]:
    """Returns the atoms that a block reads and writes on the same axes; none if an axis differs."""
    reads = typed.inputs.get(path, ())
    writes = typed.outputs.get(path, ())
    if len(reads) != len(writes):
        return set()
    held: set[int] = set()
    for axes in typed.axes.values():
        for axis in axes:
            held.update(atoms_of(axis))
    found: set[int] = set()
    for read, written in zip(reads, writes, strict=True):
        atoms = {*atoms_of(read), *atoms_of(written)} & held
        # Axes without nodes are those of the data: a batch, positions.
        if atoms and read != written:
            return set()
        found |= atoms
    return found


class Match:
    """Which atoms of a plan are those of the model.

    Attributes:
        origins: for an atom of the plan that of the model: the same one, or for a new block that of
            the block that it copies.
        same: for an atom of the model that of the plan.
        problem: why the axes are not those that the edit leads to; empty if they are.
    """

    def __init__(self, before: Typed, after: Typed, stacks: Stacks) -> None:
        self.origins: dict[int, int] = {}
        self.same: dict[int, int] = {}
        self._before = before
        self._after = after
        self._stacks = stacks
        self.problem = self._unread() or self._match_staying() or self._match_new()

    def _unread(self) -> str:
        for name in self._after.unread:
            source, _ = self._stacks.origin(name)
            if source not in self._before.unread:
                return f"{name} would not be read"
        return ""

    def _match_staying(self) -> str:
        for name, source, slot in self._tensors():
            if slot is not None and slot.asked is not None:
                continue
            pairs = self._pairs(name, source)
            if pairs is None:
                return f"the axes of {name} would be others"
            for old, new in pairs:
                known = self.same.setdefault(old, new)
                back = self.origins.setdefault(new, old)
                if (known != new or back != old) and not self._are_pinned(old, new):
                    return f"other tensors would share the axes of {name}"
        return ""

    def _match_new(self) -> str:
        fresh: dict[tuple[Slot, int], int] = {}
        for name, source, slot in self._tensors():
            if slot is None or slot.asked is None:
                continue
            pairs = self._pairs(name, source)
            if pairs is None:
                return f"the axes of {name} would not be those of {source}"
            for old, new in pairs:
                expected = fresh.setdefault((slot, old), new)
                if self._is_shared(old, slot):
                    expected = self.same.get(old)
                elif new in self.same.values():
                    expected = None
                if expected != new and not self._are_pinned(old, new):
                    return f"the axes of {name} would not be those of {source}"
                self.origins.setdefault(new, old)
        return ""

    def _tensors(self) -> Iterator[tuple[str, str, Slot | None]]:
        """Yields the tensors of the plan: name, name before the edit, block."""
        for name in self._after.axes:
            yield name, *self._stacks.origin(name)

    def _pairs(self, name: str, source: str) -> list[tuple[int, int]] | None:
        """Returns the atoms of a tensor before and after the edit; None if its axes differ."""
        before = self._before.axes.get(source)
        after = self._after.axes[name]
        if before is None or len(before) != len(after):
            return None
        found: list[tuple[int, int]] = []
        for old, new in zip(before, after, strict=True):
            if not _pair(old, new, found) and not self._all_pinned(old, new):
                return None
        # Indices of size 1 broadcast, so nothing tells them apart.
        return [pair for pair in found if self._after.atoms[pair[1]].size > 1]

    def _is_shared(self, atom: int, slot: Slot) -> bool:
        """Returns whether tensors outside of a copied block have an atom, too."""
        inside = f"{self._stacks.of(slot).path_before(slot.origin)}."
        for name, axes in self._before.axes.items():
            if not name.startswith(inside) and any(atom in atoms_of(axis) for axis in axes):
                return True
        return False

    def _are_pinned(self, old: int, new: int) -> bool:
        return bool(self._before.atoms[old].pins) and bool(self._after.atoms[new].pins)

    def _all_pinned(self, old: Expression, new: Expression) -> bool:
        is_pinned = [bool(self._before.atoms[atom].pins) for atom in atoms_of(old)]
        is_pinned += [bool(self._after.atoms[atom].pins) for atom in atoms_of(new)]
        return all(is_pinned)


def _pair(old: Expression, new: Expression, found: list[tuple[int, int]]) -> bool:
    """Adds the pairs of atoms of two axes; returns whether the axes have the same form."""
    if isinstance(old, Atom) or isinstance(new, Atom):
        if not isinstance(old, Atom) or not isinstance(new, Atom):
            return False
        found.append((old.number, new.number))
        return True
    if type(old) is not type(new) or len(old.parts) != len(new.parts):
        return False
    return all(_pair(one, other, found) for one, other in zip(old.parts, new.parts, strict=True))
