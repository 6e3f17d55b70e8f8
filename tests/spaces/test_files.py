"""Adopted models in files: what comes back into which models, and what is refused."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from tests.checkpoint.files import as_text, build, parse
from tests.spaces import zoo
from tests.spaces.oracle import flattened, largest_difference, outputs_of, same, snapshot
from tests.spaces.zoo import Case

# Flattened maps, a stream with BatchNorm, groups, concatenation, GroupNorm, packed and grouped
# heads with a buffer that state dicts omit, and a tied embedding.
CHOSEN = ("vgg", "resnet", "resnext", "densenet", "groupnorm", "vit", "gqa_decoder", "gpt_tied")
Net = Any


def adopt(case: Case, optimizer: Optimizer | None = None) -> Net:
    return gn.adopt(case.model, *case.inputs, optimizer=optimizer, **case.kwargs)


def train(case: Case, optimizer: Optimizer, steps: int = 1) -> None:
    """Makes steps that are the same in every session."""
    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            optimizer.zero_grad()
            outputs = flattened(case.call())
            loss = sum(output.float().square().mean() for output in outputs)
            loss.backward()
            optimizer.step()
    optimizer.zero_grad()


def free(net: Net) -> list[Any]:
    return [space for space in net.spaces if not space.pins and len(space) > 2]


def remove_some(net: Net, count: int = 3, *, last: bool = False) -> int:
    """Removes a node of up to `count` spaces, in commits of their own; returns how many."""
    done = 0
    spaces = free(net)
    if last:
        spaces.reverse()
    for space in spaces:
        if done == count:
            break
        try:
            with net.edit(reason=f"thin {space.name}") as edit:
                edit.remove_nodes(space[1])
        except gn.errors.EditError:  # two spaces of which one number is the size
            continue
        done += 1
    return done


def edited(name: str) -> tuple[Case, Net, Adam]:
    """Returns a trained model with commits of removal, growth and ownership."""
    case = zoo.MODELS[name]()
    optimizer = Adam(case.model.parameters(), lr=0.01)
    net = adopt(case, optimizer)
    train(case, optimizer)
    remove_some(net)
    train(case, optimizer)
    space = free(net)[-1]
    with net.edit(reason="tag", by="test") as edit:
        edit.set_owner(space[:1], "first")
    return case, net, optimizer


def contents(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Returns a picture of a model without the identities of its Parameters."""
    names = ("identity", "members", "requires_grad")
    picture = snapshot(model, optimizer)
    return {key: value for key, value in picture.items() if not any(n in key for n in names)}


