"""The example of dynamic sparse training runs on the digits that come with scikit-learn."""

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
    methods=METHODS[:4],
)
# a tenth of such layers would be one tile, which leads nowhere
TILES = replace(SMALL, density=0.5, methods=METHODS[4:])


def test_every_method_learns_and_the_table_shows_it(tmp_path: Path) -> None:
    result = main(SMALL)
    result["accuracy"] |= main(TILES)["accuracy"]
    assert tuple(result["accuracy"]) == METHODS
    assert all(found[0] > 85 for found in result["accuracy"].values())
    result["times_as_fast_as_dense"] = dict.fromkeys(METHODS, 1.5)
    assert table(result).count("| 1.50 |") == len(METHODS)
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
            if method == "dense":
                continue
            net, _ = nets[method]
            # at most half a tile away in each of three transitions
            off = abs(net.count().relations - settings.density * cells)
            assert off < (384 if in_tiles else 2)
            assert all((row["tile"] == 16) == in_tiles for row in net.execution.describe()[:2])
    del nets["dense"]
    moved = {method: len(net.history) for method, (net, _) in nets.items()}
    assert moved["static"] == moved["static tiles"] == 0
    assert min(moved["SET"], moved["RigL"], moved["RigL tiles"]) > 5


def test_steps_are_timed_in_turns() -> None:
    assert set(times(SMALL, repeats=2)) == set(SMALL.methods)
