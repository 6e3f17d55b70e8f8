"""Rules of operators: what each ties together, keeps apart, pins and marks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grapnet.spaces import _typing
from grapnet.spaces._axes import Atom, Expression, ProductOf, SumOf, atoms_of
from grapnet.spaces._discovery import AtomRecord, Example, Typed, discover
from grapnet.spaces._typing import register_rule


class Body(nn.Module):
    """Parameters by name and a function of them."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def typed(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Typed:
    return discover(Body(function, **shapes), [Example(inputs, {})])


def record(result: Typed, axis: Expression) -> AtomRecord:
    """Returns the record of an axis that is one atom."""
    assert isinstance(axis, Atom)
    return result.atoms[axis.number]


def pins(result: Typed, axis: Expression) -> list[str]:
    return [why for atom in atoms_of(axis) for why in result.atoms[atom].pins]


x = torch.randn(2, 6)


def test_a_linear_map_ties_its_input_and_frees_its_inside() -> None:
    result = typed(lambda m, x: x @ m.a @ m.b, x, a=(6, 5), b=(5, 3))
    assert result.axes["a"][1] == result.axes["b"][0]
    assert record(result, result.axes["a"][1]) == AtomRecord(5, (), frozenset())
    assert "input" in pins(result, result.axes["a"][0])
    assert "output" in pins(result, result.axes["b"][1])
    inside = atoms_of(result.axes["a"][1])[0]
    assert result.readers[inside] == (("b", 0),)
    assert result.writers[inside] == (("a", 1),)


