"""What a file cannot hold, or would take from a model in silence, is refused by name and nothing
changes.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.lightning_nets import load_nets, save_nets
from grapnet.rules import ActivationRecorder

from .files import build, parse
from .models import content, conv, values


class Refusing:
    """Takes no state at all once it is told to refuse."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.seen = refuses, 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        self.half = True
        if self.refuses:
            raise ValueError("no")


class RefusesToLoad(nn.Linear):
    """Loads its numbers and then fails."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        raise RuntimeError("no")


class Scaled(gn.GrapNet):
    """Has a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Versioned(nn.Linear):
    """A module whose version is given from outside."""

    _version: Any = "0.0.5"


def model(net: nn.Module | None = None, first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(4, 4), net or gn.GrapNet([4, 3]), nn.BatchNorm1d(3))


def test_an_object_that_refuses_even_its_own_state_leaves_everything_as_it_was(tmp_path):
    gn.save(tmp_path / "run", model(), a=Refusing(), generator=torch.Generator().manual_seed(1))
    fresh, generator, refusing = model(), torch.Generator(), Refusing(refuses=True)
    before, state = content(fresh), generator.get_state()
    with pytest.raises(
        gn.CheckpointError, match=r"^extras\.a: its state does not fit the object .*no"
    ):
        gn.restore(tmp_path / "run", into=fresh, generator=generator, a=refusing)
    assert content(fresh) == before
    assert torch.equal(generator.get_state(), state)
    assert vars(refusing) == {"refuses": True, "seen": 1}


@pytest.mark.parametrize("trouble", ["a load that raises", "a tensor that cannot be written"])
def test_a_module_that_cannot_be_loaded_leaves_everything_as_it_was(tmp_path, trouble):
    def make(raising: bool) -> nn.Module:
        made = model(
            first=RefusesToLoad(4, 4)
            if raising and trouble.startswith("a load")
            else nn.Linear(4, 4)
        )
        made.register_buffer("scale", torch.arange(4.0))
        if raising and trouble.startswith("a tensor"):
            made.scale = torch.zeros(1).expand(4)
        return made

    gn.save(tmp_path / "run", make(False))
    fresh = make(True)
    before = content(fresh)
    with pytest.raises(gn.CheckpointError, match=r"^state: its state does not fit"):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before
    assert vars(fresh)["_buffers"]["scale"].shape == (4,)


def test_a_module_given_by_itself_returns_too(tmp_path):
    gn.save(tmp_path / "net", gn.GrapNet([3, 2]), part=nn.Linear(2, 2), a=Refusing())
    part = nn.Linear(2, 2)
    before = values(part)
    with pytest.raises(gn.CheckpointError, match=r"^extras\.a"):
        gn.restore(tmp_path / "net", part=part, a=Refusing(refuses=True))
    assert values(part) == before


@pytest.mark.parametrize("version", ["0.0.5", None, 3, 1])
def test_modules_may_have_any_version(tmp_path, monkeypatch, version):
    monkeypatch.setattr(Versioned, "_version", version)
    seen: list[Any] = []
    saved, fresh = model(first=Versioned(4, 4)), model(first=Versioned(4, 4))
    fresh[0].register_load_state_dict_pre_hook(
        lambda _, state, prefix, metadata, *__: seen.append(metadata["version"])
    )
    gn.save(tmp_path / "run", saved)
    gn.restore(tmp_path / "run", into=fresh)
    assert values(fresh) == values(saved)
    assert seen == [version]


def test_metadata_without_a_version_is_no_trouble_and_other_versions_are_named(
    tmp_path, monkeypatch
):
    saved = model()
    saved.register_state_dict_post_hook(
        lambda _, state, *__: state._metadata.update({"0": {"more": 1}})
    )
    gn.save(tmp_path / "run", saved)
    gn.restore(tmp_path / "run", into=model())
    monkeypatch.setattr(Versioned, "_version", (1, 2))
    with pytest.raises(gn.CheckpointError, match=r"^state\.versions: that of '0'"):
        gn.save(tmp_path / "other", model(first=Versioned(4, 4)))


