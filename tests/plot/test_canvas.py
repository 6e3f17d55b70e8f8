"""Themes, colours and files."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image

import grapnet as gn
from grapnet import plot

from .nets import grown


def test_owners_have_fixed_colours_in_order_of_appearance():
    few, more = plot.owner_colors(["a", None, "b"]), plot.owner_colors(["a", None, "b", "a", "c"])
    assert {owner: more[owner] for owner in few} == few
    assert len(set(plot.owner_colors(map(str, range(28))).values())) == 28
    assert plot.owner_colors(["b", "a"])["b"] == few["a"]
    assert plot.owner_colors([]) == {}


def test_an_owner_has_its_colour_in_every_picture():
    net = grown()
    graph, shares = plot.graph(net), plot.weights(net, by="owner")
    colors = plot.owner_colors(["task-1", "task-2", "task-3"])
    named = dict(
        zip(
            (t.get_text() for t in graph.get_legend().get_texts()),
            graph.get_legend().legend_handles,
            strict=True,
        )
    )
    drawn = {patch.get_label(): to_hex(patch.get_edgecolor()) for patch in shares.patches}
    for owner, color in colors.items():
        assert to_hex(named[owner].get_color()) == color
        assert drawn[owner] == color
        assert color in net._repr_html_()


@pytest.mark.parametrize("name", ["light", "dark"])
def test_texts_are_read_on_the_ground_of_their_theme(name):
    with plot.theme(name):
        axes = [
            plot.graph(grown()),
            plot.timeline(grown()),
            plot.degrees(grown()),
            plot.adjacency(grown()),
        ]
    for ax in axes:
        assert (sum(to_rgb(ax.figure.get_facecolor())) > 1.5) == (name == "light")
        FigureCanvasAgg(ax.figure).draw()  # outside of the block, where ticks are made
        shown = [
            ax.title,
            ax.xaxis.label,
            *ax.get_legend().get_texts(),
            *ax.get_xticklabels(),
            *ax.get_yticklabels(),
        ]
        shades = {sum(to_rgb(text.get_color())) < 1.5 for text in shown if text.get_text()}
        assert shades == {name == "light"}


@pytest.mark.parametrize("face", ["none", (1.0, 1.0, 1.0, 0.1)])
def test_what_is_behind_axes_that_let_it_through_decides_over_the_ink(face):
    inner = Figure(facecolor="black").subfigures(1, 2)[1].subfigures(2, 1)[0]
    ax = plot.degrees(grown(), ax=inner.subplots(subplot_kw={"facecolor": face}))
    assert sum(to_rgb(ax.xaxis.label.get_color())) > 1.5
    inner.set_facecolor("white")
    assert sum(to_rgb(plot.degrees(grown(), ax=ax).xaxis.label.get_color())) < 1.5


def test_axes_of_a_subfigure_are_written_with_their_whole_figure(tmp_path):
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax = plot.degrees(grown(), ax=left.subplots())
    plot.timeline(grown(), ax=right.subfigures(1, 1).subplots())
    plot.save(figure, tmp_path / "whole.svg")
    for part in (ax, left, right.subfigs[0]):
        assert (
            plot.save(part, tmp_path / "part.svg").read_bytes()
            == (tmp_path / "whole.svg").read_bytes()
        )


def test_an_unknown_theme_is_refused():
    with pytest.raises(ValueError, match="a theme is light or dark, got 'blue'"):
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
    with pytest.raises(
        ValueError, match=r"net\.bmp is no picture that can be written: .* \.png, \.svg, \.pdf"
    ):
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


def test_no_module_hides_a_function_of_its_name():
    modules = {name for _, name, _ in pkgutil.iter_modules(plot.__path__)}
    public = {name for name, value in vars(plot).items() if callable(value)}
    assert {"deletion", "adjacency", "timeline", "graph"} <= public
    assert modules & public == set()
    for name in modules:
        importlib.import_module(f"grapnet.plot.{name}")
    assert all(callable(getattr(plot, name)) for name in public)


def test_titles_and_legends_are_as_wide_as_their_axes():
    net = grown(per_task=40, inputs=30)
    for wide in (4.3, 9.0):
        ax = plot.graph(
            net, cut_since=net.version - 1, ax=Figure((wide, 4.0), layout="constrained").subplots()
        )
        FigureCanvasAgg(ax.figure).draw()
        for part in (ax._left_title, ax.get_legend()):
            assert part.get_window_extent().width <= ax.figure.bbox.width
    assert ax._left_title.get_fontsize() == 10.5  # there is room for it


def test_a_file_shows_all_of_a_legend_that_is_wider_than_its_axes(tmp_path):
    ax = plot.graph(grown(), ax=Figure((3, 3)).add_axes((0.5, 0.5, 0.1, 0.4)))
    with Image.open(plot.save(ax, tmp_path / "narrow.png", dpi=100)) as drawn:
        assert (
            drawn.width
            > ax.get_legend().get_window_extent().width
            > 1.5 * ax.get_window_extent().width
        )


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
