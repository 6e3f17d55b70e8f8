"""Grow, audit, undo, prune and save a network while it learns the digits that ship with scikit-learn.

Run it with `make demo`; it takes a few seconds and writes runs/demo/.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import grapnet as gn

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


@dataclass
class Settings:
    """Five tasks of two digits each, one after the other, with a small memory of earlier images."""

    nodes_per_task: int = 24  # hidden nodes grown for each task
    epochs: int = 8  # passes over each task
    memory_per_class: int = 20  # images kept for replay
    learning_rate: float = 0.01
    seed: int = 0
    out: Path = Path("runs/demo")


def main(settings: Settings | None = None) -> dict[str, object]:
    """Runs the whole story and returns the numbers it prints."""
    settings = settings or Settings()
    torch.manual_seed(settings.seed)
    train, test = _digits()
    start = time.perf_counter()

    # A head of 64 sensory nodes, no hidden node yet and ten outputs. Adam follows every edit.
    net = gn.GrapNet([64, 0, 10])
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.learning_rate)
    gn.attach(optimizer, net)
    memory: list[tuple[Tensor, Tensor]] = []
    for number, classes in enumerate(TASKS):
        seen = [c for task in TASKS[: number + 1] for c in task]
        with net.edit(reason=f"grow for task {number}") as edit:
            nodes = edit.add_nodes(1, settings.nodes_per_task, owner=f"task-{number}")
            edit.connect(net.layers[0], nodes)
            edit.connect(nodes, net.layers[2][list(classes)])
        _train(net, optimizer, _only(train, classes), memory, seen, settings)
        images, labels = _only(train, classes)
        for c in classes:
            memory.append(
                (images[labels == c][: settings.memory_per_class], labels[labels == c][: settings.memory_per_class])
            )
        print(
            f"task {number} {classes}: {net}, accuracy on all seen digits {_accuracy(net, _only(test, seen), seen):.1%}"
        )

    everything = [c for task in TASKS for c in task]
    learned = _accuracy(net, test, everything)
    before = net(test[0])

    # An audit: cut what task 2 owns, look, and have it all back.
    base = [_accuracy(net, _only(test, task), task) for task in TASKS]
    with net.edit(reason="audit task 2", trial=True) as edit:
        edit.cut(net.select(owner="task-2").outgoing())
        edit.commit()
        cut = [_accuracy(net, _only(test, task), task) for task in TASKS]
    drops = [round(b - c, 4) for b, c in zip(base, cut, strict=True)]
    identical = torch.equal(before, net(test[0]))
    print(f"\ncutting task 2's relations costs, task by task: {drops}; taken back bit for bit: {identical}")

    # A prune with the optimizer still attached, some training, and the way back.
    relations = net.count().relations
    with net.edit(reason="prune the weakest half", by="demo") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.5))
    pruned = net.count().relations
    _train(net, optimizer, train, [], everything, settings)
    fine_tuned = _accuracy(net, test, everything)
    print(f"pruned {relations:,} → {pruned:,} relations and trained on all digits: {fine_tuned:.1%}")

    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / "digits.safetensors"
    gn.save(path, net, undo=True, optimizer=optimizer)
    again = gn.load(path)
    same = torch.equal(net(test[0]), again(test[0]))
    again.undo()
    print(f"saved, loaded (equal: {same}), and undid the prune in the copy: {again.count().relations:,} relations")
    print("\nhistory:", *net.history, sep="\n  ")

    result: dict[str, object] = {
        "seen_class_accuracy": learned,
        "drops_after_cutting_task_2": drops,
        "taken_back_bit_for_bit": identical,
        "relations": relations,
        "relations_after_prune": pruned,
        "accuracy_after_prune_and_training": fine_tuned,
        "loaded_equal": same,
        "relations_after_undo": again.count().relations,
        "seconds": round(time.perf_counter() - start, 2),
    }
    (settings.out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {settings.out}/ in {result['seconds']} s")
    return result


def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16 - 0.3, labels, test_size=0.3, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)
    return (x_train.float(), y_train), (x_test.float(), y_test)


def _only(data: tuple[Tensor, Tensor], classes: list[int] | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    chosen = torch.isin(data[1], torch.tensor(classes))
    return data[0][chosen], data[1][chosen]


def _train(
    net: gn.GrapNet,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    memory: list[tuple[Tensor, Tensor]],
    seen: list[int],
    settings: Settings,
) -> None:
    """Trains with cross-entropy over the classes seen so far, each batch with as many remembered images."""
    images, labels = data
    old = (torch.cat([m[0] for m in memory]), torch.cat([m[1] for m in memory])) if memory else None
    for _ in range(settings.epochs):
        for batch in torch.randperm(len(images)).split(32):
            x, y = images[batch], labels[batch]
            if old is not None:
                chosen = torch.randint(len(old[0]), (32,))
                x, y = torch.cat([x, old[0][chosen]]), torch.cat([y, old[1][chosen]])
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x)[:, seen], torch.searchsorted(torch.tensor(seen), y)).backward()
            optimizer.step()


@torch.no_grad()
def _accuracy(net: gn.GrapNet, data: tuple[Tensor, Tensor], classes: list[int] | tuple[int, ...]) -> float:
    """Returns the accuracy of a choice among `classes`."""
    chosen = torch.tensor(classes)[net(data[0])[:, list(classes)].argmax(1)]
    return round((chosen == data[1]).double().mean().item(), 4)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    main()
