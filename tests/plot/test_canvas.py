"""Themes, colours and files."""

import ast
from pathlib import Path

import pytest

import grapnet as gn
from grapnet import plot

from .nets import grown


def test_an_unknown_theme_is_refused():
    with pytest.raises(ValueError, match="blue"):
        plot.theme("blue")


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")]
)
def test_pictures_are_written_whole_and_alike(tmp_path, suffix, start):
    path = tmp_path / f"net{suffix}"
    assert plot.save(plot.graph(grown()), path) == path
    first = path.read_bytes()
    assert first.startswith(start)
    assert plot.save(plot.graph(grown()).figure, str(path)) == path
    assert path.read_bytes() == first
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_picture_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    ax = plot.graph(grown())
    with pytest.raises(ValueError, match=r"net\.bmp"):
        plot.save(ax, tmp_path / "net.bmp")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "net.png"
    path.write_bytes(b"before")

    def fail(name, **kwargs):
        name.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(ax.figure, "savefig", fail)
    with pytest.raises(OSError, match="no space"):
        plot.save(ax, path)
    assert (path.read_bytes(), len(list(tmp_path.iterdir()))) == (b"before", 1)


def test_names_of_users_are_no_formulas(tmp_path):
    net = gn.GrapNet([2, 2])
    with net.edit(reason="costs $5 and $\\frac") as edit:
        edit.set_owner(net.layers[0], "$\\frac{")
    plot.save(plot.graph(net), tmp_path / "graph.svg")
    plot.save(plot.timeline(net), tmp_path / "timeline.svg")
    assert "costs $5" in (tmp_path / "timeline.svg").read_text()


def eager(source: str) -> set[str]:
    """Returns the modules that a file imports as soon as it is imported itself."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def test_importing_the_folder_imports_no_matplotlib_and_nothing_asks_for_pyplot():
    sources = [path.read_text() for path in Path(plot.__file__).parent.glob("*.py")]
    assert len(sources) > 5
    assert set().union(*map(eager, sources)) & {"matplotlib", "scipy"} == set()
    assert not any("pyplot" in source.partition('"""')[2].partition('"""')[2] for source in sources)
    assert eager("from matplotlib.axes import Axes") == {"matplotlib"}
