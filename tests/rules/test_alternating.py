"""Cells by alternating steps and columns by elimination, beside brute force and the sweep."""

import itertools

import pytest
import torch

import grapnet as gn
from grapnet.rules import PruneNodes, PruneWeakest, RuleContext
from grapnet.rules._alternating import Reader, alternate, elimination_costs
from grapnet.rules._least_squares import error_of, obs_sweep, repaired


def problem(children=6, columns=10, rows=200, seed=0):
    """Returns weights with a bias and the Gram matrix of correlated rows, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, dtype=torch.float64, generator=generator)
    inputs = torch.randn(rows, columns, dtype=torch.float64, generator=generator) @ mixing + 0.5
    inputs = torch.cat([inputs, inputs.new_ones(rows, 1)], dim=1)
    weights = torch.randn(children, columns + 1, dtype=torch.float64, generator=generator)
    return weights, inputs.t() @ inputs


def solved_by_hand(weights, gram, kept):
    """Returns the least squares weights of every child over the cells that it keeps."""
    found = torch.zeros_like(weights)
    for child, cells in enumerate(kept):
        at = cells.nonzero().squeeze(1)
        right = weights[child] @ gram[:, at]
        found[child, at] = torch.linalg.solve(gram[at][:, at], right)
    return found


def test_weights_solve_the_least_squares_problem_of_the_cells_that_stay():
    weights, gram = problem()
    found = alternate(weights, gram, count=30, damping=0.0)
    assert int((~found.kept).sum()) == 30
    assert bool(found.kept[:, -1].all())
    torch.testing.assert_close(
        found.weights, solved_by_hand(weights, gram, found.kept), rtol=1e-6, atol=1e-8
    )


def test_damped_weights_equal_those_of_repaired():
    weights, gram = problem(seed=3)
    found = alternate(weights, gram, count=20, damping=0.05)
    by_factors = repaired(weights, gram, ~found.kept, 0.05)
    torch.testing.assert_close(found.weights, by_factors, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_choice_is_close_to_the_best_of_all(seed):
    """One child of eight columns, four of which leave: all 70 choices are compared."""
    weights, gram = problem(children=1, columns=8, seed=seed)
    errors = []
    for leaving in itertools.combinations(range(8), 4):
        kept = torch.ones(1, 9, dtype=torch.bool)
        kept[0, list(leaving)] = False
        errors.append(error_of(solved_by_hand(weights, gram, kept) - weights, gram))
    errors.sort()
    found = alternate(weights, gram, count=4, damping=1e-6)
    error = error_of(found.weights - weights, gram)
    assert error >= errors[0] * (1 - 1e-9)
    assert error <= errors[3] * (1 + 1e-6)


def test_error_is_below_that_of_the_sweep_and_of_magnitude():
    weights, gram = problem(children=32, columns=48, rows=400, seed=7)
    count = int(0.8 * 32 * 48)
    sweep = obs_sweep(weights, gram, count=count)
    refitted = repaired(weights, gram, ~sweep.kept, 0.01)
    ours = alternate(weights, gram, count=count)
    assert int((~ours.kept).sum()) == int((~sweep.kept).sum()) == count
    assert error_of(ours.weights - weights, gram) < 0.9 * error_of(refitted - weights, gram)


def test_nothing_leaves_and_nothing_changes():
    weights, gram = problem()
    found = alternate(weights, gram, count=0)
    assert bool(found.kept.all())
    assert torch.equal(found.weights, weights)


def test_counts_of_each_child():
    weights, gram = problem()
    count = torch.tensor([0, 1, 2, 3, 4, 10])
    found = alternate(weights, gram, count=count)
    assert torch.equal((~found.kept).sum(1), count)


def test_pattern_keeps_n_of_m():
    weights, gram = problem(columns=12)
    found = alternate(weights, gram, pattern=(2, 4))
    assert bool((found.kept[:, :12].unflatten(1, (3, 4)).sum(2) == 2).all())


def test_absent_cells_stay_absent_and_frozen_ones_hold():
    weights, gram = problem()
    absent = torch.zeros_like(weights, dtype=torch.bool)
    absent[:3, ::4] = True
    frozen = torch.zeros_like(absent)
    frozen[:, 1] = True
    frozen[2, 10] = True
    found = alternate(weights, gram, count=25, absent=absent, frozen=frozen)
    assert int((~found.kept & ~absent).sum()) == 25
    assert not bool((found.kept & absent).any())
    assert bool((found.weights[~found.kept] == 0).all())
    assert torch.equal(found.weights[frozen & ~absent], weights[frozen & ~absent])
    assert bool(found.kept[frozen & ~absent].all())


def test_columns_of_zeros_leave_first():
    weights, gram = problem()
    gram[2] = 0
    gram[:, 2] = 0
    found = alternate(weights, gram, count=6)
    assert not bool(found.kept[:, 2].any())
    assert bool(torch.isfinite(found.weights).all())


@pytest.mark.parametrize("seed", range(3))
def test_constant_columns_in_float32_rows_leave_first(seed):
    """Products in float32 leave rounding where constant columns have no variance."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(500, 30, generator=generator) @ torch.randn(30, 30, generator=generator)
    rows[:, ::3] = 3.7 * torch.rand(10, generator=generator) - 1
    rows = torch.cat([rows, torch.ones(500, 1)], 1)
    gram = (rows.t() @ rows).double()
    weights = torch.randn(8, 31, generator=generator)
    found = alternate(weights, gram, count=80)
    assert not bool(found.kept[:, :30:3].any())
    exact = rows.double()
    missing = exact @ (found.weights - weights).t()
    assert float(missing.square().mean()) < 1e-4 * float((exact @ weights.t().double()).var())


