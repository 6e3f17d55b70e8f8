"""Axes by arithmetic: every operation against lists of labels, one for each position."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grapnet.spaces import _axes
from grapnet.spaces._axes import (
    Atom,
    Axis,
    Expression,
    Leaf,
    Numbers,
    Product,
    ProductOf,
    Stuck,
    Sum,
    SumOf,
    atoms_of,
    covered,
    cut,
    factored,
    find,
    leaves,
    mark,
    pin,
    positions,
    product_of,
    size_of,
    slice_of,
    sum_of,
    unify,
)

Labels = list[frozenset[tuple[object, int]]]  # which indices of which atoms meet at each position


def labels_of(expression: Expression, sizes: list[int]) -> Labels:
    """Returns the labels of every position of an expression, the slow and obvious way."""
    if isinstance(expression, Atom):
        return [frozenset({(expression.number, i)}) for i in range(sizes[expression.number])]
    parts = [labels_of(part, sizes) for part in expression.parts]
    if isinstance(expression, SumOf):
        return [label for part in parts for label in part]
    return [frozenset().union(*chosen) for chosen in product(*parts)]


def layout(axis: Axis) -> Labels:
    """Returns the labels of every position of an axis as it is by now; units have none."""
    axis = find(axis)
    if isinstance(axis, Leaf):
        if axis.size == 1:
            return [frozenset()]
        return [frozenset({(axis, i)}) for i in range(axis.size)]
    parts = [layout(part) for part in axis.parts]
    if isinstance(axis, Sum):
        return [label for part in parts for label in part]
    return [frozenset().union(*chosen) for chosen in product(*parts)]


def expressions(atoms: int) -> st.SearchStrategy[Expression]:
    def joined(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        parts = st.lists(children, min_size=2, max_size=3).map(tuple)
        return parts.map(SumOf) | parts.map(ProductOf)

    return st.recursive(st.integers(0, atoms - 1).map(Atom), joined, max_leaves=5)


@st.composite
def axes(draw: st.DrawFn, most: int = 48) -> Axis:
    """Draws an axis whose leaves are new, some of them the same one twice."""
    pool = [Leaf(draw(st.integers(1, 6))) for _ in range(3)]

    def joined(children: st.SearchStrategy[Axis]) -> st.SearchStrategy[Axis]:
        parts = st.lists(children, min_size=2, max_size=3)
        return parts.map(sum_of) | parts.map(product_of)

    drawn = st.sampled_from(pool) | st.integers(1, 12).map(Leaf)
    axis = draw(st.recursive(drawn, joined, max_leaves=4))
    assume(axis.size <= most)
    return axis


@settings(max_examples=60)
@given(expressions(3), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_positions_are_where_the_labels_are(expression: Expression, sizes: list[int]) -> None:
    labels = labels_of(expression, sizes)
    assert size_of(expression, sizes) == len(labels)
    for atom in range(3):
        found = positions(expression, atom, sizes)
        assert found.dtype == np.int64
        for index in range(sizes[atom]):
            expected = [at for at, label in enumerate(labels) if (atom, index) in label]
            assert found[index].tolist() == expected


@settings(max_examples=60)
@given(expressions(3), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.data())
def test_positions_are_covered_by_the_labels_that_are_chosen(
    expression: Expression, sizes: list[int], data: st.DataObject
) -> None:
    chosen = {}
    wanted = set()
    for atom in data.draw(st.sets(st.integers(0, 2))):
        flags = st.lists(st.booleans(), min_size=sizes[atom], max_size=sizes[atom])
        chosen[atom] = np.array(data.draw(flags))
        for index in np.flatnonzero(chosen[atom]).tolist():
            wanted.add((atom, index))
    labels = labels_of(expression, sizes)
    expected = [bool(label & wanted) for label in labels]
    assert covered(expression, chosen, sizes).tolist() == expected


def test_positions_of_an_atom_that_does_not_occur_are_none() -> None:
    assert positions(Atom(0), 1, [4, 3]).shape == (3, 0)


def test_an_atom_twice_in_a_product_has_the_cross_of_both() -> None:
    square = ProductOf((Atom(0), Atom(0)))
    assert positions(square, 0, [3]).tolist() == [[0, 1, 2, 3, 6], [1, 3, 4, 5, 7], [2, 5, 6, 7, 8]]


def test_atoms_come_in_order_each_once() -> None:
    expression = SumOf((Atom(2), ProductOf((Atom(0), Atom(2))), Atom(1)))
    assert atoms_of(expression) == [2, 0, 1]


@settings(max_examples=60)
@given(axes())
def test_a_frozen_axis_has_the_same_positions(axis: Axis) -> None:
    numbers = Numbers()
    expression = numbers.frozen(axis)
    sizes = [leaf.size for leaf in numbers]
    by_number = {number: leaf for leaf, number in numbers.items()}
    expected = layout(axis)
    got = labels_of(expression, sizes)
    renamed = [
        frozenset((by_number[n], i) for n, i in label if by_number[n].size > 1) for label in got
    ]
    assert renamed == expected


def test_a_frozen_product_of_a_sum_is_multiplied_out() -> None:
    a, b, c = Leaf(2), Leaf(3), Leaf(4)
    outside = product_of((sum_of((a, b)), c))
    inside = sum_of((product_of((a, c)), product_of((b, c))))
    assert Numbers().frozen(outside) == Numbers().frozen(inside)


@settings(max_examples=60)
@given(axes(), st.data())
def test_a_cut_divides_the_positions(axis: Axis, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, axis.size))
    try:
        left, right = cut(axis, size)
    except Stuck:
        assume(False)
        return
    assert left.size == size
    assert layout(left) + layout(right) == layout(axis)


@settings(max_examples=60)
@given(axes(), st.data())
def test_a_slice_is_the_middle(axis: Axis, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, axis.size))
    stop = data.draw(st.integers(start, axis.size))
    try:
        middle = slice_of(axis, start, stop)
    except Stuck:
        assume(False)
        return
    assert layout(middle) == layout(axis)[start:stop]


@settings(max_examples=60)
@given(axes(), st.data())
def test_factors_multiply_to_the_positions(axis: Axis, data: st.DataObject) -> None:
    outer = data.draw(st.sampled_from([n for n in range(1, axis.size + 1) if axis.size % n == 0]))
    try:
        first, second = factored(axis, outer)
    except Stuck:
        assume(False)
        return
    assert first.size == outer
    pairs = [a | b for a, b in product(layout(first), layout(second))]
    assert pairs == layout(axis)


@settings(max_examples=200)
@given(axes(), st.data())
def test_unified_axes_have_the_same_positions(axis: Axis, data: st.DataObject) -> None:
    other = data.draw(
        axes().filter(lambda drawn: drawn.size == axis.size) | st.builds(Leaf, st.just(axis.size))
    )
    try:
        unify(axis, other)
    except Stuck:
        # What was refined before is sound: no leaf contains itself, and the sizes are kept.
        assert len(layout(axis)) == len(layout(other))
        return
    assert layout(axis) == layout(other)


def test_unifying_refines_a_leaf_to_heads() -> None:
    wide = Leaf(12)
    heads = Leaf(3)
    inner = Leaf(4)
    unify(wide, product_of((heads, inner)))
    assert leaves(wide) == [heads, inner]


def test_products_with_a_common_factor_are_refined() -> None:
    left = product_of((Leaf(4), Leaf(6)))
    right = product_of((Leaf(8), Leaf(3)))
    unify(left, right)
    assert [leaf.size for leaf in leaves(left)] == [4, 2, 3]
    assert layout(left) == layout(right)


def test_rotated_halves_become_the_same_atom() -> None:
    whole = Leaf(8)
    first, second = cut(whole, 4)
    unify(sum_of((second, first)), whole)
    assert leaves(whole)[0] is leaves(whole)[1]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda: Product((Leaf(2), Leaf(3))), lambda: Product((Leaf(3), Leaf(2)))),
        (lambda: Product((Leaf(2), Leaf(4))), lambda: Sum((Leaf(3), Leaf(5)))),
        (lambda: Leaf(3), lambda: Leaf(4)),
    ],
)
def test_what_cannot_be_the_same_is_stuck(left, right) -> None:
    with pytest.raises(Stuck):
        unify(left(), right())


def test_axes_of_equal_size_stay_apart_until_an_operation_joins_them() -> None:
    a = Leaf(5)
    b = Leaf(5)
    numbers = Numbers()
    assert numbers.frozen(a) != numbers.frozen(b)
    unify(a, b)
    assert find(a) is find(b)


def test_units_are_never_bound() -> None:
    one = Leaf(1)
    other = Leaf(1)
    unify(one, other)
    assert find(one) is one
    pin(one, "input")
    assert one.pins == ()


def test_pins_and_marks_pass_on_to_what_a_leaf_becomes() -> None:
    wide = Leaf(12)
    pin(wide, "input")
    mark(wide, "normalised over")
    outer, inner = factored(wide, 3)
    for leaf in (*leaves(outer), *leaves(inner)):
        assert leaf.pins == ("input",)
        assert leaf.marks == {"normalised over"}


def test_a_negative_control_finds_a_broken_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors in the wrong order are found by the labels."""
    right = _axes.product_of
    monkeypatch.setattr(_axes, "product_of", lambda parts: right(list(parts)[::-1]))
    axis = right((Leaf(2), Leaf(2), Leaf(2)))
    first, second = factored(axis, 4)
    pairs = [a | b for a, b in product(layout(first), layout(second))]
    assert pairs != layout(axis)


def test_a_long_concatenation_is_fast() -> None:
    """The positions of an atom in a sum of 60 parts take well under a millisecond."""
    sizes = [64, *[32] * 58]
    expression = SumOf(tuple(map(Atom, range(59))))
    found = positions(expression, 58, sizes)
    assert found[:, 0].tolist() == list(range(64 + 57 * 32, 64 + 58 * 32))
