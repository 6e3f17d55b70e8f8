"""One of the processes of test_distributed: runs every check with the others and writes down what
it saw.
"""

import copy
import datetime
import gc
import hashlib
import json
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Adam, Optimizer

import grapnet as gn
from grapnet.following._distributed import Distributed
from grapnet.rules import PruneWeakest
from tests.core.worlds import plain
from tests.following.program import PROGRAM, SIZES, add, connect, cut, freeze, make, perform
from tests.test_documents import python_blocks

ROOT = Path(__file__).parents[2]


def batch(step: int, rank: int, width: int = SIZES[0]) -> Tensor:
    """Inputs that no two ranks share."""
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step, dist.get_rank())).square().sum().backward()
    optimizer.step()


def state(net: gn.GrapNet, optimizer: Optimizer | None = None) -> str:
    """The digest of all that must be equal on every rank, down to what undo would give back."""
    found: list[Any] = [net.version, net._next_uid, net.journal.undoable, net.journal.redoable]
    found += [net.state_dict(), [parameter.grad for parameter in net.parameters()]]
    for layer in net.layers:
        found += [layer.uids, layer.owners, layer.activations]
    for commit in net.history:
        found += [commit.version, commit.reason, commit.by, commit.undoes, commit.operations]
        vectors = [change.weights for change in commit.change.transitions.values()]
        vectors += [change.biases for change in commit.change.layers.values() if change.biases]
        for vector in vectors:
            found += [vector.born_values, vector.gone_values, vector.flips]
            found += [vector.index.removed, vector.index.inserted]
            if vector.assigned is not None:
                found += [vector.assigned.positions, vector.assigned.before, vector.assigned.after]
    if optimizer is not None:
        found += [optimizer.state[parameter] for parameter in net.parameters()]
    return hashlib.sha256(repr(plain(found)).encode()).hexdigest()


def message(call: Callable[[], Any]) -> list[str]:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def a_hundred_edits(rank: int) -> dict[str, Any]:
    net = make()
    net.journal.undo_limit = 100 if rank == 0 else 3
    model = Distributed(net)
    optimizer = Adam(net.parameters(), lr=0.01)
    gn.attach(optimizer, net)
    kinds = Counter[str]()
    seen = []
    for step in range(1000):
        action = PROGRAM[step % len(PROGRAM)]
        if action == "train":
            model.synchronize()
            for k in range(2):
                train(model, optimizer, 10 * step + k)
            seen.append(state(net, optimizer))
        elif rank == 0:
            kinds[perform(net, action, step)] += 1
        if action == "train" and net.version >= 130:
            break
    gn.check(net)
    return {
        "states": seen,
        "kinds": kinds,
        "version": net.version,
        "frozen": net.count().frozen,
        "limit": net.journal.undo_limit,
        "slots": sum(
            slot.numel() for p in net.parameters() for slot in optimizer.state[p].values()
        ),
    }


def gradients(rank: int) -> dict[str, Any]:
    """After an edit, the average over the ranks of what one process computes, also when they are
    accumulated.
    """
    net = make(dtype=torch.float64)
    model = Distributed(net, gradient_as_bucket_view=True)
    hook_calls = []
    model.register_comm_hook(hook_calls, _counted)
    if rank == 0:
        perform(net, add, 1)
        perform(net, freeze, 2)
    model.synchronize()
    alone = copy.deepcopy(net)
    inputs = [[batch(step, r).double() for r in range(2)] for step in range(2)]
    with model.no_sync():
        model(inputs[0][rank]).square().sum().backward()
    own = [p.grad.clone() for p in net.parameters()]
    if rank == 0:
        perform(net, "trial", 3)
    model.synchronize()
    model(inputs[1][rank]).square().sum().backward()
    (sum(alone(x).square().sum() for both in inputs for x in both) / 2).backward()
    pairs = [
        (p.grad, q.grad, g)
        for p, q, g in zip(net.parameters(), alone.parameters(), own, strict=True)
    ]
    return {
        "error": max(float((a - b).abs().max()) for a, b, _ in pairs if len(b)),
        "before": max(float((g - b).abs().max()) for _, b, g in pairs if len(b)),
        "state": state(net),
        "hook calls": len(hook_calls),
    }


