"""Owners may have any name: one like "no owner", one that begins with "_", an empty one."""

from typing import Any

import pytest

import grapnet as gn
from grapnet import plot


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def steps(ax: Any) -> dict[str, int]:
    return {patch.get_label(): int(patch.get_data().values.sum()) for patch in ax.patches}


@pytest.mark.parametrize("many", [False, True], ids=["node by node", "group by group"])
def test_an_owner_may_be_called_like_nobody_or_like_nothing(many):
    net = gn.GrapNet([30, 64, 3] if many else [3, 8, 3])
    part = len(net.layers[1]) // 4
    with net.edit() as edit:
        for n, owner in enumerate(("no owner", "_private", "")):
            edit.set_owner(net.layers[1][n * part : (n + 1) * part], owner)
    ax = plot.graph(net)
    named = [name for name in legend(ax) if not name.startswith("weight")]
    assert [name for name in named if name != "no owner"] == ["'no owner'", "_private", "''"]
    if many:  # boxes bear their names, so that the legend has no entry for nobody
        assert {f"{name}\n{part}" for name in ("no owner", "'no owner'", "_private", "''")} <= {
            text.get_text() for text in ax.texts
        }
    else:
        assert named[0] == "no owner"


def test_an_owner_called_like_nobody_is_an_owner():
    net = gn.GrapNet([2, 2])
    with net.edit() as edit:
        edit.set_owner(net.select(), "no owner")
    assert "'no owner'" in legend(plot.graph(net))


def test_distributions_tell_nobody_from_an_owner_that_is_called_so():
    net = gn.GrapNet([3, 8, 2])
    with net.edit() as edit:
        for n, owner in enumerate(("no owner", "_private", "")):
            edit.set_owner(net.layers[1][2 * n : 2 * n + 2], owner)
    expected = {"no owner": 24 + 4, "'no owner'": 4, "_private": 4, "''": 4}
    ax = plot.weights(net, by="owner")
    assert steps(ax) == expected
    assert ax.get_title("left") == "weights of 40 relations, by owner"
    assert legend(ax) == list(expected)
    assert steps(plot.degrees(net, by="owner")) == {
        "no owner": 3 + 2,
        "'no owner'": 2,
        "_private": 2,
        "''": 2,
    }


@pytest.mark.parametrize("draw", [plot.weights, plot.degrees])
def test_distributions_of_many_parts_count_the_smallest_as_one(draw):
    net = gn.GrapNet([2] * 13)
    axes = draw(net)
    drawn = [int(patch.get_data().values.sum()) for patch in axes.patches]
    assert sum(drawn) == (48 if draw is plot.weights else 24)
    assert axes.get_legend().get_texts()[-1].get_text() == "2 others"
    assert len(drawn) == 11
    few = draw(gn.GrapNet([2] * 11))
    assert (len(few.patches), "others" in str(few.get_legend().get_texts()[-1])) == (10, False)