sequences = torch.randn(2, 3, 6)
PRODUCTS: dict[str, tuple[Callable[..., Any], Tensor, tuple[int, ...], int]] = {
    # what follows `x @ m.a`, the input, the shape of the weight `b`, and its dimension that is read
    "mm": (lambda m, h: h @ m.b, x, (5, 4), 0),
    "linear": (lambda m, h: F.linear(h, m.b), x, (4, 5), 1),
    "linear with a vector": (lambda m, h: F.linear(h, m.b), x, (5,), 0),
    "addmm": (lambda m, h: torch.addmm(m.a[0, 0], h, m.b), x, (5, 4), 0),
    "mv": (lambda m, h: h.mv(m.b), x, (5,), 0),
    "addmv": (lambda m, h: torch.addmv(m.a[0, 0], h, m.b), x, (5,), 0),
    "dot": (lambda m, h: h[0].dot(m.b), x, (5,), 0),
    "bmm": (lambda m, h: h.bmm(m.b), sequences, (2, 5, 4), 1),
    "baddbmm": (lambda m, h: torch.baddbmm(m.a[0, 0], h, m.b), sequences, (2, 5, 4), 1),
    "addbmm": (lambda m, h: torch.addbmm(m.a[0, 0], h, m.b), sequences, (2, 5, 4), 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_reads_the_axis_that_it_sums_over(name: str) -> None:
    product, given, shape, read = PRODUCTS[name]
    result = typed(lambda m, x: product(m, x @ m.a), given, a=(6, 5), b=shape)
    inside = result.axes["a"][1]
    assert inside == result.axes["b"][read]
    assert ("b", read) in result.readers[atoms_of(inside)[0]]
    assert result.unknown == ()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_reads_and_writes_inside_of_its_groups(groups: int, transposed: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        convolution = F.conv_transpose2d if transposed else F.conv2d
        return F.conv2d(convolution(F.conv2d(x, m.a), m.g, groups=groups), m.b)

    shape = (8, 8 // groups, 1, 1)
    result = typed(body, torch.randn(2, 3, 4, 4), a=(8, 3, 1, 1), g=shape, b=(2, 8, 1, 1))
    inward, outward = (0, 1) if transposed else (1, 0)
    read = atoms_of(result.axes["a"][0])[-1]
    written = atoms_of(result.axes["b"][1])[-1]
    assert read != written
    assert ("g", inward) in result.readers[read]
    assert ("g", outward) in result.writers[written]
    if groups == 2:
        # the groups themselves pass through
        assert atoms_of(result.axes["a"][0])[0] == atoms_of(result.axes["b"][1])[0]


def test_a_square_weight_reads_one_dimension_and_writes_the_other() -> None:
    def recurrent(m: Any, x: Tensor) -> Tensor:
        h = x @ m.a
        return (h + h @ m.w) @ m.b

    result = typed(recurrent, x, a=(6, 5), w=(5, 5), b=(5, 3))
    assert result.axes["w"][0] == result.axes["w"][1]
    inside = atoms_of(result.axes["w"][0])[0]
    assert result.readers[inside] == (("w", 0), ("b", 0))
    assert result.writers[inside] == (("a", 1), ("w", 1))


def test_equal_sizes_are_not_the_same_axis() -> None:
    result = typed(lambda m, x: x @ m.a @ m.b @ m.c, x, a=(6, 5), b=(5, 5), c=(5, 3))
    assert result.axes["b"][0] != result.axes["b"][1]
    assert result.axes["a"][1] == result.axes["b"][0]
    assert result.axes["b"][1] == result.axes["c"][0]


def test_a_broadcast_axis_of_one_binds_nothing() -> None:
    result = typed(lambda m, x: (x @ m.a * m.scale) @ m.b, x, a=(6, 5), scale=(1, 1), b=(5, 3))
    assert record(result, result.axes["a"][1]).pins == ()
    assert record(result, result.axes["scale"][1]).pins != ()


def test_a_concatenation_is_a_sum_and_a_flattening_a_product() -> None:
    def joined(m: Any, x: Tensor) -> Tensor:
        both = torch.cat([x @ m.a, x @ m.b], 1)
        grid = both[:, :, None] * m.scale
        return grid.flatten(1) @ m.c

    result = typed(joined, x, a=(6, 3), b=(6, 4), scale=(5,), c=(35, 2))
    first = result.axes["a"][1]
    second = result.axes["b"][1]
    inner = result.axes["scale"][0]
    assert result.axes["c"][0] == SumOf((ProductOf((first, inner)), ProductOf((second, inner))))


def test_heads_and_their_inside_are_told_apart() -> None:
    def attention(m: Any, x: Tensor) -> Tensor:
        q, k, v = (x @ m.qkv).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2) @ m.o

    result = typed(attention, torch.randn(2, 5, 6), qkv=(6, 24), o=(8, 3))
    packed = result.axes["qkv"][1]
    assert isinstance(packed, ProductOf)
    three, heads, inner = packed.parts
    assert pins(result, three)
    assert record(result, heads).pins == ()
    assert record(result, heads).marks == frozenset()
    assert _typing.SCALED in record(result, inner).marks
    assert result.axes["o"][0] == ProductOf((heads, inner))


def test_a_bias_of_the_scores_has_the_heads_of_the_queries() -> None:
    def biased(m: Any, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (3, 4)).transpose(1, 2) for w in (m.q, m.k, m.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias, scale=0.5)
        return out.transpose(1, 2).flatten(2) @ m.o

    shapes = {"q": (6, 12), "k": (6, 12), "v": (6, 12), "o": (12, 2), "bias": (1, 3, 5, 5)}
    result = typed(biased, torch.randn(2, 5, 6), **shapes)
    heads = result.axes["bias"][1]
    assert record(result, heads).pins == ()
    for name in ("q", "k", "v"):
        assert result.axes[name][1].parts[0] == heads


def test_grouped_queries_share_the_heads_of_the_keys() -> None:
    def grouped(m: Any, x: Tensor) -> Tensor:
        q = (x @ m.q).unflatten(-1, (6, 4)).transpose(1, 2)
        k = (x @ m.k).unflatten(-1, (2, 4)).transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, 5, 4)
        return (q @ k.transpose(-1, -2)).softmax(-1).mean((1, 2))

    result = typed(grouped, torch.randn(2, 5, 6), q=(6, 24), k=(6, 8))
    query = result.axes["q"][1].parts
    key = result.axes["k"][1].parts
    assert len(query) == 3
    assert (query[0], query[2]) == key


def test_rotated_pairs_move_together() -> None:
    def rotary(m: Any, x: Tensor) -> Tensor:
        q = x @ m.q
        first, second = q.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (q * m.cos.repeat(2) + turned) @ m.o

    result = typed(rotary, x, q=(6, 8), cos=(4,), o=(8, 3))
    assert result.axes["q"][1] == SumOf((result.axes["cos"][0], result.axes["cos"][0]))
    assert record(result, result.axes["cos"][0]).pins == ()


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda h: h.flip(1), "flip"),
        (lambda h: h.roll(1), "roll"),
        (lambda h: h.roll(1, 1), "roll"),
        (lambda h: h.cumsum(1), "cumsum"),
        (lambda h: h.sort(1).values, "sort"),
        (lambda h: h * torch.arange(5), "arange"),
        (lambda h: h[:, torch.tensor([4, 3, 2, 1, 0])], "indexed"),
        (lambda h: h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), "outside"),
        (lambda h: h * h.argmax(1, keepdim=True), "indices are values"),
        (lambda h: h.index_select(1, torch.tensor([1, 0, 2, 3, 4])), "indexed"),
        (lambda h: torch.cdist(h, h) @ h, "_cdist"),
    ],
)
def test_what_depends_on_the_order_of_nodes_is_pinned(
    operation: Callable[[Tensor], Tensor], name: str
) -> None:
    result = typed(lambda m, x: operation(x @ m.a) @ m.b, x, a=(6, 5), b=(5, 3))
    assert any(name in why for why in pins(result, result.axes["a"][1]))


