"""TINY: new nodes are the best fit of what a layer cannot express, by lstsq and SVD on rows."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.rules import (
    BottleneckRecorder,
    Budget,
    GrowBest,
    GrowWidth,
    RuleContext,
    RuleManager,
    search_scale,
)

TINY = GrowWidth(layers=1, nodes=3, init="tiny")
ROWS = 60


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def net_of(*sizes: int, **given: Any) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(7)
    return gn.GrapNet(list(sizes), dtype=torch.float64, generator=generator, **given)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def best_product(x: Tensor, rest: Tensor, rank: int) -> Tensor:
    """Returns the matrix of some rank whose product with the rows of x is nearest to the rest:
    reduced rank regression.
    """
    full = torch.linalg.lstsq(x, rest, driver="gelsd").solution
    _, _, directions = torch.linalg.svd(x @ full, full_matrices=False)
    kept = directions[:rank]
    return full @ kept.T @ kept  # [above, below]


def rest_of(b: Tensor, desired: Tensor, available: Tensor) -> Tensor:
    """Returns what the columns of b that each child can use do not express."""
    rest = desired.clone()
    for child in range(desired.shape[1]):
        own = b[:, available[:, child]]
        rest[:, child] -= own @ torch.linalg.lstsq(own, desired[:, child], driver="gelsd").solution
    return rest


def recorded(net: Any, model: nn.Module, rule: Any, x: Tensor, parts: int = 1) -> dict[str, Any]:
    """Returns the recorders of a rule after backward passes of a mean loss."""
    recorders = rule.recorders(net)
    for recorder in recorders.values():
        recorder.arm(net)
    for part in x.chunk(parts):
        loss_of(model, part).backward()
    for recorder in recorders.values():
        recorder.disarm()
    model.zero_grad()
    return recorders


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    target = torch.tanh(x @ drawn(x.shape[1], output.shape[1], seed=5))
    return (output - target).square().sum(1).mean()


def grown(net: Any, rule: Any, evidence: dict[str, Any], **given: Any) -> None:
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        rule(net, edit, RuleContext(evidence=evidence, **given))
    gn.check(net)


def product_in(net: gn.GrapNet, layer: int, before: int) -> Tensor:
    """Returns the product of weights of the nodes that came, [above + 1, below]."""
    source = net.between(layer - 1, layer)
    target = net.between(layer, layer + 1)
    assert source is not None
    assert target is not None
    sizes = net.sizes
    above = torch.zeros(sizes[layer - 1], sizes[layer], dtype=torch.float64)
    store = net.transitions[source]
    above[store.topology.parents().long(), store.child.long()] = store.values().detach()
    below = torch.zeros(sizes[layer], sizes[layer + 1], dtype=torch.float64)
    store = net.transitions[target]
    below[store.topology.parents().long(), store.child.long()] = store.values().detach()
    incoming = torch.cat([above, net.layers[layer].biases.detach()[None]])
    return incoming[:, before:] @ below[before:]


def outputs_of(net: gn.GrapNet, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs of all layers, and the sums that lead to them, each with its graph."""
    found: list[Tensor] = []
    sums: list[Tensor] = []
    with torch.enable_grad():
        h = [x]
        for number in range(1, len(net.layers)):
            z = net.layers[number].biases.expand(len(x), -1)
            for t in net.entering(number):
                store = net.transitions[t]
                dense = torch.zeros(store.topology.degrees.shape[0], net.sizes[number]).double()
                at = (store.topology.parents().long(), store.child.long())
                z = z + h[store.source] @ dense.index_put(at, store.values().view(-1))
            sums.append(z)
            h.append(torch.relu(z) if number < len(net.layers) - 1 else z)
        found = h
    return found, sums


def available_in(net: gn.GrapNet, target: int) -> Tensor:
    parts = []
    for t in net.entering(target):
        store = net.transitions[t]
        part = torch.zeros(net.sizes[store.source], net.sizes[target], dtype=torch.bool)
        relations = net.layers[store.source].outgoing(to=net.layers[target])
        rows = (store.topology.parents().long(), store.child.long())
        part[rows] = ~relations.frozen
        parts.append(part)
    return torch.cat([*parts, torch.ones(1, net.sizes[target], dtype=torch.bool)])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("kind", ["full", "sparse", "frozen", "skip"])
