"""Contexts: whatever mode a net is run, edited or built in leaves nothing behind in what it
caches.
"""

import numpy as np
import pytest
import torch

import grapnet as gn


def test_a_default_device_elsewhere_does_not_matter() -> None:
    with torch.device("meta"):
        net = gn.GrapNet([4, 3, 2], density=0.9, device="cpu")
        with net.edit() as edit:
            new = edit.add_nodes(1, 2, bias=0.5)
            edit.connect(net.layers[0], new)
            edit.remove_nodes(net.layers[1][0])
            edit.freeze(net.layers[1][1])
            edit.remove_orphans(fold_bias=True)
        net.undo()
        net.redo()
        gn.check(net)
        assert net(torch.ones(2, 4, device="cpu")).device.type == "cpu"
        assert len(net.layers[0].outgoing().smallest(count=3)) == 3
        assert net.select(layer=[]).frozen.tolist() == []


def test_numpy_numbers_are_numbers() -> None:
    net = gn.GrapNet([4, 3, 2])
    one = np.int64(1)
    assert net.select(layer=one).uids.tolist() == net.select(layer=[one]).uids.tolist() == [4, 5, 6]
    assert (net.node(np.int64(4)), net.layers[1][np.int32(0)]) == (net.layers[1][0], net.node(4))
    with net.edit() as edit:
        new = edit.add_nodes(one, np.int32(2), bias=np.float32(0.5))
        edit.connect(np.array([0, 1]), new, pairs="aligned", weights=np.array([1.0, 2.0]))
        edit.cut(net.layers[0][0], slots=np.array([0]))
        edit.remove_orphans(one)
    assert new.incoming().weights.tolist() == [1, 2]
    assert new.biases.tolist() == [0.5, 0.5]
    assert len(net.layers[0].outgoing().smallest(count=np.int64(2))) == 2


def test_a_map_carries_tensors_of_any_kind() -> None:
    """IndexMap.carry is public: statistics, copies and policies' own Parameters go through it."""
    net = gn.GrapNet([4, 3])
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[1])
        edit.connect(net.layers[0][1], edit.add_nodes(1, 1))
    index = net.history[-1].relations[0]
    kept = [0, *range(2, 6)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        wide = torch.arange(24).reshape(12, 2).to(dtype)
        carried = index.carry(wide, 1)
        assert torch.equal(carried[:5], wide[kept])
        assert torch.equal(carried[5], torch.ones(2, dtype=dtype))
        assert torch.equal(carried[6:], wide[6:])
    keys = torch.arange(24.0).reshape(12, 2).requires_grad_()
    assert torch.equal(index.carry(keys)[6:], keys[6:])  # whether it requires grad is no obstacle
    for shape in ([11], []):
        with pytest.raises(ValueError, match="length 12"):
            index.carry(torch.zeros(shape))


@pytest.mark.parametrize(
    ("size", "gone", "come"), [(30_000, 9_000, 7_000), (9_000, 0, 8_000), (20_000, 19_000, 0)]
)
def test_a_map_of_scattered_positions_is_plain_indexing(size: int, gone: int, come: int) -> None:
    """Too many runs to copy one by one: the other way through `carry`."""
    chance = np.random.default_rng(0)
    new_size = size - gone + come
    removed = np.sort(chance.choice(size, gone, replace=False)).astype(np.int32)
    inserted = np.sort(chance.choice(new_size, come, replace=False)).astype(np.int32)
    index = gn.following.IndexMap(
        size, new_size, torch.from_numpy(removed), torch.from_numpy(inserted)
    )
    stay = np.delete(np.arange(size), removed)
    place = np.delete(np.arange(new_size), inserted)
    kept = torch.arange(size)
    with torch.device("meta"):
        # The map makes its own tensors where the carried ones are.
        assert torch.equal(index.carry(kept, -1)[place], kept[stay])
    for shape in ((size,), (size, 1), (size, 3)):
        old = torch.from_numpy(chance.normal(size=shape))
        born = torch.from_numpy(chance.normal(size=(come, *shape[1:])))
        expected = torch.empty(new_size, *shape[1:], dtype=torch.float64)
        expected[place] = old[stay]
        expected[inserted.astype(np.int64)] = born
        assert torch.equal(index.carry(old, born), expected)
        assert torch.equal(index.inverse().carry(expected, old[removed.astype(np.int64)]), old)
    survivors = torch.from_numpy(stay).int()
    assert index.new_positions(survivors).tolist() == place.tolist()
    assert index.old_positions(torch.from_numpy(place).int()).tolist() == stay.tolist()
