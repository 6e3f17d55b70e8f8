"""Edits of adopted models against plain torch: hand-sliced models, silenced readers, snapshots."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn
from grapnet.core._commit import unsettled
from tests.spaces import matrix, oracle, zoo
from tests.spaces.subjects import (
    Subject,
    cuts_of,
    differing_tensors,
    every_third,
    hand_sliced,
    loss_of,
    remove,
    same_bits,
    subject,
    trained,
)

# Some spaces of these; `python -m tests.soak --spaces` runs all spaces of all families.
FAMILIES = ["bert", "gpt2", "llama", "t5", "vit", "swin", "convnext", "mamba"]
MOST = 3
NAMES = [*zoo.MODELS, *(f"hf_{name}" for name in FAMILIES)]

# At most so many free spaces of a model are refused when they are edited alone: one number is the
# width of a head of queries, keys and values, and nn.MultiheadAttention cannot follow at all.
REFUSED = {
    "multihead_encoder": 5,
    "gqa_decoder": 4,
    "gpt_tied": 4,
    "hf_bert": 2,
    "hf_gpt2": 2,
    "hf_llama": 2,
    "hf_t5": 2,
    "hf_vit": 2,
    "hf_swin": 2,
}
# The second head of GoogLeNet runs in training only, and some of its nodes are silent.
SILENT = {"googlenet": 2}


def subject_of(name: str) -> Subject:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    return subject(matrix.CASES[name]())


@pytest.mark.parametrize("name", NAMES)
def test_removing_a_third_of_a_space_equals_plain_torch(name: str) -> None:
    subject = subject_of(name)
    most = None
    if name.startswith("hf_"):
        most = MOST
    outcomes = matrix.removals(subject, most, train=1)
    refused = [outcome for outcome in outcomes if outcome.verdict == "refused"]
    assert len(refused) <= REFUSED.get(name, 0), refused
    # Otherwise the comparison with the silenced model would prove nothing.
    silent = [outcome for outcome in outcomes if outcome.effect < 1e-9]
    assert len(silent) <= SILENT.get(name, 0), silent
    assert len(outcomes) > len(refused) + len(silent)
    gn.check(subject.net)


@pytest.mark.parametrize("name", NAMES)
def test_adding_nodes_to_a_space_changes_nothing_but_sizes(name: str) -> None:
    subject = subject_of(name)
    outcomes = matrix.additions(subject, most=2)
    refused = [outcome for outcome in outcomes if outcome.verdict == "refused"]
    assert len(refused) <= REFUSED.get(name, 0), refused
    # New nodes behind a ReLU may be silent, but not all of them.
    assert any(outcome.effect > 0 for outcome in outcomes), outcomes
    gn.check(subject.net)


# With concatenations, groups, gates, norms, heads and views, each of which moves several axes.
TOGETHER = [
    "vgg",
    "resnet",
    "mobilenet_v3",
    "regnet",
    "densenet",
    "unet",
    "googlenet",
    "convnext",
    "groupnorm",
    "mixer",
    "vit",
    "gpt_tied",
    "pixel_shuffle",
    "autoencoder",
    "cascaded_concat",
    "concat_split",
    "multiple_inputs_and_outputs",
]


@pytest.mark.parametrize("name", TOGETHER)
def test_all_spaces_of_a_model_in_one_edit(name: str) -> None:
    subject = subject_of(name)
    rows = {space: [0] for space in subject.free}
    cuts = cuts_of(rows)
    whole = oracle.copy_of(subject.model)
    states = oracle.sliced_adam_state(subject.model, subject.optimizer, cuts)
    before = subject.snapshot()
    remove(subject, rows)
    smaller, _ = hand_sliced(subject, whole, cuts, states)
    assert differing_tensors(subject.model, smaller) == []
    assert oracle.adam_differences(subject.model, subject.optimizer, states) == []
    expected = oracle.outputs_of(smaller, subject.case)
    assert oracle.largest_difference(subject.outputs(), expected) == 0
    subject.net.undo()
    assert oracle.same(before, subject.snapshot()) == []


# One small model each


@pytest.fixture
def vgg() -> Subject:
    """A chain of convolutions: the spaces are called 0, 3 and 8, the last one is flattened."""
    return subject(zoo.MODELS["vgg"]())


def test_removing_and_adding_in_several_spaces_at_once(vgg: Subject) -> None:
    first = vgg.net.space("0")
    second = vgg.net.space("3")
    third = vgg.net.space("8")
    whole = oracle.copy_of(vgg.model)
    outputs = vgg.outputs()
    before = vgg.snapshot()
    cuts = cuts_of({second: [1, 4]})
    with vgg.net.edit(reason="mixed") as edit:
        edit.remove_nodes(second[[1, 4]])
        edit.add_nodes(first, 2)
        edit.add_nodes(third, 3, owner="new")
    assert [len(first), len(second), len(third)] == [8, 8, 17]
    assert vgg.model[3].weight.shape == (8, 8, 3, 3)
    assert vgg.model[8].weight.shape == (17, 8 * 4)
    born = cuts_of({first: [6, 7], third: [14, 15, 16]})
    smaller = oracle.sliced(whole, cuts, {"3": {"out_channels": 8}})
    assert differing_tensors(oracle.sliced(vgg.model, born), smaller) == []
    # New nodes are read with zeros, so that only what was removed has an effect.
    expected = oracle.outputs_of(smaller, vgg.case)
    assert oracle.largest_difference(vgg.outputs(), expected) < 1e-12
    assert oracle.largest_difference(vgg.outputs(), outputs) > 1e-9
    vgg.step()
    vgg.net.undo()
    assert len(vgg.net.owners) == 0
    shapes = {name: tensor.shape for name, tensor in oracle.tensors_of(whole).items()}
    assert shapes == {name: t.shape for name, t in oracle.tensors_of(vgg.model).items()}
    assert list(before) == list(vgg.snapshot())


def test_nodes_leave_and_come_in_one_space(vgg: Subject) -> None:
    space = vgg.net.space("3")
    before = vgg.snapshot()
    cuts = cuts_of({space: [0, 9]})
    expected = oracle.sliced(vgg.model, cuts)
    with vgg.net.edit() as edit:
        edit.remove_nodes(space[[0, 9]])
        new = edit.add_nodes(space, 3)
    assert len(space) == 11
    assert space[8:].uids.tolist() == new.uids.tolist()
    without_new = oracle.sliced(vgg.model, cuts_of({space: [8, 9, 10]}))
    assert differing_tensors(without_new, expected) == []
    vgg.net.undo()
    assert oracle.same(before, vgg.snapshot()) == []


def test_values_of_new_nodes_are_those_that_are_given(vgg: Subject) -> None:
    space = vgg.net.space("8")
    rows = torch.randn(2, 40, dtype=torch.float64)
    with vgg.net.edit() as edit:
        edit.add_nodes(space, 2, values={"8.weight": rows})
    assert torch.equal(vgg.model[8].weight[-2:], rows)
    assert torch.equal(vgg.model[11].weight[:, -2:], torch.zeros(5, 2, dtype=torch.float64))


def test_random_numbers_come_from_the_generator_that_is_given(vgg: Subject) -> None:
    state = torch.get_rng_state()
    grown = []
    for _ in range(2):
        with vgg.net.edit(generator=torch.Generator().manual_seed(3)) as edit:
            edit.add_nodes(vgg.net.space("0"), 2, readers="alike")
        grown.append(copy.deepcopy(vgg.model))
        vgg.net.undo()
    assert torch.equal(state, torch.get_rng_state())
    assert differing_tensors(*grown) == []


def test_gradients_move_with_their_nodes(vgg: Subject) -> None:
    loss_of(vgg.model, vgg.case).backward()
    space = vgg.net.space("3")
    rows = every_third(space)
    expected = oracle.sliced(vgg.model, cuts_of({space: rows}))
    remove(vgg, {space: rows})
    assert differing_tensors(vgg.model, expected) == []
    assert vgg.model[3].weight.grad.shape == vgg.model[3].weight.shape
    # The next backward pass adds to what was carried.
    loss_of(vgg.model, vgg.case).backward()
    loss_of(expected, vgg.case).backward()
    assert differing_tensors(vgg.model, expected) == []


def test_an_empty_edit_commits_nothing(vgg: Subject) -> None:
    before = vgg.snapshot()
    loss = loss_of(vgg.model, vgg.case)
    with vgg.net.edit(reason="nothing") as edit:
        pass
    with vgg.net.edit(reason="nobody") as other:
        other.remove_nodes(vgg.net.space("0")[[]])
    assert edit.receipt is None
    assert other.receipt is None
    assert vgg.net.version == 0
    assert len(vgg.net.history) == 0
    assert oracle.same(before, vgg.snapshot()) == []
    loss.backward()


def test_a_trial_takes_effect_and_leaves_no_trace(vgg: Subject) -> None:
    space = vgg.net.space("3")
    cuts = cuts_of({space: [0, 5]})
    loss_of(vgg.model, vgg.case).backward()
    loss = loss_of(vgg.model, vgg.case)
    expected = oracle.outputs_of(
        oracle.sliced(vgg.model, cuts, {"3": {"out_channels": 8}}), vgg.case
    )
    before = vgg.snapshot()
    with vgg.net.edit(trial=True) as edit:
        edit.remove_nodes(space[[0, 5]])
        assert vgg.model[3].weight.shape[0] == 10
        edit.commit()
        assert vgg.model[3].weight.shape[0] == 8
        assert vgg.model[3].out_channels == 8
        assert oracle.largest_difference(vgg.outputs(), expected) == 0
    assert oracle.same(before, vgg.snapshot()) == []
    assert vgg.net.version == 0
    with pytest.raises(RuntimeError):
        loss.backward()


def test_training_in_a_trial_stays_with_the_survivors(vgg: Subject) -> None:
    space = vgg.net.space("3")
    shapes = [parameter.shape for parameter in vgg.model.parameters()]
    before = copy.deepcopy(vgg.model)
    with vgg.net.edit(trial=True) as edit:
        edit.remove_nodes(space[:4])
        edit.commit()
        vgg.step()
    assert [parameter.shape for parameter in vgg.model.parameters()] == shapes
    assert torch.equal(vgg.model[3].weight[:4], before[3].weight[:4])
    assert not torch.equal(vgg.model[3].weight[4:], before[3].weight[4:])
    vgg.step()
    gn.check(vgg.net)


def _fail(vgg: Subject) -> None:
    with vgg.net.edit() as edit:
        edit.remove_nodes(vgg.net.space("0")[0])
        edit.add_nodes(vgg.net.space("3"), 2)
        raise ZeroDivisionError


def test_an_error_in_the_block_leaves_everything_as_it_is(vgg: Subject) -> None:
    state = torch.get_rng_state()
    loss_of(vgg.model, vgg.case).backward()
    before = vgg.snapshot()
    with pytest.raises(ZeroDivisionError):
        _fail(vgg)
    assert oracle.same(before, vgg.snapshot()) == []
    assert torch.equal(state, torch.get_rng_state())
    assert len(vgg.net.space("3")) == 10
    remove(vgg, {vgg.net.space("0"): [0]})


def test_only_one_edit_is_open_at_a_time(vgg: Subject) -> None:
    with vgg.net.edit() as edit:
        with pytest.raises(gn.errors.EditError), vgg.net.edit():
            pass
        for verb in (vgg.net.undo, vgg.net.redo):
            with pytest.raises(gn.errors.GrapNetError):
                verb()
        edit.remove_nodes(vgg.net.space("0")[0])
    assert len(vgg.net.space("0")) == 5
    with pytest.raises(gn.errors.EditError):
        edit.remove_nodes(vgg.net.space("0")[0])


@pytest.mark.parametrize(
    "illegal",
    [
        lambda net, edit: edit.remove_nodes(net.space("0")),
        lambda net, edit: edit.remove_nodes(net.space("11")[0]),
        lambda net, edit: edit.add_nodes(net.space("11"), 1),
        lambda net, edit: edit.add_nodes(net.space("0"), 1, readers="many"),
        lambda net, edit: [edit.add_nodes(net.space("0"), 1) for _ in range(2)],
        lambda net, edit: edit.add_nodes(net.space("0"), -1),
        lambda net, edit: edit.cut(net.relations("no such module")),
        lambda net, edit: edit.connect(net.space("0"), net.space("3")),
        lambda net, edit: edit.connect(net.space("0"), net.space("8")),
        lambda net, edit: edit.freeze(edit.add_nodes(net.space("0"), 1)),
        lambda net, edit: edit.set_activation(net.space("0"), "relu"),
        lambda net, edit: edit.remove_orphans(fold_bias=True),
        lambda net, edit: edit.add_nodes(
            net.space("0"), 1, values={"0.weight": torch.zeros(2, 3, 3, 3)}
        ),
    ],
    ids=[
        "every node",
        "remove pinned",
        "add pinned",
        "start",
        "twice",
        "negative",
        "cut",
        "connect",
        "connect without a tensor",
        "freeze new nodes",
        "activation",
        "orphans that leave their constants",
        "values of another shape",
    ],
)
def test_what_is_illegal_changes_nothing(vgg: Subject, illegal: Callable[[Any, Any], Any]) -> None:
    state = torch.get_rng_state()
    before = vgg.snapshot()
    with pytest.raises((gn.errors.GrapNetError, LookupError)):
        _remove_and(vgg, illegal)
    assert oracle.same(before, vgg.snapshot()) == []
    assert torch.equal(state, torch.get_rng_state())
    assert vgg.net.version == 0
    remove(vgg, {vgg.net.space("0"): [0]})


def test_outputs_are_removed_as_an_interface(vgg: Subject) -> None:
    outputs = vgg.net.space("11")
    assert outputs.pins == ("output",)
    expected = vgg.outputs()[0][:, 1:]
    with vgg.net.edit() as edit:
        edit.remove_nodes(outputs[0], interface=True)
    torch.testing.assert_close(vgg.outputs()[0], expected)
    with pytest.raises(gn.errors.EditError), vgg.net.edit() as edit:
        edit.remove_nodes(vgg.net.space("0", side="in")[0], interface=True)
    vgg.net.undo()
    assert len(outputs) == expected.shape[1] + 1


def _remove_and(vgg: Subject, illegal: Callable[[Any, Any], Any]) -> None:
    with vgg.net.edit() as edit:
        edit.remove_nodes(vgg.net.space("3")[0])
        illegal(vgg.net, edit)


def test_owners_select_nodes_across_edits(vgg: Subject) -> None:
    net = vgg.net
    before = vgg.snapshot()
    with net.edit() as edit:
        edit.set_owner(net.space("0")[:2], "first")
        edit.set_owner(net.space("8")[[3, 5]], "first")
        edit.add_nodes(net.space("3"), 2, owner="second")
    assert net.owners == ["first", "second"]
    assert len(net.select(owner="first")) == 4
    assert net.select(owner="second").uids.tolist() == net.space("3")[-2:].uids.tolist()
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[0])
    assert len(net.select(owner="first")) == 3
    with net.edit() as edit:
        edit.remove_nodes(net.select(owner="first"))
    assert [len(net.space(name)) for name in ("0", "3", "8")] == [4, 12, 12]
    assert net.owners == ["second"]
    for _ in range(3):
        net.undo()
    assert net.owners == []
    assert oracle.same(before, vgg.snapshot()) == []


def test_an_edit_of_owners_alone_touches_no_tensor(vgg: Subject) -> None:
    before = vgg.snapshot()
    with vgg.net.edit() as edit:
        edit.set_owner(vgg.net.space("0"), "all")
    assert edit.receipt is not None
    assert oracle.same(before, vgg.snapshot()) == []
    vgg.net.undo()
    assert vgg.net.owners == []


def test_followed_tensors_move_with_the_parameters(vgg: Subject) -> None:
    space = vgg.net.space("3")
    ones = {name: torch.rand_like(p) for name, p in vgg.model.named_parameters()}
    followed = gn.follow(vgg.net, ones)
    cuts = cuts_of({space: [2, 3]})
    remove(vgg, {space: [2, 3]})
    for name, tensor in ones.items():
        assert same_bits(followed[name], oracle.without(tensor, name, cuts)), name
    with vgg.net.edit() as edit:
        edit.add_nodes(space, 1)
    assert followed["3.bias"].shape == (9,)
    assert followed["3.bias"][-1] == 0
    for _ in range(2):
        vgg.net.undo()
    for name, tensor in ones.items():
        assert same_bits(followed[name], tensor), name


def test_an_averaged_copy_follows_and_is_undone(vgg: Subject) -> None:
    averaged = AveragedModel(vgg.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    gn.attach(averaged, vgg.net)
    vgg.step()
    averaged.update_parameters(vgg.model)
    start = copy.deepcopy(averaged.module)
    space = vgg.net.space("3")
    rows = every_third(space)
    cuts = cuts_of({space: rows})
    remove(vgg, {space: rows})
    expected = oracle.sliced(start, cuts, {"3": {"out_channels": len(space)}})
    assert differing_tensors(averaged.module, expected) == []
    left = oracle.outputs_of(averaged.module, vgg.case)
    assert oracle.largest_difference(left, oracle.outputs_of(expected, vgg.case)) == 0
    assert averaged.module[3].out_channels == len(space)
    vgg.net.undo()
    assert differing_tensors(averaged.module, start) == []
    assert averaged.module[3].out_channels == 10
    with vgg.net.edit() as edit:
        edit.add_nodes(space, 2)
    vgg.step()
    averaged.update_parameters(vgg.model)
    assert averaged.module[3].weight.shape == vgg.model[3].weight.shape
    gn.detach(averaged, vgg.net)
    remove(vgg, {space: [0]})
    assert averaged.module[3].weight.shape[0] == 12


def test_a_copy_of_another_shape_is_not_attached(vgg: Subject) -> None:
    averaged = AveragedModel(vgg.model)
    remove(vgg, {vgg.net.space("3"): [0]})
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(averaged, vgg.net)
    with pytest.raises(gn.errors.OptimizerError):
        gn.attach(vgg.model, vgg.net)


def test_scaler_and_scheduler_go_on(vgg: Subject) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(vgg.optimizer, step_size=1, gamma=0.5)

    def train() -> None:
        scaler.scale(loss_of(vgg.model, vgg.case)).backward()
        scaler.step(vgg.optimizer)
        scaler.update()
        scheduler.step()
        vgg.optimizer.zero_grad()

    train()
    states = (scaler.state_dict(), scheduler.state_dict())
    remove(vgg, {vgg.net.space("3"): [0, 1]})
    assert (scaler.state_dict(), scheduler.state_dict()) == states
    assert vgg.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    train()
    vgg.net.undo()
    train()
    assert vgg.optimizer.param_groups[0]["lr"] == pytest.approx(1.25e-4)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop", "Adagrad"])
def test_other_optimizers_follow(kind: str) -> None:
    case, model, _ = trained(zoo.MODELS["resnet"]())
    options = {"lr": 1e-3}
    if kind in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    loss_of(model, case).backward()
    optimizer.step()
    optimizer.zero_grad()
    net = gn.adopt(model, *case.inputs, optimizer=optimizer)
    space = net.space("layer2.0.conv2")
    cuts = cuts_of({space: [0, 3]})
    states = oracle.sliced_adam_state(model, optimizer, cuts)
    before = oracle.snapshot(model, optimizer)
    with net.edit() as edit:
        edit.remove_nodes(space[[0, 3]])
    assert oracle.adam_differences(model, optimizer, states) == []
    net.undo()
    assert oracle.same(before, oracle.snapshot(model, optimizer)) == []


def test_a_parameter_that_is_not_trained_follows_too(vgg: Subject) -> None:
    vgg.model[0].weight.requires_grad_(False)
    outputs = vgg.outputs()
    with vgg.net.edit() as edit:
        edit.add_nodes(vgg.net.space("0"), 2)
    assert vgg.model[0].weight.shape[0] == 8
    assert not vgg.model[0].weight.requires_grad
    assert oracle.largest_difference(vgg.outputs(), outputs) < 1e-12
    vgg.step()


def test_edits_run_under_no_grad_but_not_in_inference_mode(vgg: Subject) -> None:
    with torch.no_grad():
        remove(vgg, {vgg.net.space("0"): [0]})
    assert torch.is_grad_enabled()
    before = vgg.snapshot()
    with torch.inference_mode(), pytest.raises(gn.errors.EditError):
        remove(vgg, {vgg.net.space("0"): [0]})
    assert oracle.same(before, vgg.snapshot()) == []
    vgg.step()


def test_a_copy_of_the_model_is_a_plain_model(vgg: Subject) -> None:
    other = copy.deepcopy(vgg.model)
    remove(vgg, {vgg.net.space("3"): [0]})
    assert other[3].weight.shape[0] == 10
    with pytest.raises(KeyError):
        gn.adopted(other)
    net = gn.adopt(other, *vgg.case.inputs)
    with net.edit() as edit:
        edit.remove_nodes(net.space("3")[0])
    assert differing_tensors(other, vgg.model) == []


def test_a_copy_of_the_net_is_edited_alone(vgg: Subject) -> None:
    remove(vgg, {vgg.net.space("3"): [0]})
    other = copy.deepcopy(vgg.net)
    assert other.model is not vgg.model
    before = vgg.snapshot()
    start = copy.deepcopy(other.model)
    with other.edit() as edit:
        edit.remove_nodes(other.space("0")[[1, 2]])
        edit.add_nodes(other.space("8"), 1)
    assert oracle.same(before, vgg.snapshot()) == []
    assert other.model[0].weight.shape[0] == 4
    assert other.version == 2
    gn.check(other)
    other.undo()
    assert differing_tensors(other.model, start) == []
    other.undo()
    assert other.model[3].weight.shape[0] == 10
    assert oracle.same(before, vgg.snapshot()) == []


def test_the_graph_of_a_model_is_found_again(vgg: Subject) -> None:
    assert gn.adopted(vgg.model) is vgg.net
    model = vgg.model
    vgg.net = None  # type: ignore[assignment]
    gc.collect()
    with pytest.raises(KeyError):
        gn.adopted(model)


def test_check_notices_tensors_that_were_replaced(vgg: Subject) -> None:
    gn.check(vgg.net)
    kept = vgg.model[3].weight.data
    vgg.model[3].weight.data = kept[:7]
    with pytest.raises(gn.errors.InvariantError, match=r"3\.weight"):
        gn.check(vgg.net)
    with pytest.raises(gn.errors.EditError, match=r"3\.weight"):
        remove(vgg, {vgg.net.space("0"): [0]})
    vgg.model[3].weight.data = kept
    gn.check(vgg.net)
    vgg.model[3].bias = None
    with pytest.raises(gn.errors.InvariantError, match=r"3\.bias"):
        gn.check(vgg.net)


def test_a_parameter_that_was_replaced_is_noticed(vgg: Subject) -> None:
    vgg.model[3].weight = nn.Parameter(torch.zeros(7, 6, 3, 3, dtype=torch.float64))
    with pytest.raises(gn.errors.InvariantError, match=r"3\.weight"):
        gn.check(vgg.net)
    with pytest.raises(gn.errors.EditError, match=r"3\.weight"):
        remove(vgg, {vgg.net.space("0"): [0]})


def test_commits_are_replayed_on_an_equal_model(vgg: Subject) -> None:
    twin = subject(zoo.MODELS["vgg"]())
    remove(vgg, {vgg.net.space("3"): [0, 4]})
    with vgg.net.edit(reason="grow") as edit:
        edit.add_nodes(vgg.net.space("0"), 2, owner="new")
        edit.remove_nodes(vgg.net.space("8")[:3])
    vgg.net.undo()
    vgg.net.redo()
    twin.net.replay(vgg.net.history)
    assert differing_tensors(twin.model, vgg.model) == []
    assert twin.net.owners == ["new"]
    assert twin.model[3].out_channels == 8
    gn.check(twin.net)
    twin.step()
    vgg.step()
    assert differing_tensors(twin.model, vgg.model) == []
    # What was undone and redone there are four commits here.
    for _ in range(4):
        twin.net.undo()
    assert twin.model[3].weight.shape[0] == 10


def test_commits_of_another_model_are_not_replayed(vgg: Subject) -> None:
    twin = subject(zoo.MODELS["vgg"]())
    remove(vgg, {vgg.net.space("3"): [0, 4]})
    remove(twin, {twin.net.space("3"): [0]})
    before = twin.snapshot()
    with pytest.raises(gn.errors.HistoryError):
        twin.net.replay(vgg.net.history)
    assert oracle.same(before, twin.snapshot()) == []


def test_the_history_tells_what_happened(vgg: Subject) -> None:
    commit = remove(vgg, {vgg.net.space("3"): [0, 4]})
    assert [c.reason for c in vgg.net.history] == ["remove"]
    assert commit.version == 1
    assert commit.change.tensors["8.weight"].index.axes.keys() == {1}
    first = commit.change.attributes[0]
    assert (first.module, first.name, first.before, first.after) == ("3", "out_channels", 10, 8)
    assert set(commit.change.tensors) == {
        "3.weight",
        "3.bias",
        "4.weight",
        "4.bias",
        "4.running_mean",
        "4.running_var",
        "8.weight",
    }


def test_an_adopted_model_and_a_net_are_edited_together(vgg: Subject) -> None:
    net = gn.GrapNet([3, 4, 2])
    before = vgg.snapshot()
    sizes = net.sizes
    with gn.edit(vgg.net, net, reason="both") as (first, second):
        first.remove_nodes(vgg.net.space("0")[0])
        second.remove_nodes(net.layers[1][0])
    assert [vgg.model[0].out_channels, *net.sizes] == [5, 3, 3, 2]
    gn.undo(vgg.net, net)
    assert oracle.same(before, vgg.snapshot()) == []
    assert net.sizes == sizes
    with pytest.raises(gn.errors.EditError):
        _edit_both(vgg, net)
    assert oracle.same(before, vgg.snapshot()) == []
    assert net.sizes == sizes


def _edit_both(vgg: Subject, net: gn.GrapNet) -> None:
    """Asks for legal changes of both, and for one that is refused."""
    with gn.edit(vgg.net, net) as (first, second):
        first.remove_nodes(vgg.net.space("0")[0])
        second.remove_nodes(net.layers[1][0])
        first.remove_nodes(vgg.net.space("11")[0])


def test_models_with_nets_inside_are_not_adopted() -> None:
    model = nn.Sequential(nn.Linear(3, 4), gn.GrapNet([4, 2]))
    with pytest.raises(gn.errors.EditError):
        gn.adopt(model, torch.zeros(2, 3))


def test_hooks_of_the_model_stay(vgg: Subject) -> None:
    shapes: list[torch.Size] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes.append(output.shape)

    vgg.model[0].register_forward_hook(note)
    remove(vgg, {vgg.net.space("0"): [0]})
    assert shapes == []
    vgg.outputs()
    assert [shape[1] for shape in shapes] == [5]


def test_state_dicts_before_an_edit_do_not_change(vgg: Subject) -> None:
    state = vgg.model.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    remove(vgg, {vgg.net.space("3"): [0]})
    assert [name for name in kept if not same_bits(kept[name], state[name])] == []


def test_nothing_is_left_unsettled(vgg: Subject) -> None:
    remove(vgg, {vgg.net.space("3"): [0]})
    with vgg.net.edit(trial=True) as edit:
        edit.remove_nodes(vgg.net.space("3")[0])
        edit.commit()
    vgg.net.undo()
    assert unsettled == []


class Similarity(nn.Module):
    """No weight reads the nodes: two activations are contracted over them."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 6, bias=False)
        self.key = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.key(x).T


