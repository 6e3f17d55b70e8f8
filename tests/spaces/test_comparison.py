"""What differs between two adopted models: nodes by uid, numbers where both have them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import grapnet as gn
from grapnet.spaces import Difference, differences
from tests.spaces import zoo
from tests.spaces.test_files import CHOSEN, adopt, edited, remove_some

Net = Any


def pair(name: str, path: Any) -> tuple[Net, Net]:
    """Returns an edited model, and the same from its file."""
    _, net, _ = edited(name)
    gn.save(path, net, undo=True)
    return net, gn.open(path).adopted


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_equals_itself_its_file_and_what_comes_back_by_undo(name, tmp_path):
    net, saved = pair(name, tmp_path / "file")
    assert differences(net, saved) == {}
    assert remove_some(net, 2) == 2
    assert differences(net, saved) != {}
    net.undo()
    net.undo()
    assert differences(net, saved) == {}


def test_nodes_owners_numbers_and_cells_are_counted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(2, 3)
    net = gn.adopt(model, x)
    twin: Any = copy.deepcopy(model)
    other = gn.adopt(twin, x)
    with other.edit() as edit:
        edit.remove_nodes(other.space("0")[[1, 4]])
        edit.set_owner(other.space("2")[:3], "some")
    with other.edit() as edit:
        edit.cut(other.relations("2").smallest(count=4))
        edit.freeze(other.relations("4")[:2])
    with torch.no_grad():
        twin[4].bias[1] += 0.5
    found = differences(net, other)
    uids = net.space("0").uid[[1, 4]].tolist()
    assert found["nodes of 0"] == Difference(removed=2, names_removed=tuple(map(str, uids)))
    assert found["owners of 2"].changed == 3
    assert found["cells of 2.weight"] == Difference(removed=4)
    assert found["frozen in 4.weight"] == Difference(changed=2)
    numbers = found["numbers in 1 tensor"]
    assert (numbers.changed, numbers.names_changed) == (1, ("4.bias",))
    assert numbers.largest == pytest.approx(0.5)
    assert "0.out_features" in found["numbers of modules"].names_changed
    back = differences(other, net)
    assert back["nodes of 0"].added == 2
    assert back["cells of 2.weight"] == Difference(added=4)


def test_not_a_number_equals_itself_and_is_no_largest_change():
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    twin: Any = copy.deepcopy(model)
    net = gn.adopt(model, torch.randn(2, 3))
    other = gn.adopt(twin, torch.randn(2, 3))
    with torch.no_grad():
        model[0].bias[0] = torch.nan
        twin[0].bias[0] = torch.nan
    assert differences(net, other) == {}
    with torch.no_grad():
        twin[0].bias[1] = torch.inf
    (found,) = differences(net, other).values()
    assert (found.changed, found.largest) == (1, 0.0)


def test_models_of_other_kernels_or_layers_are_not_compared_by_numbers():
    found = []
    for kernel in (3, 5):
        model = nn.Sequential(nn.Conv2d(3, 4, kernel), nn.ReLU(), nn.Conv2d(4, 2, 1))
        found.append(gn.adopt(model, torch.randn(1, 3, 9, 9)))
    assert list(differences(*found)) == ["tensors", "axes, so that numbers are not compared"]


def test_blocks_that_came_are_added_and_others_have_new_names():
    case: Any = zoo.MODELS["vit"]()
    net = adopt(zoo.MODELS["vit"]())
    deeper = adopt(case)
    with deeper.edit() as edit:
        edit.insert("blocks", after=0)
    found = differences(net, deeper)
    assert found["space blocks.1.fc1"] == Difference(added=1)
    assert found["space blocks.1.fc1, now blocks.2.fc1"] == Difference(changed=1)
    assert found["tensors"].added == len(list(case.model.blocks[0].parameters()))
    assert not any(what.startswith("numbers in") for what in found)