def differences(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> list[str]:
    found = same(contents(*a), contents(*b))
    return [line for line in found if line != "optimizer differs"]


def nodes(net: Net) -> list[Any]:
    """Returns everything that a graph knows of its nodes and commits."""
    spaces = [(space.name, space.uid.tolist(), list(space._owner_names)) for space in net.spaces]
    return [net.version, net._next_uid, spaces, [repr(commit) for commit in net.history]]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_file_comes_back_into_a_plain_model_of_the_original_size(name, tmp_path):
    case, net, _ = edited(name)
    gn.save(tmp_path / "file", net)
    fresh = zoo.MODELS[name]()
    identities = [id(parameter) for parameter in fresh.model.parameters()]
    optimizer = Adam(fresh.model.parameters())
    assert gn.restore(tmp_path / "file", into=fresh.model) == {}
    assert differences((case.model, None), (fresh.model, None)) == []
    assert [id(parameter) for parameter in fresh.model.parameters()] == identities
    assert largest_difference(outputs_of(case.model, case), outputs_of(fresh.model, case)) == 0
    with pytest.raises(KeyError):
        gn.adopted(fresh.model)
    train(fresh, optimizer, 2)  # it had no state


@pytest.mark.parametrize("name", CHOSEN)
def test_a_graph_continues_where_the_saved_one_was(name, tmp_path):
    case, net, optimizer = edited(name)
    gn.save(tmp_path / "file", case.model, undo=True, history="full", optimizer=optimizer)
    fresh = zoo.MODELS[name]()
    other = Adam(fresh.model.parameters())
    twin = adopt(fresh, other)
    gn.restore(tmp_path / "file", into=twin, optimizer=other)
    assert nodes(twin) == nodes(net)
    gn.check(twin)
    train(case, optimizer, 2)
    train(fresh, other, 2)
    assert differences((case.model, optimizer), (fresh.model, other)) == []
    while net.journal.undoable:
        net.undo()
        twin.undo()
        assert differences((case.model, optimizer), (fresh.model, other)) == []
    net.redo()
    twin.redo()
    assert differences((case.model, optimizer), (fresh.model, other)) == []
    assert remove_some(twin, 1) == remove_some(net, 1)
    assert nodes(twin) == nodes(net)
    assert differences((case.model, optimizer), (fresh.model, other)) == []


def test_a_graph_of_any_version_takes_a_file(tmp_path):
    case, net, _ = edited("gqa_decoder")
    gn.save(tmp_path / "file", net)
    other = zoo.MODELS["gqa_decoder"]()
    twin = adopt(other)
    assert remove_some(twin, 4, last=True) == 4
    assert differences((case.model, None), (other.model, None))
    gn.restore(tmp_path / "file", into=other.model)
    assert nodes(twin) == nodes(net)
    assert differences((case.model, None), (other.model, None)) == []
    with pytest.raises(gn.errors.HistoryError):  # the file was saved without undo
        twin.undo()
    # The file of an unedited model resets the numbers of modules, too.
    gn.save(tmp_path / "first", adopt(zoo.MODELS["gqa_decoder"]()))
    gn.restore(tmp_path / "first", into=twin)
    assert differences((zoo.MODELS["gqa_decoder"]().model, None), (other.model, None)) == []


def test_a_model_of_the_saved_size_takes_a_file_and_a_graph_over_it_does(tmp_path):
    case, net, _ = edited("vit")
    gn.save(tmp_path / "file", net, undo=True)
    fresh = zoo.MODELS["vit"]()
    for _ in range(2):
        gn.restore(tmp_path / "file", into=fresh.model)
    twin = adopt(fresh)
    assert twin.version == 0
    gn.restore(tmp_path / "file", into=twin)
    assert nodes(twin) == nodes(net)
    while net.journal.undoable:
        net.undo()
        twin.undo()
    assert differences((case.model, None), (fresh.model, None)) == []


def test_the_model_and_its_graph_write_the_same_file(tmp_path):
    case, net, optimizer = edited("resnet")
    gn.save(tmp_path / "graph", net, optimizer=optimizer, notes={"epoch": 3})
    gn.save(tmp_path / "model", case.model, optimizer=optimizer, notes={"epoch": 3})
    assert as_text(parse((tmp_path / "graph").read_bytes())) == as_text(
        parse((tmp_path / "model").read_bytes())
    )
    fresh = zoo.MODELS["resnet"]()
    assert gn.restore(tmp_path / "model", into=fresh.model) == {"notes": {"epoch": 3}}
    with pytest.raises(TypeError):
        gn.save(tmp_path / "other", fresh.model)  # a plain model


def test_a_file_holds_what_was_removed_only_on_request(tmp_path):
    case, net, _ = edited("resnet")
    held = {id(tensor): tensor.nbytes for tensor in (*net.parameters(), *net.buffers())}
    gn.save(tmp_path / "outline", net)
    gn.save(tmp_path / "undo", net, undo=True)
    outline = gn.open(tmp_path / "outline")
    assert outline.sizes["model"] == sum(held.values())
    assert outline.sizes["journal"] < 2000
    gone = sum(
        grid.gone_values.nbytes for commit in net.history for grid in commit.change.tensors.values()
    )
    assert gn.open(tmp_path / "undo").sizes["journal"] >= outline.sizes["journal"] + gone
    assert len(case.model.state_dict()) > 0


def test_an_opened_file_tells_what_it_holds(tmp_path):
    case, net, optimizer = edited("gpt_tied")
    gn.save(tmp_path / "file", net, history="full", optimizer=optimizer, notes=[1, 2])
    file = gn.open(tmp_path / "file")
    assert file.is_model
    assert (file.undo, file.history) == (False, "full")
    assert file.kinds == {"optimizer": "Adam", "notes": "data"}
    assert file.extras["notes"] == [1, 2]
    assert file.rest.keys() >= dict(case.model.named_parameters()).keys()
    for read in (lambda: file.net, lambda: file.nets, lambda: gn.load(tmp_path / "file")):
        with pytest.raises(gn.errors.CheckpointError, match="into=model"):
            read()
    fresh = zoo.MODELS["gpt_tied"]()
    assert file.model(fresh.model) is fresh.model
    assert differences((case.model, None), (fresh.model, None)) == []
    other = Adam(fresh.model.parameters())
    file.load(optimizer=other)
    assert differences((case.model, optimizer), (fresh.model, other)) == []
    file.save(tmp_path / "again")
    assert as_text(parse((tmp_path / "again").read_bytes())) == as_text(
        parse((tmp_path / "file").read_bytes())
    )


def test_an_optimizer_is_restored_in_the_same_call_or_refused(tmp_path):
    case, net, optimizer = edited("gpt_tied")
    gn.save(tmp_path / "file", net, optimizer=optimizer)
    fresh = zoo.MODELS["gpt_tied"]()
    made_before = Adam(fresh.model.parameters())
    stale = Adam(fresh.model.parameters())
    train(fresh, stale)
    gn.restore(tmp_path / "file", into=fresh.model, optimizer=made_before)
    assert differences((case.model, optimizer), (fresh.model, made_before)) == []
    with pytest.raises(gn.errors.OptimizerError):
        train(fresh, stale)
    train(case, optimizer, 2)
    train(fresh, made_before, 2)
    assert differences((case.model, optimizer), (fresh.model, made_before)) == []


def test_a_loss_from_before_a_restore_is_refused(tmp_path):
    _, net, _ = edited("mlp")
    gn.save(tmp_path / "file", net)
    fresh = zoo.MODELS["mlp"]()
    loss = flattened(fresh.call())[0].sum()
    gn.restore(tmp_path / "file", into=fresh.model)
    with pytest.raises(RuntimeError):  # StaleError, or torch's own where it comes first
        loss.backward()
    # A sum over the last bias reaches nothing that torch compares.
    fresh = zoo.MODELS["mlp"]()
    loss = fresh.model[5].bias.sum()
    gn.restore(tmp_path / "file", into=fresh.model)
    with pytest.raises(gn.errors.StaleError):
        loss.backward()


def test_types_and_devices_are_those_of_the_model(tmp_path):
    _, net, _ = edited("resnet")
    gn.save(tmp_path / "file", net)
    fresh = zoo.MODELS["resnet"]().to(torch.float64)
    fresh.model.to(memory_format=torch.channels_last)
    gn.restore(tmp_path / "file", into=fresh.model)
    for mine, other in zip(fresh.model.parameters(), net.parameters(), strict=True):
        assert mine.dtype == torch.float64
        assert torch.equal(mine, other.double())
        if mine.dim() == 4:
            assert mine.is_contiguous(memory_format=torch.channels_last)


class Scaled(nn.Module):
    """A hidden space with a buffer that state dicts omit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("scale", torch.randn(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


def test_buffers_that_state_dicts_omit_are_in_the_file(tmp_path):
    model = Scaled()
    net = gn.adopt(model, torch.randn(2, 3))
    with net.edit() as edit:
        edit.remove_nodes(net.space("first")[[0, 4]])
    gn.save(tmp_path / "file", net)
    fresh = Scaled()
    assert not torch.equal(fresh.scale[1:4], model.scale[:3])
    gn.restore(tmp_path / "file", into=fresh)
    assert torch.equal(fresh.scale, model.scale)


class Counting(nn.Module):
    """A layer with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"batches": 0}

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_states_of_modules_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 5), Counting(), nn.Linear(5, 2))
    model[1].seen = {"batches": 7}
    net = gn.adopt(model, torch.randn(2, 3))
    gn.save(tmp_path / "file", net)
    fresh = nn.Sequential(nn.Linear(3, 5), Counting(), nn.Linear(5, 2))
    gn.restore(tmp_path / "file", into=fresh)
    assert fresh[1].seen == {"batches": 7}