def test_the_product_is_the_best_fit_of_what_the_layer_cannot_express(
    kind: str, layer: int, parts: int
) -> None:
    given: dict[str, Any] = {}
    if kind == "sparse":
        given["density"] = 0.8
    if kind == "skip":
        given["skips"] = [(0, 3)]
    net = net_of(6, 4, 5, 4, **given)
    if kind == "frozen":
        with net.edit() as edit:
            edit.freeze(net.layers[layer].outgoing()[::2])
    x = drawn(ROWS, 6)
    rule = replace(TINY, layers=layer)
    evidence = recorded(net, net, rule, x, parts)
    h, _ = outputs_of(net, x)
    z = net_sums(net, layer + 1, x)
    sources = [net.transitions[t].source for t in net.entering(layer + 1)]
    b = with_one(torch.cat([h[source] for source in sources], 1)).detach()
    rest = rest_of(b, z, available_in(net, layer + 1))
    expected = best_product(with_one(h[layer - 1]).detach(), rest, 3)
    before = net.sizes[layer]
    grown(net, rule, evidence)
    assert net.sizes[layer] == before + 3
    found = product_in(net, layer, before)
    assert torch.allclose(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    # the control: without the projection it is another matrix
    naive = best_product(with_one(h[layer - 1]).detach(), z, 3)
    assert (naive - expected).abs().max() > 1e-3 * expected.abs().max()


def net_sums(net: gn.GrapNet, number: int, x: Tensor) -> Tensor:
    """Returns the desired update of the sums that lead to a layer."""
    h, sums = outputs_of(net, x)
    target = torch.tanh(x @ drawn(x.shape[1], h[-1].shape[1], seed=5))
    loss = (h[-1] - target).square().sum(1).mean()
    (gradient,) = torch.autograd.grad(loss, sums[number - 1])
    return -len(x) * gradient


def test_all_layers_that_read_a_layer_get_the_nodes_they_need_together() -> None:
    net = net_of(6, 3, 5, 4, skips=[(1, 3)])
    x = drawn(ROWS, 6)
    evidence = recorded(net, net, TINY, x)
    h, _ = outputs_of(net, x)
    rests = []
    for target in (2, 3):
        sources = [net.transitions[t].source for t in net.entering(target)]
        b = with_one(torch.cat([h[source] for source in sources], 1)).detach()
        rests.append(rest_of(b, net_sums(net, target, x), available_in(net, target)))
    expected = best_product(with_one(x), torch.cat(rests, 1), 3)
    grown(net, TINY, evidence)
    new = net.layers[1][3:]
    incoming = torch.cat([new.incoming().weights.view(6, 3), new.biases[None]])
    outgoing = []
    for target in (2, 3):
        outgoing.append(new.outgoing(to=net.layers[target]).weights.view(3, -1))
    found = (incoming @ torch.cat(outgoing, 1)).detach()
    assert torch.allclose(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
def test_spaces_of_a_model_grow_as_nets_do(bias: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 4, bias=bias)
            self.left = nn.Linear(4, 5)
            self.right = nn.Linear(4, 3, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            return torch.cat([self.left(h), self.right(h).sin()], -1)

    torch.manual_seed(0)
    model = Gated().double()
    x = drawn(ROWS, 6)
    net = gn.adopt(model, x[:2])
    rule = GrowWidth("first", nodes=3, init="tiny", scale=0.25)
    evidence = recorded(net, model, rule, x)
    h = model.first(x).relu()
    left, right = model.left(h), model.right(h)
    output = torch.cat([left, right.sin()], -1)
    loss = (output - torch.tanh(x @ drawn(6, 8, seed=5))).square().sum(1).mean()
    wanted = [-ROWS * g for g in torch.autograd.grad(loss, [left, right])]
    b = h.detach()
    rests = []
    for reader, desired in zip((model.left, model.right), wanted, strict=True):
        own = with_one(b) if reader.bias is not None else b
        everything = torch.ones(own.shape[1], desired.shape[1], dtype=torch.bool)
        rests.append(rest_of(own, desired, everything))
    expected = 0.25 * best_product(with_one(x) if bias else x, torch.cat(rests, 1), 3)
    grown(net, rule, evidence)
    incoming = model.first.weight[4:].T
    if bias:
        incoming = torch.cat([incoming, model.first.bias[None, 4:]])
    outgoing = torch.cat([model.left.weight[:, 4:], model.right.weight[:, 4:]]).T
    found = (incoming @ outgoing).detach()
    assert torch.allclose(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def stationary() -> tuple[gn.GrapNet, Tensor]:
    """Returns a linear net whose last weights are the best for its rows, and the rows."""
    net = net_of(6, 2, 4, activation="identity")
    x = drawn(ROWS, 6)
    h = (x @ net.transitions[0].values().view(6, 2) + net.layers[1].biases).detach()
    target = torch.tanh(x @ drawn(6, 4, seed=5))
    solved = torch.linalg.lstsq(with_one(h), target).solution
    net.layers[1].outgoing().weights = solved[:-1].reshape(-1)
    net.layers[2].biases = solved[-1]
    return net, x


def test_gains_are_the_slope_of_the_loss_where_old_weights_are_at_their_best() -> None:
    net, x = stationary()
    evidence = recorded(net, net, TINY, x)
    (recorder,) = evidence.values()
    gains = recorder.nodes().gains
    assert bool((gains[:-1] >= gains[1:]).all())
    with torch.no_grad():
        before = loss_of(net, x)
        grown(net, replace(TINY, nodes=2, scale=1e-6), evidence)
        slope = (before - loss_of(net, x)) / 1e-6
    assert slope.item() == pytest.approx(gains[:2].sum().item(), rel=1e-4)
    # the control: other weights of the same size fall more slowly
    new = net.layers[1][2:]
    for seed in range(5):
        values = drawn(6, 2, seed=seed)
        own = new.incoming().weights.detach()
        new.incoming().weights = (values * own.norm() / values.norm()).reshape(-1)
        with torch.no_grad():
            assert (before - loss_of(net, x)) / 1e-6 < 0.9 * gains[:2].sum()


def test_where_the_layer_expresses_everything_there_is_nothing_to_add() -> None:
    net = net_of(3, 6, 4, activation="identity")
    evidence = recorded(net, net, TINY, drawn(ROWS, 3))
    (recorder,) = evidence.values()
    assert len(recorder.nodes()) == 0
    grown(net, TINY, evidence)
    assert (net.sizes, net.version) == ([3, 6, 4], 0)


def test_nodes_are_active_for_the_mean_input() -> None:
    net = net_of(6, 5, 4)
    x = drawn(ROWS, 6) + 0.5
    evidence = recorded(net, net, TINY, x)
    grown(net, TINY, evidence)
    new = net.layers[1][5:]
    mean = x.mean(0) @ new.incoming().weights.view(6, 3) + new.biases
    assert bool((mean > 0).all())


def test_scale_owner_budget_and_undo() -> None:
    net = net_of(6, 5, 4)
    x = drawn(ROWS, 6)
    before = net(x)
    evidence = recorded(net, net, TINY, x)
    grown(net, TINY, evidence)
    once = product_in(net, 1, 5)
    net.undo()
    assert torch.equal(net(x), before)
    evidence = recorded(net, net, TINY, x)
    grown(net, replace(TINY, scale=4.0, owner="late"), evidence)
    assert torch.allclose(product_in(net, 1, 5), 4 * once)
    assert net.layers[1][5:].owners == ["late"] * 3
    net.undo()
    evidence = recorded(net, net, TINY, x)
    grown(net, TINY, evidence, budget=Budget(edits=29))
    assert net.sizes == [6, 7, 4]


def test_the_manager_records_grows_and_resumes() -> None:
    net = net_of(6, 5, 4)
    x = drawn(ROWS, 6)
    manager = RuleManager()
    manager.add(replace(TINY, scale=0.05))
    with manager.recording(net):
        loss_of(net, x).backward()
    before = loss_of(net, x)
    state = manager.state_dict()
    assert manager.apply(net) is not None
    assert loss_of(net, x) < before
    product = product_in(net, 1, 5)
    net.undo()
    other = RuleManager()
    other.add(replace(TINY, scale=0.05))
    other.start(net)
    other.load_state_dict(state)
    other.apply(net)
    assert torch.equal(product_in(net, 1, 5), product)


def test_nodes_that_come_let_the_recorder_begin_anew() -> None:
    net = net_of(6, 5, 4)
    recorder = BottleneckRecorder(net, 1)
    recorder.arm(net)
    loss_of(net, drawn(ROWS, 6)).backward()
    assert recorder.count == 1
    with net.edit() as edit:
        edit.add_nodes(1, 1)
    assert recorder.count == 0
    with pytest.raises(gn.errors.GrapNetError):
        recorder.nodes()
    net.undo()
    assert recorder.count == 1
    assert len(recorder.nodes()) == 4


def test_gradients_that_are_not_finite_are_left_out() -> None:
    net = net_of(6, 5, 4)
    recorder = BottleneckRecorder(net, 1)
    recorder.arm(net)
    (net(drawn(ROWS, 6)).sum() * torch.inf).backward()
    assert (recorder.count, recorder.left_out) == (0, 1)


@pytest.mark.parametrize(
    ("rule", "sizes", "activation"),
    [
        (replace(TINY, layers=-1), [6, 5, 4], "relu"),
        (TINY, [6, 5, 4], "sigmoid"),
        (TINY, [6, 5, 4], "softplus"),
    ],
)
def test_layers_that_cannot_grow_so_are_refused(
    rule: GrowWidth, sizes: list[int], activation: str
) -> None:
    net = net_of(*sizes, activation=activation)
    with pytest.raises(gn.errors.EditError):
        grown(net, rule, recorded(net, net, rule, drawn(ROWS, 6)))
    assert net.version == 0


def test_beside_removals_it_is_refused() -> None:
    net = net_of(6, 5, 4)
    evidence = recorded(net, net, TINY, drawn(ROWS, 6))
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.layers[1][:1])
        with pytest.raises(gn.errors.EditError):
            TINY(net, edit, RuleContext(evidence=evidence))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)),
    ],
)
def test_spaces_that_cannot_grow_so_are_refused(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    shape = (2, 6, 6) if isinstance(model[0], nn.Conv1d) else (2, 6)  # pyright: ignore[reportIndexIssue]
    net = gn.adopt(model, drawn(*shape))
    with pytest.raises(gn.errors.EditError):
        BottleneckRecorder(net, "0")
    with pytest.raises(gn.errors.EditError):
        GrowBest(nodes=1).recorders(net)


def test_the_search_finds_the_best_scale_and_changes_nothing() -> None:
    net = net_of(6, 5, 4)
    x = drawn(ROWS, 6)
    held = drawn(ROWS, 6, seed=11)
    evidence = recorded(net, net, TINY, x)
    before = net(x)
    scales = [2.0**power for power in range(-4, 6)]
    found = search_scale(TINY, net, evidence, lambda: loss_of(net, held).item(), scales=scales)
    assert torch.equal(net(x), before)
    losses = {}
    for scale in scales:
        with net.edit(trial=True) as edit:
            replace(TINY, scale=scale)(net, edit, RuleContext(evidence=evidence))
            edit.commit()
            losses[scale] = loss_of(net, held).item()
    assert found.scale == min(losses, key=losses.__getitem__)
    assert min(losses.values()) < loss_of(net, held).item()
    worst = search_scale(TINY, net, evidence, lambda: float(net.sizes[1]), scales=scales)
    assert worst.scale == scales[0]


def narrow_and_wide() -> gn.GrapNet:
    """Returns a net with one hidden layer that is far too narrow, and others that are not."""
    return net_of(6, 12, 12, 1, 12, 12, 4)


def test_the_best_layer_grows_within_a_budget() -> None:
    net = narrow_and_wide()
    x = drawn(ROWS, 6)
    rule = GrowBest(nodes=3)
    evidence = recorded(net, net, rule, x)
    rates = {}
    for layer in range(1, 6):
        nodes = evidence[f"bottleneck of layer {layer}"].nodes()
        cost = net.sizes[layer - 1] + net.sizes[layer + 1] + 1
        for number, gain in enumerate(nodes.gains.tolist()):
            rates[layer, number] = gain / cost
    best, _ = max(rates, key=rates.__getitem__)
    grown(net, replace(rule, nodes=1), evidence)
    assert [new - old for new, old in zip(net.sizes, [6, 12, 12, 1, 12, 12, 4], strict=True)] == [
        int(layer == best) for layer in range(7)
    ]


@pytest.mark.parametrize("limit", [10, 40, 200])
def test_a_budget_of_parameters_is_kept_and_neighbours_wait(limit: int) -> None:
    net = narrow_and_wide()
    sizes = net.sizes
    before = net.count().relations + net.count().biases
    rule = GrowBest(parameters=limit, scale=0.01)
    grown(net, rule, recorded(net, net, rule, drawn(ROWS, 6)))
    added = net.count().relations + net.count().biases - before
    assert added <= limit
    gained = [new - old for new, old in zip(net.sizes, sizes, strict=True)]
    assert (sum(gained) > 0) == (limit > 10)
    assert not any(one and other for one, other in pairwise(gained))
    assert added == sum(
        gained[n] * (sizes[n - 1] + sizes[n + 1] + 1) for n in range(1, len(sizes) - 1)
    )


def test_spaces_of_a_model_compete_alike() -> None:
    torch.manual_seed(0)
    widths = [6, 8, 2, 8, 4]
    layers: list[nn.Module] = []
    for above, below in pairwise(widths):
        layers += [nn.Linear(above, below), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).double()
    net = gn.from_module(model)
    x = drawn(ROWS, 6)
    whole = gn.adopt(model, x[:2])
    rule = GrowBest(nodes=4, scale=0.1)
    grown(net, rule, recorded(net, net, rule, x))
    grown(whole, rule, recorded(whole, model, rule, x))
    assert sum(net.sizes) == sum(widths) + 4
    assert [part.out_features for part in model if isinstance(part, nn.Linear)] == net.sizes[1:]
    assert torch.allclose(model(x), net(x))


@pytest.mark.parametrize("given", [{}, {"nodes": 0}, {"parameters": 0}, {"nodes": 1, "scale": 0}])
def test_settings_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(gn.errors.EditError):
        GrowBest(**given)
