"""The comparison with GroMo: the committed result holds, and our side runs without GroMo."""

import json
from pathlib import Path

import pytest
import torch

from tools import gromo

RESULT = json.loads((Path(gromo.__file__).parent / "results/gromo.json").read_text())


def test_the_committed_products_are_equal_to_a_hundred_thousandth():
    assert RESULT["versions"]["gromo"] == "0.1.0"
    assert RESULT["tolerance"] <= 1e-5
    assert len(RESULT["cases"]) == 2 * len(gromo.cases())
    for part in ("product", "promise"):
        assert RESULT["worst"][part] == max(case[part] for case in RESULT["cases"]) <= 1e-5


def test_nets_and_adopted_models_grow_alike():
    case = gromo.cases()[0]
    product, promised, _ = gromo.grown_by_rule(case, "net")
    other, again, _ = gromo.grown_by_rule(case, "adopted")
    assert product.shape == (case.width, case.inputs + 1)
    assert torch.allclose(product, other, rtol=1e-9)
    assert promised == pytest.approx(again)


def test_gromo_computes_the_same_where_it_is_installed():
    pytest.importorskip("gromo")
    assert gromo.compare(gromo.cases()[0], "net")["product"] < gromo.TOLERANCE