# Refusals: nothing changes


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))


def thin() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def longer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4))


def other_outputs() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))


class Shared(nn.Module):
    """The tensors of `thin`, with a residual stream instead of a hidden space of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(6, 8))
        self.add_module("2", nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.children()
        hidden = first(x)
        return second(hidden + torch.cat([hidden[:, 4:], hidden[:, :4]], 1))


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another width": (wider, "0.weight"),
    "one more layer": (longer, "3.bias"),
    "other outputs": (other_outputs, "2.weight"),
    "a missing bias": (without_bias, "2.bias"),
}


def saved_thin(path: Path) -> tuple[nn.Module, Net, Adam]:
    model = thin()
    optimizer = Adam(model.parameters())
    net = gn.adopt(model, torch.randn(2, 6), optimizer=optimizer)
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    with net.edit(reason="thinner") as edit:
        edit.remove_nodes(net.space("0")[2:4])
    gn.save(path, net, undo=True, history="full", optimizer=optimizer)
    return model, net, optimizer


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_adopted", [False, True])
def test_another_model_is_refused_with_the_name_of_a_tensor(name, is_adopted, tmp_path):
    saved_thin(tmp_path / "file")
    make, tensor = OTHERS[name]
    model = make()
    kept = gn.adopt(model, torch.randn(2, 6)) if is_adopted else None
    before = snapshot(model)
    with pytest.raises(gn.errors.CheckpointError, match=tensor.replace(".", r"\.")):
        gn.restore(tmp_path / "file", into=model)
    assert same(before, snapshot(model)) == []
    assert kept is None or kept.version == 0
    gn.restore(tmp_path / "file", into=thin())


def test_a_graph_with_other_axes_of_the_same_shapes_is_refused(tmp_path):
    saved_thin(tmp_path / "file")
    model = Shared()
    net = gn.adopt(model, torch.randn(2, 6))
    before = snapshot(model)
    with pytest.raises(gn.errors.CheckpointError, match=r"0\.weight"):
        gn.restore(tmp_path / "file", into=net)
    assert same(before, snapshot(model)) == []


def test_a_model_with_another_number_is_refused(tmp_path):
    case, net, _ = edited("gqa_decoder")
    gn.save(tmp_path / "file", net)
    fresh = zoo.MODELS["gqa_decoder"]()
    changed = net.history[0].change.attributes[0]
    module = fresh.model.get_submodule(changed.module)
    assert getattr(module, changed.name) == changed.before
    setattr(module, changed.name, changed.before + 1)
    before = snapshot(fresh.model)
    with pytest.raises(gn.errors.CheckpointError, match=f"{changed.module}.{changed.name}"):
        gn.restore(tmp_path / "file", into=fresh.model)
    assert same(before, snapshot(fresh.model)) == []
    assert case.model is not fresh.model


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_failing_optimizer_leaves_everything_as_it_was(is_adopted, tmp_path):
    saved_thin(tmp_path / "file")
    model = thin()
    optimizer = SGD(model.parameters(), momentum=0.9)
    net = None
    if is_adopted:
        net = gn.adopt(model, torch.randn(2, 6), optimizer=optimizer)
        with net.edit() as edit:
            edit.remove_nodes(net.space("0")[0])
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    graph = nodes(net) if net is not None else None
    with pytest.raises(gn.errors.CheckpointError, match="Adam"):
        gn.restore(tmp_path / "file", into=model, optimizer=optimizer)
    with pytest.raises(gn.errors.CheckpointError, match="nothing"):
        gn.restore(tmp_path / "file", into=model, nothing=optimizer)
    assert same(before, snapshot(model, optimizer)) == []
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()  # its state is of the present coordinates still
    if net is not None:
        assert nodes(net) == graph
        net.undo()


class Failing(Adam):
    """An optimizer that refuses its state after loading it."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise RuntimeError("refused")


