"""The axes of all tensors of a model in one canonical form, which two sessions can compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._axes import Atom, Expression, ProductOf, SumOf, atoms_of, size_of
from ._discovery import Typed

# Indices of size 1 broadcast, so nothing tells them apart: all of them are this atom.
UNIT = Atom(0)


@dataclass(frozen=True)
class Signature:
    """The axes of every tensor, over atoms that are numbered by their first appearance.

    Attributes:
        axes: the axes of every Parameter and buffer with a dimension.
        sizes: the size of every atom; that of atom 0 is 1.
    """

    axes: dict[str, tuple[Expression, ...]]
    sizes: tuple[int, ...]

    def resized(self, sizes: Mapping[int, int]) -> "Signature":
        """Returns the signature with other sizes of some atoms."""
        changed = tuple(sizes.get(atom, size) for atom, size in enumerate(self.sizes))
        return Signature(self.axes, changed)

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor."""
        return [size_of(axis, self.sizes) for axis in self.axes.get(name, ())]

    def difference(self, other: "Signature") -> str:
        """Returns the first tensor of which another signature has other axes; empty if there is
        none.
        """
        for name in (*self.axes, *other.axes):
            mine = self.axes.get(name)
            if mine != other.axes.get(name) or self.shape(name) != other.shape(name):
                return name
        # The same shapes may be products of other sizes: 12 heads of 64, or 6 of 128.
        for name, axes in self.axes.items():
            for axis in axes:
                for atom in atoms_of(axis):
                    if self.sizes[atom] != other.sizes[atom]:
                        return name
        return ""


def signature_of(
    typed: Typed, sizes: Sequence[int] | None = None
) -> tuple[Signature, dict[int, int]]:
    """Returns the signature of a typed model, and the numbers of its atoms there by their own.

    Args:
        typed: the typed model.
        sizes: sizes of the atoms; those of the typing by default.
    """
    if sizes is None:
        sizes = typed.sizes()
    numbers: dict[int, int] = {}
    axes = {}
    for name, expressions in typed.axes.items():
        axes[name] = tuple(_renumbered(axis, sizes, numbers) for axis in expressions)
    in_order = [1] + [sizes[atom] for atom in numbers]
    return Signature(axes, tuple(in_order)), numbers


def _renumbered(axis: Expression, sizes: Sequence[int], numbers: dict[int, int]) -> Expression:
    if isinstance(axis, Atom):
        if sizes[axis.number] == 1:
            return UNIT
        return Atom(numbers.setdefault(axis.number, len(numbers) + 1))
    parts = [_renumbered(part, sizes, numbers) for part in axis.parts]
    if isinstance(axis, SumOf):
        return SumOf(tuple(parts))
    factors = [part for part in parts if part != UNIT]
    if len(factors) < 2:
        return factors[0] if factors else UNIT
    return ProductOf(tuple(factors))
