"""The demonstration shows what it says."""

import json

from examples.demo import Settings, main


def test_demo_learns_localises_prunes_and_comes_back(tmp_path):
    result = main(Settings(out=tmp_path))
    assert result == json.loads((tmp_path / "demo.json").read_text())
    assert result["seen_class_accuracy"] > 0.85
    drops = result["drops_after_cutting_task_2"]
    assert drops[2] > 0.4
    assert [drop for number, drop in enumerate(drops) if number != 2] == [0, 0, 0, 0]
    assert result["taken_back_bit_for_bit"]
    assert result["loaded_equal"]
    assert result["relations_after_prune"] == result["relations"] - round(64 * 120 / 2)
    assert result["accuracy_after_prune_and_training"] > 0.94
    assert result["relations_after_undo"] == result["relations"]
