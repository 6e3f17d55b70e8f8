"""Rules on tiles: which tiles go and come, and that nothing but whole tiles moves."""

from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import (
    Budget,
    GradientRecorder,
    PruneWeakest,
    Rewire,
    RuleContext,
    RuleManager,
    gradual_pruning,
    rigl,
    set_rewiring,
)

from .own_rules import seen_evidence

SIZES = [70, 100, 40]  # none is a multiple of 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tiled(density: float = 0.4, seed: int = 0, sizes: list[int] = SIZES) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(seed)
    return gn.GrapNet(sizes, density=density, tile=16, dtype=torch.float64, generator=generator)


def blocks(net: gn.GrapNet, t: int, cells: Tensor) -> Tensor:
    """Returns the sums over the tiles of 16 of a rectangle, [blocks of parents, of children]."""
    rows = torch.stack([part.sum(0) for part in cells.split(16)])
    return torch.stack([part.sum(1) for part in rows.split(16, dim=1)], dim=1)


def strengths(net: gn.GrapNet, t: int) -> Tensor:
    """Returns the root mean square weight of every tile, NaN where there is none."""
    topology = net.transitions[t].topology
    cells = torch.zeros(topology.n_parents, topology.n_children, dtype=torch.float64)
    there = torch.zeros_like(cells)
    at = (topology.parents().long(), topology.child.long())
    cells[at] = net.transitions[t].values().detach().double().square()
    there[at] = 1
    return (blocks(net, t, cells) / blocks(net, t, there)).sqrt()


def present(net: gn.GrapNet, t: int) -> Tensor:
    """Returns which tiles of 16 are there."""
    return ~strengths(net, t).isnan()


def require_tiles(net: gn.GrapNet) -> None:
    gn.check(net)
    for row in net.execution.describe():
        assert row["tile"] is not None
    for t, transition in enumerate(net.transitions):
        ones = torch.ones(transition.topology.n_parents, transition.n_children)
        assert int(blocks(net, t, ones)[present(net, t)].sum()) == transition.size


@pytest.mark.parametrize(
    ("compare", "scope"),
    [("lamp", "model"), ("lamp", "transition"), ("score", "transition")],
)
def test_the_weakest_tiles_are_pruned(compare: Any, scope: Any) -> None:
    net = gn.GrapNet(SIZES, dtype=torch.float64)
    before = [strengths(net, t) for t in range(2)]
    with net.edit() as edit:
        rule = PruneWeakest(sparsity=0.7, tile=16, compare=compare, scope=scope)
        rule(net, edit, RuleContext())
    require_tiles(net)
    possible = 70 * 100 + 100 * 40
    assert abs(net.count().relations - 0.3 * possible) <= (128 if scope == "model" else 256)
    for t, strength in enumerate(before):
        gone = ~present(net, t)
        if t == 1 and compare == "lamp":
            # every block of outputs keeps its strongest tile
            strongest = strength.argmax(0), torch.arange(3)
            assert present(net, t)[strongest].all()
            strength[strongest] = torch.inf
        assert strength[gone].max() < strength[~gone & strength.isfinite()].min()


def test_pruning_follows_a_ramp_and_ends_in_tiles() -> None:
    net = gn.GrapNet([64, 64, 16])
    manager = RuleManager()
    manager.add(gradual_pruning(40, 0.75, every=10, tile=16))
    densities = []
    for step in range(40):
        manager.apply(net, step)
        require_tiles(net)
        densities.append(net.count().relations / (64 * 64 + 64 * 16))
    assert densities == sorted(densities, reverse=True)
    assert len(set(densities)) > 2
    assert densities[-1] == 0.25


