"""Files are as small as the nets in them, whatever the nets have been through."""

import time
from pathlib import Path

import pytest
import torch

import grapnet as gn
from benchmarks.files import made_like

SIZES = [256, 512, 512, 10]


def file_size(net: gn.GrapNet, folder: Path) -> int:
    """Returns the size in bytes of the file that a default save writes."""
    path = folder / "size.safetensors"
    gn.save(path, net)
    return path.stat().st_size


def same_outputs(first: gn.GrapNet, second: gn.GrapNet) -> bool:
    x = torch.randn(4, first.sizes[0], generator=torch.Generator().manual_seed(0))
    return torch.equal(first(x), second(x))


def test_the_file_of_a_full_net_is_as_large_as_its_weights(tmp_path: Path) -> None:
    net = gn.GrapNet(SIZES)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    size = file_size(net, tmp_path)
    assert weights < size <= 1.02 * weights


def test_a_cut_net_has_the_file_of_a_net_born_with_the_same_relations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet(SIZES)
    with net.edit(reason="cut nine tenths of every transition") as edit:
        for layer in net.layers[:-1]:
            edit.cut(layer.outgoing().smallest(fraction=0.9))
    born = made_like(net)
    assert same_outputs(net, born)
    assert file_size(net, tmp_path) <= 1.05 * file_size(born, tmp_path) + 300


def test_a_rewired_net_has_the_file_of_a_net_born_with_the_same_relations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet(SIZES, density=0.1)
    manager = gn.rules.RuleManager(seed=0)
    manager.add(gn.rules.Rewire(fraction=0.3))
    for step in range(12):
        manager.apply(net, step)
    assert net.version == 12
    born = made_like(net)
    assert same_outputs(net, born)
    assert file_size(net, tmp_path) <= 1.1 * file_size(born, tmp_path)


def test_the_wiring_takes_at_most_one_and_a_half_bytes_for_each_relation(tmp_path: Path) -> None:
    n_parents = 512
    n_children = 1024
    n_relations = n_parents * n_children // 10
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(n_parents * n_children, generator=generator)[:n_relations]
    pairs = (cells // n_children, cells % n_children)
    net = gn.GrapNet.from_relations([n_parents, n_children], [pairs])
    # The file of a net without relations has everything else: biases, nodes and metadata.
    empty = gn.GrapNet([n_parents, n_children], density=0)
    relations = file_size(net, tmp_path) - file_size(empty, tmp_path)
    weights = net.transitions[0].weight.nbytes
    assert 0 < relations - weights <= 1.5 * n_relations


@pytest.fixture(scope="module")
def net_with_a_past() -> gn.GrapNet:
    """A net after 1,000 commits, of which only the outline is kept."""
    net = gn.GrapNet([4, 3, 2])
    net.journal.undo_limit = 1
    net.journal.detail_limit = 0
    for number in range(1000):
        with net.edit(reason=f"rename at step {number}", by="a rule") as edit:
            edit.set_owner(net.layers[1][0], f"owner {number % 2}")
    return net


def test_a_commit_costs_few_bytes_in_files_and_in_memory(
    net_with_a_past: gn.GrapNet, tmp_path: Path
) -> None:
    fresh = file_size(gn.GrapNet([4, 3, 2]), tmp_path)
    assert file_size(net_with_a_past, tmp_path) - fresh <= 300 * 1000
    outlines = net_with_a_past.journal._outlines
    assert 8 * len(outlines.numbers) + len(outlines.text) <= 300 * 1000
    assert len(net_with_a_past.journal._details) == 1


def test_a_save_does_not_pay_for_every_commit_of_the_past(
    net_with_a_past: gn.GrapNet, tmp_path: Path
) -> None:
    file_size(net_with_a_past, tmp_path)
    start = time.process_time()
    file_size(net_with_a_past, tmp_path)
    # Describing 1,000 commits one by one takes more than a second.
    assert time.process_time() - start < 0.2


def test_details_of_small_commits_count_with_the_memory_of_their_objects() -> None:
    net = gn.GrapNet([4, 3, 2])
    net.journal.undo_limit = 1
    net.journal.detail_limit = 200_000
    for number in range(100):
        with net.edit() as edit:
            edit.set_owner(net.layers[1][0], f"owner {number % 2}")
    assert len(net.journal._details) < 50
    assert len(net.history) == 100
