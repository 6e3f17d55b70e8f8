"""The Tiny Transformer audit runs, reaches its bars, and would name what it missed."""

import copy
import json
import sys
from pathlib import Path

import pytest

from grapnet.studies import all as studies
from grapnet.studies import tiny_transformer

COMMITTED = Path(__file__).parent.parent.parent / "results/tiny_transformer.json"


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("study") / "result.json"
    before, sys.argv = sys.argv, ["study", "--fast", "--check", "--json", str(path)]
    try:
        assert tiny_transformer.main() == 0
    finally:
        sys.argv = before
    return json.loads(path.read_text())


def test_a_fast_run_reaches_every_bar(result):
    assert tiny_transformer.missed(result) == []
    assert result["cut"]["before"] == 1024
    assert set(result["cut"]["left"].values()) == {992}
    assert {"storage", "gradient", "optimizer exp_avg", "snapshot", "family plan"} <= set(
        result["cut"]["left"]
    )


def test_the_committed_run_reaches_every_bar_and_did_not_learn_everything():
    committed = json.loads(COMMITTED.read_text())
    assert committed["settings"] == tiny_transformer.asdict(tiny_transformer.Settings())
    assert tiny_transformer.missed(committed) == []
    # equal accuracies say little where all are right
    assert 0.7 < committed["training"]["accuracy"]["dense"] < 1


def test_ctrl_c_gives_one_line_and_exit_130_alone_and_among_others(tmp_path, capsys, monkeypatch):
    def interrupted(settings: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_transformer, "run", interrupted)
    assert tiny_transformer.main(["--fast", "--json", str(tmp_path / "tiny.json")]) == 130
    assert capsys.readouterr() == ("", "tiny_transformer: interrupted\n")
    assert (
        studies.main(["--fast", "--results", str(tmp_path), "tiny_transformer", "mlp_equivalence"])
        == 130
    )
    assert capsys.readouterr() == ("\n## tiny_transformer\n\n", "tiny_transformer: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("exact", "float32", "logits"), 1e-5, "logits"),
        (("exact", "float64", "other_gradients"), 2e-12, "other_gradients"),
        (("exact", "float64", "ffn_forward"), float("nan"), "ffn_forward"),
        (("training", "same_predictions"), False, "accuracy"),
        (("cut", "left", "gradient"), 1024, "gradient"),
        (("cut", "backend_errors", "sparse"), 1e-3, "sparse"),
    ],
)
def test_each_missed_bar_is_named(result, place, value, named):
    worse = copy.deepcopy(result)
    inner = worse
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (line,) = tiny_transformer.missed(worse)
    assert line.startswith(named)
