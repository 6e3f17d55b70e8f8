"""gn.attach(averaged, net): a copy goes through every commit of the net."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn
from tests.fingerprint import fingerprint

from .plain import Values, batch, everything, make_net, rewire, swap_one, train


def averaged_net(net: gn.GrapNet) -> tuple[AveragedModel, gn.GrapNet]:
    """Returns an attached moving average that has moved away from the net, and the copy inside."""
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    gn.attach(averaged, net)
    train_and_average(net, averaged, 4)
    return averaged, averaged.module


def train_and_average(net: gn.GrapNet, averaged: AveragedModel, steps: int) -> None:
    optimizer = SGD(net.parameters(), lr=0.02)
    for seed in range(steps):
        train(net, optimizer, [seed])
        averaged.update_parameters(net)


def expected(old: Values, net: gn.GrapNet, reborn: set[Any], returning: Values) -> Values:
    """Returns what a copy must hold after an edit, by hand."""
    found = {}
    for key, (value, frozen) in everything(net).items():
        kept = old if key in old and key not in reborn else returning
        found[key] = (kept[key][0] if key in kept else value), frozen
    return found


def test_a_copy_goes_through_edit_undo_redo_and_trial() -> None:
    net = make_net()
    averaged, twin = averaged_net(net)
    assert everything(twin) != everything(net)
    reborn = {(1, 6)}
    lost = [everything(twin)]
    verbs: list[Callable[[gn.GrapNet], Any]] = [
        rewire,
        gn.GrapNet.undo,
        gn.GrapNet.redo,
        gn.GrapNet.undo,
    ]
    for n, verb in enumerate(verbs):
        before = everything(twin)
        lost.append(before)
        verb(net)
        assert everything(twin) == expected(before, net, reborn, lost[-2] if n else {})
        gn.check(twin)
        assert (twin.version, [c.version for c in twin.history]) == (
            net.version,
            [c.version for c in net.history],
        )
        train_and_average(net, averaged, 2)
    values = everything(twin)
    version = twin.version
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=3))
        edit.connect(net.layers[0], edit.add_nodes(1, 2))
        edit.freeze(net.layers[2])
        edit.commit()
        assert everything(twin) == expected(values, net, set(), {})
        assert twin(batch(0)).isfinite().all()
    assert (everything(twin), twin.version) == (values, version)
    gn.check(twin)
    train_and_average(net, averaged, 2)
    net.redo()
    train_and_average(net, averaged, 2)


def test_averaging_goes_on_as_if_nothing_had_happened() -> None:
    net = make_net()
    averaged, twin = averaged_net(net)
    rewire(net)
    for seed in range(3):
        before = everything(twin)
        present = everything(net)
        train(net, SGD(net.parameters(), lr=0.02), [seed])
        averaged.update_parameters(net)
        present = everything(net)
        for key, (value, frozen) in everything(twin).items():
            assert frozen == present[key][1]
            wanted = 0.9 * before[key][0] + 0.1 * present[key][0]
            if frozen:
                wanted = present[key][0]
            assert value == pytest.approx(wanted, rel=1e-12, abs=1e-14), key
    torch.testing.assert_close(twin(batch(0)), twin.walk(batch(0)))
    assert averaged.n_averaged == 7


@pytest.mark.parametrize("is_attached", [True, False])
def test_an_average_stays_with_its_relation_only_where_the_copy_is_attached(
    is_attached: bool,
) -> None:
    net = make_net()
    averaged = AveragedModel(net)
    if is_attached:
        gn.attach(averaged, net)
    averaged.update_parameters(net)
    before = everything(averaged.module)
    # As many relations as before, so that torch alone does not notice.
    swap_one(net)
    averaged.update_parameters(net)
    after = everything(averaged.module)
    # Nothing was trained, so no average should move.
    assert before[0, 6] == everything(net)[0, 6]
    assert (before[0, 6] == after[0, 6]) is is_attached


def test_the_first_average_is_a_copy_of_what_is_frozen_too() -> None:
    net = make_net()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    gn.attach(averaged, net)
    train(net, SGD(net.parameters(), lr=0.02), range(3))
    rewire(net)
    assert everything(averaged.module) != everything(net)
    averaged.update_parameters(net)
    assert everything(averaged.module) == everything(net)


@pytest.mark.parametrize("cut", [[5], [5, 6]], ids=["one", "two"])
def test_orphans_leave_the_copy_its_own_constants(cut: list[int]) -> None:
    net = make_net((5, 4, 4, 3, 2))
    averaged, twin = averaged_net(net)
    # node 9 hears of 5 alone, so that it is an orphan without 5, by the bias it is left
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing(to=cut))
        edit.cut(net.layers[1][1:].outgoing(to=[9]))
        edit.unfreeze(net.layers[2][3], incoming=False, outgoing=False)
    x = batch(0)
    before = (net(x), twin(x))
    values = everything(twin)
    with net.edit() as edit:
        edit.remove_orphans(fold_bias=True)
    assert net.sizes == twin.sizes == [5, 4 - len(cut), 3, 3, 2]
    torch.testing.assert_close((net(x), twin(x)), before)
    net.undo()
    assert {key: value for key, (value, _) in everything(twin).items()} == pytest.approx(
        {key: value for key, (value, _) in values.items()}
    )
    net.redo()
    torch.testing.assert_close((net(x), twin(x)), before)
    train_and_average(net, averaged, 2)
    gn.check(twin)


def test_orphans_that_send_nothing_in_the_net_still_leave_the_copy_what_they_send_there() -> None:
    net = gn.GrapNet([3, 2, 2], activation="relu", dtype=torch.float64)
    twin = copy.deepcopy(net)
    gn.attach(twin, net)
    with net.edit() as edit:
        edit.cut(net.layers[1][0].incoming())
    with torch.no_grad():
        net.layers[1].bias[0] = -1.0
        twin.layers[1].bias[0] = 1.0
    x = batch(0, 3)
    biases = net.layers[2].biases.tolist()
    before = twin(x)
    values = everything(twin)
    with net.edit() as edit:
        edit.remove_orphans(fold_bias=True)
    assert net.layers[2].biases.tolist() == biases != twin.layers[2].biases.tolist()
    torch.testing.assert_close(twin(x), before)
    net.undo()
    assert everything(twin) == values
    net.redo()
    torch.testing.assert_close(twin(x), before)


def test_a_loop_of_ones_own_over_a_plain_copy() -> None:
    net = make_net()
    twin = copy.deepcopy(net).float()  # in its own precision
    gn.attach(twin, net)
    rewire(net)
    train(net, SGD(net.parameters(), lr=0.1), range(3))
    with torch.no_grad():
        for mine, other in zip(twin.parameters(), net.parameters(), strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, torch.float32)
            mine.lerp_(other.float(), 1.0)
    assert all(
        torch.equal(m, o.float()) for m, o in zip(twin.parameters(), net.parameters(), strict=True)
    )
    gn.check(twin)


class Model(nn.Module):
    """An encoder and one head or two."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5, dtype=torch.float64)
        self.heads = nn.ModuleList(make_net() for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x).tanh()
        return torch.stack([head(features) for head in self.heads]).sum(0)


