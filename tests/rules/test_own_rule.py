"""The guide to rules runs, and the user's own rule in it needs ten lines and nothing private."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet.rules import RuleManager

GUIDE = Path(__file__).parents[2] / "docs/guides/rules.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = PYTHON.findall(GUIDE.read_text())
OWN_RULE = PYTHON.findall(GUIDE.with_name("write-a-rule.md").read_text())


def executed(blocks: list[str]) -> dict[str, Any]:
    """Runs code blocks in order and returns the names that they leave behind."""
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


def test_the_guide_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed(BLOCKS)
    assert [commit.by for commit in names["net"].history] == [
        "LimitChildren",
        "halve",
        "CutQuietest",
    ]
    gn.check(names["net"])
    shown = re.search(r"^```text\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert shown is not None
    expected = shown[1].splitlines()
    printed = str(names["preview"]).splitlines()
    assert printed[:-1] == expected[:-1]
    # the last number depends on the weights
    assert printed[-1].rsplit(" ", 1)[0] == expected[-1].rsplit(" ", 1)[0]


def test_a_rule_of_ones_own_is_ten_lines_on_public_names() -> None:
    rule = ast.parse(BLOCKS[0])
    written = [line for line in ast.unparse(rule).splitlines() if line.strip()]
    assert len(written) <= 10
    imported = {node.module for node in ast.walk(rule) if isinstance(node, ast.ImportFrom)}
    assert imported == {"dataclasses"}
    names = {node.attr for node in ast.walk(rule) if isinstance(node, ast.Attribute)}
    assert not [name for name in names if name.startswith("_")]

    net = gn.GrapNet([6, 9, 8, 2])
    manager = RuleManager()
    manager.add(executed(BLOCKS[:1])["LimitChildren"](most=5))
    assert manager.apply(net, 0, dry_run=True).cut == 6 * 4 + 9 * 3
    strongest = net.layers[0][0].outgoing().largest(count=5).weights.tolist()
    manager.apply(net, 0)
    assert [max(len(node.children) for node in layer) for layer in net.layers[:3]] == [5, 5, 2]
    assert net.layers[0][0].outgoing().weights.tolist() == strongest
    assert manager.apply(net, 1) is None


def test_rules_of_the_guides_know_the_ends_of_transitions_that_skip_layers() -> None:
    net = gn.GrapNet([6, 5, 4, 3], skips=[(0, 2), (0, 3)])
    manager = RuleManager()
    manager.add(executed(BLOCKS[:1])["LimitChildren"](most=4))
    manager.apply(net, 0)
    assert max(len(node.children) for layer in net.layers for node in layer) == 4

    names = executed(OWN_RULE[:2])
    for transition, (source, target) in enumerate(net.ends):
        if len(net.layers[source]) * len(net.layers[target]) == net.transitions[transition].size:
            continue
        manager = RuleManager()
        manager.add(names["RewireUndecided"](transition))
        manager.start(net)
        with torch.no_grad():
            net.transitions[transition].weight.neg_()
        commit = manager.apply(net, 0)
        assert list(commit.relations) == [transition]