def test_frozen_tiles_stay_and_a_budget_holds() -> None:
    net = gn.GrapNet(SIZES)
    with net.edit() as edit:
        edit.freeze(net.layers[0][3].outgoing()[20:21])  # tile (0, 1)
    with net.edit(allow_dead=True) as edit:
        PruneWeakest(1.0, tile=16)(net, edit, RuleContext())
    assert net.transitions[0].size == 16 * 16
    assert present(net, 0)[0, 1]
    net = gn.GrapNet(SIZES)
    with net.edit() as edit:
        PruneWeakest(1.0, tile=16)(net, edit, RuleContext(budget=Budget(parents=16, children=1)))
    require_tiles(net)
    for transition in net.transitions:
        assert transition.topology.fan_in().min() >= 16
        assert transition.topology.degrees.min() >= 1
        # nothing but the limits holds tiles back, at the borders neither
        assert transition.topology.fan_in().max() < transition.topology.n_parents
    net = gn.GrapNet(SIZES)
    before = net.count().relations
    with net.edit() as edit:
        PruneWeakest(1.0, tile=16)(net, edit, RuleContext(budget=Budget(edits=1000)))
    require_tiles(net)
    assert 1000 - 256 < before - net.count().relations <= 1000


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_rewiring_moves_whole_tiles_and_keeps_their_number(grow: str) -> None:
    net = tiled()
    rule = Rewire(fraction=0.4, grow=grow, tile=16)
    x = torch.randn(16, 70, dtype=torch.float64)
    for round_ in range(4):
        sizes = [transition.size for transition in net.transitions]
        before = [strengths(net, t) for t in range(2)]
        recorder = GradientRecorder(0)
        recorder.arm(net)
        evidence = seen_evidence(net, rule, x)
        net(x).square().sum().backward()
        with net.edit(generator=torch.Generator().manual_seed(round_)) as edit:
            rule(net, edit, RuleContext(evidence=evidence))
        require_tiles(net)
        assert [transition.size for transition in net.transitions] == sizes
        for t, strength in enumerate(before):
            was = ~strength.isnan()
            dropped = was & ~present(net, t)
            grown = present(net, t) & ~was
            assert dropped.sum() == grown.sum() > 0
            if t == 0:
                # a tile that stays although it is weaker had no place to go to, at the border
                inner = torch.ones_like(was)
                inner[-1] = inner[:, -1] = False
                stays = was & ~dropped & inner
                assert strength[dropped & inner].max() <= strength[stays].min()


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_transitions_trade_tiles_in_the_scope_model(grow: str) -> None:
    for scope in ("model", "transition"):
        net = tiled(sizes=[64, 96, 48])
        for t, scale in ((0, 0.01), (1, 10.0)):
            relations = net.layers[t].outgoing()
            relations.weights = scale * relations.weights.detach()
        before = [strengths(net, t) for t in range(2)]
        sizes = [transition.size for transition in net.transitions]
        rule = Rewire(fraction=0.25, grow=grow, tile=16, scope=scope, compare="score")
        evidence = seen_evidence(net, rule, torch.randn(16, 64, dtype=torch.float64))
        with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
            rule(net, edit, RuleContext(evidence=evidence))
        require_tiles(net)
        assert net.count().relations == sum(sizes)
        dropped = [int((~s.isnan() & ~present(net, t)).sum()) for t, s in enumerate(before)]
        grown = [int((s.isnan() & present(net, t)).sum()) for t, s in enumerate(before)]
        n_tiles = [size // 256 for size in sizes]
        if scope == "transition":
            assert dropped == grown == [round(0.25 * count) for count in n_tiles]
            continue
        count = round(0.25 * sum(n_tiles))
        # all of them are small
        assert dropped == [count, 0]
        if grow == "random":
            assert grown[1] > 0
            continue
        absent = []
        for t, strength in enumerate(before):
            gradients = evidence[f"gradients of transition {t}"].of_tiles(16)
            absent += [(score, t) for score in gradients[strength.isnan()].tolist()]
        best = [t for _, t in sorted(absent, reverse=True)[:count]]
        assert grown == [best.count(0), best.count(1)]


def test_gradient_growth_takes_the_tiles_with_the_largest_gradients() -> None:
    net = tiled(sizes=[64, 96, 32])
    rule = Rewire(fraction=0.5, grow="gradient", tile=16)
    evidence = seen_evidence(net, rule, torch.randn(16, 64, dtype=torch.float64))
    recorder = evidence["gradients of transition 0"]
    scores = (blocks(net, 0, recorder.matrix().square()) / 256).sqrt()
    torch.testing.assert_close(recorder.of_tiles(16), scores)
    absent = ~present(net, 0)
    with net.edit() as edit:
        rule(net, edit, RuleContext(evidence=evidence))
    grown = present(net, 0) & absent
    assert grown.any()
    assert scores[grown].min() > scores[absent & ~grown].max()


def test_the_optimizer_follows_tiles_and_undo_brings_them_back() -> None:
    net = tiled()
    net.execution.use("tiles")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    x = torch.randn(8, 70, dtype=torch.float64)
    net(x).square().sum().backward()
    optimizer.step()

    def moments() -> dict[tuple[int, int], float]:
        relations = net.layers[0].outgoing()
        state = optimizer.state[net.transitions[0].weight]["exp_avg"].view(-1).tolist()
        ends = zip(relations.parents.tolist(), relations.children.tolist(), strict=True)
        return dict(zip(ends, state, strict=True))

    before = moments()
    output = net(x)
    with net.edit() as edit:
        Rewire(fraction=0.5, tile=16)(net, edit, RuleContext())
    after = moments()
    kept = before.keys() & after.keys()
    assert 0 < len(kept) < len(after) == len(before)
    assert all(after[pair] == before[pair] for pair in kept)
    assert all(after[pair] == 0 for pair in after.keys() - kept)
    net.undo()
    assert moments() == before
    assert torch.equal(net(x), output)


def test_random_growth_reaches_every_absent_tile() -> None:
    grown = torch.zeros(4, 6)
    for seed in range(200):
        net = tiled(0.25, sizes=[64, 96, 16])
        before = present(net, 0)
        with net.edit(generator=torch.Generator().manual_seed(seed)) as edit:
            Rewire(fraction=0.5, tile=16)(net, edit, RuleContext())
        grown += present(net, 0) & ~before
    counts = grown[~before]
    assert len(counts) == 18
    assert counts.min() > 10  # 200 · 3 / 18 = 33 are expected


def test_tiles_that_an_earlier_rule_touched_are_left_alone() -> None:
    net = tiled()
    first = strengths(net, 0).nan_to_num(nan=torch.inf)
    row, column = divmod(int(first.argmin()), first.shape[1])
    parents = net.layers[0][16 * row : 16 * row + 16]
    with net.edit() as edit:
        relations = parents.outgoing()
        children = net.layers[1].uid[16 * column : 16 * column + 16]
        edit.cut(relations[torch.isin(relations.children, children)])
        Rewire(fraction=0.2, tile=16)(net, edit, RuleContext())
    require_tiles(net)
    assert not present(net, 0)[row, column]


def test_other_wirings_are_refused_and_nothing_changes() -> None:
    net = gn.GrapNet(SIZES, density=0.3)
    with pytest.raises(gn.errors.EditError, match="tiles of 16"), net.edit() as edit:
        Rewire(tile=16)(net, edit, RuleContext())
    assert net.version == 0
    # of full transitions nothing can move, and that is no mistake
    net = gn.GrapNet(SIZES)
    with net.edit() as edit:
        Rewire(tile=16)(net, edit, RuleContext())
    assert net.version == 0


def test_schedules_pass_the_size_on() -> None:
    rules = [
        rigl(100, tile=32).rule,
        set_rewiring(100, tile=32).rule,
        gradual_pruning(1000, 0.5, tile=32).rule,
    ]
    assert [rule.tile for rule in rules] == [32, 32, 32]


def test_an_adopted_model_is_pruned_and_rewired_in_tiles() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    x = torch.randn(8, 40)
    net = gn.adopt(model, x)
    manager = RuleManager(seed=0)
    manager.add(PruneWeakest(0.5, transitions="2", tile=16))
    manager.apply(net, 0)
    weight = net.transitions[1]
    size = len(net.relations("2"))
    assert size == 64 * 48 // 2
    rule = Rewire("2", fraction=0.5, grow="gradient", tile=16)
    manager = RuleManager(seed=0)
    manager.add(rule)
    manager.start(net)
    model(x).square().sum().backward()
    before = set(weight.topology.child.tolist())
    commit = manager.apply(net, 0)
    assert commit is not None
    assert len(net.relations("2")) == size
    assert before == set(weight.topology.child.tolist())


def test_every_transition_keeps_a_tile_in_the_scope_model() -> None:
    net = tiled(sizes=[64, 96, 48])
    before = net.count().relations
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        Rewire(fraction=1.0, tile=16, scope="model", compare="score")(net, edit, RuleContext())
        stays = net.select().outgoing() - edit.cuts
        assert set(net.layers[0].uid.tolist()) & set(stays.parents.tolist())
        assert set(net.layers[1].uid.tolist()) & set(stays.parents.tolist())
    require_tiles(net)
    assert net.count().relations == before


def test_a_budget_counts_what_the_edit_has_cut_already() -> None:
    net = tiled(0.6, sizes=[64, 96, 48])
    before = net.transitions[1].topology.fan_in()
    with net.edit(generator=torch.Generator().manual_seed(0)) as edit:
        PruneWeakest(0.2, transitions=1, tile=16)(net, edit, RuleContext())
        first = len(edit.cuts)
        rule = Rewire(transitions=1, fraction=1.0, tile=16)
        rule(net, edit, RuleContext(budget=Budget(parents=16)))
        gone = edit.cuts
        assert len(gone) > first > 0
        rows = net.layers[2].rows(gone.children).long()
        left = before - torch.bincount(rows, minlength=48)
        assert int(left.min()) >= 16
        # all that can be spared has left
        assert int(left.max()) < int(before.min())
    require_tiles(net)