def own_forward(net: gn.GrapNet) -> None:
    net.forward = lambda x: x


ADDED: dict[str, tuple[Callable[[gn.GrapNet], Any], str]] = {
    "a forward": (own_forward, r"\(GrapNet\) has a forward of its own"),
    "a child": (lambda net: net.add_module("scale", nn.Linear(3, 3)), "has scale beside its graph"),
    "a buffer": (lambda net: net.register_buffer("heat", torch.ones(1)), "has heat beside"),
    "a parameter": (
        lambda net: net.register_parameter("heat", nn.Parameter(torch.ones(1))),
        "has heat beside",
    ),
    "a layer's": (
        lambda net: net.layers[1].register_buffer("heat", torch.ones(1)),
        r"has layers\.1\.heat beside",
    ),
}


def added_to(kind: str) -> gn.GrapNet:
    net = Scaled([4, 3]) if kind == "a subclass" else gn.GrapNet([4, 3])
    if kind != "a subclass":
        ADDED[kind][0](net)
    return net


@pytest.mark.parametrize("kind", ["a subclass", *ADDED])
def test_what_a_net_has_beside_its_graph_is_refused_by_name(tmp_path, kind):
    words = r"\(Scaled\) has a forward of its own" if kind == "a subclass" else ADDED[kind][1]
    with pytest.raises(gn.CheckpointError, match=f"the net at '1' {words}.*module"):
        gn.save(tmp_path / "run", model(added_to(kind)))
    with pytest.raises(gn.CheckpointError, match=f"this net {words}"):
        gn.save(tmp_path / "run", added_to(kind))
    checkpoint: dict[str, Any] = {}
    with pytest.raises(gn.CheckpointError, match=rf"^1: .*{words}"):
        save_nets(model(added_to(kind)), checkpoint)
    assert not (tmp_path / "run").exists()
    assert checkpoint == {}
    gn.save(tmp_path / "run", model())
    save_nets(model(), checkpoint)
    fresh = model(added_to(kind))
    before = content(fresh)
    with pytest.raises(gn.CheckpointError, match=f"^nets.0.places: .*the net at '1' {words}"):
        gn.restore(tmp_path / "run", into=fresh)
    with pytest.raises(gn.ConversionError, match=f"the net at '1' {words}"):
        load_nets(fresh, checkpoint)
    assert content(fresh) == before


