"""Optimizers of every kind, and training by hand: plain Parameters, a fresh optimizer an edit,
slots moved by uids.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import grapnet as gn

Make = Callable[[list[nn.Parameter]], Optimizer]
Key = int | tuple[int, int]  # the uid of a bias's node, the uids of both ends of a relation
Vector = dict[Key, Tensor]
# of each relation and bias: what it is, and whether it is frozen
Values = dict[Key, tuple[float, bool]]

_SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd momentum": (SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd nesterov": (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "adam amsgrad": (Adam, {"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (AdamW, {"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    "adagrad": (Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    "nadam": (NAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "radam": (RAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "rmsprop": (RMSprop, {"lr": 0.02, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    "adadelta": (Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "adamax": (Adamax, {"lr": 0.02, "weight_decay": 0.1}),
    "asgd": (ASGD, {"lr": 0.02, "t0": 1, "weight_decay": 0.1}),
    "rprop": (Rprop, {"lr": 0.02}),
}
# what torch fuses on a CPU
_FUSED = [
    "sgd momentum",
    "sgd nesterov",
    "adam",
    "adam amsgrad",
    "adamw",
    "adagrad",
]
CLEAN = {"sum": 0.1, "step_size": 0.02}  # what state starts from, where that is not 0


def _maker(kind: Any, settings: dict[str, Any]) -> Make:
    return lambda parameters: kind(parameters, **settings)


OPTIMIZERS: dict[str, Make] = {name: _maker(*pair) for name, pair in _SETTINGS.items()}
OPTIMIZERS |= {
    f"{name} foreach": _maker(k, {**s, "foreach": True}) for name, (k, s) in _SETTINGS.items()
}
OPTIMIZERS |= {
    f"{name} fused": _maker(_SETTINGS[name][0], {**_SETTINGS[name][1], "fused": True})
    for name in _FUSED
}
OPTIMIZERS["adam maximize"] = _maker(Adam, {"lr": 0.02, "maximize": True})
if hasattr(torch.optim, "Muon"):  # since torch 2.9; it takes matrices only
    OPTIMIZERS["muon"] = lambda parameters: torch.optim.Muon(
        [p for p in parameters if p.dim() == 2], lr=0.02
    )


def make_net(sizes: Iterable[int] = (5, 4, 4, 3)) -> gn.GrapNet:
    """Returns a net in double precision with something frozen."""
    net = gn.GrapNet(
        list(sizes),
        activation="tanh",
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    with net.edit() as edit:
        edit.freeze(net.layers[1][1].outgoing(slots=[0, 2]))
        edit.freeze(net.layers[2][3], incoming=False, outgoing=False)
    return net


def rewire(net: gn.GrapNet) -> set[Key]:
    """Cuts, grows, adds and removes nodes, freezes and unfreezes in one edit; returns what was cut
    and made again.
    """
    with net.edit(reason="rewire", generator=torch.Generator().manual_seed(2)) as edit:
        edit.cut(net.layers[0][[0, 3]].outgoing(to=[5, 7]))
        edit.cut(net.layers[0][1].outgoing(to=[6]))
        edit.connect(net.layers[0][1], [6])
        new = edit.add_nodes(1, 2)
        edit.connect(net.layers[0][2:], new)
        edit.connect(new, net.layers[2][1:])
        edit.remove_nodes(net.layers[2][0])
        edit.freeze(net.layers[0][4].outgoing(slots=[1, 3]))
        edit.unfreeze(net.layers[1][1].outgoing(to=[11]))
        edit.freeze(net.layers[1][2], incoming=False, outgoing=False)
    return {(1, 6)}


def grow(net: gn.GrapNet) -> gn.NodeSet:
    """Adds two nodes to layer 1, connected with all of layers 0 and 2."""
    with net.edit(reason="grow") as edit:
        grown = edit.add_nodes(1, 2)
        edit.connect(net.layers[0], grown)
        edit.connect(grown, net.layers[2])
    return grown


def swap_one(net: gn.GrapNet) -> None:
    """Grows as many relations as it cuts."""
    with net.edit(reason="swap") as edit:
        edit.cut(net.layers[0][0], slots=[0])
        edit.connect(net.layers[0][0], net.layers[0][0].children[0])


def batch(seed: int, width: int = 5) -> Tensor:
    """Returns seven samples."""
    return torch.randn(7, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(net: gn.GrapNet, optimizer: Optimizer, seeds: Iterable[int]) -> None:
    """Takes one step per seed."""
    for seed in seeds:
        optimizer.zero_grad()
        net(batch(seed, net.sizes[0])).square().sum().backward()
        optimizer.step()


def keys(net: gn.GrapNet) -> dict[str, list[Key]]:
    """Returns who each trainable coordinate is, Parameter by Parameter, by uids alone."""
    found: dict[str, list[Key]] = {}
    for t, layer in enumerate(list(net.layers)[:-1]):
        relations = layer.outgoing()
        below = net.layers[t + 1]
        pairs = zip(
            relations.parents.tolist(),
            relations.children.tolist(),
            relations.frozen.tolist(),
            strict=True,
        )
        found[f"transitions.{t}.weight"] = [
            (parent, child) for parent, child, frozen in pairs if not frozen
        ]
        held = set(net.state_dict()[f"layers.{t + 1}.frozen"].tolist())
        found[f"layers.{t + 1}.bias"] = [
            uid for row, uid in enumerate(below.uids.tolist()) if row not in held
        ]
    return found


def everything(net: gn.GrapNet) -> Values:
    """Returns every coordinate by uids."""
    found: Values = {}
    for layer in list(net.layers)[:-1]:
        relations = layer.outgoing()
        pairs = zip(relations.parents.tolist(), relations.children.tolist(), strict=True)
        found |= dict(
            zip(
                pairs,
                zip(relations.weights.tolist(), relations.frozen.tolist(), strict=True),
                strict=True,
            )
        )
    for layer in list(net.layers)[1:]:
        for row, (uid, value) in enumerate(
            zip(layer.uids.tolist(), layer.biases.tolist(), strict=True)
        ):
            found[uid] = value, row in net.state_dict()[f"layers.{layer.index}.frozen"].tolist()
    return found


class ByHand:
    """The training of a net, repeated on plain Parameters that know nothing of edits."""

    def __init__(self, net: gn.GrapNet, make: Make) -> None:
        self.make = make
        self._start(net, {name: p.detach().clone() for name, p in net.named_parameters()})

    def _start(self, net: gn.GrapNet, values: dict[str, Tensor]) -> None:
        self.wiring = copy.deepcopy(net)
        self.keys = keys(net)
        self.parameters = {name: nn.Parameter(value) for name, value in values.items()}
        self.optimizer = self.make(list(self.parameters.values()))

    def train(self, seeds: Iterable[int]) -> None:
        """Takes one step per seed."""
        for seed in seeds:
            self.optimizer.zero_grad()
            output = functional_call(
                self.wiring, self.parameters, (batch(seed, self.wiring.sizes[0]),)
            )
            output.square().sum().backward()
            self.optimizer.step()

    def slots(self) -> dict[str, dict[str, Vector]]:
        """Returns Parameter → entry → coordinate → number; the values themselves are the entry
        "value".
        """
        found = {}
        for name, parameter in self.parameters.items():
            entries = {"value": parameter.detach(), **self.optimizer.state.get(parameter, {})}
            found[name] = {
                entry: dict(zip(self.keys[name], tensor.clone().unbind(), strict=True))
                for entry, tensor in entries.items()
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape
            }
        return found

    def edit(
        self,
        net: gn.GrapNet,
        *,
        reborn: set[Key] | None = None,
        returning: dict[str, dict[str, Vector]] | None = None,
        renew: bool = False,
    ) -> None:
        """Builds Parameters and optimizer anew for the edited net, and copies what survives, one
        coordinate at a time.

        Args:
            net: the net after the edit; it says who is there, and what newborn coordinates are
                worth.
            reborn: what was cut and made again.
            returning: slots of what undo brings back.
            renew: copy no state.
        """
        slots = self.slots()
        states = {n: dict(self.optimizer.state.get(p, {})) for n, p in self.parameters.items()}
        coming = {n: p.detach() for n, p in net.named_parameters()}
        after = keys(net)
        moved: dict[str, dict[str, Tensor]] = {}
        for name, mine in slots.items():
            born = dict(zip(after[name], coming[name].unbind(), strict=True))
            moved[name] = {}
            for entry, old in mine.items():
                old = {key: number for key, number in old.items() if key not in (reborn or set())}
                back = (returning or {}).get(name, {}).get(entry, {})
                new = torch.full_like(coming[name], CLEAN.get(entry, 0.0))
                for place, key in enumerate(after[name]):
                    if key in old or key in back:
                        new[place] = old[key] if key in old else back[key]
                    elif entry in ("value", "ax"):
                        new[place] = born[key]
                moved[name][entry] = new
        self._start(net, {name: entries.pop("value") for name, entries in moved.items()})
        for name, parameter in self.parameters.items():
            if states[name] and not renew:
                self.optimizer.state[parameter] = {**states[name], **moved[name]}


def require_equal(net: gn.GrapNet, optimizer: Optimizer, hand: ByHand) -> None:
    """Asserts that every coordinate and every state tensor is equal to the last bit, and as long as
    it should be.
    """
    assert keys(net) == hand.keys
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, hand.parameters[name]), name
        mine = optimizer.state.get(parameter, {})
        theirs = hand.optimizer.state.get(hand.parameters[name], {})
        assert mine.keys() == theirs.keys(), name
        for entry, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[entry])), (
                name,
                entry,
            )