@pytest.mark.parametrize("count", [-1, 61])
def test_more_cells_than_there_are_cannot_leave(count):
    weights, gram = problem()
    with pytest.raises(ValueError, match=str(abs(count))):
        alternate(weights, gram, count=count)


def best_columns(weights, gram, count):
    """Returns the error of the best `count` columns to leave, by trying all."""
    width = weights.shape[1] - 1
    errors = []
    for leaving in itertools.combinations(range(width), count):
        kept = torch.ones_like(weights, dtype=torch.bool)
        kept[:, list(leaving)] = False
        errors.append(error_of(solved_by_hand(weights, gram, kept) - weights, gram))
    return sorted(errors)


def error_without(weights, gram, leaving):
    kept = torch.ones_like(weights, dtype=torch.bool)
    kept[:, leaving] = False
    return error_of(solved_by_hand(weights, gram, kept) - weights, gram)


def leaving_nodes(readers, count, held=()):
    may_leave = torch.ones(len(readers[0].columns), dtype=torch.bool)
    may_leave[list(held)] = False
    costs = elimination_costs(readers, may_leave, damping=1e-9)
    assert bool(costs[list(held)].isinf().all())
    return costs.argsort()[:count]


def single(weights, gram):
    """Returns a reader with one column for every node."""
    return Reader(weights, gram, torch.arange(weights.shape[1] - 1)[:, None])


def test_first_column_to_leave_is_the_best_of_all():
    for seed in range(5):
        weights, gram = problem(seed=seed)
        leaving = leaving_nodes([single(weights, gram)], 1)
        error = error_without(weights, gram, leaving)
        assert error == pytest.approx(best_columns(weights, gram, 1)[0], rel=1e-6)


