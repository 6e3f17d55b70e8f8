"""The benchmark command runs, writes its result, and its check can fail."""

import json
import sys

import pytest

from benchmarks import (
    auto,
    capture,
    compiled,
    costs,
    edits,
    execution,
    files,
    graft,
    models,
    repair,
    rules,
    run,
)
from benchmarks.timing import threads


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Lets no benchmark use a second thread, which would wait and wait for a core that other tests
    keep busy.
    """
    for benchmark in (execution, graft):
        monkeypatch.setattr(benchmark, "threads", lambda count: threads(1))


@pytest.mark.sparse
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
        "settings": {},
        "rows": {
            row: {"relations": 2**22, "ratios": dict(edits.BARS)} for row in ("4e6", *edits.PLANS)
        },
        "huge": {"relations": 10**8, **edits.HUGE_BARS},
    }


def test_result_at_the_bars_passes():
    assert edits.missed(full_result()) == []


def test_each_missed_bar_is_named():
    for name in edits.BARS:
        result = full_result()
        result["rows"]["4e6"]["ratios"][name] *= 1.01
        (line,) = edits.missed(result)
        assert line.startswith(name)
    for row in edits.PLANS:
        for name in edits.PLAN_BARS:
            result = full_result()
            result["rows"][row]["ratios"][name] *= 1.01
            (line,) = edits.missed(result)
            assert line.startswith(f"{name} at {row}")
    for name in edits.HUGE_BARS:
        result = full_result()
        result["huge"][name] *= 1.01
        (line,) = edits.missed(result)
        assert line.startswith(name)


def cuda_result() -> dict:
    """Returns a result of CUDA that reaches every bar."""
    rows = {}
    for row, bars in edits.CUDA_BARS.items():
        waits = dict.fromkeys(bars, 0)
        rows[row] = {
            "relations": 10**6,
            "step_ms": 1.0,
            "milliseconds": dict(bars),
            "waits": waits,
        }
    return {"settings": {"device": "a GPU"}, "rows": rows}


def test_each_missed_bar_of_cuda_is_named():
    assert edits.missed(cuda_result()) == []
    assert "| RigL | 1,000,000 | 1.00 ms | apply | 8.00 | 0 |" in edits.table(cuda_result())
    for row, bars in edits.CUDA_BARS.items():
        for name in bars:
            result = cuda_result()
            result["rows"][row]["milliseconds"][name] *= 1.01
            (line,) = edits.missed(result)
            assert line.startswith(f"{name} at {row}")
    result = cuda_result()
    result["rows"]["RigL"]["relations"] -= 1
    (line,) = edits.missed(result)
    assert "999,999" in line


@pytest.mark.sparse
def test_the_execution_benchmark_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    path = tmp_path / "execution.json"
    monkeypatch.setattr(sys, "argv", ["run", "execution", "--fast", "--check", "--json", str(path)])
    assert run.main() == 1
    assert "small sizes" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert {row["against"] for row in rows} >= {
        "nn.Linear",
        "torch.sparse CSR",
        "nn.utils.prune",
        "dense backend",
    }
    assert all(row["faster"] > 0 for row in rows)
    at_the_bars = [{**row, "faster": row["must"] or 1.0} for row in rows]
    full = {"rows": at_the_bars, "settings": {"fast": False}}
    assert execution.missed(full) == []
    judged = next(row for row in at_the_bars if row["must"])
    judged["faster"] *= 0.99
    (line,) = execution.missed(full)
    assert line.startswith(judged["work"])


def test_the_capture_benchmark_measures_selected_rows_and_its_check_can_fail(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "capture.json"
    chosen = ["--only", "768×3072", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["run", "capture", "--fast", "--check", *chosen])
    assert run.main() == 1
    assert "captured on a GPU" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert [row["work"].split(",")[2].strip() for row in rows] == ["50% cut", "90% cut"]
    at_the_bars = [{**row, "faster": row["must"]} for row in rows]
    full = {"rows": at_the_bars, "settings": {"device": "a GPU", "fast": False}}
    assert capture.missed(full) == []
    at_the_bars[0]["faster"] *= 0.99
    at_the_bars[1]["error"] = 1.0
    slow, wrong = capture.missed(full)
    assert slow.startswith(rows[0]["work"])
    assert wrong.startswith(rows[1]["work"])


@pytest.mark.sparse
def test_the_costs_benchmark_writes_what_auto_reads(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["run", "costs", "--fast", "--json", str(path)])
    assert run.main() == 0
    measured = json.loads(path.read_text())["tables"]
    on_file = json.loads(costs.COSTS.read_text())["tables"]
    places = [(one["kind"], one["precision"]) for one in measured]
    assert set(places) >= {(one["kind"], one["precision"]) for one in on_file}
    assert len(set(places)) == len(places)
    for one in measured:
        assert set(one["training"]) == set(one["forward"]) >= {"sparse", "family"}
    assert any("tiles" in one["training"] for one in measured)  # those measured here


@pytest.mark.sparse
def test_the_benchmark_of_auto_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    path = tmp_path / "auto.json"
    arguments = ["run", "auto", "--fast", "--points", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run.main() == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == [
        str(point) for point in auto.drawn_points("cpu", 3)
    ]
    for row in result["rows"]:
        row["faster"] = 0.95
    assert auto.missed(result) == []
    result["rows"][1]["faster"] = 0.94
    (line,) = auto.missed(result)
    assert line.startswith(result["rows"][1]["name"])


def test_the_benchmark_of_rules_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rules.json"
    monkeypatch.setattr(sys, "argv", ["run", "rules", "--fast", "--check", "--json", str(path)])
    assert run.main() == 1
    assert "the bar is for a million" in capsys.readouterr().err
    result = json.loads(path.read_text())
    assert [row["rule"] for row in result["rows"]] == list(rules.cases())
    assert all(row["seconds"] > 0 for row in result["rows"])
    first, frozen, cut = result["optimizer_bytes"].values()
    assert first > frozen > cut


def test_the_benchmark_of_repair_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    path = tmp_path / "repair.json"
    monkeypatch.setattr(sys, "argv", ["run", "repair", "--fast", "--check", "--json", str(path)])
    assert run.main() == 1
    assert "the bar is for 3,072" in capsys.readouterr().err
    result = json.loads(path.read_text())
    assert all(row["seconds"] > 0 for row in result["rows"])
    reached = {"what": "a pass", "columns": 3072, "seconds": 9.0, "times": 2.1, "bar": 2.2}
    assert repair.missed({"rows": [reached]}) == []
    assert len(repair.missed({"rows": [{**reached, "times": 2.3}]})) == 1
    assert len(repair.missed({"rows": [{**reached, "times": None}]})) == 1


@pytest.mark.parametrize(("recurring", "key"), [(True, "dense_steps"), (False, "seconds")])
def test_each_slow_rule_is_named(recurring, key):
    row = {
        "rule": "Rewire",
        "recurring": recurring,
        "relations": 10**6,
        "seconds": 0.1,
        "dense_steps": 0.1,
    }
    assert rules.missed({"rows": [row]}) == []
    (line,) = rules.missed({"rows": [{**row, key: 2.1}]})
    assert line.startswith("Rewire")


def test_the_benchmark_of_compiled_models_runs_and_its_check_can_fail() -> None:
    result = compiled.measure(fast=True)
    rows = result["rows"]
    assert [row["graphs"] for row in rows] == [1] * (len(rows) - 1) + [2]
    assert max(row["output_error"] for row in rows) < 0.05
    assert compiled.table(result).count("\n") == len(rows) + 1
    settings = {"device": "cuda", "width": compiled.Settings.width}
    at_the_bars = [{**row, "times_faster": compiled.BARS[row["cut"]]} for row in rows]
    assert compiled.missed({"settings": settings, "rows": at_the_bars}) == []
    for spoiled in ({"times_faster": 0.5}, {"graphs": 3}, {"output_error": float("nan")}):
        bad = [{**at_the_bars[0], **spoiled}]
        assert len(compiled.missed({"settings": settings, "rows": bad})) == 1


def test_the_benchmark_of_grafts_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    path = tmp_path / "graft.json"
    monkeypatch.setattr(sys, "argv", ["run", "graft", "--fast", "--check", "--json", str(path)])
    assert run.main() == 1
    assert "the bars are for a block of 768×3072" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert {row["block"] for row in rows} == {"torch Linear, GELU, Linear", "transformers GPT2MLP"}
    assert max(max(row["output_error"], row["step_error"]) for row in rows) < graft.LARGEST_ERROR
    settings = {"device": "cpu", "width": graft.WIDTH}
    at_the_bars = [{**row, "times_faster": 2.0 if row["cut"] else 1 / 1.05} for row in rows]
    assert graft.missed({"settings": settings, "rows": at_the_bars}) == []
    for cut, worse in (
        (0.9, {"times_faster": 1.99}),
        (0.0, {"times_faster": 0.95}),
        (0.5, {"step_error": 1e-4}),
    ):
        slow = [{**row, **worse} if row["cut"] == cut else row for row in at_the_bars]
        assert len(graft.missed({"settings": settings, "rows": slow})) == 2


def test_the_benchmark_of_files_runs_and_its_check_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["run", "files", "--fast", "--check", "--json", str(tmp_path / "f")]
    )
    assert run.main() == 1
    result = json.loads((tmp_path / "f").read_text())
    assert result["rows"]["50 commits: bytes a commit in the file"] < 300
    assert "100,000 commits" in capsys.readouterr().err
    assert files.missed({"rows": files.BARS}) == []


def test_models_name_each_missed_bar_and_what_was_not_measured():
    result = {"settings": {"device": "cpu", "width": 64}, "rows": dict(models.BARS)}
    assert models.missed(result) == []
    for name in models.BARS:
        rows = dict(models.BARS)
        rows[name] += 0.1
        (line,) = models.missed({**result, "rows": rows})
        assert line.startswith(name)
        del rows[name]
        (line,) = models.missed({**result, "rows": rows})
        assert line.startswith(name)
    assert len(models.missed({**result, "settings": {"device": "cpu", "width": 4}})) == 1


def test_adopting_leaves_the_operators_of_a_step_as_they_are():
    assert models._other_operators(4, "cpu") == 0
