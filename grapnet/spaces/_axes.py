"""Axes of tensors as expressions over atoms: sums for concatenation, products for flattening.

The first half of the file serves while a model is typed. An axis is a `Leaf` (n indices that no
operation has distinguished), a `Sum` (axes laid end to end) or a `Product` (axes multiplied, the
outer one first). `unify` makes two axes the same by refining leaves: 768 ~ 12·64 turns one leaf
into a product of two. The second half holds the immutable result: expressions over numbered atoms,
and the arithmetic that finds the positions of an atom on an axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


class Stuck(Exception):
    """Two axes cannot be the same, or an axis cannot be divided as asked."""


class Leaf:
    """A set of indices that no operation has distinguished; `bound` is the axis that replaced it.

    Leaves of size 1 are never bound: they broadcast, so equal sizes do not make them the same axis.
    """

    __slots__ = ("bound", "marks", "number", "pins", "size")
    made = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.bound: Axis | None = None
        self.pins: tuple[str, ...] = ()
        self.marks: frozenset[str] = frozenset()
        # Leaves are numbered in the order of their making, which tells the line that made one.
        Leaf.made += 1
        self.number = Leaf.made

    def __repr__(self) -> str:
        return f"a{self.number}:{self.size}"


class Sum:
    """Axes laid end to end. Made by `sum_of`, which keeps it flat."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: tuple[Axis, ...]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)

    def __repr__(self) -> str:
        return "(" + " + ".join(map(repr, self.parts)) + ")"


