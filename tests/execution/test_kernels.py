"""The compiled kernels against a loop in float64, in every variant, layout and size, and as
operators of torch.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.core._index_map import IndexMap
from grapnet.core._transition import Topology
from grapnet.execution import _native, _operators
from grapnet.execution._sparse import Sparse

pytestmark = pytest.mark.sparse

BATCHES = [1, 2, 7, 15, 16, 17, 63, 64, 65, 256, 300]
# how far a result may be off, relative to it and beside that: what rounding it once may do, and
# what rounding the parts of a sum
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 2**-11, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4},
}
HALVES = [torch.bfloat16, torch.float16]
SHAPES = {
    "ragged": (37, 53),
    "one child": (40, 1),
    "one parent": (1, 70),
    "empty": (0, 5),
    "childless": (4, 0),
}


def ragged(n_parents: int, n_children: int, seed: int = 0, density: float = 0.4) -> Topology:
    """Draws a topology with parents without children and with all of them, in no order."""
    draw = torch.Generator().manual_seed(seed)
    families = []
    for i in range(n_parents):
        share = (0.0, 1.0, density)[min(i % 7, 2)]
        count = round(share * n_children)
        families.append(torch.randperm(n_children, generator=draw)[:count])
    degrees = torch.tensor([0, *map(len, families)])
    return Topology(
        degrees.cumsum(0).int(), torch.cat([torch.empty(0), *families]).int(), n_children
    )


def dense(topology: Topology, values: Tensor) -> Tensor:
    """Returns the weights as a matrix, written one by one."""
    matrix = values.new_zeros(topology.n_parents, topology.n_children)
    matrix[topology.parents().long(), topology.child.long()] = values
    return matrix


def draw(
    topology: Topology, batch: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws x, values, bias and dz."""
    torch.manual_seed(batch)
    sizes = [
        (batch, topology.n_parents),
        (topology.n_relations,),
        (topology.n_children,),
        (batch, topology.n_children),
    ]
    x, values, bias, dz = (torch.randn(size, dtype=dtype) for size in sizes)
    return x, values, bias, dz