def test_an_optimizer_that_fails_after_loading_leaves_everything_as_it_was(tmp_path):
    model = thin()
    optimizer = Failing(model.parameters())
    net = gn.adopt(model, torch.randn(2, 6), optimizer=optimizer)
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    gn.save(tmp_path / "file", net, optimizer=optimizer)
    with net.edit() as edit:
        edit.remove_nodes(net.space("0")[:3])
    before = snapshot(model, optimizer)
    graph = nodes(net)
    with pytest.raises(gn.errors.CheckpointError, match="refused"):
        gn.restore(tmp_path / "file", into=net, optimizer=optimizer)
    assert same(before, snapshot(model, optimizer)) == []
    assert nodes(net) == graph
    optimizer.zero_grad()
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    net.undo()


def test_a_graph_is_not_restored_while_copies_follow_it(tmp_path):
    saved_thin(tmp_path / "file")
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6))
    averaged = AveragedModel(model)
    gn.attach(averaged.module, net)
    before = snapshot(model)
    with pytest.raises(gn.errors.CheckpointError, match="follows"):
        gn.restore(tmp_path / "file", into=net)
    assert same(before, snapshot(model)) == []
    gn.detach(averaged.module, net)
    gn.restore(tmp_path / "file", into=net)


def test_an_open_edit_a_trial_and_a_changed_model_are_refused(tmp_path):
    saved_thin(tmp_path / "file")
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6))
    with net.edit() as edit, pytest.raises(gn.errors.EditError):
        gn.restore(tmp_path / "file", into=net)
    assert edit.receipt is None
    with net.edit(trial=True) as edit:
        edit.remove_nodes(net.space("0")[0])
        edit.commit()
        with pytest.raises(gn.errors.CheckpointError):
            gn.save(tmp_path / "trial", net)
    model[2] = nn.Linear(8, 5)
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "changed", net)
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "file", into=net)