def test_a_net_inside_a_model_is_found() -> None:
    model = Model()
    (net,) = model.heads
    assert isinstance(net, gn.GrapNet)
    averaged = AveragedModel(model)
    gn.attach(averaged, net)
    optimizer = Adam(model.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    for seed in range(6):
        if seed == 3:
            rewire(net)
        optimizer.zero_grad()
        model(batch(seed, 6)).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    copied = averaged.module.heads[0]
    assert [p.shape for p in copied.parameters()] == [p.shape for p in net.parameters()]
    assert averaged(batch(0, 6)).isfinite().all()


def test_of_several_copies_the_one_that_is_meant_must_be_named() -> None:
    model = Model(2)
    first, second = model.heads
    averaged = AveragedModel(model)
    with pytest.raises(gn.errors.OptimizerError, match="attach the copy itself"):
        gn.attach(averaged, first)
    gn.attach(averaged.module.heads[0], first)
    gn.attach(averaged.module.heads[1], second)
    rewire(first)
    assert averaged.module.heads[0].sizes == first.sizes
    assert averaged.module.heads[1].sizes == second.sizes
    gn.detach(averaged.module.heads[0], first)
    later = AveragedModel(model)
    gn.attach(later, first)  # wired differently now, so only one can be meant
    averaged.update_parameters(model)


def test_a_copy_that_stops_following_one_net_follows_the_other() -> None:
    net = make_net()
    other = copy.deepcopy(net)
    twin = copy.deepcopy(net)
    gn.attach(twin, net)
    gn.attach(twin, other)
    gn.detach(twin, net)
    before = twin.version
    rewire(net)
    assert twin.version == before
    rewire(other)
    assert twin.version == other.version
    gn.check(twin)


def test_what_is_no_copy_is_refused() -> None:
    net = make_net()
    late = AveragedModel(net)
    rewire(net)
    for module, message in (
        (late, r"layers of \[5, 4, 4, 3\] nodes where the net has \[5, 6, 3, 3\]"),
        (nn.Linear(2, 2), "holds no copy"),
        (net, "holds the net itself"),
        (nn.Sequential(net), "holds the net itself"),
    ):
        with pytest.raises(gn.errors.OptimizerError, match=message):
            gn.attach(module, net)
    for freeze in (
        lambda held, edit: edit.freeze(held.layers[3], incoming=False),
        lambda held, edit: edit.freeze(held.layers[0].outgoing()),
    ):
        held = copy.deepcopy(net)
        with held.edit() as edit:
            freeze(held, edit)
        with pytest.raises(gn.errors.OptimizerError):
            gn.attach(held, net)
    swapped = copy.deepcopy(net)
    swap_one(swapped)
    with pytest.raises(gn.errors.OptimizerError, match="transition 0 has other relations"):
        gn.attach(swapped, net)
    with pytest.raises(ValueError, match="about the state of optimizers"):
        gn.attach(copy.deepcopy(net), net, survivors="renew")


def test_a_copy_that_was_edited_by_itself_stops_the_next_edit() -> None:
    net = make_net()
    averaged, twin = averaged_net(net)
    swap_one(twin)
    before = fingerprint(net)
    with pytest.raises(gn.errors.OptimizerError):
        rewire(net)
    assert fingerprint(net) == before
    gn.detach(averaged, net)
    rewire(net)
    assert twin.sizes != net.sizes


def test_undo_gives_the_optimizer_of_a_copy_its_state_back() -> None:
    net = make_net()
    _, twin = averaged_net(net)
    optimizer = Adam(twin.parameters())
    gn.attach(optimizer, twin)
    train(twin, optimizer, range(2))
    held = {p: state["exp_avg"].clone() for p, state in optimizer.state.items()}
    rewire(net)
    net.undo()
    assert [commit.undoes for commit in twin.history] == [commit.undoes for commit in net.history]
    assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in held.items())


