"""Tests of the recorder of Gram matrices on nets."""

import copy

import pytest
import torch
from torch import Tensor

import grapnet as gn
from grapnet.errors import GrapNetError
from grapnet.rules import GramRecorder


def make(seed: int = 0) -> gn.GrapNet:
    """Returns a net of three transitions and one that skips a layer."""
    generator = torch.Generator().manual_seed(seed)
    return gn.GrapNet([6, 5, 4, 3], skips=[(1, 3)], dtype=torch.float64, generator=generator)


def data(rows: int = 40, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def activations(net: gn.GrapNet, x: Tensor, layer: int) -> Tensor:
    """Returns what a layer returns, with a constant 1 at the end."""
    found: list[Tensor] = []

    def note(module: object, args: object, output: Tensor) -> None:
        found.append(output)

    hook = net.layers[layer].register_forward_hook(note)
    with torch.no_grad():
        net(x)
    hook.remove()
    return torch.cat([found[0], torch.ones(len(x), 1, dtype=found[0].dtype)], 1)


def recorded(net: gn.GrapNet, layer: int = 2, rows: int = 40, **settings) -> GramRecorder:
    """Returns a recorder that has seen data."""
    recorder = GramRecorder(layer, **settings)
    recorder.arm(net)
    with torch.no_grad():
        net(data(rows))
    recorder.disarm()
    return recorder


class TestMatrices:
    @pytest.mark.parametrize("layer", [0, 1, 2, 3])
    def test_are_those_of_the_rows_and_of_held_out_rows(self, layer: int):
        net = make()
        recorder = recorded(net, layer, held_out=0.25)
        h = activations(net, data(), layer)
        assert recorder.held_out_gram is not None
        torch.testing.assert_close(recorder.gram + recorder.held_out_gram, h.t() @ h)
        torch.testing.assert_close(recorder.total, h.t() @ h)
        assert recorder.count == 40

    def test_add_up_over_passes(self):
        net = make()
        recorder = GramRecorder(1, held_out=0.3)
        recorder.arm(net)
        x = data(23)
        # 0.3 of 23 rows are 6.9, whatever the passes are.
        for part in x.split([1, 2, 9, 1, 10]):
            net(part)
        recorder.disarm()
        h = activations(net, x, 1)
        torch.testing.assert_close(recorder.total, h.t() @ h)
        assert recorder.count == 23
        assert recorder.held_out_gram is not None
        assert int(recorder.held_out_gram[-1, -1]) in (6, 7)

    def test_hold_out_one_of_every_four_rows_at_changing_places(self):
        net = gn.GrapNet([40, 4])
        recorder = GramRecorder(0, held_out=0.25)
        recorder.arm(net)
        net(torch.eye(40))
        is_held = recorder.held_out_gram.diagonal()[:-1].view(10, 4)
        assert torch.equal(is_held.sum(1), torch.ones(10, dtype=torch.float64))
        assert (is_held.sum(0) < 10).all()
        assert torch.equal(recorder.gram.diagonal()[:-1], 1 - is_held.flatten())

    def test_hold_out_rows_of_every_class_of_a_sorted_pass(self):
        classes = torch.arange(10).repeat_interleave(60)
        net = gn.GrapNet([10, 4])
        recorder = GramRecorder(0)
        recorder.arm(net)
        net(torch.nn.functional.one_hot(classes, 10).float())
        counts = recorder.held_out_gram.diagonal()[:-1]
        assert counts.sum() == 120
        assert counts.min() >= 10

    def test_wide_layers_have_whole_matrices(self):
        net = gn.GrapNet([300, 401, 2])
        recorder = GramRecorder(1, held_out=0)
        recorder.arm(net)
        x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
        net(x)
        recorder.disarm()
        h = activations(net, x, 1).double()
        torch.testing.assert_close(recorder.gram, h.t() @ h, atol=1e-4, rtol=1e-5)
        assert recorder.held_out_gram is None
        assert recorder.gram.dtype == torch.float64

    def test_some_rows_of_a_pass(self):
        net = make()
        recorder = recorded(net, 1, rows=10, held_out=0)
        assert recorder.count == 10
        recorder = GramRecorder(1, rows=4, held_out=0)
        recorder.arm(net)
        net(data(10))
        recorder.disarm()
        h = activations(net, data(10), 1)[[0, 2, 5, 7]]
        torch.testing.assert_close(recorder.gram, h.t() @ h)

    def test_too_large_ones_are_refused_before_anything_is_recorded(self):
        net = make()
        recorder = GramRecorder(1, most_cells=71)
        with pytest.raises(GrapNetError):
            recorder.arm(net)
        assert not recorder.armed
        GramRecorder(1, most_cells=72).arm(net)
        GramRecorder(1, most_cells=71, held_out=0).arm(net)

    def test_settings_are_checked(self):
        with pytest.raises(ValueError, match="held_out"):
            GramRecorder(1, held_out=1.0)
        with pytest.raises(ValueError, match="rows"):
            GramRecorder(1, rows=0)


class TestFollowing:
    def test_removals_in_the_layer(self):
        net = make()
        recorder = recorded(net)
        h = activations(net, data(), 2)[:, [0, 2, 4]]
        with net.edit() as edit:
            edit.remove_nodes(net.layers[2][[1, 3]])
        assert not recorder.is_stale
        torch.testing.assert_close(recorder.total, h.t() @ h)
        assert recorder.held_out_gram is not None
        assert recorder.held_out_gram.shape == (3, 3)

    def test_undo_restores_the_matrices(self):
        net = make()
        recorder = recorded(net)
        before = recorder.gram
        with net.edit() as edit:
            edit.remove_nodes(net.layers[2][[1, 3]])
        net.undo()
        assert not recorder.is_stale
        assert torch.equal(recorder.gram, before)
        net.redo()
        assert recorder.gram.shape == (3, 3)
        assert not recorder.is_stale

    def test_a_trial_leaves_nothing_behind(self):
        net = make()
        recorder = recorded(net)
        before = recorder.gram
        recorder.arm(net)
        with net.edit(trial=True) as edit:
            edit.remove_nodes(net.layers[2][[0]])
            edit.commit()
            net(data(8))
            assert recorder.gram.shape == (4, 4)
        assert torch.equal(recorder.gram, before)
        assert recorder.count == 40
        assert not recorder.is_stale

    def test_what_is_behind_the_layer_does_not_matter(self):
        net = make()
        recorder = recorded(net)
        with net.edit() as edit:
            edit.cut(net.layers[2].outgoing().smallest(count=3))
            edit.freeze(net.layers[0].outgoing().smallest(count=3))
            edit.set_owner(net.layers[1], "somebody")
            edit.assign(net.layers[3], 0.25)
        net.layers[3].biases = net.layers[3].biases + 1
        assert not recorder.is_stale


def grow(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.connect(net.layers[1], edit.add_nodes(2, 1))


def grow_before(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.connect(edit.add_nodes(1, 1), net.layers[2])


def shrink_before(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[0]])


def cut_before(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=1))


def cut_into(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.remove_nodes(net.layers[2][[0]])
        edit.cut(net.layers[2][[1]].incoming().smallest(count=1))


def activate(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.set_activation(net.layers[1][[0]], "tanh")


def assign_weights(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.assign(net.layers[1].outgoing(to=net.layers[2]).smallest(count=1), [0.5])


def assign_biases(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.assign(net.layers[1][[2]], [0.5])


def fold(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[1][[0]].incoming())
        edit.remove_orphans(fold_bias=True)


EDITS = [grow, grow_before, shrink_before, cut_before, cut_into, activate]
EDITS += [assign_weights, assign_biases, fold]


def step(net: gn.GrapNet, **settings) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, **settings)
    net(data()).sum().backward()
    optimizer.step()


class TestStaleness:
    @pytest.mark.parametrize("change", EDITS)
    def test_edits_make_it_stale_and_their_undo_does_not(self, change):
        net = make()
        recorder = recorded(net)
        assert not recorder.is_stale
        before = recorder.gram
        change(net)
        assert recorder.is_stale
        assert recorder.stale_reason
        net.undo()
        assert not recorder.is_stale
        assert torch.equal(recorder.gram, before)

    @pytest.mark.parametrize("fused", [False, True])
    def test_training_steps_make_it_stale(self, fused: bool):
        net = make()
        recorder = recorded(net)
        step(net, fused=fused)
        assert recorder.is_stale

    def test_writes_before_the_layer_make_it_stale(self):
        net = make()
        recorder = recorded(net)
        net.layers[1].biases = net.layers[1].biases + 1
        assert recorder.is_stale
        recorder = recorded(net)
        assert not recorder.is_stale
        with torch.no_grad():
            net.transitions[1].weight.mul_(2)
        assert recorder.is_stale

    def test_training_between_an_edit_and_its_undo_makes_it_stale(self):
        net = make()
        recorder = recorded(net)
        with net.edit() as edit:
            edit.remove_nodes(net.layers[2][[0]])
        step(net)
        net.undo()
        assert recorder.is_stale

    def test_training_before_an_edit_is_not_forgotten(self):
        net = make()
        recorder = recorded(net)
        step(net, fused=True)
        with net.edit() as edit:
            edit.remove_nodes(net.layers[2][[0]])
        assert recorder.is_stale

    def test_rows_after_the_change_replace_those_before(self):
        net = make()
        recorder = recorded(net)
        for change in (grow, step, cut_before):
            change(net)
            assert recorder.is_stale
            recorder.arm(net)
            with torch.no_grad():
                net(data(12, seed=5))
            recorder.disarm()
            h = activations(net, data(12, seed=5), 2)
            assert not recorder.is_stale
            assert recorder.count == 12
            torch.testing.assert_close(recorder.total, h.t() @ h)

    def test_a_copy_is_stale_and_can_go_on(self):
        net = make()
        twin = copy.deepcopy(recorded(net))
        assert twin.is_stale
        assert twin.count == 40
        twin.arm(net)
        net(data(7))
        assert not twin.is_stale
        assert twin.count == 7

    def test_a_loaded_state_is_stale(self):
        net = make()
        recorder = recorded(net)
        other = GramRecorder(2)
        other.load_state_dict(recorder.state_dict())
        other.bind(net)
        assert other.is_stale
        assert torch.equal(other.gram, recorder.gram)

    def test_without_rows_nothing_is_stale_and_there_is_no_matrix(self):
        net = make()
        recorder = GramRecorder(2)
        recorder.arm(net)
        assert not recorder.is_stale
        with pytest.raises(GrapNetError):
            _ = recorder.gram

    def test_another_net_is_refused_and_changes_nothing(self):
        net = make()
        recorder = recorded(net)
        with pytest.raises(GrapNetError):
            recorder.arm(make(3))
        assert not recorder.is_stale
        assert recorder.net is net