# Files with a right digest whose content cannot be

Forgery = Callable[[Any, dict[str, Tensor]], None]


def in_graph(**values: Any) -> Forgery:
    return lambda document, tensors: document["adopted"].update(values)


def in_space(**values: Any) -> Forgery:
    return lambda document, tensors: document["adopted"]["spaces"][1].update(values)


def in_axes(name: str, axes: Any) -> Forgery:
    return lambda document, tensors: document["adopted"]["axes"].update({name: axes})


def numbers(tree: Any) -> Forgery:
    return lambda document, tensors: document["adopted"].update(numbers={"list": tree})


def without(name: str) -> Forgery:
    return lambda document, tensors: tensors.pop(name)


def fewer_uids(document: Any, tensors: dict[str, Tensor]) -> None:
    for part in ("uid", "owner"):
        tensors[f"spaces.1.{part}"] = tensors[f"spaces.1.{part}"][1:]


def unordered_uids(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["spaces.1.uid"] = tensors["spaces.1.uid"].flip(0)


def uids_of_another(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["spaces.1.uid"] = tensors["spaces.0.uid"]


def another_shape(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["state['0.weight']"] = tensors["state['0.weight']"][1:]


def whole_numbers(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["state['0.weight']"] = tensors["state['0.weight']"].long()


FORGERIES: dict[str, Forgery] = {
    "no sizes": in_graph(atoms=[]),
    "a negative size": in_graph(atoms=[1, -6, 8, 4]),
    "an atom that is not there": in_axes("0.weight", [2, 99]),
    "no dimensions": in_axes("0.weight", None),
    "an unknown sign": in_axes("0.weight", [["-", 1, 2], 1]),
    "a tensor that is not there": in_axes("9.weight", [1]),
    "a small next uid": in_graph(next_uid=3),
    "an atom of another space": in_space(atom=1),
    "an atom beyond the end": in_space(atom=77),
    "owners": in_space(owners=[]),
    "fewer uids": fewer_uids,
    "unordered uids": unordered_uids,
    "uids of another space": uids_of_another,
    "a missing tensor": without("state['2.bias']"),
    "a missing space": without("spaces.1.uid"),
    "another shape": another_shape,
    "whole numbers": whole_numbers,
    "numbers that are no list": in_graph(numbers=3),
    "a number without a module": numbers([{"tuple": ["nowhere", "out_features", 8, 6]}]),
    "a number that is no number": numbers([{"tuple": ["0", "forward", 8, "open"]}]),
    "half a number": numbers([{"tuple": ["0", "out_features"]}]),
}


def forge(path: Path, change: Forgery) -> None:
    document, tensors = parse(path.read_bytes())
    change(document, tensors)
    path.write_bytes(build(json.dumps(document), tensors))


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_forged_file_is_refused(name, is_adopted, tmp_path):
    saved_thin(tmp_path / "file")
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6)) if is_adopted else None
    before = snapshot(model)
    forge(tmp_path / "file", lambda document, tensors: None)
    forge(tmp_path / "file", FORGERIES[name])
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "file", into=model)
    assert same(before, snapshot(model)) == []
    assert net is None or net.version == 0


def in_opened(**values: Any) -> Forgery:
    return lambda document, tensors: document["adopted"]["opened"][0].update(values)


OPENED: dict[str, Forgery] = {
    "relations without numbers": in_opened(width=0),
    "relations of too many numbers": in_opened(width=7),
    "more cells than can be": in_opened(shape=[2**40, 2**40]),
    "another shape": in_opened(shape=[8, 5]),
    "no shape": in_opened(shape=[]),
    "another tensor": in_opened(name="9.weight"),
}


@pytest.mark.parametrize("name", OPENED)
def test_forged_relations_are_refused(name, tmp_path):
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6))
    with net.edit() as edit:
        edit.cut(net.relations("0").smallest(fraction=0.5))
    gn.save(tmp_path / "file", net)
    before = snapshot(model)
    forge(tmp_path / "file", lambda document, tensors: None)
    gn.restore(tmp_path / "file", into=net)
    forge(tmp_path / "file", OPENED[name])
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "file", into=net)
    with pytest.raises(gn.errors.CheckpointError):
        _ = gn.open(tmp_path / "file").adopted
    assert same(before, snapshot(model)) == []


