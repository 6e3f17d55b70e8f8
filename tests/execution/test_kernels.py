"""The compiled kernels against a loop in float64, in every variant, layout and size, and as
operators of torch.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.core._change import IndexMap
from grapnet.core._errors import PlanError
from grapnet.core._transition import Topology
from grapnet.execution import kernels, native
from grapnet.execution.sparse import Sparse, SparsePlan

pytestmark = pytest.mark.sparse

BATCHES = [1, 2, 7, 15, 16, 17, 63, 64, 65, 256, 300]
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
    return topology.ptr, topology.child, *native.order_by_child(topology)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("unwritten_shows")
def test_sums_and_gradients_are_those_of_the_matrix(
    shape: str, dtype: torch.dtype, variant: str
) -> None:
    topology = ragged(*SHAPES[shape])
    order = wiring(topology)
    close = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    )
    for batch in [*BATCHES, 0]:
        x, values, bias, dz = draw(topology, batch)
        matrix = dense(topology, values)
        z = x @ matrix + bias
        dx, dw = dz @ matrix.t(), (x.t() @ dz)[topology.parents().long(), topology.child.long()]
        x, values, bias, dz = (given.to(dtype) for given in (x, values, bias, dz))
        for turned in (by_feature, torch.clone):
            results = {
                "z": (
                    kernels.relation_sum(turned(x), values, bias, *order, turned is torch.clone),
                    z,
                ),
                "dx alone": (
                    kernels.input_gradient(turned(dz), values, *order, turned is by_feature),
                    dx,
                ),
            }
            for other in (by_feature, torch.clone):
                both = kernels.relation_gradients(turned(x), other(dz), values, *order)
                weights = kernels.weight_gradient(turned(x), other(dz), *order)
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
                torch.testing.assert_close(
                    got.double(), wanted, **close, msg=lambda m, n=name, b=batch: f"{n} {b}: {m}"
                )


@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_many_relations_are_shared_among_threads(
    batch: int, by_feature: bool, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = ragged(300, 700)
    x, values, bias, dz = draw(topology, batch, torch.float32)
    if by_feature:
        x, dz = x.t().contiguous().t(), dz.t().contiguous().t()
    got = {}
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        z = kernels.relation_sum(x, values, bias, *wiring(topology), not by_feature)
        got[count] = (z, *kernels.relation_gradients(x, dz, values, *wiring(topology)))
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
    order = native.order_by_child(topology)
    assert order.entries.dtype == torch.int64
    x, values, bias, _ = draw(topology, 20)
    z = kernels.relation_sum(x, values, bias, topology.ptr, topology.child, *order, True)
    torch.testing.assert_close(z, x[:, -2:] @ dense(topology, values)[-2:] + bias)

    topology = Topology(torch.tensor([0, 70_000]).int(), torch.arange(70_000).flip(0).int(), 70_000)
    order = native.order_by_child(topology)
    assert torch.equal(order.entries, topology.child.long())
    x, values, bias, _ = draw(topology, 2)
    z = kernels.relation_sum(x, values, bias, topology.ptr, topology.child, *order, False)
    torch.testing.assert_close(z, x * values.flip(0) + bias)


def test_matrices_with_gaps_are_read_right() -> None:
    topology = ragged(37, 53)
    x, values, bias, dz = draw(topology, 20)
    order = wiring(topology)
    wide = torch.randn(20, 80, dtype=x.dtype)
    wide[:, 1::2][:, :37] = x
    torch.testing.assert_close(
        kernels.relation_sum(wide[:, 1::2][:, :37], values, bias, *order, True),
        x @ dense(topology, values) + bias,
    )
    spread = dz[:, :1].expand(20, 53)
    torch.testing.assert_close(
        kernels.input_gradient(spread, values, *order, True), spread @ dense(topology, values).t()
    )


@pytest.mark.parametrize("shape", [(0, 0), (5, 0), (0, 5), (37, 53), (300, 40)])
def test_the_order_by_child_lists_parents_in_order(shape: tuple[int, int]) -> None:
    topology = ragged(*shape)
    in_ptr, entries = native.order_by_child(topology)
    parents, slots = (entries.long() >> 16) & 0xFFFF, entries.long() & 0xFFFF
    by_child = torch.argsort(topology.child, stable=True)
    assert torch.equal(topology.ptr.long()[parents] + slots, by_child)
    assert torch.equal(in_ptr.diff(), topology.fan_in().int())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 100])
def test_an_order_carried_over_a_cut_is_the_one_built_again(
    count: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_NARROW", 8 if wide else 1 << 16)
    topology = ragged(60, 45)
    removed = torch.randperm(topology.n_relations)[:count].sort().values.int()
    keep = torch.ones(topology.n_relations, dtype=torch.bool)
    keep[removed.long()] = False
    ptr = torch.cat([torch.zeros(1), topology.degrees_without(removed).cumsum(0)]).int()
    after = Topology(ptr, topology.child[keep], topology.n_children)
    carried = native.order_without(native.order_by_child(topology), topology, removed)
    for mine, built in zip(carried, native.order_by_child(after), strict=True):
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
    a, b, c, none, d, also_none = native.family_hashes(ptr, child).tolist()
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
    rectangle = kernels.fill(values, topology.ptr, topology.child, topology.n_children, transposed)
    assert torch.equal(rectangle, expected)
    for layout in (
        rectangle,
        by_feature(rectangle),
        rectangle.repeat(1, 2)[:, : rectangle.shape[1]],
    ):
        assert torch.equal(kernels.pick(layout, topology.ptr, topology.child, transposed), values)


def operators(batch: int) -> Iterator[tuple[str, tuple]]:
    """Lists every operator with arguments."""
    topology = ragged(9, 6)
    x, values, bias, dz = (given.requires_grad_() for given in draw(topology, batch))
    x_turned, dz_turned = (by_feature(given.detach()).requires_grad_() for given in (x, dz))
    order = wiring(topology)
    for row_major in (True, False):
        yield "relation_sum", (x if row_major else x_turned, values, bias, *order, row_major)
        yield "input_gradient", (dz if row_major else dz_turned, values, *order, row_major)
    yield "relation_gradients", (x, dz_turned, values, *order)
    yield "relation_gradients", (x_turned, dz, values, *order)
    yield "weight_gradient", (x, dz, *order)
    yield "fill", (values, topology.ptr, topology.child, 6, True)
    yield (
        "pick",
        (torch.randn(9, 6, dtype=x.dtype, requires_grad=True), topology.ptr, topology.child, False),
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_operators_keep_the_rules_of_torch(batch: int) -> None:
    for name, inputs in operators(batch):
        torch.library.opcheck(getattr(torch.ops.grapnet, name).default, inputs)


def test_derivatives_of_derivatives_are_right() -> None:
    for name, inputs in operators(3):
        function = getattr(kernels, name)
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_a_plan_compiles_into_one_graph() -> None:
    topology = ragged(9, 6)
    x, values, bias, dz = (given.requires_grad_() for given in draw(topology, 5))
    plan = Sparse().prepare(topology)

    def step(plan: SparsePlan) -> list[Tensor]:
        run = torch.compile(plan, fullgraph=True, backend="aot_eager") if compiled else plan
        z = run(x, values, bias)
        return [z, *torch.autograd.grad(z, (x, values, bias), dz)]

    compiled = False
    eager = step(plan)
    compiled = True
    for mine, plain in zip(step(plan), eager, strict=True):
        assert torch.equal(mine, plain)


def test_only_wanted_gradients_are_computed() -> None:
    topology = ragged(9, 6)
    x, values, bias, dz = draw(topology, 5)
    plan = Sparse().prepare(topology)
    for wanted in range(1, 8):
        inputs = [
            given.clone().requires_grad_(bool(wanted >> n & 1))
            for n, given in enumerate((x, values, bias))
        ]
        plan(*inputs).backward(dz)
        twins = [given.clone().requires_grad_() for given in (x, values, bias)]
        (twins[0] @ dense(topology, twins[1]) + twins[2]).backward(dz)
        for given, twin in zip(inputs, twins, strict=True):
            if given.requires_grad:
                torch.testing.assert_close(given.grad, twin.grad)


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


def test_what_leaves_a_net_of_sparse_transitions_is_row_major() -> None:
    net = gn.GrapNet([9, 7, 6], density=0.5)
    net.execution.use("sparse")
    x = torch.randn(5, 9)
    assert net(x).is_contiguous()
    with torch.no_grad():
        assert net(x).is_contiguous()


def test_autocast_keeps_the_dtype_of_the_weights() -> None:
    topology = ragged(9, 6)
    x, values, bias, _ = draw(topology, 5, torch.float32)
    plan = Sparse().prepare(topology)
    half = x.bfloat16().requires_grad_()
    with torch.autocast("cpu"):
        z = plan(half, values, bias)
    assert z.dtype == torch.float32
    assert torch.equal(z, plan(half.float(), values, bias))
    z.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused_before_a_kernel_sees_it() -> None:
    topology = ragged(9, 6)
    x, values, bias, dz = draw(topology, 5)
    ptr, child, in_ptr, entries = order = wiring(topology)
    with pytest.raises(PlanError, match=r"x is \[5, 8\] .* needs \[batch, 9\]"):
        kernels.relation_sum(x[:, 1:], values, bias, *order, True)
    with pytest.raises(PlanError, match="x is"):
        kernels.relation_sum(x.float(), values, bias, *order, True)
    with pytest.raises(PlanError, match="values is"):
        kernels.relation_sum(x, values[1:], bias, *order, True)
    with pytest.raises(PlanError, match=r"child is .* without gaps"):
        kernels.relation_sum(
            x, values, bias, ptr, child.repeat_interleave(2)[::2], in_ptr, entries, True
        )
    with pytest.raises(PlanError, match="in_ptr is"):
        kernels.relation_sum(x, values, bias[1:], *order, True)
    with pytest.raises(PlanError, match="entries is"):
        kernels.relation_sum(x, values, bias, ptr, child, in_ptr, entries[1:], True)
    with pytest.raises(PlanError, match="child is"):
        kernels.relation_sum(x, values, bias, ptr, child.long(), in_ptr, entries, True)
    with pytest.raises(PlanError, match="x holds 4 samples, dz 5"):
        kernels.weight_gradient(x[:4], dz, *order)
    with pytest.raises(PlanError, match="dz is"):
        kernels.input_gradient(dz.half(), values.half(), *order, True)
    with pytest.raises(PlanError, match="the rectangle is"):
        kernels.pick(torch.zeros(8, 6), ptr, child, False)
    with pytest.raises(ValueError, match="cannot run the kernels called abacus"):
        native.use_variant("abacus")


def test_the_backend_says_why_not() -> None:
    topology = ragged(9, 6)
    assert Sparse().refusals(topology, torch.float32) == []
    assert "bfloat16" in Sparse().refusals(topology, torch.bfloat16)[0]
    away = Topology(topology.ptr.to("meta"), topology.child.to("meta"), 6)
    assert "on meta, the kernels are built for" in Sparse().refusals(away, torch.float64)[0]


def test_without_the_extension_the_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "missing", "the compiled kernels are not installed")
    assert Sparse().refusals(ragged(2, 2), torch.float32) == [
        "the compiled kernels are not installed"
    ]
    with pytest.raises(PlanError, match="not installed"):
        native.order_by_child(ragged(2, 2))
