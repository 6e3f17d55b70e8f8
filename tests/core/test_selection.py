"""Selections: node sets and relation sets, their set operations and rankings, and when they go
stale.
"""

from collections.abc import Callable

import pytest
import torch

import grapnet as gn


@pytest.fixture
def net() -> gn.GrapNet:
    """4 → 3 → 2, every weight its position and an owner on some nodes."""
    net = gn.GrapNet([4, 3, 2], dtype=torch.float64)
    for transition in (0, 1):
        relations = net.layers[transition].outgoing()
        relations.weights = torch.arange(len(relations))
    with net.edit() as edit:
        edit.set_owner(net.layers[0][1:3], "a")
        edit.set_owner(net.layers[1][[0, 2]], "a")
        edit.set_owner(net.layers[2][0], "b")
    return net


def pairs(relations: gn.RelationSet) -> list[tuple[int, int]]:
    return list(zip(relations.parents.tolist(), relations.children.tolist(), strict=True))


def test_select_by_layer_owner_and_condition(net: gn.GrapNet) -> None:
    assert net.select().uids.tolist() == list(range(9))
    assert net.select(layer=1).uids.tolist() == [4, 5, 6]
    assert net.select(layer=-1).uids.tolist() == [7, 8]
    assert net.select(layer=[2, 0, -1]).uids.tolist() == [0, 1, 2, 3, 7, 8]
    assert net.select(owner="a").uids.tolist() == [1, 2, 4, 6]
    assert net.select(layer=range(1, 3), owner="a").uids.tolist() == [4, 6]
    assert net.select(owner=None).uids.tolist() == [0, 3, 5, 8]
    assert len(net.select(layer=[])) == len(net.select(layer=[], owner="a")) == 0
    net.layers[1].biases = torch.tensor([1.0, -1.0, 2.0])
    assert net.select(layer=1, where=lambda nodes: nodes.biases > 0).uids.tolist() == [4, 6]
    assert net.select(layer=1, owner="a", where=lambda nodes: nodes.biases > 1).uids.tolist() == [6]
    assert net.select(where=lambda nodes: nodes.uids % 4 == 0).uids.tolist() == [0, 4, 8]
    with pytest.raises(ValueError, match=r"layers 0 to 2.*3"):
        net.select(layer=3)
    with pytest.raises(ValueError, match="'nobody'"):
        net.select(owner="nobody")
    with pytest.raises(IndexError):
        net.select(layer=1, where=lambda nodes: torch.ones(2, dtype=torch.bool))


def test_node_set_operations(net: gn.GrapNet) -> None:
    tagged = net.select(owner="a")
    first = net.select(layer=[0, 1])[:5]
    assert (tagged | first).uids.tolist() == [0, 1, 2, 3, 4, 6]
    assert (tagged & first).uids.tolist() == [1, 2, 4]
    assert (tagged - first).uids.tolist() == [6]
    assert (first - first).uids.tolist() == []
    assert (net.layers[1] & tagged).uids.tolist() == [4, 6]
    with pytest.raises(ValueError, match="different graphs"):
        _ = tagged | gn.GrapNet([2, 1]).select()


def test_incoming_and_outgoing_of_nodes_and_sets(net: gn.GrapNet) -> None:
    assert pairs(net.layers[1][1].incoming()) == [(0, 5), (1, 5), (2, 5), (3, 5)]
    assert pairs(net.layers[1][1].outgoing()) == [(5, 7), (5, 8)]
    assert pairs(net.layers[1].incoming(of=net.layers[0][1])) == [(1, 4), (1, 5), (1, 6)]
    assert pairs(net.layers[0].outgoing(to=[4, 6])) == [(u, v) for u in range(4) for v in (4, 6)]
    assert pairs(net.layers[0][2].outgoing(to=net.layers[1][0])) == [(2, 4)]
    assert pairs(net.layers[0][2].outgoing(slots=[2, 0])) == [(2, 4), (2, 6)]
    assert pairs(net.layers[0][2].outgoing(slots=-1)) == [(2, 6)]
    assert pairs(net.layers[0][2].outgoing(slots=[])) == []
    assert pairs(net.layers[1].incoming(of=[])) == []
    assert pairs(net.select(layer=[1, 0])[3:5].outgoing()) == [
        (3, 4),
        (3, 5),
        (3, 6),
        (4, 7),
        (4, 8),
    ]
    assert len(net.layers[0].incoming()) == len(net.layers[2].outgoing()) == 0
    assert len(net.select().outgoing()) == len(net.select().incoming()) == 18
    # owner order
    assert pairs(net.layers[0][[2, 0]].outgoing()) == [(u, v) for u in (0, 2) for v in (4, 5, 6)]
    with pytest.raises(ValueError, match=r"owns 3 relations.*\[3\]"):
        net.layers[0][2].outgoing(slots=[0, 3])
    with pytest.raises(ValueError, match="not by both"):
        net.layers[0][2].outgoing(to=net.layers[1], slots=[0])


