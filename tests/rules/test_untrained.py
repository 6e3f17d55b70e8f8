"""SNIP, GraSP and SynFlow, beside plain torch with the formulas of the papers."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import grapnet as gn
from grapnet.rules import SNIP, GraSP, PruneWeakest, RuleContext, RuleManager, SynFlow

BACKENDS = ["reference", "dense", "family", "sparse", "auto"]


def batches(*shape: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(16, *shape, dtype=torch.float64, generator=generator)
        found.append((x, torch.randint(4, (16,), generator=generator)))
    return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def net_of(density: float = 0.7, **given: Any) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(2)
    return gn.GrapNet(
        [6, 8, 7, 4], density=density, dtype=torch.float64, generator=generator, **given
    )


def matrices(net: gn.GrapNet) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the weights as full matrices [parents, children], and where relations are."""
    found = []
    present = []
    for store in net.transitions:
        at = (store.topology.parents().long(), store.child.long())
        matrix = torch.zeros(len(store.topology.degrees), store.n_children, dtype=torch.float64)
        matrix[at] = store.values().detach().view(-1)
        found.append(matrix)
        present.append(torch.zeros_like(matrix, dtype=torch.bool).index_put(at, torch.tensor(True)))
    return found, present


def plain_loss(net: gn.GrapNet, weights: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    h, y = batch
    for number, weight in enumerate(weights):
        h = h @ weight + net.layers[number + 1].biases.detach()
        if number < len(weights) - 1:
            h = h.tanh()
    return cross_entropy(h, y)


def of_relations(parts: list[Tensor], present: list[Tensor]) -> Tensor:
    """Returns the numbers of the relations in the order of a RelationSet."""
    return torch.cat([part[where] for part, where in zip(parts, present, strict=True)])


def plain_gradients(net: gn.GrapNet, data: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns weights, where they are, and the sum of their gradients."""
    weights, present = matrices(net)
    weights = [weight.requires_grad_() for weight in weights]
    totals = [torch.zeros_like(weight) for weight in weights]
    for batch in data:
        parts = torch.autograd.grad(plain_loss(net, weights, batch), weights)
        for total, part, where in zip(totals, parts, present, strict=True):
            total += part * where
    return weights, present, totals


@pytest.mark.parametrize("backend", BACKENDS)
def test_snip_is_the_size_of_weight_times_gradient(backend: str) -> None:
    net = net_of(activation="tanh")
    net.execution.use(backend)
    data = batches(6)
    weights, present, totals = plain_gradients(net, data)
    expected = [(w * g).abs().detach() for w, g in zip(weights, totals, strict=True)]
    relations = net.select().outgoing()
    found = SNIP(data, loss).score(net, relations)
    assert torch.allclose(found, of_relations(expected, present), rtol=1e-10, atol=1e-14)
    assert all(parameter.grad is None for parameter in net.parameters())
    part = net.layers[1].outgoing()
    assert torch.equal(
        SNIP(data, loss).score(net, part), found[torch.isin(relations.parents, part.parents)]
    )


# Tiles of so few nodes are full.
@pytest.mark.parametrize(
    ("backend", "density"),
    [*product(BACKENDS, [0.7, 1.0]), ("tiles", 1.0)],
)
def test_grasp_is_weight_times_hessian_times_gradient(backend: str, density: float) -> None:
    net = net_of(density, activation="tanh")
    net.execution.use(backend)
    data = batches(6)
    weights, present, totals = plain_gradients(net, data)
    shapes = [weight.shape for weight in weights]
    sizes = [weight.numel() for weight in weights]
    exists = torch.cat([where.flatten() for where in present])

    def of_flat(flat: Tensor) -> Tensor:
        parts = []
        for part, shape in zip(flat.split(sizes), shapes, strict=True):
            parts.append(part.view(shape))
        return torch.stack([plain_loss(net, parts, batch) for batch in data]).sum()

    flat = torch.cat([weight.detach().flatten() for weight in weights])
    hessian = torch.autograd.functional.hessian(of_flat, flat)
    assert isinstance(hessian, Tensor)
    gradient = torch.cat([total.flatten() for total in totals])
    expected = (flat * (hessian @ gradient))[exists]
    found = GraSP(data, loss).score(net, net.select().outgoing())
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-12)
    # the control: it is not the score of SNIP, and relations of both signs exist
    assert found.min() < 0 < found.max()


def plain_synflow(net: gn.GrapNet, fraction: float, rounds: int) -> list[Tensor]:
    """Returns which relations stay: rounds on |weights|, ones in, sums out, by autograd.

    Where a node has one parent and one child left, both relations have the same flow but for
    rounding; shares are chosen at which none of them is the last to leave.
    """
    weights, present = matrices(net)
    masks = [where.double() for where in present]
    count = int(sum(mask.sum() for mask in masks))
    for number in range(1, rounds + 1):
        sizes = [(w.abs() * m).requires_grad_() for w, m in zip(weights, masks, strict=True)]
        h = torch.ones(1, 6, dtype=torch.float64)
        for size in sizes:
            h = h @ size
        gradients = torch.autograd.grad(h.sum(), sizes)
        scores = [(s * g).detach() for s, g in zip(sizes, gradients, strict=True)]
        kept = count - round(fraction * count)
        left = round(count * (kept / count) ** (number / rounds))
        alive = torch.cat([s[m > 0] for s, m in zip(scores, masks, strict=True)])
        threshold = alive.sort().values[len(alive) - left]
        masks = [m * (s >= threshold) for s, m in zip(scores, masks, strict=True)]
    return [mask > 0 for mask in masks]


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(("fraction", "rounds"), [(0.5, 1), (0.8, 100), (0.7, 10)])
def test_synflow_leaves_what_a_plain_loop_leaves(
    fraction: float, rounds: int, activation: str
) -> None:
    net = net_of(activation=activation)
    stays = plain_synflow(net, fraction, rounds)
    _, present = matrices(net)
    relations = net.select().outgoing()
    key = SynFlow(fraction, rounds).score(net, relations)
    leaving = relations.smallest(fraction=fraction, key=key)
    expected = ~of_relations(stays, present)
    assert torch.equal(key < len(leaving), expected)
    with net.edit(allow_dead=True) as edit:
        edit.cut(leaving)
    assert net.count().relations == len(relations) - int(expected.sum())


def test_rounds_keep_a_path_where_one_round_cuts_a_layer_off() -> None:
    def left(rounds: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        net = gn.GrapNet([10, 200, 200, 200, 4], generator=generator)
        relations = net.select().outgoing()
        key = SynFlow(0.998, rounds).score(net, relations)
        with net.edit(allow_dead=True) as edit:
            edit.cut(relations.smallest(fraction=0.998, key=key))
        return [store.size for store in net.transitions]

    assert 0 in left(1)
    assert min(left(100)) > 0


def test_skips_carry_flow_as_well() -> None:
    net = net_of(1.0, skips=[(0, 2)])
    weights = []
    for store in net.transitions:
        shape = (len(store.topology.degrees), store.n_children)
        weights.append(store.values().detach().abs().view(shape).requires_grad_())
    by_ends = dict(zip(net.ends, weights, strict=True))
    first = torch.ones(1, 6, dtype=torch.float64) @ by_ends[0, 1]
    second = first @ by_ends[1, 2] + torch.ones(1, 6, dtype=torch.float64) @ by_ends[0, 2]
    gradients = torch.autograd.grad((second @ by_ends[2, 3]).sum(), weights)
    flows = [(w * g).detach().flatten() for w, g in zip(weights, gradients, strict=True)]
    relations = gn.RelationSet.of(net, range(len(net.transitions)))
    key = SynFlow(0.0, 1).score(net, relations)
    assert torch.equal(key.argsort(), torch.cat(flows).argsort())


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
    ).double()


def kernels(net: Any, parts: dict[str, Tensor]) -> Tensor:
    """Returns the sums over the numbers of every relation, parents first."""
    found = []
    for store in net.transitions:
        part = parts[store.name]
        found.append(part.reshape(*part.shape[:2], -1).sum(2).t().flatten())
    return torch.cat(found)


def all_relations(net: Any) -> gn.RelationSet:
    return gn.RelationSet.of(net, range(len(net.transitions)))


def test_snip_and_grasp_of_a_model_sum_over_kernels_and_keep_its_buffers() -> None:
    model = convolutional()
    data = batches(3, 7, 7)
    net = gn.adopt(model, data[0][0][:2])
    before = copy.deepcopy(model.state_dict())
    snip = SNIP(data, loss).score(net, all_relations(net))
    grasp = GraSP(data, loss).score(net, all_relations(net))
    assert all(torch.equal(model.state_dict()[name], part) for name, part in before.items())
    other = copy.deepcopy(model)
    names = [store.name for store in net.transitions]
    weights = [other.get_parameter(name) for name in names]
    totals = [torch.zeros_like(weight) for weight in weights]
    for batch in data:
        parts = torch.autograd.grad(loss(other, batch), weights)
        for total, part in zip(totals, parts, strict=True):
            total += part
    curvatures = [torch.zeros_like(weight) for weight in weights]
    for batch in data:
        parts = torch.autograd.grad(loss(other, batch), weights, create_graph=True)
        inner = sum((p * t).sum() for p, t in zip(parts, totals, strict=True))
        assert isinstance(inner, Tensor)
        for total, part in zip(curvatures, torch.autograd.grad(inner, weights), strict=True):
            total += part
    expected = {}
    for name, weight, total in zip(names, weights, totals, strict=True):
        expected[name] = (weight * total).abs().detach()
    assert torch.allclose(snip, kernels(net, expected), rtol=1e-9)
    for name, weight, total in zip(names, weights, curvatures, strict=True):
        expected[name] = (weight * total).detach()
    assert torch.allclose(grasp, kernels(net, expected), rtol=1e-7, atol=1e-12)


class Attention(nn.Module):
    """Attention of two heads, by the function of torch or written out."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused:
            found = scaled_dot_product_attention(q, k, v)
        else:
            found = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.out(found.transpose(1, 2).flatten(2)).mean(1)


def test_grasp_of_attention_needs_no_kernel_with_a_second_derivative() -> None:
    torch.manual_seed(0)
    models = [Attention(fused).double() for fused in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    data = [(torch.randn(4, 5, 8).double(), torch.randint(3, (4,)))]
    scores = []
    for model in models:
        net = gn.adopt(model, data[0][0])
        scores.append(GraSP(data, loss).score(net, net.relations("out")))
    assert torch.allclose(*scores, rtol=1e-9, atol=1e-14)


def test_synflow_of_a_model_runs_on_absolute_values_in_evaluation_mode() -> None:
    model = convolutional()
    model(batches(3, 7, 7)[0][0])
    net = gn.adopt(model, torch.randn(2, 3, 7, 7, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())
    relations = all_relations(net)
    key = SynFlow(0.8, rounds=20).score(net, relations)
    assert all(torch.equal(model.state_dict()[name], part) for name, part in before.items())
    assert model.training
    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.abs_()
    weights = {store.name: other.get_parameter(store.name) for store in net.transitions}
    masks = {name: torch.ones(w.shape[:2], dtype=torch.float64) for name, w in weights.items()}
    count = len(relations)
    for number in range(1, 21):
        output = other(torch.ones(2, 3, 7, 7, dtype=torch.float64)).sum()
        gradients = torch.autograd.grad(output, list(weights.values()))
        scores = {}
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            products = (weight * gradient).detach().abs()
            scores[name] = products.reshape(*weight.shape[:2], -1).sum(2)
        alive = torch.cat([scores[name][mask > 0] for name, mask in masks.items()])
        left = round(count * ((count - round(0.8 * count)) / count) ** (number / 20))
        threshold = alive.sort().values[len(alive) - left]
        for name, weight in weights.items():
            masks[name] *= scores[name] >= threshold
            with torch.no_grad():
                weight *= masks[name].view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    stays = torch.cat([masks[store.name].t().flatten() for store in net.transitions]) > 0
    leaving = relations.smallest(fraction=0.8, key=key)
    assert torch.equal(key >= len(leaving), stays)
    with net.edit(allow_dead=True) as edit:
        edit.cut(leaving)
    # it also scores what is left
    rest = all_relations(net)
    assert len(rest) == int(stays.sum())
    again = SynFlow(0.0, 1).score(net, rest)
    assert torch.equal(again.sort().values, torch.arange(len(rest), dtype=torch.float64))


@pytest.mark.parametrize("name", ["SNIP", "GraSP", "SynFlow"])
def test_a_rule_cuts_by_them(name: str) -> None:
    data = batches(6)
    net = net_of(1.0)
    relations = net.select().outgoing()
    criteria: dict[str, Any] = {"SNIP": SNIP(data, loss), "GraSP": GraSP(data, loss)}
    scored = criteria.get(name, SynFlow(0.8))
    expected = relations.smallest(fraction=0.8, key=scored.score(net, relations))
    manager = RuleManager()
    rule = PruneWeakest(fraction=0.8, by=criteria.get(name, SynFlow()))
    manager.add(rule)
    with net.edit(trial=True, allow_dead=True) as edit:
        rule(net, edit, RuleContext())
        assert set(pairs(edit.cuts)) == set(pairs(expected))
    # Batches are no part of a checkpoint.
    assert len(str(manager.state_dict())) < 5000


def pairs(relations: gn.RelationSet) -> list[tuple[int, int]]:
    return list(zip(relations.parents.tolist(), relations.children.tolist(), strict=True))


def test_frozen_relations_stay() -> None:
    net = net_of(activation="tanh")
    with net.edit() as edit:
        edit.freeze(net.layers[1].outgoing()[::2])
    relations = net.select().outgoing()
    for criterion in (SNIP(batches(6), loss), GraSP(batches(6), loss), SynFlow(0.5)):
        scores = criterion.score(net, relations)
        assert torch.equal(scores.isinf(), relations.frozen)
        leaving = relations.smallest(fraction=0.5, key=scores)
        assert not bool(leaving.frozen.any())


def test_tokens_and_wrong_settings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    net = gn.adopt(model, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(gn.errors.EditError):
        SynFlow(0.5).score(net, all_relations(net))
    with pytest.raises(gn.errors.EditError):
        SynFlow().score(net_of(), net_of().select().outgoing())
    for given in ({"fraction": 1.1}, {"fraction": -0.1}, {"fraction": 0.5, "rounds": 0}):
        with pytest.raises(gn.errors.EditError):
            SynFlow(**given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="batch"):
        SNIP([], loss).score(net_of(), net_of().select().outgoing())