def details(change: Callable[[Any, dict[str, Tensor]], None]) -> Forgery:
    """Changes the record of the first commit in the journal."""

    def changed(document: Any, tensors: dict[str, Tensor]) -> None:
        tree = json.loads(bytes(tensors["journal.details"].tolist()))
        change(tree["dict"][0][1]["list"][0]["record"], tensors)
        text = json.dumps(tree).encode()
        tensors["journal.details"] = torch.tensor(list(text), dtype=torch.uint8)

    return changed


def tensor_of(record: Any, place: int) -> Any:
    """Returns the name and the change of one tensor; the layers come first in a change."""
    return record[3]["dict"][place]


def unknown_tensor(record: Any, tensors: dict[str, Tensor]) -> None:
    tensor_of(record, 0)[0] = "9.weight"


def another_dimension(record: Any, tensors: dict[str, Tensor]) -> None:
    grid = tensor_of(record, 0)[1]["record"]
    grid[1]["record"][2]["dict"][0][0] = 2


def shape_of_one_dimension(record: Any, tensors: dict[str, Tensor]) -> None:
    grid = tensor_of(record, 0)[1]["record"]
    grid[1]["record"][1] = {"tuple": [8]}


def another_axis(record: Any, tensors: dict[str, Tensor]) -> None:
    grid = tensor_of(record, 0)[1]["record"]
    grid[1]["record"][1] = {"tuple": [9, 6]}


def unknown_attribute(record: Any, tensors: dict[str, Tensor]) -> None:
    record[4]["tuple"][0]["record"][2] = "forward"


def attribute_of_no_module(record: Any, tensors: dict[str, Tensor]) -> None:
    record[4]["tuple"][0]["record"][1] = "nowhere"


def attribute_text(record: Any, tensors: dict[str, Tensor]) -> None:
    record[4]["tuple"][0]["record"][3] = "8"


def fewer_values(record: Any, tensors: dict[str, Tensor]) -> None:
    grid = tensor_of(record, 0)[1]["record"]
    assert grid[3]["tensor"][0] == "float32"
    grid[3]["tensor"][1] -= 1


def position_out_of_range(document: Any, tensors: dict[str, Tensor]) -> None:
    tensors["journal.pool.int32"][:] += 100


