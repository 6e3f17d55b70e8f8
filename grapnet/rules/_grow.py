"""GrowForTask: nodes of its own for every task, related to the task's classes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from grapnet._network import GrapNet
from grapnet.core._edit import Edit
from grapnet.core._errors import EditError
from grapnet.core._sets import NodeSet
from grapnet.spaces._adopted import Adopted

from ._budget import Budget
from ._rule import RuleContext, only, sources_of, staying


@dataclass(frozen=True)
class GrowForTask:
    """Adds nodes for a task to the last hidden layer, tagged with the task as their owner.

    The nodes get relations from the layer above, and to the outputs of some classes only. A budget
    of edits makes it add fewer nodes, each of them complete.

    Attributes:
        nodes: the number of nodes per task.
        classes: "seen" connects them to the outputs of all tasks so far, "own" to those of this
            one.
        classes_per_task: the number of outputs per task, in row order; tasks are whole numbers. Or
        outputs: the output rows of every task, in the order of the tasks.
        first_task: the number of the first task, with `classes_per_task`.
        parents: "all" nodes of the layer above, or the share of them, at least one, that is drawn
            for every new node.
        weights: initialisation of the relations, as in `edit.connect`.
        bias: initialisation of the biases, as in `edit.add_nodes`.
        tag: the owner of a task's nodes, in which "{task}" stands for the task.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([49, 0, 10])
        >>> grow = GrowForTask(nodes=48, classes_per_task=2)
        >>> for task in range(5):
        ...     with net.edit() as edit:
        ...         grow(net, edit, RuleContext(task=task))
        >>> net.sizes, len(net.layers[1].outgoing()), net.count().trainable
        ([49, 240, 10], 1440, 13450)
        >>> len(net.select(owner="task-4"))
        48
    """

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
        if self.nodes < 1:
            raise EditError(f"a task gets at least 1 node, got {self.nodes!r}")
        if self.classes not in ("seen", "own"):
            raise EditError(f'classes is "seen" or "own", got {self.classes!r}')
        if (self.classes_per_task is None) == (self.outputs is None):
            raise EditError(
                "say which outputs a task has: either classes_per_task= or outputs={task: rows}"
            )
        if self.outputs is not None:
            outputs = {task: tuple(rows) for task, rows in self.outputs.items()}
            object.__setattr__(self, "outputs", outputs)
        if self.parents != "all" and not 0 < self.parents <= 1:
            raise EditError(
                f'parents is "all", or a share above 0 and up to 1, got {self.parents!r}'
            )

    def __call__(self, net: GrapNet, edit: Edit, context: RuleContext) -> None:
        """Adds the nodes of the task."""
        if isinstance(net, Adopted):
            raise EditError(
                "GrowForTask connects new nodes to the outputs of some classes, and new nodes of an"
                " adopted model have all of their relations. Widen a space with GrowWidth(…,"
                " owner=…), or put a net into the model for its head: gn.graft"
            )
        owner = owner_of(self.tag, context.task)
        outputs = len(net.layers) - 1
        # The last hidden layer leads to the output only.
        number = outputs - 1
        if number < 1:
            raise EditError(
                "the net has no hidden layer to grow; give it an empty one: [49, 0, 10]"
            )
        above = staying(net, edit, only(sources_of(net, number), number))
        uids = net.layers[-1].uid[self._rows(context.task, net.sizes[-1])]
        children = NodeSet(net, {outputs: uids})
        n_parents = len(above)
        if self.parents != "all":
            n_parents = min(n_parents, max(1, round(self.parents * n_parents)))
        count = affordable(self.nodes, n_parents + len(children), context.budget)
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
            each = self.classes_per_task or 0
            before = int(task) - self.first_task
            parts = [range(n * each, (n + 1) * each) for n in range(before + 1)]
        if self.classes == "own":
            parts = parts[-1:]
        rows = sorted(set().union(*parts))
        if rows and not 0 <= rows[0] <= rows[-1] < width:
            raise EditError(
                f"task {task!r} has outputs {rows[0]} to {rows[-1]}, but the net has outputs 0 to"
                f" {width - 1}"
            )
        return torch.tensor(rows, dtype=torch.int64, device="cpu")


def owner_of(tag: str, task: Any) -> str:
    """Returns the owner of a task's nodes; raises EditError without a task."""
    if task is None:
        raise EditError("this rule needs a task; call manager.apply(net, step, task=…)")
    return tag.replace("{task}", str(task))


def affordable(nodes: int, relations_each: int, budget: Budget) -> int:
    """Returns how many of the nodes a budget has relations for."""
    if budget.edits is None or relations_each == 0:
        return nodes
    return min(nodes, budget.edits // relations_each)


def _drawn(size: int, count: int, times: int, generator: torch.Generator | None) -> Tensor:
    """Returns distinct rows out of `size`, ascending, [times, count]."""
    device = "cpu" if generator is None else generator.device
    keys = torch.rand(times, size, generator=generator, device=device)
    return keys.topk(count, dim=1).indices.sort(dim=1).values.cpu()