class Product:
    """Axes multiplied, the outer one first. Made by `product_of`, which keeps it flat."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: tuple[Axis, ...]) -> None:
        self.parts = parts
        self.size = prod(part.size for part in parts)

    def __repr__(self) -> str:
        return "·".join(map(repr, self.parts))


Axis: TypeAlias = Leaf | Sum | Product

# The axis of an inserted dimension. Leaves of size 1 are never bound, so one serves everywhere.
UNIT = Leaf(1)
EMPTY = Leaf(0)


def sum_of(parts: Iterable[Axis]) -> Axis:
    """Returns axes laid end to end, without empty ones and without a sum inside of a sum."""
    flat: list[Axis] = []
    for part in parts:
        found = find(part)
        if isinstance(found, Sum):
            flat.extend(found.parts)
        elif found.size:
            flat.append(found)
    if not flat:
        return EMPTY
    if len(flat) == 1:
        return flat[0]
    return Sum(tuple(flat))


def product_of(parts: Iterable[Axis]) -> Axis:
    """Returns axes multiplied, without units and without a product inside of a product."""
    flat: list[Axis] = []
    unit: Axis = UNIT
    for part in parts:
        found = find(part)
        if isinstance(found, Product):
            flat.extend(found.parts)
        elif found.size == 1:
            unit = found
        else:
            flat.append(found)
    if not flat:
        return unit
    if len(flat) == 1:
        return flat[0]
    return Product(tuple(flat))


def find(axis: Axis) -> Axis:
    """Returns what an axis is by now: bindings followed and compressed, sums and products flat."""
    if isinstance(axis, Leaf):
        if axis.bound is None:
            return axis
        axis.bound = find(axis.bound)
        return axis.bound
    for part in axis.parts:
        # Nearly all parts are leaves, and sums of many parts are looked at all the time.
        if isinstance(part, Leaf):
            if part.bound is not None:
                break
        elif find(part) is not part:
            break
    else:
        return axis
    if isinstance(axis, Sum):
        return sum_of(axis.parts)
    return product_of(axis.parts)


def leaves(axis: Axis) -> list[Leaf]:
    """Returns the leaves of an axis in order; one that occurs twice comes twice."""
    axis = find(axis)
    if isinstance(axis, Leaf):
        return [axis]
    collected: list[Leaf] = []
    for part in axis.parts:
        if isinstance(part, Leaf):
            collected.append(part)
        else:
            collected.extend(leaves(part))
    return collected


def pin(axis: Axis, why: str) -> None:
    """Notes on every leaf of an axis a reason why its size cannot change."""
    for leaf in leaves(axis):
        if leaf.size > 1 and why not in leaf.pins:
            leaf.pins = (*leaf.pins, why)


def mark(axis: Axis, what: str) -> None:
    """Notes on every leaf of an axis something that an operation does over it."""
    for leaf in leaves(axis):
        if leaf.size > 1 and what not in leaf.marks:
            leaf.marks = leaf.marks | {what}


def _bind(leaf: Leaf, axis: Axis) -> None:
    """Makes a leaf stand for an axis; its pins and marks pass on to the leaves of the axis.

    Both have the same size, so the axis cannot contain the leaf as a part of itself.
    """
    leaf.bound = axis
    if not leaf.pins and not leaf.marks:
        return
    for member in leaves(axis):
        for why in leaf.pins:
            pin(member, why)
        if member.size > 1:
            member.marks = member.marks | leaf.marks


def _sizes_of(axis: Axis) -> str:
    """Returns the sizes of an axis: 12·64, (8 + 4)."""
    axis = find(axis)
    if isinstance(axis, Leaf):
        return str(axis.size)
    if isinstance(axis, Sum):
        return "(" + " + ".join(_sizes_of(part) for part in axis.parts) + ")"
    return "·".join(_sizes_of(part) for part in axis.parts)


def unify(a: Axis, b: Axis) -> None:
    """Makes two axes the same by refining their leaves.

    Raises:
        Stuck: When they cannot be the same. What was refined before that holds nevertheless,
            for it follows from the equality; the caller pins both axes.
    """
    a = find(a)
    b = find(b)
    if a is b:
        return
    if a.size != b.size:
        raise Stuck(f"{_sizes_of(a)} is not {_sizes_of(b)}")
    if a.size <= 1:
        return
    if isinstance(a, Leaf):
        _bind(a, b)
    elif isinstance(b, Leaf):
        _bind(b, a)
    elif isinstance(a, Sum):
        _unify_sum(a, b)
    elif isinstance(b, Sum):
        _unify_sum(b, a)
    else:
        _unify_products(a, b)


def _unify_sum(a: Sum, b: Sum | Product) -> None:
    """Cuts `b` where the parts of `a` end, and unifies piece by piece."""
    if isinstance(b, Sum) and [part.size for part in a.parts] == [part.size for part in b.parts]:
        for left, right in zip(a.parts, b.parts, strict=True):
            unify(left, right)
        return
    rest: Axis = b
    for part in a.parts[:-1]:
        piece, rest = cut(rest, part.size)
        unify(part, piece)
    unify(a.parts[-1], rest)


def _unify_products(a: Product, b: Product) -> None:
    """Peels off the common outer factor of both, again and again."""
    left: Axis = a
    right: Axis = b
    while True:
        left = find(left)
        right = find(right)
        if not (isinstance(left, Product) and isinstance(right, Product)):
            break
        shared = gcd(left.parts[0].size, right.parts[0].size)
        if shared == 1:
            raise Stuck(f"{_sizes_of(left)} and {_sizes_of(right)} share no outer factor")
        outer_left, left = factored(left, shared)
        # Factoring the left may have refined leaves of the right.
        outer_right, right = factored(right, shared)
        unify(outer_left, outer_right)
    unify(left, right)


def factored(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """Divides an axis into an outer factor of size `outer` and an inner one.

    Raises:
        Stuck: When its parts do not allow it.
    """
    axis = find(axis)
    if outer == axis.size:
        return axis, UNIT
    if outer == 1:
        return UNIT, axis
    if outer == 0 or axis.size % outer:
        raise Stuck(f"{_sizes_of(axis)} is no multiple of {outer}")
    inner = axis.size // outer
    if isinstance(axis, Leaf):
        first = Leaf(outer)
        second = Leaf(inner)
        _bind(axis, Product((first, second)))
        return first, second
    if isinstance(axis, Product):
        head = axis.parts[0]
        tail = product_of(axis.parts[1:])
        if outer % head.size == 0:
            middle, rest = factored(tail, outer // head.size)
            return product_of((head, middle)), find(rest)
        if head.size % outer == 0:
            first, rest = factored(head, outer)
            return find(first), product_of((rest, tail))
        raise Stuck(f"{_sizes_of(axis)} has no outer factor of {outer}")
    # A sum: every part is a multiple of the inner factor, and all share the same inner factor.
    shared: Axis = Leaf(inner)
    outers: list[Axis] = []
    for part in axis.parts:
        if part.size % inner:
            raise Stuck(f"{_sizes_of(axis)} has no outer factor of {outer}")
        first, second = factored(part, part.size // inner)
        unify(second, shared)
        outers.append(first)
    return sum_of(outers), find(shared)


def cut(axis: Axis, size: int) -> tuple[Axis, Axis]:
    """Divides an axis into its first `size` indices and the rest.

    Raises:
        Stuck: When the cut goes through the middle of a factor.
    """
    axis = find(axis)
    if size == 0:
        return EMPTY, axis
    if size == axis.size:
        return axis, EMPTY
    if size > axis.size:
        raise Stuck(f"{_sizes_of(axis)} has no {size} indices")
    if isinstance(axis, Leaf):
        first = Leaf(size)
        second = Leaf(axis.size - size)
        _bind(axis, Sum((first, second)))
        return first, second
    if isinstance(axis, Product):
        inner = product_of(axis.parts[1:])
        if size % inner.size:
            raise Stuck(f"{size} is no boundary of {_sizes_of(axis)}")
        left, right = cut(axis.parts[0], size // inner.size)
        return product_of((left, inner)), product_of((right, inner))
    # A sum: the cut falls between two parts, or into the part at `index`.
    index = 0
    rest = size
    while rest >= axis.parts[index].size:
        rest -= axis.parts[index].size
        index += 1
    before = axis.parts[:index]
    after = axis.parts[index:]
    if rest:
        left, right = cut(after[0], rest)
        return sum_of((*before, left)), sum_of((right, *after[1:]))
    return sum_of(before), sum_of(after)


def slice_of(axis: Axis, start: int, stop: int) -> Axis:
    """Returns the indices from `start` to `stop` of an axis.

    Raises:
        Stuck: When a cut goes through the middle of a factor.
    """
    _, rest = cut(axis, start)
    middle, _ = cut(rest, stop - start)
    return find(middle)


@dataclass(frozen=True, slots=True)
class Atom:
    """An atom of an expression; a list of sizes, indexed by its number, has its size."""

    number: int


@dataclass(frozen=True, slots=True)
class SumOf:
    """Expressions laid end to end."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class ProductOf:
    """Expressions multiplied, the outer one first; the outer one is never a sum."""

    parts: tuple[Expression, ...]


