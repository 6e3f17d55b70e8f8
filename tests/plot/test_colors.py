"""Colours are apart for every kind of colour vision, and what is not finite has a look of its
own.
"""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import grapnet as gn
from grapnet import plot

VISIONS = {  # Machado, Oliveira and Fernandes 2009, severity 1, of linear RGB
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
NOT_A_NUMBER, INFINITE = float("nan"), float("inf")


def linear(color: Any) -> np.ndarray:
    parts = np.array(to_rgb(color))
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def seen(color: Any, vision: str) -> np.ndarray:
    """Returns where a colour lies in CIE Lab, as somebody sees it."""
    xyz = TO_XYZ @ (np.array(VISIONS[vision]) @ linear(color)).clip(0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def least_difference(colors: list[Any]) -> float:
    """Returns the smallest CIE76 difference of two colours, over all kinds of vision; 2.3 is barely
    seen.
    """
    places = [[seen(color, vision) for color in colors] for vision in VISIONS]
    return min(float(np.linalg.norm(a - b)) for part in places for a, b in combinations(part, 2))


def contrast(color: Any, ground: Any) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(one)) for one in (color, ground))
    return (high + 0.05) / (low + 0.05)


def named(ax: Any) -> dict[str, Any]:
    """Returns the handles of a legend by their texts."""
    part = ax.get_legend()
    return dict(
        zip((text.get_text() for text in part.get_texts()), part.legend_handles, strict=True)
    )


def cells(ax: Any) -> np.ndarray:
    return np.asarray(ax.images[0].get_array())


@pytest.mark.parametrize(("count", "least", "faintest"), [(7, 20, 2.2), (28, 10, 1.7)])
def test_owners_are_told_apart_by_everybody_on_both_grounds(count, least, faintest):
    *owners, nobody = plot.owner_colors([*map(str, range(count)), None]).values()
    assert least_difference(owners) > least
    assert least_difference([*owners, nobody]) > 0.7 * least
    for ground in ("light", "dark"):
        with plot.theme(ground):
            behind = plot.graph(gn.GrapNet([1, 1])).get_facecolor()
        assert min(contrast(color, behind) for color in owners) > faintest


def test_the_measure_finds_colours_that_somebody_does_not_tell_apart():
    assert least_difference(["#e69f00", "#b8a800"]) < 1
    assert least_difference(["#000000", "#ffffff"]) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_signs_and_what_is_not_finite_are_told_apart_by_everybody(ground):
    net = gn.GrapNet.from_relations([1, 3], [([0, 0, 0], [0, 1, 2], [1.0, -1.0, NOT_A_NUMBER])])
    with plot.theme(ground):
        looks = named(plot.graph(net))
        rectangle = named(plot.adjacency(net))
    colors = [looks[name].get_color() for name in ("weight ≥ 0", "weight < 0", "not finite")]
    assert least_difference(colors) > 35
    assert [to_rgb(rectangle[name].get_facecolor()) for name in list(rectangle)[:3]] == [
        to_rgb(one) for one in colors
    ]


def test_lines_of_more_than_seven_owners_differ_in_style_too():
    for draw in (plot.degrees, plot.weights):
        lines = draw(gn.GrapNet([2] * 10)).patches
        assert [line.get_linestyle() for line in lines] == ["-"] * 7 + ["--"] * 2
    net = gn.GrapNet([2, 30, 1])
    with net.edit() as edit:
        for number in range(30):
            edit.set_owner(net.layers[1][number], f"owner {number}")
        edit.cut(net.layers[1][:29].outgoing())
    styles = {
        line.get_label(): line.get_linestyle() for line in plot.weights(net, by="owner").patches
    }
    assert styles["no owner"] == "-"
    assert styles["owner 29"] not in ("-", "--", ":", "-.")  # it has the colour of the second owner


@pytest.mark.parametrize("value", [NOT_A_NUMBER, INFINITE, -INFINITE])
def test_weights_that_are_not_finite_have_a_look_and_are_counted(value):
    net = gn.GrapNet.from_relations([1, 3], [([0, 0, 0], [0, 1, 2], [1.0, value, -0.5])])
    ax = plot.graph(net)
    assert "(0 of them frozen, 1 not finite)" in ax.get_title("left")
    drawn: Any = next(part for part in ax.collections if part.get_gid() == "free")
    top = drawn.get_edgecolor()[-1, :3].tolist()  # it lies above the others
    assert top == list(to_rgb(named(ax)["not finite"].get_color()))
    assert drawn.get_linewidths()[-1] == max(drawn.get_linewidths())
    ax = plot.adjacency(net)
    assert ax.get_title("left").endswith("3 relations (100 % of all pairs, 1 not finite)")
    assert cells(ax)[0, 1].tolist() == [*named(ax)["not finite"].get_facecolor()[:3], 1.0]
    assert len({tuple(cell[:3]) for cell in cells(ax)[0].tolist()}) == 3


def test_a_net_of_nothing_finite_does_not_look_like_one_of_zeros():
    net = gn.GrapNet([4, 3, 2])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(-INFINITE)
    assert list(named(plot.graph(net))) == ["not finite"]
    large = gn.GrapNet.from_relations(
        [1, 900], [(torch.zeros(900).long(), torch.arange(900), [NOT_A_NUMBER] * 900)]
    )
    assert "900 not finite" in plot.graph(large).get_title("left")
    assert len(np.unique(cells(plot.adjacency(large)).reshape(-1, 4), axis=0)) == 1


def test_large_numbers_of_float64_are_finite():
    net = gn.GrapNet([4, 3, 2], dtype=torch.float64)
    with torch.no_grad():
        for store in net.transitions:
            store.values().fill_(-1e300)
    for draw in (plot.graph, plot.adjacency, plot.weights):
        ax = draw(net)
        assert "not finite" not in ax.get_title("left")
        assert "not finite" not in named(ax)
    assert list(named(plot.graph(net))) == ["weight < 0"]


@pytest.mark.parametrize("sizes", [[784, 500], [500, 784], [601, 1199]])
def test_a_full_rectangle_is_equally_opaque_everywhere(sizes):
    assert np.unique(cells(plot.adjacency(gn.GrapNet(sizes)))[..., 3]).tolist() == [1.0]


def test_a_cell_of_many_pairs_is_as_opaque_as_its_share_of_them():
    children = torch.arange(1200)
    children = children[(children % 2 == 0) | (children < 600)]
    net = gn.GrapNet.from_relations([1, 1200], [(torch.zeros(900).long(), children)])
    opaque = cells(plot.adjacency(net))[0, :, 3]
    assert opaque[:300].tolist() == [1.0] * 300  # both of a cell
    assert opaque[300:].tolist() == [0.25 + 0.75 / 2] * 300  # one of the two


def test_a_rectangle_says_what_its_opacity_means():
    small, large = (list(named(plot.adjacency(gn.GrapNet([size, 2])))) for size in (600, 601))
    assert small == ["weight ≥ 0", "weight < 0", "opacity: |weight|"]
    assert large == ["sum of weights ≥ 0", "sum of weights < 0", "opacity: share of pairs"]