@pytest.mark.parametrize(
    ("operation", "mark"),
    [
        (lambda h: F.layer_norm(h, h.shape[1:]), _typing.NORMALISED),
        (lambda h: h - h.mean(1, keepdim=True), _typing.NORMALISED),
        (lambda h: F.normalize(h, dim=1), _typing.NORMALISED),
        (lambda h: h.softmax(1), _typing.SOFTMAX),
        (lambda h: h * h.sum(1, keepdim=True), _typing.SUMMED),
        (lambda h: h * h.amax(1, keepdim=True), _typing.EXTREME),
        (lambda h: h @ h.T @ h, _typing.CONTRACTED),
    ],
)
def test_what_works_over_all_nodes_leaves_a_mark(
    operation: Callable[[Tensor], Tensor], mark: str
) -> None:
    result = typed(lambda m, x: operation(x @ m.a) @ m.b, x, a=(6, 5), b=(5, 3))
    assert record(result, result.axes["a"][1]) == AtomRecord(5, (), frozenset({mark}))


def test_only_the_inside_of_a_normalised_group_is_marked() -> None:
    result = typed(lambda m, x: F.group_norm(x @ m.a, 2) @ m.b, x, a=(6, 8), b=(8, 3))
    group, inside = result.axes["a"][1].parts
    assert record(result, group).marks == frozenset()
    assert record(result, inside).marks == {_typing.NORMALISED}


def test_a_grouped_convolution_factors_its_channels() -> None:
    image = torch.randn(2, 3, 5, 5)

    def convolved(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(x, m.a), m.b, groups=2), m.c).mean((2, 3))

    result = typed(convolved, image, a=(8, 3, 1, 1), b=(6, 4, 3, 3), c=(2, 6, 1, 1))
    group, made = result.axes["b"][0].parts
    assert result.axes["a"][0] == ProductOf((group, result.axes["b"][1]))
    assert result.axes["c"][1] == ProductOf((group, made))
    inside = atoms_of(result.axes["b"][1])[0]
    assert result.readers[inside] == (("b", 1),)
    assert ("b", 0) not in result.writers[atoms_of(group)[0]]
    assert "positions" in " ".join(pins(result, result.axes["b"][2]))


def test_shuffled_channels_are_pinned_or_told_apart() -> None:
    def shuffled(m: Any, x: Tensor) -> Tensor:
        h = x @ m.a
        return (h + h.view(2, 2, 3).transpose(1, 2).reshape(2, 6)) @ m.b

    result = typed(shuffled, x, a=(6, 6), b=(6, 3))
    why = pins(result, result.axes["a"][1])
    assert any("share no outer factor" in one and "test_typing.py" in one for one in why)


