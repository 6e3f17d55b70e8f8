"""OBS: which relations leave, and the weights of those that stay, against plain inverses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

import grapnet as gn
from grapnet import rules
from grapnet.rules import Budget, PruneWeakest, RuleContext, RuleManager

DAMPING = 0.01


def damped(h: Tensor, *, bias: bool = True) -> Tensor:
    """Returns the Gram matrix of rows, with a one for the bias, which is not damped."""
    if bias:
        h = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)
    gram = h.t() @ h
    width = len(gram) - bias
    gram.diagonal()[:width] += DAMPING * gram.diagonal()[:width].mean()
    return gram


def tails(gram: Tensor) -> list[Tensor]:
    """Returns the inverse of the Gram matrix of every column with all columns behind it."""
    return [torch.linalg.inv(gram[c:, c:]) for c in range(len(gram))]


def swept(weights: Tensor, leaving: Tensor, gram: Tensor) -> Tensor:
    """Returns the weights [children, columns] after cells leave column by column."""
    found = weights.clone()
    for c, inverse in enumerate(tails(gram)):
        step = torch.where(leaving[:, c], found[:, c], 0) / inverse[0, 0]
        found[:, c:] -= step[:, None] * inverse[0]
        found[leaving[:, c], c] = 0
    return found


def costs(weights: Tensor, gram: Tensor) -> Tensor:
    """Returns what every cell costs if the columns behind it compensate."""
    depth = torch.stack([inverse[0, 0] for inverse in tails(gram)])
    return weights.square() / depth


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def data(rows: int = 64) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(rows, 8, dtype=torch.float64)
    return x @ torch.randn(8, 8, dtype=torch.float64)  # correlated, so that columns can compensate


def made(adopt: bool) -> tuple[Any, nn.Sequential, Tensor]:
    """Returns a net or an adopted model, the same model in plain torch, and its data."""
    model = mlp()
    x = data()
    if adopt:
        own = mlp()
        return gn.adopt(own, x[:2]), model, x
    return gn.from_module(mlp()), model, x


def run(net: Any, x: Tensor) -> Tensor:
    return net.model(x) if hasattr(net, "model") else net(x)


def pruned(net: Any, x: Tensor, **settings: Any) -> Any:
    """Applies OBS to the last transition, and returns the commit."""
    manager = RuleManager(budget=settings.pop("budget", Budget()))
    settings = {"by": rules.OBS(), "transitions": 1, **settings}
    manager.add(PruneWeakest(**settings))
    with manager.recording(net), torch.no_grad():
        run(net, x)
    return manager.apply(net)


def matrix(net: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [children, parents], which relations there are, and the biases."""
    if hasattr(net, "model"):
        weight = net.model[2].weight.detach()
        topology = net.transitions[1].topology
        there = torch.zeros(weight.shape, dtype=torch.bool)
        there[topology.child.long(), topology.parents().long()] = True
        return weight, there, net.model[2].bias.detach()
    topology = net.transitions[1].topology
    weight = torch.zeros(5, 12, dtype=torch.float64)
    there = weight.bool()
    at = (topology.child.long(), topology.parents().long())
    weight[at] = net.transitions[1].values().detach().view(-1)
    there[at] = True
    return weight, there, net.layers[2].biases.detach()


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("scope", ["transition", "child", "pattern"])
def test_the_cheapest_relations_leave_and_the_others_compensate(adopt: bool, scope: str) -> None:
    net, model, x = made(adopt)
    with torch.no_grad():
        h = torch.tanh(model[0](x))
    gram = damped(h)
    weights = torch.cat([model[2].weight, model[2].bias[:, None]], 1).detach()
    settings: dict[str, Any] = {"fraction": 0.5, "scope": scope}
    cost = costs(weights, gram)[:, :12]
    leaving = torch.zeros(5, 13, dtype=torch.bool)
    if scope == "transition":
        at = cost.flatten().argsort()[:30]
        leaving[at // 12, at % 12] = True
    elif scope == "child":
        leaving.scatter_(1, cost.argsort(dim=1)[:, :6], True)
    else:
        settings = {"pattern": (2, 4)}
        # A group of columns chooses after those before it have left.
        for start in range(0, 12, 4):
            present = costs(swept(weights, leaving, gram), gram)[:, start : start + 4]
            chosen = present.argsort(dim=1)[:, :2] + start
            leaving.scatter_(1, chosen, True)
    expected = swept(weights, leaving, gram)
    assert pruned(net, x, **settings) is not None
    found, there, bias = matrix(net)
    assert torch.equal(there, ~leaving[:, :12])
    torch.testing.assert_close(found * there, expected[:, :12])
    torch.testing.assert_close(bias, expected[:, 12])


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_the_relations_that_stay_are_solved_for_if_asked(adopt: bool, bias: bool) -> None:
    net, model, x = made(adopt)
    with torch.no_grad():
        h = torch.tanh(model[0](x))
    gram = damped(h, bias=bias)
    weights = model[2].weight.detach()
    if bias:
        weights = torch.cat([weights, model[2].bias[:, None]], 1).detach()
    pruned(net, x, fraction=0.5, by=rules.OBS(bias=bias))
    swept_there = matrix(net)[1]
    net.undo()
    pruned(net, x, fraction=0.5, by=rules.OBS(bias=bias, solve=True))
    found, there, after = matrix(net)
    assert torch.equal(there, swept_there)
    for child in range(5):
        stays = there[child]
        if bias:
            stays = torch.cat([stays, torch.ones(1, dtype=torch.bool)])
        # W_S + W_R·G[R, S]·(G[S, S] + λI)⁻¹
        change = weights[child, ~stays] @ gram[~stays][:, stays]
        expected = weights[child, stays] + torch.linalg.solve(gram[stays][:, stays], change)
        torch.testing.assert_close(found[child, there[child]], expected[: int(there[child].sum())])
        if bias:
            torch.testing.assert_close(after[child], expected[-1])
    if not bias:
        assert torch.equal(after, model[2].bias)


@pytest.mark.parametrize("by", ["obs", "alternating"])
@pytest.mark.parametrize("sizes", [[16, 24, 8], [16, 8, 24]])
def test_children_of_several_transitions_lose_half_of_their_own_parents(
    by: str, sizes: list[int]
) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet(sizes)
    manager = RuleManager()
    manager.add(PruneWeakest(fraction=0.5, by=by, scope="child"))
    with manager.recording(net), torch.no_grad():
        net(torch.randn(64, 16))
    manager.apply(net)
    for transition in net.transitions:
        topology = transition.topology
        assert topology.fan_in().tolist() == [topology.n_parents // 2] * topology.n_children


@pytest.mark.parametrize("adopt", [False, True])
def test_undo_gives_the_outputs_back_bit_for_bit(adopt: bool) -> None:
    net, _, x = made(adopt)
    before = run(net, x).detach()
    assert pruned(net, x, fraction=0.5) is not None
    after = run(net, x).detach()
    net.undo()
    assert torch.equal(run(net, x), before)
    # Magnitude changes the outputs more.
    error = (after - before).square().mean()
    pruned(net, x, fraction=0.5, by="magnitude", scope="transition", compare="score")
    assert error < 0.6 * (run(net, x) - before).square().mean()


def test_a_kernel_leaves_as_a_whole_and_all_cells_compensate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2)).double()
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    net = gn.adopt(model, x[:2])
    with torch.no_grad():
        hidden = model[0](x).relu()
    h = unfold(hidden, 2).transpose(1, 2).reshape(-1, 16)
    gram = damped(h)
    reader: Any = model[2]
    weights = torch.cat([reader.weight.flatten(1), reader.bias[:, None]], 1).detach()
    inverse = torch.linalg.inv(gram)
    cost = (weights.square() / inverse.diagonal())[:, :16].view(5, 4, 4).sum(2)
    leaving = torch.zeros(5, 4, dtype=torch.bool)
    leaving.view(-1)[cost.flatten().argsort()[:10]] = True
    cells = torch.cat([leaving.repeat_interleave(4, 1), torch.zeros(5, 1, dtype=torch.bool)], 1)
    expected = swept(weights, cells, gram)
    manager = RuleManager()
    manager.add(PruneWeakest(fraction=0.5, by="obs", transitions="2"))
    with manager.recording(net), torch.no_grad():
        model(x)
    manager.apply(net)
    found = reader.weight.detach()
    assert torch.equal(found.flatten(2).abs().sum(2) == 0, leaving)
    torch.testing.assert_close(found.flatten(1), expected[:, :16])
    torch.testing.assert_close(reader.bias.detach(), expected[:, 16])


