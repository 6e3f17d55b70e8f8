"""gn.follow: tensors with one entry per coordinate go where the coordinates go."""

import copy
import gc
import pickle
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn

from .plain import Key, grow, keys


def small_net(seed: int = 0) -> gn.GrapNet:
    torch.manual_seed(seed)
    return gn.GrapNet([4, 6, 5, 3], density=0.7)


def zeros(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value.detach()) for name, value in module.named_parameters()}


def read(net: gn.GrapNet, followed: Any) -> dict[Key, float]:
    """Returns the entry of every coordinate by uids."""
    found: dict[Key, float] = {}
    for name, coordinates in keys(net).items():
        entries = followed[name].flatten().tolist()
        found |= dict(zip(coordinates, entries, strict=True))
    return found


def present_keys(net: gn.GrapNet) -> set[Key]:
    return {key for coordinates in keys(net).values() for key in coordinates}


def write(net: gn.GrapNet, followed: Any, start: float) -> float:
    """Gives every coordinate an entry that no other has."""
    for name, parameter in net.named_parameters():
        numbers = torch.arange(start, start + parameter.numel())
        followed[name] = numbers.view_as(parameter)
        start += parameter.numel()
    return start


def edit_at_random(net: gn.GrapNet, edit: gn.Edit, source: random.Random) -> None:
    layer = source.randrange(3)
    relations = net.layers[layer].outgoing()
    kind = source.choice(["cut", "grow", "remove", "freeze", "unfreeze", "freeze nodes"])
    if kind == "grow":
        grown = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])
    elif kind == "remove":
        edit.remove_nodes(net.layers[2][[0]])
        edit.connect(net.layers[1], edit.add_nodes(2, 1))
    elif kind == "freeze nodes":
        edit.freeze(net.layers[1][source.randrange(len(net.layers[1])) :])
    else:
        chosen = relations[source.randrange(3) :: 3]
        getattr(edit, kind)(chosen)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_agrees_with_a_table_by_uids(seed: int) -> None:
    source = random.Random(seed)
    net = small_net(seed)
    followed = gn.follow(net, zeros(net), newborn=-1.0)
    number = write(net, followed, 1.0)
    table = read(net, followed)
    taken: dict[int, dict[Key, float]] = {}
    undone = 0
    for _ in range(25):
        verb = source.choice(["edit", "edit", "undo", "redo", "trial"])
        if verb == "trial":
            with net.edit(trial=True) as edit:
                edit_at_random(net, edit, source)
                edit.commit()
                assert read(net, followed).keys() == present_keys(net)
            assert read(net, followed) == table
            continue
        if verb == "edit":
            with net.edit(allow_dead=True) as edit:
                edit_at_random(net, edit, source)
            if edit.receipt is None:
                continue
            commit = edit.receipt
            undone = 0
        elif verb == "undo" and net.journal.undoable:
            commit = net.undo()
            undone += 1
        elif verb == "redo" and undone:
            commit = net.redo()
            undone -= 1
        else:
            continue
        present = present_keys(net)
        back = taken.get(commit.undoes or 0, {})
        taken[commit.version] = {k: v for k, v in table.items() if k not in present}
        expected = {key: table.get(key, back.get(key, -1.0)) for key in present}
        assert read(net, followed) == expected
        number = write(net, followed, number)
        table = read(net, followed)


def test_newborn_coordinates_take_their_own_value() -> None:
    net = small_net()
    anchors = gn.follow(net, zeros(net), newborn="value")
    grow(net)
    for name, parameter in net.named_parameters():
        new = anchors[name] != 0
        assert torch.equal(anchors[name][new], parameter.detach()[new])
    assert int((anchors["transitions.0.weight"] != 0).sum()) == 8
    assert int((anchors["layers.1.bias"] != 0).sum()) == 2
    with net.edit() as edit:
        edit.freeze(net.layers[0].outgoing()[::2])
    before = read(net, anchors)
    with net.edit() as edit:
        edit.unfreeze(net.layers[0].outgoing())
        edit.cut(net.layers[0].outgoing()[1::4])
    values = read(net, {name: value.detach() for name, value in net.named_parameters()})
    after = read(net, anchors)
    thawed = after.keys() - before.keys()
    assert len(thawed) > 5
    assert after == {key: before.get(key, values[key]) for key in values}


def test_only_the_named_tensors_follow_and_keep_their_dtype() -> None:
    net = small_net()
    marks = torch.ones(6, dtype=torch.bool)
    followed = gn.follow(net, {"layers.1.bias": marks}, newborn=False)
    grow(net)
    assert list(followed) == ["layers.1.bias"]
    assert len(followed) == 1
    assert followed["layers.1.bias"].tolist() == [True] * 6 + [False] * 2
    assert "layers.2.bias" not in followed
    with pytest.raises(KeyError):
        followed["layers.2.bias"]


def test_tensors_are_copied_in_and_live_on_the_way_out() -> None:
    net = small_net()
    followed = gn.follow(net, dict(net.named_parameters()))
    before = followed["layers.1.bias"].clone()
    with torch.no_grad():
        net.get_parameter("layers.1.bias").add_(1.0)
    assert torch.equal(followed["layers.1.bias"], before)
    assert not followed["layers.1.bias"].requires_grad
    followed["layers.1.bias"] += 2
    followed["layers.1.bias"].mul_(3)
    assert torch.equal(followed["layers.1.bias"], 3 * (before + 2))
    numbers = torch.arange(6.0)
    followed["layers.1.bias"] = numbers
    numbers.zero_()
    assert followed["layers.1.bias"].tolist() == [0, 1, 2, 3, 4, 5]


