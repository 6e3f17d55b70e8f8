"""What a notebook shows of a net: right, escaped and small."""

import re
from html.parser import HTMLParser

import grapnet as gn

from .nets import grown


class Reader(HTMLParser):
    """Collects the tags and the texts of a page, and checks that every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_it_shows_layers_owners_and_commits():
    net = grown()
    page = net._repr_html_()
    texts = Reader(page).texts
    assert {repr(net), "relu", "identity", "cut the weakest"} <= set(texts)
    for owner in ("task-1", "task-2", "task-3"):
        nodes = net.select(owner=owner)
        row = re.search(rf">{owner}</td>(.*?)</tr>", page)
        assert re.findall(r"<td>(.*?)</td>", row[1]) == [
            str(len(nodes)),
            str(len(nodes.outgoing())),
        ]


def test_names_are_escaped_and_a_browser_can_hold_them():
    net = gn.GrapNet([3, 4, 2])
    with net.edit(reason="<script>alert(1)</script> \udc00", by="a & b") as edit:
        edit.set_owner(net.layers[1], '<img src=x onerror="alert(1)">')
    page = net._repr_html_()
    reader = Reader(page)
    assert not reader.tags & {"script", "img"}
    assert r"<script>alert(1)</script> \udc00" in reader.texts
    page.encode()


def test_any_net_gives_a_small_page_that_says_what_it_leaves_out():
    many = gn.GrapNet([5, 3000, 3])
    with many.edit(reason="&" * 1000, by="<" * 1000) as edit:
        for number in range(600):
            edit.set_owner(many.layers[1][5 * number : 5 * number + 5], f"{number}" + "<" * 100)
    assert "… 588 more" in Reader(many._repr_html_()).texts
    for net in (many, gn.GrapNet([2] * 120), gn.GrapNet([0, 0]), gn.GrapNet([3, 0, 2])):
        page = net._repr_html_()
        Reader(page)
        assert len(page.encode()) < 20_000
