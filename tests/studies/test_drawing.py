"""Every study draws what it found: all its rows are there, no text overlaps, and no global state
moves.
"""

import copy
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grapnet.plot import save
from grapnet.studies import all as studies
from grapnet.studies import drawing
from grapnet.studies.drawing import (
    Group,
    Row,
    Value,
    bars,
    differences,
    dots,
    drawn,
    shares,
    spread,
)

COMMITTED = Path(__file__).parent.parent.parent / "results"
NAMED = {  # where a study has the names of its rows; those about streams have them in their results
    "localization": lambda study: [name.removeprefix("R1 head: ") for name in study.ROWS.values()],
    "split_fashion": lambda study: [*study.ROWS, *study.WAYS],
    "tabular": lambda study: list(study.ROWS.values()),
    "execution_audit": lambda study: [
        "GrapNet+ER",
        "GrapNet+DER++ by family",
        "snapshot over walk",
    ],
    "attention_audit": lambda study: ["attention", "control: the sum"],
    "mlp_equivalence": lambda study: [f"run by {path}" for path in study.PATHS],
    "one_vs_rest": lambda study: list(study.ROWS.values()),
    "sifter": lambda study: list(study.ROWS.values()),
    "tiny_transformer": lambda study: ["FFN forward", "logits", "run by sparse"],
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {name: json.loads((COMMITTED / f"{name}.json").read_text()) for name in studies.NAMES}


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def axes_of(figure: Figure) -> Any:
    (axes,) = figure.axes
    return axes


def boxes(figure: Figure) -> list[tuple[str, Any]]:
    """Returns every text that lies on a line of its own, with the room that it takes."""
    axes, renderer = axes_of(figure), FigureCanvasAgg(figure).get_renderer()
    shown = [
        *axes.texts,
        *axes.get_yticklabels(),
        *axes.get_xticklabels(),
        axes.xaxis.label,
        *axes.get_legend().texts,
    ]
    figure.draw(renderer)
    return [
        (text.get_text(), text.get_window_extent(renderer)) for text in shown if text.get_text()
    ]


@pytest.mark.parametrize("name", studies.NAMES)
def test_a_study_draws_all_its_rows_and_no_text_lies_on_another(results, name, tmp_path):
    result, study = results[name], importlib.import_module(f"grapnet.studies.{name}")
    figure = drawn(study.draw, result)
    save(figure, tmp_path / "plot.svg")
    found = texts(tmp_path / "plot.svg")
    wanted = (
        NAMED[name](study)
        if name in NAMED
        else [*result["summary"]["few"], *result["summary"]["full"]]
    )
    assert len(wanted) >= 2
    assert [
        row for row in wanted if row.replace("'", "&apos;") not in found and row not in found
    ] == []
    rooms = boxes(figure)
    pairs = [
        (a, b)
        for n, (a, room) in enumerate(rooms)
        for b, other in rooms[:n]
        if room.overlaps(other)
    ]
    assert pairs == []


def test_every_study_of_the_package_draws():
    assert set(NAMED) <= set(studies.NAMES)
    for name in studies.NAMES:
        assert (
            studies.registered(name).draw is importlib.import_module(f"grapnet.studies.{name}").draw
        )


def test_the_check_for_overlaps_would_find_one():
    def draw(result: dict[str, Any], axes: Any) -> None:
        rows = [Row("one", {"ours": Value(1.0)}, note="a note"), Row("two", {"ours": Value(2.0)})]
        dots(axes, [Group("heading", rows)], title="", label="values")
        axes.text(1.02, 1.1, "another", transform=axes.get_yaxis_transform())

    rooms = dict(boxes(drawn(draw, {"settings": {}})))
    assert rooms["a note"].overlaps(rooms["another"])
    assert not rooms["one"].overlaps(rooms["two"])


def test_a_picture_is_as_high_as_its_rows_need_and_whole(tmp_path):
    figures = []
    for count in (4, 24):
        rows = [
            Row(f"a name of many words, number {n}", {"ours": Value(n)}, note="wide " * 9)
            for n in range(count)
        ]

        def draw(result: dict[str, Any], axes: Any, rows: list[Row] = rows) -> None:
            dots(axes, [Group("", rows)], title="t", label="l")

        figures.append(drawn(draw, {"settings": {}}))
    low, high = (float(figure.get_size_inches()[1]) for figure in figures)
    assert high - low == pytest.approx(20 * 0.28)
    save(figures[0], tmp_path / "plot.svg")
    assert sum("number" in text for text in texts(tmp_path / "plot.svg")) == 4
    width = float(
        re.search(r'<svg[^>]* width="([\d.]+)pt"', (tmp_path / "plot.svg").read_text())[1]
    )
    # names and notes lie outside of the axes, and inside of the picture
    assert width > 72 * (5.5 + 4)


def test_values_whiskers_and_the_papers_interval_stand_where_they_should():
    axes = Figure().add_subplot()
    row = Row("ours", {"before": Value(3.0), "after": spread((5.0, 1.0))}, [Value(6.0, 5.5, 6.5)])
    dots(axes, [Group("heading", [row], {"bar": 4.0})], title="t", label="l", limits=(0, 10))
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert {name: lines[name] for name in ("before", "after", "bar", "paper")} == {
        "before": [3.0],
        "after": [5.0],
        "bar": [4.0, 4.0],
        "paper": [6.0, 6.0],
    }
    assert [4.0, 6.0] in [list(line.get_xdata()) for line in axes.get_lines()]  # the whisker
    (box,) = axes.patches
    assert (box.get_x(), box.get_width()) == (5.5, 1.0)
    assert axes.get_xlim() == (0, 10)
    assert (
        len(
            {
                line.get_marker()
                for line in axes.get_lines()
                if line.get_label() in ("before", "after")
            }
        )
        == 1
    )
    fills = [
        line.get_markerfacecolor()
        for line in axes.get_lines()
        if line.get_label() in ("before", "after")
    ]
    assert len(set(fills)) == 2  # apart without colours


def test_bars_begin_at_zero_and_differ_by_kind():
    axes = Figure().add_subplot()
    rows = [Row("a", {"ours": spread((80.0, 1.0))}), Row("b", {"others": Value(60.0)})]
    bars(axes, [Group("", rows)], title="t", label="l", kinds=("ours", "others"))
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 80.0), (0, 60.0)]
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()


