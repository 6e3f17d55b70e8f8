"""Pruning while training: sizes and steps are the same for all methods, and both pruners choose the
same channels.
"""

import copy
import sys

import pytest
import torch
from torch import nn

from grapnet.integrations import torch_pruning as shim
from studies import prune_cifar
from studies.cifar_training import Pixels, images_on, macs_of, resnet18, shape, split
from studies.prune_cifar import FAST, PRUNERS, Ours, Run, Settings, TorchPruning

from .conftest import set_at

SGD = FAST.descents[0]
needs_torch_pruning = pytest.mark.skipif(
    not prune_cifar.has_torch_pruning(), reason="Torch-Pruning is not installed"
)


def channels(model: nn.Module) -> list[int]:
    return [part.out_channels for part in model.modules() if isinstance(part, nn.Conv2d)]


def test_a_fast_run_leaves_the_budget_at_equal_steps(result):
    (numbers,) = result["seeds"].values()
    first, second = prune_cifar.stages(FAST)
    assert list(numbers) == [*first, *second]
    ratio = prune_cifar.final_ratio(FAST.width, 0.5)
    widths = shape(FAST.width, ratio)
    dense = macs_of(shape(FAST.width, 0.0))
    share = macs_of(widths) / dense
    assert 0.45 < share <= 0.505
    of = {run: numbers[run.name] for run in prune_cifar.runs(FAST)}
    for run, row in of.items():
        assert len(row["curve"]) == len(row["loss"]) == FAST.epochs
        assert row["curve"][-1] == row["accuracy"]
        if run.method in ("ours", "ours, another optimizer"):
            assert 0.9 * share < row["macs"] <= share + 1e-5
        elif run.share < 1:
            assert row["macs"] == pytest.approx(share, abs=1e-5)
        else:
            assert row["macs"] == 1
    small = of[Run("small", SGD, 0.5)]
    assert of[Run("ours, same sizes", SGD, 0.5, 2)]["channels"] == small["channels"]


def test_runs_are_the_same_until_the_first_cut(result):
    (numbers,) = result["seeds"].values()
    # The first cut is in the first epoch; a run without one repeats the dense one.
    with_cut = numbers[Run("ours", SGD, 0.5, 2).name]["loss"][0]
    assert with_cut != numbers[Run("dense", SGD).name]["loss"][0]
    train, test = images_on("made-up", "cpu")
    late = Settings(**{**vars(FAST), "first_cut": 0.6, "last_cut": 0.9})
    rate = numbers[Run("dense", SGD).name]["rate"]
    for method in PRUNERS:
        if method == "Torch-Pruning" and not prune_cifar.has_torch_pruning():
            continue
        again = prune_cifar.trained_run(late, Run(method, SGD, 0.5, 2), 0, rate, train, test)
        assert again["loss"][0] == numbers[Run("dense", SGD).name]["loss"][0]


def test_the_rate_is_the_best_on_held_out_images():
    first, second = prune_cifar.trials(FAST)
    found = {first.name: {"accuracy": 20.0}, second.name: {"accuracy": 30.0}}
    assert prune_cifar.chosen_rate(FAST, SGD, found) == second.rate
    found[first.name]["accuracy"] = 31.0
    assert prune_cifar.chosen_rate(FAST, SGD, found) == first.rate
    train, _ = images_on("made-up", "cpu")
    numbered = Pixels(train.bordered, torch.arange(len(train.labels)))
    rest, held = split(numbered, FAST.held_out, seed=3)
    assert len(held.labels) == FAST.held_out
    both = torch.cat([rest.labels, held.labels])
    assert torch.equal(both.sort().values, numbered.labels)


def test_crops_are_moved_and_mirrored_images_with_a_reflected_border():
    train, _ = images_on("made-up", "cpu")
    plain = train.plain(slice(0, 64))
    padded = nn.functional.pad(plain, [4] * 4, mode="reflect")
    found = train.cropped(torch.arange(64), torch.Generator().manual_seed(0))
    seen = set()
    for image, border in zip(found, padded, strict=True):
        places = []
        for flip in (False, True):
            for down in range(9):
                for across in range(9):
                    crop = border[:, down : down + 32, across : across + 32]
                    if torch.equal(image, crop.flip(2) if flip else crop):
                        places.append((flip, down, across))
        (place,) = places
        seen.add(place)
    assert len(seen) > 30
    assert {flip for flip, _, _ in seen} == {False, True}


def trained_nets(cuts: int) -> tuple[nn.Sequential, nn.Sequential, dict[int, list[int]], float]:
    """Returns two equal nets with different norms, widths after each cut, and the final ratio."""
    torch.manual_seed(0)
    model = resnet18(shape(8, 0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ratio = prune_cifar.final_ratio(8, 0.25)
    widths = {}
    for number in range(cuts):
        widths[number] = shape(8, ratio * (number + 1) / cuts)
    return model, copy.deepcopy(model), widths, ratio


@needs_torch_pruning
@pytest.mark.parametrize("cuts", [1, 4])
def test_both_pruners_remove_the_same_channels(cuts):
    ours, theirs, widths, ratio = trained_nets(cuts)
    one = Ours(ours, SGD, widths, "ours, same sizes")
    other = TorchPruning(theirs, SGD, list(widths), ratio)
    for step in widths:
        one.cut(step)
        other.cut(step)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    assert channels(ours) == channels(resnet18(widths[cuts - 1]))


@pytest.mark.parametrize("method", PRUNERS[:3])
def test_the_optimizer_follows_or_is_another_one(method):
    model, _, widths, _ = trained_nets(1)
    learner = Ours(model, SGD, widths, method)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    learner.optimizer.step()
    before = learner.optimizer
    learner.cut(0)
    follows = method != "ours, another optimizer"
    assert (learner.optimizer is before) == follows
    held = [learner.optimizer.state[parameter] for parameter in model.parameters()]
    for state, parameter in zip(held, model.parameters(), strict=True):
        if follows:
            assert state["momentum_buffer"].shape == parameter.shape
        else:
            assert not state


def test_our_own_package_does_not_stand_for_torch_pruning(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch_pruning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch_pruning", shim)
    assert not prune_cifar.has_torch_pruning()
    assert not any(run.method == "Torch-Pruning" for run in prune_cifar.runs(FAST))


def test_each_missed_bar_is_named(result):
    reached = copy.deepcopy(result)
    ours = Run("ours", SGD, 0.5, 2).name
    theirs = Run("Torch-Pruning", SGD, 0.5, 2).name
    rows = reached["summary"]["rows"]
    rows.pop(theirs, None)
    (line,) = prune_cifar.missed(reached)
    assert line.startswith(theirs)
    rows[theirs] = copy.deepcopy(rows[ours])
    lead = {"mean": 0.0, "low": -0.3, "high": 0.3}
    reached["summary"]["differences"][f"{ours} − {theirs}"] = lead
    assert prune_cifar.missed(reached) == []
    for place, value in (
        (("differences", f"{ours} − {theirs}", "mean"), -0.01),
        (("rows", theirs, "macs"), [0.1, 0.0, 1]),
    ):
        worse = copy.deepcopy(reached)
        set_at(worse["summary"], place, value)
        (line,) = prune_cifar.missed(worse)
        assert line.startswith(ours)
