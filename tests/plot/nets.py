"""Nets to draw, and the texts that a picture shows."""

from typing import Any

import torch

import grapnet as gn


def grown(per_task: int = 3, tasks: int = 3, inputs: int = 6, outputs: int = 6) -> gn.GrapNet:
    """Returns a net that grew task by task; each task but the last is frozen, and a fifth of the
    inputs' is cut.
    """
    generator = torch.Generator().manual_seed(0)
    net = gn.GrapNet([inputs, 0, outputs], generator=generator)
    each = outputs // tasks
    for task in range(tasks):
        with net.edit(reason=f"grow task {task + 1}", generator=generator) as edit:
            nodes = edit.add_nodes(1, per_task, owner=f"task-{task + 1}")
            edit.connect(net.layers[0], nodes)
            edit.connect(nodes, net.layers[2][task * each : (task + 1) * each])
        if task < tasks - 1:
            with net.edit(reason=f"freeze task {task + 1}") as edit:
                edit.freeze(net.select(owner=f"task-{task + 1}"))
    with net.edit(reason="cut the weakest") as edit:
        edit.cut(net.layers[0].outgoing().smallest(fraction=0.2))
    return net


def families(sizes: tuple[int, ...] = (40, 60), children: int = 20) -> gn.GrapNet:
    """Returns a net without owners whose hidden nodes form families of these sizes, each with
    children of its own.
    """
    width = sum(sizes)
    members = torch.arange(width)
    family = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    parents = members.repeat_interleave(children)
    targets = (family * children).repeat_interleave(children) + torch.arange(children).repeat(width)
    inputs = torch.cartesian_prod(torch.arange(5), members)
    return gn.GrapNet.from_relations(
        [5, width, children * len(sizes)], [(inputs[:, 0], inputs[:, 1]), (parents, targets)]
    )


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def words(ax: Any) -> str:
    """Returns the title on one line."""
    return " ".join(ax.get_title().split())
