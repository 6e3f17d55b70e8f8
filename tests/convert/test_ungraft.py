"""gn.ungraft: plain modules of the shapes that the nets have by then."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

import grapnet as gn

from .models import batch, difference, make, picture, train


def grafted(**settings) -> tuple[nn.Module, AdamW, gn.GrapNet]:
    """Returns a model in the middle of training, its optimizer and the net in its first block."""
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    train(model, optimizer, range(2))
    return model, optimizer, gn.graft(model, "blocks.*.ffn", optimizer, **settings)["blocks.0.ffn"]


def require_same_outputs(one: nn.Module, other: nn.Module) -> None:
    x, _ = batch(9)
    for training in (False, True):
        outputs = []
        for model in (one, other):
            torch.manual_seed(0)
            outputs.append(model.train(training)(x))
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)


def ungrafted(model: nn.Module) -> nn.Module:
    """Returns an ungrafted copy, which computes the same."""
    other = copy.deepcopy(model)
    gn.ungraft(other)
    assert not [module for module in other.modules() if isinstance(module, gn.GrapNet)]
    require_same_outputs(model, other)
    return other


def test_after_hidden_nodes_are_removed_and_added():
    model, _, net = grafted()
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[0, 4, 8]])
        born = edit.add_nodes(1, 1)
        edit.connect(net.layers[0], born)
        edit.connect(born, net.layers[2])
    plain = ungrafted(model).blocks[0].ffn
    assert (plain[0].in_features, plain[0].out_features) == (6, 7)
    assert repr(plain[3]) == "Linear(in_features=7, out_features=6, bias=False)"


def test_a_layer_without_bias_has_one_once_a_bias_trains():
    model, optimizer, net = grafted()
    with net.edit() as edit:
        edit.unfreeze(net.layers[2], incoming=False, outgoing=False)
    train(model, optimizer, [2])
    plain = ungrafted(model).blocks[0].ffn
    assert torch.equal(plain[3].bias, net.layers[2].biases)
    assert bool((plain[3].bias != 0).all())


def test_a_bias_that_is_zero_and_frozen_keeps_its_key():
    model = make()
    nn.init.zeros_(model.head.bias)
    net = gn.graft(model, "head")["head"]
    with net.edit() as edit:
        edit.freeze(net.layers[1], incoming=False)
    gn.ungraft(model)
    assert list(model.state_dict()) == list(make().state_dict())


@pytest.mark.parametrize(
    ("names", "kind"), [(["tanh"], nn.Tanh), (["identity"], nn.Identity), (["relu", "tanh"], None)]
)
def test_after_another_activation_was_set(names, kind):
    model, _, net = grafted()
    with net.edit() as edit:
        for number, name in enumerate(names):
            edit.set_activation(net.layers[1][number::2] if len(names) > 1 else net.layers[1], name)
    plain = ungrafted(model).blocks[0].ffn
    assert kind is None or type(plain[1]) is kind
    assert list(plain._modules) == ["0", "1", "2", "3"]


def test_after_another_dropout_was_set():
    model, _, net = grafted()
    net.layers[1].dropout = 0.6
    assert ungrafted(model).blocks[0].ffn[2].p == 0.6
    net.layers[1].dropout = 0.0
    assert ungrafted(model).blocks[0].ffn[2].p == 0.0


def test_an_idle_dropout_can_be_woken():
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 3), nn.Dropout(0.0), nn.GELU())}
    )
    net = gn.graft(model, "a")["a"]
    net.layers[0].dropout = 0.2
    gn.ungraft(copy.deepcopy(model))
    net.layers[1].dropout = 0.3
    with pytest.raises(gn.errors.ConversionError, match=r"layer 1 of 'a'.*gelu"):
        gn.ungraft(model)
    net.layers[1].dropout = 0.0
    gn.ungraft(model)
    assert [part.p for part in model["a"] if isinstance(part, nn.Dropout)] == [0.2, 0.0]


def activate(layer: int, nodes: slice, name: str) -> Callable[[gn.GrapNet], None]:
    def change(net: gn.GrapNet) -> None:
        with net.edit() as edit:
            edit.set_activation(net.layers[layer][nodes], name)

    return change


def drop(layer: int) -> Callable[[gn.GrapNet], None]:
    return lambda net: setattr(net.layers[layer], "dropout", 0.1)


REFUSED = {
    "an activation where was none": (activate(2, slice(None), "relu"), "layer 2 of 'a'"),
    "another after a dropout": (activate(1, slice(None), "gelu"), "layer 1 of 'a'.*gelu"),
    "a mixture after a dropout": (activate(1, slice(2), "tanh"), "layer 1 of 'a'.*tanh"),
    "dropout where was none": (drop(2), "'a'"),
    "dropout of the input": (drop(0), "'a'"),
    "attention": (lambda net: net.execution.use("attention"), "'a'.*attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_modules_of_then_cannot_do_is_refused_by_name(case):
    change, message = REFUSED[case]
    stack = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3))
    model = nn.ModuleDict({"z": nn.Linear(2, 2), "a": stack})
    optimizer = Adam(model.parameters())
    net = gn.graft(model, lambda name, _: name in "az", optimizer)["a"]
    change(net)
    before = picture(model, optimizer)
    with pytest.raises(gn.errors.ConversionError, match=message):
        gn.ungraft(model, optimizer=optimizer)
    assert picture(model, optimizer) == before
    gn.ungraft(model, "z", optimizer)
    assert isinstance(model["z"], nn.Linear)


def test_leaky_relu_may_follow_the_dropout():
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.4), nn.ReLU(), nn.Linear(50, 3))}
    )
    net = gn.graft(model, "a")["a"]
    with net.edit() as edit:
        edit.set_activation(net.layers[1], "leaky_relu(0.3)")
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    expected = net(x)
    gn.ungraft(model)
    torch.manual_seed(1)
    torch.testing.assert_close(model["a"](x), expected)


def test_a_net_that_was_never_grafted_becomes_its_module():
    model = nn.Sequential(gn.GrapNet([4, 6, 3], activation="tanh"), nn.ReLU(), gn.GrapNet([3, 2]))
    optimizer = Adam(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    twin, other = copy.deepcopy((model, optimizer))
    plain = gn.ungraft(model, optimizer=optimizer)
    assert [type(module).__name__ for module in plain.values()] == ["Sequential", "Linear"]
    x = torch.randn(3, 4)
    for one, opt in ((model, optimizer), (twin, other)):
        opt.zero_grad()
        one(x).sum().backward()
        opt.step()
    torch.testing.assert_close(model(x), twin(x))
    with pytest.raises(gn.errors.ConversionError, match="none"):
        gn.ungraft(model)


def test_flags_gradients_and_modes_come_back():
    model, _, net = grafted()
    net.transitions[1].weight.requires_grad_(False)
    model.blocks[0].eval()
    gradient = net.transitions[0].weight.grad.clone()
    gn.ungraft(model)
    plain = model.blocks[0].ffn
    assert not plain[3].weight.requires_grad
    assert plain[0].weight.requires_grad
    assert torch.equal(plain[0].weight.grad, gradient.view(6, 9).t())
    assert [module.training for module in plain.modules()] == [False] * 5
    assert model.blocks[1].ffn.training


def test_a_dropout_that_was_switched_off_stays_so():
    model = make()
    model.blocks[0].ffn[2].eval()
    dense = copy.deepcopy(model)
    gn.graft(model, "blocks.*.ffn")
    gn.ungraft(model)
    assert [module.training for module in model.modules()] == [
        module.training for module in dense.modules()
    ]
    assert not model.blocks[0].ffn[2].training
    assert model.blocks[1].ffn[2].training


def test_the_optimizer_lets_go_of_the_nets():
    model, optimizer, net = grafted()
    gn.ungraft(model, optimizer=optimizer)
    before = picture(model, optimizer)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=1))
    assert picture(model, optimizer) == before
    train(model, optimizer, [2])


def test_there_and_back_many_times_is_bit_identical():
    model, optimizer, _ = grafted()
    gn.ungraft(model, optimizer=optimizer)
    before = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        gn.graft(model, nn.Linear, optimizer)
        gn.ungraft(model, optimizer=optimizer)
        gn.graft(model, nn.Sequential, optimizer)
        gn.ungraft(model, optimizer=optimizer)
    assert difference(model, before) == 0
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, entries in state["state"].items():
        assert all(
            torch.equal(after["state"][number][key], value) for key, value in entries.items()
        )


def test_a_matrix_that_would_be_too_large_is_refused():
    model, _, _ = grafted()
    before = picture(model)
    with pytest.raises(gn.errors.ConversionError, match=r"'blocks\.0\.ffn'.* 54 "):
        gn.ungraft(model, most_cells=50)
    assert picture(model) == before


def test_an_open_trial_is_refused():
    model, _, net = grafted()
    with net.edit(trial=True) as edit:
        edit.cut(net.layers[0].outgoing())
        with pytest.raises(gn.errors.EditError, match="trial"):
            gn.ungraft(model)
    assert isinstance(model.blocks[0].ffn, gn.GrapNet)


def test_an_emptied_layer_without_bias_stays_without():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)))
    keys = list(model.state_dict())
    net = gn.graft(model, "0")["0"]
    with net.edit(allow_dead=True) as edit:
        edit.remove_nodes(net.layers[1])
    plain = copy.deepcopy(model)
    gn.ungraft(plain)
    x = torch.randn(4, 3)
    assert list(plain.state_dict()) == keys
    assert torch.equal(plain(x), model(x))
