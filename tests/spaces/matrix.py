"""The matrix: every kind of edit on every space of a model, compared with plain torch.

`tests/spaces/test_edits.py` runs it over the small models, `python -m tests.soak --spaces` over all
of them and in full.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import grapnet as gn
from grapnet.core._opened import FREE, opened_of
from grapnet.core._sets import RelationSet
from grapnet.spaces import Space
from grapnet.spaces._weights import Weight
from tests.spaces import huggingface, oracle, zoo
from tests.spaces.subjects import (
    Subject,
    cells_of,
    classes_of,
    cuts_of,
    differing_tensors,
    every_third,
    hand_sliced,
    is_contracted,
    loss_of,
    remove,
    same_bits,
    step,
    zeros_of,
)
from tests.spaces.zoo import Case

CASES: dict[str, Callable[[], Case]] = dict(zoo.MODELS)
CASES |= {f"hf_{name}": build for name, build in huggingface.FAMILIES.items()}


class Outcome(NamedTuple):
    """What became of an edit."""

    space: str
    verdict: str  # of the space, or "refused"
    effect: float  # on the outputs for a removal, on gradients for new nodes; NaN if not defined


def spread(found: list[Any], most: int | None) -> list[Any]:
    """Returns at most so many of some spaces or weights, evenly from the first to the last; None:
    all of them.
    """
    if most is None or len(found) <= most:
        return found
    return [found[round(n * (len(found) - 1) / (most - 1))] for n in range(most)]


def removals(subject: Subject, most: int | None = None, train: int | None = None) -> list[Outcome]:
    """Removes a third of the nodes of each space and compares everything that must follow.

    Args:
        subject: The model.
        most: At most so many spaces; all by default.
        train: So many spaces are also trained after the removal; all by default.
    """
    outcomes = []
    for number, space in enumerate(spread(subject.free, most)):
        trains = train is None or number < train
        outcomes.append(_removal(subject, space, trains))
    return outcomes


def _removal(subject: Subject, space: Space, trains: bool) -> Outcome:
    """Removes, undoes and redoes, perhaps trains, and undoes."""
    model = subject.model
    net = subject.net
    rows = every_third(space)
    cuts = cuts_of({space: rows})
    zeros = zeros_of(space, rows)
    whole = oracle.copy_of(model)
    silent = oracle.outputs_of(oracle.silenced(model, zeros), subject.case)
    effect = float("nan")
    if zeros:
        effect = oracle.largest_difference(silent, subject.outputs())
    states = oracle.sliced_adam_state(model, subject.optimizer, cuts)
    keys = list(model.state_dict())
    classes = classes_of(model)
    before = subject.snapshot()
    loss = loss_of(model, subject.case)
    try:
        remove(subject, {space: rows})
    except gn.errors.EditError:
        assert oracle.same(before, subject.snapshot()) == [], space.name
        loss.backward()
        model.zero_grad()
        return Outcome(space.name, "refused", effect)

    after = subject.snapshot()
    label = f"{space.name}: {space.verdict}"
    outputs = subject.outputs()
    smaller, twin = hand_sliced(subject, whole, cuts, states)
    assert differing_tensors(model, smaller) == [], label
    assert oracle.adam_differences(model, subject.optimizer, states) == [], label
    assert oracle.largest_difference(outputs, oracle.outputs_of(smaller, subject.case)) == 0, label
    assert space.verdict in ("exact", "normalised", "differs"), label
    if space.verdict == "exact":
        assert oracle.largest_difference(outputs, silent) < 1e-10, label
    identities = [key for key in before if key.startswith("identity")]
    assert [key for key in identities if before[key] != after[key]] == [], label
    assert list(model.state_dict()) == keys, label
    assert classes_of(model) == classes, label
    assert is_refused(loss), label
    model.zero_grad()

    net.undo()
    assert oracle.same(before, subject.snapshot()) == [], label
    if trains:
        net.redo()
        assert oracle.same(after, subject.snapshot()) == [], label
        subject.step()
        step(smaller, twin, subject.case)
        assert differing_tensors(model, smaller) == [], f"{label}: a step of training"
        net.undo()
        subject.step()
    return Outcome(space.name, space.verdict, effect)


def relations(subject: Subject, most: int | None = None) -> list[Outcome]:
    """Cuts a third of the relations of each weight, freezes others, and compares with masks."""
    outcomes = []
    for weight in spread(list(subject.net.transitions), most):
        before = subject.snapshot()
        outcomes.append(_rewiring(subject, weight))
        assert oracle.same(before, subject.snapshot()) == [], weight.name
    return outcomes


def _rewiring(subject: Subject, weight: Weight) -> Outcome:
    """Cuts relations, trains a copy with others frozen, and undoes."""
    model = subject.model
    net = subject.net
    label = repr(weight)
    numbers = torch.arange(weight.size)
    cells = _cells(subject, weight, numbers[::3])
    parameter = weight.grid.parameter
    whole = oracle.copy_of(model)
    masked = oracle.copy_of(model)
    oracle.tensors_of(masked)[weight.name].data[cells] = 0.0
    outputs = oracle.outputs_of(masked, subject.case)
    effect = oracle.largest_difference(outputs, subject.outputs())
    states = oracle.sliced_adam_state(model, subject.optimizer, {}).get(weight.name, {})
    loss = loss_of(model, subject.case)
    relations = net.relations(weight.name)
    t = net.transitions.index(weight)
    with net.edit(reason="cut", allow_dead=True) as edit:
        edit.cut(RelationSet(net, {t: numbers[::3].int()}))
    assert net.history[-1].counts["relations_removed"] == len(numbers[::3]), label
    assert is_refused(loss), label
    model.zero_grad()
    with pytest.raises(gn.errors.StaleRelationsError):
        relations.weights  # noqa: B018
    # Exactly the numbers of the relations are gone, from the Parameter and from its state.
    assert weight.grid.parameter is parameter, label
    assert parameter.numel() == int((~cells).sum()), label
    assert same_bits(parameter.detach().view(-1), oracle.tensors_of(whole)[weight.name][~cells])
    for key, value in states.items():
        if value.shape == cells.shape:
            found = subject.optimizer.state[parameter][key]
            assert same_bits(found.view(-1), value[~cells]), f"{label}: {key}"
    assert oracle.largest_difference(subject.outputs(), outputs) < 1e-12, label
    loss_of(model, subject.case).backward()
    loss_of(masked, subject.case).backward()
    _compare_gradients(subject, masked, weight, cells, label)
    model.zero_grad()
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.relations(weight.name)[::2])
    frozen = net.relations(weight.name).frozen
    assert bool(frozen[::2].all()), label
    assert not bool(frozen[1::2].any()), label
    _train_copy(subject, weight.name, label)
    net.undo()
    net.undo()
    return Outcome(weight.name, "cut", effect)


def _cells(subject: Subject, weight: Weight, relations: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the cells of some relations of a weight of which all exist."""
    if weight._n_groups > 1:
        topology = weight.topology
        pairs = torch.stack([topology.parents().long(), topology.child.long()], 1)
        return cells_of(subject.net, weight, pairs[relations])
    spaces = subject.net.spaces
    reads = spaces[weight.source].places()[weight.name, weight.in_dim]
    writes = spaces[weight.target].places()[weight.name, weight.out_dim]
    parents = relations // len(writes)
    children = relations % len(writes)
    pairs = torch.zeros(weight.grid.shape[weight.in_dim], weight.grid.shape[weight.out_dim])
    pairs[reads[parents][:, :, None], writes[children][:, None, :]] = 1
    if weight.in_dim > weight.out_dim:
        pairs = pairs.T
    shape = [1] * len(weight.grid.shape)
    for dim in (weight.in_dim, weight.out_dim):
        shape[dim] = weight.grid.shape[dim]
    return pairs.reshape(shape).expand(weight.grid.shape).bool()


