"""Adopted models in a file: spaces, axes and every tensor, to be restored into a model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from grapnet._torch import uncompiled
from grapnet.core._change import Labels
from grapnet.core._commit import carry_out, require_editable
from grapnet.core._coordinates import Decision, Token, layout_of, refuse_old_backwards
from grapnet.core._edit import LARGEST_UID
from grapnet.core._errors import CheckpointError
from grapnet.core._grid import install_content
from grapnet.core._grid_map import laid_out_like
from grapnet.core._layer import Roster
from grapnet.core._opened import (
    CUT,
    FREE,
    FROZEN,
    Opened,
    Pattern,
    holders_of,
    opened_in,
    opened_of,
    set_opened,
)
from grapnet.following._optimizers import OptimizerFollower
from grapnet.spaces import Adopted
from grapnet.spaces._adopted import find_adopted
from grapnet.spaces._axes import Atom, Expression, ProductOf, SumOf
from grapnet.spaces._signature import Signature, signature_of
from grapnet.spaces._space import Verdict

from ._codec import LARGEST, Fields, decode, encode, entry, names, number
from ._extras import Revert, Target, restore_all, revert_all
from ._journal import Kept, check_pattern, describe_journal, is_number, rebuild_journal
from ._model import EXTRA, read_state, require_writable, split_ties
from ._net import require_no_trial

_STALE = (
    "this backward goes through a forward pass from before gn.restore has loaded the model. Run the"
    " forward pass again"
)
# The signs of sums and products of axes.
_KINDS: dict[str, type[SumOf] | type[ProductOf]] = {"+": SumOf, "*": ProductOf}


class Number(NamedTuple):
    """A number of a module that edits have changed, such as `num_heads`."""

    module: str
    name: str
    first: Any  # at adoption
    now: Any


class SavedSpace(NamedTuple):
    """One space in a file."""

    name: str
    atom: int
    uids: Tensor
    owners: Labels
    pins: tuple[str, ...]
    marks: frozenset[str]
    proof: Verdict
    # Tensors and dimensions.
    writers: tuple[tuple[str, int], ...]
    readers: tuple[tuple[str, int], ...]


def describe_adopted(
    net: Adopted, tensors: dict[str, Tensor], *, undo: bool, history: Kept
) -> dict[str, Any]:
    """Adds the arrays of an adopted model to `tensors` and returns the rest as JSON.

    Raises:
        CheckpointError: a trial is in effect, or the model was changed outside of edits.
    """
    require_no_trial(net)
    problem = net._difference()
    if problem:
        raise CheckpointError(f"adopted: {problem}; adopt the model again")
    signature, atoms = signature_of(net._typed)
    spaces = []
    for n, space in enumerate(net.spaces):
        owners = space._owner_names.compact()
        tensors[f"spaces.{n}.uid"] = space.uid
        tensors[f"spaces.{n}.owner"] = owners.codes
        spaces.append(
            {
                "name": space.name,
                "atom": atoms[space._atom],
                "owners": list(owners.names),
                "pins": list(space.pins),
                "marks": sorted(space._marks),
                "proof": space._proof,
                "writers": [list(place) for place in net._typed.writers.get(space._atom, ())],
                "readers": [list(place) for place in net._typed.readers.get(space._atom, ())],
            }
        )
    numbers = []
    for (path, name), first in net._first_numbers.items():
        now = net._attribute(path, name)
        if now != first:
            numbers.append(tuple(Number(path, name, first, now)))
    axes = {}
    for name, expressions in signature.axes.items():
        axes[name] = [_as_json(axis) for axis in expressions]
    state, ties = split_ties(_held(net.model) | _ExtraStates(net.model).state_dict())
    fixed = [name for name, held in net.model.named_parameters() if not held.requires_grad]
    return {
        "adopted": {
            "version": net.version,
            "next_uid": net._next_uid,
            "atoms": list(signature.sizes),
            "axes": axes,
            "grouped": sorted(net._typed.grouped),
            "spaces": spaces,
            "numbers": encode(numbers, "adopted.numbers", tensors),
            "opened": _describe_opened(net, tensors),
            "has_other_blocks": net.journal._outlines.has_blocks,
            "buffers": [name for name, _ in net.model.named_buffers()],
            "fixed": fixed,
        },
        "state": {"tree": encode(state, "state", tensors), "ties": ties},
        "journal": describe_journal(net.journal, tensors, undo=undo, history=history),
    }


def _describe_opened(net: Adopted, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Adds the patterns of tensors of which cells are cut or frozen to `tensors`, and returns the
    rest as JSON.
    """
    found = []
    for name, grid in net._stores().items():
        if grid.opened is None:
            continue
        pattern = grid.opened.pattern
        where = f"opened.{len(found)}"
        kinds = pattern.kinds.numpy()
        tensors[f"{where}.live"] = torch.from_numpy(np.packbits(kinds != CUT))
        tensors[f"{where}.frozen"] = torch.from_numpy(np.packbits(kinds[kinds != CUT] == FROZEN))
        tensors[f"{where}.values"] = grid.opened.frozen_values
        found.append({"name": name, "shape": list(pattern.shape), "width": pattern.width})
    return found


