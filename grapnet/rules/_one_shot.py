"""gn.prune: prunes a trained model layer by layer, and repairs it, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grapnet.core._errors import EditError, GrapNetError, HistoryError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.core._sets import RelationSet
from grapnet.spaces import adopt
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._statistics import call_of

from ._nodes import PruneNodes
from ._obs import matrix_recorders
from ._prune import PruneWeakest
from ._repair import gram_recorders
from ._repair import repair as repair_readers
from ._rule import Layers, RuleContext, Transitions, nets_of

# What commits of one run have in common in the journal.
REMARK = "gn.prune"


class Stage(NamedTuple):
    """One layer or transition of a run.

    Attributes:
        name: what was pruned.
        leaving: how many nodes or relations left.
        present: how many there were.
        assigned: how many weights and biases got another value.
        seconds: how long it took; 0 for a stage of an earlier call.
    """

    name: str
    leaving: int
    present: int
    assigned: int
    seconds: float


class Pruning:
    """What `gn.prune` did, and the way back.

    Attributes:
        nets: the nets, or the graph of an adopted model, by name.
        stages: what left, layer by layer.
        before: the score of the probe before; None without a probe.
        after: the score of the probe afterwards.
        undo_bytes: how many bytes undo keeps at most.
    """

    def __init__(self, nets: dict[str, Graph], undo_bytes: int) -> None:
        self.nets = nets
        self.stages: tuple[Stage, ...] = ()
        self.before: float | None = None
        self.after: float | None = None
        self.undo_bytes = undo_bytes
        self._nets = list(nets.values())
        # the versions that each net has to go back to, and its undo limit before
        self._start = [net.version for net in self._nets]
        self._limits = [net.journal.undo_limit for net in self._nets]

    def undo(self) -> None:
        """Reverts all of it, the last stage first, and gives the nets their undo limits back.

        Raises:
            HistoryError: a net was edited since, or the journal has dropped a stage; nothing is
                changed in that net.
        """
        for place in reversed(range(len(self._nets))):
            net = self._nets[place]
            commits = _since(net, self._start[place])
            for commit in commits:
                if _remark_of(commit) is None:
                    raise HistoryError(
                        f"version {commit.version} ({commit.reason!r}) was committed after the"
                        " pruning; undo it first"
                    )
            for _ in commits:
                net.undo()
        self.accept()

    def accept(self) -> None:
        """Keeps the pruned model, and gives the nets their undo limits back.

        What undo needs of stages beyond the limit is dropped.
        """
        for net, limit in zip(self._nets, self._limits, strict=True):
            net.journal.undo_limit = limit

    def __repr__(self) -> str:
        lines = []
        for stage in self.stages:
            lines.append(f"  {stage.name}: {stage.leaving:,} of {stage.present:,} removed")
        if self.before is not None and self.after is not None:
            lines.append(f"  score: {self.before:.4g} before, {self.after:.4g} afterwards")
        return "\n".join(["Pruning(", *lines, ")"])


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    nodes: float | None = None,
    relations: float | None = None,
    pattern: tuple[int, int] | None = None,
    by: Any = None,
    repair: bool = True,
    spaces: Layers | None = None,
    transitions: Transitions | None = None,
    multiple: int = 1,
    rows: int | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    probe: Callable[[], float] | None = None,
    preview: bool = False,
    resume: bool = False,
    most_undo_bytes: int | None = None,
    progress: Callable[[list[Any]], Iterable[Any]] | None = None,
    generator: torch.Generator | None = None,
) -> Pruning:
    """Prunes a trained model in one shot: layer by layer, each repaired before the next.

    Every layer is one transaction. Its statistics are recorded while the model runs on the batches
    with all layers before it pruned already, as in SparseGPT. The model is in evaluation mode
    meanwhile, and has its own modes again afterwards. It is not trained.

    An error or an interrupt leaves the layers before pruned and the others as they were; the same
    call with `resume=True` goes on from there, also after saving and loading.

    Args:
        model: a net, an adopted model or its graph, or a model with nets inside; any other model is
            adopted with the first batch.
        batches: what the model runs on, once per layer, so no iterator: a list, or a DataLoader
            with an order of its own. A batch is a tensor; a tuple or list, of which the first entry
            is passed; a dict, which is passed by name; or an `Example`.
        nodes: the share of the nodes of each layer or space to remove; or
        relations: the share of the relations of each transition to cut; or
        pattern: (n, m): keep n of m successive parents of every child, such as (2, 4).
        by: the criterion, as for `PruneNodes` or `PruneWeakest`; by default "elimination" for nodes
            and "alternating" for relations.
        repair: whether the relations and biases that stay make up for what leaves. Criteria that
            assign weights themselves do so in any case.
        spaces: which layers or spaces lose nodes; as for `PruneNodes`.
        transitions: which transitions lose relations; as for `PruneWeakest`.
        multiple: sizes of tensors stay multiples of this; for nodes.
        rows: how many rows of a pass are recorded for the repair, evenly spaced; all by default.
        loss: `loss(model, batch)` returns the loss, for criteria that record gradients. Gradients
            of Parameters are as before afterwards.
        probe: a function that returns a score, called before and afterwards.
        preview: whether everything is undone at the end; the result has the scores.
        resume: whether stages that an earlier call with the same settings committed last are left
            out.
        most_undo_bytes: raise GrapNetError before anything changes if undo could keep more.
        progress: wraps the list of stages, as `tqdm.tqdm` does, which shows a progress bar.
        generator: source of random numbers.

    Returns:
        A `Pruning`: what left, the scores, and `undo()` for all of it, whatever the undo limit of
        the nets. `accept()` lets go of what undo keeps beyond that limit.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([8, 32, 16, 4])
        >>> pruning = gn.prune(net, [torch.randn(256, 8)], nodes=0.5)
        >>> net.sizes
        [8, 16, 8, 4]
        >>> pruning.undo()
        >>> net.sizes
        [8, 32, 16, 4]
    """
    amounts = {"nodes": nodes, "relations": relations, "pattern": pattern}
    asked = [name for name, amount in amounts.items() if amount is not None]
    if len(asked) != 1:
        raise EditError(
            "say how much to prune, by one of nodes=, relations= and pattern=; got"
            f" {', '.join(asked) or 'none'}"
        )
    model, nets = _model_and_nets(model, batches)
    steps: list[_Step] = []
    for name, net in nets.items():
        if nodes is not None:
            by = "elimination" if by is None else by
            rule: Any = PruneNodes(fraction=nodes, by=by, spaces=spaces, multiple=multiple, keep=1)
            steps += _node_steps(name, net, rule)
        else:
            by = "alternating" if by is None else by
            rule = PruneWeakest(fraction=relations, pattern=pattern, by=by, transitions=transitions)
            steps += _relation_steps(name, net, rule)
    undo_bytes = sum(_bytes(net) for net in nets.values())
    if most_undo_bytes is not None and undo_bytes > most_undo_bytes:
        raise GrapNetError(
            f"undo of this pruning may keep {undo_bytes:,} bytes (limit {most_undo_bytes:,}):"
            " a copy of the weights, and of the optimizer state of what leaves or is assigned"
        )
    pruning = Pruning(nets, undo_bytes)
    settings = repr((nodes, relations, pattern, by, repair, multiple, rows))
    run = _Run(model, batches, settings, repair, rows, loss, generator)
    done = run.earlier(pruning) if resume else {}
    if probe is not None:
        pruning.before = probe()
    shown: Iterable[_Step] = steps
    for place, net in enumerate(nets.values()):
        limit = len(net.journal.undoable) + len(steps)
        net.journal.undo_limit = max(pruning._limits[place], limit)
    if progress is not None:
        shown = progress(steps)
    for step in shown:
        stage = done.get(step.name)
        if stage is None:
            stage = run.carry_out(step)
        pruning.stages = (*pruning.stages, stage)
    if probe is not None:
        pruning.after = probe()
    if preview:
        pruning.undo()
    return pruning


class _Step(NamedTuple):
    """What one stage prunes: a rule for one layer, space or transition of a net."""

    name: str
    net: Graph
    rule: Any
    present: int
    layer: int | None  # whose nodes leave
    transition: int | None  # whose relations leave


def _model_and_nets(model: nn.Module, batches: Iterable[Any]) -> tuple[nn.Module, dict[str, Graph]]:
    """Returns what to run, and the graphs to prune by name; adopts a model without any."""
    if isinstance(batches, Iterator):
        raise TypeError(
            "batches are run once per layer, and an iterator ends after the first; pass a list or a"
            " DataLoader"
        )
    if isinstance(model, Adopted):
        return model.model, {"": model}
    try:
        return model, nets_of(model)
    except ValueError:
        first = call_of(next(iter(batches)), _device(model))
        return model, {"": adopt(model, *first.args, **first.kwargs)}


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _node_steps(name: str, net: Graph, rule: PruneNodes) -> list[_Step]:
    found = []
    for layer in rule._chosen(net):
        own = replace(rule, spaces=(getattr(layer, "name", layer.index),))
        label = _label(name, getattr(layer, "name", f"layer {layer.index}"))
        found.append(_Step(label, net, own, len(layer), layer.index, None))
    return found


def _relation_steps(name: str, net: Graph, rule: PruneWeakest) -> list[_Step]:
    found = []
    for t in rule._numbers(net):
        own = replace(rule, transitions=(t,), scope=_scope_of(rule))
        transition: Any = net.transitions[t]
        label = _label(name, getattr(transition, "name", f"transition {t}"))
        found.append(_Step(label, net, own, transition.size, None, t))
    return found


def _scope_of(rule: PruneWeakest) -> Any:
    """Returns what is ranked together within one transition."""
    if rule.pattern is not None or rule._scope == "child":
        return "child"
    return "transition"


def _label(net: str, part: str) -> str:
    return f"{net}: {part}" if net else part


def _bytes(net: Graph) -> int:
    """Returns the size of the weights of a net, and of state of the optimizers that follow it."""
    total = 0
    for store in net._stores().values():
        parameter = store.parameter
        total += parameter.numel() * parameter.element_size()
    for follower in net._followers._alive():
        optimizer = getattr(follower, "optimizer", None)
        if isinstance(optimizer, torch.optim.Optimizer):
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        total += value.numel() * value.element_size()
    return total


def _since(net: Graph, version: int) -> list[Commit]:
    """Returns the commits of a net after a version that are in effect, the oldest first."""
    places = net.journal.undoable
    found = [net.journal.commits[place] for place in places]
    return [commit for commit in found if commit.version > version]


def _remark_of(commit: Commit) -> dict[str, Any] | None:
    """Returns what a stage wrote into the journal; None for another commit."""
    for operation in commit.operations:
        if operation["operation"] == "remark" and operation.get("text") == REMARK:
            return operation
    return None


class _Run:
    """One call of `prune`: how its stages are carried out."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        settings: str,
        repairs: bool,
        rows: int | None,
        loss: Callable[[nn.Module, Any], Tensor] | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model = model
        self.batches = batches
        self.settings = settings
        self.repairs = repairs
        self.rows = rows
        self.loss = loss
        self.generator = generator

    def earlier(self, pruning: Pruning) -> dict[str, Stage]:
        """Returns the stages at the end of the journals that have the same settings."""
        found = {}
        for place, net in enumerate(pruning._nets):
            for commit in reversed(_since(net, 0)):
                remark = _remark_of(commit)
                if remark is None or remark["settings"] != self.settings:
                    break
                pruning._start[place] = commit.version - 1
                assigned = commit.counts["coordinates_assigned"]
                found[remark["stage"]] = Stage(
                    remark["stage"], remark["leaving"], remark["present"], assigned, 0.0
                )
        return found

    def carry_out(self, step: _Step) -> Stage:
        """Records what a stage needs, and commits it."""
        begin = time.perf_counter()
        net = step.net
        evidence = dict(step.rule.recorders(net))
        # A criterion that assigns weights has made up for what leaves.
        is_repaired = self.repairs and not getattr(step.rule.criterion, "assigns", False)
        if is_repaired:
            evidence |= self._gram_recorders(step)
        self._record(net, evidence)
        with net.edit(f"prune {step.name}", by=REMARK, generator=self.generator) as edit:
            step.rule(net, edit, RuleContext(evidence=evidence))
            if is_repaired:
                repair_readers(net, edit, evidence)
            leaving = len(edit.removals)
            if step.transition is not None:
                leaving = len(edit.cuts)
            edit.remark(
                REMARK,
                settings=self.settings,
                stage=step.name,
                leaving=leaving,
                present=step.present,
            )
        assigned = 0
        if edit.receipt is not None:
            assigned = edit.receipt.counts["coordinates_assigned"]
        seconds = time.perf_counter() - begin
        return Stage(step.name, leaving, step.present, assigned, seconds)

    def _gram_recorders(self, step: _Step) -> dict[str, Any]:
        """Returns the recorders that a repair needs."""
        if step.layer is not None:
            return dict(gram_recorders(step.net, [step.net.layers[step.layer]], rows=self.rows))
        assert step.transition is not None
        relations = RelationSet.of(step.net, [step.transition])
        return dict(matrix_recorders(step.net, relations, rows=self.rows))

    def _record(self, net: Graph, evidence: dict[str, Any]) -> None:
        """Runs the batches while recorders watch."""
        if not evidence:
            return
        try:
            for recorder in evidence.values():
                recorder.arm(net)
            with _evaluated(self.model), torch.set_grad_enabled(self.loss is not None):
                for batch in self.batches:
                    if self.loss is not None:
                        self.loss(self.model, batch).backward()
                    else:
                        args, kwargs = call_of(batch, _device(self.model))
                        self.model(*args, **kwargs)
        finally:
            for recorder in evidence.values():
                recorder.disarm()


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; modes and gradients are as before afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