def test_a_node_set_is_never_indexed_with_repeats(net: gn.GrapNet) -> None:
    # else pairs would be others than asked for
    with pytest.raises(IndexError, match="aligned"):
        net.layers[0][[1, 1, 2]]
    assert net.layers[0][[2, 1]].uids.tolist() == [2, 1]


def test_relation_set_operations_and_subsets(net: gn.GrapNet) -> None:
    everything = net.select().outgoing()
    down = net.layers[0][1].outgoing()
    into = net.layers[1][0].incoming()
    assert pairs(down & into) == [(1, 4)]
    assert pairs(down | into) == [(0, 4), (1, 4), (1, 5), (1, 6), (2, 4), (3, 4)]
    assert pairs(down - into) == [(1, 5), (1, 6)]
    assert len(everything - down) == 15
    assert len(down & net.layers[1].outgoing()) == 0
    assert pairs(everything[11:13]) == [(3, 6), (4, 7)]
    assert pairs(everything[[17, 0, 0]]) == [(0, 4), (6, 8)]
    assert pairs(everything[everything.weights > 10]) == [(3, 6)]
    assert pairs(down[-1]) == [(1, 6)]
    assert pairs(down[[]]) == []
    with pytest.raises(IndexError):
        down[[3]]
    with pytest.raises(IndexError, match="2 entries for 3"):
        down[torch.tensor([True, False])]
    with pytest.raises(ValueError, match="different graphs"):
        _ = down | gn.GrapNet([2, 1]).select().outgoing()


def test_weights_gradients_and_frozen_bits_line_up_across_transitions(net: gn.GrapNet) -> None:
    some = net.layers[0][3].outgoing() | net.layers[1][0].outgoing()
    assert some.weights.tolist() == [9, 10, 11, 0, 1]
    with pytest.raises(gn.errors.GrapNetError, match="backward"):
        _ = some.gradients
    (some.weights * torch.arange(5)).sum().backward()
    assert some.gradients.tolist() == [0, 1, 2, 3, 4]
    assert net.layers[0][:3].outgoing().gradients.abs().sum() == 0
    with net.edit() as edit:
        edit.freeze(some[[1, 4]])
    some = net.layers[0][3].outgoing() | net.layers[1][0].outgoing()
    assert some.frozen.tolist() == [False, True, False, False, True]
    assert some.gradients.tolist() == [0, 0, 2, 3, 0]
    assert some.weights.tolist() == [9, 10, 11, 0, 1]
    some[[0, 2, 3]].weights = torch.tensor([1.0, 2.0, 3.0])
    assert some.weights.tolist() == [1, 10, 2, 3, 1]


def test_ranking_by_count_fraction_and_key(net: gn.GrapNet) -> None:
    relations = net.layers[0].outgoing()
    relations.weights = torch.tensor([3, -1, 2, -3, 1, -2, 3, 1, -1, 0, 2, -2])
    assert relations.smallest(count=1).weights.tolist() == [0]
    # 0 and the first two of four equals
    assert pairs(relations.smallest(count=3)) == [
        (0, 5),
        (1, 5),
        (3, 4),
    ]
    assert pairs(relations.largest(count=2)) == [(0, 4), (1, 4)]  # the first two of three equals
    assert pairs(relations.largest(count=4, key=relations.weights)) == [
        (0, 4),
        (0, 6),
        (2, 4),
        (3, 5),
    ]
    assert len(relations.smallest(fraction=0.25)) == 3
    assert len(relations.smallest(fraction=0)) == len(relations.largest(count=0)) == 0
    assert len(relations.smallest(fraction=1.0)) == len(relations.largest(count=99)) == 12
    assert pairs(relations.smallest(count=1, key=torch.arange(12, 0, -1))) == [(3, 6)]
    assert pairs(relations[3:6].smallest(count=2)) == [(1, 5), (1, 6)]
    assert len(relations[:0].smallest(fraction=0.5)) == 0
    everywhere = net.select().outgoing()
    chosen = everywhere.largest(count=4)
    # one ranking over both transitions: 3, -3, 4, 5
    assert pairs(chosen) == [
        (0, 4),
        (1, 4),
        (6, 7),
        (6, 8),
    ]
    assert chosen.weights.tolist() == [3, -3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({}, "count="),
        ({"count": 1, "fraction": 0.5}, "count="),
        ({"fraction": 1.5}, "1.5"),
        ({"fraction": -0.1}, "-0.1"),
        ({"fraction": float("nan")}, "nan"),
        ({"count": -1}, "-1"),
        ({"count": 1, "key": torch.zeros(3)}, "3 entries"),
    ],
)
def test_a_ranking_that_makes_no_sense_is_refused(
    net: gn.GrapNet, arguments: dict, value: str
) -> None:
    for rank in (net.layers[0].outgoing().smallest, net.layers[0].outgoing().largest):
        with pytest.raises(ValueError, match=value):
            rank(**arguments)