def test_a_copy_from_a_file_without_undo_goes_back_with_the_net(tmp_path: Path) -> None:
    net = make_net()
    rewire(net)
    gn.save(tmp_path / "net", net)
    twin = gn.load(tmp_path / "net")
    gn.attach(twin, net)
    net.undo()
    assert everything(twin) == everything(net)
    net.redo()
    assert everything(twin) == everything(net)
    assert twin.version == net.version
    gn.check(twin)


def cut_one(net: gn.GrapNet, layer: int, slot: int) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[layer][0], slots=[slot])


def connect_one(net: gn.GrapNet, row: int) -> None:
    with net.edit() as edit:
        edit.connect(net.layers[0][row], net.layers[1][0], weights="zero")


# The commits of the net, and those of a copy that ends with the same wiring.
WAYS: dict[str, tuple[Any, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "cuts": (cut_one, [(0, 0), (0, 2)], [(0, 3), (0, 0)]),
    "cuts in two transitions": (cut_one, [(0, 0), (2, 0)], [(2, 0), (0, 0)]),
    "connections": (connect_one, [(1,), (3,)], [(3,), (1,)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_went_another_way_to_the_same_wiring_goes_back_as_the_net_does(
    way: str,
) -> None:
    act, mine, theirs = WAYS[way]
    net = make_net()
    with net.edit() as edit:
        edit.cut(net.layers[0][[1, 3]].outgoing(to=net.layers[1][0]))
    twin = copy.deepcopy(net)
    for one, steps in ((net, mine), (twin, theirs)):
        for step in steps:
            act(one, *step)
    assert everything(twin) == everything(net)
    gn.attach(twin, net)
    net.undo()
    assert everything(twin) == everything(net)
    gn.check(twin)


def test_a_copy_of_an_earlier_version_takes_that_of_the_net_when_neither_can_undo() -> None:
    net = make_net()
    net.journal.undo_limit = 0
    twin = copy.deepcopy(net)
    with net.edit() as edit:
        edit.set_owner(net.layers[1], "a")
    gn.attach(twin, net)
    assert twin.version == net.version
    rewire(net)
    assert everything(twin) == everything(net)


def test_a_copy_made_inside_a_trial_returns_with_the_net() -> None:
    net = make_net()
    before = everything(net)
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=3))
        edit.commit()
        twin = copy.deepcopy(net)
        gn.attach(twin, net)
    assert everything(twin) == everything(net) == before
    assert twin.version == net.version
    rewire(net)
    assert everything(twin) == everything(net)
    gn.check(twin)


def test_a_copy_attached_late_takes_the_net_s_values_for_what_it_never_had() -> None:
    net = make_net()
    rewire(net)
    averaged = AveragedModel(net)
    with net.edit() as edit:
        # a version that the copy has not seen, and that moves nothing
        edit.set_owner(net.layers[1], "a")
    gn.attach(averaged, net)
    net.undo()
    net.undo()
    assert everything(averaged.module) == everything(net)
    assert averaged.module.version == net.version


def test_a_copy_takes_back_as_many_commits_as_the_net() -> None:
    net = make_net()
    _, twin = averaged_net(net)
    before = everything(twin)
    net.journal.undo_limit = 20
    for verb in (swap_one, gn.GrapNet.undo):
        for _ in range(18):
            verb(net)
    assert everything(twin) == before


@pytest.mark.parametrize("whose", ["net", "copy"])
@pytest.mark.parametrize("limit", [0, 1])
def test_undo_takes_back_both_or_neither_whatever_their_journals_keep(
    whose: str, limit: int
) -> None:
    net = make_net()
    _, twin = averaged_net(net)
    rewire(net)
    (net if whose == "net" else twin).journal.undo_limit = limit
    before = (fingerprint(net), fingerprint(twin))
    try:
        net.undo()
    except gn.errors.HistoryError:
        assert (fingerprint(net), fingerprint(twin)) == before
        assert limit == 0
    else:
        assert net.sizes == twin.sizes == [5, 4, 4, 3]
    for one in (net, twin):
        gn.check(one)
        assert one.version == one.history[-1].version


def test_columns_of_a_policy_follow_and_may_not_come_or_leave() -> None:
    net = make_net()
    without = copy.deepcopy(net)
    net.execution.use("attention", transition=1, generator=torch.Generator().manual_seed(3))
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(without, net)
    averaged, twin = averaged_net(net)
    rewire(net)
    assert [c.value.shape for c in twin.columns.values()] == [
        c.value.shape for c in net.columns.values()
    ]
    train_and_average(net, averaged, 2)
    with pytest.raises(gn.errors.OptimizerError):
        net.execution.use("auto")
    gn.detach(averaged, net)
    net.execution.use("auto")


def test_neither_the_net_nor_the_copy_keeps_the_other_alive() -> None:
    net = make_net()
    averaged, _ = averaged_net(net)
    gone = weakref.ref(averaged.module)
    del averaged, _
    gc.collect()
    assert gone() is None
    rewire(net)
    kept, _ = averaged_net(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert isinstance(kept, AveragedModel)


def test_buffers_can_be_averaged_as_well() -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([5, 4, 3], dtype=torch.float64)
    averaged = AveragedModel(net, use_buffers=True)
    gn.attach(averaged, net)
    train_and_average(net, averaged, 3)
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[:7])
    mean = averaged.module.transitions[0].frozen_values.clone()
    frozen = net.transitions[0].frozen_values
    train_and_average(net, averaged, 1)
    expected = mean + (frozen - mean) / 4
    torch.testing.assert_close(averaged.module.transitions[0].frozen_values, expected)
    assert not torch.equal(mean, frozen)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing()[5:9])
    train_and_average(net, averaged, 1)
    gn.check(averaged.module)
