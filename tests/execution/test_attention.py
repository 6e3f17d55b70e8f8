"""Attention: against its dense reference, and how its Parameters come and leave."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grapnet as gn
from grapnet.execution import _reference
from grapnet.execution._attention import AttentionPlan
from tests.execution.attended import (
    DTYPES,
    attended,
    by_reference,
    difference,
    nearness,
    step,
    trained,
)
from tests.execution.figures import inputs, results
from tests.fingerprint import fingerprint

WIRINGS: dict[str, tuple[list[int], list[Any]]] = {
    "full": ([5, 4], [[(i, j) for i in range(5) for j in range(4)]]),
    "sparse": ([7, 6], [[(i, j) for i in range(7) for j in range(6) if (i * 5 + j * 3) % 7 < 3]]),
    "an orphan, a single parent": (
        [4, 4],
        [[(0, 0), (1, 0), (2, 0), (3, 1), (0, 3), (2, 3), (3, 3)]],
    ),
    "no relation": ([3, 2], [[]]),
    "no parent": ([0, 3], [[]]),
    "no child": ([3, 0], [[]]),
}


def wired(name: str, dtype: torch.dtype) -> gn.GrapNet:
    """Returns a net of one attended transition with given relations."""
    sizes, pairs = WIRINGS[name]
    generator = torch.Generator().manual_seed(3)
    relations = [([i for i, _ in part], [j for _, j in part]) for part in pairs]
    net = gn.GrapNet.from_relations(sizes, relations, dtype=dtype, generator=generator)
    net.execution.use("attention", generator=generator, bound=2.0)
    return net


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 9])
@pytest.mark.parametrize("name", WIRINGS)
def test_one_transition_is_its_dense_reference(name: str, batch: int, dtype: torch.dtype) -> None:
    net = wired(name, dtype)
    x = inputs(net, batch)
    assert net(x).shape == (batch, net.sizes[-1])
    fast = results(net, x)
    slow = results(net, x, lambda h: by_reference(net, h))
    largest = max(
        [float(value.abs().max()) for value in slow.values() if value.numel()], default=0.0
    )
    for key, value in fast.items():
        assert bool(((value - slow[key]).abs() <= nearness(net, batch) * largest).all()), key


def test_shares_sum_to_one_and_the_sum_is_something_else() -> None:
    net = attended([6, 5], density=1.0)
    x = inputs(net, 9).abs()
    net.layers[0].outgoing().weights = torch.ones(30, dtype=torch.float64)
    net.layers[1].biases = torch.zeros(5, dtype=torch.float64)
    output = net(x)  # Σ a h with Σ a = 1 lies among the h
    assert bool(
        (
            (output >= x.min(1, keepdim=True).values) & (output <= x.max(1, keepdim=True).values)
        ).all()
    )
    keys = net.columns["key_0"].value
    queries = net.columns["query_0"].value
    with torch.no_grad():
        keys.zero_()
    assert torch.allclose(net(x), x.mean(1, keepdim=True).expand(-1, 5), atol=1e-14)
    with torch.no_grad():
        keys.fill_(1e5)
        queries.fill_(1.0)
    assert torch.equal(net(x), x.max(1, keepdim=True).values.expand(-1, 5))  # no overflow
    net.execution.use("reference")
    assert torch.allclose(net(x), x.sum(1, keepdim=True).expand(-1, 5), atol=1e-14)


@pytest.mark.parametrize("cells", [1, 7, 30])
def test_in_pieces_it_is_the_same(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = attended([6, 5, 4])
    x = inputs(net, 3)
    whole = results(net, x)
    monkeypatch.setattr(_reference, "CELLS", cells)
    net.execution._refresh()
    for name, value in results(net, x).items():
        assert torch.allclose(value, whole[name], rtol=1e-12, atol=1e-14), name


class Largest(TorchDispatchMode):
    """Notes the most numbers that a result with one row per sample has."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and len(out) == self.batch:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_a_piece_bounds_the_memory_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reference, "CELLS", 100)
    net = attended([20, 30])
    with torch.no_grad(), Largest(3) as largest:
        net(inputs(net, 3))
    # inputs [3, 20], outputs [3, 30], and pieces of 33 of the 600 relations
    assert largest.numbers == 3 * 33


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("cells", [5, 1 << 20])
def test_gradients_of_gradients(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reference, "CELLS", cells)
    net = wired("an orphan, a single parent", torch.float64)
    plan = AttentionPlan(net.transitions[0].topology)
    arguments = [
        inputs(net, 2),
        *(c.value.detach() for c in net.columns.values()),
        net.transitions[0].values().detach(),
    ]

    def attend(x: Tensor, key: Tensor, query: Tensor, values: Tensor) -> Tensor:
        return plan(x, values, net.layers[1].biases.detach(), key, query)

    arguments = [argument.clone().requires_grad_() for argument in arguments]
    assert torch.autograd.gradcheck(
        attend, arguments, check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(attend, arguments)


def test_transforms_leading_dimensions_frozen_relations_and_other_types() -> None:
    net = attended([6, 5, 4])
    x = inputs(net, 6)
    assert torch.equal(net(x.view(2, 3, 6)).view(6, 4), net(x))
    state = {name: 2 * p.detach() for name, p in net.named_parameters()}
    double = copy.deepcopy(net)
    double.load_state_dict({**net.state_dict(), **state})
    assert torch.equal(torch.func.functional_call(net, state, (x,)), double(x))
    gradients = torch.func.grad(lambda s: torch.func.functional_call(net, s, (x,)).sum())(state)
    assert bool((gradients["columns.key_0.value"] != 0).any())
    compiled = torch.compile(net, backend="eager")
    assert torch.allclose(compiled(x), net(x), atol=1e-14)
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[::2])
    assert difference(net, x) <= 1e-12
    assert torch.allclose(net.float()(x.float()).double(), net.double()(x), atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = net.float()(x.float())
    assert torch.allclose(low.double(), net.double()(x), atol=0.1)


def test_what_starts_it_and_what_it_starts_from() -> None:
    net = gn.GrapNet([6, 5, 4])
    net.execution.use(
        "attention", transition=1, bound=0.5, generator=torch.Generator().manual_seed(2)
    )
    assert net.execution.choices() == ["auto", "attention"]
    assert net.execution.describe()[1]["runs"] == "attention"
    key = net.columns["key_1"].value
    query = net.columns["query_1"].value
    assert (key.shape, query.shape) == ((5,), (4,))
    assert 0 < float(key.detach().abs().max()) <= 0.5
    net.execution.use("attention", transition=1)  # again: what is there stays
    assert net.columns["key_1"].value is key
    again = gn.GrapNet([6, 5, 4])
    again.execution.use(
        "attention", transition=1, bound=0.5, generator=torch.Generator().manual_seed(2)
    )
    assert torch.equal(again.columns["query_1"].value, query)
    again.execution.use("attention", key=torch.arange(5.0), query=[1.0, 2, 3, 4], transition=1)
    assert again.columns["key_1"].value.tolist() == [0, 1, 2, 3, 4]
    assert again.columns["query_1"].value.tolist() == [1, 2, 3, 4]
    for options, words in (
        ({"key": [1.0]}, "key_1 needs 5 numbers"),
        ({"query": [1.0, 2, 3, float("nan")]}, "finite"),
        ({"bound": -1}, "bound"),
        ({"size": 1}, "no option size.*key, query, bound"),
    ):
        before = fingerprint(again), torch.get_rng_state().tolist()
        with pytest.raises(gn.errors.PlanError, match=words):
            again.execution.use("attention", transition=1, **options)
        assert (fingerprint(again), torch.get_rng_state().tolist()) == before
    with pytest.raises(gn.errors.PlanError, match=r"known are attention, auto, dense"):
        again.execution.use("attend")


def test_the_counts_and_the_invariants_know_them() -> None:
    net = gn.GrapNet([6, 5, 4])
    before = net.count()
    net.execution.use("attention")
    count = net.count()
    assert (count.trainable, count.bytes) == (before.trainable + 20, before.bytes + 80)
    assert count.trainable == sum(p.numel() for p in net.parameters())
    gn.check(net)
    with torch.no_grad():
        net.columns["query_0"].value.data = torch.zeros(7)
    with pytest.raises(
        gn.errors.InvariantError, match="column query_0: 7 coordinates where there should be 5"
    ):
        gn.check(net)


def test_attached_optimizers_take_them_beside_the_weight_and_let_go_of_them() -> None:
    net = gn.GrapNet([6, 5, 4])
    head = torch.nn.Linear(4, 2)
    weights, biases = ([p for p in net.parameters() if p.dim() == d] for d in (2, 1))
    split = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}])
    named = torch.optim.SGD(
        [(f"body.{n}", p) for n, p in net.named_parameters()] + list(head.named_parameters()),
        lr=1.0,
    )
    partial = torch.optim.Adam(biases)
    free = torch.optim.Adam(net.parameters())
    for optimizer in (split, named, partial):
        gn.attach(optimizer, net)
    before = fingerprint(net, split, named, partial, free)
    net.execution.use("attention", transition=1)
    key, query = (net.columns[name].value for name in ("key_1", "query_1"))
    assert [id(p) for p in split.param_groups[1]["params"]] == [
        id(p) for p in (*weights, key, query)
    ]
    assert len(split.param_groups[0]["params"]) == len(partial.param_groups[0]["params"]) == 2
    order = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1.0).param_groups[0][
        "params"
    ]
    assert [id(p) for p in named.param_groups[0]["params"]] == [id(p) for p in order]
    assert named.param_groups[0]["param_names"][-4:] == [
        "body.columns.key_1.value",
        "body.columns.query_1.value",
        "weight",
        "bias",
    ]
    assert len(free.param_groups[0]["params"]) == 4
    for optimizer in (split, named):
        step(net, optimizer)
    assert len(split.state[key]["exp_avg"]) == 5
    net.execution.use("reference", transition=1)
    assert dict(net.columns) == {}
    assert key not in split.state
    net.execution.use("auto")
    after = fingerprint(net, split, named, partial, free)
    assert {k: v for k, v in after.items() if k.startswith("optimizer") and "state" not in k} == {
        k: v for k, v in before.items() if k.startswith("optimizer")
    }
    step(net, split)