def test_frozen_relations_and_biases_keep_their_values() -> None:
    net, _, x = made(False)
    with net.edit() as edit:
        edit.freeze(net.layers[1].outgoing()[::3])
        edit.freeze(net.layers[2][:2], incoming=False, outgoing=False)
    held = net.layers[1].outgoing()[net.layers[1].outgoing().frozen]
    pairs = list(zip(held.parents.tolist(), held.children.tolist(), strict=True))
    values = held.weights.detach().clone()
    biases = net.layers[2].biases.detach().clone()
    assert pruned(net, x, fraction=0.5) is not None
    after = net.layers[1].outgoing()
    found = dict(
        zip(
            zip(after.parents.tolist(), after.children.tolist(), strict=True),
            after.weights.tolist(),
            strict=True,
        )
    )
    assert [found[pair] for pair in pairs] == values.tolist()
    assert torch.equal(net.layers[2].biases[:2], biases[:2])
    assert not torch.equal(net.layers[2].biases[2:], biases[2:])
    assert len(after) == 30


def test_relations_that_are_no_candidates_compensate_and_stay() -> None:
    net, _, x = made(False)
    criterion = rules.OBS()
    relations = net.layers[1].outgoing()
    recorders = criterion.recorders(net, relations)
    for recorder in recorders.values():
        recorder.arm(net)
    with torch.no_grad():
        net(x)
    some = relations[::2]
    choice = criterion.choose(net, some, recorders, 10)
    assert len(choice.leaving) == 10
    assert len(choice.leaving - some) == 0
    assigned = choice.assigned
    assert assigned is not None
    assert len(assigned[0].what - some) > 0
    with net.edit() as edit:
        choice.write(edit)
    assert len(net.layers[1].outgoing()) == 50
    gn.check(net)


