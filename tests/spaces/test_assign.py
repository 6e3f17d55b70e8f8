"""edit.assign on adopted models, against plain torch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet.core import _staging
from grapnet.spaces._gates import Gates
from tests.spaces import oracle, zoo
from tests.spaces.subjects import Subject, subject


def network() -> nn.Module:
    """Returns a small convolutional network with a norm and a Linear."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4, 3),
    )


@pytest.fixture
def found() -> Subject:
    torch.manual_seed(0)
    return subject(zoo.Case(network(), (torch.randn(4, 2, 6, 6),)))


@pytest.fixture
def tied() -> Subject:
    return subject(zoo.MODELS["gpt_tied"]())


def parameter_of(found: Subject, name: str) -> Any:
    """Returns a Parameter, also one of which relations are cut."""
    return dict(found.model.named_parameters())[name]


def random_like(tensor: Tensor, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=random)


def moment(found: Subject, name: str) -> Tensor:
    return found.optimizer.state[parameter_of(found, name)]["exp_avg"].clone()


def test_an_assignment_alone_equals_a_copy_and_does_not_run_the_gates(
    found: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foresee(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing moves")

    monkeypatch.setattr(Gates, "foresee", foresee)
    before = found.snapshot()
    outputs = found.outputs()
    plain = copy.deepcopy(found.model)
    values = {}
    for name in ("0.weight", "1.weight", "3.weight", "6.bias"):
        values[name] = random_like(parameter_of(found, name))
        plain.get_parameter(name).data.copy_(values[name])
    with found.net.edit(reason="assign") as edit:
        for name, numbers in values.items():
            edit.assign(parameter_of(found, name), numbers)
    assert edit.receipt is not None
    count = sum(numbers.numel() for numbers in values.values())
    assert edit.receipt.counts["coordinates_assigned"] == count
    assert oracle.largest_difference(found.outputs(), oracle.outputs_of(plain, found.case)) == 0
    assert oracle.largest_difference(found.outputs(), outputs) > 0
    found.net.undo()
    assert oracle.same(before, found.snapshot()) == []
    found.net.redo()
    assert oracle.largest_difference(found.outputs(), oracle.outputs_of(plain, found.case)) == 0


def test_undo_drops_the_training_of_assigned_parameters_alone(found: Subject) -> None:
    weight = parameter_of(found, "3.weight")
    old = weight.detach().clone()
    state = moment(found, "3.weight")
    with found.net.edit() as edit:
        edit.assign(weight, random_like(weight))
        edit.remove_nodes(found.net.space("0")[[1, 4]])
    assert torch.equal(weight, random_like(old)[:, [0, 2, 3, 5]])
    kept = [0, 2, 3, 5]
    assert torch.equal(moment(found, "3.weight"), state[:, kept])
    assert edit.receipt is not None
    assert edit.receipt.counts["coordinates_assigned"] == weight.numel()
    for _ in range(3):
        found.step()
    trained = parameter_of(found, "6.weight").detach().clone()
    assert not torch.equal(weight, random_like(old)[:, kept])
    receipt = found.net.undo()
    assert receipt.counts["coordinates_assigned"] == old[:, kept].numel()
    assert torch.equal(weight, old)
    assert torch.equal(moment(found, "3.weight"), state)
    assert torch.equal(parameter_of(found, "6.weight"), trained)


def test_growth_beside_an_assignment_leaves_the_values_to_what_was_there(found: Subject) -> None:
    weight = parameter_of(found, "3.weight")
    outputs = found.outputs()
    values = random_like(weight)
    with found.net.edit() as edit:
        edit.add_nodes(found.net.space("0"), 2)
        edit.assign(weight, values)
        edit.cut(found.net.relations("3")[:4])
    whole = found.net._grids()["3.weight"].whole
    assert whole.shape == (5, 8, 3, 3)
    kept = whole[:, :6].flatten(2).abs().sum(2) > 0
    assert int((~kept).sum()) == 4
    assert torch.equal(whole[:, :6][kept], values[kept])
    assert not whole[:, 6:].any()
    found.net.undo()
    assert oracle.largest_difference(found.outputs(), outputs) == 0


def test_an_opened_weight_takes_values_of_its_rectangle(found: Subject) -> None:
    with found.net.edit() as edit:
        edit.cut(found.net.relations("3")[::3])
        edit.freeze(found.net.space("3")[:2], outgoing=False)
    found.step()
    before = found.snapshot()
    outputs = found.outputs()
    module: Any = found.model[3]  # pyright: ignore[reportIndexIssue]
    weight = parameter_of(found, "3.weight")
    whole = module.weight.detach().clone()
    is_cut = (whole.flatten(2) == 0).all(2)[:, :, None, None].expand_as(whole)
    is_free = ~is_cut
    is_free[:2] = False
    values = torch.where(is_free, random_like(whole), whole)
    values[is_cut] = torch.nan
    with found.net.edit() as edit:
        edit.assign(weight, values)
    assert edit.receipt is not None
    assert edit.receipt.counts["coordinates_assigned"] == int(is_free.sum()) == weight.numel()
    assert torch.equal(module.weight, torch.where(is_cut, 0.0, values))
    for _ in range(2):
        found.step()
    found.net.undo()
    assert torch.equal(module.weight, whole)
    found.net.redo()
    found.net.undo()
    # The norm has been trained since.
    with found.net.edit(trial=True) as edit:
        edit.assign(weight, values)
        edit.commit()
    assert torch.equal(module.weight, whole)
    assert oracle.largest_difference(found.outputs(), outputs) > 0
    assert before.keys() == found.snapshot().keys()


def test_frozen_numbers_change_only_where_the_edit_unfreezes_or_cuts_them(found: Subject) -> None:
    with found.net.edit() as edit:
        edit.freeze(found.net.relations("3")[:5])
    weight = parameter_of(found, "3.weight")
    values = random_like(found.net._grids()["3.weight"].whole)
    before = found.snapshot()
    with pytest.raises(gn.errors.FrozenError), found.net.edit() as edit:
        edit.assign(weight, values)
    assert oracle.same(before, found.snapshot()) == []
    outputs = found.outputs()
    for verb in ("unfreeze", "cut"):
        with found.net.edit() as edit:
            edit.assign(weight, values)
            getattr(edit, verb)(found.net.relations("3")[:5])
        whole = found.net._grids()["3.weight"].whole
        is_there = whole != 0
        assert torch.equal(whole[is_there], values[is_there])
        assert int((~is_there).sum()) == (45 if verb == "cut" else 0)
        found.net.undo()
        assert oracle.same(before, found.snapshot()) == []
    assert oracle.largest_difference(found.outputs(), outputs) == 0


def test_relations_with_several_numbers_are_assigned_in_their_order(found: Subject) -> None:
    relations = found.net.relations("3")[1::4]
    assert relations.weights.shape[1] == 9
    before = found.snapshot()
    values = random_like(relations.weights)
    behind = found.net.relations("6")[::2]
    with found.net.edit() as edit:
        edit.assign(relations, values)
        edit.assign(behind, random_like(behind.weights, seed=1))
    assert torch.equal(relations.weights, values)
    assert torch.equal(behind.weights, random_like(behind.weights, seed=1))
    found.net.undo()
    assert oracle.same(before, found.snapshot()) == []


def test_a_tied_parameter_is_one_assignment(tied: Subject) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in tied.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    (shared,) = [held for held in names.values() if len(held) > 1]
    weight = tied.model.get_parameter(shared[1])
    before = tied.snapshot()
    with tied.net.edit() as edit:
        edit.assign(weight, random_like(weight))
    assert edit.receipt is not None
    assert edit.receipt.counts["coordinates_assigned"] == weight.numel()
    for name in shared:
        assert torch.equal(tied.model.get_parameter(name), random_like(weight))
    tied.net.undo()
    assert oracle.same(before, tied.snapshot()) == []


def test_what_is_impossible_leaves_everything_as_it_was(found: Subject) -> None:
    weight = parameter_of(found, "3.weight")
    wrong = random_like(weight)
    wrong[0, 0, 0, 0] = torch.inf
    before = found.snapshot()
    cases: list[tuple[type[Exception], Any]] = [
        (gn.errors.EditError, lambda edit: edit.assign(weight, weight.detach()[:1])),
        (gn.errors.EditError, lambda edit: edit.assign(weight, wrong)),
        (gn.errors.EditError, lambda edit: edit.assign(nn.Parameter(weight.detach()), wrong)),
        (gn.errors.EditError, lambda edit: edit.assign(found.net.relations("3"), [1.0, 2.0])),
        (
            gn.errors.EditError,
            lambda edit: [edit.assign(weight, weight.detach()) for _ in range(2)],
        ),
        (
            gn.errors.EditError,
            lambda edit: [
                edit.assign(weight, weight.detach()),
                edit.assign(found.net.relations("3")[:1], 1.0),
            ],
        ),
        (TypeError, lambda edit: edit.assign(found.net.space("0"), 1.0)),
    ]
    for kind, ask in cases:
        with pytest.raises(kind), found.net.edit() as edit:
            ask(edit)
        assert oracle.same(before, found.snapshot()) == []
    # A number that leaves in the same edit is not used.
    with found.net.edit() as edit:
        edit.assign(weight, wrong)
        edit.remove_nodes(found.net.space("0")[0])
    assert torch.equal(weight, wrong[:, 1:])


def test_another_memory_format_stays(found: Subject) -> None:
    weight = parameter_of(found, "3.weight")
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    values = random_like(weight)
    with found.net.edit() as edit:
        edit.assign(weight, values)
    assert torch.equal(weight, values)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    found.step()
    found.net.undo()


def test_an_old_backward_raises(found: Subject) -> None:
    output = found.model(*found.case.inputs)
    with found.net.edit() as edit:
        edit.assign(parameter_of(found, "6.bias"), torch.ones(3))
    with pytest.raises((gn.errors.StaleTopologyError, RuntimeError)):
        output.sum().backward()


def test_files_copies_and_staging_follow(
    found: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_staging, "SMALL", 0)
    path = tmp_path / "model.safetensors"
    averaged = AveragedModel(found.model)
    gn.attach(averaged, found.net)
    found.step()
    averaged.update_parameters(found.model)
    averages = copy.deepcopy(averaged.module.state_dict())
    outputs = found.outputs()
    weight = parameter_of(found, "3.weight")
    with found.net.edit(memory="low") as edit:
        edit.assign(weight, random_like(weight))
        edit.remove_nodes(found.net.space("0")[:2])
        edit.cut(found.net.relations("6")[::2])
    module: Any = averaged.module
    assert torch.equal(module[3].weight, random_like(torch.empty(5, 6, 3, 3).double())[:, 2:])
    gn.save(path, found.net, optimizer=found.optimizer, undo=True, history="full")
    second = subject(zoo.Case(network(), found.case.inputs))
    gn.restore(path, into=second.net, optimizer=second.optimizer)
    assert repr(second.net.history) == repr(found.net.history)
    for one in (found, second):
        one.net.undo()
        assert oracle.largest_difference(one.outputs(), outputs) == 0
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, parameter_of(second, name))
        assert torch.equal(moment(found, name), moment(second, name))
    for name, tensor in averaged.module.state_dict().items():
        assert torch.equal(tensor, averages[name])