def test_wrong_shapes_names_and_modules_are_refused() -> None:
    net = small_net()
    followed = gn.follow(net, zeros(net))
    weight = net.transitions[0].weight.detach()
    for wrong in (weight.flatten(), weight[1:], torch.zeros(())):
        with pytest.raises(ValueError, match=r"transitions\.0\.weight"):
            followed["transitions.0.weight"] = wrong
        with pytest.raises(ValueError, match=r"transitions\.0\.weight"):
            gn.follow(net, {"transitions.0.weight": wrong})
    with pytest.raises(KeyError):
        followed["weight"] = weight
    with pytest.raises(ValueError, match="weight"):
        gn.follow(net, {"weight": weight})
    with pytest.raises(ValueError, match="mean"):
        gn.follow(net, zeros(net), newborn="mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Linear"):
        gn.follow(nn.Linear(2, 2), {})
    old = followed["transitions.0.weight"]
    grow(net)
    with pytest.raises(ValueError, match=r"transitions\.0\.weight"):
        followed["transitions.0.weight"] = old
    assert all(followed[name].shape == p.shape for name, p in net.named_parameters())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.up = gn.GrapNet([4, 6])
        self.down = gn.GrapNet([6, 2])


def test_a_model_with_nets_inside_is_followed_by_its_own_names() -> None:
    torch.manual_seed(0)
    model = Model()
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    followed = gn.follow(model, values)
    assert list(followed) == [name for name, _ in model.named_parameters()]
    with gn.edit(model.up, model.down) as (first, second):
        first.remove_nodes(model.up.layers[1][:2], interface=True)
        second.remove_nodes(model.down.layers[0][:2], interface=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(followed[name], parameter.detach())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    gn.undo(model.up, model.down)
    assert all(torch.equal(followed[name], value) for name, value in values.items())
    followed["stem.weight"] = torch.ones(4, 3)
    assert followed["stem.weight"].sum() == 12


def test_neither_keeps_the_other_alive() -> None:
    net = small_net()
    followed = gn.follow(net, zeros(net), newborn="value")
    gone = weakref.ref(net)
    dropped = weakref.ref(followed)
    grow(net)
    del net
    gc.collect()
    assert gone() is None
    assert len(followed) == 6
    net = small_net()
    followed = gn.follow(net, zeros(net))
    del followed
    gc.collect()
    assert dropped() is None
    grow(net)


def test_a_copy_is_a_plain_dict() -> None:
    net = small_net()
    followed = gn.follow(net, zeros(net))
    _, copied = copy.deepcopy((net, followed))
    assert type(copied) is dict
    grow(net)
    assert len(copied["layers.1.bias"]) == 6
    loaded = pickle.loads(pickle.dumps(followed))
    assert type(loaded) is dict
    assert len(loaded["layers.1.bias"]) == 8


def test_a_checkpoint_takes_the_tensors_along(tmp_path: Path) -> None:
    net = small_net()
    followed = gn.follow(net, zeros(net))
    write(net, followed, 1.0)
    grow(net)
    gn.save(tmp_path / "net", net, undo=True, importances=followed)
    loaded = gn.load(tmp_path / "net")
    again = gn.follow(loaded, zeros(loaded), newborn=-1.0)
    gn.restore(tmp_path / "net", importances=again)
    assert read(loaded, again) == read(net, followed)
    other = gn.follow(small_net(), zeros(small_net()))
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "net", importances=other)
    # What left before the file was written is not in it.
    with net.edit() as edit:
        edit.cut(net.layers[0][0].outgoing())
    gn.save(tmp_path / "net", net, undo=True, importances=followed)
    loaded = gn.load(tmp_path / "net")
    again = gn.follow(loaded, zeros(loaded), newborn=-1.0)
    gn.restore(tmp_path / "net", importances=again)
    loaded.undo()
    found = read(loaded, again)
    cut = loaded.layers[0][0].outgoing()
    assert len(cut) > 0
    pairs = zip(cut.parents.tolist(), cut.children.tolist(), strict=True)
    assert {found[pair] for pair in pairs} == {-1.0}


def test_a_state_of_other_names_or_shapes_is_refused_as_a_whole() -> None:
    net = small_net()
    followed = gn.follow(net, zeros(net))
    state = {name: torch.ones_like(value) for name, value in followed.state_dict().items()}
    followed.load_state_dict(state)
    before = read(net, followed)
    assert set(before.values()) == {1.0}
    changed = {name: value + 1 for name, value in state.items()}
    without_last = dict(list(changed.items())[:-1])
    name = list(changed)[-1]
    for wrong in (
        without_last,
        {**changed, "other": torch.zeros(2)},
        {**changed, name: torch.zeros(1)},
        {**changed, name: None},
    ):
        with pytest.raises(gn.errors.CheckpointError):
            followed.load_state_dict(wrong)
        assert read(net, followed) == before


def test_parameters_that_come_and_leave_with_a_backend() -> None:
    net = gn.GrapNet([3, 4, 2])
    net.execution.use("attention", transition=1)
    followed = gn.follow(net, zeros(net), newborn="value")
    columns = [name for name in followed if name.startswith("columns.")]
    assert columns
    with net.edit() as edit:
        edit.connect(edit.add_nodes(1, 1), net.layers[2])
    for name in columns:
        parameter = net.get_parameter(name)
        assert followed[name].shape == parameter.shape
        new = followed[name] != 0
        assert torch.equal(followed[name][new], parameter.detach()[new])
    net.execution.use("auto")
    assert followed.keys() == {name for name, _ in net.named_parameters()}
    net.undo()
    assert all(followed[name].shape == p.shape for name, p in net.named_parameters())
