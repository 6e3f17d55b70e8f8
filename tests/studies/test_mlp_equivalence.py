"""The MLP equivalence audit runs, finds rounding and nothing else, and would name what it
missed.
"""

import copy

import pytest
import torch

import grapnet as gn
from studies import mlp_equivalence


def test_rounding_misses_no_bar_and_every_path_is_there(result):
    assert mlp_equivalence.missed(result) == []
    for activations in result["summary"].values():
        assert list(activations) == ["linear", "ReLU", "GELU"]
        for paths in activations.values():
            assert set(paths) == {"auto", "reference", "family", "walk", "snapshot", "MLP"}
            assert paths["walk"].keys() == {"values", "weights", "biases", "inputs"}
            assert paths["MLP"].keys() == paths["walk"].keys()
            assert paths["MLP"]["values"] > 0.1  # differences of nothing would be small, too


def test_a_weight_that_was_copied_wrongly_would_be_seen(monkeypatch, result):
    def careless(module: torch.nn.Module) -> gn.GrapNet:
        net = copied(module)
        relations = net.layers[0].outgoing()[:1]
        relations.weights = relations.weights + 1e-3
        return net

    copied = gn.from_module
    monkeypatch.setattr(gn, "from_module", careless)
    found = mlp_equivalence.one_seed(mlp_equivalence.FAST, 0)
    for dtype, activations in found.items():
        for activation, paths in activations.items():
            bar = mlp_equivalence.bar(result, dtype, activation, "values")
            assert min(paths[path]["values"] for path in mlp_equivalence.PATHS) > 1e-5 > 10 * bar


@pytest.mark.parametrize(
    ("dtype", "path", "kind", "value"),
    [
        ("float32", "auto", "values", 1e-6),
        ("float64", "walk", "weights", 1e-13),
        ("float64", "family", "inputs", float("nan")),
        ("float32", "snapshot", "values", 1.0),
    ],
)
def test_each_missed_bar_is_named(result, dtype, path, kind, value):
    worse = copy.deepcopy(result)
    worse["summary"][dtype]["ReLU"][path][kind] = value
    (line,) = mlp_equivalence.missed(worse)
    assert line.startswith(f"{kind} of ReLU MLPs run by {path} in {dtype}")
