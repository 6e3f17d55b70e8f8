"""SplitIntoFamilies: planted blocks are found, the strongest relations stay, blocks run as
families.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.rules import Budget, RuleContext, RuleManager, SplitIntoFamilies

from .own_rules import seen_evidence


def split(net: gn.GrapNet, rule: SplitIntoFamilies, x: Tensor, **now: Any) -> gn.Commit | None:
    evidence = seen_evidence(net, rule, x)
    with net.edit(reason="structure") as edit:
        rule(net, edit, RuleContext(evidence=evidence, **now))
        assert edit.receipt is None
    return edit.receipt


def planted(
    families: int, size: int, degree: int, *, noise: float, seed: int = 0, density: float = 1.0
) -> tuple[gn.GrapNet, Tensor, Tensor, Tensor]:
    """Returns a transition with hidden blocks, inputs that move by block, and the block of every
    parent and child.

    Weights are about 1 inside of the blocks and a tenth outside; parents and children stand in
    random order. An input is its block's signal plus `noise` of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    n_parents = families * size
    n_children = families * degree
    upper = torch.arange(families).repeat_interleave(size)[
        torch.randperm(n_parents, generator=generator)
    ]
    lower = torch.arange(families).repeat_interleave(degree)[
        torch.randperm(n_children, generator=generator)
    ]
    weights = 0.1 * torch.randn(n_parents, n_children, generator=generator)
    weights += (upper[:, None] == lower) * torch.randn(
        n_parents, n_children, generator=generator
    ).sign()
    there = torch.rand(n_parents, n_children, generator=generator) < density
    parents, children = there.nonzero(as_tuple=True)
    net = gn.GrapNet.from_relations([n_parents, n_children], [(parents, children, weights[there])])
    signals = torch.randn(400, families, generator=generator)
    x = signals[:, upper] + noise * torch.randn(400, n_parents, generator=generator)
    return net, x, upper, lower


def blocks(net: gn.GrapNet) -> set[tuple[frozenset[int], frozenset[int]]]:
    n_parents = net.sizes[0]
    return {
        (frozenset(f.members.uids.tolist()), frozenset((f.children.uids - n_parents).tolist()))
        for f in net.execution.families(0)
    }


def rows(groups: Tensor, group: int) -> frozenset[int]:
    return frozenset((groups == group).nonzero().view(-1).tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("families", "size", "degree", "noise"),
    [(4, 8, 6, 0.5), (8, 16, 8, 1.0), (3, 5, 20, 1.0), (16, 12, 4, 1.0)],
)
def test_planted_blocks_are_found(
    families: int, size: int, degree: int, noise: float, seed: int
) -> None:
    net, x, upper, lower = planted(families, size, degree, noise=noise, seed=seed)
    inside = (upper[:, None] == lower).flatten()
    expected = net.layers[0].outgoing().weights.detach()[inside]
    receipt = split(net, SplitIntoFamilies(transitions=0, families=families), x)
    assert receipt is not None
    assert blocks(net) == {(rows(upper, g), rows(lower, g)) for g in range(families)}
    assert torch.equal(net.layers[0].outgoing().weights, expected)  # what stays is as it was
    remark = receipt.operations[-1]
    assert (remark["operation"], remark["relations"], remark["left_outside"]) == (
        "remark",
        int((~inside).sum()),
        0,
    )
    assert 1 / families < remark["kept_weight"] < 1
    gn.check(net)


def test_children_are_shared_out_close_to_the_best_that_is_possible() -> None:
    # Two groups of parents that are known: all ways to share 12 children out can be tried.
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([6, 12], generator=generator)
    signals = torch.randn(100, 2, generator=generator)
    strength = net.layers[0].outgoing().weights.detach().abs().view(6, 12)
    held = torch.stack([strength[::2].sum(0), strength[1::2].sum(0)])  # [groups, children]
    best = max(
        held[0, list(c)].sum() + held[1].sum() - held[1, list(c)].sum()
        for c in combinations(range(12), 6)
    )
    split(net, SplitIntoFamilies(transitions=0, families=2), signals.repeat(1, 3))
    assert float(net.layers[0].outgoing().weights.detach().abs().sum()) == pytest.approx(
        float(best), rel=1e-6
    )


@pytest.mark.parametrize(
    ("sizes", "families"), [([10, 7], 3), ([7, 10], 4), ([5, 5], 5), ([9, 4], 1)]
)
def test_sizes_that_do_not_divide_differ_by_one(sizes: list[int], families: int) -> None:
    net = gn.GrapNet(sizes)
    split(net, SplitIntoFamilies(transitions=0, families=families), torch.randn(50, sizes[0]))
    found = [f.block for f in net.execution.families(0)]
    assert len(found) == families
    for side, size in enumerate(sizes):
        numbers = [block[side] for block in found]
        assert sum(numbers) == size
        assert max(numbers) - min(numbers) <= 1


