"""Recorders of activations on adopted models, against activations captured by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.core._errors import GrapNetError
from grapnet.rules import (
    ActivationRecorder,
    At,
    CovarianceRecorder,
    CovarianceSifter,
    RuleManager,
    TensorCorrelationRecorder,
)
from tests.spaces import huggingface, oracle, zoo
from tests.spaces.subjects import Subject, differing_tensors, loss_of, subject

EXACT = {"rtol": 0, "atol": 1e-12}


def images(tensor: Tensor) -> Tensor:
    """Returns [batch, channels, *image] as one row per position."""
    return tensor.movedim(1, -1).flatten(0, -2)


def tokens(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)


def parts(count: int) -> Callable[[Tensor], Tensor]:
    """Returns the rows of nodes that have `count` numbers each, next to each other."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, -2).unflatten(-1, (-1, count)).transpose(1, 2).flatten(0, 1)

    return rows


# model, space, module whose input has it, how its nodes are read off
PLACES = [
    ("resnet", "conv1", "layer1.0.conv1", images),
    ("resnet", "layer1.0.conv1", "layer1.0.conv2", images),
    ("resnet", "layer2.0.conv2", "layer2.1.conv1", images),
    ("vgg", "3", "8", parts(4)),
    ("conv1d", "0", None, images),
    ("conv3d", "0", None, images),
    ("vit", "patch_embed", "blocks.0.attn.qkv", tokens),
    ("vit", "blocks.0.attn.qkv#2", "blocks.0.attn.proj", parts(8)),
    ("vit", "blocks.1.fc1", "blocks.1.fc2", tokens),
    ("gpt2", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", parts(8)),
    ("gpt2", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj", tokens),
]


def made(name: str) -> Subject:
    if name in zoo.MODELS:
        return subject(zoo.MODELS[name]())
    return subject(huggingface.FAMILIES[name]())


class Captured:
    """Keeps the inputs of one module, as rows of nodes."""

    def __init__(self, module: nn.Module, rows: Callable[[Tensor], Tensor]) -> None:
        self.seen: list[Tensor] = []
        self._rows = rows
        self._hook = module.register_forward_pre_hook(self._take)

    def _take(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen.append(self._rows(args[0].detach().clone()))

    def remove(self) -> None:
        self._hook.remove()


def pass_of(found: Subject, seed: int) -> None:
    """Runs the model on another batch of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for value in found.case.inputs:
        if value.is_floating_point():
            value = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        else:
            value = torch.randint(3, 37, value.shape, generator=generator)
        inputs.append(value)
    with torch.no_grad():
        found.model(*inputs, **found.case.kwargs)


def hooks_of(model: nn.Module) -> int:
    count = 0
    for module in model.modules():
        for part in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            count += len(part)
    return count


@pytest.mark.parametrize(
    ("name", "space", "path", "rows"), PLACES, ids=[f"{one[0]}-{one[1]}" for one in PLACES]
)
def test_statistics_are_those_of_what_readers_read(
    name: str, space: str, path: str | None, rows: Any
) -> None:
    found = made(name)
    nodes = found.net.space(space)
    if path is None:
        path = nodes.readers[0].removesuffix(".weight")
    captured = Captured(found.model.get_submodule(path), rows)
    recorder = ActivationRecorder(nodes)
    covariance = CovarianceRecorder(space)
    for one in (recorder, covariance):
        one.arm(found.net)

    def compare(expected: Tensor) -> None:
        assert recorder.count == len(expected)
        torch.testing.assert_close(recorder.mean, expected.mean(0), **EXACT)
        torch.testing.assert_close(recorder.variance, expected.var(0, correction=0), **EXACT)
        torch.testing.assert_close(recorder.firing_rate, (expected > 0).double().mean(0), **EXACT)
        torch.testing.assert_close(
            covariance.covariance(), torch.cov(expected.t(), correction=0), **EXACT
        )
        torch.testing.assert_close(
            covariance.correlation(), torch.corrcoef(expected.t()).nan_to_num(), **EXACT
        )

    for seed in range(2):
        pass_of(found, seed)
    compare(torch.cat(captured.seen))
    if nodes.verdict == "normalised":
        return
    # Statistics follow the removal of nodes, and go on.
    stay = [row for row in range(len(nodes)) if row % 3 != 1]
    with found.net.edit() as edit:
        edit.remove_nodes(nodes[[row for row in range(len(nodes)) if row % 3 == 1]])
    compare(torch.cat(captured.seen)[:, stay])
    before = [seen[:, stay] for seen in captured.seen]
    captured.seen.clear()
    pass_of(found, 2)
    compare(torch.cat([*before, *captured.seen]))
    # Undo brings back nodes; they begin without samples, as something was recorded since.
    found.net.undo()
    assert recorder.counts[stay].tolist() == [recorder.count] * len(stay)
    assert int(recorder.counts[1]) == 0
    captured.remove()
    for one in (recorder, covariance):
        one.disarm()
    assert hooks_of(found.model) == 0


def test_added_nodes_have_the_samples_since() -> None:
    found = made("resnet")
    nodes = found.net.space("layer1.0.conv1")
    recorder = ActivationRecorder(nodes)
    covariance = CovarianceRecorder(nodes)
    for one in (recorder, covariance):
        one.arm(found.net)
    captured = Captured(found.model.get_submodule("layer1.0.conv2"), images)
    pass_of(found, 0)
    size = len(nodes)
    with found.net.edit() as edit:
        edit.add_nodes(nodes, 2)
    assert recorder.counts.tolist() == [128] * size + [0, 0]
    pass_of(found, 1)
    assert recorder.counts.tolist() == [256] * size + [128, 128]
    torch.testing.assert_close(recorder.mean[size:], captured.seen[1].mean(0)[size:], **EXACT)
    # Pairs of different samples do not compare.
    assert int(covariance.covariance()[size:].count_nonzero()) == 0
    recorder.clear()
    pass_of(found, 2)
    torch.testing.assert_close(recorder.mean, captured.seen[2].mean(0), **EXACT)


def test_a_module_can_be_named_for_a_stream() -> None:
    found = made("vit")
    stream = found.net.space("patch_embed")
    inner = "blocks.1.norm2"
    module = found.model.get_submodule(inner)
    outputs = []
    hook = module.register_forward_hook(lambda _, args, y: outputs.append((args[0], y)))
    recorders = {
        "in": ActivationRecorder(stream, at=inner),
        "out": ActivationRecorder(stream, at=inner, side="out"),
        "default": ActivationRecorder(stream),
    }
    for recorder in recorders.values():
        recorder.arm(found.net)
    found.outputs()
    hook.remove()
    ((x, y),) = outputs
    torch.testing.assert_close(recorders["in"].mean, tokens(x).mean(0), **EXACT)
    torch.testing.assert_close(recorders["out"].mean, tokens(y).mean(0), **EXACT)
    assert not torch.allclose(recorders["default"].mean, recorders["in"].mean)
    covariance = CovarianceRecorder(stream, at=inner)
    covariance.arm(found.net)
    found.outputs()
    expected = torch.cov(tokens(x).t(), correction=0)
    torch.testing.assert_close(covariance.covariance(), expected, **EXACT)
    for wrong in ("blocks.0.fc2", "nothing"):
        with pytest.raises(GrapNetError):
            ActivationRecorder(stream, at=wrong).arm(found.net)


def test_spaces_of_equal_positions_have_a_covariance() -> None:
    found = made("resnet")
    upper = Captured(found.model.get_submodule("layer1.0.conv1"), images)
    lower = Captured(found.model.get_submodule("layer1.0.conv2"), images)
    recorder = CovarianceRecorder("conv1", "layer1.0.conv1")
    other = CovarianceRecorder("layer1.0.conv1", "conv1")
    for one in (recorder, other):
        one.arm(found.net)
    for seed in range(2):
        pass_of(found, seed)
    size = len(found.net.space("conv1"))
    both = torch.cat([torch.cat(upper.seen), torch.cat(lower.seen)], 1)
    expected = torch.cov(both.t(), correction=0)[:size, size:]
    torch.testing.assert_close(recorder.covariance(), expected, **EXACT)
    torch.testing.assert_close(other.covariance(), expected.t(), **EXACT)
    for one in (recorder, other):
        one.disarm()
    before = hooks_of(found.model)
    smaller = CovarianceRecorder("conv1", "layer3.0.conv1")
    with pytest.raises(GrapNetError):
        smaller.arm(found.net)
    assert not smaller.armed
    assert hooks_of(found.model) == before


def test_a_net_and_a_model_have_the_same_statistics() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    model.double()
    net = gn.from_module(copy.deepcopy(model))
    adopted = gn.adopt(model, torch.randn(2, 5, dtype=torch.float64))
    x = torch.randn(50, 5, dtype=torch.float64)
    for layer, space in ((1, "0"), (2, "2")):
        pair = (ActivationRecorder(layer), ActivationRecorder(space))
        for recorder, graph in zip(pair, (net, adopted), strict=True):
            recorder.arm(graph)
            graph(x)
        torch.testing.assert_close(pair[0].mean, pair[1].mean, **EXACT)
        torch.testing.assert_close(pair[0].variance, pair[1].variance, **EXACT)
    with pytest.raises(ValueError, match="'0'"):
        ActivationRecorder("0").arm(net)


def test_copies_transforms_and_released_recorders_leave_nothing() -> None:
    found = made("vit")
    space = found.net.space("blocks.0.fc1")
    recorder = ActivationRecorder(space)
    t = found.net._named_transitions("blocks.0.fc1")[0]
    cells = TensorCorrelationRecorder(found.net, t)
    pairs = CovarianceRecorder(space)
    for one in (recorder, cells, pairs):
        one.arm(found.net)
    assert hooks_of(found.model) > 0
    copied = copy.deepcopy(found.model)
    oracle.outputs_of(copied, found.case)
    assert hooks_of(copied) == 0
    parameters = dict(found.model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(found.model, values, found.case.inputs)
        return output.square().sum()

    torch.func.grad(loss)(parameters)
    assert (recorder.count, cells.count, pairs.count) == (0, 0, 0)
    found.outputs()
    assert (recorder.count, cells.count, pairs.count) == (10, 10, 10)
    del recorder, cells, pairs, one
    assert hooks_of(found.model) == 0


def test_a_trial_leaves_the_evidence_as_it_was() -> None:
    found = made("resnet")
    space = found.net.space("layer2.0.conv1")
    recorder = ActivationRecorder(space)
    t = found.net._named_transitions("layer2.0.conv2")[0]
    cells = TensorCorrelationRecorder(found.net, t)
    for one in (recorder, cells):
        one.arm(found.net)
    pass_of(found, 0)
    mean = recorder.mean
    correlation = cells.correlation()
    with found.net.edit(trial=True) as edit:
        edit.remove_nodes(space[:3])
        edit.commit()
        assert torch.equal(recorder.mean, mean[3:])
        torch.testing.assert_close(cells.correlation(), correlation[:, 3:], **EXACT)
        pass_of(found, 1)
    assert torch.equal(recorder.mean, mean)
    assert torch.equal(cells.correlation(), correlation)


def test_an_optimizer_step_is_the_same_with_recorders() -> None:
    plain = made("resnet")
    watched = made("resnet")
    recorders = [ActivationRecorder(space) for space in watched.free]
    rule = CovarianceSifter()
    recorders += rule.recorders(watched.net).values()
    for recorder in recorders:
        recorder.arm(watched.net)
    for found in (plain, watched):
        found.step()
    assert all(recorder.count for recorder in recorders)
    for recorder in recorders:
        recorder.disarm()
    assert differing_tensors(plain.model, watched.model) == []


def test_a_file_keeps_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    runs = []
    for _ in range(2):
        found = made("resnet")
        manager = RuleManager(seed=1)
        manager.add(CovarianceSifter(window=4, fraction=0.3), schedule=At(3))
        runs.append((found, manager))
    (first, manager), (second, other) = runs
    manager.start(first.net)
    for step in range(2):
        first.step()
        manager.apply(first.net, step)
    gn.save(path, first.net, optimizer=first.optimizer, rules=manager)
    gn.restore(path, into=second.net, optimizer=second.optimizer, rules=other)
    other.start(second.net)
    for found, own in runs:
        for step in (2, 3):
            found.step()
            own.apply(found.net, step)
    assert [len(space) for space in first.net.spaces] == [len(space) for space in second.net.spaces]
    assert sum(len(space) for space in first.net.spaces) < sum(
        len(space) for space in made("resnet").net.spaces
    )
    assert oracle.largest_difference(first.outputs(), second.outputs()) == 0


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_recorded_when_it_was_armed_before() -> None:
    found = made("vit")
    space = found.net.space("blocks.0.fc1")
    recorder = ActivationRecorder(space)
    recorder.arm(found.net)
    torch._dynamo.reset()
    compiled = torch.compile(found.model, backend="eager")
    loss_of(compiled, found.case)
    torch._dynamo.reset()
    mean = recorder.mean
    recorder.clear()
    found.outputs()
    torch.testing.assert_close(recorder.mean, mean, **EXACT)