IN_JOURNAL: dict[str, Forgery] = {
    "another version": in_graph(version=5),
    "a tensor that is not there": details(unknown_tensor),
    "another dimension": details(another_dimension),
    "a shape of one dimension": details(shape_of_one_dimension),
    "an axis of another size": details(another_axis),
    "an attribute that is no number": details(unknown_attribute),
    "an attribute of no module": details(attribute_of_no_module),
    "a text for a number": details(attribute_text),
    "fewer values": details(fewer_values),
    "positions out of range": position_out_of_range,
}


@pytest.mark.parametrize("name", IN_JOURNAL)
def test_a_journal_that_cannot_be_is_refused(name, tmp_path):
    saved_thin(tmp_path / "file")
    forge(tmp_path / "file", IN_JOURNAL[name])
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6))
    before = snapshot(model)
    with pytest.raises(gn.errors.CheckpointError, match="journal"):
        gn.restore(tmp_path / "file", into=net)
    assert same(before, snapshot(model)) == []
    assert net.version == 0


def test_a_loaded_commit_that_does_not_fit_is_not_undone(tmp_path):
    saved_thin(tmp_path / "file")

    def other_rows(document: Any, tensors: dict[str, Tensor]) -> None:
        # The rows of the space come first, then those of the tensors.
        flat = tensors["journal.pool.int32"]
        assert flat[:2].tolist() == [2, 3]
        at = (flat == 3).nonzero().flatten().tolist()
        flat[at[-1]] = 5

    forge(tmp_path / "file", other_rows)
    model = thin()
    net = gn.adopt(model, torch.randn(2, 6))
    gn.restore(tmp_path / "file", into=net)
    before = snapshot(model)
    with pytest.raises(gn.errors.HistoryError):
        net.undo()
    assert same(before, snapshot(model)) == []
    gn.check(net)


# gn.ungraft


def test_ungraft_ends_the_graph_and_leaves_a_plain_model():
    case, net, optimizer = edited("resnet")
    unattached = Adam(case.model.parameters())
    train(case, unattached)
    stale = Adam(case.model.parameters())
    train(case, stale)
    remove_some(net, 1)
    unattached.state.clear()
    train(case, unattached)
    before = snapshot(case.model, optimizer)
    assert gn.ungraft(net) is case.model
    assert same(before, snapshot(case.model, optimizer)) == []
    with pytest.raises(KeyError):
        gn.adopted(case.model)
    for edit in (net.undo, net.edit().__enter__, lambda: gn.ungraft(net)):
        with pytest.raises(gn.errors.EditError, match="ended"):
            edit()
    train(case, optimizer)
    train(case, unattached)
    with pytest.raises(gn.errors.OptimizerError):
        train(case, stale)
    again = adopt(case, optimizer)
    assert remove_some(again, 1) == 1


def test_an_ungrafted_model_is_pickled_without_a_trace_of_the_library():
    case, net, _ = edited("vgg")

    def pickled() -> bytes:
        stream = io.BytesIO()
        torch.save(case.model, stream)
        return stream.getvalue()

    assert b"grapnet" in pickled()
    plain = gn.ungraft(net)
    assert b"grapnet" not in pickled()
    twin = torch.load(io.BytesIO(pickled()), weights_only=False)
    assert largest_difference(outputs_of(plain, case), outputs_of(twin, case)) == 0


# Hugging Face


@pytest.fixture(scope="module")
def families() -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    from tests.spaces import huggingface

    return huggingface.FAMILIES


def of_size(net: Net, size: int) -> list[Any]:
    return [space for space in net.spaces if not space.pins and len(space) == size]


def halve_and_behead(net: Net, heads: int, stream: bool) -> None:
    """Halves every MLP of 40 and removes a head, of every layer; with `stream`, also the nodes of
    the stream that a head has.
    """
    with net.edit(reason="smaller") as edit:
        for space in of_size(net, 40):
            edit.remove_nodes(space[::2])
        for space in of_size(net, heads):
            edit.remove_nodes(space[1])
        for space in of_size(net, 24) if stream else ():
            edit.remove_nodes(space[3:11])


