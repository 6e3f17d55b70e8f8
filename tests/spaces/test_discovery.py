"""Discovery of whole models: what it finds, what it leaves alone, and twins."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grapnet.spaces._axes import Atom, Expression, SumOf, atoms_of, size_of
from grapnet.spaces._discovery import Example, Typed, discover, discover_twin, make_twin
from grapnet.spaces._results import Results
from tests.spaces import huggingface, zoo

EXACT = {"cut into equal parts", "contracted without a parameter"}


def example(*args: Any, **kwargs: Any) -> Example:
    return Example(args, kwargs)


def axis_of(model: nn.Module, result: Typed, name: str) -> Expression:
    """Returns the axis that a name in the expectations of a case stands for."""
    tensor, dim = zoo.output_axis(model, name)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for first in result.axes:
        if tensors.get(first) is tensors[tensor]:
            return result.axes[first][dim]
    raise KeyError(name)


def free(result: Typed, axis: Expression) -> list[int]:
    return [atom for atom in atoms_of(axis) if not result.atoms[atom].pins]


def resized(result: Typed, atom: int, size: int) -> list[int]:
    sizes = result.sizes()
    sizes[atom] = size
    return sizes


FAMILIES = ("albert", "clip", "gpt2", "llama", "mamba", "mixtral", "swin", "t5")
CASES = {**zoo.MODELS, **zoo.REFUSED, **{n: huggingface.FAMILIES[n] for n in FAMILIES}}


@pytest.mark.parametrize("name", CASES)
def test_the_spaces_of_a_case_are_the_expected_ones(name: str) -> None:
    case = CASES[name]()
    result = discover(case.model, [Example(case.inputs, case.kwargs)])
    assert name in zoo.REFUSED or result.unknown == ()
    for path in case.expected.get("free", ()):
        found = free(result, axis_of(case.model, result, path))
        assert any(result.atoms[atom].marks <= EXACT for atom in found), path
    for path in case.expected.get("normalised", ()):
        found = free(result, axis_of(case.model, result, path))
        assert any(not result.atoms[atom].marks <= EXACT for atom in found), path
    for path in case.expected.get("pinned", ()):
        assert free(result, axis_of(case.model, result, path)) == [], path
    for paths in case.expected.get("shared", ()):
        assert len({axis_of(case.model, result, path) for path in paths}) == 1, paths
    for tensor in case.expected.get("unseen", ()):
        assert tensor in result.unread
    reasons = " ".join(why for atom in result.atoms for why in atom.pins)
    for operation in case.expected.get("operation", ()):
        assert operation in reasons


@pytest.mark.parametrize("name", CASES)
def test_a_typing_is_the_same_when_torch_tells_all_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()
    examples = [Example(case.inputs, case.kwargs)]
    told_here = discover(case.model, examples)
    monkeypatch.setattr(Results, "of", lambda *_: None)
    told_by_torch = discover(case.model, examples)
    assert told_here == told_by_torch


@pytest.mark.parametrize("name", ["resnet", "gpt_tied", "data_dependent"])
def test_the_model_and_the_generators_are_left_as_they_are(name: str) -> None:
    case = CASES[name]()
    calls: list[nn.Module] = []
    case.model.register_forward_hook(lambda module, args, output: calls.append(module))
    case.model.train()
    next(case.model.children()).eval()
    training = [module.training for module in case.model.modules()]
    state = {key: value.clone() for key, value in case.model.state_dict().items()}
    versions = [parameter._version for parameter in case.model.parameters()]
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    result = discover(case.model, [Example(case.inputs, case.kwargs)])
    assert calls == []
    assert "a hook of the model was left out" in result.notes
    assert [module.training for module in case.model.modules()] == training
    assert [parameter._version for parameter in case.model.parameters()] == versions
    for key, value in case.model.state_dict().items():
        assert torch.equal(value, state[key])
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.array_equal(np.random.get_state()[1], drawn[2])


def test_a_run_with_contents_says_so_and_shares_the_weights() -> None:
    case = zoo.REFUSED["data_dependent"]()
    result = discover(case.model, [Example(case.inputs, case.kwargs)])
    assert any("ran with contents" in note for note in result.notes)
    twin = make_twin(case.model, real=True)
    for mine, its in zip(case.model.parameters(), twin.module.parameters(), strict=True):
        assert mine is not its
        assert mine.data_ptr() == its.data_ptr()


def test_a_twin_without_contents_takes_no_memory_and_keeps_ties() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(300_000, 40_000), nn.Linear(40_000, 300_000, bias=False))
    model[1].weight = model[0].weight
    result = discover(model, [example(torch.zeros(2, 3, dtype=torch.long))])
    assert list(result.axes) == ["0.weight"]
    assert result.atoms[atoms_of(result.axes["0.weight"][1])[0]].pins == ()
    twin = make_twin(model)
    twin.set_shape("0.weight", (300_000, 7))
    assert twin.module[0].weight is twin.module[1].weight
    assert isinstance(twin.module[0].weight, nn.Parameter)
    assert model[0].weight.shape == (300_000, 40_000)


def test_a_twin_with_other_shapes_has_the_signature_foreseen() -> None:
    case = zoo.MODELS["resnet"]()
    call = Example(case.inputs, case.kwargs)
    result = discover(case.model, [call])
    twin = make_twin(case.model)
    calls = [twin.imitate(call)]
    assert discover_twin(twin, calls, modes=result.modes).signature() == result.signature()
    shared = [atom for atom in result.readers if not result.atoms[atom].pins]
    sizes = resized(result, shared[0], 2)
    for name, axes in result.axes.items():
        twin.set_shape(name, [size_of(axis, sizes) for axis in axes])
    again = discover_twin(twin, calls, modes=result.modes)
    assert again.signature() == result.signature(sizes)
    assert again.signature() != result.signature()


def test_a_number_in_the_code_is_found_by_another_signature() -> None:
    class HardSplit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 8)
            self.a = nn.Linear(4, 2)
            self.b = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.up(x).split(4, -1)
            return self.a(first) * self.b(second)

    model = HardSplit()
    result = discover(model, [example(torch.randn(2, 3))])
    twin = make_twin(model)
    twin.set_shape("up.weight", (7, 3))
    twin.set_shape("up.bias", (7,))
    twin.set_shape("a.weight", (2, 3))
    calls = [twin.imitate(example(torch.randn(2, 3)))]
    with pytest.raises(RuntimeError):
        discover_twin(twin, calls)
    assert isinstance(result.axes["up.weight"][0], SumOf)


def test_layers_of_the_training_mode_are_seen_and_needed() -> None:
    case = zoo.MODELS["googlenet"]()
    result = discover(case.model, [Example(case.inputs, case.kwargs)])
    assert result.unread == ()
    assert result.modes == (False, True)
    assert discover(case.model, [Example(case.inputs)], modes=(False,)).unread != ()
    plain = zoo.MODELS["resnet"]()
    assert discover(plain.model, [Example(plain.inputs)]).modes == (False,)


class Paths(nn.Module):
    """Divides the same axis in two ways, by the length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 12)
        self.down = nn.Linear(12, 2)
        self.left = nn.Parameter(torch.randn(4))
        self.right = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if len(x) == 2:
            h = (h.view(-1, 3, 4) * self.left).flatten(1)
        else:
            h = (h.view(-1, 4, 3) * self.right).flatten(1)
        return self.down(h)


