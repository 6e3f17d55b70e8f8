"""Rewiring while training: equal sizes and steps, and rewirings that are right on every convolution
of the net.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from grapnet.rules import RuleManager, TensorGradientRecorder, rigl, set_rewiring
from studies import rigl_cifar
from studies.cifar_training import Descent, resnet18
from studies.rigl_cifar import FAST, METHODS, REWIRED, Run, Sparse

from .conftest import set_at


def test_a_fast_run_compares_nets_of_equal_size(result):
    (numbers,) = result["seeds"].values()
    assert list(numbers) == [name for stage in rigl_cifar.stages(FAST) for name in stage]
    sparse = rigl_cifar.sparse_parameters(FAST.width, FAST.sparsity)
    assert sparse < 0.12 * numbers["dense"]["parameters"]
    for method in ("static", *REWIRED):
        assert numbers[method]["parameters"] == sparse
        assert 0 <= numbers[method]["starved"] < 0.5
    # One channel more in a stage of this small net is a twelfth of the parameters.
    assert 0.9 * sparse < numbers["narrow"]["parameters"] <= sparse
    losses = [tuple(numbers[method]["loss"]) for method in METHODS]
    assert len(set(losses)) == len(METHODS)
    # SRigL leaves every channel its number of kernels.
    for key in ("starved", "uneven"):
        assert numbers["SRigL"][key] == numbers["static"][key] != numbers["RigL"][key]
    for method in REWIRED:
        assert 0 < numbers[method]["survived"] < 1
    assert "survived" not in numbers["static"]


def test_rate_and_interval_are_the_best_on_held_out_images():
    settings = replace(FAST, descent=Descent("SGD", (0.1, 0.2), 0.0), intervals=(2, 3))
    first, second, third = rigl_cifar.stages(settings)
    assert third == list(METHODS)
    found = {name: {"accuracy": 20.0} for name in (*first, *second)}
    found[Run("narrow", rate=0.2).name]["accuracy"] = 30.0
    found[Run("RigL", every=3).name]["accuracy"] = 30.0
    for method in METHODS:
        expected = 0.2 if method == "narrow" else 0.1
        assert rigl_cifar.chosen_rate(settings, method, found) == expected
    found[Run("static", rate=0.2).name]["accuracy"] = 30.0
    assert rigl_cifar.chosen_rate(settings, "RigL", found) == 0.2
    assert rigl_cifar.chosen_interval(settings, "RigL", found) == 3
    assert rigl_cifar.chosen_interval(settings, "SET", found) == 2


def masks(learner: Sparse) -> dict[str, Tensor]:
    """Returns which kernels each rewired convolution has, [out, in]."""
    net = learner.net
    found = {}
    for t in numbers(learner).values():
        weight = net.transitions[t]
        mask = torch.zeros(weight.n_children, weight.n_parents, dtype=torch.bool)
        mask[weight.topology.child.long(), weight.topology.parents().long()] = True
        found[weight.name.removesuffix(".weight")] = mask
    return found


def numbers(learner: Sparse) -> dict[str, int]:
    """Returns the transitions of the rewired convolutions by the names of these."""
    names = [weight.name for weight in learner.net.transitions]
    return {name: names.index(f"{name}.weight") for name in rigl_cifar.rewired(learner.model)}


def momenta(learner: Sparse) -> dict[str, Tensor]:
    """Returns the momentum of every convolution, [out, in, height, width], 0 where it has none."""
    found = {}
    of = masks(learner)
    for name, convolution in rigl_cifar.rewired(learner.model).items():
        parameter = convolution._parameters["weight"]
        held = learner.optimizer.state[parameter]["momentum_buffer"]
        assert held.shape == parameter.shape
        whole = torch.zeros(convolution.weight.shape, dtype=held.dtype)
        whole[of[name]] = held.view(-1, *convolution.kernel_size)
        found[name] = whole
    return found


def dense_twin(learner: Sparse, widths: list[int]) -> nn.Module:
    """Returns a plain net with the same numbers, and 0 where a kernel was cut."""
    twin = resnet18(widths).double()
    contents = dict(learner.model.state_dict())
    for name, convolution in rigl_cifar.rewired(learner.model).items():
        contents[f"{name}.weight"] = convolution.weight.detach()
    twin.load_state_dict(contents)
    return twin


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def test_a_rewiring_of_the_net_drops_grows_and_moves_momentum_as_a_dense_twin_shows():
    widths = [8, 10, 12, 14]
    torch.manual_seed(0)
    model = resnet18(widths).double()
    learner = Sparse(model, replace(FAST, sparsity=0.7), 0, None)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.05
    rule = rigl(steps=100, every=3, transitions=list(rigl_cifar.rewired(model)))
    manager = RuleManager()
    manager.add(rule)
    manager.start(learner.net)
    recorders = {}
    for name, t in numbers(learner).items():
        recorders[name] = TensorGradientRecorder(learner.net, t)
    x = torch.randn(4, 8, 3, 32, 32, dtype=torch.float64)
    y = torch.randint(10, (4, 8))
    for step in range(3):
        backward(model, x[step], y[step])
        learner.optimizer.step()
        manager.apply(learner.net, step)
    twin = dense_twin(learner, widths)
    backward(twin, x[3], y[3])
    for recorder in recorders.values():
        recorder.arm(learner.net)
    backward(model, x[3], y[3])
    learner.optimizer.step()
    before = masks(learner)
    held = momenta(learner)
    weights = {name: part.weight.detach() for name, part in rigl_cifar.rewired(model).items()}
    gradients = {}
    for name, part in rigl_cifar.rewired(twin).items():
        gradients[name] = part.weight.grad
        recorded = recorders[name].gradient()
        torch.testing.assert_close(recorded, part.weight.grad, rtol=0, atol=1e-10)
        assert recorded[~before[name]].abs().max() > 1e-6  # of kernels that were cut
    version = learner.net.version
    manager.apply(learner.net, 3)
    assert learner.net.version == version + 1
    after = masks(learner)
    moved = momenta(learner)
    for name, mask in before.items():
        count = round(rule.rule.fraction_at(3) * int(mask.sum()))
        norms = weights[name].flatten(2).norm(dim=2)
        slopes = gradients[name].flatten(2).norm(dim=2)
        weakest = norms.masked_fill(~mask, torch.inf).flatten().topk(count, largest=False)
        steepest = slopes.masked_fill(mask, -1.0).flatten().topk(count)
        expected = mask.clone().flatten()
        expected[weakest.indices] = False
        expected[steepest.indices] = True
        assert count > 0
        assert torch.equal(after[name].flatten(), expected)
        kept = mask & after[name]
        grown = after[name] & ~mask
        assert torch.equal(moved[name][kept], held[name][kept])
        assert int(held[name][kept].count_nonzero()) > 0
        assert int(moved[name][grown].count_nonzero()) == 0
        found = model.get_submodule(name).weight
        assert torch.equal(found[kept], weights[name][kept])
        assert int(found[grown].count_nonzero()) == 0


@pytest.mark.parametrize("trained", [False, True])
def test_grown_kernels_survive_if_they_have_become_strong(trained):
    torch.manual_seed(0)
    model = resnet18([8, 8, 8, 8])
    rule = set_rewiring(10, every=1, transitions=list(rigl_cifar.rewired(model)))
    learner = Sparse(model, replace(FAST, sparsity=0.5), 0, rule)
    learner.after(1)
    assert "survived" not in learner.about()
    if trained:
        with torch.no_grad():
            for convolution in rigl_cifar.rewired(model).values():
                content = convolution._parameters["weight"]
                content[content == 0] = 10.0
    learner.after(2)
    # Kernels are 0 when they are grown, and the weakest go first.
    assert learner.about()["survived"] == float(trained)


def test_each_missed_bar_is_named(result):
    reached = copy.deepcopy(result)
    for method in rigl_cifar.BY_GRADIENT:
        lead = {"mean": 0.0, "low": -0.3, "high": 0.3}
        reached["summary"]["differences"][f"{method} − static"] = lead
    assert rigl_cifar.missed(reached) == []
    for method in rigl_cifar.BY_GRADIENT:
        worse = copy.deepcopy(reached)
        set_at(worse["summary"], ("differences", f"{method} − static", "mean"), -0.01)
        (line,) = rigl_cifar.missed(worse)
        assert line.startswith(f"{method}:")
