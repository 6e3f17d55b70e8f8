"""What can be saved beside a net, and what is refused by name."""

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grapnet as gn

from .files import as_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net"


def returned(path: Path, **extras: Any) -> dict[str, Any]:
    gn.save(path, gn.GrapNet([3, 2]), **extras)
    gn.load(path)
    return gn.restore(path)


PLAIN = {
    "numbers": [0, -1, True, None, 2**200, 0.1, -0.0, 5e-324, float("inf"), float("nan")],
    "text": ["", "ü", "\ud800", "\x00\n", "tensor", {"tensor": "layers.0.uid"}],
    "nested": {"a": [{"b": (1, [2, (3,)])}, []], "empty": {}},
    "keys": {1: "int", "1": "text", 2.5: "float", None: "none", True and "a.b": 1, "a": {"b": 2}},
    "counter": collections.Counter("aab"),
    "python": random.Random(1).getstate(),
    "numpy": np.random.default_rng(1).bit_generator.state,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_returns(path, name):
    found = returned(path, value=PLAIN[name])
    assert found.keys() == {"value"}
    assert as_text(found["value"]) == as_text(PLAIN[name])
    assert type(found["value"]) is type(PLAIN[name])


BASE = torch.arange(24.0)
TENSORS = {
    "scalar": torch.tensor(3.5),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
    "bfloat16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, -2]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64),
    "conjugate": torch.tensor(1 + 2j, dtype=torch.complex128).conj(),
    "one of a column": BASE.view(4, 6)[:1, 2],
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "empty": torch.empty(0, 5, 2),
    "transposed": BASE.view(4, 6).t(),
    "expanded": torch.ones(1).expand(3, 2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_return(path, name):
    value = TENSORS[name].detach()
    found = returned(path, value=TENSORS[name])["value"]
    assert as_text(found) == as_text(value.resolve_conj().resolve_neg())
    assert not found.requires_grad


def test_tensors_that_share_memory_return_apart(path):
    found = returned(path, whole=BASE, parts=[BASE[2:5], BASE[3:6], BASE], again=BASE)
    assert as_text(found) == as_text(
        {"whole": BASE, "parts": [BASE[2:5], BASE[3:6], BASE], "again": BASE}
    )
    found["whole"] += 1
    assert torch.equal(found["again"], BASE)


def test_names_do_not_collide(path):
    value = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        1: torch.tensor(3),
        "1": torch.tensor(4),
    }
    value |= {"a']['b": torch.tensor(5), "list": [torch.tensor(6)], "list[0]": torch.tensor(7)}
    names = {
        "value": value,
        "a.b": torch.tensor(8),
        "value['a']": {"b": torch.tensor(9)},
        "layers.0.uid": torch.tensor(10),
    }
    names |= {"": torch.tensor(11), "x\ud800": torch.tensor(12), "self": torch.tensor(13)}
    assert as_text(returned(path, **names)) == as_text(names)


ARRAYS = {
    "scalar": np.array(3.5),
    "reversed": np.arange(6).reshape(2, 3)[::-1],
    "bool": np.array([True, False]),
    "uint32": np.array([2**32 - 1], dtype=np.uint32),
    "float16": np.array([0.5], dtype=np.float16),
    "empty": np.zeros((0, 2)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_return(path, name):
    found = returned(path, value=ARRAYS[name])["value"]
    assert found.dtype == ARRAYS[name].dtype
    assert found.shape == ARRAYS[name].shape
    assert np.array_equal(found, ARRAYS[name])
    assert found.flags.writeable


def test_numbers_of_numpy_become_numbers(path):
    found = returned(path, value=[np.float32(0.1), np.int64(3), np.bool_(True), {np.int64(4): 1}])[
        "value"
    ]
    assert as_text(found) == as_text([float(np.float32(0.1)), 3, True, {4: 1}])


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED = {
    "function": lambda: 0,
    "class": dict,
    "set": {1},
    "bytes": b"x",
    "deque": collections.deque([1]),
    "dtype": torch.float32,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "objects": np.array([None]),
    "texts": np.array(["a"]),
    "masked": np.ma.array([1, 2], mask=[True, False]),
    "longdouble": np.zeros(1, np.longdouble),
    "date": np.datetime64(0, "s"),
    "key": {(1, 2): 3},
    "cycle": CYCLE,
    "generator": np.random.default_rng(0),
    "same name": {float("nan"): torch.ones(1), -float("nan"): torch.ones(1)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_data_is_refused_by_name(path, name):
    with pytest.raises(gn.errors.CheckpointError, match=r"^extras\.value\['deep'\]\[1\].*: "):
        returned(path, value={"deep": [1, REFUSED[name]]})
    assert not path.exists()


def test_what_is_nested_as_deeply_as_can_be_saved_returns(path):
    value: Any = 1
    for _ in range(32):
        value = [{"key": value}]
    assert returned(path, value=value)["value"] == value
    with pytest.raises(gn.errors.CheckpointError, match=r"^extras\.value"):
        returned(path, value=[value])


def test_generators_return_to_where_they_were(path):
    own = torch.Generator().manual_seed(3)
    torch.rand(5, generator=own)
    gn.save(path, gn.GrapNet([3, 2]), own=own, shared=torch.default_generator)
    expected = torch.rand(4, generator=own), torch.rand(4)
    fresh = torch.Generator()
    assert gn.restore(path, own=fresh, shared=torch.default_generator) == {}
    assert torch.equal(torch.rand(4, generator=fresh), expected[0])
    assert torch.equal(torch.rand(4), expected[1])


def test_any_object_with_a_state_dict_is_saved(path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module(torch.randn(4, 2))
    gn.save(
        path, gn.GrapNet([3, 2]), module=module, average=torch.optim.swa_utils.AveragedModel(module)
    )
    fresh = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    gn.restore(path, module=fresh)
    assert as_text(dict(fresh.state_dict())) == as_text(dict(module.state_dict()))
