"""An AveragedModel that is not attached refuses to average once coordinates of the net have
moved.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn

from .plain import everything, make_net, rewire, swap_one


def remake_one(net: gn.GrapNet) -> None:
    """Leaves the wiring as it is, with another relation in the place of one."""
    with net.edit(reason="remake") as edit:
        last = net.layers[0][0].children[-1]
        edit.cut(net.layers[0][0], slots=[len(net.layers[0][0].children) - 1])
        edit.connect(net.layers[0][0], last)


def grow_from_one(net: gn.GrapNet) -> None:
    with net.edit(reason="grow") as edit:
        edit.add_nodes(3, 2)


UNFOLLOWED: dict[str, Callable[[gn.GrapNet], Any]] = {
    "sizes": rewire,
    "equal": swap_one,
    "same wiring": remake_one,
    "undone": lambda net: (swap_one(net), net.undo()),
    "frozen": lambda net: freeze(net),
    "broadcast": grow_from_one,
}


def freeze(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.freeze(net.layers[1])


@pytest.mark.parametrize("how", UNFOLLOWED)
@pytest.mark.parametrize("updates", [0, 2])
def test_one_that_is_not_attached_refuses_to_average(how: str, updates: int) -> None:
    net = make_net((5, 4, 4, 1))
    averaged = AveragedModel(net)
    for _ in range(updates):
        averaged.update_parameters(net)
    before = copy.deepcopy(averaged.state_dict())
    UNFOLLOWED[how](net)
    for _ in range(2):
        with pytest.raises(
            gn.OptimizerError, match=r"Attach it before editing: gn\.attach\(averaged, net\)"
        ):
            averaged.update_parameters(net)
    after = averaged.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    AveragedModel(net).update_parameters(net)


def test_torch_alone_would_average_the_wrong_relations() -> None:
    net = make_net()
    averaged = AveragedModel(net)
    averaged.update_parameters(net)
    before = everything(averaged.module)
    swap_one(net)
    AveragedModel.update_parameters.__wrapped__(averaged, net)  # pyright: ignore[reportFunctionMemberAccess]
    after = everything(averaged.module)
    # nothing was trained, so no average should move
    assert before[0, 6] == everything(net)[0, 6] != after[0, 6]


def test_what_moves_no_coordinate_is_no_reason_to_refuse() -> None:
    net = make_net()
    averaged = AveragedModel(net)
    averaged.update_parameters(net)
    with net.edit() as edit:
        edit.set_owner(net.layers[1], "a")
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        edit.commit()
    swap_one(make_net())  # another net's edits are another net's
    averaged.update_parameters(net)
    plain = AveragedModel(nn.Linear(2, 2), use_buffers=True)
    plain.update_parameters(nn.Linear(2, 2))


def test_a_plain_part_is_averaged_from_a_model_with_a_net_behind_it() -> None:
    encoder = nn.Linear(4, 5, dtype=torch.float64)
    model = nn.Sequential(encoder, make_net())
    averaged = AveragedModel(encoder, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(model)
    before = encoder.weight.detach().clone()
    with torch.no_grad():
        encoder.weight.add_(1.0)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.weight.detach(), before + 0.1)


def test_integers_of_the_wiring_are_never_averaged() -> None:
    net = make_net()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    with pytest.raises(gn.OptimizerError, match="use_buffers=False"):
        averaged.update_parameters(net)
