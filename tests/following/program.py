"""A program of edits of every kind, for processes that are to stay equal."""

from typing import Any

import torch

import grapnet as gn

SIZES = [6, 8, 7, 4]


def make(seed: int = 0, sizes: list[int] = SIZES, **settings: Any) -> gn.GrapNet:
    generator = torch.Generator().manual_seed(seed)
    return gn.GrapNet(sizes, activation="tanh", density=0.7, generator=generator, **settings)


def cut(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    edit.cut(net.layers[step % 3].outgoing().smallest(count=2))


def connect(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    upper = net.layers[step % 3]
    lower = net.layers[step % 3 + 1]
    parent = upper[step % len(upper)]
    child = lower[step % len(lower)]
    if any(other == child for other in parent.children):
        edit.cut(parent.outgoing(to=[child.uid]))
    edit.connect(parent, child)


def add(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    number = 1 + step % 2
    new = edit.add_nodes(number, 2, owner=f"step {step}", activation="relu")
    edit.connect(net.layers[number - 1], new)
    edit.connect(new, net.layers[number + 1])


def remove(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    number = 1 + step % 2
    edit.remove_nodes(net.layers[number][step % len(net.layers[number])])
    edit.remove_orphans(fold_bias=True)


def freeze(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    edit.freeze(net.layers[step % 3].outgoing().largest(count=4))
    edit.freeze(net.layers[1][0], incoming=False)


def unfreeze(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    edit.unfreeze(net.layers[step % 3])
    edit.set_owner(net.layers[1][-1], f"free {step}")
    edit.set_activation(net.layers[2][0], ["relu", "tanh"][step % 2])


def assign(net: gn.GrapNet, edit: gn.Edit, step: int) -> None:
    relations = net.layers[step % 3].outgoing()
    relations = relations[~relations.frozen]
    random = torch.Generator().manual_seed(step)
    edit.assign(relations, torch.randn(len(relations), generator=random))
    edit.unfreeze(net.layers[2], incoming=False, outgoing=False)
    edit.assign(net.layers[2], step / 1000)


PROGRAM = [
    assign,
    "train",
    "undo",
    "redo",
    cut,
    "undo",
    connect,
    add,
    "undo",
    "redo",
    "train",
    freeze,
    "train",
    "undo",
    "undo",
    remove,
    freeze,
    "redo",
]
PROGRAM += [cut, "train", unfreeze, "undo", "trial", "redo", "undo"]


def perform(net: gn.GrapNet, action: Any, step: int) -> str:
    """Makes one edit and says of which kind it was; "" when there was nothing to take back."""
    if action in ("undo", "redo"):
        possible = bool(net.journal.undoable if action == "undo" else net.journal.redoable)
        if possible:
            getattr(net, action)()
        return action if possible else ""
    trial = action == "trial"
    verb = remove if action == "trial" else action
    generator = torch.Generator().manual_seed(step)
    with net.edit(
        reason=f"{verb.__name__} {step} ✓",
        by="ranks",
        trial=trial,
        generator=generator,
        allow_dead=True,
    ) as edit:
        verb(net, edit, step)
        edit.remark("as planned", step=step, score=0.1)
        if trial:
            edit.commit()
    return "trial" if trial else verb.__name__