def test_values_put_at_positions_keep_their_channels() -> None:
    def put(m: Any, x: Tensor) -> Tensor:
        h = x @ m.a
        store = torch.zeros(2, 4, 5)
        store[:, torch.tensor([1, 2, 3])] = h
        return store @ m.b

    result = typed(put, torch.randn(2, 3, 6), a=(6, 5), b=(5, 3))
    assert result.axes["a"][1] == result.axes["b"][0]
    assert record(result, result.axes["a"][1]).pins == ()


def test_experts_are_pinned_and_their_inside_is_free() -> None:
    def routed(m: Any, x: Tensor) -> Tensor:
        chosen = (x @ m.router).topk(1, -1).indices[:, 0]
        return torch.einsum("ni,nio,oc->nc", x, m.experts[chosen], m.out)

    result = typed(routed, x, router=(6, 4), experts=(4, 6, 5), out=(5, 3))
    assert any("indexed by a tensor" in why for why in pins(result, result.axes["experts"][0]))
    assert record(result, result.axes["experts"][2]).pins == ()


def test_an_operator_without_a_rule_pins_with_name_and_line() -> None:
    result = typed(lambda m, x: x @ torch.linalg.inv(m.a) @ m.b, x, a=(6, 6), b=(6, 3))
    (place,) = result.unknown
    assert place.startswith("aten::linalg_inv_ex at test_typing.py:")
    assert f"no rule for {place}" in pins(result, result.axes["a"][0])


def test_a_broken_rule_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_typing._RULES, "aten::mm", lambda *call: [])
    result = typed(lambda m, x: x @ m.a @ m.b, x, a=(6, 5), b=(5, 3))
    assert any("aten::mm" in place for place in result.unknown)
    assert pins(result, result.axes["a"][1])


def test_a_rule_of_ones_own_frees_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_typing, "_RULES", dict(_typing._RULES))

    @torch.library.custom_op("grapnet_typing::twice", mutates_args=())
    def twice(h: Tensor) -> Tensor:
        return h * 2

    @twice.register_fake
    def _(h: Tensor) -> Tensor:
        return torch.empty_like(h)

    def function(m: Any, x: Tensor) -> Tensor:
        return twice(x @ m.a) @ m.b

    before = typed(function, x, a=(6, 5), b=(5, 3))
    assert any("grapnet_typing::twice" in why for why in pins(before, before.axes["a"][1]))
    assert before.axes["a"][1] != before.axes["b"][0]
    register_rule(
        "grapnet_typing::twice", lambda typing, func, args, kwargs, out: [typing.of(args[0])]
    )
    after = typed(function, x, a=(6, 5), b=(5, 3))
    assert after.axes["a"][1] == after.axes["b"][0]
    assert record(after, after.axes["a"][1]).pins == ()


def test_a_part_that_only_views_get_is_unseen() -> None:
    result = typed(lambda m, x: x + m.table[:2], x, table=(5, 6))
    used, rest = result.axes["table"][0].parts
    assert "unseen" not in " ".join(pins(result, used))
    assert any("unseen" in why for why in pins(result, rest))


def test_a_wrong_rule_changes_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the tie of a product's inside, the spaces come apart."""

    def loose(typing, func, args, kwargs, out):
        return [[typing.of(args[0])[0], typing.of(args[1])[1]]]

    monkeypatch.setitem(_typing._RULES, "aten::mm", loose)
    result = typed(lambda m, x: x @ m.a @ m.b, x, a=(6, 5), b=(5, 3))
    assert result.axes["a"][1] != result.axes["b"][0]


def test_an_operator_that_returns_nothing_pins_what_it_writes() -> None:
    @torch.library.custom_op("grapnet_typing::write", mutates_args=("h",))
    def write(h: Tensor) -> None:
        h.copy_(h.flip(1))

    @write.register_fake
    def _(h: Tensor) -> None:
        return None

    def function(m: Any, x: Tensor) -> Tensor:
        h = x @ m.a
        write(h)
        return h @ m.b

    result = typed(function, x, a=(6, 5), b=(5, 3))
    assert any("grapnet_typing::write at" in why for why in pins(result, result.axes["a"][1]))


def test_a_buffer_that_grows_is_pinned() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.seen.sum()
            self.seen = torch.cat([self.seen, torch.zeros(1)])
            return y

    result = discover(Growing(), [Example((x,), {})])
    assert pins(result, result.axes["seen"][0])