HOOKS: dict[str, tuple[Callable[[gn.GrapNet], Any], str]] = {
    "the net": (lambda net: net.register_forward_hook(lambda *_: None), "itself"),
    "before it": (lambda net: net.register_forward_pre_hook(lambda *_: None), "itself"),
    "a layer": (
        lambda net: net.layers[1].register_full_backward_hook(lambda *_: None),
        r"layers\.1",
    ),
    "a gradient": (
        lambda net: net.transitions[0].weight.register_hook(torch.neg),
        r"transitions\.0\.weight",
    ),
    "a sum": (
        lambda net: net.layers[1].bias.register_post_accumulate_grad_hook(lambda _: None),
        r"layers\.1\.bias",
    ),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_can_be_saved_with_and_are_not_lost(tmp_path, where):
    hook, words = HOOKS[where]
    fresh, checkpoint = model(), {}
    handle = hook(fresh[1])
    gn.save(tmp_path / "run", fresh)
    save_nets(fresh, checkpoint)
    before = content(fresh)
    message = rf"the net at '1' has hooks \({words}\), which would be lost; remove them"
    with pytest.raises(gn.CheckpointError, match=message):
        gn.restore(tmp_path / "run", into=fresh)
    with pytest.raises(gn.ConversionError, match=message):
        load_nets(fresh, checkpoint)
    assert content(fresh) == before
    handle.remove()
    gn.restore(tmp_path / "run", into=fresh)
    load_nets(fresh, checkpoint)


def test_recorders_do_not_stand_in_the_way(tmp_path):
    fresh, recorder = model(), ActivationRecorder(1)
    gn.save(tmp_path / "run", fresh)
    recorder.arm(fresh[1])
    gn.restore(tmp_path / "run", into=fresh)


def test_nets_that_share_a_parameter_are_refused(tmp_path):
    first, second = gn.GrapNet([3, 3]), gn.GrapNet([3, 3])
    second.transitions[0].weight = first.transitions[0].weight
    with pytest.raises(gn.CheckpointError, match="the nets at '0' and '1' share a Parameter"):
        gn.save(tmp_path / "run", nn.Sequential(first, second))
    deep = gn.GrapNet([3, 3, 3])
    deep.transitions[1].weight = deep.transitions[0].weight
    with pytest.raises(
        gn.CheckpointError,
        match=r"transitions\.1\.weight is the same Parameter as transitions\.0\.weight",
    ):
        gn.save(tmp_path / "run", deep)
    with pytest.raises(gn.CheckpointError, match="the nets at '0' and '1' share a Parameter"):
        save_nets(nn.Sequential(first, second), {})
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_trained_or_not_one_by_one(tmp_path):
    gn.save(tmp_path / "run", model())
    fresh = model()
    fresh[1].layers[1].bias.requires_grad_(False)
    gn.restore(tmp_path / "run", into=fresh)
    assert {name for name, p in fresh[1].named_parameters() if not p.requires_grad} == {
        "layers.1.bias"
    }


def test_a_net_keeps_what_it_trained_where_nothing_says_otherwise(tmp_path):
    saved, placeholder, other = model(), model(nn.Identity()), model()
    saved[1].layers[1].bias.requires_grad_(False)
    gn.save(tmp_path / "run", saved)
    gn.restore(tmp_path / "run", into=placeholder)
    gn.restore(tmp_path / "run", into=other)
    assert {name for name, p in placeholder[1].named_parameters() if not p.requires_grad} == {
        "layers.1.bias"
    }
    assert all(p.requires_grad for p in other.parameters())


def test_a_net_over_dense_modules_trains_what_they_trained(tmp_path):
    grafted = conv()
    gn.graft(grafted, "1")
    gn.save(tmp_path / "run", grafted)
    fresh = conv()
    fresh[1][0].requires_grad_(False)
    fresh[1][2].bias.requires_grad_(False)
    gn.restore(tmp_path / "run", into=fresh)
    held = {name for name, p in fresh[1].named_parameters() if not p.requires_grad}
    assert held == {"transitions.0.weight", "layers.1.bias", "layers.2.bias"}


def test_a_parameter_may_be_called_like_an_extra_state(tmp_path):
    def make() -> nn.Module:
        made = model()
        made.register_parameter("my_extra_state", nn.Parameter(torch.randn(2)))
        return made

    saved, fresh = make(), make()
    gn.save(tmp_path / "run", saved)
    gn.restore(tmp_path / "run", into=fresh)
    assert values(fresh) == values(saved)


@pytest.mark.parametrize(
    "there", [lambda: gn.GrapNet([4, 3]), lambda: nn.Linear(4, 3)], ids=["a net", "dense"]
)
def test_what_depends_on_the_parameters_of_before_refuses(tmp_path, there):
    gn.save(tmp_path / "run", model())
    fresh = model(there())
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    loss = fresh[1](torch.randn(8, 4)).square().sum()
    gn.restore(tmp_path / "run", into=fresh)
    with pytest.raises(gn.StaleTopologyError, match=r"before gn\.restore.*Compute it again"):
        loss.backward()
    optimizer.zero_grad()
    fresh(torch.randn(8, 4)).square().sum().backward()
    before = values(fresh)
    with pytest.raises(gn.OptimizerError, match=r"gn\.restore has replaced"):
        optimizer.step()
    assert values(fresh) == before
    torch.optim.SGD(fresh.parameters(), 0.1).step()
    assert values(fresh) != before


def test_a_restore_that_fails_disturbs_no_optimizer(tmp_path):
    gn.save(tmp_path / "run", model(), a=Refusing())
    fresh = model()
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    loss = fresh[1](torch.randn(8, 4)).square().sum()
    with pytest.raises(gn.CheckpointError):
        gn.restore(tmp_path / "run", into=fresh, a=Refusing(refuses=True))
    before = values(fresh[1])
    loss.backward()
    optimizer.step()
    assert values(fresh[1]) != before


def dropping() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    )


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a dropout that is not there": lambda origin: origin.update(dropout_path="9"),
    "a dropout that is none": lambda origin: origin["parts"][0].update(dropout_path="2"),
    "a dropout of another place": lambda origin: origin.update(dropout_path="training"),
    "an activation that is not there": lambda origin: origin["parts"][0].update(
        activation_path="7"
    ),
    "text where a list should be": lambda origin: origin.update(emptied="13"),
    "emptied twice": lambda origin: origin.update(emptied=["3", "3"]),
    "a part too many": lambda origin: origin["parts"].append(
        copy.deepcopy(origin["parts"][0]) | {"path": "2"}
    ),
    "a part too few": lambda origin: origin["parts"].pop(),
    "a part twice": lambda origin: origin["parts"][1].update(path="1"),
    "a part that is not linear": lambda origin: origin["parts"][1].update(path="2"),
}