@pytest.mark.parametrize(
    ("name", "heads", "stream", "fields"),
    [
        ("gpt2", 3, True, {"n_embd": 16, "n_head": 2, "n_inner": 20}),
        ("bert", 3, True, {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20}),
        ("llama", 2, False, {"num_attention_heads": 3, "num_key_value_heads": 1}),
        ("llama", 3, False, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
        ("qwen2", 2, False, {"num_attention_heads": 3, "head_dim": 8}),
        ("t5", 3, False, {"num_heads": 2, "d_ff": 20, "d_kv": 8}),
        ("opt", 3, True, {"num_attention_heads": 2, "ffn_dim": 20, "hidden_size": 16}),
        ("vit", 3, True, {"num_attention_heads": 2, "intermediate_size": 20, "hidden_size": 16}),
    ],
)
def test_a_pruned_model_of_uniform_layers_is_saved_and_loaded_by_its_config(
    families, name, heads, stream, fields, tmp_path
):
    case = families[name]()
    case.model.eval()
    net = adopt(case)
    halve_and_behead(net, heads, stream)
    expected = outputs_of(case.model, case)
    plain = gn.ungraft(net)
    for field, value in fields.items():
        assert getattr(plain.config, field) == value
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    loaded.eval()
    assert largest_difference(expected, outputs_of(plain, case)) == 0
    assert largest_difference(expected, outputs_of(loaded, case)) == 0


def test_a_size_that_a_config_derives_is_set(families, tmp_path):
    case = families["gpt2"]()
    config = copy.deepcopy(case.model.config)
    config.n_inner = None
    model = type(case.model)(config).eval()
    net = gn.adopt(model, *case.inputs)
    with net.edit() as edit:
        for space in of_size(net, 96):
            edit.remove_nodes(space[:50])
    plain = gn.ungraft(net)
    assert plain.config.n_inner == 46
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    assert largest_difference(outputs_of(plain, case), outputs_of(loaded, case)) == 0


def test_shapes_alone_do_not_decide(families, tmp_path):
    case = families["bert"]()
    config = copy.deepcopy(case.model.config)
    config.num_attention_heads = 4
    model = type(case.model)(config).eval()
    net = gn.adopt(model, *case.inputs, **case.kwargs)
    with net.edit() as edit:
        for space in of_size(net, 4):
            edit.remove_nodes(space[:2])
        for space in of_size(net, 24):
            edit.remove_nodes(space[::2])
    # 2 heads of 6, which have the shapes of 4 heads of 3.
    plain = gn.ungraft(net)
    assert plain.config.num_attention_heads == 2
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    assert largest_difference(outputs_of(plain, case), outputs_of(loaded, case)) == 0


def test_layers_that_differ_are_named_and_the_graph_goes_on(families, tmp_path):
    case = families["llama"]()
    net = adopt(case)
    with net.edit() as edit:
        edit.remove_nodes(of_size(net, 40)[0][::2])
    before = snapshot(case.model)
    with pytest.raises(
        gn.errors.EditError, match=r"intermediate_size: 20 in model\.layers\.0\.mlp"
    ) as e:
        gn.ungraft(case.model)
    assert "40 in model.layers.1.mlp" in str(e.value)
    assert same(before, snapshot(case.model)) == []
    # It can be saved and edited still.
    gn.save(tmp_path / "file", net)
    fresh = families["llama"]()
    gn.restore(tmp_path / "file", into=fresh.model)
    assert largest_difference(outputs_of(case.model, case), outputs_of(fresh.model, case)) == 0
    net.undo()
    config = case.model.config.to_dict()
    assert gn.ungraft(net).config.to_dict() == config


def test_heads_that_a_family_cannot_describe_are_refused(families):
    case = families["gpt2"]()
    net = adopt(case)
    halve_and_behead(net, 3, stream=False)
    config = case.model.config.to_dict()
    with pytest.raises(gn.errors.EditError, match=r"n_embd: 24 in .* 16 in .*c_attn"):
        gn.ungraft(net)
    assert case.model.config.to_dict() == config
