"""The study of one-shot pruning runs, prunes block by block, and would name what it missed."""

import copy

import pytest
import torch
import transformers

from studies import one_shot_gpt as study

from .conftest import set_at

SMALL = study.Training(
    width=24, layers=2, heads=2, length=16, steps=6, warm_up=2, cool_down=2, keep_every=2
)


def without_comparisons(result: dict) -> list[str]:
    """Returns the bars that are missed, without those that a fast run is too short for."""
    return [line for line in study.missed(result) if not line.startswith("perplexity")]


def test_a_fast_run_keeps_half_in_the_pattern_and_undoes_it(result):
    assert without_comparisons(result) == []
    seed = result["seeds"]["0"]
    assert seed["dense"]["perplexity"] < 256
    for method in study.METHODS:
        assert seed[f"{method}, 50 %"]["kept"] == pytest.approx(0.5, abs=1e-3)
        assert seed[f"{method}, 2:4"]["kept"] == 0.5
        assert seed[f"{method}, 2:4"]["most of a group"] == 2
    # Without a pattern some groups stay whole.
    assert seed["magnitude, 50 %"]["most of a group"] == 4
    assert sorted(result["summary"]["2:4"]["order"]) == sorted(study.METHODS)
    assert "Wanda" in study.table(result)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("Wanda, 50 %", "kept"), 0.6, "kept"),
        (("OBS, 2:4", "most of a group"), 3, "pattern"),
        (("random, 2:4", "changed"), False, "changed"),
        (("OBS, 50 %", "same logits after undo"), False, "same logits after undo"),
    ],
)
def test_each_missed_bar_is_named(result, place, value, named):
    worse = copy.deepcopy(result)
    set_at(worse, ("seeds", "1", *place), value)
    (line,) = without_comparisons(worse)
    assert line.startswith(named)


def test_obs_must_be_better_than_every_other_method(result):
    other = copy.deepcopy(result)
    for pattern in study.PATTERNS:
        for method in study.METHODS[:-1]:
            set_at(other, ("summary", pattern, f"OBS - {method}", "high"), -0.01)
    assert study.missed(other) == []
    set_at(other, ("summary", "2:4", "OBS - Wanda", "high"), 0.01)
    (line,) = study.missed(other)
    assert line.startswith("perplexity, 2:4")


def text() -> torch.Tensor:
    """Bytes with something to learn."""
    return torch.arange(2000).remainder(17).mul(7).to(torch.uint8)


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole = study.trained(SMALL, text(), None)
    plain = study.sequences

    def failing(some, count, length, seed):
        if seed % 1000 == 5:
            raise KeyboardInterrupt
        return plain(some, count, length, seed)

    monkeypatch.setattr(study, "sequences", failing)
    with pytest.raises(KeyboardInterrupt):
        study.trained(SMALL, text(), tmp_path)
    monkeypatch.setattr(study, "sequences", plain)
    resumed = study.trained(SMALL, text(), tmp_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


@pytest.mark.parametrize("pattern", list(study.PATTERNS))
def test_blocks_are_pruned_with_what_pruned_blocks_return(pattern):
    """Wanda in plain torch, block by block, leaves the same weights."""
    model = study.trained(SMALL, text(), None)
    expected = copy.deepcopy(model)
    tokens = study.sequences(text(), 8, SMALL.length, 3)
    net = study.Projections(model).adopted()
    rules = study.rules_of(net, "Wanda", study.PATTERNS[pattern])
    study.prune(model, net, rules, tokens, seed=0)
    with torch.no_grad():
        stream = study.embedded(expected, tokens)
        for block in expected.transformer.h:
            for module, inputs in recorded(block, stream).items():
                module.weight.data *= kept_by_wanda(module.weight, inputs, pattern)
            stream = block(stream)
    for name in study.projections(model):
        weight = model.get_submodule(name).weight
        assert torch.equal(weight, expected.get_submodule(name).weight)
        assert float((weight == 0).double().mean()) == 0.5


def recorded(block: torch.nn.Module, stream: torch.Tensor) -> dict:
    """Returns what every projection of a block reads, [rows, in]."""
    found = {}
    hooks = []
    for module in block.modules():
        if isinstance(module, transformers.Conv1D):
            hook = module.register_forward_hook(
                lambda module, inputs, _: found.update({module: inputs[0].flatten(0, 1)})
            )
            hooks.append(hook)
    block(stream)
    for hook in hooks:
        hook.remove()
    return found


def kept_by_wanda(weight: torch.Tensor, inputs: torch.Tensor, pattern: str) -> torch.Tensor:
    """Returns 1 for the half of the weights [in, out] with the largest |w|·‖x‖, 0 for others."""
    scores = weight.abs() * inputs.norm(dim=0)[:, None]
    groups = scores.t()[:, None]  # [out, groups, parents of a group]
    if pattern == "2:4":
        groups = scores.t().unflatten(1, (-1, 4))
    order = groups.argsort(dim=2, descending=True).argsort(dim=2)
    kept = order < groups.shape[2] // 2
    return kept.flatten(1).t()
