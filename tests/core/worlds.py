"""Worlds for interrupts: nets with all that follows them, operations on them, and what is seen.

A world is built from a seed, so that equal worlds can be made again. `fingerprint` is plain data:
two worlds with equal fingerprints are in the same state, whichever objects they are made of.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import grapnet as gn
from grapnet.core import _staging
from grapnet.spaces import Adopted
from tests.fingerprint import as_bytes

X = torch.linspace(-1, 1, 24).reshape(6, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


@dataclass
class World:
    """Nets or a model, and everything that belongs to them."""

    folder: Path
    model: nn.Module
    optimizers: list[Optimizer]
    averaged: AveragedModel | None = None
    recorder: gn.rules.ActivationRecorder | None = None
    readout: gn.continual.ClosedFormReadout | None = None
    followed: Any = None  # tensors with one entry per coordinate
    manager: gn.rules.RuleManager | None = None
    adopted: Adopted | None = None  # the graph of an adopted model
    kept: dict[str, Any] = field(default_factory=dict)  # what an operation needs

    @property
    def net(self) -> gn.GrapNet:
        """The first net."""
        return self.nets[0]

    @property
    def nets(self) -> list[gn.GrapNet]:
        """All nets of the model; none before a graft."""
        return [module for module in self.model.modules() if isinstance(module, gn.GrapNet)]

    @property
    def graphs(self) -> list[Any]:
        """All nets, and the graph of the adopted model."""
        if self.adopted is None:
            return list(self.nets)
        return [*self.nets, self.adopted]

    def passes(self) -> list[Tensor]:
        """Returns what the nets compute, or the model where it is one chain of modules."""
        if self.adopted is not None:
            return [graph(X) for graph in self.graphs]
        if isinstance(self.model, nn.Sequential):
            return [self.model(X)]
        return [net(X) for net in self.nets]

    def backward(self) -> None:
        """Computes gradients, which stay on the Parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = sum(output.square().sum() for output in self.passes())
        loss.backward()

    def train(self) -> None:
        """Makes a training step and updates the averages."""
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.net)


def split(model: nn.Module) -> list[Optimizer]:
    """Returns one optimizer for the weights and one for the rest."""
    named = list(model.named_parameters())
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    return [Adam(weights, lr=0.01), SGD(others, lr=0.01, momentum=0.9)]


def make_nets(folder: Path, seed: int, *, averaged: bool = True, attached: bool = True) -> World:
    """Returns two trained nets with a history, gradients, and everything that can follow them."""
    torch.manual_seed(seed)
    net = gn.GrapNet([4, 6, 5, 3], density=0.8, activation="tanh")
    other = gn.GrapNet([4, 5, 3], density=0.9)
    model = nn.ModuleList([net, other])
    optimizers: list[Optimizer] = [Adam(model.parameters(), lr=0.01)]
    if seed % 2:
        optimizers = split(model)
    world = World(folder, model, optimizers)
    if attached:
        for optimizer in optimizers:
            gn.attach(optimizer, model)
    if averaged:
        world.averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        gn.attach(world.averaged, net)
    world.recorder = gn.rules.ActivationRecorder(1)
    world.recorder.arm(net)
    world.readout = gn.continual.ClosedFormReadout(net)
    world.readout.update(X, Y)
    world.followed = gn.follow(net, {name: p.detach() for name, p in net.named_parameters()})
    world.manager = gn.rules.RuleManager()
    world.manager.add(gn.rules.Rewire(), schedule=gn.rules.Every(2))
    world.manager.start(net, 1)
    if attached:
        world.train()
        write_history(world)
    world.train()
    world.backward()
    return world


def write_history(world: World) -> None:
    """Makes commits of one net and of both, so that there is something to undo and to redo."""
    net = world.net
    with net.edit(reason="name and freeze") as edit:
        edit.set_owner(net.layers[1][:2], "first")
        edit.freeze(net.layers[0][1].outgoing())
        edit.freeze(net.layers[3][0], incoming=False)
    world.train()
    with net.edit(reason="grow") as edit:
        new = edit.add_nodes(1, 2, owner="second")
        edit.connect(net.layers[0], new)
        edit.connect(new, net.layers[2][:3])
    world.train()
    with net.edit(reason="cut") as edit:
        edit.cut(net.layers[1].outgoing().smallest(count=3))
        edit.remove_nodes(net.layers[1][2])
    net.undo()