def _compare_gradients(
    subject: Subject, masked: nn.Module, weight: Weight, cells: torch.Tensor, label: str
) -> None:
    """Requires the gradients of all survivors to be those of the model with a mask."""
    expected = dict(masked.named_parameters())
    for name, parameter in subject.model.named_parameters():
        gradient = expected[name].grad
        if parameter.grad is None or gradient is None:
            assert parameter.grad is gradient, f"{label}: {name}"
            continue
        if name == weight.name:
            gradient = gradient[~cells]
        found = parameter.grad.reshape(gradient.shape)
        assert oracle.largest_difference([found], [gradient]) < 1e-12, f"{label}: {name}"


def _train_copy(subject: Subject, name: str, label: str) -> None:
    """Requires frozen weights of a copy to stay as they are, while others move."""
    model = copy.deepcopy(subject.model)
    (path, _, key) = name.rpartition(".")
    module = model.get_submodule(path)
    frozen = opened_of(module, key)
    assert frozen is not None, label
    held = frozen.pattern.kinds != FREE
    before = getattr(module, key).detach().view(len(held), -1).clone()
    step(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.1), subject.case)
    after = getattr(module, key).detach().view(len(held), -1)
    assert torch.equal(before[held], after[held]), label
    if module._parameters[key].requires_grad:
        assert not torch.equal(before, after), label


