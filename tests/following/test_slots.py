"""What undo gives back to an optimizer goes to the right net, in whatever order nets are attached
or restored.
"""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

import grapnet as gn


def step(optimizer: torch.optim.Optimizer, *nets: gn.GrapNet) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    sum(net(x).square().sum() for net in nets).backward()
    optimizer.step()


def cut(net: gn.GrapNet) -> None:
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=2))


def moments(optimizer: torch.optim.Optimizer, net: gn.GrapNet) -> Tensor:
    return optimizer.state[net.transitions[0].weight]["exp_avg"].view(-1)


def test_two_nets_in_one_optimizer_get_their_own_slots_after_a_resume(tmp_path: Path) -> None:
    a, b = gn.GrapNet([4, 3, 2], activation="tanh"), gn.GrapNet([4, 3, 2], activation="tanh")
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()])
    for net in (a, b):
        gn.attach(optimizer, net)
    step(optimizer, a, b)
    cut(a)
    cut(b)
    gn.save(tmp_path / "a.gn", a, undo=True)
    gn.save(tmp_path / "b.gn", b, undo=True, optimizer=optimizer)
    again, other = gn.load(tmp_path / "a.gn"), gn.load(tmp_path / "b.gn")
    resumed = torch.optim.Adam([*again.parameters(), *other.parameters()])
    gn.restore(tmp_path / "b.gn", optimizer=resumed)
    for net in (again, other):
        gn.attach(resumed, net)
    for net in (a, b, again, other):
        net.undo()
    assert torch.equal(moments(resumed, other), moments(optimizer, b))
    assert int((moments(resumed, again) == 0).sum()) == 2  # its own slots were not in that file


@pytest.mark.parametrize("attach_first", [True, False])
def test_attaching_before_or_after_restoring_is_the_same(
    attach_first: bool, tmp_path: Path
) -> None:
    net = gn.GrapNet([4, 3, 2], activation="tanh")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    step(optimizer, net)
    cut(net)
    gn.save(tmp_path / "net.gn", net, undo=True, optimizer=optimizer)
    again = gn.load(tmp_path / "net.gn")
    resumed = torch.optim.Adam(again.parameters())
    if attach_first:
        gn.attach(resumed, again)
    gn.restore(tmp_path / "net.gn", optimizer=resumed)
    if not attach_first:
        gn.attach(resumed, again)
    net.undo()
    again.undo()
    assert torch.equal(moments(resumed, again), moments(optimizer, net))
    assert int((moments(resumed, again) == 0).sum()) == 0


def test_a_state_of_another_size_is_refused_before_anything_has_moved() -> None:
    net = gn.GrapNet([4, 3, 2], activation="tanh")
    optimizer = torch.optim.Adam(net.parameters())
    gn.attach(optimizer, net)
    step(optimizer, net)
    old = copy.deepcopy(optimizer.state_dict())
    cut(net)
    step(optimizer, net)
    optimizer.load_state_dict(old)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(gn.OptimizerError, match=r"gn\.attach"):
        step(optimizer, net)
    assert all(torch.equal(p, kept) for p, kept in zip(net.parameters(), before, strict=True))


def test_parameters_of_an_edited_net_can_be_loaded_by_torch() -> None:
    net, file = gn.GrapNet([4, 3, 2], activation="tanh"), io.BytesIO()
    cut(net)
    torch.save(list(net.parameters()), file)
    file.seek(0)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), torch.load(file), strict=True))