@pytest.mark.parametrize("scope", ["transition", "child", "model", "owner"])
def test_limits_hold_in_every_scope(scope: Any) -> None:
    net, _, x = made(False)
    commit = pruned(net, x, fraction=0.9, scope=scope, budget=Budget(parents=3, children=1))
    assert commit is not None
    topology = net.transitions[1].topology
    assert int(topology.fan_in().min()) >= 3
    assert int(topology.degrees.min()) >= 1
    assert not any(o["operation"] == "keep" for o in commit.operations)
    net.undo()
    pruned(net, x, fraction=0.9, scope=scope, budget=Budget(edits=7))
    assert net.transitions[1].size == 53


def test_the_scope_model_compares_costs_of_all_transitions() -> None:
    net, model, x = made(False)
    with torch.no_grad():
        rows = [x, torch.tanh(model[0](x))]
    cost = []
    for module, h in zip((model[0], model[2]), rows, strict=True):
        depth = torch.linalg.inv(damped(h)).diagonal()[:-1]
        cost.append((module.weight.detach().square() / depth).t().flatten())
    limit = torch.cat(cost).sort().values[60]
    pruned(net, x, fraction=60 / 156, scope="model", transitions=None)
    assert [t.size for t in net.transitions] == [int((part >= limit).sum()) for part in cost]


def test_stale_evidence_is_refused() -> None:
    net, _, x = made(False)
    rule = PruneWeakest(fraction=0.5, by="obs", transitions=1)
    recorders = rule.recorders(net)
    for recorder in recorders.values():
        recorder.arm(net)
    with torch.no_grad():
        net(x)
        net.transitions[0].weight.mul_(1.01)
    with net.edit() as edit, pytest.raises(gn.errors.EditError):
        rule(net, edit, RuleContext(evidence=recorders))
    assert net.version == 0


def test_a_layer_with_several_entering_transitions_sums_what_biases_change_by() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([8, 12, 5], activation="tanh", skips=[(0, 2)]).double()
    x = data(200)
    before = net(x).detach()
    manager = RuleManager()
    entering = net.entering(2)
    manager.add(PruneWeakest(fraction=0.3, by="obs", transitions=entering))
    with manager.recording(net), torch.no_grad():
        net(x)
    manager.apply(net)
    gn.check(net)
    repaired = (net(x) - before).square().mean()
    net.undo()
    assert torch.equal(net(x), before)
    with net.edit() as edit:
        PruneWeakest(fraction=0.3, transitions=entering, scope="transition")(
            net, edit, RuleContext()
        )
    assert repaired < (net(x) - before).square().mean()


def test_the_published_settings_sweep_in_single_precision_without_bias() -> None:
    net, model, x = made(False)
    bias = net.layers[2].biases.detach().clone()
    pruned(net, x, fraction=0.5, by=rules.OBS(published=True))
    with torch.no_grad():
        h = torch.tanh(model[0](x))
    gram = damped(h.double(), bias=False)
    weights = model[2].weight.detach()
    cost = costs(weights, gram)
    # The cell at the threshold leaves as well.
    leaving = cost <= cost.flatten().sort().values[30]
    found, there, after = matrix(net)
    assert torch.equal(there, ~leaving)
    expected = swept(weights, leaving, gram)
    torch.testing.assert_close(found * there, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(after, bias)