def _counted(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(bucket.index())
    averaged = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    assert averaged is not None
    return averaged.get_future().then(lambda done: done.value()[0])


def frozen_and_empty(rank: int) -> dict[str, Any]:
    """Parameters without a coordinate: of frozen layers, of empty transitions, and of a net frozen
    as a whole.
    """
    found = {}
    for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"):
        net = make(sizes=[6, 5, 5, 4])
        with net.edit() as edit:
            edit.freeze(net.layers[1])
        model = Distributed(net, **{name: True})
        optimizer = Adam(net.parameters(), lr=0.01)
        gn.attach(optimizer, net)
        train(model, optimizer, 0)
        sizes = [net.transitions[0].weight.numel()]
        if rank == 0:
            with net.edit(allow_dead=True) as edit:
                edit.cut(net.layers[2].outgoing())
        model.synchronize()
        train(model, optimizer, 1)
        sizes.append(net.transitions[2].weight.numel())
        if rank == 0:
            with net.edit() as edit:
                edit.freeze(net.select())
        model.synchronize()
        model.register_comm_hook([], _counted)
        free = net.count().trainable
        train(model, optimizer, 2)
        if rank == 0:
            net.undo()
            net.undo()
        model.synchronize()
        train(model, optimizer, 3)
        found[name] = {"sizes": sizes, "free": free, "state": state(net, optimizer)}
    return found


def first_values(rank: int) -> dict[str, Any]:
    """Unlike DDP's own, frozen values too become those of rank 0; the graphs must be equal
    already.
    """
    nets = [gn.GrapNet([4, 3, 2], generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    with nets[0].edit() as edit:
        edit.freeze(nets[0].layers[1])
    before = state(nets[0])
    Distributed(nets[0], process_group=dist.new_group([0, 1]))
    found = {"before": before, "after": state(nets[0])}
    with nets[1].edit() as edit:
        edit.cut(nets[1].layers[0].outgoing()[[rank]])
    return {**found, "refused": message(lambda: Distributed(nets[1]))}


class Host(nn.Module):
    """A model with two nets, and with parameters and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = make()
        self.norm = nn.BatchNorm1d(4)
        self.second = make(1, [4, 5, 4])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


def inside_a_host(rank: int) -> dict[str, Any]:
    host = Host()
    model = Distributed(host, find_unused_parameters=True)
    optimizer = Adam(host.parameters(), lr=0.01)
    for net in model.nets:
        gn.attach(optimizer, net)
    names = list(model.state_dict())
    wrapper = weakref.ref(model.ddp)
    states = []
    for step in range(4):
        train(model, optimizer, step)
        if rank == 0:
            perform(host.first, [cut, add, freeze, "undo"][step], step)
            perform(host.second, [connect, "undo", cut, freeze][step], 0)
        model.synchronize()
        model.train(step % 2 == 0)
        states.append([state(net, optimizer) for net in model.nets])
        states[-1].append(
            hashlib.sha256(repr([p.tolist() for p in host.norm.parameters()]).encode()).hexdigest()
        )
    modes = [model.training, host.training, model.ddp.training]
    gc.collect()
    with torch.no_grad():
        buffers = host.norm.running_mean.tolist()
    same = all(a is b for a, b in zip(model.parameters(), host.parameters(), strict=True))
    copied = message(lambda: copy.deepcopy(model))
    return {
        "states": states,
        "names": [name for name in names if not name.startswith("module.")],
        "own": names == ["module." + name for name in host.state_dict()],
        "modes": modes,
        "old wrapper": wrapper() is None,
        "buffers": buffers,
        "same": same,
        "copy": copied,
    }


def stale(rank: int) -> dict[str, Any]:
    net = make()
    model = Distributed(net, device_mesh=init_device_mesh("cpu", (2,)))
    found = {}
    plans = {"edit": cut, "trial": "trial"}
    for name, action in plans.items():
        perform(net, action, 1) if rank == 0 else None
        found[name] = message(lambda: model(batch(0, rank))) if rank == 0 else None
        model.synchronize()
        found[f"{name}, synchronized"] = message(lambda: model(batch(0, rank)).sum().backward())
    perform(net, cut, 2)
    with torch.inference_mode():
        found["inference"] = message(lambda: model(batch(0, rank)))
    model.synchronize()
    net.execution.use("attention", transition=1)
    found["attention"] = message(lambda: model(batch(0, rank)))
    model.synchronize()
    model(batch(0, rank)).sum().backward()
    net.double()
    found["cast"] = message(lambda: model(batch(0, rank).double()))
    model.synchronize()
    net.zero_grad()
    model(batch(0, rank).double()).sum().backward()
    found["state"] = state(net)
    found["version"] = net.version
    wrapper = model.ddp
    model.synchronize()
    with torch.device("meta"):  # what is sent is made where the group wants it
        model.synchronize()
    found["nothing to do"] = model.ddp is wrapper
    return found


def alone_in_a_group(rank: int) -> dict[str, Any]:
    """A group of one process each: the graphs and the frozen values of different groups may
    differ.
    """
    groups = [dist.new_group([n]) for n in range(2)]
    net = make(seed=rank)
    with net.edit() as edit:
        edit.freeze(net.layers[1])
    before = net.transitions[0].frozen_values.tolist()
    model = Distributed(net, process_group=groups[rank])
    kept = net.transitions[0].frozen_values.tolist() == before
    for step in range(1 + rank):
        perform(net, cut, step)
    model.synchronize()
    model(batch(0, rank)).sum().backward()
    return {"version": net.version, "state": state(net), "kept": kept}


class Reluctant:
    """A follower that stops every commit."""

    def prepare(self, graph: Any, commit: gn.Commit) -> Callable[[], None]:
        raise gn.errors.OptimizerError("this rank's follower refuses")


def refused(rank: int) -> dict[str, Any]:
    """The error on all ranks when one of them is not where it should be."""
    found: dict[str, Any] = {}
    net = make()
    model = Distributed(net)
    if rank == 1:
        perform(net, cut, 1)
    found["edit on rank 1"] = message(model.synchronize)
    found["again"] = message(model.synchronize)

    net = make()
    model = Distributed(net)
    perform(net, cut, 1)
    found["the same edit on all"] = message(model.synchronize)
    perform(net, cut, rank)
    found["other edits on all"] = message(model.synchronize)

    net = make()
    model = Distributed(net)
    reluctant = Reluctant()
    if rank == 1:
        net.follow(reluctant)
    else:
        perform(net, cut, 1)
    found["a rank cannot follow"] = message(model.synchronize)

    net = make()
    perform(net, cut, 1)
    model = Distributed(net)
    if rank == 1:
        net.journal.undo_limit = 0
    else:
        net.undo()
    found["nothing to undo with"] = message(model.synchronize)

    net = make()
    model = Distributed(net)
    with net.edit() as edit:
        edit.cut(net.layers[0].outgoing()[[0]])
        if rank == 1:
            found["open edit"] = message(model.synchronize)
    if rank == 0:
        net.undo()
        found["open edit"] = message(model.synchronize)
    with torch.inference_mode(rank == 1):
        found["inference mode"] = message(model.synchronize)
    return found


def parts_of_a_transaction(rank: int) -> dict[str, Any]:
    """Rank 0 reverts what every rank has done before the model was wrapped, over two nets."""
    found = {}
    for verb in ("undo", "redo"):
        host = Host()
        nets = (host.first, host.second)
        with gn.edit(*nets) as edits:
            for net, edit in zip(nets, edits, strict=True):
                edit.cut(net.layers[0].outgoing()[:2])
        if verb == "redo":
            gn.undo(*nets)
        model = Distributed(host)
        if rank == 0:
            getattr(gn, verb)(*nets)
        model.synchronize()
        found[verb] = [[net.version, net.count().relations] for net in nets]
    return found


def undo_beyond_the_limit(rank: int) -> dict[str, Any]:
    """Rank 0 undoes more commits than the journal of rank 1 would keep by its own limit."""
    net = make()
    model = Distributed(net)
    before = copy.deepcopy(net.state_dict())
    if rank == 0:
        net.journal.undo_limit = 40
        for step in range(30):
            perform(net, cut, step)
        for _ in range(30):
            net.undo()
        net.journal.undo_limit = 2
    model.synchronize()
    after = net.state_dict()
    return {
        "version": net.version,
        "limit": net.journal.undo_limit,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def adopted_model(rank: int) -> dict[str, Any]:
    """A convolutional model whose spaces rank 0 edits; returns what both ranks must agree on."""
    torch.manual_seed(0)
    host = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 3)
    )
    optimizer = Adam(host.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    net = gn.adopt(host, torch.randn(2, 2, 5, 5), optimizer=optimizer)
    model = Distributed(net)
    space = net.space("0")
    states = []
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 2, 5, 5, generator=draw)).square().sum().backward()
        optimizer.step()
        if rank == 0:
            if step in (1, 4):
                with net.edit(reason="remove") as edit:
                    edit.remove_nodes(space[:2])
            if step == 2:
                net.undo()
            if step == 3:
                with net.edit(reason="grow") as edit:
                    edit.add_nodes(space, 3)
                    edit.assign(host[4].weight, torch.randn(host[4].weight.shape))
            if step in (6, 7):
                net.undo()
        model.synchronize()
        # Running statistics are those of each rank's own last batch, as with every DDP.
        found = [net.version, space.uids, dict(host.named_parameters())]
        found += [host[1].running_mean.shape]
        found += [optimizer.state[parameter] for parameter in host.parameters()]
        states.append(hashlib.sha256(repr(plain(found)).encode()).hexdigest())
    return {"states": states, "sizes": [len(space), host[4].in_features]}


def pruned_and_repaired(rank: int) -> dict[str, Any]:
    """Rank 0 prunes with repair, trains with the other, and undoes; what both must agree on."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = Adam(host.parameters(), lr=0.01)
    net = gn.adopt(host, batch(0, 0, 6), optimizer=optimizer)
    model = Distributed(net)
    examples = batch(1, 0, 6)
    calibration = [batch(step, 0, 6) for step in range(2, 8)]
    seen = []
    assigned = []

    def look() -> None:
        model.synchronize()
        slots = [optimizer.state[parameter] for parameter in host.parameters()]
        found = [net.version, dict(host.named_parameters()), slots, host(examples)]
        seen.append(hashlib.sha256(repr(plain(found)).encode()).hexdigest())

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number, rank, 6)).square().sum().backward()
        optimizer.step()

    step(0)
    look()
    ranked = {"relations": PruneWeakest(0.5, scope="model")}
    for share in ({"nodes": 0.5}, {"relations": 0.5}, ranked):
        before = host(examples)
        if rank == 0:
            pruning = gn.prune(net, calibration, **share)
            assigned.append(sum(stage.assigned for stage in pruning.stages))
        look()
        if rank == 0:
            pruning.undo()
            assert torch.equal(host(examples), before)
        look()
        if rank == 0:
            gn.prune(net, calibration, **share)
        look()
        step(len(seen))
        look()
    return {"states": seen, "sizes": [host[2].in_features, host[2].out_features], "own": assigned}


def the_guide(rank: int) -> dict[str, Any]:
    """The script of the guide."""
    names: dict[str, Any] = {"__name__": "guide"}
    for block in python_blocks((ROOT / "docs/guides/distributed.md").read_text()):
        exec(compile(block, "docs/guides/distributed.md", "exec"), names)
    net = names["train"](30)
    return {
        "state": state(net),
        "net": repr(net),
        "reasons": [commit.reason for commit in net.history],
    }


def depth(rank: int) -> dict[str, Any]:
    """Layers come and leave on rank 0, and the others follow."""
    net = make()
    model = Distributed(net)
    optimizer = Adam(net.named_parameters(), lr=0.01)
    gn.attach(optimizer, net)
    sizes = []
    seen = []

    def insert(edit: gn.Edit) -> None:
        edit.insert_layer(1, 10, init="net2deeper", activation="identity", owner="deep")
        edit.insert_layer(0)

    def edited(act: Callable[[gn.Edit], None]) -> Callable[[], Any]:
        def act_now() -> None:
            with net.edit() as edit:
                act(edit)

        return act_now

    actions = [
        lambda: perform(net, cut, 1),
        edited(insert),
        edited(lambda edit: edit.connect(net.layers[3][8:], net.layers[4])),
        net.undo,
        net.undo,
        net.redo,
        edited(lambda edit: edit.remove_layer(1)),
        net.undo,
    ]
    for step, action in enumerate(actions):
        if rank == 0:
            action()
        model.synchronize()
        train(model, optimizer, step)
        sizes.append(net.sizes)
        seen.append(state(net, optimizer))
    gn.check(net)
    return {"sizes": sizes, "states": seen, "names": optimizer.param_groups[0]["param_names"]}


CHECKS = [
    a_hundred_edits,
    gradients,
    frozen_and_empty,
    first_values,
    inside_a_host,
    stale,
    alone_in_a_group,
    refused,
    parts_of_a_transaction,
    undo_beyond_the_limit,
    adopted_model,
    depth,
    pruned_and_repaired,
    the_guide,
]


def main(folder: Path, rank: int, only: list[str]) -> None:
    limit = datetime.timedelta(seconds=90)  # a rank that waits for one that failed gives up
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit
    )
    found: dict[str, Any] = {}
    for check in CHECKS:
        if not only or check.__name__ in only:
            try:
                found[check.__name__] = check(rank)
            except Exception:
                found[check.__name__] = {"raised": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