def make_model(folder: Path, seed: int) -> World:
    """Returns a trained model of plain modules with its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    )
    optimizers: list[Optimizer] = [AdamW(model.parameters(), lr=0.01)]
    if seed % 2:
        optimizers = split(model)
    world = World(folder, model, optimizers)
    world.train()
    world.train()
    world.backward()
    return world


def make_adopted(folder: Path, seed: int) -> World:
    """Returns a trained and adopted model beside a net, with a history and gradients."""
    torch.manual_seed(seed)
    inner = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    net = gn.GrapNet([4, 5, 3], density=0.9)
    model = nn.ModuleList([inner, net])
    optimizers: list[Optimizer] = [Adam(model.parameters(), lr=0.01)]
    if seed % 2:
        optimizers = split(model)
    world = World(folder, model, optimizers)
    world.adopted = gn.adopt(inner, X)
    for optimizer in optimizers:
        gn.attach(optimizer, net)
        gn.attach(optimizer, world.adopted)
    world.followed = gn.follow(
        world.adopted, {name: p.detach() for name, p in inner.named_parameters()}
    )
    world.train()
    with world.adopted.edit(reason="name and grow") as edit:
        edit.set_owner(world.adopted.space("0")[:2], "first")
        edit.add_nodes(world.adopted.space("3"), 2, owner="second")
    world.train()
    # Other sizes than those of `edit_model`, for which the gates have to run.
    with world.adopted.edit(reason="narrower") as edit:
        edit.remove_nodes(world.adopted.space("0")[0])
    world.adopted.undo()
    world.train()
    world.backward()
    return world


def edit_model(world: World, edit: Any = None) -> None:
    """Removes, adds and names nodes of an adopted model, in an edit of its own by default."""
    net = world.adopted
    if edit is None:
        with net.edit(reason="edit") as edit:
            edit_model(world, edit)
        return
    edit.remove_nodes(net.space("0")[[0, 2]])
    edit.remove_nodes(net.space("3")[1])
    edit.add_nodes(net.space("3"), 3)
    edit.set_owner(net.space("3")[2], "other")
    edit.cut(net.relations("3")[::3])
    edit.freeze(net.space("0")[1])
    for name, parameter in net.named_parameters():
        if name in ("3.weight", "5.weight"):
            edit.assign(parameter, torch.full(parameter.shape, 0.25))


# What is seen of a world


def plain(value: Any) -> Any:
    """Returns nested data in which tensors are bytes, so that == compares bit for bit."""
    if isinstance(value, Tensor):
        return as_bytes(value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return repr(value)


def fingerprint(world: World) -> dict[str, Any]:
    """Returns everything that belongs to one state of a world."""
    found = _trained_state(world)
    for name, part in _followers(world).items():
        found[name] = _attempt(part)
    found["modules"] = [(name, type(part).__name__) for name, part in world.model.named_modules()]
    for number, net in enumerate(world.nets):
        found |= {f"net {number}: {name}": part for name, part in _net(net).items()}
    if world.adopted is not None:
        found |= {f"adopted: {name}": part for name, part in _model(world.adopted).items()}
    with torch.no_grad():
        found["outputs"] = _attempt(lambda: plain(world.passes()))
        if world.averaged is not None:
            found["averaged output"] = _attempt(lambda: plain(world.averaged(X)))
    return found


def _trained_state(world: World) -> dict[str, Any]:
    """Returns what a training step changes."""
    found: dict[str, Any] = {"random numbers": plain(torch.get_rng_state())}
    for number, optimizer in enumerate(world.optimizers):
        found[f"optimizer {number}"] = _optimizer(world, optimizer)
    for name, parameter in world.model.named_parameters():
        found[f"value of {name}"] = plain(parameter)
        found[f"gradient of {name}"] = plain(parameter.grad)
        found[f"{name} is trained"] = parameter.requires_grad
    if world.averaged is not None:
        averages = [plain(parameter) for parameter in world.averaged.parameters()]
        found["averages"] = (averages, int(world.averaged.n_averaged))
    return found


def _followers(world: World) -> dict[str, Callable[[], Any]]:
    parts: dict[str, Callable[[], Any]] = {}
    for name in ("recorder", "readout", "followed", "manager"):
        follower = getattr(world, name)
        if follower is not None:
            parts[name] = lambda follower=follower: plain(follower.state_dict())
    if world.averaged is not None:
        copy = world.averaged.module
        parts["averaged net"] = lambda: _net(copy)
    return parts


def _optimizer(world: World, optimizer: Optimizer) -> Any:
    """Returns the state of an optimizer by the names of its Parameters."""
    names = {id(parameter): name for name, parameter in world.model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        options = {key: repr(value) for key, value in group.items() if key != "params"}
        members = []
        for parameter in group["params"]:
            state = plain(optimizer.state.get(parameter, {}))
            members.append((names.get(id(parameter), "not of the model"), state))
        found.append((options, members))
    return found, len(optimizer.state)


def _net(net: gn.GrapNet) -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": net.version,
        "next uid": net._next_uid,
        "sizes": net.sizes,
        "journal": [(c.version, c.reason, c.undoes, plain(c.counts)) for c in net.history],
        "undo and redo": (len(net.journal.undoable), len(net.journal.redoable)),
        "backends": plain(net.execution.choices()),
        "state dict": _attempt(lambda: plain(net.state_dict())),
    }
    for number, layer in enumerate(net.layers):
        found[f"layer {number}"] = (layer.uids.tolist(), layer.owners, layer.activations)
        if number + 1 < len(net.layers):
            relations = layer.outgoing()
            parts = (relations.parents, relations.children, relations.weights)
            found[f"relations {number}"] = plain(parts)
    return found


def _model(net: Adopted) -> dict[str, Any]:
    """Returns what is seen of an adopted model beside its Parameters."""
    found: dict[str, Any] = {
        "version": net.version,
        "next uid": net._next_uid,
        "sizes": net.sizes,
        "journal": [(c.version, c.reason, c.undoes, plain(c.counts)) for c in net.history],
        "undo and redo": (len(net.journal.undoable), len(net.journal.redoable)),
        "buffers": plain(dict(net.model.named_buffers())),
        "places": [plain(list(space.places().values())) for space in net.spaces],
    }
    for space in net.spaces:
        found[f"space {space.name}"] = (space.uids.tolist(), space.owners)
    for name, grid in net._grids().items():
        weights = [getattr(module, key) for module, key in grid.holders]
        kinds = None if grid.opened is None else grid.opened.pattern.kinds
        found[f"weights of {name}"] = (plain(weights), plain(kinds))
    for path, module in net.model.named_modules():
        numbers = {key: value for key, value in vars(module).items() if type(value) is int}
        found[f"numbers of {path}"] = repr(numbers)
    return found


def _attempt(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or which error it raises: equal worlds raise equal errors."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Operations


@dataclass(frozen=True)
class Operation:
    """Something that happens to a world as a whole or not at all."""

    act: Callable[[World], None]
    make: Callable[[Path, int], World] = make_nets
    # what has to be there before it, such as a commit to undo
    setup: Callable[[World], None] = lambda world: None
    # an operation of several commits may end between two of them
    stages: tuple[Callable[[World], None], ...] = ()
    # torch copies state dicts entry by entry: these may be of before or of after
    loose: Callable[[str], bool] = lambda name: False
    # an error in a training step leaves half a step, in torch as well
    trains: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, **options: Any) -> Callable[[Callable[[World], None]], Any]:
    """Adds an operation."""

    def add(act: Callable[[World], None]) -> Callable[[World], None]:
        OPERATIONS[name] = Operation(act, **options)
        return act

    return add


Body = Callable[[gn.GrapNet, gn.Edit], None]


def cut(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0].outgoing().smallest(fraction=0.2))


def exchange(net: gn.GrapNet, edit: gn.Edit) -> None:
    parent = net.layers[0][0]
    edit.cut(parent, slots=[0])
    edit.connect(parent, parent.children[0], weights=0.5)


def connect(net: gn.GrapNet, edit: gn.Edit) -> None:
    relations = net.layers[0].outgoing()[:2]
    edit.cut(relations)
    edit.connect(relations.parents, relations.children, pairs="aligned")


def add_nodes(net: gn.GrapNet, edit: gn.Edit) -> None:
    new = edit.add_nodes(1, 2)
    edit.connect(net.layers[0], new)
    edit.connect(new, net.layers[2])


def add_unconnected(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.add_nodes(1, 1, bias=None)


def remove_nodes(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[1][[0, 2]])


def freeze(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.freeze(net.layers[1][1:3])


def unfreeze(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.unfreeze(net.select())


def set_activation(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.set_activation(net.layers[1][::2], "relu")


def set_owner(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.set_owner(net.layers[1][1:], "other")


def fold_orphans(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[1][1].incoming())
    edit.remove_orphans(fold_bias=True)


def assign(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.assign(net.layers[0].outgoing(), 0.25)
    edit.assign(net.layers[1][1:], 0.5)
    edit.unfreeze(net.layers[0].outgoing())
    edit.unfreeze(net.layers[1], incoming=False, outgoing=False)


def remove_output(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.remove_nodes(net.layers[-1][0], interface=True)


def prune_and_grow(net: gn.GrapNet, edit: gn.Edit) -> None:
    cut(net, edit)
    remove_nodes(net, edit)
    add_nodes(net, edit)
    set_owner(net, edit)


EDITS: dict[str, Body] = {
    "cut": cut,
    "exchange": exchange,
    "connect": connect,
    "add nodes": add_nodes,
    "add unconnected": add_unconnected,
    "remove nodes": remove_nodes,
    "freeze": freeze,
    "unfreeze": unfreeze,
    "set activation": set_activation,
    "set owner": set_owner,
    "fold orphans": fold_orphans,
    "assign": assign,
    "remove output": remove_output,
    "prune and grow": prune_and_grow,
}


def edit_net(world: World, body: Body = prune_and_grow) -> None:
    with world.net.edit(reason="edit") as edit:
        body(world.net, edit)


def _add_edit(name: str, body: Body) -> None:
    def try_it(world: World) -> None:
        with world.net.edit(reason="try", trial=True) as edit:
            body(world.net, edit)
            edit.commit()

    def take_back(world: World) -> None:
        world.net.undo()

    def take_back_again(world: World) -> None:
        world.net.redo()

    def commit(world: World) -> None:
        edit_net(world, body)

    def commit_and_undo(world: World) -> None:
        edit_net(world, body)
        world.train()
        world.backward()
        world.net.undo()

    OPERATIONS[f"edit: {name}"] = Operation(commit)
    OPERATIONS[f"trial: {name}"] = Operation(try_it)
    OPERATIONS[f"undo: {name}"] = Operation(take_back, setup=commit)
    OPERATIONS[f"redo: {name}"] = Operation(take_back_again, setup=commit_and_undo)


for _name, _body in EDITS.items():
    _add_edit(_name, _body)


@contextmanager
def untraced() -> Iterator[None]:
    """Marks a block in which no error is raised; `tests.core.injection` replaces it."""
    yield


def _try(world: World) -> None:
    with world.net.edit(reason="try", trial=True) as edit:
        prune_and_grow(world.net, edit)
        edit.commit()


@operation("trial with a training step", stages=(_try,), trains=True)
def _train_in_trial(world: World) -> None:
    with world.net.edit(reason="try", trial=True) as edit:
        prune_and_grow(world.net, edit)
        edit.commit()
        with untraced():
            world.train()


@operation("trial without commit")
def _trial_without_commit(world: World) -> None:
    with world.net.edit(reason="try", trial=True) as edit:
        prune_and_grow(world.net, edit)


@operation("edit that commits early")
def _commit_early(world: World) -> None:
    with world.net.edit(reason="edit") as edit:
        prune_and_grow(world.net, edit)
        edit.commit()


@operation("edit that changes nothing")
def _change_nothing(world: World) -> None:
    with world.net.edit(reason="nothing"):
        pass


def _edit_together(world: World, *, trial: bool = False) -> None:
    first, second = world.nets
    with gn.edit(first, second, reason="together", trial=trial) as edits:
        prune_and_grow(first, edits[0])
        cut(second, edits[1])
        edits[1].add_nodes(1, 1)
        if trial:
            edits[0].commit()


def _edit_and_undo_together(world: World) -> None:
    _edit_together(world)
    world.train()
    world.backward()
    gn.undo(*world.nets)


@operation("edit together")
def _joint_edit(world: World) -> None:
    _edit_together(world)


@operation("trial together")
def _joint_trial(world: World) -> None:
    _edit_together(world, trial=True)


@operation("undo together", setup=_edit_together)
def _joint_undo(world: World) -> None:
    gn.undo(*world.nets)


@operation("redo together", setup=_edit_and_undo_together)
def _joint_redo(world: World) -> None:
    gn.redo(*world.nets)


def _record_commits(world: World) -> None:
    """Keeps two commits of an equal net."""
    twin = make_nets(world.folder, world.kept["seed"]).net
    start = len(twin.history)
    with twin.edit(reason="one") as edit:
        remove_nodes(twin, edit)
    with twin.edit(reason="two") as edit:
        add_nodes(twin, edit)
    world.kept["commits"] = list(twin.history)[start:]


def _replay_first(world: World) -> None:
    world.net.replay(world.kept["commits"][:1])


@operation("replay one commit", setup=_record_commits)
def _replay_one(world: World) -> None:
    _replay_first(world)


@operation("replay two commits", setup=_record_commits, stages=(_replay_first,))
def _replay_two(world: World) -> None:
    world.net.replay(world.kept["commits"])


def _make_without_copy(folder: Path, seed: int) -> World:
    return make_nets(folder, seed, averaged=False)


@operation("use attention", make=_make_without_copy)
def _use_attention(world: World) -> None:
    world.net.execution.use("attention", generator=torch.Generator().manual_seed(5))


def _use_attention_now(world: World) -> None:
    _use_attention(world)
    world.train()
    world.backward()


@operation("edit with attention", make=_make_without_copy, setup=_use_attention_now)
def _edit_with_attention(world: World) -> None:
    edit_net(world)


@operation("leave attention", make=_make_without_copy, setup=_use_attention_now)
def _leave_attention(world: World) -> None:
    world.net.execution.use("reference")


def _make_for_depth(folder: Path, seed: int) -> World:
    """Returns a world without what cannot follow layers that come or leave."""
    world = make_nets(folder, seed)
    world.recorder = None
    world.readout = None
    world.followed = None
    world.manager = None
    return world


@operation("insert layers", make=_make_for_depth)
def _insert_layers(world: World) -> None:
    with world.net.edit(reason="deeper") as edit:
        edit.insert_layer(1, activation="identity")
        edit.insert_layer(2, 7, init="net2deeper", activation="identity", owner="deep")


def _train_inserted(world: World) -> None:
    _insert_layers(world)
    world.train()
    world.backward()


@operation("remove a layer", make=_make_for_depth, setup=_train_inserted)
def _remove_layer(world: World) -> None:
    with world.net.edit(reason="shallower") as edit:
        edit.remove_layer(2)


def _train_with_skip(world: World) -> None:
    with world.net.edit(reason="skip") as edit:
        edit.insert_skip(0, 2)
    with world.net.edit() as edit:
        edit.connect(world.net.layers[0], world.net.layers[2])
    world.train()
    world.backward()


@operation("exchange skips of layers", make=_make_for_depth, setup=_train_with_skip)
def _exchange_skips(world: World) -> None:
    with world.net.edit(reason="another way") as edit:
        edit.remove_skip(0, 2)
        edit.insert_skip(1, 3)


@operation("undo inserted layers", make=_make_for_depth, setup=_train_inserted)
def _undo_layers(world: World) -> None:
    world.net.undo()


def _train_without_inserted(world: World) -> None:
    _train_inserted(world)
    world.net.undo()
    world.train()
    world.backward()


@operation("redo inserted layers", make=_make_for_depth, setup=_train_without_inserted)
def _redo_layers(world: World) -> None:
    world.net.redo()


@operation("try layers", make=_make_for_depth, setup=_train_inserted)
def _try_layers(world: World) -> None:
    with world.net.edit(trial=True) as edit:
        edit.remove_layer(2)
        edit.insert_layer(0)
        edit.commit()


def _make_unattached(folder: Path, seed: int) -> World:
    return make_nets(folder, seed, averaged=False, attached=False)


@operation("attach an optimizer", make=_make_unattached)
def _attach(world: World) -> None:
    gn.attach(world.optimizers[0], world.model)


def _make_copy(world: World) -> None:
    world.averaged = AveragedModel(world.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@operation("attach a copy", make=_make_without_copy, setup=_make_copy)
def _attach_copy(world: World) -> None:
    gn.attach(world.averaged, world.net)


@operation("detach an optimizer")
def _detach(world: World) -> None:
    gn.detach(world.optimizers[0], world.model)


def _keep_state_dict(world: World) -> None:
    """Keeps a state dict with other values in which more is frozen."""
    twin = make_nets(world.folder, world.kept["seed"])
    twin.train()
    with twin.net.edit(reason="freeze") as edit:
        edit.freeze(twin.net.layers[1])
    world.kept["state"] = twin.net.state_dict()


def _is_value(name: str) -> bool:
    structure = r"net \d: (version|next uid|sizes|journal|undo and redo|layer|backends)"
    return re.match(structure, name) is None


@operation("load a state dict", setup=_keep_state_dict, loose=_is_value)
def _load_state_dict(world: World) -> None:
    world.net.load_state_dict(world.kept["state"])


@operation("graft", make=make_model)
def _graft(world: World) -> None:
    gn.graft(world.model, nn.Linear, optimizer=world.optimizers)


@operation("graft a chain", make=make_model)
def _graft_chain(world: World) -> None:
    gn.graft(world.model, "2", optimizer=world.optimizers)


def _graft_now(world: World) -> None:
    _graft_chain(world)
    edit_net(world, cut_one)
    world.train()
    world.backward()


def cut_one(net: gn.GrapNet, edit: gn.Edit) -> None:
    edit.cut(net.layers[0][0], slots=[0])


@operation("edit a grafted net", make=make_model, setup=_graft_now)
def _edit_grafted(world: World) -> None:
    edit_net(world, cut_one)


@operation("ungraft", make=make_model, setup=_graft_now)
def _ungraft(world: World) -> None:
    gn.ungraft(world.model, optimizer=world.optimizers)


def _extras(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {f"optimizer{n}": one for n, one in enumerate(world.optimizers)}
    found["recorder"] = world.recorder
    found["manager"] = world.manager
    return found


def _save_extras(world: World) -> None:
    """Saves what a twin, trained further, has."""
    twin = make_nets(world.folder, world.kept["seed"], averaged=False)
    twin.train()
    twin.manager.apply(twin.net, 1)
    gn.save(world.folder / "extras", twin.model, **_extras(twin))


@operation("restore extras", make=_make_without_copy, setup=_save_extras)
def _restore_extras(world: World) -> None:
    gn.restore(world.folder / "extras", **_extras(world))


def _save_model(world: World) -> None:
    """Saves what a twin, grafted and edited, has."""
    twin = make_model(world.folder, world.kept["seed"])
    _graft_now(twin)
    gn.save(world.folder / "model", twin.model)


@operation("restore into a model", make=make_model, setup=_save_model)
def _restore_into(world: World) -> None:
    gn.restore(world.folder / "model", into=world.model)


def _edit_model(world: World) -> None:
    edit_model(world)


def _edit_and_undo_model(world: World) -> None:
    edit_model(world)
    world.train()
    world.backward()
    world.adopted.undo()


@operation("edit an adopted model", make=make_adopted)
def _edit_adopted(world: World) -> None:
    edit_model(world)


@operation("undo of an adopted model", make=make_adopted, setup=_edit_model)
def _undo_adopted(world: World) -> None:
    world.adopted.undo()


@operation("redo of an adopted model", make=make_adopted, setup=_edit_and_undo_model)
def _redo_adopted(world: World) -> None:
    world.adopted.redo()


@operation("trial of an adopted model", make=make_adopted)
def _try_adopted(world: World) -> None:
    with world.adopted.edit(reason="try", trial=True) as edit:
        edit_model(world, edit)
        edit.commit()


def _stage_everything(world: World) -> None:
    # For the rest of the process, in which it does no harm.
    _staging.SMALL = 0


@operation("edit with little memory", make=make_adopted, setup=_stage_everything)
def _edit_with_little_memory(world: World) -> None:
    with world.adopted.edit(reason="edit", memory="low") as edit:
        edit_model(world, edit)


def _edit_both(world: World) -> None:
    """Edits the adopted model and the net in one transaction."""
    with gn.edit(world.adopted, world.net, reason="both") as (first, second):
        edit_model(world, first)
        cut(world.net, second)


@operation("edit a model and a net together", make=make_adopted)
def _edit_model_and_net(world: World) -> None:
    _edit_both(world)


@operation("undo a model and a net together", make=make_adopted, setup=_edit_both)
def _undo_model_and_net(world: World) -> None:
    gn.undo(world.adopted, world.net)


# The next public call, and what follows it


def _forward(world: World) -> Any:
    return plain(world.passes())


def _step(world: World) -> None:
    for optimizer in world.optimizers:
        optimizer.step()


def _state_dict(world: World) -> Any:
    return plain(world.model.state_dict())


def _check(world: World) -> None:
    for graph in world.graphs:
        gn.check(graph)


def _edit(world: World) -> None:
    for net in reversed(world.nets):
        with net.edit(reason="next") as edit:
            cut_one(net, edit)
    if world.adopted is not None:
        with world.adopted.edit(reason="next") as edit:
            edit.remove_nodes(world.adopted.space("3")[0])


def _save(world: World) -> Any:
    # Forked processes share the folder of the world, so that each needs a place of its own.
    with tempfile.TemporaryDirectory(dir=world.folder) as folder:
        path = Path(folder, "saved")
        if not world.nets or world.adopted is not None:
            return None
        gn.save(path, world.model, optimizer=world.optimizers[0])
        loaded = gn.open(path)
        return sorted(loaded.nets)


def _version(world: World) -> Any:
    return [graph.version for graph in world.graphs]


def _weights(world: World) -> Any:
    return [plain(net.layers[0].outgoing().weights) for net in world.nets]


def _children(world: World) -> Any:
    return [[child.uid for child in net.layers[0][0].children] for net in world.nets]


def _parameters(world: World) -> Any:
    return [plain(list(graph.parameters())) for graph in world.graphs]


def _gradients(world: World) -> Any:
    return [[plain(p.grad) for p in graph.parameters()] for graph in world.graphs]


def _sizes(world: World) -> Any:
    return [graph.sizes for graph in world.graphs]


def _averaged(world: World) -> Any:
    return None if world.averaged is None else plain(world.averaged(X))


def _optimizer_state(world: World) -> Any:
    return [plain(optimizer.state_dict()) for optimizer in world.optimizers]


CALLS: dict[str, Callable[[World], Any]] = {
    "forward": _forward,
    "optimizer.step": _step,
    "state_dict": _state_dict,
    "gn.check": _check,
    "net.edit": _edit,
    "gn.save": _save,
    "net.version": _version,
    "relations.weights": _weights,
    "node.children": _children,
    "parameters": _parameters,
    "gradients": _gradients,
    "sizes": _sizes,
    "averaged forward": _averaged,
    "optimizer.state_dict": _optimizer_state,
}


@dataclass(frozen=True)
class Sight:
    """What is seen of a world from its next public call on."""

    answer: Any
    state: dict[str, Any]
    later: dict[str, Any]


def look(world: World, call: str) -> Sight:
    """Makes one public call, notes the state, and goes on: audit, edit and training step."""
    answer = _attempt(lambda: CALLS[call](world))
    state = _attempt_dict(lambda: fingerprint(world))
    later: dict[str, Any] = {"check": _attempt(lambda: _check(world))}
    later["edit"] = _attempt(lambda: _edit_again(world))
    later["training"] = _attempt(world.train)
    later |= _attempt_dict(lambda: _trained_state(world))
    return Sight(answer, state, later)


def _edit_again(world: World) -> None:
    """Opens an edit of every net, and cuts a relation of the first."""
    for number, net in enumerate(world.nets):
        with net.edit(reason="again") as edit:
            if number == 0:
                cut_one(net, edit)
    if world.adopted is not None:
        with world.adopted.edit(reason="again") as edit:
            edit.remove_nodes(world.adopted.space("0")[0])


def _attempt_dict(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