def by_feature(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def wiring(topology: Topology) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return topology.ptr, topology.child, *_native.order_by_child(topology)


@pytest.fixture
def unwritten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the memory that kernels write with NaN beforehand."""
    empty = Tensor.new_empty

    def spoiled(like: Tensor, *size: int, **options: torch.dtype) -> Tensor:
        fresh = empty(like, *size, **options)
        return fresh.fill_(torch.nan if fresh.is_floating_point() else -1)

    monkeypatch.setattr(Tensor, "new_empty", spoiled)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.usefixtures("unwritten_shows")
def test_sums_and_gradients_are_those_of_the_matrix(
    shape: str, dtype: torch.dtype, variant: str
) -> None:
    topology = ragged(*SHAPES[shape])
    order = wiring(topology)
    for batch in [*BATCHES, 0]:
        x, values, bias, dz = (given.to(dtype) for given in draw(topology, batch))
        matrix = dense(topology, values.double())
        z = x.double() @ matrix + bias.double()
        dx = dz.double() @ matrix.t()
        dw = (x.double().t() @ dz.double())[topology.parents().long(), topology.child.long()]
        for turned in (by_feature, torch.clone):
            results = {
                "z": (
                    _operators.relation_sum(turned(x), values, bias, order, turned is torch.clone),
                    z,
                ),
                "dx alone": (
                    _operators.input_gradient(turned(dz), values, order, turned is by_feature),
                    dx,
                ),
            }
            for other in (by_feature, torch.clone):
                both = _operators.relation_gradients(turned(x), other(dz), values, order)
                weights = _operators.weight_gradient(turned(x), other(dz), order)
                expected = {"dx": dx, "dw": dw, "dbias": dz.double().sum(0)}
                results |= {
                    f"{name} {other}": (got, expected[name])
                    for name, got in zip(expected, both, strict=True)
                }
                results |= {
                    "dw alone": (weights[0], dw),
                    "dbias alone": (weights[1], expected["dbias"]),
                }
                assert both[0].is_contiguous() == (turned is torch.clone) or min(both[0].shape) <= 1
            for name, (got, wanted) in results.items():
                assert got.dtype in (dtype, torch.float32)
                torch.testing.assert_close(
                    got.double(),
                    wanted,
                    **CLOSE[got.dtype],
                    msg=lambda m, n=name, b=batch: f"{n} {b}: {m}",
                )


@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.usefixtures("variant")
def test_every_half_is_read_and_written(dtype: torch.dtype, by_feature: bool) -> None:
    # All of them, NaN, infinite and subnormal ones too, through relations of weight 1.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    topology = Topology(torch.arange(257).int(), torch.arange(256).int(), 256)
    ones = torch.ones(256)
    for batch in (1, 7, 256):
        x = every[: batch * 256].view(batch, 256)
        if by_feature:
            x = x.t().contiguous().t()
        z = _operators.relation_sum(x, ones, 0 * ones, wiring(topology), not by_feature)
        dx = _operators.input_gradient(x, ones, wiring(topology), not by_feature)
        for found in (z, dx):
            assert found.dtype == dtype
            assert torch.equal(found.isnan(), x.isnan())
            assert torch.equal(found.nan_to_num(0.0), x.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.usefixtures("variant")
def test_sums_are_rounded_to_the_nearest_half(dtype: torch.dtype) -> None:
    # float32 of all sizes, and ties: numbers half-way between two halves
    source = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (9000,), generator=source).int()
    near = torch.randn(3000, generator=source).to(dtype).float()
    last = 16 if dtype == torch.bfloat16 else 13  # the last bit of the mantissa that a half has
    ties = (near.view(torch.int32) | (1 << (last - 1))).view(torch.float32)
    small = torch.randn(3000, generator=source) * 1e-6
    sums = torch.cat(
        [bits.view(torch.float32), ties, small, torch.tensor([65519.0, 65520.0, -7e4])]
    )
    topology = Topology(
        torch.tensor([0, len(sums)]).int(), torch.arange(len(sums)).int(), len(sums)
    )
    for batch in (1, 3, 64):
        x = torch.ones(batch, 1, dtype=dtype)
        z = _operators.relation_sum(x, sums, 0 * sums.nan_to_num(0, 0, 0), wiring(topology), True)
        expected = sums.to(dtype).expand(batch, -1)
        assert torch.equal(z.isnan(), expected.isnan())
        assert torch.equal(z.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_many_relations_are_shared_among_threads(
    batch: int, by_feature: bool, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = ragged(300, 700)
    x, values, bias, dz = draw(topology, batch, torch.float32)
    if by_feature:
        x = x.t().contiguous().t()
        dz = dz.t().contiguous().t()
    got = {}
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        z = _operators.relation_sum(x, values, bias, wiring(topology), not by_feature)
        got[count] = (z, *_operators.relation_gradients(x, dz, values, wiring(topology)))
    torch.testing.assert_close(got[1][0], x @ dense(topology, values) + bias, rtol=1e-3, atol=1e-3)
    for count in (2, 3):
        for mine, single in zip(got[count], got[1], strict=True):
            torch.testing.assert_close(mine, single, rtol=1e-4, atol=1e-4)
        if batch >= 16:  # below, every thread sums some of the parents
            assert torch.equal(got[count][0], got[1][0])
            assert torch.equal(got[count][1], got[1][1])


def test_many_parents_or_children_take_wide_entries() -> None:
    topology = Topology(
        torch.tensor([0] * 70_000 + [1, 3], dtype=torch.int32), torch.tensor([1, 1, 0]).int(), 2
    )
    order = _native.order_by_child(topology)
    assert order.entries.dtype == torch.int64
    x, values, bias, _ = draw(topology, 20)
    z = _operators.relation_sum(x, values, bias, (topology.ptr, topology.child, *order), True)
    torch.testing.assert_close(z, x[:, -2:] @ dense(topology, values)[-2:] + bias)

    topology = Topology(torch.tensor([0, 70_000]).int(), torch.arange(70_000).flip(0).int(), 70_000)
    order = _native.order_by_child(topology)
    assert torch.equal(order.entries, topology.child.long())
    x, values, bias, _ = draw(topology, 2)
    z = _operators.relation_sum(x, values, bias, (topology.ptr, topology.child, *order), False)
    torch.testing.assert_close(z, x * values.flip(0) + bias)


@pytest.mark.parametrize("shape", [(0, 0), (5, 0), (0, 5), (37, 53), (300, 40)])
def test_the_order_by_child_lists_parents_in_order(shape: tuple[int, int]) -> None:
    topology = ragged(*shape)
    in_ptr, entries = _native.order_by_child(topology)
    parents = (entries.long() >> 16) & 0xFFFF
    slots = entries.long() & 0xFFFF
    by_child = torch.argsort(topology.child, stable=True)
    assert torch.equal(topology.ptr.long()[parents] + slots, by_child)
    assert torch.equal(in_ptr.diff(), topology.fan_in().int())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 100])
def test_an_order_carried_over_a_cut_is_the_one_built_again(
    count: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_NARROW", 8 if wide else 1 << 16)
    topology = ragged(60, 45)
    removed = torch.randperm(topology.n_relations)[:count].sort().values.int()
    keep = torch.ones(topology.n_relations, dtype=torch.bool)
    keep[removed.long()] = False
    ptr = torch.cat([torch.zeros(1), topology.degrees_without(removed).cumsum(0)]).int()
    after = Topology(ptr, topology.child[keep], topology.n_children)
    carried = _native.order_without(_native.order_by_child(topology), topology, removed)
    for mine, built in zip(carried, _native.order_by_child(after), strict=True):
        assert torch.equal(mine, built)

    index = IndexMap(topology.n_relations, after.n_relations, removed, removed[:0])
    moved = Sparse().prepare(topology).moved(after, index)
    if count == 1:
        assert moved is not None
        assert torch.equal(moved.order.entries, carried.entries)
    if count == 100:
        assert moved is None
    assert Sparse().prepare(after).moved(topology, index.inverse()) is None or count == 0


def test_a_hash_says_who_has_the_same_children() -> None:
    ptr = torch.tensor([0, 3, 6, 8, 8, 11, 11]).int()
    child = torch.tensor([5, 1, 2, 2, 5, 1, 5, 1, 1, 2, 6]).int()
    a, b, c, none, d, also_none = _native.family_hashes(ptr, child).tolist()
    assert a == b
    assert none == also_none
    assert len({a, c, none, d}) == 4


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (37, 53), (300, 700)])
@pytest.mark.usefixtures("unwritten_shows")
def test_a_rectangle_is_filled_and_read(
    shape: tuple[int, int], dtype: torch.dtype, transposed: bool, threads: int
) -> None:
    topology = ragged(*shape)
    values = torch.randn(topology.n_relations).to(dtype)
    expected = dense(topology, values).t() if transposed else dense(topology, values)
    rectangle = _operators.fill(
        values, topology.ptr, topology.child, topology.n_children, transposed
    )
    assert torch.equal(rectangle, expected)
    for layout in (
        rectangle,
        by_feature(rectangle),
        rectangle.repeat(1, 2)[:, : rectangle.shape[1]],
    ):
        assert torch.equal(
            _operators.pick(layout, topology.ptr, topology.child, transposed), values
        )


@pytest.mark.parametrize("width", [3, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (37, 53), (300, 70)])
@pytest.mark.usefixtures("unwritten_shows", "threads")
def test_a_rectangle_of_kernels_is_filled_and_read(
    shape: tuple[int, int], dtype: torch.dtype, width: int
) -> None:
    # children in no order, and in their own
    for topology in (ragged(*shape), opposite(ragged(*shape))):
        values = torch.randn(topology.n_relations, width).to(dtype)
        expected = torch.stack([dense(topology, column) for column in values.t()], dim=2)
        rectangle = _operators.fill(
            values, topology.ptr, topology.child, topology.n_children, transposed=False
        )
        assert torch.equal(rectangle, expected)
        found = _operators.pick(rectangle, topology.ptr, topology.child, transposed=False)
        assert torch.equal(found, values)


def opposite(topology: Topology) -> Topology:
    """Returns the wiring from the children to their parents."""
    order = topology.child.long().argsort(stable=True)
    in_ptr = torch.cat([torch.zeros(1), topology.fan_in().cumsum(0)]).int()
    return Topology(in_ptr, topology.parents().int()[order], topology.n_parents)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.usefixtures("unwritten_shows", "variant")
def test_values_in_the_order_of_their_children(shape: str, dtype: torch.dtype) -> None:
    # twice the opposite: the children of every parent in order
    topology = opposite(opposite(ragged(*SHAPES[shape])))
    order = wiring(topology)
    by_child = topology.child.long().argsort(stable=True)
    orders = _operators.Orders.of(order, wiring(opposite(topology)))
    for batch in BATCHES:
        given = [one.to(dtype) for one in draw(topology, batch)]
        x, values, bias = (one.requires_grad_() for one in given[:3])
        moved = values[by_child]
        assert torch.equal(values[orders.by_child], moved)
        assert torch.equal(moved[orders.by_parent], values)
        for turned in (by_feature, torch.clone):
            z = _operators.sum_by_child(turned(x), moved, bias, orders, True)
            expected = x.double() @ dense(topology, values.double()) + bias.double()
            torch.testing.assert_close(z.double(), expected, **CLOSE[dtype])
            found = torch.autograd.grad(z, (x, values, bias), given[3])
            exact = [one.detach().double().requires_grad_() for one in given[:3]]
            again = exact[0] @ dense(topology, exact[1]) + exact[2]
            wanted = torch.autograd.grad(again, exact, given[3].double())
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.double(), other, **CLOSE[dtype])
            moved = values[by_child]


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("places", [[0], [1], [2], [0, 2], [1, 2]], ids=str)
def test_gradients_in_the_order_of_children_do_not_need_each_other(
    places: list[int], batch: int
) -> None:
    topology = opposite(opposite(ragged(9, 6)))
    orders = _operators.Orders.of(wiring(topology), wiring(opposite(topology)))
    *inputs, dz = draw(topology, batch)
    everything = [one.clone().requires_grad_() for one in inputs]
    z = _operators.sum_by_child(*everything, orders, True)
    wanted = torch.autograd.grad(z, everything, dz)
    some = list(inputs)
    for place in places:
        some[place] = everything[place]
    z = _operators.sum_by_child(*some, orders, True)
    found = torch.autograd.grad(z, [some[place] for place in places], dz)
    for place, gradient in zip(places, found, strict=True):
        torch.testing.assert_close(gradient, wanted[place])


def test_a_plan_writes_the_layout_it_says() -> None:
    topology = ragged(9, 6)
    x, values, bias, _ = draw(topology, 5)
    plan = Sparse().prepare(topology)
    assert plan.feature_major
    assert plan(x, values, bias).t().is_contiguous()
    twin = plan.row_major()
    assert not twin.feature_major
    assert twin(x, values, bias).is_contiguous()
    assert twin.order is plan.order


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_under_autocast_activations_are_halves_and_sums_are_not(
    batch: int, dtype: torch.dtype
) -> None:
    topology = ragged(37, 53)
    x, values, bias, dz = draw(topology, batch, torch.float32)
    values.requires_grad_()
    bias.requires_grad_()
    plan = Sparse().prepare(topology)
    for given in (x.to(dtype).requires_grad_(), x.clone().requires_grad_()):
        with torch.autocast("cpu", dtype):
            z = plan(given, values, bias)
        assert z.dtype == dtype
        exact = given.detach().to(dtype).float().requires_grad_()
        expected = plan(exact, values, bias)
        torch.testing.assert_close(z.float(), expected, **CLOSE[dtype])
        found = torch.autograd.grad(z, (given, values, bias), dz.to(dtype))
        wanted = torch.autograd.grad(expected, (exact, values, bias), dz.to(dtype).float())
        assert found[0].dtype == given.dtype
        torch.testing.assert_close(found[0].float(), wanted[0], **CLOSE[dtype])
        # weights and biases get gradients of their own precision
        for one, other in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(one, other, **CLOSE[torch.float32])


def test_without_autocast_activations_have_the_dtype_of_the_weights() -> None:
    topology = ragged(9, 6)
    x, values, bias, _ = draw(topology, 5, torch.float32)
    with pytest.raises(PlanError, match="bfloat16"):
        Sparse().prepare(topology)(x.bfloat16(), values, bias)


def test_the_backend_says_why_not() -> None:
    topology = ragged(9, 6)
    assert Sparse().refusals(topology, torch.float32) == []
    assert Sparse().refusals(topology, torch.bfloat16) == []
    assert "complex64" in Sparse().refusals(topology, torch.complex64)[0]
    away = Topology(topology.ptr.to("meta"), topology.child.to("meta"), 6)
    assert "on meta, the kernels are built for" in Sparse().refusals(away, torch.float64)[0]


def test_without_the_extension_the_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_native", None)
    monkeypatch.setattr(_native, "missing", "the compiled kernels are not installed")
    assert Sparse().refusals(ragged(2, 2), torch.float32) == [
        "the compiled kernels are not installed"
    ]
    with pytest.raises(PlanError, match="not installed"):
        _native.order_by_child(ragged(2, 2))


def operators(batch: int) -> Iterator[tuple[str, tuple[Any, ...], Callable[..., Any]]]:
    """Yields every operator: its name, its arguments, and the function over those with gradients
    that eager code calls.
    """
    topology = ragged(9, 6)
    x, values, bias, dz = (given.requires_grad_() for given in draw(topology, batch))
    x_turned, dz_turned = (by_feature(given.detach()).requires_grad_() for given in (x, dz))
    rectangle = torch.randn(9, 6, dtype=x.dtype, requires_grad=True)
    order = wiring(topology)
    ptr, child, _, _ = order
    for row_major in (True, False):
        yield (
            "relation_sum",
            (x if row_major else x_turned, values, bias, row_major, *order),
            partial(_operators.relation_sum, wiring=order, row_major=row_major),
        )
        yield (
            "input_gradient",
            (dz if row_major else dz_turned, values, row_major, *order),
            partial(_operators.input_gradient, wiring=order, row_major=row_major),
        )
    gradients = partial(_operators.relation_gradients, wiring=order)
    yield "relation_gradients", (x, dz_turned, values, *order), gradients
    yield "relation_gradients", (x_turned, dz, values, *order), gradients
    yield "weight_gradient", (x, dz, *order), partial(_operators.weight_gradient, wiring=order)
    back = wiring(opposite(topology))
    there = wiring(opposite(opposite(topology)))
    orders = _operators.Orders.of(there, back)
    by_child = partial(_operators.sum_by_child, orders=orders, row_major=True)
    yield "sum_by_child", (x, values, bias, True, *orders), by_child
    kernels = torch.randn(topology.n_relations, 3, dtype=x.dtype, requires_grad=True)
    wide = partial(_operators.fill, ptr=ptr, child=child, n_children=6, transposed=False)
    yield "fill", (kernels, ptr, child, 6, False), wide
    filled = partial(_operators.fill, ptr=ptr, child=child, n_children=6, transposed=True)
    yield "fill", (values, ptr, child, 6, True), filled
    picked = partial(_operators.pick, ptr=ptr, child=child, transposed=False)
    yield "pick", (rectangle, ptr, child, False), picked


@pytest.mark.parametrize("batch", [1, 3])
def test_operators_keep_the_rules_of_torch(batch: int) -> None:
    checked = set()
    for name, inputs, _ in operators(batch):
        torch.library.opcheck(getattr(torch.ops.grapnet, name).default, inputs)
        checked.add(name)
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name for library, name in names if library == "grapnet"}
    # Those of GPUs, of tiles and of the dense matrix are checked with their backends.
    elsewhere = ("gpu_", "tile_", "rectangle")
    assert checked == {name for name in ours if not name.startswith(elsewhere)}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("cells", [1 << 20, 20])  # plain operations in one piece, or in several
def test_derivatives_of_derivatives_are_right(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operators, "_CELLS", cells)
    for _, inputs, function in operators(3):
        numbers = [given for given in inputs if getattr(given, "requires_grad", False)]
        assert torch.autograd.gradcheck(
            function, numbers, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(function, numbers, check_fwd_over_rev=True)


def test_what_does_not_fit_is_refused_before_a_kernel_sees_it() -> None:
    topology = ragged(9, 6)
    x, values, bias, dz = draw(topology, 5)
    order = wiring(topology)
    ptr, child, in_ptr, entries = order
    gaps = child.repeat_interleave(2)[::2]
    sums = [
        (x[:, 1:], values, bias, order),
        (x.float(), values, bias, order),
        (x, values[1:], bias, order),
        (x, values, bias[1:], order),
        (x, values, bias, (ptr, gaps, in_ptr, entries)),
        (x, values, bias, (ptr, child.long(), in_ptr, entries)),
        (x, values, bias, (ptr, child, in_ptr, entries[1:])),
    ]
    for given in sums:
        with pytest.raises(PlanError):
            _operators.relation_sum(*given, row_major=True)
    with pytest.raises(PlanError):
        _operators.weight_gradient(x[:4], dz, order)
    with pytest.raises(PlanError):
        _operators.input_gradient(dz.half(), values, order, row_major=True)
    with pytest.raises(PlanError):
        _operators.input_gradient(dz.to(torch.complex64), values, order, row_major=True)
    with pytest.raises(PlanError):
        _operators.pick(torch.zeros(8, 6), ptr, child, False)
    with pytest.raises(ValueError, match="abacus"):
        _native.use_variant("abacus")


# The largest values of every row


def largest_by_sorting(values: Tensor, ptr: Tensor, wanted: Tensor, least: float) -> Tensor:
    """Returns what `native.largest_of_rows` should, one row after the other."""
    found = []
    for first, last, count in zip(
        ptr[:-1].tolist(), ptr[1:].tolist(), wanted.tolist(), strict=True
    ):
        order = values[first:last].nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[values[first:last][order] >= least]
        found.append(first + order[: max(0, count)].sort().values)
    return torch.cat([torch.empty(0), *found]).int()


@cache
def ranked_rows(
    kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[tuple[Tensor, float, Tensor]]]:
    """Draws rows of several lengths, and finds the largest for some numbers that are wanted."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0, 1, 2, 700, 0, 33, 900, 64, 1, 300] * 8)
    ptr = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    values = torch.randn(int(ptr[-1]), dtype=torch.float64, generator=draw)
    if kind == "extreme":
        special = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-310, 1e-45, 3e38], dtype=torch.float64
        )
        values[::3] = special[torch.randint(0, 8, values[::3].shape, generator=draw)]
    values = {
        "tied": (values * 2).round(),
        "zeros": values * (values > 1),
        "equal": values * 0 + 3,
    }.get(kind, values)
    values = (values if kind in ("signed", "extreme") else values.abs()).to(dtype)
    # stands where a relation is present
    values[torch.rand(values.shape, generator=draw) < 0.2] = -1
    counts = [
        sizes // 3,
        sizes // 30,
        sizes * 0,
        sizes * 0 + 1,
        sizes - 1,
        sizes + 5,
        sizes * 0 + 40,
    ]
    asked = [(wanted, least) for wanted in counts for least in (0.0, 1.0, -torch.inf)]
    return (
        values,
        ptr,
        [(*question, largest_by_sorting(values, ptr, *question)) for question in asked],
    )


@pytest.mark.parametrize("kind", ["distinct", "tied", "zeros", "equal", "signed", "extreme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("variant")
def test_the_largest_of_every_row_are_found(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, ptr, asked = ranked_rows(kind, dtype)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for wanted, least, expected in asked:
            assert torch.equal(_native.largest_of_rows(values, ptr, wanted, least), expected)


def test_the_largest_of_no_rows_are_none() -> None:
    nothing = torch.empty(0)
    ptr = torch.zeros(1).int()
    assert len(_native.largest_of_rows(nothing, ptr, nothing.long(), 0)) == 0
    assert len(_native.largest_of_rows(nothing, torch.zeros(4).int(), torch.ones(3).long(), 0)) == 0
    for wrong in (nothing.half(), torch.zeros(1), torch.zeros(0, device="meta")):
        with pytest.raises(PlanError, match="values is"):
            _native.largest_of_rows(wrong, ptr, nothing.long(), 0)
    with pytest.raises(PlanError, match="wanted is"):
        _native.largest_of_rows(nothing, ptr, torch.ones(1).long(), 0)
    with pytest.raises(PlanError, match="ptr is"):
        _native.largest_of_rows(nothing, ptr[:0], nothing.long(), 0)