def test_dead_parents_do_not_become_groups_of_their_own() -> None:
    net, x, upper, _ = planted(4, 8, 6, noise=0.3)
    dead = torch.cat([(upper == g).nonzero().view(-1)[:2] for g in range(4)])  # two of each block
    x[:, dead] = 5.0
    split(net, SplitIntoFamilies(transitions=0, families=4), x)
    alive = set(range(32)) - set(dead.tolist())
    assert {frozenset(members & alive) for members, _ in blocks(net)} == {
        rows(upper, g) & alive for g in range(4)
    }


def test_a_ragged_transition_is_filled_when_asked() -> None:
    for fill in (False, True):
        net, x, upper, lower = planted(4, 8, 6, noise=0.5, density=0.8)
        there = net.transitions[0].size
        relations = net.layers[0].outgoing()
        inside = upper[relations.parents] == lower[relations.children - 32]
        receipt = split(net, SplitIntoFamilies(transitions=0, families=4, fill=fill), x)
        assert receipt is not None
        assert len(receipt.change.transitions[0].gone) == there - int(inside.sum())
        if not fill:
            assert net.transitions[0].size == int(inside.sum())
            assert len(net.execution.families(0)) > 4
    assert blocks(net) == {(rows(upper, g), rows(lower, g)) for g in range(4)}
    born = receipt.change.transitions[0].weights.born_values
    assert len(born) == receipt.operations[-1]["filled"] == 4 * 8 * 6 - int(inside.sum())
    assert not born.any()


def test_what_is_split_already_stays_as_it_is() -> None:
    net, x, *_ = planted(4, 8, 6, noise=0.5)
    rule = SplitIntoFamilies(transitions=-1, families=4, fill=True)
    assert split(net, rule, x) is not None
    assert split(net, rule, x) is None


def test_a_hidden_transition_runs_as_families_afterwards() -> None:
    net = gn.GrapNet([32, 512, 1024, 4])
    assert net.execution.describe()[1]["runs"] == "dense"
    split(net, SplitIntoFamilies(transitions=1, families=8), torch.randn(200, 32))
    assert [f.block for f in net.execution.families(1)] == [(64, 128)] * 8
    assert net.execution.describe()[1]["runs"] == "family"
    assert net(torch.randn(3, 32)).shape == (3, 4)


def test_frozen_relations_stay_outside_of_the_blocks() -> None:
    net, x, upper, lower = planted(4, 8, 6, noise=0.5)
    outside = net.layers[0].outgoing()[(upper[:, None] != lower).flatten()][:5]
    with net.edit() as edit:
        edit.freeze(outside)
    held = net.layers[0].outgoing()
    bits = held[held.frozen].weights.clone()
    receipt = split(net, SplitIntoFamilies(transitions=0, families=4), x)
    assert receipt is not None
    held = net.layers[0].outgoing()
    assert torch.equal(held[held.frozen].weights, bits)
    assert net.transitions[0].size == 4 * 8 * 6 + 5
    assert receipt.operations[-1]["left_outside"] == 5


def test_budgets_leave_the_strongest_outside() -> None:
    rule = SplitIntoFamilies(transitions=0, families=4, fill=True)
    net, x, upper, lower = planted(4, 8, 6, noise=0.5)
    weights = net.layers[0].outgoing().weights.detach().abs()
    weakest = weights[(upper[:, None] != lower).flatten()].sort().values[:100]
    receipt = split(net, rule, x, budget=Budget(edits=100))
    assert receipt is not None
    assert torch.equal(
        receipt.change.transitions[0].weights.gone_values.abs().view(-1).sort().values, weakest
    )
    net, x, *_ = planted(4, 8, 6, noise=0.5, density=0.5)
    receipt = split(net, rule, x, budget=Budget(edits=20))
    assert receipt is not None
    assert len(receipt.change.transitions[0].gone) == len(receipt.change.transitions[0].born) == 20
    net, x, *_ = planted(4, 8, 6, noise=0.5)
    split(net, rule, x, budget=Budget(parents=10, children=8))
    topology = net.transitions[0].topology
    assert (int(topology.fan_in().min()), int(topology.degrees.min())) == (10, 8)


def test_several_transitions_are_split_within_one_budget() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([8, 8, 8], dtype=torch.float64)
    manager = RuleManager(budget=Budget(edits=40))
    manager.add(SplitIntoFamilies(transitions=(0, 1), families=2))
    with manager.recording(net):
        net(torch.randn(64, 8, dtype=torch.float64))
    commit = manager.apply(net)
    assert commit is not None
    # 32 relations of each lead from one family to the other
    assert [len(change.gone) for change in commit.change.transitions.values()] == [32, 8]
    assert not any(step["operation"] == "keep" for step in commit.operations)


def test_what_cannot_be_split_is_refused() -> None:
    net = gn.GrapNet([4, 6])
    with pytest.raises(gn.errors.EditError, match="5 families"):
        split(net, SplitIntoFamilies(transitions=0, families=5), torch.randn(9, 4))
    assert net.version == 0
