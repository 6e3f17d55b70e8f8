"""What is done to the grown net, one function a chapter; each returns what it measured as plain
data.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

import grapnet as gn
from grapnet.learning import evaluate, structural_drift
from grapnet.rules import CovarianceSifter, FreezeOwner, Moment, PruneWeakest

from .heads import TASKS, Digits, Learner, owner_of

VIEWS = ("auto", "reference", "dense", "family", "sparse")


class Scene:
    """The grown net, and everything that the chapters need beside it."""

    def __init__(
        self, learner: Learner, digits: Digits, scores: list[tuple[int, float]], seed: int
    ) -> None:
        self.net, self.optimizer, self.memory = learner.net, learner.optimizer, learner.memory
        self.settings, self.digits, self.scores, self.seed = learner.settings, digits, scores, seed
        gn.detach(self.optimizer, self.net)
        # from here on Adam keeps what it knows about coordinates that stay
        gn.attach(self.optimizer, self.net)

    def logits(self) -> Tensor:
        """Returns what the net says about the test images, [n, 10]."""
        with torch.no_grad():
            return self.net(self.digits.test_x)

    def local(self) -> list[float]:
        """Returns the accuracy of every task, with a choice between its two digits."""
        return evaluate(self.net, self.digits.test_x, self.digits.test_y, TASKS).local

    def score(self) -> float:
        """Returns the accuracy with a choice among all ten digits, and remembers it beside the
        version.
        """
        self.scores.append((self.net.version, accuracy(self.net, self.digits)))
        return self.scores[-1][1]

    def coordinates(self, task: int) -> list[Tensor]:
        """Returns copies of the relations to and from the nodes of a task, and of their biases."""
        nodes = self.net.select(owner=owner_of(task))
        parts = (nodes.incoming().weights, nodes.outgoing().weights, nodes.biases)
        return [part.detach().clone() for part in parts]

    def moments(self) -> list[Tensor]:
        """Returns copies of the two moments that Adam has of every Parameter."""
        states = [self.optimizer.state[parameter] for parameter in self.net.parameters()]
        return [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]

    def train(
        self, net: gn.GrapNet, optimizer: torch.optim.Optimizer, *, epochs: int, seed: int
    ) -> None:
        """Trains on all digits at once; equal seeds give equal batches."""
        order = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for rows in torch.randperm(len(self.digits.y), generator=order).split(
                2 * self.settings.batch
            ):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    net(self.digits.x[rows]), self.digits.y[rows]
                ).backward()
                optimizer.step()


def accuracy(model: nn.Module, digits: Digits, tasks: int = len(TASKS)) -> float:
    """Returns the accuracy on the digits of the first tasks, with a choice among all of these."""
    return evaluate(model, digits.test_x, digits.test_y, TASKS[:tasks]).overall


def cut(scene: Scene) -> dict[str, Any]:
    """Cuts all relations that one task owns, looks at every task, and takes the cut back."""
    net, task = scene.net, scene.settings.cut_task
    before, logits, parameters, moments = (
        scene.local(),
        scene.logits(),
        _copies(net),
        scene.moments(),
    )
    relations = net.count().relations
    reason = f"cut what {owner_of(task)} owns"
    with net.edit(reason, by="demo", allow_dead=True) as edit:
        edit.cut(net.select(owner=owner_of(task)).outgoing())
    left, after, moved, cut_score = (
        net.count().relations,
        scene.local(),
        scene.logits() - logits,
        scene.score(),
    )
    net.undo()
    changed = [n for n, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]]
    others = [digit for n, digits in enumerate(TASKS, 1) if n != task for digit in digits]
    return {
        "task": task,
        "relations": [relations, left, net.count().relations],
        "before": before,
        "after": after,
        "undone": scene.local(),
        "changed_tasks": changed,
        "other_logits_moved": float(moved[:, others].abs().max()),
        "seen_class_after": cut_score,
        "seen_class_undone": scene.score(),
        "undo_restored": {
            "logits": torch.equal(logits, scene.logits()),
            "parameters": _equal(parameters, _copies(net)),
            "Adam's moments": _equal(moments, scene.moments()),
        },
    }


def freeze(scene: Scene) -> dict[str, Any]:
    """Freezes what one task has learnt and trains the rest on."""
    net, task = scene.net, scene.settings.frozen_task
    other = task % len(TASKS) + 1  # stays trainable: the control
    with net.edit(f"keep {owner_of(task)} as it is", by="FreezeOwner") as edit:
        FreezeOwner(owner_of(task))(net, edit, Moment())
    frozen_score, then = scene.score(), [scene.coordinates(number) for number in (task, other)]
    scene.train(net, scene.optimizer, epochs=1, seed=scene.seed)
    since = [scene.coordinates(number) for number in (task, other)]
    frozen, free = (structural_drift(*pair) for pair in zip(then, since, strict=True))
    return {
        "task": task,
        "coordinates": frozen.coordinates,
        "frozen": net.count().frozen,
        "trainable": net.count().trainable,
        "drift": frozen.largest,
        "other_task": other,
        "other_drift": free.largest,
        "seen_class_before": frozen_score,
        "seen_class": scene.score(),
    }


def sift(scene: Scene) -> dict[str, Any]:
    """Lets two rules cut in one transaction and trains on, beside a copy that was not sifted."""
    net, settings, before, nodes = scene.net, scene.settings, scene.net.count(), scene.net.sizes[1]
    whole, started = copy.deepcopy(net), accuracy(net, scene.digits)
    whole_optimizer = Adam(whole.parameters(), lr=settings.lr)
    whole_optimizer.load_state_dict(scene.optimizer.state_dict())
    manager = gn.RuleManager(seed=scene.seed)
    manager.inject(CovarianceSifter(transitions=(0,), fraction=settings.sifted_nodes))
    manager.inject(PruneWeakest(transitions=0, fraction=settings.sifted_relations))
    with manager.recording(net), torch.no_grad():
        net(scene.digits.x)
    planned, state = manager.apply(net, dry_run=True), _coordinates_of(scene)
    commit = manager.apply(net)
    sifted, carried = scene.score(), _coordinates_of(scene)
    for model, optimizer in ((net, scene.optimizer), (whole, whole_optimizer)):
        scene.train(model, optimizer, epochs=settings.epochs, seed=scene.seed + 1)
    return {
        "rules": manager.names,
        "commit": repr(commit),
        "planned_cut": planned.cut,
        "relations": [before.relations, net.count().relations],
        "nodes": [nodes, net.sizes[1]],
        "trainable": [before.trainable, net.count().trainable],
        "optimizer_coordinates": [state, carried],
        "seen_class_before": started,
        "seen_class_sifted": sifted,
        "seen_class": scene.score(),
        "seen_class_not_sifted": accuracy(whole, scene.digits),
    }


def views(scene: Scene) -> dict[str, Any]:
    """Computes the same logits in every way there is, and compares them with the walk from node to
    node.
    """
    net, x = scene.net, scene.digits.test_x
    chosen, found, refused = net.execution.choices(), {}, {}
    with torch.no_grad():
        walked = net.walk(x)
        for name in VIEWS:
            try:
                net.execution.use(name)
            except gn.PlanError as error:  # as of the compiled kernels where there was no compiler
                refused[name] = str(error).splitlines()[0]
            else:
                found[name] = net(x)
        net.execution.choose(chosen)
        found["snapshot"] = net.snapshot()(x)
    differences = {name: float((logits - walked).abs().max()) for name, logits in found.items()}
    return {
        "differences": differences,
        "largest": max(differences.values()),
        "largest_logit": float(walked.abs().max()),
        "refused": refused,
    }


def save(scene: Scene, path: Path) -> dict[str, Any]:
    """Saves the net with its journal, loads a copy, and takes the last edit back in the copy
    alone.
    """
    net, logits, relations = scene.net, scene.logits(), scene.net.count().relations
    gn.save(path, net, undo=True, optimizer=scene.optimizer, memory=scene.memory)
    again = gn.load(path, device=scene.digits.x.device)
    with torch.no_grad():
        same = torch.equal(again(scene.digits.test_x), logits)
    undone = again.undo()
    gn.check(again)
    return {
        "bytes": path.stat().st_size,
        "loaded_equal": same,
        "undone": undone.reason,
        "relations": [relations, again.count().relations],
        "original_untouched": torch.equal(scene.logits(), logits)
        and net.count().relations == relations,
    }


def _coordinates_of(scene: Scene) -> int:
    """Returns about how many coordinates Adam has moments."""
    return sum(moment.numel() for moment in scene.moments()[::2])


def _copies(net: gn.GrapNet) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def _equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