@pytest.mark.parametrize("there", ["dense", "grafted"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_origin_is_refused(tmp_path, damage, there):
    saved = dropping()
    gn.graft(saved, "0")
    gn.save(tmp_path / "run", saved)
    document, tensors = parse((tmp_path / "run").read_bytes())
    DAMAGES[damage](document["nets"][0]["origin"])
    (tmp_path / "run").write_bytes(build(json.dumps(document), tensors))
    fresh = dropping()
    if there == "grafted":
        gn.graft(fresh, "0")
    before = content(fresh)
    with pytest.raises(
        gn.CheckpointError, match=r"^nets\.0\.places: the net that stood at '0' has no place here"
    ):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before


def test_a_file_of_a_model_without_nets_is_refused(tmp_path):
    saved = nn.Sequential(nn.Linear(4, 4), gn.GrapNet([4, 3]))
    gn.save(tmp_path / "run", saved)
    document, tensors = parse((tmp_path / "run").read_bytes())
    document["nets"] = []
    beside = {name: tensor for name, tensor in tensors.items() if not name.startswith("nets")}
    (tmp_path / "run").write_bytes(build(json.dumps(document), beside))
    fresh = nn.Sequential(nn.Linear(4, 4))
    before = content(fresh)
    with pytest.raises(gn.CheckpointError, match=r"^nets: "):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before


def test_copies_know_which_transaction_a_commit_is_part_of(tmp_path):
    nets = gn.GrapNet([3, 4]), gn.GrapNet([4, 2])
    copies = copy.deepcopy(nets)
    for one, net in zip(copies, nets, strict=True):
        gn.attach(one, net)
    with gn.edit_together(*nets) as (first, second):
        first.remove_nodes(nets[0].layers[1][:1], interface=True)
        second.remove_nodes(nets[1].layers[0][:1], interface=True)
    assert [one.history[-1].joint for one in copies] == [net.history[-1].joint for net in nets]
    assert copies[0].history[-1].joint is not None
    gn.undo_together(*nets)
    assert [one.history[-1].joint for one in copies] == [net.history[-1].joint for net in nets]
    for one in copies:
        gn.check(one)
        gn.save(tmp_path / "copy", one, undo=True)
        assert gn.load(tmp_path / "copy").history[-1].joint == one.history[-1].joint