def test_paths_in_conflict_are_pinned_with_both_lines() -> None:
    alone = discover(Paths(), [example(torch.randn(2, 3))])
    assert free(alone, alone.axes["up.weight"][0]) != []
    both = discover(Paths(), [example(torch.randn(2, 3)), example(torch.randn(5, 3))])
    assert free(both, both.axes["up.weight"][0]) == []
    reasons = [why for atom in both.atoms for why in atom.pins if "against" in why]
    first = Paths.forward.__code__.co_firstlineno + 3
    assert any(f":{first + 2}, against" in why and f":{first}" in why for why in reasons)


def test_an_example_that_no_mode_can_run_raises() -> None:
    with pytest.raises(RuntimeError):
        discover(nn.Linear(3, 2), [example(torch.randn(2, 4))])


def test_a_mode_that_cannot_run_is_noted() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    result = discover(model, [example(torch.randn(1, 3))])
    assert any("training mode was not run" in note for note in result.notes)
    assert free(result, result.axes["0.weight"][0]) != []


def test_the_fast_path_of_attention_does_not_run() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    result = discover(nn.Sequential(layer, nn.Linear(8, 3)), [example(torch.randn(2, 5, 8))])
    assert result.unknown == ()
    assert free(result, result.axes["0.linear1.weight"][0]) != []
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_recurrent_module_is_refused_with_its_line() -> None:
    case = zoo.REFUSED["lstm"]()
    result = discover(case.model, [Example(case.inputs, case.kwargs)])
    assert any(place.startswith("nn.LSTM at zoo.py:") for place in result.unknown)


