"""The probe of spaces: whether removing nodes equals silencing their readers, in numbers.

Types of axes tell which positions belong to a node, but not whether the size of a space is also a
number in the formula, as the width of a head is in the scale of an attention. So the first edit of
a space compares two copies of the model in float64: one whose readers of some nodes are 0, and one
without these nodes. In a large model the other spaces are made narrow first.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from grapnet._torch import pytree
from grapnet.core._errors import GrapNetError
from grapnet.core._index_map import IndexMap, empty_positions

from ._axes import Atom, Expression, ProductOf, atoms_of, covered
from ._copying import collector_paused, copy_model
from ._discovery import Example
from ._typing import CONTRACTED

if TYPE_CHECKING:
    from ._adopted import Adopted
    from ._space import Space, Verdict

# Bytes of a copy in float64 up to which no space is made narrow.
MOST_BYTES = 256 << 20
# Nodes that a space keeps when it is made narrow.
NARROW = 8


@collector_paused()
def probe(net: "Adopted", rows: "Mapping[Space, np.ndarray]") -> None:
    """Notes for spaces whether removing some of their nodes is exact.

    All are compared at once, and one by one only if that shows a difference.
    """
    verdict = _verdict(net, rows)
    for space, own in rows.items():
        space._proof = verdict
        if verdict != "exact" and len(rows) > 1:
            space._proof = _verdict(net, {space: own})


def _verdict(net: "Adopted", rows: "Mapping[Space, np.ndarray]") -> "Verdict":
    """Returns "exact" or "differs"; "unproved" if the comparison cannot run."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _compare(net, rows)
    except (GrapNetError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return "unproved"


def _compare(net: "Adopted", rows: "Mapping[Space, np.ndarray]") -> "Verdict":
    narrow = _narrow_spaces(net, rows)
    whole = _Copy(net, narrow)
    leaving = {space._atom: own for space, own in rows.items()}
    smaller = _Copy(net, {**narrow, **leaving})
    before = None
    if len(rows) == 1:
        before = whole.run()
    whole.silence(rows)
    silent = whole.run()
    removed = smaller.run()
    for number, (one, other) in enumerate(zip(silent, removed, strict=True)):
        if one.shape != other.shape:
            return "differs"
        error = (one - other).abs().max().item()
        allowed = 1e-9 * one.abs().max().item()
        if before is not None:
            # Some models compute parts in float32 whatever the dtype of their weights.
            effect = (before[number] - one).abs().max().item()
            allowed = max(allowed, 1e-3 * effect)
        if not error <= allowed:
            return "differs"
    return "exact"


def _narrow_spaces(net: "Adopted", probed: "Mapping[Space, np.ndarray]") -> dict[int, np.ndarray]:
    """Returns the rows of other spaces to leave out, by atom; none of a small model."""
    size = sum(math.prod(grid.shape) for grid in net._grids().values()) * 8
    if size <= MOST_BYTES:
        return {}
    found = {}
    for space in net.spaces:
        # Factors of an axis, as heads are, may need numbers of the model to follow.
        is_factor = any(_is_factor(axis, space._atom) for axis in space._members.values())
        if not space.pins and space not in probed and not is_factor and len(space) > NARROW:
            found[space._atom] = np.arange(NARROW, len(space))
    return found


def _is_factor(axis: Expression, atom: int) -> bool:
    """Returns whether an atom is multiplied with others on an axis."""
    if isinstance(axis, Atom):
        return False
    if isinstance(axis, ProductOf):
        return atom in atoms_of(axis)
    return any(_is_factor(part, atom) for part in axis.parts)


class _Copy:
    """A copy of the model in float64 without some nodes."""

    def __init__(self, net: "Adopted", leaving: Mapping[int, np.ndarray]) -> None:
        self.model, self.tensors, self._sizes = copy_without(net, leaving, _like, search=False)
        self.model.eval()
        self._net = net

    def silence(self, rows: "Mapping[Space, np.ndarray]") -> None:
        """Sets the weights that read nodes to 0; where only activations read them, as in the
        product of queries and keys, everything that writes them.
        """
        # For each tensor and dimension, which indices of its atoms are silent.
        silent: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        for space, own in rows.items():
            places: Iterable[tuple[str, int]] = self._net._typed.readers.get(space._atom, ())
            if CONTRACTED in space._marks and not places:
                places = space._members
            mask = np.zeros(self._sizes[space._atom], np.bool_)
            mask[own] = True
            for place in places:
                silent.setdefault(place, {})[space._atom] = mask
        for (name, dim), masks in silent.items():
            mask = covered(self._net._typed.axes[name][dim], masks, self._sizes)
            at = torch.from_numpy(np.flatnonzero(mask))
            self.tensors[name].index_fill_(dim, at, 0.0)

    def run(self) -> list[Tensor]:
        """Returns all tensors that the model returns for the examples."""
        found = []
        for args, kwargs in _doubled(self._net._gates.examples):
            output = self.model(*args, **kwargs)
            found += [leaf.clone() for leaf in floating_leaves(output)]
        return found


def floating_leaves(output: Any) -> list[Tensor]:
    """Returns the tensors of real numbers that a model returns."""
    leaves = pytree.tree_leaves(_plain(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def run_copy(net: "Adopted", prepare: Callable[[nn.Module], None]) -> None:
    """Runs a copy of the model in float64 on the first example, in evaluation mode.

    Args:
        net: the adopted model.
        prepare: is called with the copy first, to register hooks.
    """
    model, _, example = copy_in_double(net)
    prepare(model)
    with torch.random.fork_rng(devices=[]):
        model(*example.args, **example.kwargs)


def copy_in_double(net: "Adopted") -> tuple[nn.Module, dict[str, Tensor], Example]:
    """Returns a copy of the model in float64, in evaluation mode, its tensors by name, and the
    first example.
    """
    model, tensors, _ = copy_without(net, {}, _like, search=False)
    return model.eval(), tensors, _doubled(net._gates.examples)[0]


def copy_without(
    net: "Adopted",
    leaving: Mapping[int, np.ndarray],
    convert: Callable[[Tensor, Tensor], Tensor],
    *,
    search: bool = True,
) -> tuple[nn.Module, dict[str, Tensor], list[int]]:
    """Returns a copy of the model without some nodes, its tensors by name, and the sizes of its
    atoms.

    Args:
        net: the adopted model.
        leaving: the ascending rows of the nodes to leave out, by atom.
        convert: makes a tensor of the copy from that of the model and its content in the copy.
        search: whether to look for numbers of modules that must follow.

    Raises:
        EditError: the model cannot run without these nodes.
    """
    before = net._atom_sizes()
    after = list(before)
    moved = {}
    for atom, rows in leaving.items():
        after[atom] -= len(rows)
        gone = torch.from_numpy(rows.astype(np.int32))
        moved[atom] = IndexMap(before[atom], after[atom], gone, empty_positions())
    maps = net._maps_of(moved, before, after)
    changed = [space for space in net.spaces if space._atom in leaving]
    attributes = net._gates.foresee(net.model, changed, before, after, search=search)
    memo: dict[int, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, grid in net._grids().items():
        content = grid.whole
        if name in maps:
            content = maps[name].carry(content)
        tensors[name] = convert(grid.tensor, content)
        memo[id(grid.tensor)] = tensors[name]
    model, _, _ = copy_model(net.model, memo, lambda tensor: convert(tensor, tensor))
    for change in attributes:
        setattr(model.get_submodule(change.module), change.name, change.after)
    return model, tensors, after


def _like(tensor: Tensor, content: Tensor) -> Tensor:
    """Returns the content of a tensor on the CPU, in float64, as a Parameter if it is one."""
    content = content.cpu()
    content = content.double() if content.is_floating_point() else content.clone()
    if content.data_ptr() == tensor.data_ptr():
        content = content.clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(content, requires_grad=False)
    return content


def _doubled(examples: Sequence[Example]) -> list[Example]:
    """Returns examples on the CPU, in float64."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double() if value.is_floating_point() else value

    return [Example(*pytree.tree_map(convert, tuple(example))) for example in examples]


def _plain(output: Any) -> Any:
    """Returns an output in which objects with attributes are dicts."""
    if isinstance(output, Tensor | dict | list | tuple):
        return output
    return vars(output) if hasattr(output, "__dict__") else output
