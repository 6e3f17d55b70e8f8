"""The layered graph: node by node or group by group, and every number in it is the net's."""

import io
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import grapnet as gn
from grapnet import plot

from .effort import lines_run
from .nets import families, grown
from .reading import overlaps, texts


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
    assert f"({frozen} of them frozen)" in ax.get_title("left")
    assert lines(ax, "cut") == 0


def test_an_owner_may_be_called_like_a_mark():
    net = grown()
    with net.edit() as edit:
        edit.set_owner(net.select(owner="task-1"), "frozen")
    assert legend(plot.graph(net)).count("frozen") == 2


def test_a_net_without_owners_and_frozen_relations_says_nothing_of_them():
    assert set(legend(plot.graph(gn.GrapNet([4, 3, 2])))) == {"weight ≥ 0", "weight < 0"}


def test_line_width_and_colour_tell_size_and_sign_of_a_weight():
    net = gn.GrapNet.from_relations([2, 1], [([0, 1], [0, 0], [2.0, -0.5])], biases=[[0.0]])
    ax = plot.graph(net)
    (drawn,) = [part for part in ax.collections if part.get_gid() == "free"]
    heights = [segment[0, 1] for segment in drawn.get_segments()]
    (thick, thin), colors = (
        sorted(drawn.get_linewidths(), reverse=True),
        drawn.get_edgecolor()[:, :3].tolist(),
    )
    assert thick > 2 * thin
    assert list(drawn.get_linewidths()) == [thin, thick]  # the stronger lies above
    assert heights[1] > heights[0]  # and it is the first node's
    assert colors[0] != colors[1]


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


def test_relations_that_left_with_their_node_are_counted():
    net = grown()
    gone = net.layers[1][0]
    lost = len(gone.incoming()) + len(gone.outgoing())
    with net.edit(reason="remove one") as edit:
        edit.remove_nodes(gone)
    ax = plot.graph(net, cut_since=net.version - 1)
    assert lines(ax, "cut") == 0
    assert f"cut ({lost}, {lost} with a node)" in legend(ax)


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
        parents, children = store.topology.parents().tolist(), store.child.tolist()
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
    assert {"family 1\n40", "family 2\n60", "800", "1,200"} <= shown
    with net.edit() as edit:  # every node has children of its own: families would say nothing
        edit.cut(
            net.layers[1].outgoing()[
                torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.5
            ]
        )
    assert {"all\n100"} <= set(texts(plot.graph(net)))


def test_highlighting_in_a_large_net_counts_what_is_highlighted():
    net = grown(per_task=40, inputs=30)
    chosen = net.select(owner="task-2").outgoing()
    assert "80 of 80" in texts(plot.graph(net, highlight=chosen))


def test_of_many_owners_the_largest_have_boxes():
    net = gn.GrapNet([4, 100, 3])
    with net.edit() as edit:
        for number in range(30):
            edit.set_owner(net.layers[1][3 * number : 3 * number + 3], f"owner {number}")
    shown = texts(plot.graph(net))
    assert "22 others\n66" in shown
    assert sum(text.startswith("owner ") for text in shown) == 8
    assert "no owner\n10" in shown


