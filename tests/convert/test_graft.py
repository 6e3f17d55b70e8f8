"""gn.graft: which submodules become nets, and what stays."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel

import grapnet as gn
from grapnet.convert import describe_origin, place, read_chain

from .models import batch, difference, make, picture, train

LINEARS = ["embed", "blocks.0.ffn.0", "blocks.0.ffn.3", "blocks.1.ffn.0", "blocks.1.ffn.3", "head"]
FFN = ["blocks.0.ffn", "blocks.1.ffn"]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("blocks.*.ffn", FFN),
        ("blocks.1.ffn", FFN[1:]),
        ("*.ffn*", FFN),  # of nested matches the outermost
        ("blocks.?.ffn.[03]", LINEARS[1:5]),
        ("blocks.*.ffn.*", LINEARS[1:5]),  # not the activations and Dropouts
        ("head", ["head"]),
        (nn.Linear, LINEARS),
        (nn.Sequential, FFN),
        ((nn.Sequential, nn.Linear), ["embed", *FFN, "head"]),
        (
            lambda name, module: isinstance(module, nn.Linear) and module.bias is None,
            LINEARS[2:5:2],
        ),
        (lambda name, module: name.endswith("ffn"), FFN),
    ],
)
def test_where(where, names):
    model = make().eval()
    dense = make().eval()
    x, _ = batch(0)
    nets = gn.graft(model, where)
    assert sorted(nets) == sorted(names)
    assert all(model.get_submodule(name) is net for name, net in nets.items())
    for net in nets.values():
        gn.check(net)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-13, atol=1e-13)
    kept = [
        key for key in dense.state_dict() if not key.startswith(tuple(f"{name}." for name in names))
    ]
    mine = model.state_dict()
    assert [key for key in mine if not key.startswith(tuple(f"{name}." for name in names))] == kept
    assert all(torch.equal(mine[key], dense.state_dict()[key]) for key in kept)
    gn.ungraft(model)
    assert repr(model) == repr(dense)
    assert difference(model, dense) == 0


@pytest.mark.parametrize(
    "where",
    ["nothing", nn.Bilinear, (), lambda *_: False],
    ids=["pattern", "type", "none", "predicate"],
)
def test_nothing_matches(where):
    model = make()
    before = picture(model)
    with pytest.raises(gn.errors.ConversionError):
        gn.graft(model, where)
    with pytest.raises(gn.errors.ConversionError):
        gn.ungraft(model)
    assert picture(model) == before


@pytest.mark.parametrize(
    ("where", "settings", "names"),
    [
        ("blocks.*", {"only": nn.Linear}, LINEARS[1:5]),
        ("blocks.*", {"only": nn.Sequential}, FFN),
        (nn.Linear, {"skip": ["head", "embed"]}, LINEARS[1:5]),
        (nn.Linear, {"skip": "blocks"}, ["embed", "head"]),
        ("*", {"only": nn.Linear, "skip": ("*.3", "embed")}, [*LINEARS[1:5:2], "head"]),
        # what holds a module that stays does not become a net
        ((nn.Sequential, nn.Linear), {"skip": ["*.1.ffn.0"]}, ["embed", FFN[0], *LINEARS[4:]]),
    ],
)
def test_a_type_and_names_limit_where(where, settings, names):
    model = make()
    assert sorted(gn.graft(model, where, **settings)) == sorted(names)


def test_a_container_is_refused_unless_its_linears_are_meant():
    model = make()
    before = picture(model)
    with pytest.raises(gn.errors.ConversionError, match=r"'blocks\.0' \(Block\)"):
        gn.graft(model, "blocks.?")
    with pytest.raises(gn.errors.ConversionError, match=r"'blocks\.0\.norm' \(LayerNorm\)"):
        gn.graft(model, "blocks.?.*")
    assert picture(model) == before


def test_several_places_are_said_at_once():
    model = make()
    assert sorted(gn.graft(model, ["blocks.0.ffn", "head"])) == ["blocks.0.ffn", "head"]
    assert sorted(gn.ungraft(model, ["head", "nothing"])) == ["head"]


def test_the_model_itself_is_no_submodule():
    row = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert list(gn.graft(row, nn.Sequential)) == ["1"]
    with pytest.raises(gn.errors.ConversionError):
        gn.graft(nn.Linear(3, 3), nn.Linear)
    with pytest.raises(gn.errors.ConversionError):
        gn.ungraft(gn.GrapNet([3, 3]))


def test_what_is_grafted_already_is_passed_over():
    model = make()
    first = gn.graft(model, "blocks.0.ffn")
    second = gn.graft(model, nn.Linear)
    assert sorted(second) == sorted(set(LINEARS) - {"blocks.0.ffn.0", "blocks.0.ffn.3"})
    assert model.blocks[0].ffn is first["blocks.0.ffn"]
    with pytest.raises(
        gn.errors.ConversionError, match=r"'blocks.0.ffn' is a net already; see gn.ungraft"
    ):
        gn.graft(model, "blocks.0.ffn*")


@pytest.mark.parametrize("name", ["a", "b", "*"])
def test_a_module_under_two_names_is_replaced_under_both(name):
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = nn.ModuleDict(
        {"a": shared, "b": shared, "list": nn.ModuleList([shared, nn.Linear(4, 2)])}
    )
    optimizer = Adam(model.parameters())
    keys = list(model.state_dict())
    (net,) = gn.graft(model, name if name != "*" else nn.Sequential, optimizer).values()
    assert model["a"] is model["b"] is model["list"][0] is net
    assert len(optimizer.param_groups[0]["params"]) == 6
    gn.ungraft(model, name if name != "*" else None, optimizer)
    assert model["a"] is model["b"] is model["list"][0]
    assert list(model.state_dict()) == keys


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(7, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 7)}
    )
    model["lm_head"].weight = model["embedding"].weight
    return model


def inside_elsewhere() -> nn.ModuleDict:
    inner = nn.Sequential(nn.Linear(4, 4))
    return nn.ModuleDict(
        {"body": nn.Linear(4, 4), "lm_head": nn.Sequential(inner, nn.ReLU()), "other": inner}
    )


def part_elsewhere() -> nn.ModuleDict:
    linear = nn.Linear(4, 4)
    return nn.ModuleDict(
        {"body": nn.Linear(4, 4), "lm_head": nn.Sequential(linear, nn.ReLU()), "other": linear}
    )


def extra_buffer() -> nn.ModuleDict:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "lm_head": nn.Sequential(nn.Linear(4, 4))})
    model["lm_head"].register_buffer("scale", torch.ones(4))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tied, r"'lm_head'.*'embedding'.*skip=\[\"lm_head\"\]"),
        (inside_elsewhere, r"'lm_head\.0\.0' stands in several places"),
        (part_elsewhere, r"'lm_head\.0' stands in several places"),
        (extra_buffer, "'lm_head' has parameters or buffers"),
    ],
)
def test_what_something_else_uses_is_refused_by_name(build, message):
    model = build()
    optimizer = Adam(model.parameters())
    before = picture(model, optimizer)
    with pytest.raises(gn.errors.ConversionError, match=message):
        gn.graft(model, lambda name, _: name in ("body", "lm_head"), optimizer)
    assert picture(model, optimizer) == before
    gn.graft(model, "body", optimizer)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inside_of_a_context_without_gradients(context):
    model = make()
    dense = make()
    optimizer = Adam(model.parameters(), lr=0.02)
    other = Adam(dense.parameters(), lr=0.02)
    train(model, optimizer, range(2))
    train(dense, other, range(4))
    with context():
        gn.graft(model, "blocks.*.ffn", optimizer)
    train(model, optimizer, [2])
    with context():
        gn.ungraft(model, optimizer=optimizer)
    train(model, optimizer, [3])
    assert difference(model, dense) < 1e-12


@torch.no_grad()
def test_a_compiled_model_computes_with_the_net_and_its_edits():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(3, 4)
    before = compiled(x)
    net = gn.graft(compiled, nn.Linear)["_orig_mod.0"]
    torch.testing.assert_close(compiled(x), before)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing().smallest(count=3))
    after = compiled(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, model(x))
    gn.ungraft(compiled)
    torch.testing.assert_close(compiled(x), after)


def test_a_loss_of_before_is_refused_and_the_old_modules_stay_of_use():
    model = make()
    ffn = model.blocks[0].ffn
    x = torch.randn(4, 6, dtype=torch.float64)
    loss = model(batch(0)[0]).sum()
    alone = model.head(x).sum()
    gn.graft(model, "blocks.*.ffn")
    with pytest.raises(
        gn.errors.StaleTopologyError, match=r"before gn\.graft exchanged the parameters"
    ):
        loss.backward()
    alone.backward()  # nothing of it was exchanged
    ffn(x).sum().backward()
    assert ffn[0].weight.grad is not None
    net = model.blocks[0].ffn
    loss = model(batch(0)[0]).sum()
    gn.ungraft(model)
    with pytest.raises(
        gn.errors.StaleTopologyError, match=r"before gn\.ungraft exchanged the parameters"
    ):
        loss.backward()
    net(x).sum().backward()
    model(batch(0)[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_averaged_copy_is_grafted_alike_and_follows():
    model = make()
    averaged = AveragedModel(model)
    optimizer = Adam(model.parameters(), lr=0.02)
    train(model, optimizer, range(2))
    averaged.update_parameters(model)
    nets = gn.graft(model, "blocks.*.ffn", optimizer)
    with pytest.raises(RuntimeError, match="must match"):  # it is still one of the dense model
        copy.deepcopy(averaged).update_parameters(model)
    copies = gn.graft(averaged, "module.blocks.*.ffn")
    for name, net in nets.items():
        gn.attach(copies[f"module.{name}"], net)
        with net.edit() as edit:
            edit.cut(net.layers[0].outgoing().smallest(count=5))
    train(model, optimizer, [2])
    averaged.update_parameters(model)
    assert [net.count() for net in copies.values()] == [net.count() for net in nets.values()]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "file"]
)
def test_copies_and_pickles_know_their_origin(copied):
    model = make()
    net = gn.graft(model, "blocks.*.ffn")["blocks.0.ffn"]
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[2]])
    other = copied(model)
    x, _ = batch(0)
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    gn.ungraft(other)
    torch.testing.assert_close(other(x), model(x))
    assert isinstance(model.blocks[0].ffn, gn.GrapNet)
    assert list(other.state_dict()) == list(make().state_dict())
    assert other.blocks[0].ffn[0].weight.shape == (8, 6)


def test_a_net_from_elsewhere_takes_its_place():
    model = make(0)
    fresh = make(1)
    net = gn.graft(model, "blocks.*.ffn")["blocks.1.ffn"]
    with net.edit() as edit:
        edit.remove_nodes(net.layers[1][[1, 2, 3]])
    described = describe_origin(net)
    put = place(fresh, "blocks.1.ffn", copy.deepcopy(net), described)
    assert not isinstance(fresh.blocks[1].ffn, gn.GrapNet)
    put()
    gn.ungraft(fresh)
    assert torch.equal(fresh.blocks[1].ffn[0].weight, net.to_module()[0].weight)
    assert describe_origin(gn.GrapNet([2, 2])) is None
    with pytest.raises(ValueError, match=r"blocks\.7\.ffn"):
        place(fresh, "blocks.7.ffn", net, described)
    other = nn.ModuleDict(
        {"ffn": nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, 6))}
    )
    with pytest.raises(gn.errors.ConversionError, match=r"'ffn\.0' \(LayerNorm\)"):
        place(other, "ffn", net, described)
    with pytest.raises(ValueError, match="not a chain"):
        place(fresh, "blocks.1.ffn", net, {"parts": []})


def test_a_chain_says_how_a_module_computes():
    chain = read_chain(
        nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3), nn.Dropout(0.2), nn.ReLU(), nn.Linear(3, 2))
    )
    assert (chain.dropout, chain.dropout_path) == (0.1, "0")
    assert [part.path for part in chain.parts] == ["1", "4"]
    assert (chain.parts[0].activation, chain.parts[0].activation_path) == ("relu", "3")
    assert chain.parts[0].drops_first
    assert type(chain).from_data(chain.to_data()) == chain


def test_a_type_and_names_narrow_what_is_grafted() -> None:
    model = make()
    assert list(gn.graft(copy.deepcopy(model), "blocks.*", only=nn.Linear)) == LINEARS[1:5]
    assert list(gn.graft(model, nn.Linear, skip=["head", "embed"])) == LINEARS[1:5]
    assert type(model.head) is nn.Linear
