"""Single relations of models: cut, connected, frozen and unfrozen, against masks in plain torch."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.spaces import matrix, oracle, zoo
from tests.spaces.subjects import Subject, subject
from tests.spaces.test_edits import NAMES, subject_of


@pytest.mark.parametrize("name", NAMES)
def test_cutting_a_third_of_the_relations_equals_a_mask(name: str) -> None:
    outcomes = matrix.relations(subject_of(name), most=2)
    assert outcomes
    assert all(outcome.effect > 0 for outcome in outcomes)


@pytest.fixture
def resnet() -> Subject:
    return subject(zoo.MODELS["resnet"]())


@pytest.fixture
def tied() -> Subject:
    return subject(zoo.MODELS["gpt_tied"]())


def opened(found: Subject) -> str:
    """Cuts half of the relations of a weight and freezes some nodes; returns its module."""
    weight = found.net.transitions[1]
    path = weight.name.rpartition(".")[0]
    with found.net.edit(reason="open") as edit:
        edit.cut(found.net.relations(path).smallest(fraction=0.5))
        edit.freeze(found.net.spaces[weight.target][:2], outgoing=False)
    return path


def test_a_module_reads_all_of_its_weight_and_trains_what_is_left(resnet: Subject) -> None:
    weight = resnet.net.transitions[1]
    path = weight.name.rpartition(".")[0]
    module = resnet.model.get_submodule(path)
    plain = type(module)
    shape = module.weight.shape
    whole = module.weight.detach().clone()
    norms = whole.flatten(2).norm(dim=2).flatten()
    opened(resnet)
    assert isinstance(module, plain)
    assert type(module).__name__ == plain.__name__
    assert module.weight.shape == shape
    assert module.weight.requires_grad
    gone = (module.weight.flatten(2) == 0).all(2).flatten()
    assert int(gone.sum()) == len(norms) // 2
    assert norms[gone].max() <= norms[~gone].min()
    parameters = dict(resnet.model.named_parameters())
    assert parameters[weight.name].numel() < whole.numel() // 2
    assert resnet.net.count().frozen > 0
    resnet.net.undo()
    assert type(module) is plain
    assert torch.equal(module.weight, whole)


def test_frozen_nodes_stay_whatever_the_optimizer_does(resnet: Subject) -> None:
    net = resnet.net
    space = net.spaces[0]
    places = {place: at for place, at in space.places().items() if place[0] in net._stores()}
    contents = oracle.tensors_of(resnet.model)
    before = {name: contents[name].detach().clone() for name, _ in places}
    with net.edit(reason="freeze") as edit:
        edit.freeze(space[0])
        edit.freeze(space[1])
    optimizer = torch.optim.AdamW(resnet.model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        matrix.step(resnet.model, optimizer, resnet.case)
    for (name, dim), at in places.items():
        after = net._grids()[name].whole
        held = at[:2].reshape(-1)
        assert torch.equal(after.index_select(dim, held), before[name].index_select(dim, held))
        assert not torch.equal(after, before[name])


def test_unfrozen_weights_start_with_clean_state_and_undo_gives_theirs_back(
    resnet: Subject,
) -> None:
    net = resnet.net
    name = net.transitions[1].name
    parameter = dict(resnet.model.named_parameters())[name]
    start = resnet.optimizer.state[parameter]["exp_avg"].clone()
    with net.edit(reason="freeze") as edit:
        edit.freeze(net.relations(name))
    assert parameter.numel() == 0
    assert net.relations(name).frozen.all()
    net.undo()
    assert torch.equal(resnet.optimizer.state[parameter]["exp_avg"], start)
    net.redo()
    with net.edit(reason="unfreeze") as edit:
        edit.unfreeze(net.relations(name))
    assert parameter.shape == start.shape
    assert int(resnet.optimizer.state[parameter]["exp_avg"].count_nonzero()) == 0


def test_a_flat_entry_of_an_optimizer_follows_the_relations(resnet: Subject) -> None:
    net = resnet.net
    relations = net.relations(net.transitions[1].name)
    parameter = dict(resnet.model.named_parameters())[net.transitions[1].name]
    # Known by the name of its class; Prodigy keeps an entry with the values in one vector.
    prodigy = type("Prodigy", (torch.optim.SGD,), {})(resnet.model.parameters(), lr=0.01)
    gn.attach(prodigy, net)
    prodigy.state[parameter]["s"] = parameter.detach().flatten()
    before = parameter.numel()
    with net.edit() as edit:
        edit.cut(relations.smallest(fraction=0.5))
    assert parameter.numel() < before
    assert torch.equal(prodigy.state[parameter]["s"], parameter.detach().flatten())


def test_connected_relations_get_the_weights_that_were_asked_for(resnet: Subject) -> None:
    net = resnet.net
    weight = net.transitions[1]
    parents = net.spaces[weight.source]
    children = net.spaces[weight.target]
    with net.edit(reason="cut") as edit:
        edit.cut(parents[:2].outgoing(to=children))
    pairs = {"pairs": "aligned", "tensor": weight.name}
    numbers = torch.arange(2.0 * weight._payload).view(2, -1)
    with net.edit(reason="connect") as edit:
        edit.connect(parents[:2], children[:2], weights=numbers, **pairs)
    found = parents[:2].outgoing(to=children).weights
    assert torch.equal(found.detach(), numbers.double())
    assert net.history[-1].counts["relations_added"] == 2
    generator = torch.Generator().manual_seed(0)
    with net.edit(reason="draw", generator=generator) as edit:
        edit.connect(parents[:2], children[2:4], **pairs)
    drawn = parents[:2].outgoing(to=children[2:4]).weights
    fan_in = weight.grid.whole[0].numel()
    assert 0 < drawn.abs().max() <= fan_in**-0.5


def test_assigned_weights_reach_the_model_and_frozen_ones_are_refused(resnet: Subject) -> None:
    net = resnet.net
    name = net.transitions[1].name
    opened(resnet)
    relations = net.relations(name)
    free = relations[~relations.frozen]
    free.weights = torch.full_like(free.weights.detach(), 3.0)
    assert int((net._grids()[name].whole == 3.0).sum()) == free.weights.numel()
    before = resnet.snapshot()
    with pytest.raises(gn.errors.FrozenError):
        relations.weights = torch.zeros(1)
    assert oracle.same(before, resnet.snapshot()) == []


def test_a_tied_weight_is_opened_everywhere(tied: Subject) -> None:
    net = tied.net
    (weight, *_) = [one for one in net.transitions if one.name == "wte.weight"]
    with net.edit(reason="cut") as edit:
        edit.cut(net.relations("wte").random(fraction=0.5))
    holders = weight.grid.holders
    assert len(holders) > 1
    first, *others = [getattr(module, name) for module, name in holders]
    assert first.shape == (37, 24)
    assert all(torch.equal(first, other) for other in others)
    tied.step()
    net.undo()
    assert len({id(module._parameters[name]) for module, name in holders}) == 1


def test_copies_and_pickles_have_the_same_weights(resnet: Subject) -> None:
    opened(resnet)
    outputs = resnet.outputs()
    double = copy.deepcopy(resnet.model)
    file = io.BytesIO()
    torch.save(resnet.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model in (double, loaded):
        assert oracle.largest_difference(oracle.outputs_of(model, resnet.case), outputs) == 0
    # Nothing is shared.
    for parameter in double.parameters():
        nn.init.zeros_(parameter)
    assert oracle.largest_difference(resnet.outputs(), outputs) == 0


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_functional_runs_agree(resnet: Subject) -> None:
    opened(resnet)
    outputs = resnet.outputs()
    compiled = torch.compile(resnet.model, backend="eager", fullgraph=True)
    found = oracle.outputs_of(compiled, resnet.case)
    assert oracle.largest_difference(found, outputs) < 1e-12
    parameters = {name: p.detach() for name, p in resnet.model.named_parameters()}
    (x,) = resnet.case.inputs
    assert torch.equal(functional_call(resnet.model, parameters, (x,)), outputs[0])
    two = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}

    def run(given: dict[str, Tensor]) -> Tensor:
        return functional_call(resnet.model, given, (x,))

    both = vmap(run, randomness="same")(two)
    assert oracle.largest_difference([both[0]], outputs) < 1e-12


def test_an_averaged_copy_keeps_its_own_frozen_weights(resnet: Subject) -> None:
    averaged = AveragedModel(resnet.model)
    gn.attach(averaged, resnet.net)
    averaged.update_parameters(resnet.model)
    resnet.step()
    averaged.update_parameters(resnet.model)
    name = resnet.net.transitions[1].name
    (path, _, key) = name.rpartition(".")
    own = averaged.module.get_submodule(path)
    before = getattr(own, key).detach().clone()
    opened(resnet)
    after = getattr(own, key).detach()
    kept = after != 0
    assert torch.equal(after[kept], before[kept])
    mine = getattr(resnet.model.get_submodule(path), key)
    assert torch.equal(mine != 0, kept)
    resnet.net.undo()
    assert torch.equal(getattr(own, key), before)


def test_a_file_has_the_relations_that_are_left(resnet: Subject, tmp_path: Path) -> None:
    path = tmp_path / "model.grap"
    opened(resnet)
    resnet.step()
    gn.save(path, resnet.model, optimizer=resnet.optimizer, undo=True)
    other = subject(zoo.MODELS["resnet"]())
    gn.restore(path, into=other.model, optimizer=other.optimizer)
    gn.check(other.net)
    for found in (resnet, other):
        found.step()
        found.net.undo()
        found.step()
    assert oracle.largest_difference(other.outputs(), resnet.outputs()) == 0
    # A model that is opened takes a file of one that is not, and a plain model one of an opened.
    gn.restore(path, into=other.model, optimizer=other.optimizer)
    plain = zoo.MODELS["resnet"]().to(torch.float64).model
    gn.restore(path, into=plain)
    assert _shapes(plain) == _shapes(other.model)
    assert _shapes(plain) != _shapes(resnet.model)
    gn.save(path, resnet.model, optimizer=resnet.optimizer)
    gn.restore(path, into=other.model, optimizer=other.optimizer)
    assert _shapes(resnet.model) == _shapes(other.model)
    gn.check(other.net)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_a_released_model_is_plain_and_computes_the_same(resnet: Subject) -> None:
    classes = [type(module) for module in resnet.model.modules()]
    shapes = _shapes(resnet.model)
    opened(resnet)
    outputs = resnet.outputs()
    gn.ungraft(resnet.model)
    assert [type(module) for module in resnet.model.modules()] == classes
    assert _shapes(resnet.model) == shapes
    assert oracle.largest_difference(resnet.outputs(), outputs) == 0
    resnet.step()


def test_a_trial_takes_back_cuts_and_leaves_gradients(resnet: Subject) -> None:
    net = resnet.net
    matrix.loss_of(resnet.model, resnet.case).backward()
    before = resnet.snapshot()
    with net.edit(trial=True) as edit:
        edit.cut(net.relations(net.transitions[1].name).random(fraction=0.5))
        edit.freeze(net.spaces[0][:2])
        edit.commit()
        assert oracle.same(before, resnet.snapshot()) != []
    assert oracle.same(before, resnet.snapshot()) == []


def test_nodes_come_and_leave_beside_cut_relations(resnet: Subject) -> None:
    net = resnet.net
    weight = net.transitions[1]
    opened(resnet)
    parents = net.spaces[weight.source]
    children = net.spaces[weight.target]
    for space in (parents, children):
        if space.pins:
            continue
        density = weight.density
        size = weight.size
        lost = len(space[:2].outgoing() | space[:2].incoming())
        with net.edit(reason="remove") as edit:
            edit.remove_nodes(space[:2])
        assert weight.size <= size
        assert lost > 0
        with net.edit(reason="add") as edit:
            edit.add_nodes(space, 2)
        # New nodes have all of their relations.
        assert weight.density > density
        gn.check(net)
        resnet.step()
        net.undo()
        net.undo()
        assert weight.size == size