def test_color_by_activation_and_what_cannot_be_drawn():
    net = gn.GrapNet([3, 4, 4, 2], activation=["relu", "tanh", "identity"])
    assert {"relu", "tanh", "identity"} <= set(legend(plot.graph(net, color_by="activation")))
    with pytest.raises(ValueError, match="color_by is 'owner' or 'activation', got 'size'"):
        plot.graph(net, color_by="size")
    other = gn.GrapNet([2, 2])
    for highlight in (other.layers[0], other.layers[0].outgoing(), other.layers[0][0]):
        with pytest.raises(ValueError, match="highlight belongs to another net"):
            plot.graph(net, highlight=highlight)
    with pytest.raises(
        TypeError, match="highlight is a RelationSet, a NodeSet or a GrapNode, got int"
    ):
        plot.graph(net, highlight=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(gn.HistoryError, match="there is no version 5"):
        plot.graph(net, cut_since=5)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("tasks", [3, 30])
def test_what_was_cut_is_dotted_in_a_lane_through_a_band_or_below_a_thin_one(tasks, theme):
    net = grown(40, tasks, 30, 2 * tasks)
    with plot.theme(theme):
        ax, whole = plot.graph(net, cut_since=net.version - 1), plot.graph(net)
    dotted = [line for line in ax.lines if (line.get_gid() or "").startswith("cut")]
    grounds = [line for line in ax.lines if to_hex(line.get_color()) == to_hex(ax.get_facecolor())]
    lanes = {line.get_ydata().tobytes() for line in grounds}
    assert all(line.get_zorder() < dotted[0].get_zorder() for line in grounds)
    # 1: the 21 others
    assert sum(line.get_ydata().tobytes() in lanes for line in dotted) == (3 if tasks == 3 else 1)
    assert len(whole.lines) == 0
    lows = [
        band.get_paths()[0].vertices[:, 1].min()
        for band in ax.collections
        if "band" in (band.get_gid() or "")
    ]
    thin = [line.get_ydata().min() for line in dotted if line.get_ydata().tobytes() not in lanes]
    assert len(thin) == len(dotted) - len(grounds)
    assert all(any(0 < low - y < 0.02 for low in lows) for y in thin)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("per_task", [3, 40, 600])
def test_no_text_lies_on_another(per_task, theme):
    net = grown(per_task, inputs=6 if per_task == 3 else 30)
    with plot.theme(theme):
        ax = plot.graph(net, cut_since=net.version - 1)
    assert overlaps(ax) == []


def named(tasks: int, name: str) -> gn.GrapNet:
    """Returns a grown net whose owners have long names."""
    net = grown(40, tasks, 30, 2 * tasks)
    with net.edit(reason="name") as edit:
        for number in range(1, tasks + 1):
            edit.set_owner(net.select(owner=f"task-{number}"), name.format(number))
    return net


@pytest.mark.parametrize("layout", ["constrained", None])
@pytest.mark.parametrize("tasks", [0, 3, 12])
def test_no_text_lies_on_another_in_a_quarter_of_a_figure(tasks, layout):
    net = named(tasks, "an experiment of May, task {}") if tasks else grown()
    figure = Figure((11, 6), layout=layout)
    first, *others = figure.subplots(2, 2).flat
    ax = plot.graph(net, ax=first, cut_since=net.version - 2)
    for other in others:
        plot.weights(net, by="owner", ax=other)
    assert overlaps(ax) == []
    boxes = [patch.get_window_extent() for patch in ax.patches if patch.get_gid() == "group"]
    names = [text for text in ax.texts if text.get_text().startswith("an expe")]
    assert len(names) == (min(tasks, 9) if layout else 0)  # the others' box is named otherwise
    for name in names:
        room = name.get_window_extent()
        assert any(
            box.x0 <= room.x0 and room.x1 <= box.x1 and box.y0 <= room.y0 and room.y1 <= box.y1
            for box in boxes
        )


def test_boxes_say_less_the_lower_they_are():
    net = named(8, "task {}")
    shown = []
    for high in (9.0, 1.7, 0.8):
        ax = plot.graph(net, ax=Figure((6, high)).subplots())
        ax.figure.draw_without_rendering()
        shown.append([text for text in texts(ax) if text.startswith("task")])
    numbers = range(1, 9)
    assert shown == [[f"task {n}\n40" for n in numbers], [f"task {n}" for n in numbers], []]


def test_a_figure_that_becomes_larger_shows_more():
    figure = Figure((6, 0.9))
    ax = plot.graph(named(8, "task {}"), ax=figure.subplots())
    figure.draw_without_rendering()
    few = len([text for text in texts(ax) if text])
    figure.set_size_inches(6, 9)
    assert overlaps(ax) == []
    assert len([text for text in texts(ax) if text]) >= few + 8
    assert "task 1\n40" in texts(ax)


@pytest.mark.parametrize("layout", ["constrained", "tight"])
@pytest.mark.parametrize("per_task", [3, 40])
def test_small_pictures_are_the_same_at_every_saving_and_as_wide_as_their_share(per_task, layout):
    net, figure = grown(per_task), Figure((4, 4), layout=layout)
    for ax in (axes := figure.subplots(3, 3)).flat:
        plot.graph(net, ax=ax)
    places, shown = [], []
    for _ in range(3):
        figure.savefig(io.BytesIO())
        places.append(axes[0, 0].get_position().bounds)
        shown.append([texts(ax) for ax in axes.flat])
    assert np.ptp(places, axis=0) == pytest.approx(0, abs=1e-9)
    assert shown[0] == shown[1] == shown[2]
    assert places[0][2] > 0.22


@pytest.mark.parametrize("draw", [plot.graph, plot.deletion])
@pytest.mark.parametrize("per_task", [3, 40])
def test_axes_without_a_size_are_drawn_into(draw, per_task):
    net, figure = grown(per_task), Figure()
    draw(net, ax=figure.add_axes((0.5, 0.5, 0, 0)))
    figure.draw_without_rendering()


def test_of_layers_that_are_close_only_some_have_a_head():
    ax = plot.graph(gn.GrapNet([2] * 12), ax=Figure((5.5, 3), layout="constrained").subplots())
    assert overlaps(ax) == []
    assert 3 <= sum(text.startswith(("sensory", "hidden", "output")) for text in texts(ax)) < 12
    ax = plot.graph(gn.GrapNet([2] * 12))
    assert sum(text.startswith(("sensory", "hidden", "output")) for text in texts(ax)) == 12


def test_the_legend_of_low_axes_is_low():
    net = named(12, "an experiment of May, task {}")
    for size, most in (((4, 3), 4), ((4, 9), 7)):
        found = legend(plot.graph(net, ax=Figure(size).subplots()))
        assert len(found) == most
        assert found[-1].endswith(" more")


def test_a_drawn_figure_can_be_copied():
    ax = plot.graph(named(8, "task {}"), ax=Figure((6, 0.8)).subplots())
    ax.figure.draw_without_rendering()
    copied = pickle.loads(pickle.dumps(ax.figure))
    copied.set_size_inches(6, 9)
    copied.draw_without_rendering()
    assert "task 1\n40" in texts(copied.axes[0])
    assert "task 1\n40" not in texts(ax)


def test_the_check_for_overlaps_would_find_one():
    ax = plot.graph(grown())
    ax.text(1, 1.02, "on a heading", ha="center", va="bottom")
    assert len(overlaps(ax)) >= 1


def test_any_net_can_be_drawn():
    for net in (
        gn.GrapNet([0, 0]),
        gn.GrapNet([3, 0, 2]),
        gn.GrapNet([300, 0, 2]),
        gn.GrapNet([2] * 25),
    ):
        plot.graph(net).figure.draw_without_rendering()


def test_a_very_large_net_takes_no_more_work_than_a_large_one():
    lines, drawn = [], []
    for scale in (1, 100):
        pairs = torch.arange(2_500 * scale) * 39
        wires = [(pairs // 500, pairs % 500), (pairs % 500, pairs // 500)]
        net = gn.GrapNet.from_relations([200 * scale, 500, 295 * scale], wires)
        ax = plot.graph(net)
        drawn.append(len(ax.findobj()))
        ax.figure.draw_without_rendering()
        lines.append(lines_run(lambda net=net: plot.graph(net)))
        assert (
            sorted(count for part in bands(ax).values() for *_, count in part)
            == [2_500 * scale] * 2
        )
    assert drawn[1] == drawn[0]
    assert lines[1] < 1.2 * lines[0]  # one line for every sensory node would be more


def test_a_part_of_a_figure_is_drawn_into():
    upper, lower = Figure((7, 8)).subfigures(2)
    for part, net in ((upper, grown()), (lower, grown(per_task=40, inputs=30))):
        plot.graph(net, ax=part.subplots(), cut_since=net.version - 1)
    upper.figure.draw_without_rendering()


def test_axes_given_are_the_axes_returned_and_no_global_state_moves():
    before = dict(rcParams)
    net, ax = grown(), Figure().subplots()
    assert plot.graph(net, ax=ax) is ax
    with plot.theme("dark"):
        assert plot.graph(net).figure is not ax.figure
    assert dict(rcParams) == before
