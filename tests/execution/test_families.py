"""Families: which nodes share their children, what `net.execution.families` says, and blocks of
every kind.
"""

import copy
from random import Random

import pytest
import torch

import grapnet as gn
from benchmarks.contenders import Work, family_net
from grapnet.execution import _family

from .figures import inputs, require_reference
from .graphs import (
    DEVICES,
    SHAPES,
    Wires,
    edited,
    families,
    scattered,
    shuffled,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_written_in_place_is_the_product(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_family, "LARGE", 0)  # as for large activations
    net = SHAPES[shape].build(torch.float64)
    net.execution.use("family")
    for batch in (1, 7):
        require_reference(net, inputs(net, batch))


def test_a_full_transition_to_few_children_is_one_product_without_a_copy() -> None:
    net = gn.GrapNet([64, 4])
    net.execution.use("family")
    x = torch.randn(8, 64)
    net(x)
    with torch.profiler.profile() as profiler:
        net(x)
    names = {event.name for event in profiler.events() or ()}
    assert "aten::addmm" in names
    assert not {"aten::linear", "aten::contiguous", "aten::clone"} & names


# torch says so of the first backward of a process
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "degree", "batch"), [(128, 128, 256), (70, 150, 500), (64, 64, 1025)]
)
def test_large_blocks_in_half_precision(
    size: int,
    degree: int,
    batch: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_family, "LARGE", 0)
    work = Work(3 * size, 3 * degree, batch, device=device, dtype=dtype)
    net = family_net(work, 3, "family")
    exact = copy.deepcopy(net).double()
    exact.execution.use("reference")
    x, dz = work.data()
    wide = x.detach().double().requires_grad_()
    z = net(x)
    truth = exact(wide)
    z.backward(dz)
    truth.backward(dz.double())
    pairs = [(z, truth), (x.grad, wide.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(net.parameters(), exact.parameters(), strict=True)]
    for mine, right in pairs:
        assert (mine - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max()


def built(wires: Wires, n_children: int) -> gn.GrapNet:
    parents = [parent for parent, children in enumerate(wires) for _ in children]
    children = [child for children in wires for child in children]
    return gn.GrapNet.from_relations(
        [len(wires), n_children], [(parents, children)], dtype=torch.float64
    )


def by_hand(wires: Wires) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the (members, children) of every family, found the slow way."""
    found: dict[frozenset[int], list[int]] = {}
    for parent, children in enumerate(wires):
        if children:
            found.setdefault(frozenset(children), []).append(parent)
    return {(tuple(members), tuple(sorted(children))) for children, members in found.items()}


def reported(net: gn.GrapNet, transition: int = 0) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    first = len(net.layers[0])
    found = set()
    for found_family in net.execution.families(transition):
        members = found_family.members.uids.tolist()
        children = [uid - first for uid in found_family.children.uids.tolist()]
        assert found_family.block == (len(members), len(children))
        found.add((tuple(members), tuple(sorted(children))))
    return found


WIRES: dict[str, tuple[Wires, int]] = {
    "none": ([[]] * 4, 3),
    "no parents": ([], 3),
    "no children": ([[]] * 3, 0),
    "subsets": ([list(range(k)) for k in range(8)] * 2, 8),
    "same sum": ([[0, 3], [1, 2], [3, 0], [2, 1]], 4),
}


@pytest.mark.parametrize("wires", WIRES)
def test_families_are_those_found_by_hand(wires: str) -> None:
    net = built(*WIRES[wires])
    assert reported(net) == by_hand(WIRES[wires][0])
    blocks = [
        rows * columns for rows, columns in (family.block for family in net.execution.families(0))
    ]
    assert blocks == sorted(blocks, reverse=True)


@pytest.mark.parametrize("seed", range(30))
def test_random_families_in_any_order(seed: int) -> None:
    chance = Random(seed)
    n_children = chance.randint(1, 9)
    blocks = []
    for _ in range(chance.randint(1, 5)):
        blocks.append(
            (chance.randint(1, 4), chance.sample(range(n_children), chance.randint(0, n_children)))
        )
    wires = families(*blocks)
    wires = scattered(wires, seed) if chance.random() < 0.6 else wires
    wires = shuffled(wires, seed) if chance.random() < 0.6 else wires
    net = built(wires, n_children)
    assert reported(net) == by_hand(wires)
    net.execution.use("family")
    require_reference(net, inputs(net, 3))


def test_families_follow_edits() -> None:
    wires = families((3, [0, 1]), (3, [2, 3]))
    net = built(wires, 4)
    edited(net, lambda net, edit: edit.cut(net.layers[0][0], slots=[0]))
    assert reported(net) == by_hand([[1], *wires[1:]])
    net.undo()
    assert reported(net) == by_hand(wires)


def test_a_million_relations_are_grouped_by_their_sets_alone() -> None:
    """Sums of row numbers, counts and orders collide here; sets do not."""
    chance = torch.Generator().manual_seed(0)
    sets = [torch.randperm(64, generator=chance)[:32] for _ in range(64)]
    rows = torch.arange(8192) % 64
    children = torch.cat([sets[row][torch.randperm(32, generator=chance)] for row in rows.tolist()])
    net = gn.GrapNet.from_relations(
        [8192, 64], [(torch.arange(8192).repeat_interleave(32), children)]
    )
    found = net.execution.families(0)
    assert [family.block for family in found] == [(128, 32)] * 64
    assert sorted(min(family.members.uids.tolist()) for family in found) == list(range(64))
