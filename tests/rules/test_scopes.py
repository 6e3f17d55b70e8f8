"""The guide's table of scopes, limits and budgets is what the rules take."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import grapnet as gn
from grapnet import rules

GUIDE = Path(__file__).parent.parent.parent / "docs/guides/rules.md"
SCOPES = ("child", "owner", "transition", "space", "model")
COLUMNS = {"compare": "lamp", "keep": 1, "pattern": (1, 2), "multiple": 2}
COSTS = ("parameters", "macs")
# how much each rule takes, unless a setting of the table says that
AMOUNTS = {"SplitIntoFamilies": {"transitions": 0, "families": 2}}
OTHER_AMOUNTS = {"pattern", *COSTS}


def table() -> dict[str, dict[str, str]]:
    """Returns the cells of the table by rule and column."""
    text = GUIDE.read_text().split("## Scopes, limits and budgets")[1].split("\n## ")[0]
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    heads = [cell.strip("`=") for cell in rows[0]]
    found = {}
    for row in rows[2:]:
        found[row[0].strip("`")] = dict(zip(heads[1:], row[1:], strict=True))
    return found


def words(cell: str) -> list[str]:
    return re.findall(r'`"(\w+)"`', cell)


def takes(rule: str, **settings: Any) -> bool:
    amount: dict[str, Any] = AMOUNTS.get(rule, {"fraction": 0.5})
    if not OTHER_AMOUNTS.isdisjoint(settings):
        amount = {}
    try:
        getattr(rules, rule)(**amount, **settings)
    except (gn.errors.EditError, TypeError):
        return False
    return True


@pytest.mark.parametrize("rule", ["PruneWeakest", "CovarianceSifter", "PruneNodes"])
def test_every_rule_takes_a_score_as_by(rule: str) -> None:
    scored = []

    def score(net: Any, candidates: Any, evidence: Any) -> torch.Tensor:
        scored.append(len(candidates))
        return torch.arange(len(candidates))

    net = gn.GrapNet([4, 6, 6, 2])
    with net.edit(allow_dead=True) as edit:
        getattr(rules, rule)(fraction=0.5, by=score)(net, edit, rules.RuleContext())
        assert len(edit.cuts) or len(edit.removals)
    assert scored


def test_the_table_has_every_rule_that_takes_a_scope() -> None:
    found = set()
    for name in rules.__all__:
        kind = getattr(rules, name)
        if not isinstance(kind, type) or not is_dataclass(kind):
            continue
        if "scope" in {field.name for field in fields(kind)}:
            found.add(name)
    found -= {"Quota"}
    assert len(found) == 4
    assert found <= set(table())


@pytest.mark.parametrize("rule", table())
def test_a_rule_takes_what_the_table_says_and_nothing_else(rule: str) -> None:
    cells = table()[rule]
    assert takes(rule)
    legal = words(cells["scope"])
    assert [word for word in SCOPES if takes(rule, scope=word)] == sorted(legal, key=SCOPES.index)
    for column, value in COLUMNS.items():
        assert takes(rule, **{column: value}) == bool(cells[column]), column
    tiled = words(cells["tile"])
    found = [word for word in SCOPES if takes(rule, scope=word, tile=16)]
    assert found == sorted(tiled, key=SCOPES.index)
    for cost in COSTS:
        assert takes(rule, **{cost: 0.9}) == (f"`{cost}=`" in cells["budget"])