def test_nan_weights_never_make_a_ranking_shorter_in_silence(net: gn.GrapNet) -> None:
    net.layers[0][0].W_alloc = torch.full((1, 3), float("nan"))
    for rank in (net.layers[0].outgoing().smallest, net.layers[0].outgoing().largest):
        for count in (1, 5, 9, 10, 12):
            try:
                found = rank(count=count)
            except ValueError:
                continue
            assert len(found) == count


@pytest.mark.parametrize(
    "use", [lambda r: r.weights, lambda r: r.parents, lambda r: r[:1], lambda r: r | r]
)
def test_a_relation_set_is_stale_once_relations_moved(
    net: gn.GrapNet, use: Callable[[gn.RelationSet], object]
) -> None:
    relations = net.layers[0].outgoing()
    untouched = net.layers[1].outgoing()
    with net.edit() as edit:
        edit.cut(net.layers[0][0], slots=[0])
    with pytest.raises(gn.errors.StaleRelationsError):
        use(relations)
    use(untouched)
    with pytest.raises(gn.errors.StaleRelationsError), net.edit() as edit:
        edit.cut(relations)
    net.undo()
    with pytest.raises(gn.errors.StaleRelationsError):  # same positions, but never silently so
        use(relations)


def test_freezing_moves_no_relation(net: gn.GrapNet) -> None:
    relations = net.layers[0].outgoing()
    with net.edit() as edit:
        edit.freeze(relations[:3])
    assert relations.frozen.sum() == 3
    assert relations.weights.tolist() == list(range(12))


def test_after_a_trial_relation_sets_of_before_are_good_and_those_of_inside_are_not(
    net: gn.GrapNet,
) -> None:
    before = net.layers[0].outgoing()[[0, 5]]
    with net.edit(trial=True) as edit:
        edit.cut(before)
        edit.commit()
        inside = net.layers[0].outgoing()[[0, 5]]
        with pytest.raises(gn.errors.StaleRelationsError):
            _ = before.weights
        assert inside.weights.tolist() == [1, 7]
    assert before.weights.tolist() == [0, 5]
    with pytest.raises(gn.errors.StaleRelationsError):
        _ = inside.weights


def test_all_weights_of_a_transition_are_a_view_of_its_parameter(net: gn.GrapNet) -> None:
    weights = net.layers[0].outgoing().weights
    assert weights.data_ptr() == net.transitions[0].weight.data_ptr()


def test_indices_over_several_layers_keep_their_order_within_each(net: gn.GrapNet) -> None:
    everybody = net.select()
    assert everybody[[1, 0]].uids.tolist() == [1, 0]
    assert everybody[[len(everybody) - 1, 2, 0]].uids.tolist() == [2, 0, int(everybody.uids[-1])]
    with pytest.raises(IndexError, match="one-dimensional"):
        net.layers[0][[[0, 1]]]


def test_random_relations_are_drawn_without_replacement_from_a_generator():
    net = gn.GrapNet([6, 5, 4])
    relations = net.select(layer=[0, 1]).outgoing()  # 30 and 20
    drawn = [
        relations.random(fraction=0.5, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    pairs = [set(zip(one.parents.tolist(), one.children.tolist(), strict=True)) for one in drawn]
    assert [len(one) for one in drawn] == [25, 25, 25]
    assert pairs[0] == pairs[1] != pairs[2]
    assert len(relations.random(count=60)) == 50
    assert len(relations.random(count=0)) == 0
    with pytest.raises(ValueError, match="fraction"):
        relations.random()


def test_weights_are_read_in_their_order_also_where_some_are_frozen(net: gn.GrapNet) -> None:
    relations = net.layers[0].outgoing()
    before = relations.weights.detach().clone()
    with net.edit() as edit:
        edit.freeze(relations[[1, 4, 5, 10]])
    assert torch.equal(net.layers[0].outgoing()[1:].weights, before[1:])
    assert torch.equal(net.layers[0][1].outgoing().weights, before[3:6])
    net.layers[0].outgoing()[[6, 7]].weights = torch.tensor([60.0, 70.0])
    before[[6, 7]] = torch.tensor([60.0, 70.0], dtype=torch.float64)
    assert torch.equal(net.layers[0].outgoing().weights, before)
