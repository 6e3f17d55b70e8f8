"""The layered graph: node by node or group by group, and every number in it is the net's."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure

import grapnet as gn
from grapnet import plot

from .nets import families, grown, texts, words


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def lines(ax: Any, gid: str) -> int:
    found = [
        part
        for part in ax.collections
        if isinstance(part, LineCollection) and part.get_gid() == gid
    ]
    return sum(len(part.get_segments()) for part in found)


def bands(ax: Any) -> dict[float, list[tuple[int, int, int]]]:
    """Returns (upper group, lower group, relations) of every band, by the transition that it starts
    in.
    """
    found: dict[float, list[tuple[int, int, int]]] = {}
    for part in ax.collections:
        if match := re.fullmatch(r"band (\d+)-(\d+): (\d+)", part.get_gid() or ""):
            start = float(np.floor(part.get_paths()[0].vertices[:, 0].min()))
            upper, lower, count = map(int, match.groups())
            found.setdefault(start, []).append((upper, lower, count))
    return found


def test_a_small_net_is_drawn_node_by_node_and_relation_by_relation():
    net = grown()
    ax = plot.graph(net)
    dots = [part for part in ax.collections if isinstance(part, PathCollection)]
    assert sum(len(part.get_offsets()) for part in dots) == net.count().nodes
    frozen = sum(len(store.frozen_at) for store in net.transitions)
    assert 0 < frozen < net.count().relations
    assert (lines(ax, "frozen"), lines(ax, "free")) == (frozen, net.count().relations - frozen)
    assert set(legend(ax)) == {
        "no owner",
        "task-1",
        "task-2",
        "task-3",
        "weight ≥ 0",
        "weight < 0",
        "frozen",
    }
    uids = {str(uid) for layer in net.layers for uid in layer.uids.tolist()}
    assert uids <= set(texts(ax))
    assert f"({frozen} of them frozen)" in words(ax)
    assert lines(ax, "cut") == 0


def test_relations_cut_since_a_version_are_drawn_and_named():
    net = grown()
    cut = len(net.history[-1].change.transitions[0].gone)
    assert cut > 0
    for since in (net.version - 1, net.history[-1], 0):
        ax = plot.graph(net, cut_since=since)
        # at version 0 the relations that were cut since did not exist
        expected = cut if since != 0 else 0
        assert lines(ax, "cut") == expected
        assert (f"cut ({cut})" in legend(ax)) == (expected > 0)
    net.undo()
    assert lines(plot.graph(net, cut_since=net.version - 2), "cut") == 0


def test_what_is_highlighted_stands_out():
    net = grown()
    chosen = net.select(owner="task-2")
    wanted = len(chosen.incoming() | chosen.outgoing())
    for highlight, expected in (
        (chosen, wanted),
        (chosen.outgoing(), len(chosen.outgoing())),
        (None, None),
    ):
        ax = plot.graph(net, highlight=highlight)
        alphas = np.concatenate(
            [part.get_alpha() for part in ax.collections if part.get_gid() in ("free", "frozen")]
        )
        assert int((alphas > 0.5).sum()) == (
            net.count().relations if expected is None else expected
        )


def test_a_large_net_is_grouped_by_owner_and_its_bands_count_its_relations():
    net = grown(per_task=40, inputs=30)
    ax = plot.graph(net, cut_since=net.version - 1)
    shown = texts(ax)
    assert {"task-1\n40", "task-2\n40", "task-3\n40", "all\n30", "all\n6"} <= set(shown)
    found = bands(ax)
    for t, store in enumerate(net.transitions):
        owners = net.layers[1].owners
        parents = store.topology.parents().tolist()
        children = store.child.tolist()
        counts = [0, 0, 0]
        for parent, child in zip(parents, children, strict=True):
            counts[int(owners[child if t == 0 else parent][-1]) - 1] += 1
        assert [count for *_, count in sorted(found[t])] == counts
        gone = net.history[-1].change.transitions
        assert all(
            any(text.split(",")[0] == str(count) for text in shown) for count in counts if t or gone
        )
    cut = sum(int(text.split(", ")[-1].split()[0]) for text in shown if text.endswith(" cut"))
    assert cut == len(net.history[-1].change.transitions[0].gone)
    frozen = [
        int(part.get_gid().split()[1])
        for part in ax.collections
        if (part.get_gid() or "").startswith("frozen")
    ]
    assert sum(frozen) == sum(len(store.frozen_at) for store in net.transitions)
    assert not any(isinstance(part, LineCollection) for part in ax.collections)


def test_a_large_net_without_owners_is_grouped_by_family():
    net = families()
    shown = set(texts(plot.graph(net)))
    assert {family.block[0] for family in net.execution.families(1)} == {40, 60}
    assert {"family 1\n60", "family 2\n40", "800", "1,200"} <= shown
    with net.edit() as edit:  # every node has children of its own: families would say nothing
        edit.cut(
            net.layers[1].outgoing()[
                torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.5
            ]
        )
    assert {"all\n100"} <= set(texts(plot.graph(net)))


def test_a_highlight_of_another_net_and_an_unknown_version_are_refused():
    net = gn.GrapNet([3, 4, 2])
    other = gn.GrapNet([2, 2])
    for highlight in (other.layers[0], other.layers[0].outgoing(), other.layers[0][0]):
        with pytest.raises(ValueError, match="another net"):
            plot.graph(net, highlight=highlight)
    with pytest.raises(gn.errors.HistoryError, match="5"):
        plot.graph(net, cut_since=5)


def test_any_net_can_be_drawn():
    for net in (
        gn.GrapNet([0, 0]),
        gn.GrapNet([3, 0, 2]),
        gn.GrapNet([300, 0, 2]),
        gn.GrapNet([2] * 25),
    ):
        plot.graph(net).figure.draw_without_rendering()


def test_axes_given_are_the_axes_returned_and_no_global_state_moves():
    before = dict(rcParams)
    net = grown()
    ax = Figure().subplots()
    assert plot.graph(net, ax=ax) is ax
    with plot.theme("dark"):
        assert plot.graph(net).figure is not ax.figure
    assert dict(rcParams) == before
