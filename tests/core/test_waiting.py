"""A commit on a GPU keeps its work there: few launches, few waits, nothing copied to the host."""

import warnings

import pytest
import torch

import grapnet as gn
from grapnet.core._index_map import as_positions

from .counting import Counts, as_on_a_gpu, counted

SIZES = [64, 256, 16]
TENTH = SIZES[0] * SIZES[1] // 10
# how many vectors move with the relations: children, weights, gradients, two moments
VECTORS = 5


def trained(device: str = "cpu", sizes: list[int] = SIZES) -> tuple[gn.GrapNet, torch.optim.Adam]:
    """Returns a net with an attached Adam after a training step."""
    torch.manual_seed(0)
    net = gn.GrapNet(sizes, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    net(torch.randn(8, sizes[0], device=device)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def some(net: gn.GrapNet, count: int) -> gn.RelationSet:
    relations = net.layers[0].outgoing()
    return relations[torch.randperm(len(relations), device=net.device)[:count]]


def count_cut(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[Counts, Counts]:
    """Returns what a cut does on a GPU, and its undo, on a net that no forward pass uses yet."""
    net, optimizer = trained()
    net.execution.use("dense")
    with as_on_a_gpu(monkeypatch):
        chosen = some(net, count)
        positions = as_positions(chosen._positions_by_transition()[0], net.device)
        with counted(net, *state_of(optimizer), positions) as cut, net.edit() as edit:
            edit.cut(chosen)
        change = net.history[-1].change.transitions[0]
        kept = [change.index.removed, change.gone.parents, change.gone.children]
        with counted(net, *state_of(optimizer), *kept) as undone:
            net.undo()
    gn.check(net)
    return cut, undone


def test_a_cut_of_many_waits_for_nothing_and_moves_every_vector_once(monkeypatch):
    cut, undone = count_cut(monkeypatch, TENTH)
    assert (cut.waits, undone.waits) == ([], [])
    # each vector, and the scan that finds what stays
    assert len(cut.passes) == VECTORS + 1
    assert cut.launches <= 21
    # the same, and those of the children and of the newborn positions in the scan
    assert len(undone.passes) <= VECTORS + 3
    assert undone.launches <= 48


def test_a_cut_of_one_reads_its_position_once_and_copies_slices(monkeypatch):
    cut, undone = count_cut(monkeypatch, 1)
    for counts in (cut, undone):
        assert counts.copied == 1
        assert len({line.partition(" at ")[2] for line in counts.waits}) == 1
        assert len(counts.passes) == VECTORS
    assert cut.launches <= 15


def test_a_position_that_is_read_is_noticed():
    net, _ = trained()
    positions = net.transitions[0].topology.child
    with counted(net) as counts:
        assert int(positions.max()) == SIZES[1] - 1
        positions[positions > 3].cpu()
        (positions + 1).tolist()
    kinds = [line.partition(" at ")[0] for line in counts.waits]
    assert kinds == ["_local_scalar_dense", "index", "cpu", "tolist"]
    assert counts.copied == net.transitions[0].size
    assert len(counts.passes) == 4


def test_programs_of_edits_end_alike_on_the_path_of_a_gpu(monkeypatch):
    """Relations and nodes come, leave, freeze and return."""

    def program() -> gn.GrapNet:
        net, _ = trained(sizes=[9, 12, 5])
        generator = torch.Generator().manual_seed(1)
        with net.edit(generator=generator) as edit:
            edit.cut(net.layers[0].outgoing()[::3])
        with net.edit(generator=generator) as edit:
            nodes = edit.add_nodes(1, 4, bias=None)
            edit.connect(net.layers[0], nodes)
            edit.connect(nodes, net.layers[2], weights="alloc")
            edit.remove_nodes(net.layers[1][2:5])
        with net.edit(generator=generator) as edit:
            edit.freeze(net.layers[1][::2])
            edit.cut(net.layers[1].outgoing()[::4])
            absent = [(0, 9), (3, 9), (6, 9)]
            parents = torch.tensor([parent for parent, _ in reversed(absent)])
            edit.connect(parents, torch.tensor([9] * 3), pairs="aligned")
        with net.edit(generator=generator) as edit:
            edit.unfreeze(net.layers[1])
            edit.remove_orphans(fold_bias=True)
        for verb in (net.undo, net.undo, net.redo, net.undo, net.undo, net.redo):
            verb()
        gn.check(net)
        return net

    expected = program()
    with as_on_a_gpu(monkeypatch):
        found = program()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert repr(found.history) == repr(expected.history)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("count", [1, TENTH])
def test_a_cut_on_cuda_waits_no_more_often_than_that(count):
    net, _ = trained("cuda")
    chosen = some(net, count)
    net.execution.use("dense")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with net.edit() as edit:
                edit.cut(chosen)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in found if "called a sync" in str(one.message)]
    assert len(waits) == (count == 1), waits
    assert net.history[-1].change.transitions[0].gone.parents.is_cuda
    gn.check(net)
