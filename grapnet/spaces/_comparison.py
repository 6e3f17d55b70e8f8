"""What differs between two adopted models of the same kind, node by node and number by number."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grapnet.core._grid import Grid
from grapnet.core._grid_map import GridMap
from grapnet.core._index_map import IndexMap
from grapnet.core._opened import CUT, FREE

from ._adopted import Adopted
from ._signature import signature_of
from ._space import Space

_ABSENT = 3  # beside CUT, FREE and FROZEN: a number that belongs to a node of one model alone


@dataclass(frozen=True)
class Difference:
    """How much of one thing differs between two models.

    Attributes:
        added: how many the second model has, and the first has not.
        removed: how many the first has, and the second has not.
        changed: how many both have, and differently.
        largest: the largest change of a number.
        names_added: which are added: uids of nodes, or names of tensors.
        names_removed: which are removed.
        names_changed: which are changed, where they have names.
    """

    added: int = 0
    removed: int = 0
    changed: int = 0
    largest: float | None = None
    names_added: tuple[str, ...] = ()
    names_removed: tuple[str, ...] = ()
    names_changed: tuple[str, ...] = ()


def differences(a: Adopted, b: Adopted) -> dict[str, Difference]:
    """Returns what differs between two adopted models, by what it is; empty if nothing does.

    Nodes are the same if they have the same uid, as in two files of one model. Histories are not
    compared. Numbers are compared where the models have the same axes, which edits of blocks
    change.

    Args:
        a: a model, or that of a file: `gn.open(path).adopted`.
        b: another one.

    Examples:
        >>> import copy
        >>> import grapnet as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> net = gn.adopt(model, torch.randn(1, 3))
        >>> other = gn.adopt(copy.deepcopy(model), torch.randn(1, 3))
        >>> with other.edit() as edit:
        ...     edit.remove_nodes(other.space("0")[:1])
        >>> differences(net, net)
        {}
        >>> differences(net, other)["nodes of 0"].removed
        1
    """
    found: dict[str, Difference] = {}
    partners = _partners(a, b)
    for space in b.spaces:
        if not any(space is partner for partner in partners.values()):
            found[f"space {space.name}"] = Difference(added=1)
    for space in a.spaces:
        if space.name in partners:
            found |= _compared_spaces(space, partners[space.name])
        else:
            found[f"space {space.name}"] = Difference(removed=1)
    if not _have_same_axes(a, b):
        # After an edit of blocks, a tensor has the name that another had before.
        added = tuple(name for name in b._grids() if name not in a._grids())
        removed = tuple(name for name in a._grids() if name not in b._grids())
        found["tensors"] = Difference(
            len(added), len(removed), names_added=added, names_removed=removed
        )
        found["axes, so that numbers are not compared"] = Difference(changed=1)
        return found
    found |= _compared_tensors(a, b)
    mine = a.numbers
    others = b.numbers
    changed = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
    if changed:
        found["numbers of modules"] = Difference(changed=len(changed), names_changed=tuple(changed))
    return found


def _have_same_axes(a: Adopted, b: Adopted) -> bool:
    """Returns whether two models have the same tensors over the same spaces, of any sizes."""
    mine, my_atoms = signature_of(a._typed)
    other, other_atoms = signature_of(b._typed)
    my_spaces = [my_atoms[space._atom] for space in a.spaces]
    other_spaces = [other_atoms[space._atom] for space in b.spaces]
    if mine.axes != other.axes or my_spaces != other_spaces:
        return False
    # What is no space, such as the size of a kernel, has to be the same.
    same_sizes = dict.fromkeys(my_spaces, 1)
    return mine.resized(same_sizes).sizes == other.resized(same_sizes).sizes


def _partners(a: Adopted, b: Adopted) -> dict[str, Space]:
    """Returns for the name of each space of a model the same space of another: the one that has
    nodes of it, whatever it is called there, or else the one of that name.
    """
    by_uid: dict[int, Space] = {}
    for space in b.spaces:
        by_uid |= dict.fromkeys(space.uid.tolist(), space)
    found: dict[str, Space] = {}
    for space in a.spaces:
        shared = [by_uid[uid] for uid in space.uid.tolist() if uid in by_uid]
        if shared:
            found[space.name] = shared[0]
    taken = set(map(id, found.values()))
    by_name = {space.name: space for space in b.spaces if id(space) not in taken}
    for space in a.spaces:
        if space.name not in found and space.name in by_name:
            found[space.name] = by_name[space.name]
    return found


def _compared_spaces(mine: Space, other: Space) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    if mine.name != other.name:
        found[f"space {mine.name}, now {other.name}"] = Difference(changed=1)
    gone, come = _rows_apart(mine, other)
    if len(gone) or len(come):
        found[f"nodes of {other.name}"] = Difference(
            len(come),
            len(gone),
            names_added=_texts(other.uid[come.long()]),
            names_removed=_texts(mine.uid[gone.long()]),
        )
    owners = dict(zip(other.uid.tolist(), other.owners, strict=True))
    renamed = []
    for uid, owner in zip(mine.uid.tolist(), mine.owners, strict=True):
        if uid in owners and owners[uid] != owner:
            renamed.append(str(uid))
    if renamed:
        found[f"owners of {other.name}"] = Difference(
            changed=len(renamed), names_changed=tuple(renamed)
        )
    return found


def _rows_apart(mine: Space, other: Space) -> tuple[Tensor, Tensor]:
    """Returns the rows of the nodes that only the first has, and that only the second has."""
    gone = (~torch.isin(mine.uid, other.uid)).nonzero().flatten()
    come = (~torch.isin(other.uid, mine.uid)).nonzero().flatten()
    return gone.int(), come.int()


def _texts(uids: Tensor) -> tuple[str, ...]:
    return tuple(map(str, uids.tolist()))


def _compared_tensors(a: Adopted, b: Adopted) -> dict[str, Difference]:
    """Returns which numbers of tensors were cut, frozen or changed, in models of the same axes."""
    found: dict[str, Difference] = {}
    moves = _moves(a, b)
    total = 0
    largest = 0.0
    names: list[str] = []
    for name, grid in a._grids().items():
        other = b._grids()[name]
        numbers = grid.whole
        kinds = _kinds(grid)
        if name in moves:
            numbers = moves[name].carry(numbers)
            kinds = moves[name].carry(kinds, _ABSENT)
        others = _kinds(other)
        found |= _compared_kinds(name, kinds, others)
        is_shared = (kinds != CUT) & (kinds != _ABSENT) & (others != CUT)
        changes = _changes(numbers[is_shared], other.whole[is_shared])
        if len(changes):
            total += len(changes)
            names.append(name)
            largest = max([largest, *_finite(changes)])
    if names:
        what = "tensor" if len(names) == 1 else "tensors"
        found[f"numbers in {len(names)} {what}"] = Difference(
            changed=total, largest=largest, names_changed=tuple(names)
        )
    return found


def _moves(a: Adopted, b: Adopted) -> dict[str, GridMap]:
    """Returns how tensors move from one model to another by the uids of nodes."""
    moved = {}
    # The atoms of the first model, in the sizes of the second.
    after = a._atom_sizes()
    for mine, other in zip(a.spaces, b.spaces, strict=True):
        after[mine._atom] = len(other)
        gone, come = _rows_apart(mine, other)
        if len(gone) or len(come):
            moved[mine._atom] = IndexMap(len(mine), len(other), gone, come)
    return a._maps_of(moved, a._atom_sizes(), after)


def _kinds(grid: Grid) -> Tensor:
    """Returns for every number of a tensor whether it is cut, free or frozen, on its device."""
    device = grid.tensor.device
    if grid.opened is None:
        return torch.full(grid.shape, FREE, dtype=torch.uint8, device=device)
    pattern = grid.opened.pattern
    return pattern.kinds.repeat_interleave(pattern.width).view(pattern.shape).to(device)


def _compared_kinds(name: str, kinds: Tensor, others: Tensor) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    is_shared = kinds != _ABSENT
    was_cut = is_shared & (kinds == CUT)
    is_cut = is_shared & (others == CUT)
    added = int((was_cut & ~is_cut).sum())
    removed = int((is_cut & ~was_cut).sum())
    if added or removed:
        found[f"cells of {name}"] = Difference(added, removed)
    other_kinds = int((is_shared & ~was_cut & ~is_cut & (kinds != others)).sum())
    if other_kinds:
        found[f"frozen in {name}"] = Difference(changed=other_kinds)
    return found


def _changes(first: Tensor, second: Tensor) -> Tensor:
    """Returns the size of every change between two vectors."""
    first = first.double()
    second = second.double().to(first.device)
    # Bit for bit, so that NaN equals itself and 0 differs from -0.
    differs = first.view(torch.int64) != second.view(torch.int64)
    return (first - second).abs()[differs]


def _finite(changes: Tensor) -> Sequence[float]:
    """Returns the largest finite change, if there is one."""
    finite = changes[changes.isfinite()]
    if len(finite) == 0:
        return ()
    return (float(finite.max()),)