@pytest.mark.parametrize(
    "kind", [torch.optim.Adagrad, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.SGD]
)
def test_other_optimizers_take_them_too(kind: Any) -> None:
    options: dict[str, Any] = (
        {"initial_accumulator_value": 0.1} if kind is torch.optim.Adagrad else {}
    )
    net, optimizer = trained(kind, **options)
    fresh = copy.deepcopy(net)
    other = kind(fresh.parameters(), **{"lr": 0.01, **options})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        assert step(net, optimizer) == step(fresh, other)


def test_an_optimizer_that_cannot_take_them_stops_it() -> None:
    net = gn.GrapNet([6, 5, 4])
    optimizer = torch.optim.Muon([t.weight for t in net.transitions])
    gn.attach(optimizer, net)
    before = fingerprint(net, optimizer)
    random = torch.get_rng_state().tolist()
    with pytest.raises(gn.errors.OptimizerError, match=r"Muon .*columns\.key_0\.value"):
        net.execution.use("attention")
    assert (fingerprint(net, optimizer), torch.get_rng_state().tolist()) == (before, random)
    with net.edit(), pytest.raises(gn.errors.EditError, match="edit"):
        net.execution.use("attention")
    with torch.inference_mode(), pytest.raises(gn.errors.EditError, match="inference_mode"):
        net.execution.use("attention")
    assert net.execution.choices() == ["auto", "auto"]