def test_new_nodes_that_only_activations_read_are_added_on_request() -> None:
    torch.manual_seed(0)
    model = Similarity().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    net = gn.adopt(model, x)
    with pytest.raises(gn.errors.EditError, match="query"), net.edit() as edit:
        edit.add_nodes(net.space("query"), 2)
    assert net.version == 0
    with net.edit() as edit:
        edit.add_nodes(net.space("query"), 2, readers="alike")
    assert model(x).shape == (5, 5)
    assert net.space("query").prove() == "exact"


def test_an_old_loss_raises_whatever_the_last_operation_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1))
    x = torch.randn(4, 3, 5, 5)
    net = gn.adopt(model, x)
    loss = model(x).sum()
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[0])
    # torch notices the saved weight before the gradient of a Parameter is reached.
    with pytest.raises(RuntimeError, match="version"):
        loss.backward()


def test_an_old_gradient_of_the_input_raises_where_sizes_are_equal() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.randn(4, 3, requires_grad=True)
    net = gn.adopt(model, x)
    loss = model(x).sum()
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[0])
        edit.add_nodes(net.space("0"), 1)
    with pytest.raises(RuntimeError, match="version"):
        loss.backward()


def test_groups_come_back_after_all_but_one_were_removed() -> None:
    found = subject(zoo.MODELS["groupnorm"]())
    groups = found.net.space("0")
    remove(found, {groups: list(range(1, len(groups)))})
    assert len(groups) == 1
    with found.net.edit() as edit:
        edit.add_nodes(groups, 2)
    norm = next(part for part in found.model.modules() if isinstance(part, nn.GroupNorm))
    assert norm.num_groups == 3
    found.step()
