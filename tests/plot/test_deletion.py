"""Child-owned deletion beside masking: a real cut, drawn such that it can be read."""

from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet import plot

from .nets import texts, words


def patches(ax: Any, gid: str) -> int:
    return sum(patch.get_gid() == gid for patch in ax.patches)


def test_deletion_shows_a_real_cut_and_leaves_the_net_as_it_was():
    net = gn.GrapNet([3, 5, 2], density=0.8, generator=torch.Generator().manual_seed(0))
    node = net.layers[0][0]
    before = (
        node.children.uids.tolist(),
        node.W_alloc.detach().clone(),
        net.version,
        len(net.history),
    )
    degree = node.degree
    ax = plot.deletion(net, node=node, slots=[1])
    assert (node.children.uids.tolist(), net.version, len(net.history)) == (
        before[0],
        before[2],
        before[3],
    )
    assert torch.equal(node.W_alloc, before[1])
    found = texts(ax)
    assert f"1 of the {degree} relations of node {node.uid} cut" == words(ax)
    for line in (
        "5 weights stored",
        "5 weights and 5 mask bits stored",
        f"{degree} weights and {degree} references stored",
        f"{degree - 1} weights and {degree - 1} references stored",
    ):
        assert found.count(line) == 1
    assert patches(ax, "children before: cut") == patches(ax, "dense after: cut") == 1
    assert patches(ax, "children after: kept") == degree - 1
    assert patches(ax, "children after: cut") == 0
    # the coordinate stays
    assert sum(patches(ax, f"dense after: {kind}") for kind in ("kept", "cut", "empty")) == 5


def test_deletion_picks_a_node_and_its_smallest_relation():
    net = gn.GrapNet.from_relations([2, 3], [([0, 1, 1, 1], [0, 0, 1, 2], [1.0, 0.5, 0.125, -2.0])])
    ax = plot.deletion(net)
    assert words(ax) == "1 of the 3 relations of node 1 cut"
    assert "2 weights and 2 references stored" in texts(ax)
    assert texts(ax).count(".125") == 0
    assert texts(ax).count("0.12") == 2  # before, in both; after, in none


def test_deletion_refuses_what_cannot_be_cut():
    net = gn.GrapNet([2, 3])
    with pytest.raises(ValueError, match="uid=2"):
        plot.deletion(net, node=2)
    with pytest.raises(gn.errors.EditError, match="9"):
        plot.deletion(net, node=0, slots=[9])
    with pytest.raises(gn.errors.StaleNodeError, match="77"):
        plot.deletion(net, node=77)
    with pytest.raises(ValueError, match="no relations"):
        plot.deletion(gn.GrapNet([2, 0]))
    assert net.version == 0
