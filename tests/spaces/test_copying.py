"""Copies of models: what `copy.deepcopy` would return, with other tensors."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grapnet.spaces._copying import collector_paused, copy_model
from grapnet.spaces._discovery import Example, discover, make_twin


class Shared:
    """An object that two modules hold."""


class Holding(nn.Module):
    """A module with attributes of many kinds."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.numbers = (1, 2.0, "three", None)
        self.mixed = (1, [2])
        self.table = {"a": [1], "b": {"c": 2}}
        self.empty: dict[str, Any] = shared["empty"]
        self.object = shared["object"]
        self.around: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OwnCopy(nn.Linear):
    """A module that decides itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnCopy":
        double = OwnCopy(self.in_features, self.out_features)
        double.copied_by_itself = True  # pyright: ignore[reportAttributeAccessIssue]
        memo[id(self)] = double
        return double


class Slotted(nn.Linear):
    """A module with an attribute outside of its dict."""

    __slots__ = ("aside",)


def _copy(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    double, _, _ = copy_model(model, memo, torch.detach)
    return double


def _holding() -> nn.Sequential:
    shared = {"empty": {}, "object": Shared()}
    model = nn.Sequential(Holding(shared), Holding(shared), nn.BatchNorm1d(2))
    model[0].around.append(model)
    return model


def test_attributes_are_copied_as_deeply_as_by_python() -> None:
    model = _holding()
    double = _copy(model)
    for one, other in zip(model, double, strict=True):
        assert other is not one
        assert type(other) is type(one)
        assert vars(other).keys() == vars(one).keys()
    assert double[0].numbers == model[0].numbers
    assert double[0].mixed == model[0].mixed
    assert double[0].mixed[1] is not model[0].mixed[1]
    assert double[0].table == model[0].table
    assert double[0].table["a"] is not model[0].table["a"]
    assert double[0].table["b"] is not model[0].table["b"]
    double[0].eval()
    assert model[0].training


def test_what_two_modules_share_their_copies_share() -> None:
    model = _holding()
    double = _copy(model)
    assert double[0].empty is double[1].empty
    assert double[0].empty is not model[0].empty
    assert double[0].object is double[1].object
    assert double[0].object is not model[0].object
    assert double[0].around[0] is double


def test_hooks_of_a_copy_are_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    double = _copy(model)
    calls = []
    double[0].register_forward_hook(lambda *_: calls.append(0))
    model(torch.ones(1, 2))
    double[1](torch.ones(1, 2))
    assert not calls
    double(torch.ones(1, 2))
    assert calls == [0]


def test_a_class_that_copies_itself_does_so() -> None:
    double = _copy(nn.Sequential(OwnCopy(2, 3)))
    assert double[0].copied_by_itself


def test_slots_are_copied_where_torch_copies_them() -> None:
    module = Slotted(2, 2)
    module.aside = [1, 2]
    double = _copy(nn.Sequential(module))
    expected = copy.deepcopy(module)
    assert getattr(double[0], "aside", None) == getattr(expected, "aside", None)
    assert double[0].in_features == 2


def test_the_collector_is_paused_and_resumed() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_twin_is_gone_without_the_collector() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    example = Example((torch.ones(1, 3, 5, 5),), {})
    discover(model, [example])
    with collector_paused():
        twin = make_twin(model)
        twin.imitate(example)
        module = weakref.ref(twin.module)
        del twin
        assert module() is None
