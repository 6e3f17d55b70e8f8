"""RemoveOrphans: which nodes go, in one edit with whatever makes them orphans."""

import pytest
import torch

import grapnet as gn
from grapnet.rules import PruneWeakest, RemoveOrphans, RuleContext, RuleManager


@pytest.fixture
def net() -> gn.GrapNet:
    torch.manual_seed(0)
    net = gn.GrapNet([4, 5, 6, 3], activation="gelu", dtype=torch.float64)
    with net.edit() as edit:
        edit.cut(net.layers[1][:2].incoming())
        # loses its parents with the orphans above
        edit.cut(net.layers[1][2:].outgoing(to=net.layers[2][4]))
        edit.cut(net.layers[2][5].incoming())
    return net


@pytest.mark.parametrize(
    ("layers", "sizes"), [(None, [4, 3, 4, 3]), (1, [4, 3, 6, 3]), ([-2], [4, 5, 5, 3])]
)
def test_it_removes_orphans_of_the_chosen_layers_and_what_that_orphans(
    net: gn.GrapNet, layers: int | list[int] | None, sizes: list[int]
) -> None:
    with net.edit() as edit:
        RemoveOrphans(layers=layers)(net, edit, RuleContext())
    assert net.sizes == sizes
    gn.check(net)


def test_folding_the_bias_keeps_the_function_and_undo_everything(net: gn.GrapNet) -> None:
    x = torch.randn(9, 4, dtype=torch.float64)
    before = net.count()
    output = net(x).detach()
    with net.edit() as edit:
        RemoveOrphans(fold_bias=True)(net, edit, RuleContext())
    assert net.sizes == [4, 3, 4, 3]
    assert (net(x) - output).abs().max() < 1e-12
    net.undo()
    assert net.count() == before
    assert torch.equal(net(x), output)
    with net.edit() as edit:
        RemoveOrphans()(net, edit, RuleContext())
    assert (net(x) - output).abs().max() > 1e-3  # the constants did matter


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_rules_in_one_apply_does_not_matter(reverse: bool) -> None:
    torch.manual_seed(0)
    net = gn.GrapNet([3, 40, 2])
    manager = RuleManager()
    rules = [PruneWeakest(sparsity=0.8, transitions=0), RemoveOrphans()]
    for rule in reversed(rules) if reverse else rules:
        manager.add(rule)
    manager.apply(net, 0)
    assert len(net.history) == 1
    assert len(net.layers[0].outgoing()) == 24
    assert 0 < net.sizes[1] <= 24
    assert bool((net.transitions[0].topology.fan_in() > 0).all())


def test_without_orphans_nothing_is_committed() -> None:
    net = gn.GrapNet([3, 4, 2])
    manager = RuleManager()
    manager.add(RemoveOrphans())
    assert manager.apply(net, 0) is None
    shallow = gn.GrapNet([3, 2])
    assert manager.apply(shallow, 0) is None


def test_layers_that_are_not_hidden_are_refused(net: gn.GrapNet) -> None:
    with pytest.raises(gn.errors.EditError, match="not hidden"), net.edit() as edit:
        RemoveOrphans(layers=[0])(net, edit, RuleContext())
