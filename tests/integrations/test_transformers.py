"""Feed-forward blocks of GPT-2, BERT, ViT and Llama become nets in mid-training, are cut, saved,
and dense again.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn
from examples.gpt2_ffn import Settings, main
from grapnet.convert import FeedForward, ffn_handles, graft_ffn
from tests.integrations.tiny_transformers import BLOCKS, MAKE, Training, optimizer_of, training
from tests.rounding import SINGLE

pytestmark = pytest.mark.xdist_group("transformers")

FAMILIES = sorted(MAKE)
ROUNDING = {  # of logits; of gradients, which reach 1; and of weights after a step of 1e-3
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (4 * SINGLE, SINGLE, SINGLE),  # two blocks, with two sums each
}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference between tensors of the same names."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def weights(model: torch.nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def cut_half(handle: FeedForward) -> None:
    """Cuts the half of every net's relations that have the smallest weights."""
    with gn.edit(*handle.nets, reason="prune by magnitude") as edits:
        for net, edit in zip(handle.nets, edits, strict=True):
            for layer in net.layers[:-1]:
                edit.cut(layer.outgoing().smallest(fraction=0.5))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graft_in_mid_training_changes_nothing(family: str, dtype: torch.dtype) -> None:
    """The optimizer's moments travel, and with the same seed the dropout of the nets drops the
    same.
    """
    dense = training(family, dtype)
    grafted = dense.copy()
    control = dense.copy()
    handles = graft_ffn(grafted.model, optimizer=grafted.optimizer)
    assert [handle.name for handle in handles] == BLOCKS[family]
    assert [len(handle.nets) for handle in handles] == [3 if family == "llama" else 1] * 2
    assert all(
        handle.nets[0].sizes[:2] == [16, 32] and len(handle.hidden) == 32 for handle in handles
    )
    logits, slopes, moved = ROUNDING[dtype]
    assert torch.allclose(grafted.logits(), dense.logits(), rtol=0, atol=logits)
    for number in (2, 3):
        assert torch.allclose(grafted.step(number), dense.step(number), rtol=0, atol=logits)
    gn.ungraft(grafted.model, optimizer=grafted.optimizer)
    assert apart(gradients(grafted.model), gradients(dense.model)) <= slopes
    assert apart(weights(grafted.model), weights(dense.model)) <= moved
    assert torch.allclose(grafted.step(0), dense.step(0), rtol=0, atol=logits)
    control.optimizer = optimizer_of(control.model)  # without the moments of the first steps
    control.step(2)
    control.step(3)
    assert apart(weights(control.model), weights(dense.model)) > 10 * moved


@pytest.mark.parametrize("family", FAMILIES)
def test_half_is_cut_trained_saved_restored_and_dense_again(family: str, tmp_path: Any) -> None:
    original = training(family)
    path = tmp_path / "model.safetensors"
    run = original.copy()
    handles = graft_ffn(run.model, optimizer=run.optimizer)
    for handle in handles:
        cut_half(handle)
    nets = [net for handle in handles for net in handle.nets]
    left = [net.count().relations for net in nets]
    assert sum(left) == 2 * (3 if family == "llama" else 2) * 16 * 32 // 2
    losses = [float(run.step(number)) for number in (2, 3, 0, 1, 2, 3)]
    assert all(map(math.isfinite, losses))
    assert losses[0] > losses[4], "it learns"
    assert [net.count().relations for net in nets] == left
    for net in nets:
        for transition in net.transitions:
            state = run.optimizer.state[transition.weight]
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == transition.weight.shape

    gn.save(path, run.model, optimizer=run.optimizer)
    model = MAKE[family](hidden=24).double().train()  # made with other blocks than the saved one
    gn.restore(path, into=model)
    again = Training(family, model, optimizer_of(model), run.batches)
    gn.restore(path, optimizer=again.optimizer)
    assert torch.equal(again.logits(), run.logits())
    for number in (2, 3):
        assert torch.equal(again.step(number), run.step(number))
    assert [handle.name for handle in ffn_handles(model)] == BLOCKS[family]
    assert [net.count() for handle in ffn_handles(model) for net in handle.nets] == [
        net.count() for net in nets
    ]

    logits = again.logits()
    gn.ungraft(model, optimizer=again.optimizer)
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in original.model.state_dict().items()
    }
    assert torch.allclose(again.logits(), logits, rtol=0, atol=1e-12)
    zeros = sum(
        int((p == 0).sum())
        for n, p in model.named_parameters()
        if n.startswith(tuple(BLOCKS[family]))
    )
    assert zeros == sum(left)
    assert math.isfinite(float(again.step(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_block_by_its_number_and_the_rest_later(family: str) -> None:
    run = training(family, steps=0)
    before = run.logits()
    (last,) = graft_ffn(run.model, -1)
    assert last.name == BLOCKS[family][1]
    assert [handle.name for handle in ffn_handles(run.model)] == BLOCKS[family][1:]
    with pytest.raises(gn.errors.ConversionError, match=BLOCKS[family][1]):
        graft_ffn(run.model, [1])
    (first,) = graft_ffn(run.model)
    assert first.name == BLOCKS[family][0]
    assert [a.nets for a in ffn_handles(run.model)] == [first.nets, last.nets]
    assert torch.allclose(run.logits(), before, rtol=0, atol=1e-12)
    with pytest.raises(gn.errors.ConversionError):
        graft_ffn(run.model)
    with pytest.raises(IndexError):
        graft_ffn(run.model, layers=[5])


def test_blocks_are_chosen_by_number_by_several_or_by_slice() -> None:
    first, second = BLOCKS["gpt2"]
    model = MAKE["gpt2"]()
    for layers, names in (
        (1, [second]),
        (torch.tensor(-1), [second]),
        (slice(0, 2), [first, second]),
        (np.array([0]), [first]),
        (torch.tensor([1, 1]), [second]),
    ):
        assert [handle.name for handle in graft_ffn(model, layers)] == names
        gn.ungraft(model)
    with pytest.raises(gn.errors.ConversionError):
        graft_ffn(model, [])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_text_is_generated_after_cuts(family: str) -> None:
    model = training(family, torch.float32).model.eval()
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **settings)
    handles = graft_ffn(model)
    assert torch.equal(model.generate(prompt, **settings), expected)
    for handle in handles:
        handle.remove_hidden(range(0, 32, 2))
        cut_half(handle)
    cached = model.generate(prompt, **settings)
    assert cached.shape == (1, 9)
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), cached)


def test_the_example_prunes_and_learns_on(tmp_path: Path) -> None:
    settings = Settings(steps=25)
    result = main(settings, tmp_path / "gpt2.safetensors")
    losses = result["losses"]
    assert isinstance(losses, dict)
    assert losses["after the cut"] < losses["at first"] < 3.2  # guessing costs log(24)
    assert result["restored_bit_for_bit"]
    assert result["hidden"] == settings.hidden - settings.units