def test_a_tensor_of_an_attribute_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = nn.Linear(2, 2)
    inner.register_forward_pre_hook(lambda module, args: None)
    model.append(inner)
    scales = [torch.ones(4), torch.ones(4)]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = scales
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model[2](self.model[1](self.model[0](x) * self.scales[1]))

    result = discover(Scaled(), [example(torch.randn(2, 3))])
    (atom,) = atoms_of(result.axes["model.0.weight"][0])
    assert result.atoms[atom].pins == ("a tensor outside of parameters and buffers: scales",)


def test_a_module_that_is_no_child_is_not_copied() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4)
            self.teacher = [nn.Linear(3, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return (self.up(x) - self.teacher[0](x)).sum(-1)

    model = Student()
    result = discover(model, [example(torch.randn(2, 3))])
    assert any("outside" in why for atom in result.atoms for why in atom.pins)
    twin = make_twin(model)
    assert twin.module.teacher[0] is not model.teacher[0]
    assert twin.module.teacher[0].weight.data_ptr() == model.teacher[0].weight.data_ptr()


@functools.lru_cache
def steps(size: int) -> Tensor:
    return torch.arange(size)


def test_no_fake_tensor_stays_in_a_cache() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) * steps(4)

    discover(Cached(), [example(torch.randn(2, 3))])
    assert type(steps(4)) is Tensor


def test_a_buffer_that_is_replaced_keeps_its_axes() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4)
            self.down = nn.Linear(4, 2)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            self.average = h.mean(0)
            return self.down(h)

    result = discover(Averaged(), [example(torch.randn(2, 3))])
    assert result.axes["average"][0] == result.axes["up.weight"][0]


def test_inputs_and_outputs_of_modules_are_recorded() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)
            self.b = nn.Linear(4, 5)
            self.c = nn.Linear(5, 2)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.act(self.b(self.act(self.a(x)))))

    result = discover(Shared(), [example(torch.randn(7, 3))])
    assert result.outputs["a"][1] == result.axes["a.weight"][0]
    assert result.inputs["c"][1] == result.axes["c.weight"][1]
    assert result.outputs[""][1] == result.axes["c.weight"][0]
    assert "act" not in result.outputs


def test_an_edit_down_to_one_node_is_written_without_a_number() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    result = discover(model, [example(torch.randn(2, 3))])
    (atom,) = atoms_of(result.axes["0.weight"][0])
    foreseen = result.signature(resized(result, atom, 1))
    assert foreseen["0.weight"][0] == "1"
    smaller = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2))
    assert discover(smaller, [example(torch.randn(2, 3))]).signature() == foreseen


def test_signatures_tell_ties_of_equal_sizes_apart() -> None:
    class Two(nn.Module):
        def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4, bias=False)
            self.b = nn.Linear(3, 4, bias=False)
            self.c = nn.Parameter(torch.randn(4, 4))
            self.combine = combine

        def forward(self, x: Tensor) -> Tensor:
            return self.combine(self.a(x) @ self.c, self.b(x)).sum()

    tied = discover(Two(lambda left, right: left + right), [example(torch.randn(2, 3))])
    apart = discover(
        Two(lambda left, right: left.sum() + right.sum()), [example(torch.randn(2, 3))]
    )
    assert tied.signature()["b.weight"][0] == tied.signature()["c"][1]
    assert apart.signature()["b.weight"][0] != apart.signature()["c"][1]
    assert isinstance(tied.axes["c"][0], Atom)


@pytest.mark.parametrize(
    ("scale", "changes"),
    [
        (lambda h: h / h.shape[-1] ** 0.5, True),
        (lambda h: h.cumsum(0) / h.shape[-1], True),
        (lambda h: h * 0.5, False),
    ],
)
def test_a_size_that_is_also_a_number_shows_in_the_scalars(
    scale: Callable[[Tensor], Tensor], changes: bool
) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 8)
            self.down = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(scale(self.up(x)))

    model = Scaling()
    result = discover(model, [example(torch.randn(2, 3))])
    twin = make_twin(model)
    sizes = resized(result, free(result, result.axes["up.weight"][0])[0], 5)
    for name, axes in result.axes.items():
        twin.set_shape(name, [size_of(axis, sizes) for axis in axes])
    again = discover_twin(twin, [twin.imitate(example(torch.randn(2, 3)))])
    assert again.signature() == result.signature(sizes)
    assert (again.scalars != result.scalars) is changes
