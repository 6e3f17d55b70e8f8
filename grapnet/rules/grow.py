"""GrowForTask: nodes of its own for every task, related to the classes that it may speak for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._resolve import INITIALISATIONS
from grapnet.core._sets import NodeSet
from grapnet.network import GrapNet

from .budget import Budget
from .rule import Moment
from .together import staying


@dataclass(frozen=True)
class GrowForTask:
    """Adds nodes for a task to the last hidden layer, tagged with the task as their owner.

    They get relations from the layer above, and relations to the outputs of some classes only. A
    budget of edits makes it grow fewer nodes, each of them whole.

    Attributes:
        layer: number of the last hidden layer; negative numbers count from the output.
        nodes: how many a task gets.
        classes: "seen" relates them to the outputs of the tasks up to this one, "own" to those of
            this one.
        classes_per_task: tasks are whole numbers and each brings this many outputs, in row order;
            or
        outputs: the output rows of every task, in the order in which the tasks come.
        first_task: the number of the first task, with `classes_per_task`.
        parents: "all" nodes of the layer above, or the share of them, at least one, drawn for every
            new node.
        weights: initialisation of the relations, as in `edit.connect`.
        bias: initialisation of the biases, as in `edit.add_nodes`.
        tag: how a task becomes an owner.

    Examples:
        >>> import grapnet as gn
        >>> net, grow = gn.GrapNet([49, 0, 10]), GrowForTask(layer=1, nodes=48, classes_per_task=2)
        >>> for task in range(5):
        ...     with net.edit() as edit:
        ...         grow(net, edit, Moment(task=task))
        >>> net.sizes, len(net.layers[1].outgoing()), net.count().trainable
        ([49, 240, 10], 1440, 13450)
        >>> len(net.select(owner="task-4"))
        48
    """

    layer: int
    nodes: int
    classes: Literal["seen", "own"] = "seen"
    classes_per_task: int | None = None
    outputs: Mapping[Any, Iterable[int]] | None = None
    first_task: int = 0
    parents: Literal["all"] | float = "all"
    weights: str = "alloc"
    bias: str = "zero"
    tag: str = "task-{task}"

    def __post_init__(self) -> None:
        require_count(self.nodes, "nodes that a task gets")
        if self.classes not in ("seen", "own"):
            raise EditError(f'classes is "seen" or "own", got {self.classes!r}')
        if (self.classes_per_task is None) == (self.outputs is None):
            raise EditError(
                "say which outputs a task has: either classes_per_task= or outputs={task: rows}"
            )
        if self.classes_per_task is not None:
            require_count(self.classes_per_task, "classes of a task")
        if self.outputs is not None:
            object.__setattr__(
                self, "outputs", {task: tuple(rows) for task, rows in self.outputs.items()}
            )
        if self.parents != "all" and not (
            isinstance(self.parents, int | float) and 0 < self.parents <= 1
        ):
            raise EditError(
                f'parents is "all", or a share above 0 and up to 1, got {self.parents!r}'
            )
        for name in (self.weights, self.bias):
            if name not in INITIALISATIONS:
                raise EditError(
                    f"weights and bias are one of {', '.join(INITIALISATIONS)}, got {name!r}"
                )
        owner_of(self.tag, 0)

    def __call__(self, net: GrapNet, edit: Edit, now: Moment) -> None:
        """Adds the nodes of the task that `now` tells."""
        number, owner = hidden_layer(net, self.layer), owner_of(self.tag, now.task)
        if number != len(net.layers) - 2:
            raise EditError(
                f"layer {number} does not lead to the output, so its nodes have no classes to"
                f" relate to; grow layer {len(net.layers) - 2}"
            )
        above, uids = (
            staying(net, edit, number - 1),
            net.layers[-1].uid[self._rows(now.task, net.sizes[-1])],
        )
        children = NodeSet(net, {number + 1: uids})
        share = 1.0 if self.parents == "all" else float(self.parents)
        n_parents = min(len(above), max(1, round(share * len(above))))
        count = affordable(self.nodes, n_parents + len(children), now.budget)
        edit.remark(
            f"grows {count} nodes for {owner!r}",
            owner=owner,
            nodes=count,
            parents=n_parents,
            children=len(children),
        )
        if count == 0:
            return
        new = edit.add_nodes(number, count, owner=owner, bias=self.bias)
        if self.parents == "all":
            edit.connect(above, new, weights=self.weights)
        else:
            rows = _drawn(len(above), n_parents, count, edit.generator)  # [count, n_parents]
            edit.connect(
                above.uids[rows.flatten()],
                new.uids.repeat_interleave(n_parents),
                pairs="aligned",
                weights=self.weights,
            )
        edit.connect(new, children, weights=self.weights)

    def _rows(self, task: Any, width: int) -> Tensor:
        """Returns the output rows that the nodes of a task relate to, ascending."""
        if self.outputs is not None:
            tasks = list(self.outputs)
            if task not in tasks:
                raise EditError(
                    f"outputs= names the rows of the tasks {tasks}, not of task {task!r}"
                )
            parts = [self.outputs[known] for known in tasks[: tasks.index(task) + 1]]
        else:
            if not isinstance(task, Integral) or int(task) < self.first_task:
                raise EditError(
                    f"with classes_per_task= tasks are whole numbers from {self.first_task}, got"
                    f" task {task!r}; name the rows of other tasks with outputs={{task: rows}}"
                )
            each, before = self.classes_per_task or 0, int(task) - self.first_task
            parts = [range(n * each, (n + 1) * each) for n in range(before + 1)]
        rows = sorted(
            {row for part in (parts if self.classes == "seen" else parts[-1:]) for row in part}
        )
        if rows and not 0 <= rows[0] <= rows[-1] < width:
            raise EditError(
                f"task {task!r} has outputs {rows[0]} to {rows[-1]}, but the net has outputs 0 to"
                f" {width - 1}"
            )
        return torch.tensor(rows, dtype=torch.int64, device="cpu")


def owner_of(tag: str, task: Any) -> str:
    """Returns the owner that a task's nodes are tagged with; raises EditError when no task was
    told.
    """
    if not isinstance(tag, str) or "{task}" not in tag:
        raise EditError(f'a tag holds the place of the task, as in "task-{{task}}", got {tag!r}')
    if task is None:
        raise EditError(
            "this rule works for a task, and none was told; say which: manager.apply(net, step,"
            " task=…)"
        )
    return tag.replace("{task}", str(task))


def hidden_layer(net: GrapNet, layer: int) -> int:
    """Returns the number of a hidden layer, counted from the sensory one; raises EditError for any
    other layer.
    """
    last = len(net.layers) - 1
    number = layer + last + 1 if layer < 0 else layer
    if not 0 < number < last:
        raise EditError(f"only hidden layers grow, and layer {layer} of 0 to {last} is none")
    return number


def affordable(nodes: int, relations_each: int, budget: Budget) -> int:
    """Returns how many of the nodes a budget has relations for."""
    if budget.edits is None or relations_each == 0:
        return nodes
    return min(nodes, budget.edits // relations_each)


def require_count(number: object, what: str) -> None:
    """Raises EditError for anything but a positive whole number."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise EditError(f"the number of {what} is a whole number, at least 1, got {number!r}")


def _drawn(size: int, count: int, times: int, generator: torch.Generator | None) -> Tensor:
    """Returns `count` distinct rows out of `size`, ascending, drawn `times` times: [times,
    count].
    """
    device = "cpu" if generator is None else generator.device
    keys = torch.rand(times, size, generator=generator, device=device)
    return keys.topk(count, dim=1).indices.sort(dim=1).values.cpu()
