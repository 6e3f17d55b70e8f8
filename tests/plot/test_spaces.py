"""The picture of spaces: a band for each, in the order of the flow, with sizes and verdicts."""

from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from torch import nn

import grapnet as gn
from grapnet import plot
from grapnet.plot._spaces import MEANINGS, MOST_BANDS
from tests.spaces import zoo

from .nets import texts


def adopted(name: str) -> Any:
    case = zoo.MODELS[name]()
    return gn.adopt(case.model, *case.inputs, **case.kwargs)


def bands(ax: Any) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def in_order(ax: Any, names: list[str]) -> list[str]:
    """Returns names of spaces from top to bottom."""
    found = []
    for text in ax.texts:
        name = text.get_text().split("  ")[0]
        if "  " in text.get_text() and name in names:
            found.append((text.get_position()[1], name))
    return [name for _, name in sorted(found)]


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt_tied", "densenet", "gqa_decoder"])
def test_every_space_has_a_band_of_the_colour_of_its_verdict(name):
    net = adopted(name)
    ax = plot.spaces(net)
    assert len(bands(ax)) == len(net.spaces)
    drawn = sorted(to_hex(band.get_facecolor()) for band in bands(ax))
    assert drawn == sorted(MEANINGS[space.verdict][0] for space in net.spaces)
    shown = texts(ax)
    for space in net.spaces:
        assert any(f"{len(space):,}" in text for text in shown)


def test_bands_follow_the_flow_from_input_to_output():
    class Backwards(nn.Module):
        """Its modules are defined from the output to the input."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(7, 3)
            self.middle = nn.Linear(5, 7)
            self.first = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.first(x).relu()).relu())

    net = gn.adopt(Backwards(), torch.randn(2, 4))
    assert net.spaces[0].name == "head"
    names = ["first:in", "first", "middle", "head"]
    assert in_order(plot.spaces(net), names) == names


def test_removed_nodes_are_pale_added_ones_hatched_and_cuts_have_their_share():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 2))
    net = gn.adopt(model, torch.randn(2, 4))
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[:4])
        edit.add_nodes(net.space("2"), 7)
    with net.edit() as edit:
        edit.cut(net.relations("2").smallest(fraction=0.25))
    ax = plot.spaces(net)
    pale = [band for band in bands(ax) if band.get_alpha() is not None]
    hatched = [band for band in bands(ax) if band.get_hatch()]
    assert len(pale) == len(hatched) == 1
    # Both spaces have 16 nodes at most, the longest band: 4 of 16 left, 7 of 16 came.
    assert pale[0].get_width() == pytest.approx(4 / 16)
    assert hatched[0].get_width() == pytest.approx(7 / 16)
    shown = texts(ax)
    assert {"0  12 of 16", "2  16 of 9", "2 (75 %)"} <= set(shown)
    legend: Any = ax.get_legend()
    named = {text.get_text() for text in legend.get_texts()}
    assert named == {"exact", "pinned", "removed", "added"}


def test_a_file_gives_the_same_picture(tmp_path):
    net = adopted("vit")
    with net.edit() as edit:
        edit.remove_nodes(net.space("blocks.0.fc1")[:9])
    gn.save(tmp_path / "file", net)
    drawn = [plot.spaces(one) for one in (net, gn.open(tmp_path / "file").adopted)]
    assert texts(drawn[0]) == texts(drawn[1])
    paths = [plot.save(ax, tmp_path / f"{n}.png", dpi=50) for n, ax in enumerate(drawn)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_many_blocks_share_bands():
    blocks = []
    for _ in range(MOST_BANDS):
        blocks += [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))]
    net = gn.adopt(nn.Sequential(*blocks), torch.randn(2, 4))
    shown = texts(plot.spaces(net))
    assert f"*.0 ({MOST_BANDS} spaces)  {6 * MOST_BANDS}" in shown
    assert len(bands(plot.spaces(net))) < 5


@pytest.mark.parametrize("draw", [plot.graph, plot.adjacency, plot.weights, plot.deletion])
def test_pictures_of_nets_refuse_a_model_and_name_the_one_that_draws_it(draw: Any) -> None:
    with pytest.raises(TypeError, match=r"plot\.spaces"):
        draw(adopted("resnet"))


def test_degrees_of_the_nodes_of_a_model_are_drawn() -> None:
    assert plot.degrees(adopted("resnet")).has_data()
