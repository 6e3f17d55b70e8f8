"""Groups, several nets, several optimizers, schedulers, scaling and clipping go on through an
edit.
"""

import copy
import math

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

import grapnet as gn
from tests.schedulers import SCHEDULERS

from .plain import batch, make_net, rewire, train


def test_a_group_keeps_its_members_and_its_learning_rate() -> None:
    net = make_net()
    groups = [{"params": [p], "lr": 0.001 * n} for n, p in enumerate(net.parameters())]
    optimizer = Adam(groups, eps=0.0)
    gn.attach(optimizer, net, survivors="renew")
    train(net, optimizer, range(2))
    rewire(net)
    for n, (group, parameter) in enumerate(
        zip(optimizer.param_groups, net.parameters(), strict=True)
    ):
        before = parameter.detach().clone()
        assert group["params"][0] is parameter
        group["before"] = before
        group["number"] = n
    train(net, optimizer, [2])
    for group in optimizer.param_groups:
        size = (group["params"][0] - group.pop("before")).detach().abs()
        torch.testing.assert_close(
            size, torch.full_like(size, 0.001 * group["number"]), rtol=1e-6, atol=0.0
        )


def test_several_nets_in_one_optimizer_and_several_optimizers_on_one_net() -> None:
    first, second, alone = make_net(), make_net(), make_net()
    both = Adam([*first.parameters(), *second.parameters()], lr=0.01)
    mine = Adam(alone.parameters(), lr=0.01)
    slow = SGD(first.parameters(), lr=0.001, momentum=0.9)
    still = SGD(alone.parameters(), lr=0.001, momentum=0.9)
    for optimizer, net in (
        (both, first),
        (both, second),
        (mine, alone),
        (slow, first),
        (still, alone),
    ):
        gn.attach(optimizer, net)

    def step(seed: int) -> None:
        for net, optimizers in ((first, (slow,)), (alone, (mine, still))):
            net.zero_grad()
            net(batch(seed)).square().sum().backward()
            for optimizer in optimizers[::-1]:
                optimizer.step()
        second.zero_grad()
        second(batch(seed)).sum().backward()
        both.step()

    for seed in range(6):
        step(seed)
        if seed == 2:
            rewire(first)
            rewire(alone)
        if seed == 3:
            held = copy.deepcopy(both.state[first.transitions[0].weight])
            rewire(second)
            assert all(
                torch.equal(v, both.state[first.transitions[0].weight][k]) for k, v in held.items()
            )
        # `first` takes the same two steps as `alone`, in the same order
    assert len(both.state[second.transitions[0].weight]["exp_avg"]) == len(
        second.transitions[0].weight
    )
    for p, q in zip(first.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_an_edit_changes_no_learning_rate(kind: str) -> None:
    rates = []
    for edited in (False, True):
        net = make_net()
        groups = [
            {"params": net.transitions.parameters(), "lr": 0.02},
            {"params": net.layers.parameters(), "lr": 0.01},
        ]
        optimizer = SGD(groups, lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer)
        gn.attach(optimizer, net)
        found = []
        for n in range(8):
            train(net, optimizer, [n])
            scheduler.step(
                *([1 + 0.01 * n] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
            )
            found += [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
            if edited and n in (2, 5):
                with net.edit() as edit:
                    edit.cut(net.layers[0].outgoing().smallest(count=2))
                    edit.connect(net.layers[0], edit.add_nodes(1, 1))
        rates.append(found)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 2


def test_a_grad_scaler_goes_on_through_an_edit() -> None:
    ends = []
    for scaled in (False, True):
        net = make_net()
        optimizer = Adam(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        gn.attach(optimizer, net)
        for seed in range(6):
            optimizer.zero_grad()
            scaler.scale(net(batch(seed)).square().sum()).backward()
            scaler.unscale_(optimizer)
            if seed == 3:
                rewire(net)  # between unscaling and stepping
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in net.parameters()])
        assert scaler.get_scale() == (8192.0 if scaled else 1.0)
    # a scale of 2ⁿ rounds nothing
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_clipping_a_list_captured_before_the_edit() -> None:
    net = make_net()
    captured = list(net.parameters())
    rewire(net)
    net(batch(0)).square().sum().backward()
    fresh = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(captured, 0.5)
    assert norm.item() == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in fresh)))
    after = [p.grad for p in net.parameters() if p.grad is not None]
    assert sum(g.square().sum().item() for g in after) == pytest.approx(0.25, rel=1e-4)
