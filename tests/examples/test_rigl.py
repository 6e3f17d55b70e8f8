"""The example of dynamic sparse training runs on the digits that come with scikit-learn."""

from pathlib import Path

import pytest

from examples import rigl
from examples.rigl import METHODS, Settings, build, main, plot, read, table, times

SMALL = Settings(data="digits", hidden=(64, 64), epochs=12, every=10, seeds=1, batch=64)


def test_every_method_learns_and_the_table_shows_it(tmp_path: Path) -> None:
    result = main(SMALL)
    assert set(result["accuracy"]) == set(METHODS)
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
    for method in ("static", "SET", "RigL"):
        rigl.run(method, 0, train, test, SMALL)
    cells = 64 * 64 + 64 * 64 + 64 * 10
    assert all(abs(net.count().relations - 0.1 * cells) < 2 for net, _ in nets.values())
    moved = {method: len(net.history) for method, (net, _) in nets.items()}
    assert moved["static"] == 0
    assert moved["SET"] > 5
    assert moved["RigL"] > 5


def test_steps_are_timed_in_turns() -> None:
    assert set(times(SMALL, repeats=2)) == set(METHODS)
