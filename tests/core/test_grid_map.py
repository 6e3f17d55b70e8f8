"""Maps of tensors with several axes, against tables of which cell went where."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grapnet.core._grid_map import GridMap, part_vectors
from grapnet.core._index_map import IndexMap


def positions(chosen: list[int]) -> Tensor:
    return torch.tensor(sorted(chosen), dtype=torch.int32)


@st.composite
def axis_maps(draw: st.DrawFn, size: int) -> IndexMap:
    removed = draw(st.sets(st.integers(0, size - 1), max_size=size))
    kept = size - len(removed)
    born = draw(st.integers(0, 3))
    new_size = kept + born
    inserted = draw(
        st.lists(st.integers(0, max(new_size - 1, 0)), min_size=born, max_size=born, unique=True)
        if new_size
        else st.just([])
    )
    return IndexMap(size, kept + len(inserted), positions(list(removed)), positions(inserted))


@st.composite
def grid_maps(draw: st.DrawFn) -> GridMap:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    return GridMap(shape, {dim: draw(axis_maps(shape[dim])) for dim in dims})


def moved_by_hand(index: GridMap, old: Tensor, empty: float) -> Tensor:
    """Returns the survivors in their new cells and `empty` in all others, cell by cell."""
    new = torch.full(index.new_shape, empty, dtype=old.dtype)
    places = []
    for dim, size in enumerate(index.shape):
        axis = index.axes.get(dim)
        pairs = [(n, n) for n in range(size)]
        if axis is not None:
            stay = [n for n in range(size) if n not in axis.removed.tolist()]
            free = [n for n in range(axis.new_size) if n not in axis.inserted.tolist()]
            pairs = list(zip(stay, free, strict=True))
        places.append(pairs)
    for cell in torch.cartesian_prod(*[torch.arange(len(pairs)) for pairs in places]).view(
        -1, len(places)
    ):
        source = tuple(pairs[n][0] for pairs, n in zip(places, cell.tolist(), strict=True))
        target = tuple(pairs[n][1] for pairs, n in zip(places, cell.tolist(), strict=True))
        new[target] = old[source]
    return new


@given(grid_maps())
@settings(max_examples=150, deadline=None)
def test_cells_move_as_by_hand(index: GridMap) -> None:
    old = torch.arange(1.0, 1 + torch.Size(index.shape).numel()).view(index.shape)
    expected = moved_by_hand(index, old, -7.0)
    assert torch.equal(index.carry(old, -7.0), expected)
    assert index.n_survivors == int((expected != -7).sum())
    assert index.n_born == int((expected == -7).sum())


@given(grid_maps())
@settings(max_examples=150, deadline=None)
def test_what_is_taken_returns_by_the_inverse(index: GridMap) -> None:
    old = torch.arange(1.0, 1 + torch.Size(index.shape).numel()).view(index.shape)
    taken = index.take(old)
    moved = index.carry(old, -7.0)
    back = index.inverse()
    assert sorted([*taken.tolist(), *moved[moved != -7].tolist()]) == old.flatten().tolist()
    assert torch.equal(back.carry(moved, taken), old)
    # The same in two steps, as the state of an optimizer returns.
    again = back.carry(moved, 0.0).clone()
    if back.n_born:
        back.give(again, taken)
    assert torch.equal(again, old)


@given(grid_maps())
@settings(max_examples=50, deadline=None)
def test_flat_state_moves_like_the_tensor(index: GridMap) -> None:
    old = torch.randn(index.shape)
    assert torch.equal(index.carry(old.flatten(), 0.5), index.carry(old, 0.5).flatten())
    assert torch.equal(index.take(old.flatten()), index.take(old))


def test_a_vector_is_a_grid_of_one_axis() -> None:
    axis = IndexMap(5, 5, positions([0, 3]), positions([1, 4]))
    old = torch.arange(5.0)
    grid = GridMap((5,), {0: axis})
    born = torch.tensor([8.0, 9.0])
    assert torch.equal(grid.carry(old, born), axis.carry(old, born))
    assert torch.equal(grid.take(old), axis.take(old))


def test_the_memory_format_of_convolutions_stays() -> None:
    old = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    index = GridMap((4, 3, 2, 2), {0: IndexMap(4, 3, positions([1]), positions([]))})
    moved = index.carry(old)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved, old[[0, 2, 3]])


def test_another_shape_is_refused() -> None:
    index = GridMap((4, 3), {1: IndexMap(3, 2, positions([1]), positions([]))})
    with pytest.raises(ValueError, match="4, 3"):
        index.carry(torch.zeros(3, 4))


def test_vectors_that_move_together_move_as_each_alone() -> None:
    shrinking = GridMap((5,), {0: IndexMap(5, 3, positions([0, 3]), positions([]))})
    growing = GridMap((5,), {0: IndexMap(5, 6, positions([]), positions([2]))})
    matrix = GridMap((5, 2), {0: shrinking.axes[0]})
    vectors = [torch.randn(5), torch.randn(5, requires_grad=True), torch.arange(5)]
    others = [(growing, torch.randn(5)), (matrix, torch.randn(5, 2)), (matrix, torch.randn(10))]
    found = part_vectors([*((shrinking, vector) for vector in vectors), *others])
    assert found.keys() == {id(vector) for vector in vectors}
    for vector in vectors:
        kept, gone = found[id(vector)]
        assert torch.equal(kept, shrinking.carry(vector))
        assert torch.equal(gone, shrinking.take(vector))
        assert not kept.requires_grad
        # A Parameter does not share its memory with others.
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