@pytest.mark.parametrize("values", [(0.0, 3e-7, 2e-18), (0.0, 0.0, 0.0), (1e-16, 1e-16, 1e-16)])
def test_a_difference_of_exactly_zero_has_its_place(values):
    axes = Figure().add_subplot()
    dots(
        axes,
        [Group("", [Row(str(n), {"ours": Value(v)}) for n, v in enumerate(values)])],
        title="t",
        label="l",
    )
    differences(axes)
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks[0] == "0"
    low, high = axes.get_xlim()
    assert low < 0
    assert all(low < value < high for value in values)
    assert 2 <= len(ticks) <= 9


def test_shares_are_plain_numbers():
    axes = Figure().add_subplot()
    dots(
        axes,
        [Group("", [Row(str(x), {"ours": Value(x)}) for x in (1e-3, 14.0)])],
        title="t",
        label="l",
    )
    shares(axes)
    low, high = axes.get_xlim()
    assert 0 < low < 1e-3 < 14 < high < 100
    assert axes.xaxis.get_major_formatter()(0.01, 0) == "0.01"


def test_a_fast_run_says_that_its_numbers_mean_nothing(results):
    plain, fast = results["attention_audit"], copy.deepcopy(results["attention_audit"])
    fast["settings"]["fast"] = True
    made_up = copy.deepcopy(results["sifter"])
    made_up["settings"]["data"] = "made-up"
    titles = [
        axes_of(drawn(studies.registered(result["study"]).draw, result)).get_title("left")
        for result in (plain, fast, made_up)
    ]
    assert ["A fast run" in title for title in titles] == [False, True, True]


def test_compiled_relations_that_could_not_be_measured_are_left_out(results):
    result = copy.deepcopy(results["execution_audit"])
    result["summary"]["compiled"] = {"missing": "not built"}
    names = [
        label.get_text()
        for label in axes_of(
            drawn(studies.registered("execution_audit").draw, result)
        ).get_yticklabels()
    ]
    assert "snapshot over walk" in names
    assert not any(name.startswith("compiled") for name in names)


def test_an_undo_that_failed_is_seen(results):
    result = copy.deepcopy(results["localization"])
    result["summary"]["rows"]["random"]["restored"] = False
    notes = [
        text.get_text()
        for text in axes_of(drawn(studies.registered("localization").draw, result)).texts
    ]
    assert notes.count("undo: NOT RESTORED") == 1
    assert notes.count("undo: bit for bit") == 4


def test_the_same_result_gives_the_same_file_and_no_setting_of_matplotlib_changes(
    results, tmp_path
):
    before = dict(rcParams)
    for name in ("one.svg", "other.svg"):
        save(drawn(studies.registered("sifter").draw, results["sifter"]), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert dict(rcParams) == before


def test_the_tiny_transformer_has_the_same_options(tmp_path, capsys):
    path = COMMITTED / "tiny_transformer.json"
    assert (
        importlib.import_module("grapnet.studies.tiny_transformer").main(
            ["--from", str(path), "--check", "--plot", str(tmp_path / "plot.svg")]
        )
        == 0
    )
    assert "| FFN forward |" in capsys.readouterr().out
    assert "FFN forward" in texts(tmp_path / "plot.svg")


def test_the_studies_draw_into_a_folder(tmp_path, capsys):
    assert studies.main(["--fast", "--plots", str(tmp_path / "plots"), "tiny_transformer"]) == 0
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["tiny_transformer.svg"]
    assert "FFN forward" in texts(tmp_path / "plots" / "tiny_transformer.svg")


def test_the_forms_are_there_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    spec = importlib.util.spec_from_file_location("grapnet.studies.drawn_afresh", drawing.__file__)
    monkeypatch.setitem(sys.modules, spec.name, afresh := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(afresh)
    with pytest.raises(
        ImportError, match=r'needs matplotlib, .* Run: pip install "grapnet\[studies\]"'
    ):
        afresh.drawn(studies.registered("sifter").draw, {})