def is_refused(loss: torch.Tensor) -> bool:
    """Returns whether a backward pass raises.

    As a rule that is a StaleTopologyError; see
    `test_an_old_loss_names_the_edit_whatever_the_last_operation_is`.
    """
    try:
        loss.backward()
    except RuntimeError:
        return True
    return False


def additions(subject: Subject, most: int | None = None) -> list[Outcome]:
    """Adds two nodes to each space and compares everything that must follow; see `removals`."""
    outcomes = []
    for space in spread(subject.free, most):
        before = subject.snapshot()
        outcomes.append(_addition(subject, space))
        assert oracle.same(before, subject.snapshot()) == [], space.name
    return outcomes


def _addition(subject: Subject, space: Space) -> Outcome:
    """Adds nodes, and undoes."""
    model = subject.model
    whole = oracle.copy_of(model)
    outputs = subject.outputs()
    places = space.places()
    size = len(space)
    # Growth alone compares no values.
    space.prove()
    states = oracle.sliced_adam_state(model, subject.optimizer, {})
    loss = loss_of(model, subject.case)
    try:
        with subject.net.edit(reason="add", generator=torch.Generator().manual_seed(1)) as edit:
            edit.add_nodes(space, 2)
    except gn.errors.EditError:
        return Outcome(space.name, "refused", float("nan"))

    label = f"{space.name}: {space.verdict}"
    assert len(space) == size + 2, label
    tensors = oracle.tensors_of(model)
    for (name, dim), at in places.items():
        old = oracle.tensors_of(whole)[name].shape[dim]
        assert tensors[name].shape[dim] == old + 2 * at.shape[1], f"{label}: {name}"
    # See `test_new_nodes_that_only_activations_read_are_silent`.
    if space.verdict == "exact" and not is_contracted(space):
        difference = oracle.largest_difference(subject.outputs(), outputs)
        assert difference < 1e-12 or difference < rounding_of(whole, subject.case), label
    # Without the new positions the grown model is the one from before, and its optimizer as well.
    cuts = cuts_of({space: [size, size + 1]})
    assert differing_tensors(oracle.sliced(model, cuts), whole) == [], label
    grown = oracle.sliced_adam_state(model, subject.optimizer, cuts)
    for parameter, entries in states.items():
        for key, value in entries.items():
            assert same_bits(grown[parameter][key], value), f"{label}: {key} of {parameter}"
    assert is_refused(loss), label
    model.zero_grad()
    effect = _newborn_gradient(subject, space, cuts, label)
    subject.net.undo()
    return Outcome(space.name, space.verdict, effect)


def rounding_of(model: nn.Module, case: Case) -> float:
    """Returns how far outputs move when every weight moves by one unit in its last place: deep
    models whose weights are random enlarge rounding many times.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            signs = torch.randn(parameter.shape, generator=generator).sign().to(parameter)
            parameter.add_(parameter * signs, alpha=torch.finfo(parameter.dtype).eps)
    return oracle.largest_difference(oracle.outputs_of(moved, case), oracle.outputs_of(model, case))


def _newborn_gradient(subject: Subject, space: Space, cuts: oracle.Cuts, label: str) -> float:
    """Requires new entries to be finite; returns the largest gradient of weights that read them."""
    model = copy.deepcopy(subject.model)
    loss_of(model, subject.case).backward()
    readers = zeros_of(space, range(len(space) - 2, len(space)))
    largest = float("nan")
    for (name, dim), at in cuts.items():
        tensor = oracle.tensors_of(model)[name]
        places = torch.tensor(at, device=tensor.device)
        new = tensor.detach().index_select(dim, places)
        if new.is_floating_point():
            assert bool(new.isfinite().all()), f"{label}: {name}"
        if (name, dim) in readers and tensor.grad is not None:
            assert bool(tensor.grad.isfinite().all()), f"{label}: {name}"
            found = tensor.grad.index_select(dim, places).abs().max().item()
            largest = max(found, 0.0 if largest != largest else largest)
    return largest