Expression: TypeAlias = Atom | SumOf | ProductOf


class Numbers(dict[Leaf, int]):
    """Numbers of leaves, in the order of their first appearance."""

    def __init__(self) -> None:
        super().__init__()
        # What axes were frozen to; many tensors of a model have the same ones.
        self._frozen: dict[Axis | tuple[Axis, ...], Expression] = {}

    def frozen(self, axis: Axis) -> Expression:
        """Returns an axis as an expression; leaves without a number get the next one.

        The form is canonical: (a + b)·c has the same positions as a·c + b·c, and the latter is
        returned. No axis may be refined between two calls.
        """
        axis = find(axis)
        key: Axis | tuple[Axis, ...] = axis
        if isinstance(axis, Sum):
            # Sums of the same parts are made again and again.
            key = axis.parts
        expression = self._frozen.get(key)
        if expression is None:
            expression = self._expression(axis)
            self._frozen[key] = expression
        return expression

    def _expression(self, axis: Axis) -> Expression:
        if isinstance(axis, Leaf):
            return Atom(self.setdefault(axis, len(self)))
        if isinstance(axis, Product):
            head = axis.parts[0]
            tail = axis.parts[1:]
            if not isinstance(head, Sum):
                return ProductOf(tuple(self.frozen(part) for part in axis.parts))
            terms = [product_of((part, *tail)) for part in head.parts]
        else:
            terms = axis.parts
        parts: list[Expression] = []
        for term in terms:
            part = self.frozen(term)
            if isinstance(part, SumOf):
                parts.extend(part.parts)
            else:
                parts.append(part)
        return SumOf(tuple(parts))


def size_of(expression: Expression, sizes: Sequence[int]) -> int:
    """Returns the size of an expression whose atom number `n` has size `sizes[n]`."""
    if isinstance(expression, Atom):
        return sizes[expression.number]
    if isinstance(expression, SumOf):
        return sum(size_of(part, sizes) for part in expression.parts)
    return prod(size_of(part, sizes) for part in expression.parts)


