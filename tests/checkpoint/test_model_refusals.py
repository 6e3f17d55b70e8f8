"""What a file cannot hold, or would take from a model in silence, is refused by name and nothing
changes.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grapnet as gn
from grapnet.integrations.lightning import save_nets
from grapnet.rules import ActivationRecorder

from .files import build, parse
from .models import content, conv, values


class Refusing:
    """Takes no state at all once it is told to refuse."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.seen = 1

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


def model(net: nn.Module | None = None, first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(4, 4), net or gn.GrapNet([4, 3]), nn.BatchNorm1d(3))


def test_an_object_that_refuses_even_its_own_state_leaves_everything_as_it_was(tmp_path):
    gn.save(tmp_path / "run", model(), a=Refusing(), generator=torch.Generator().manual_seed(1))
    fresh = model()
    generator = torch.Generator()
    refusing = Refusing(refuses=True)
    before = content(fresh)
    state = generator.get_state()
    with pytest.raises(gn.errors.CheckpointError):
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
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before
    assert vars(fresh)["_buffers"]["scale"].shape == (4,)


def scaled(net: gn.GrapNet) -> gn.GrapNet:
    return Scaled([4, 3])


def with_child(net: gn.GrapNet) -> gn.GrapNet:
    net.add_module("scale", nn.Linear(3, 3))
    return net


def with_parameter_of_a_layer(net: gn.GrapNet) -> gn.GrapNet:
    net.layers[1].register_parameter("heat", nn.Parameter(torch.ones(1)))
    return net


@pytest.mark.parametrize("add", [scaled, with_child, with_parameter_of_a_layer])
def test_what_a_net_has_beside_its_graph_is_refused(tmp_path, add):
    for saved in (model(add(gn.GrapNet([4, 3]))), add(gn.GrapNet([4, 3]))):
        with pytest.raises(gn.errors.CheckpointError):
            gn.save(tmp_path / "run", saved)
    with pytest.raises(gn.errors.CheckpointError):
        save_nets(model(add(gn.GrapNet([4, 3]))), {})
    assert not (tmp_path / "run").exists()
    gn.save(tmp_path / "run", model())
    require_refused(tmp_path / "run", model(add(gn.GrapNet([4, 3]))))


def require_refused(path: Path, fresh: nn.Module) -> None:
    """Fails the test unless a model refuses the nets of a file and stays as it was."""
    before = content(fresh)
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(path, into=fresh)
    assert content(fresh) == before


HOOKS: dict[str, Callable[[gn.GrapNet], Any]] = {
    "the net": lambda net: net.register_forward_hook(lambda *_: None),
    "a layer": lambda net: net.layers[1].register_full_backward_hook(lambda *_: None),
    "a gradient": lambda net: net.transitions[0].weight.register_hook(torch.neg),
    "a sum": lambda net: net.layers[1].bias.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_can_be_saved_with_and_are_not_lost(tmp_path, where):
    fresh = model()
    handle = HOOKS[where](fresh[1])
    gn.save(tmp_path / "run", fresh)
    require_refused(tmp_path / "run", fresh)
    handle.remove()
    gn.restore(tmp_path / "run", into=fresh)


def test_recorders_do_not_stand_in_the_way(tmp_path):
    fresh = model()
    recorder = ActivationRecorder(1)
    gn.save(tmp_path / "run", fresh)
    recorder.arm(fresh[1])
    gn.restore(tmp_path / "run", into=fresh)


def test_nets_that_share_a_parameter_are_refused(tmp_path):
    first = gn.GrapNet([3, 3])
    second = gn.GrapNet([3, 3])
    second.transitions[0].weight = first.transitions[0].weight
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "run", nn.Sequential(first, second))
    deep = gn.GrapNet([3, 3, 3])
    deep.transitions[1].weight = deep.transitions[0].weight
    with pytest.raises(gn.errors.CheckpointError):
        gn.save(tmp_path / "run", deep)
    with pytest.raises(gn.errors.CheckpointError):
        save_nets(nn.Sequential(first, second), {})
    assert list(tmp_path.iterdir()) == []


def test_a_net_keeps_what_it_trained_where_nothing_says_otherwise(tmp_path):
    saved = model()
    placeholder = model(nn.Identity())
    other = model()
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


@pytest.mark.parametrize(
    "there", [lambda: gn.GrapNet([4, 3]), lambda: nn.Linear(4, 3)], ids=["a net", "dense"]
)
def test_what_depends_on_the_parameters_of_before_refuses(tmp_path, there):
    gn.save(tmp_path / "run", model())
    fresh = model(there())
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    loss = fresh[1](torch.randn(8, 4)).square().sum()
    gn.restore(tmp_path / "run", into=fresh)
    with pytest.raises(gn.errors.StaleTopologyError):
        loss.backward()
    optimizer.zero_grad()
    fresh(torch.randn(8, 4)).square().sum().backward()
    before = values(fresh)
    with pytest.raises(gn.errors.OptimizerError, match=r"gn\.restore has replaced"):
        optimizer.step()
    assert values(fresh) == before
    torch.optim.SGD(fresh.parameters(), 0.1).step()
    assert values(fresh) != before


def test_a_restore_that_fails_disturbs_no_optimizer(tmp_path):
    gn.save(tmp_path / "run", model(), a=Refusing())
    fresh = model()
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    loss = fresh[1](torch.randn(8, 4)).square().sum()
    with pytest.raises(gn.errors.CheckpointError):
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
    "an activation that is not there": lambda origin: origin["parts"][0].update(
        activation_path="7"
    ),
    "a part too many": lambda origin: origin["parts"].append(
        copy.deepcopy(origin["parts"][0]) | {"path": "2"}
    ),
    "a part too few": lambda origin: origin["parts"].pop(),
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
    with pytest.raises(gn.errors.CheckpointError):
        gn.restore(tmp_path / "run", into=fresh)
    assert content(fresh) == before
