"""Adjacency, timeline, accuracy matrix, distributions: what they show is what the net has."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import grapnet as gn
from grapnet import plot
from grapnet.continual import AccuracyMatrix, Evaluation

from .nets import families, grown, texts, words


def ticks(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def test_adjacency_has_a_cell_for_every_pair_and_colours_those_that_are_related():
    net = gn.GrapNet.from_relations([3, 4], [([0, 0, 2], [1, 3, 0], [1.0, -1.0, 0.5])])
    (image,) = plot.adjacency(net).images
    cells = np.asarray(image.get_array())
    assert cells.shape == (3, 4, 4)
    related = [(row, column) for row, column in zip(*np.nonzero(cells[..., 3]), strict=True)]
    assert related == [(0, 1), (0, 3), (2, 0)]
    assert (cells[0, 1, :3] == cells[2, 0, :3]).all()
    assert (cells[0, 1, :3] != cells[0, 3, :3]).any()
    assert cells[0, 1, 3] > cells[2, 0, 3]


def test_adjacency_puts_families_side_by_side_and_names_them():
    net = families()
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    store = net.transitions[1]
    order = [shuffled[store.topology.parents().long()], store.child]
    net = gn.GrapNet.from_relations([5, 100, 40], [([0], [0]), tuple(order)])
    ax = plot.adjacency(net, 1)
    opaque = np.asarray(ax.images[0].get_array())[..., 3] > 0
    names = ticks(ax.yaxis)
    assert sorted(names) == ["family 1", "family 2"]
    rows = [tuple(row) for row in opaque]
    assert sum(a != b for a, b in pairwise(rows)) == 1  # one block, then the other
    assert ticks(plot.adjacency(grown(), 1).yaxis) == ["task-1", "task-2", "task-3"]


def test_a_large_rectangle_is_binned_and_loses_no_relation():
    net = gn.GrapNet([1500, 700], density=0.01, generator=torch.Generator().manual_seed(0))
    cells = np.asarray(plot.adjacency(net).images[0].get_array())
    assert cells.shape == (600, 600, 4)
    store = net.transitions[0]
    rows = store.topology.parents().numpy() * 600 // 1500
    columns = store.child.numpy() * 600 // 700
    assert set(zip(*np.nonzero(cells[..., 3]), strict=True)) == set(zip(rows, columns, strict=True))
    with pytest.raises(IndexError):
        plot.adjacency(net, 2)


def edited() -> gn.GrapNet:
    net = gn.GrapNet([4, 3, 2])
    with net.edit(reason="grow") as edit:
        edit.connect(net.layers[0], edit.add_nodes(1, 2))
    with net.edit(reason="cut two") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    with net.edit(reason="freeze some") as edit:
        edit.freeze(net.layers[1].outgoing())
    net.undo()
    net.redo()
    with net.edit(reason="release them") as edit:
        edit.unfreeze(net.layers[1].outgoing())
    with net.edit(reason="exchange") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=1))
        edit.add_nodes(1, 1)
    with net.edit(reason="name") as edit:
        edit.set_owner(net.layers[1], "somebody")
    return net


def marks(ax: Any) -> dict[str, list[tuple[float, float]]]:
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    return {
        name: [tuple(point) for point in part.get_offsets()]
        for name, part in zip(names, ax.collections, strict=True)
    }


def test_timeline_marks_every_kind_of_edit_on_the_number_of_relations():
    net = edited()
    ax = plot.timeline(net)
    assert marks(ax) == {
        "grow": [(1, 26)],
        "cut": [(2, 24)],
        "rewire": [(7, 23)],
        "freeze": [(3, 24)],
        "unfreeze": [(6, 24)],
        "undo": [(4, 24)],
        "redo": [(5, 24)],
        "rename": [(8, 23)],
    }
    (line,) = [line for line in ax.lines if line.get_gid() == "line"]
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (0, 18)
    assert line.get_ydata()[-1] == net.count().relations
    assert ticks(ax.xaxis)[:2] == ["1 grow", "2 cut two"]


def test_timeline_tells_an_undo_from_a_redo_however_often_they_follow_each_other():
    net = gn.GrapNet([4, 3, 2])
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))
    for back in (net.undo, net.redo, net.undo, net.redo, net.undo):
        back()
    expected = {"cut": [1], "undo": [2, 4, 6], "redo": [3, 5]}
    assert {
        kind: [version for version, _ in points]
        for kind, points in marks(plot.timeline(net)).items()
    } == expected
    assert words(plot.timeline(net)) == "6 edits: 1 cut, 3 undo, 2 redo"
    assert {
        kind: len(points) for kind, points in marks(plot.timeline(net.history[-2:])).items()
    } == {
        "undo": 1,
        "redo": 1,
    }


def test_timeline_against_scores():
    net = edited()
    ax = plot.timeline(net, {0: 0.5, 2: 0.7, 8: 0.9})
    assert marks(ax)["cut"] == [(2, 70.0)]
    assert marks(ax)["grow"] == [(1, 60.0)]
    assert ax.get_ylabel() == "accuracy in per cent"
    ax = plot.timeline(net, [(1, 0.2), (1, 0.9), (2, 0.8)])  # what training did at version 1
    assert marks(ax)["grow"] == [(1, 20.0)]
    (line,) = [line for line in ax.lines if line.get_gid() == "line"]
    assert line.get_ydata().tolist() == [20.0, 90.0, 80.0]


def test_accuracy_matrix_has_its_numbers_in_its_cells():
    matrix = AccuracyMatrix()
    matrix.add(Evaluation(0.9, [0.9], [0.95]))
    matrix.add(Evaluation(0.7, [0.6, 0.8], [0.85, 0.925]))
    ax = plot.accuracy_matrix(matrix)
    assert texts(ax) == ["90.0", "60.0", "80.0"]
    assert [text.get_position() for text in ax.texts] == [(0, 0), (0, 1), (1, 1)]
    ax = plot.accuracy_matrix(matrix, kind="local", tasks=["shirts", "shoes"])
    assert texts(ax) == ["95.0", "85.0", "92.5"]
    assert ticks(ax.yaxis) == ["shirts", "shoes"]
    assert texts(plot.accuracy_matrix(np.eye(2))) == ["100.0", "0.0", "0.0", "100.0"]
    assert texts(plot.accuracy_matrix(torch.ones(60, 60))) == []
    with pytest.raises(ValueError, match="2 tasks, got 1"):
        plot.accuracy_matrix(matrix, tasks=["shirts"])
    for wrong in (np.zeros((2, 3)), AccuracyMatrix()):
        with pytest.raises(ValueError, match="square"):
            plot.accuracy_matrix(wrong)


def steps(ax: Any) -> dict[str, int]:
    return {patch.get_label(): int(patch.get_data().values.sum()) for patch in ax.patches}


def test_distributions_count_every_node_and_every_relation():
    net = grown()
    assert steps(plot.degrees(net)) == {"0 to 1": 6, "1 to 2": 9}
    assert steps(plot.degrees(net, of="parents")) == {"0 to 1": 9, "1 to 2": 6}
    owned = steps(plot.degrees(net, by="owner"))
    assert owned == {"no owner": 6, "task-1": 3, "task-2": 3, "task-3": 3}
    relations = [store.size for store in net.transitions]
    assert list(steps(plot.weights(net)).values()) == relations
    by_owner = steps(plot.weights(net, by="owner"))
    expected = {f"task-{n}": len(net.select(owner=f"task-{n}").outgoing()) for n in (1, 2, 3)}
    assert by_owner == {"no owner": relations[0], **expected}
    for draw in (plot.degrees, plot.weights):
        with pytest.raises(ValueError, match="layer"):
            draw(net, by="layer")
        draw(gn.GrapNet([2, 0])).figure.draw_without_rendering()
    with pytest.raises(ValueError, match="friends"):
        plot.degrees(net, of="friends")  # pyright: ignore[reportArgumentType]


def test_weights_that_are_no_numbers_are_counted_and_nothing_fails():
    net = gn.GrapNet.from_relations(
        [2, 2], [([0, 0, 1], [0, 1, 1], [1.0, float("nan"), float("inf")])]
    )
    ax = plot.weights(net)
    assert words(ax) == "weights of 3 relations (2 not finite), by transition"
    assert steps(ax) == {"0 to 1": 1}
    for draw in (plot.weights, plot.graph, plot.adjacency, plot.deletion):
        draw(net).figure.draw_without_rendering()


def test_every_function_draws_into_the_axes_it_is_given():
    net = grown()
    draws = (
        lambda ax: plot.deletion(net, ax=ax),
        lambda ax: plot.adjacency(net, ax=ax),
        lambda ax: plot.timeline(net, ax=ax),
        lambda ax: plot.accuracy_matrix(np.eye(2), ax=ax),
        lambda ax: plot.degrees(net, ax=ax),
        lambda ax: plot.weights(net, ax=ax),
    )
    for draw in draws:
        ax = Figure().subplots()
        assert draw(ax) is ax
        own = draw(None)
        assert own.figure is not ax.figure
        assert own.figure.get_layout_engine() is not None
