"""The example of dynamic sparse training runs on the digits that come with scikit-learn."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples import rigl
from examples.rigl import METHODS, Settings, build, main, plot, read, table, times

SMALL = Settings(
    data="digits",
    hidden=(64, 64),
    tile=16,
    epochs=12,
    every=10,
    seeds=1,
    batch=64,
    methods=("dense", "narrow dense", "static", "SET", "RigL"),
)
# a tenth of such layers would be one tile, which leads nowhere
TILES = replace(SMALL, density=0.5, methods=METHODS[-2:])


def test_every_method_learns_and_the_table_shows_it(tmp_path: Path) -> None:
    result = main(SMALL)
    result["accuracy"] |= main(TILES)["accuracy"]
    assert tuple(result["accuracy"]) == (*SMALL.methods, *TILES.methods)
    result["parameters"] = dict.fromkeys(METHODS, 1000)
    assert all(found[0] > 85 for found in result["accuracy"].values())
    result["times_as_fast_as_dense"] = dict.fromkeys(METHODS, 1.5)
    assert table(result).count("| 1.50 |") == len(result["accuracy"])
    plot(result, tmp_path / "rigl.png")
    assert (tmp_path / "rigl.png").stat().st_size > 1000


def test_the_sparse_ones_have_a_tenth_of_the_relations_and_rewire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, test = read("digits", "cpu")
    nets = {}
    monkeypatch.setattr(
        rigl, "build", lambda method, *rest: nets.setdefault(method, build(method, *rest))
    )
    cells = 64 * 64 + 64 * 64 + 64 * 10
    for settings in (SMALL, TILES):
        in_tiles = settings is TILES
        for method in settings.methods:
            rigl.run(method, 0, train, test, settings)
            if "dense" in method:
                continue
            net, _ = nets[method]
            # at most half a tile away in each of three transitions
            off = abs(net.count().relations - settings.density * cells)
            assert off < (384 if in_tiles else 2)
            assert all((row["tile"] == 16) == in_tiles for row in net.execution.describe()[:2])
    del nets["dense"]
    del nets["narrow dense"]
    moved = {method: len(net.history) for method, (net, _) in nets.items()}
    assert moved["static"] == moved["static tiles"] == 0
    assert min(moved["SET"], moved["RigL"], moved["RigL tiles"]) > 5


def test_steps_are_timed_in_turns() -> None:
    assert set(times(SMALL, repeats=2)) == set(SMALL.methods)


def test_a_narrow_dense_net_has_as_many_parameters_as_a_sparse_one() -> None:
    sparse, _ = build("static", 64, 0, SMALL, 1397)
    narrow, _ = build("narrow dense", 64, 0, SMALL, 1397)
    count = sum(part.numel() for part in narrow.parameters())
    allowed = sum(part.numel() for part in sparse.parameters())
    assert 0.8 * allowed < count <= allowed
    # one more node a layer would be too many
    assert rigl.narrow_width([64, 64, 64, 10], SMALL.density) == narrow[0].out_features
    wider = narrow[0].out_features + 1
    assert 65 * wider + (wider + 1) * wider + (wider + 1) * 10 > allowed


def test_runs_of_a_file_are_continued_and_other_settings_refused(tmp_path: Path) -> None:
    path = tmp_path / "rigl.json"
    methods = ("narrow dense", rigl.LONGER, "RigL")
    first = main(replace(SMALL, epochs=1, methods=methods), path)
    assert set(first["accuracy"]) == set(methods)
    assert first["narrow_epochs"] >= 1
    kept = json.loads(path.read_text())["accuracy"]
    more = main(replace(SMALL, epochs=1, methods=methods, seeds=2), path)
    assert [found[:1] for found in more["accuracy"].values()] == list(kept.values())
    assert {len(found) for found in more["accuracy"].values()} == {2}
    assert more["narrow_epochs"] == first["narrow_epochs"]
    assert table(more).count("| RigL −") == 2
    with pytest.raises(ValueError, match="density"):
        main(replace(SMALL, epochs=1, methods=methods, density=0.3), path)