def test_columns_that_leave_are_among_the_best_tenth():
    for seed in range(5):
        weights, gram = problem(seed=seed)
        leaving = leaving_nodes([single(weights, gram)], 4)
        errors = best_columns(weights, gram, 4)
        assert error_without(weights, gram, leaving) <= errors[len(errors) // 10]


def test_first_cost_is_the_error_that_a_node_of_several_columns_adds():
    """Two readers, in one of which each node has two columns; the costs add up."""
    weights, gram = problem(columns=10)
    others, second = problem(columns=5, seed=1)
    pairs = Reader(weights, gram, torch.arange(10).view(5, 2))
    readers = [pairs, single(others, second)]
    sums = []
    for node in range(5):
        first = error_without(weights, gram, pairs.columns[node])
        sums.append(first + error_without(others, second, torch.tensor([node])))
    costs = elimination_costs(readers, torch.ones(5, dtype=torch.bool), damping=1e-12)
    assert int(costs.argmin()) == int(torch.tensor(sums).argmin())
    assert float(costs.min()) == pytest.approx(min(sums), rel=1e-6)


def test_many_nodes_leave_as_by_solving_anew_each_time():
    weights, gram = problem(children=4, columns=80, rows=300, seed=2)
    costs = elimination_costs(
        [single(weights, gram)], torch.ones(80, dtype=torch.bool), damping=1e-9
    )
    order = costs.argsort(stable=True).tolist()
    kept = torch.ones_like(weights, dtype=torch.bool)
    for node in order[:40]:
        kept[:, node] = False
    error = error_of(solved_by_hand(weights, gram, kept) - weights, gram)
    random = torch.ones_like(kept)
    random[:, :40] = False
    assert error < 0.5 * error_of(solved_by_hand(weights, gram, random) - weights, gram)
    # The last step of forty adds the least of all that remain.
    before = kept.clone()
    before[:, order[39]] = True
    added = []
    for node in order[39:]:
        one = before.clone()
        one[:, node] = False
        added.append(error_of(solved_by_hand(weights, gram, one) - weights, gram))
    assert min(added) == pytest.approx(added[0], rel=1e-6)


def test_a_copy_of_a_column_leaves_first_and_held_columns_do_not():
    weights, gram = problem()
    mixing = torch.eye(11, dtype=torch.float64)
    # column 4 repeats column 7
    mixing[4, 4] = 0
    mixing[7, 4] = 1
    gram = mixing.t() @ gram @ mixing
    gram.diagonal()[:-1] += 1e-6
    readers = [single(weights, gram)]
    assert int(leaving_nodes(readers, 1)[0]) in (4, 7)
    assert not {4, 7} & set(leaving_nodes(readers, 8, held=(4, 7)).tolist())


def recorded(rule, net, x):
    """Returns a context with the evidence of a rule."""
    recorders = rule.recorders(net)
    for recorder in recorders.values():
        recorder.arm(net)
    with torch.no_grad():
        net(x)
    for recorder in recorders.values():
        recorder.disarm()
    return RuleContext(evidence=recorders)


def net_and_rows():
    net = gn.GrapNet([8, 12, 3], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixing = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = torch.randn(100, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return net, x @ mixing


def test_a_net_gets_the_weights_that_the_matrices_give():
    net, x = net_and_rows()
    rule = PruneWeakest(fraction=0.5, by="alternating", transitions=0)
    context = recorded(rule, net, x)
    weights = net.transitions[0].weight.detach().view(8, 12).t()
    whole = torch.cat([weights, net.layers[1].biases.detach()[:, None]], 1)
    rows = torch.cat([x, x.new_ones(100, 1)], 1)
    expected = alternate(whole, rows.t() @ rows, count=48)
    with net.edit() as edit:
        rule(net, edit, context)
    dense = torch.zeros(12, 8, dtype=torch.float64)
    topology = net.transitions[0].topology
    dense[topology.child.long(), topology.parents().long()] = net.transitions[0].values().detach()
    torch.testing.assert_close(dense, expected.weights[:, :8], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        net.layers[1].biases.detach(), expected.weights[:, 8], rtol=1e-9, atol=1e-12
    )
    net.undo()
    assert torch.equal(net.transitions[0].weight.detach().view(8, 12).t(), weights)


def test_frozen_relations_stay_to_the_bit():
    net, x = net_and_rows()
    with net.edit() as edit:
        edit.freeze(net.layers[0][2].outgoing())
    before = net.layers[0][2].W_alloc.detach().clone()
    rule = PruneWeakest(fraction=0.5, by="alternating", transitions=0)
    context = recorded(rule, net, x)
    with net.edit() as edit:
        rule(net, edit, context)
    assert torch.equal(net.layers[0][2].W_alloc.detach(), before)
    assert net.transitions[0].size == 48


@pytest.mark.parametrize(
    ("rule", "layer"),
    [
        (PruneWeakest(fraction=0.5, by="alternating", transitions=1), 0),
        (PruneNodes(fraction=0.5, by="elimination"), 0),
    ],
    ids=["alternating", "elimination"],
)
def test_stale_evidence_is_refused(rule, layer):
    net, x = net_and_rows()
    context = recorded(rule, net, x)
    with torch.no_grad():
        net.transitions[layer].weight.mul_(1.5)
    version = net.version
    with pytest.raises((gn.errors.EditError, gn.errors.StaleError)), net.edit() as edit:
        rule(net, edit, context)
    assert net.version == version


def test_elimination_removes_the_copy_of_a_node():
    """With two nodes that compute the same, one leaves and costs next to nothing after repair."""
    errors = {}
    for has_copy in (True, False):
        net, x = net_and_rows()
        if has_copy:
            with torch.no_grad():
                incoming = net.transitions[0].weight.view(8, 12)
                incoming[:, 7] = incoming[:, 3]
                net.layers[1].bias[7] = net.layers[1].bias[3]
        expected = net(x).detach()
        gn.prune(net, [x], nodes=1 / 12, by="elimination")
        assert net.sizes == [8, 11, 3]
        errors[has_copy] = float((net(x).detach() - expected).square().mean())
    assert errors[True] < 1e-3 * errors[False]
