"""The benchmark command runs, writes its result, and its check can fail."""

import json
import sys

import pytest

from benchmarks import edits, run


def test_fast_run_writes_json_and_reaches_no_bar(tmp_path, monkeypatch, capsys):
    path = tmp_path / "edits.json"
    monkeypatch.setattr(sys, "argv", ["run", "edits", "--fast", "--check", "--json", str(path)])
    assert run.main() == 1
    missed = capsys.readouterr().err
    assert all(bar in missed for bar in (*edits.BARS, *edits.HUGE_BARS))
    result = json.loads(path.read_text())
    assert set(result["rows"]["1e4"]["ratios"]) == set(edits.BARS)
    assert result["huge"]["relations"] == 10**6


def full_result() -> dict:
    """Returns a result that reaches every bar."""
    return {
        "rows": {"4e6": {"ratios": dict(edits.BARS)}},
        "huge": {"relations": 10**8, **edits.HUGE_BARS},
    }


def test_result_at_the_bars_passes():
    assert edits.missed(full_result()) == []


@pytest.mark.parametrize("name", edits.BARS)
def test_each_missed_ratio_is_named(name):
    result = full_result()
    result["rows"]["4e6"]["ratios"][name] *= 1.01
    (line,) = edits.missed(result)
    assert line.startswith(name)


@pytest.mark.parametrize("name", edits.HUGE_BARS)
def test_each_missed_memory_bar_is_named(name):
    result = full_result()
    result["huge"][name] *= 1.01
    (line,) = edits.missed(result)
    assert line.startswith(name)
