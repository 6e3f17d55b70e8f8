"""What a notebook shows: complete, escaped, small, and no more work for more nodes."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

import grapnet as gn

from .effort import lines_run
from .nets import grown


class Balance(HTMLParser):
    """Follows what is open, and keeps names of elements and their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(net: gn.GrapNet) -> Balance:
    found = Balance()
    found.feed(net._repr_html_())
    assert found.open == []
    return found


def test_it_shows_sizes_owners_activations_and_the_last_commits():
    net = grown()
    found = parsed(net)
    told = " ".join(found.texts)
    assert repr(net) in found.texts
    for part in (
        "task-1",
        "task-3",
        "relu",
        "identity",
        "cut the weakest",
        f"{net.count().relations}",
    ):
        assert part in told
    frozen = net.count().frozen / (net.count().relations + net.count().biases)
    assert f"{frozen:.1%} frozen" in told
    assert "grow task 1" not in told  # only the last five of six
    assert "1 earlier" in told
    page = net._repr_html_()
    assert "currentColor" in page  # of the notebook, light or dark, whatever the system prefers
    assert "prefers-color-scheme" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_the_picture_of_a_deep_net_scrolls_instead_of_becoming_too_small():
    page = gn.GrapNet([3] * 12)._repr_html_()
    least, most = (
        int(found)
        for found in re.search(r"<div><svg [^>]*min-width:(\d+)px;max-width:(\d+)px", page).groups()
    )
    assert 0.65 * most < least < most < 800
    assert ".grapnet div{overflow-x:auto}" in page


def test_numbers_of_owners_are_the_nets():
    net = grown()
    page = net._repr_html_()
    for owner in ("task-1", "task-2", "task-3"):
        nodes = net.select(owner=owner)
        row = page[page.index(f"</i>{owner}") :]
        cells = [cell.split("<")[0] for cell in row[: row.index("</tr>")].split('class="n">')[1:]]
        assert cells == [str(len(nodes)), str(len(nodes.outgoing()))]


def test_names_are_escaped_and_there_are_no_scripts():
    net = gn.GrapNet([3, 4, 2])
    with net.edit(reason="<script>alert(1)</script>", by="a & b") as edit:
        edit.set_owner(net.layers[1], '<img src=x onerror="alert(1)">')
    found = parsed(net)
    assert "script" not in found.seen
    assert "img" not in found.seen
    assert "<script>alert(1)</script>" in " ".join(found.texts)


def test_any_net_gives_a_small_page():
    many = gn.GrapNet([5, 3000, 3])
    with many.edit(reason="&" * 1000, by="<" * 1000) as edit:
        for number in range(600):
            edit.set_owner(many.layers[1][5 * number : 5 * number + 5], f"{number}" + "<" * 100)
    for net in (many, gn.GrapNet([2] * 120), gn.GrapNet([0, 0]), gn.GrapNet([3, 0, 2])):
        assert len(net._repr_html_().encode()) < 20_000
        parsed(net)
    assert "588 owners more" in " ".join(parsed(many).texts)


@pytest.mark.parametrize("letter", ["'", '"', "<", "é", "\N{GRINNING FACE}", "\ud800"])
def test_everything_at_once_gives_a_small_page(letter):
    names = ['"' * 30 + str(n) for n in range(4)]
    for name in names:
        gn.register_activation(name, torch.relu)
    net = gn.GrapNet([60] * 13)
    for number in range(6):
        with net.edit(reason=letter * 200, by=letter * 200) as edit:
            for row in range(60) if number == 0 else (number,):
                edit.set_owner(
                    net.select(where=lambda nodes, row=row: nodes.uids % 60 == row),
                    f"{row}" + letter * 90,
                )
                edit.set_activation(net.select(layer=range(1, 13))[row::60], names[row % 4])
    assert len(net._repr_html_().encode()) < 20_000
    found, shown = parsed(net), letter.encode(errors="backslashreplace").decode()
    assert "48 owners more" in " ".join(found.texts)
    # told by a part of its name
    assert sum(shown in text and text.startswith("3") for text in found.texts) == 1


def test_names_of_ordinary_letters_are_shown_whole():
    net = gn.GrapNet([3, 4, 2])
    owner, reason = "l'élève № 1 & <others>", "грамматика " * 7
    with net.edit(reason=reason) as edit:
        edit.set_owner(net.layers[1], owner)
    assert {owner, reason} <= set(parsed(net).texts)


def test_names_that_no_page_can_hold_are_told_apart():
    net = gn.GrapNet([3, 2, 2])
    with net.edit(reason="half \udc00") as edit:
        edit.set_owner(net.layers[1][0], "\ud800")
        edit.set_owner(net.layers[1][1], "\ud801")
    assert {r"\ud800", r"\ud801", r"half \udc00"} <= set(parsed(net).texts)
    net._repr_html_().encode()  # raises where it cannot be sent


def test_a_bar_has_a_piece_for_every_owner_as_high_as_its_nodes_are_many():
    net = gn.GrapNet([2, 12, 2])
    for owner in ("gone", "first"):
        with net.edit() as edit:
            edit.set_owner(net.layers[1][:9], owner)
    page = net._repr_html_()
    bars: dict[str, list[float]] = {}
    for x, height in re.findall(r'<path d="M(\d+) [\d.]+v([\d.]+)" stroke=', page):
        bars.setdefault(x, []).append(float(height))
    assert [len(heights) for heights in bars.values()] == [1, 2, 1]
    first, nobody = sorted(list(bars.values())[1], reverse=True)
    assert first == pytest.approx(3 * nobody, abs=0.2)


def test_a_hundred_times_the_nodes_take_no_more_work():
    lines = []
    for nodes in (200, 20_000):
        rows = torch.arange(25 * nodes) * 19
        net = gn.GrapNet.from_relations([nodes, 500], [(rows // 500, rows % 500)])
        net._repr_html_()
        lines.append(lines_run(net._repr_html_))
    assert lines[1] < 1.5 * lines[0]
