"""A net on another device goes through the same program as its twin on the CPU."""

import copy

import pytest
import torch

import grapnet as gn

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Twins:
    """Two equal nets, each with an attached Adam, one of them on another device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        cpu = gn.GrapNet([6, 5, 3], dtype=torch.float64)
        self.nets = [cpu, copy.deepcopy(cpu).to(device)]
        self.optimizers = [torch.optim.Adam(net.parameters(), lr=0.05) for net in self.nets]
        for optimizer, net in zip(self.optimizers, self.nets, strict=True):
            gn.attach(optimizer, net)
        self.x = torch.randn(9, 6, dtype=torch.float64)

    def outputs(self) -> list[torch.Tensor]:
        return [net(self.x.to(net.device)).cpu() for net in self.nets]

    def step(self) -> None:
        for optimizer, net in zip(self.optimizers, self.nets, strict=True):
            optimizer.zero_grad()
            net(self.x.to(net.device)).square().sum().backward()
            optimizer.step()
            gn.check(net)
        torch.testing.assert_close(*self.outputs(), rtol=0, atol=1e-12)

    def edit(self, operate) -> None:
        for net in self.nets:
            with net.edit() as edit:
                operate(net, edit)
        self.step()


def grow(net, edit):
    nodes = edit.add_nodes(1, 3, owner="grown", bias="zero")
    edit.connect(net.layers[0], nodes, weights=torch.full((6, 3), 0.1))
    edit.connect(nodes, net.layers[2], weights=0.2)


def shrink(net, edit):
    edit.remove_nodes(net.layers[1][0])
    edit.cut(net.layers[1][1].incoming())
    edit.remove_orphans(fold_bias=True)


@pytest.mark.parametrize("device", DEVICES)
def test_program_of_edits_agrees_with_the_cpu(device, tmp_path):
    twins = Twins(device)
    twins.step()
    twins.edit(lambda net, edit: edit.cut(net.layers[0].outgoing().smallest(fraction=0.3)))
    twins.edit(grow)
    twins.edit(shrink)
    twins.edit(lambda net, edit: edit.freeze(net.select(owner="grown")))
    twins.edit(lambda net, edit: edit.set_activation(net.layers[1][1:3], "tanh"))
    other = twins.nets[1]
    before = twins.outputs()[1]
    weights = other.transitions[0].weight.clone()
    with other.edit(trial=True) as edit:
        edit.cut(other.layers[0].outgoing()[::2])
        edit.commit()
        assert len(other.transitions[0].weight) < len(weights)
    assert torch.equal(weights, other.transitions[0].weight)
    # a GPU adds in any order
    torch.testing.assert_close(before, twins.outputs()[1], rtol=0, atol=1e-12)
    for verb in ("undo", "undo", "undo", "redo", "redo"):
        for net in twins.nets:
            getattr(net, verb)()
        twins.step()

    gn.save(tmp_path / "net", other, undo=True)
    loaded = gn.load(tmp_path / "net", device=device)
    assert torch.equal(loaded.transitions[0].values(), other.transitions[0].values())
    loaded.undo()
    gn.check(loaded)
    loss = twins.nets[1](twins.x.to(device)).sum()
    twins.edit(lambda net, edit: edit.cut(net.layers[0][0].outgoing(slots=[0])))
    with pytest.raises(gn.errors.StaleTopologyError):
        loss.backward()
    other.to("cpu")
    torch.testing.assert_close(*twins.outputs(), rtol=0, atol=1e-12)