def atoms_of(expression: Expression) -> list[int]:
    """Returns the numbers of the atoms of an expression, in order, each once."""
    if isinstance(expression, Atom):
        return [expression.number]
    found: dict[int, None] = {}
    for part in expression.parts:
        found.update(dict.fromkeys(atoms_of(part)))
    return list(found)


def occurrences(expression: Expression, atom: int, sizes: Sequence[int]) -> int:
    """Returns how many positions on an axis belong to each index of an atom.

    Example:
        >>> occurrences(ProductOf((Atom(0), Atom(1))), 0, [12, 64])
        64
    """
    if isinstance(expression, Atom):
        return int(expression.number == atom)
    if isinstance(expression, SumOf):
        return sum(occurrences(part, atom, sizes) for part in expression.parts)
    found = 0
    others = 1
    for part in expression.parts:
        inside = occurrences(part, atom, sizes)
        if inside and not found:
            found = inside
        else:
            others *= size_of(part, sizes)
    return found * others


def positions(expression: Expression, atom: int, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Returns the positions on an axis that belong to each index of an atom.

    Returns:
        `[sizes[atom], k]`, ascending in each row; k is 0 when the atom does not occur.

    Example:
        >>> twice = SumOf((Atom(0), ProductOf((Atom(1), Atom(0)))))
        >>> positions(twice, 0, [2, 3]).tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    found = _positions(expression, atom, sizes)
    if found is None:
        return np.empty((sizes[atom], 0), np.int64)
    return found


def _positions(expression: Expression, atom: int, sizes: Sequence[int]) -> NDArray[np.int64] | None:
    """Does what `positions` does; None when the atom does not occur."""
    if isinstance(expression, Atom):
        if expression.number != atom:
            return None
        return np.arange(sizes[atom], dtype=np.int64)[:, None]
    if isinstance(expression, SumOf):
        blocks: list[NDArray[np.int64]] = []
        offset = 0
        for part in expression.parts:
            inside = _positions(part, atom, sizes)
            if inside is not None:
                blocks.append(inside + offset)
            offset += size_of(part, sizes)
        if not blocks:
            return None
        return np.concatenate(blocks, axis=1)
    # A product, from the outer factor inwards: `found` are positions in the factors so far.
    found: NDArray[np.int64] | None = None
    outer = 1
    for part in expression.parts:
        inside = _positions(part, atom, sizes)
        inner = size_of(part, sizes)
        if found is not None:
            # A position of the outer factors becomes a run of `inner` positions.
            found = found[:, :, None] * inner + np.arange(inner)
            found = found.reshape(len(found), -1)
        if inside is not None:
            # A position in this factor occurs once in each of the outer positions.
            spread = inside[:, None, :] + (np.arange(outer) * inner)[:, None]
            spread = spread.reshape(len(inside), -1)
            if found is None:
                found = spread
            else:
                found = _union(found, spread)
        outer *= inner
    return found


def _union(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the union of each row of two arrays, ascending.

    An atom that occurs twice in a product has as many positions for each of its indices, so the
    rows stay equally long.
    """
    merged = np.sort(np.concatenate((a, b), axis=1), axis=1)
    first = np.ones(merged.shape, bool)
    first[:, 1:] = merged[:, 1:] != merged[:, :-1]
    return merged[first].reshape(len(merged), -1)


def covered(
    expression: Expression, chosen: Mapping[int, NDArray[np.bool_]], sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """Returns for each position of an axis whether an index that meets there is chosen.

    Args:
        expression: The axis.
        chosen: For some atoms, which of their indices are chosen.
        sizes: The size of every atom.

    Example:
        >>> axis = SumOf((Atom(0), ProductOf((Atom(1), Atom(0)))))
        >>> np.flatnonzero(covered(axis, {0: np.array([False, True])}, [2, 3])).tolist()
        [1, 3, 5, 7]
    """
    if isinstance(expression, Atom):
        mask = chosen.get(expression.number)
        if mask is None:
            mask = np.zeros(sizes[expression.number], np.bool_)
        return mask
    masks = [covered(part, chosen, sizes) for part in expression.parts]
    if isinstance(expression, SumOf):
        return np.concatenate(masks)
    # [outer positions], joined with [inner positions] one factor after the other
    joined = masks[0]
    for mask in masks[1:]:
        joined = (joined[:, None] | mask).reshape(-1)
    return joined