def _read_opened(part: Any, fields: Fields) -> dict[str, Opened]:
    """Returns the tensors of which cells are cut or frozen."""
    found: dict[str, Opened] = {}
    for n, described in enumerate(entry(part, "opened", list, "adopted.")):
        where = f"adopted.opened.{n}."
        name = entry(described, "name", str, where)
        shape = entry(described, "shape", list, where)
        if any(type(size) is not int or not 0 < size <= LARGEST for size in shape):
            raise CheckpointError(f"{where}shape: expected sizes")
        cells = math.prod(shape)
        width = number(described, "width", where)
        if width == 0 or cells % width or cells > LARGEST:
            raise CheckpointError(f"{where}width: does not fit the shape")
        kinds = _unpacked(fields, f"opened.{n}.live", cells // width)
        is_frozen = _unpacked(fields, f"opened.{n}.frozen", int(kinds.sum()))
        kinds[kinds == FREE] += is_frozen
        pattern = Pattern(tuple(shape), width, torch.from_numpy(kinds))
        check_pattern(pattern, len(shape), where)
        values = fields.any(f"opened.{n}.values")
        if list(values.shape) != [int(is_frozen.sum()), width] or not values.is_floating_point():
            raise CheckpointError(f"opened.{n}.values: expected one row for every frozen one")
        found[name] = Opened(pattern, values)
    return found


def _unpacked(fields: Fields, name: str, count: int) -> np.ndarray:
    """Returns bits of a file, one uint8 each."""
    packed = fields.vector(name, torch.uint8, (count + 7) // 8)
    return np.unpackbits(packed.numpy(), count=count)


@dataclass(frozen=True, eq=False)
class SavedModel:
    """An adopted model in a file.

    Attributes:
        version: the version of its graph.
        next_uid: the uid of the next node that an edit adds.
        first: its axes, with their sizes at adoption.
        now: the same with the saved sizes.
        grouped: the names of the weights of convolutions with groups.
        spaces: its spaces, in order.
        numbers: the numbers of modules that edits have changed.
        state: every Parameter and buffer by name, and the extra states of modules.
        ties: names of tensors that are also called by another name of `state`.
        opened: the tensors of which cells are cut or frozen; `state` has their free cells.
        has_other_blocks: whether edits have inserted or removed blocks.
        buffers: names of the tensors that are no Parameters.
        fixed: names of the Parameters that do not require gradients.
    """

    version: int
    next_uid: int
    first: Signature
    now: Signature
    grouped: frozenset[str]
    spaces: list[SavedSpace]
    numbers: list[Number]
    state: dict[str, Any]
    ties: dict[str, str]
    opened: dict[str, Opened]
    has_other_blocks: bool
    buffers: tuple[str, ...]
    fixed: tuple[str, ...]

    @classmethod
    def read(cls, document: Any, fields: Fields) -> "SavedModel":
        """Returns the model of a file; raises CheckpointError, with the field, if it is invalid."""
        part = entry(document, "adopted", dict, "")
        first = _read_signature(part)
        next_uid = number(part, "next_uid", "adopted.", LARGEST_UID)
        spaces = []
        for n, described in enumerate(entry(part, "spaces", list, "adopted.")):
            spaces.append(_read_space(n, described, fields, next_uid, first))
        all_uids = torch.cat([torch.empty(0, dtype=torch.int64), *(s.uids for s in spaces)])
        if len(all_uids.unique()) < len(all_uids):
            raise CheckpointError("adopted.spaces: two nodes have the same uid")
        atoms = {space.atom: len(space.uids) for space in spaces}
        if len(atoms) < len(spaces):
            raise CheckpointError("adopted.spaces: two spaces have the same atom")
        now = first.resized(atoms)
        grouped = frozenset(_read_texts(part, "grouped", "adopted."))
        if any(len(now.axes.get(name, ())) < 2 for name in grouped):
            raise CheckpointError("adopted.grouped: a convolution has a weight of two axes or more")
        state, ties = read_state(entry(document, "state", dict, ""), fields)
        opened = _read_opened(part, fields)
        for name in (*now.axes, *opened):
            shape = tuple(now.shape(name)) if name in now.axes else None
            if name in opened:
                pattern = opened[name].pattern
                if pattern.shape != shape:
                    raise CheckpointError(f"adopted.opened: {name!r} does not fit the spaces")
                shape = pattern.content_shape
            value = state.get(name)
            if not isinstance(value, Tensor) or value.shape != shape:
                raise CheckpointError(f"state[{name!r}]: does not fit the spaces of the file")
        version = number(part, "version", "adopted.")
        numbers = _read_numbers(part, fields)
        has_other_blocks = entry(part, "has_other_blocks", bool, "adopted.")
        buffers = _read_texts(part, "buffers", "adopted.")
        fixed = _read_texts(part, "fixed", "adopted.")
        for name in (*buffers, *fixed):
            if not isinstance(state.get(name), Tensor):
                raise CheckpointError(f"adopted: {name!r} is the name of no tensor")
        return cls(
            version,
            next_uid,
            first,
            now,
            grouped,
            spaces,
            numbers,
            state,
            ties,
            opened,
            has_other_blocks,
            buffers,
            fixed,
        )


def put_adopted(
    into: nn.Module, document: Any, fields: Fields, targets: Callable[[], Sequence[Target]]
) -> None:
    """Loads an adopted model of a file into a model, and states into other objects, all or none.

    Args:
        into: an adopted model, or a plain one of the size at adoption or of the saved size.
        document: of the file.
        fields: its tensors; the extras have been read.
        targets: returns the objects and the states for them, when the Parameters have the saved
            shapes.

    Raises:
        CheckpointError: something does not fit; nothing changes.
    """
    saved = SavedModel.read(document, fields)
    net = find_adopted(into)
    model = uncompiled(into) if net is None else net.model
    if net is None:
        place = _Place(model, saved, {})
        place.require_sizes()
    else:
        _require_restorable(net)
        place = _Place(model, saved, net._first_numbers)
        place.require_signature(net)
    installs = place.prepare_tensors()
    installs += place.prepare_numbers()
    undo = [
        _remembered_tensors(place.tensors.values()),
        place.remembered_opened(),
        place.remembered_numbers(),
    ]
    if net is not None:
        installs += _prepare_graph(net, saved, place, document, fields)
        undo.append(_remembered_graph(net))
    extra_states = _ExtraStates(model)
    decision = Decision()
    parameters = [tensor for tensor in place.tensors.values() if isinstance(tensor, nn.Parameter)]
    trainable = [parameter for parameter in parameters if parameter.is_floating_point()]
    refuse_old_backwards(trainable, _STALE, decision)
    try:
        for install in installs:
            install()
        modules = list(extra_states.owners.values())
        extras = Target("state", extra_states, place.extras, modules)
        restore_all([extras, *targets()], undo)
        carry_out(_forget_slots(net), decision)
    except BaseException:
        if not decision.made:
            revert_all(undo)
        raise


class _Place:
    """A model that a file is to be loaded into.

    Attributes:
        tensors: every Parameter and buffer of the model, each under its first name.
        extras: the saved extra states.
    """

    def __init__(
        self, model: nn.Module, saved: SavedModel, first_numbers: Mapping[tuple[str, str], Any]
    ) -> None:
        self._model = model
        self._saved = saved
        self._first_numbers = first_numbers
        held, ties = split_ties(_held(model))
        self.tensors: dict[str, Tensor] = held
        self._holders = holders_of(model)
        self._opened = opened_in(model)
        self.extras = {}
        for name, value in saved.state.items():
            if name.rpartition(".")[2] == EXTRA:
                self.extras[name] = value
        here = {*held, *ties, *_ExtraStates(model).state_dict()}
        for name in sorted(here ^ saved.state.keys()):
            owner = "model" if name in here else "file"
            remedy = "make the model as the saved one was made"
            if saved.has_other_blocks:
                remedy = (
                    "blocks of the saved model were inserted or removed, so make the model with as"
                    " many blocks as it was saved with"
                )
            raise CheckpointError(f"state[{name!r}]: only the {owner} has it; {remedy}")
        for name in sorted(ties.keys() | saved.ties.keys()):
            if ties.get(name) != saved.ties.get(name):
                raise CheckpointError(f"state[{name!r}]: is tied in one of model and file only")
        # Whether the model was made in the saved sizes, not in those at adoption.
        self.is_small = False

    def require_sizes(self) -> None:
        """Raises CheckpointError unless the model has the sizes at adoption, or the saved ones."""
        self.is_small = self._misfit(self._saved.now, "now") == ""
        problem = self._misfit(self._saved.first, "first")
        if problem and not self.is_small:
            raise CheckpointError(problem)

    def require_signature(self, net: Adopted) -> None:
        """Raises CheckpointError unless the axes of an adopted model are those of the file, with
        the sizes at adoption or the saved ones.
        """
        saved = self._saved
        mine, atoms = signature_of(net._typed)
        self.is_small = not mine.difference(saved.now)
        other = mine.difference(saved.first)
        if other and not self.is_small:
            raise CheckpointError(
                f"adopted.axes[{other!r}]: are {saved.first.shape(other)} in the file, and"
                f" {mine.shape(other)} in the adopted model, or other spaces share them"
            )
        found = {atoms[space._atom]: space for space in net.spaces}
        if list(found) != [space.atom for space in saved.spaces]:
            raise CheckpointError("adopted.spaces: the adopted model has others")
        for kept in saved.spaces:
            space = found[kept.atom]
            if space.pins and len(space) != len(kept.uids):
                raise CheckpointError(
                    f"adopted.spaces: {space.name} has {len(kept.uids)} nodes in the file and is"
                    f" pinned in the model ({space.pins[0]})"
                )
        which = "now" if self.is_small else "first"
        problem = self._other_number(which)
        if problem:
            raise CheckpointError(problem)

    def prepare_tensors(self) -> list[Callable[[], None]]:
        """Returns the assignments of all tensors; raises CheckpointError where one cannot take its
        content.
        """
        installs = []
        for name, tensor in self.tensors.items():
            where = f"state[{name!r}]"
            require_writable(where, tensor)
            value = self._saved.state[name]
            opened = self._saved.opened.get(name)
            dims = len(self._shape(name))
            if not isinstance(value, Tensor) or (opened is None and value.dim() != dims):
                raise CheckpointError(f"{where}: expected a tensor of {dims} dimensions")
            if value.is_floating_point() != tensor.is_floating_point():
                raise CheckpointError(f"{where}: {value.dtype} does not fit {tensor.dtype}")
            content = laid_out_like(value.to(tensor.device, tensor.dtype), tensor)
            installs.append(partial(install_content, tensor, content, None, Token()))
            installs.append(partial(_open, self._holders.get(id(tensor), []), opened))
        return installs

    def remembered_opened(self) -> Revert:
        """Returns a function that opens what is opened at present, and nothing else."""
        present = []
        for holders in self._holders.values():
            present.append((holders, opened_of(*holders[0])))

        def revert() -> None:
            for holders, opened in present:
                _open(holders, opened)

        return revert

    def _shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of the model, as its module computes with it."""
        tensor = self.tensors[name]
        opened = self._opened.get(id(tensor))
        return tuple(tensor.shape) if opened is None else opened.pattern.shape

    def prepare_numbers(self) -> list[Callable[[], None]]:
        """Returns the assignments of all numbers of modules that edits change."""
        wanted = dict(self._first_numbers)
        for one in self._saved.numbers:
            wanted[one.module, one.name] = one.now
        installs: list[Callable[[], None]] = []
        for (path, name), value in wanted.items():
            installs.append(partial(setattr, self._model.get_submodule(path), name, value))
        return installs

    def remembered_numbers(self) -> Revert:
        """Returns a function that restores the numbers of modules that edits change."""
        keys = {*self._first_numbers, *((one.module, one.name) for one in self._saved.numbers)}
        present = []
        for path, name in keys:
            module = self._model.get_submodule(path)
            present.append((module, name, getattr(module, name)))

        def revert() -> None:
            for module, name, value in present:
                setattr(module, name, value)

        return revert

    def _misfit(self, signature: Signature, which: str) -> str:
        """Returns what differs from a model of certain sizes; empty if nothing does."""
        for name in self.tensors:
            shape = signature.shape(name)
            present = list(self._shape(name))
            if present != shape:
                return (
                    f"state[{name!r}]: had the shape {self._saved.first.shape(name)} when the model"
                    f" was adopted, and the model has {present}. Make the model as the saved one"
                    " was made"
                )
        return self._other_number(which)

    def _other_number(self, which: str) -> str:
        """Returns which number of a module differs from the file; empty if none does."""
        for one in self._saved.numbers:
            key = (one.module, one.name)
            present = self._first_numbers.get(key, _attribute(self._model, *key))
            wanted = getattr(one, which)
            if type(present) is not type(wanted) or present != wanted:
                return f"adopted.numbers: {one.module}.{one.name} was {wanted}, and is {present}"
        return ""


class _ExtraStates:
    """The extra states of all modules of a model, as one object with a state."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[str, nn.Module] = {}
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self.owners[f"{path}.{EXTRA}" if path else EXTRA] = module

    def state_dict(self) -> dict[str, Any]:
        """Returns the extra states by the names that they have in a state dict."""
        return {name: module.get_extra_state() for name, module in self.owners.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads extra states."""
        for name, module in self.owners.items():
            module.set_extra_state(state[name])


def _require_restorable(net: Adopted) -> None:
    """Raises if an adopted model cannot be loaded into."""
    net._require_no_edit("restore")
    require_editable(net)
    problem = net._difference()
    if problem:
        raise CheckpointError(f"adopted: {problem}; adopt the model again")
    for follower in net._followers._alive():
        if not isinstance(follower, OptimizerFollower):
            raise CheckpointError(
                f"adopted: a {type(follower).__name__} follows this graph and would be left"
                " behind. Restore first, then make and attach what follows the graph"
            )


def _prepare_graph(
    net: Adopted, saved: SavedModel, place: _Place, document: Any, fields: Fields
) -> list[Callable[[], None]]:
    """Returns the assignments of the nodes, the version and the journal of a graph."""
    journal = rebuild_journal(
        entry(document, "journal", dict, ""), fields, net, saved.version, saved.next_uid
    )
    installs: list[Callable[[], None]] = []
    for space, kept in zip(net.spaces, saved.spaces, strict=True):
        installs.append(partial(space._enrol, Roster.of_space(kept.uids, kept.owners)))
    first_numbers = {}
    if not place.is_small:
        first_numbers = {(one.module, one.name): one.first for one in saved.numbers}
    attributes = {
        "_version": saved.version,
        "_next_uid": saved.next_uid,
        "_structure": Token(),
        "_journal": journal,
        "_first_numbers": first_numbers,
    }
    installs.append(partial(vars(net).update, attributes))
    return installs


def _forget_slots(net: Adopted | None) -> list[Callable[[], None]]:
    """Returns the assignments that drop what optimizers would restore in undo: it belongs to the
    commits of another journal.
    """
    if net is None:
        return []
    followers = net._followers._alive()
    return [partial(follower.take_slots, {}) for follower in followers]


def _remembered_graph(net: Adopted) -> Revert:
    """Returns a function that restores the nodes, the version and the journal of a graph."""
    rosters = [(space, space._roster) for space in net.spaces]
    kept = ("_version", "_next_uid", "_structure", "_journal", "_first_numbers")
    attributes = {name: vars(net)[name] for name in kept}

    def revert() -> None:
        for space, roster in rosters:
            space._enrol(roster)
        vars(net).update(attributes)

    return revert


def _remembered_tensors(tensors: Any) -> Revert:
    """Returns a function that gives tensors their present content back."""
    present = [(tensor, tensor.data, tensor.grad, layout_of(tensor)) for tensor in tensors]

    def revert() -> None:
        for tensor, content, gradient, layout in present:
            install_content(tensor, content, gradient, layout)

    return revert


def _open(holders: list[tuple[nn.Module, str]], opened: Opened | None) -> None:
    for module, name in holders:
        set_opened(module, name, opened)


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Returns every Parameter and buffer by all of its names, tied ones several times."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held.update(model.named_buffers(remove_duplicate=False))
    return held


def _attribute(model: nn.Module, path: str, name: str) -> Any:
    try:
        return vars(model.get_submodule(path)).get(name)
    except AttributeError:
        return None


def _as_json(axis: Expression) -> Any:
    """Returns an axis as JSON: the number of an atom, or a sign and parts."""
    if isinstance(axis, Atom):
        return axis.number
    sign = "+" if isinstance(axis, SumOf) else "*"
    return [sign, *(_as_json(part) for part in axis.parts)]


def _from_json(tree: Any, n_atoms: int, where: str, depth: int = 0) -> Expression:
    if type(tree) is int and 0 <= tree < n_atoms:
        return Atom(tree)
    if type(tree) is not list or len(tree) < 3 or depth > 16 or tree[0] not in ("+", "*"):
        raise CheckpointError(f"{where}: expected the number of an atom, a sum or a product")
    parts = tuple(_from_json(part, n_atoms, where, depth + 1) for part in tree[1:])
    return _KINDS[tree[0]](parts)


def _read_signature(part: Any) -> Signature:
    """Returns the axes at adoption."""
    sizes = entry(part, "atoms", list, "adopted.")
    if not sizes or any(type(size) is not int or not 0 <= size <= LARGEST for size in sizes):
        raise CheckpointError("adopted.atoms: expected sizes")
    axes = {}
    for name, trees in entry(part, "axes", dict, "adopted.").items():
        where = f"adopted.axes[{name!r}]"
        if type(trees) is not list:
            raise CheckpointError(f"{where}: expected one entry for every dimension")
        axes[name] = tuple(_from_json(tree, len(sizes), where) for tree in trees)
    return Signature(axes, tuple(sizes))


def _read_space(
    n: int, part: Any, fields: Fields, next_uid: int, signature: Signature
) -> SavedSpace:
    where = f"adopted.spaces.{n}."
    name = entry(part, "name", str, where)
    atom = number(part, "atom", where, len(signature.sizes) - 1)
    uids = fields.below(next_uid, f"spaces.{n}.uid", torch.int64)
    if len(uids) == 0 or bool((uids.diff() <= 0).any()):
        raise CheckpointError(f"spaces.{n}.uid: expected ascending uids")
    owners = fields.labels(names(part, "owners", where), f"spaces.{n}.owner", len(uids))
    proof = entry(part, "proof", str, where)
    if proof not in get_args(Verdict):
        raise CheckpointError(f"{where}proof: expected a verdict")
    return SavedSpace(
        name,
        atom,
        uids,
        owners,
        _read_texts(part, "pins", where),
        frozenset(_read_texts(part, "marks", where)),
        proof,
        _read_places(part, "writers", where, signature),
        _read_places(part, "readers", where, signature),
    )


def _read_texts(part: Any, name: str, where: str) -> tuple[str, ...]:
    found = entry(part, name, list, where)
    if any(type(text) is not str for text in found):
        raise CheckpointError(f"{where}{name}: expected texts")
    return tuple(found)


def _read_places(
    part: Any, name: str, where: str, signature: Signature
) -> tuple[tuple[str, int], ...]:
    """Returns tensors with one of their dimensions each."""
    found = []
    for item in entry(part, name, list, where):
        if type(item) is not list or [type(value) for value in item] != [str, int]:
            raise CheckpointError(f"{where}{name}: expected tensors and dimensions")
        tensor, dim = item
        if not 0 <= dim < len(signature.axes.get(tensor, ())):
            raise CheckpointError(f"{where}{name}: {tensor!r} has no dimension {dim}")
        found.append((tensor, dim))
    return tuple(found)


def _read_numbers(part: Any, fields: Fields) -> list[Number]:
    """Returns the numbers of modules that edits have changed."""
    found = decode(part.get("numbers"), "adopted.numbers", fields)
    numbers: dict[tuple[str, str], Number] = {}
    if type(found) is not list:
        raise CheckpointError("adopted.numbers: expected a list")
    for item in found:
        if type(item) is not tuple or len(item) != len(Number._fields):
            raise CheckpointError("adopted.numbers: expected a module, a name and two numbers")
        one = Number(*item)
        is_named = type(one.module) is str and type(one.name) is str
        if not is_named or not is_number(one.first) or not is_number(one.now):
            raise CheckpointError("adopted.numbers: expected a module, a name and two numbers")
        numbers[one.module, one.name] = one
    return list(numbers.values())
