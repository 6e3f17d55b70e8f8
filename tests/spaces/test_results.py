"""Results of operators inferred from shapes, compared with those of torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grapnet import _torch
from grapnet.spaces._results import _RULES, _VIEWS, Results

aten = torch.ops.aten
sizes = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])
layouts = st.sampled_from(["standard", "channels last", "transposed", "sliced"])
UNARY = [aten.relu, aten.neg, aten.tanh, aten.sigmoid, aten.silu, aten.gelu, aten.rsqrt]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]


class Answers:
    """Asks the rules and torch for the same operation."""

    def __init__(self) -> None:
        self.fakes = _torch.Fakes()
        self.results = Results(self.fakes)

    def tensor(
        self, *shape: int, dtype: torch.dtype = torch.float32, layout: str = "standard"
    ) -> Any:
        like = torch.empty(shape, dtype=dtype)
        if layout == "channels last" and len(shape) == 4:
            like = like.to(memory_format=torch.channels_last)
        elif layout == "transposed" and len(shape) > 1:
            like = torch.empty((shape[1], shape[0], *shape[2:]), dtype=dtype).transpose(0, 1)
        elif layout == "sliced":
            like = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
        return self.fakes.imitate(like)

    def compare(self, func: Any, *args: Any) -> bool:
        """Asserts that an answer of the rules is that of torch; returns whether there is one."""
        inputs = [tensor for tensor in _torch.pytree.tree_leaves(args) if _is_tensor(tensor)]
        own = self.results.of(func, args, {}, inputs)
        if own is None:
            return False
        with self.fakes.mode:
            expected = func(*args)
        own = _torch.pytree.tree_leaves(own)
        expected = _torch.pytree.tree_leaves(expected)
        assert [_told(one) for one in own] == [_told(one) for one in expected]
        return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _told(value: Any) -> Any:
    """Returns all that a tensor without contents is."""
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.device, type(value)


@given(
    spatial=st.integers(1, 3),
    groups=st.integers(1, 3),
    inside=sizes,
    outside=sizes,
    length=st.integers(1, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    layout=layouts,
)
@settings(max_examples=150, deadline=None)
def test_convolutions(
    spatial: int,
    groups: int,
    inside: int,
    outside: int,
    length: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    bias: bool,
    layout: str,
) -> None:
    answers = Answers()
    x = answers.tensor(2, groups * inside, *[length] * spatial, layout=layout)
    weight = answers.tensor(groups * outside, inside, *[kernel] * spatial)
    added = None
    if bias:
        added = answers.tensor(groups * outside)
    numbers = [[stride] * spatial, [padding] * spatial, [dilation] * spatial]
    known = answers.compare(
        aten.convolution.default, x, weight, added, *numbers, False, [0] * spatial, groups
    )
    fits = length + 2 * padding > dilation * (kernel - 1)
    if layout == "standard":
        assert known == fits


@given(shape=st.lists(sizes, min_size=1, max_size=4), training=st.booleans(), layout=layouts)
@settings(max_examples=100, deadline=None)
def test_batch_norms(shape: list[int], training: bool, layout: str) -> None:
    answers = Answers()
    x = answers.tensor(3, *shape, layout=layout)
    vectors = [answers.tensor(shape[0]) for _ in range(4)]
    known = answers.compare(aten.native_batch_norm.default, x, *vectors, training, 0.1, 1e-5)
    assert known or layout != "standard"


@pytest.mark.parametrize("func", UNARY, ids=str)
@given(shape=st.lists(sizes, max_size=5), dtype=dtypes, layout=layouts)
@settings(max_examples=30, deadline=None)
def test_operations_by_element(
    func: Any, shape: list[int], dtype: torch.dtype, layout: str
) -> None:
    answers = Answers()
    if not shape:
        layout = "standard"
    x = answers.tensor(*shape, dtype=dtype, layout=layout)
    known = answers.compare(func.default, x)
    assert known or layout != "standard" or not dtype.is_floating_point


@pytest.mark.parametrize("func", BINARY, ids=str)
@given(
    shape=st.lists(sizes, min_size=1, max_size=5),
    dtype=dtypes,
    layout=layouts,
    number=st.sampled_from([None, 2, 0.5, True]),
)
@settings(max_examples=30, deadline=None)
def test_operations_of_two(
    func: Any, shape: list[int], dtype: torch.dtype, layout: str, number: Any
) -> None:
    answers = Answers()
    x = answers.tensor(*shape, dtype=dtype, layout=layout)
    other = number
    if number is None:
        other = answers.tensor(*shape, dtype=dtype, layout=layout)
    known = answers.compare(func, x, other)
    plain = layout == "standard" and dtype.is_floating_point and number is not True
    assert known or not plain


def test_powers_keep_the_type_of_their_base() -> None:
    answers = Answers()
    for exponent in (2, 0.5, -1.0):
        assert answers.compare(aten.pow.Tensor_Scalar, answers.tensor(2, 3), exponent)


@given(
    parts=st.lists(sizes, min_size=1, max_size=4),
    others=st.lists(sizes, max_size=3),
    dim=st.integers(-4, 3),
    layout=layouts,
)
@settings(max_examples=60, deadline=None)
def test_concatenations(parts: list[int], others: list[int], dim: int, layout: str) -> None:
    answers = Answers()
    rank = len(others) + 1
    at = dim % rank
    tensors = []
    for part in parts:
        tensors.append(answers.tensor(*others[:at], part, *others[at:], layout=layout))
    known = answers.compare(aten.cat.default, tensors, at - rank)
    assert known or layout != "standard"


@given(
    shape=st.lists(sizes, min_size=1, max_size=4),
    chosen=st.sets(st.integers(-4, 3), min_size=1, max_size=3),
    keepdim=st.booleans(),
    layout=layouts,
)
@settings(max_examples=60, deadline=None)
def test_means(shape: list[int], chosen: set[int], keepdim: bool, layout: str) -> None:
    answers = Answers()
    x = answers.tensor(*shape, layout=layout)
    rank = len(shape)
    dims = [dim for dim in chosen if -rank <= dim < rank and (dim >= 0 or dim + rank not in chosen)]
    known = answers.compare(aten.mean.dim, x, dims, keepdim)
    assert known or layout != "standard" or not dims


VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.expand.default, ([2, 2, 3, 4],)),
    (aten.permute.default, ([2, 0, 1],)),
    (aten.select.int, (1, 2)),
    (aten.slice.Tensor, (1, 1, 3)),
    (aten.split.Tensor, (2, 1)),
    (aten.split_with_sizes.default, ([1, 3], -1)),
    (aten.squeeze.dim, (0,)),
    (aten.transpose.int, (0, 2)),
    (aten.unsqueeze.default, (1,)),
    (aten.view.default, ([6, -1],)),
    (aten._unsafe_view.default, ([6, 4],)),
]


@pytest.mark.parametrize(("func", "args"), VIEWS)
def test_views_share_the_storage(func: Any, args: tuple[Any, ...]) -> None:
    answers = Answers()
    x = answers.tensor(2, 3, 4)
    assert answers.compare(func, x, *args)
    for view in _torch.pytree.tree_leaves(answers.results.of(func, (x, *args), {}, [x])):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_every_view_is_compared() -> None:
    assert {func for func, _ in VIEWS} | {aten.t.default} == _VIEWS
    answers = Answers()
    assert answers.compare(aten.t.default, answers.tensor(2, 3))


def test_a_view_that_cannot_be_raises_what_torch_raises() -> None:
    answers = Answers()
    x = answers.tensor(2, 3)
    with pytest.raises(RuntimeError, match="invalid for input of size 6"):
        answers.results.of(aten.view.default, (x, [4, 2]), {}, [x])


@given(n=sizes, k=sizes, m=sizes, layout=layouts, dtype=dtypes)
@settings(max_examples=60, deadline=None)
def test_matrix_products(n: int, k: int, m: int, layout: str, dtype: torch.dtype) -> None:
    answers = Answers()
    left = answers.tensor(n, k, dtype=dtype, layout=layout)
    right = answers.tensor(k, m, dtype=dtype)
    assert answers.compare(aten.mm.default, left, right)
    for added in (answers.tensor(m, dtype=dtype), answers.tensor(n, m, dtype=dtype)):
        assert answers.compare(aten.addmm.default, added, left, right)


def test_a_count_that_is_raised_in_place_is_the_same_tensor() -> None:
    answers = Answers()
    count = answers.fakes.imitate(torch.tensor(0))
    assert answers.results.of(aten.add_.Tensor, (count, 1), {}, [count]) is count
    assert answers.results.of(aten.add_.Tensor, (count, 0.5), {}, [count]) is None


def test_empty_tensors_are_made_as_torch_makes_them() -> None:
    answers = Answers()
    keywords = {"dtype": torch.uint8, "device": torch.device("cpu")}
    own = answers.results.of(aten.empty.memory_format, ([0],), keywords, [])
    with answers.fakes.mode:
        expected = torch.empty([0], **keywords)
    assert _told(own) == _told(expected)


def test_what_does_not_fit_is_left_to_torch() -> None:
    answers = Answers()
    new = answers.tensor
    convolution = ([1, 1], [0, 0], [1, 1], False, [0, 0])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.convolution.default, (new(1, 4, 5, 5), new(2, 3, 1, 1), None, *convolution, 1)),
        (aten.convolution.default, (new(1, 4, 5, 5), new(3, 2, 1, 1), None, *convolution, 2)),
        (aten.convolution.default, (new(1, 4, 5, 5), new(2, 4, 7, 7), None, *convolution, 1)),
        (aten.convolution.default, (new(1, 4, 5, 5), new(2, 4, 1, 1), new(3), *convolution, 1)),
        (aten.add.Tensor, (new(2, 3), new(2, 4))),
        (aten.add.Tensor, (new(2, 3), new(2, 3, dtype=torch.float64))),
        (aten.cat.default, ([new(2, 3), new(2, 4)], 0)),
        (aten.cat.default, ([new(2, 3), new(2, 3)], 2)),
        (aten.mm.default, (new(2, 3), new(2, 3))),
        (aten.addmm.default, (new(4), new(2, 3), new(3, 5))),
    ]
    for func, args in calls:
        assert not answers.compare(func, *args)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_batch_norm_of_other_channels_raises(channels: int) -> None:
    answers = Answers()
    args = (answers.tensor(2, 3), answers.tensor(channels), None, None, None, True, 0.1, 1e-5)
    with pytest.raises(RuntimeError, match="channels"):
        answers.compare(aten.native_batch_norm.default, *args)


def test_tensors_with_contents_are_left_to_torch() -> None:
    answers = Answers()
    real = torch.ones(2, 3)
    assert answers.results.of(aten.relu.default, (real,), {}, [real]) is None
    elsewhere = Answers().tensor(2, 3)
    assert answers.results.of(aten.relu.default, (elsewhere,), {}, [elsewhere]) is None
    with answers.fakes.mode:
        constant = torch.tensor(3.0)
    assert answers.results.of(aten.relu.default, (constant,), {}, [constant]) is None


def test_the_device_is_the_one_that_a_tensor_stands_for() -> None:
    answers = Answers()
    assert answers.compare(torch.ops.prim.device.default, answers.tensor(2))
    assert torch.ops.prim.device.default in _RULES
