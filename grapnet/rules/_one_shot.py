"""gn.prune: prunes a trained model layer by layer, and repairs it, without training."""

from __future__ import annotations

import copy
import json
import re
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grapnet._torch import tqdm
from grapnet.core._errors import EditError, GrapNetError, HistoryError
from grapnet.core._evaluating import evaluating
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.core._sets import RelationSet
from grapnet.spaces import adopt
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._statistics import call_of, require_repeatable

from ._budget import Budget, enforce, shared_out
from ._cells import why_not_linear
from ._criteria import refusal_of
from ._gram import GramRecorder, TooManyNumbers, limit_matrices
from ._matrices import matrix_of
from ._nodes import PruneNodes
from ._obs import matrix_recorders
from ._prune import GradualSchedule, PruneWeakest
from ._pruning import Pruning, Skipped, Stage
from ._refit import Fitting, Reader
from ._repair import gram_recorders, problem_of
from ._repair import repair as repair_readers
from ._rule import RuleContext, chosen_transitions, nets_of
from ._taps import order_of_call, paths_of

# What commits of one run have in common in the journal.
REMARK = "gn.prune"
# Bytes of positions and uids that undo keeps of a relation.
POSITIONS = 24


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    nodes: float | PruneNodes | None = None,
    relations: float | PruneWeakest | None = None,
    by: Any = None,
    shares_by: Any = None,
    budget: Budget | None = None,
    repair: bool = True,
    refit: bool = False,
    rows: int | None = None,
    most_cells: int | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    allow_dead: bool | None = None,
    probe: Callable[[], float] | None = None,
    preview: bool = False,
    resume: bool = False,
    most_undo_bytes: int | None = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Pruning:
    """Prunes a trained model in one shot: layer by layer, each repaired before the next.

    Every layer is one transaction. Its statistics are recorded while the model runs on the batches
    with all layers before it pruned already, as in SparseGPT. The model is in evaluation mode
    meanwhile, and has its own modes again afterwards. It is not trained.

    Layers that the criterion cannot score, and those of which losses cannot be repaired, are left
    out, as `Pruning.skipped` lists with the reasons. If the rule names one of them, it raises.

    An error or an interrupt leaves the layers before pruned and the others as they were; the same
    call with `resume=True` goes on from there, also after saving and loading.

    Args:
        model: a net, an adopted model or its graph, or a model with nets inside; any other model is
            adopted with the first batch.
        batches: what the model runs on, once per layer, and once before if a criterion that needs
            data ranks all layers: a list, or a DataLoader with an order of its own, but no
            iterator. A batch is a tensor; a tuple or list, of which the first entry is passed; a
            dict, which is passed by name; or an `Example`.
        nodes: the share of the nodes of each layer or space to remove, or a `PruneNodes` with all
            its settings, such as `PruneNodes(macs=0.5, multiple=8)`; or
        relations: the share of the relations of each transition to cut, or a `PruneWeakest` with
            all its settings, such as `PruneWeakest(pattern=(2, 4), by="wanda")`; of a
            `GradualSchedule`, the final sparsity.
        by: the criterion of a share, as for `PruneNodes` or `PruneWeakest`; "elimination" for nodes
            and "alternating" for relations by default. A rule has its own.
        shares_by: the criterion that ranks all layers together in a rule's scope "model"; that of
            the rule if it is None. The errors that "elimination", "alternating" and "obs" look at
            are those of one layer: beside them, name another one, such as "norm" or "magnitude".
        budget: the limits of the whole call, for relations: `edits` in all, which transitions share
            in proportion to what they would lose, and the `parents` and `children` that nodes keep.
        repair: whether the relations and biases that stay make up for what leaves. Where the
            criterion assigns weights or biases itself, nothing else is assigned. Without it, all
            that the criterion can score is pruned.
        refit: whether all readers are solved for again at the end, one after the other, so that
            their children receive what they received in the unpruned model: see
            `grapnet.rules.refit`. It takes a copy of the model, and both run on the batches once
            more for each reader. It pays where 90 % or more leave.
        rows: how many rows of a pass are recorded for the repair, evenly spaced; all by default.
        most_cells: how many numbers, of 8 bytes each, the statistics of one reader may have; 2**27
            for the repair by default. If two Gram matrices have more, no rows are held out; if one
            has more, raise GrapNetError before anything changes.
        loss: `loss(model, batch)` returns the loss, for criteria that record gradients. Gradients
            of Parameters are as before afterwards.
        optimizer: an optimizer that follows a model which is adopted here. One of a model that was
            adopted before, or of a net, is attached already.
        allow_dead: whether an output may lose its last parent, as for `net.edit`.
        probe: a function that returns a score, called before and afterwards, in evaluation mode.
        preview: whether everything is undone at the end, or after an error; the result has the
            scores.
        resume: whether stages that an earlier call with the same settings committed last are left
            out. Functions are the same if their names are.
        most_undo_bytes: raise GrapNetError before anything changes if undo could keep more.
        progress: whether stderr shows what undo may keep, and a progress bar (that of tqdm if it is
            installed); None to show them on a terminal.
        generator: source of random numbers.

    Returns:
        A `Pruning`: what left, what was left out and why, the scores, and `undo()` for all of it,
        whatever the undo limit of the nets. `accept()` drops what undo keeps beyond that limit.

    Raises:
        EditError: nothing can be pruned, the rule names what cannot be, or settings do not go
            together; nothing has changed.

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
    rule = _rule(nodes, relations, by)
    is_ranked = rule.scope == "model"
    if shares_by is not None and not is_ranked:
        raise EditError('shares_by= ranks all layers together and goes with scope="model"')
    if budget is not None and isinstance(rule, PruneNodes):
        raise EditError("budget= limits relations; PruneNodes has budgets of its own for nodes")
    if preview and resume:
        raise EditError("a preview does not resume: its end would undo the stages before it, too")
    ranking = _ranking(rule, shares_by)
    budget = budget or Budget()
    model, nets = _model_and_nets(model, batches, optimizer)
    # A criterion that assigns weights has made up for what leaves.
    is_repaired = repair and not getattr(rule.criterion, "assigns", False)
    steps, skipped = _steps_and_skipped(nets, rule, ranking, is_repaired)
    undo_bytes = sum(_bytes(net, refit) for net in nets.values())
    if most_undo_bytes is not None and undo_bytes > most_undo_bytes:
        raise GrapNetError(
            f"undo of this pruning may keep {undo_bytes:,} bytes (limit {most_undo_bytes:,}):"
            " values, positions and optimizer state of what leaves or is assigned"
        )
    if progress is None:
        progress = sys.stderr.isatty()
    if progress:
        size = f"{undo_bytes / 1e6:,.3f} MB"
        print(f"gn.prune: {len(steps)} stages; undo may keep {size}", file=sys.stderr)
    pruning = Pruning(nets, skipped, undo_bytes)
    whole = replace(rule, by=rule.criterion)
    settings = _described((whole, ranking.criterion, budget, repair, refit, rows))
    run = _Run(
        model, batches, settings, budget, is_repaired, rows, most_cells, loss, allow_dead, generator
    )
    for step in steps:
        # What cannot be recorded is refused before anything changes.
        run.recorders(step)
    done = run.earlier(pruning) if resume else {}
    readers = run.readers(pruning) if refit else []
    count = len(steps) + len(readers)
    is_shared = is_ranked or budget.edits is not None or _has_cost(rule)
    try:
        with evaluating(model):
            if run.shares is None and is_shared:
                run.shares = run.decided(ranking, steps)
            if probe is not None:
                pruning.before = probe()
            for net in nets.values():
                limit = len(net.journal.undoable) + count
                net.journal.undo_limit = max(net.journal.undo_limit, limit)
            with tqdm(total=count, desc="gn.prune", unit="stage", disable=not progress) as bar:
                for step in steps:
                    stage = done.get(step.name)
                    if stage is None:
                        stage = run.carry_out(step, pruning)
                    pruning.stages = (*pruning.stages, stage)
                    bar.update(1)
                for reader in readers:
                    stage = done.get(_refit_name(reader))
                    if stage is None:
                        stage = run.refit(reader, pruning)
                    pruning.stages = (*pruning.stages, stage)
                    bar.update(1)
            if probe is not None:
                pruning.after = probe()
    except BaseException as error:
        for name, net in nets.items():
            # no more than undo needs of the stages before
            net.journal.undo_limit = max(pruning._limits[name], len(net.journal.undoable))
        if not preview and pruning.stages:
            names = ", ".join(stage.name for stage in pruning.stages)
            commits = sum(map(len, pruning._versions.values()))
            error.add_note(
                f"gn.prune has pruned {names} before. Call it again with resume=True to go on, or"
                f" undo() {commits} commits"
            )
        raise
    finally:
        if preview:
            pruning.undo()
    return pruning


class _Step(NamedTuple):
    """What one stage prunes: a rule for one layer, space or transition of a net."""

    name: str
    net_name: str
    net: Graph
    rule: Any
    present: int
    layer: int | None  # whose nodes leave
    transition: int | None  # whose relations leave
    is_shared: bool  # whether its fraction is what was decided for all layers together

    def why_not_scored(self, criterion: Any) -> str:
        """Returns why a criterion cannot score what leaves; empty if it can."""
        number = self.layer if self.transition is None else self.transition
        assert number is not None
        return refusal_of(criterion, self.net, number)

    def why_not_repaired(self) -> str:
        """Returns why what leaves cannot be made up for; empty if it can."""
        net: Any = self.net
        if isinstance(net, Adopted):
            if self.transition is not None:
                return why_not_linear(net, net.transitions[self.transition].name)
            assert self.layer is not None
            space = net.spaces[self.layer]
            net.prove([space])
            return problem_of(net, space)
        readers = [self.transition]
        if self.layer is not None:
            readers = net.leaving(self.layer)
        for t, policy in net.execution.policies().items():
            if t in readers:
                return f"transition {t} runs with {policy.name}, and not as a sum"
        return ""


def _steps_and_skipped(
    nets: dict[str, Graph], rule: PruneNodes | PruneWeakest, ranking: Any, is_repaired: bool
) -> tuple[list[_Step], tuple[Skipped, ...]]:
    """Returns what is pruned, layer by layer, and what is left out.

    Raises:
        EditError: the rule names a part that cannot be pruned, or none can be.
    """
    steps = []
    skipped = []
    for name, net in nets.items():
        if isinstance(rule, PruneNodes):
            found = _node_steps(name, net, rule)
            is_named = rule.spaces is not None
        else:
            found = _relation_steps(name, net, rule)
            is_named = rule.transitions is not None
        for step in sorted(found, key=_call_of):
            reason = step.why_not_scored(rule.criterion) or step.why_not_scored(ranking.criterion)
            if not reason and is_repaired:
                reason = step.why_not_repaired()
            if not reason:
                steps.append(step)
            elif is_named:
                raise EditError(f"{step.name} cannot be pruned with these settings: {reason}")
            else:
                skipped.append(Skipped(step.name, reason))
    if not steps:
        reasons = "".join(f"\n  {part.name}: {part.reason}" for part in skipped)
        raise EditError(f"nothing of this model can be pruned with these settings{reasons}")
    return steps, tuple(skipped)


def _call_of(step: _Step) -> int:
    """Returns the position of the first call of what a stage changes; 0 in a net, whose layers have
    an order.
    """
    net: Any = step.net
    if not isinstance(net, Adopted):
        return 0
    if step.transition is not None:
        names: Sequence[str] = [net.transitions[step.transition].name]
    else:
        assert step.layer is not None
        names = net.spaces[step.layer].readers
    return min((order_of_call(net, path) for path in paths_of(net, names)), default=-1)


def _model_and_nets(
    model: nn.Module, batches: Iterable[Any], optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, dict[str, Graph]]:
    """Returns what to run, and the graphs to prune by name; adopts a model without any."""
    require_repeatable(batches)
    if isinstance(model, Adopted):
        return model.model, {"": model}
    try:
        return model, nets_of(model)
    except ValueError:
        first = call_of(next(iter(batches)), _device(model))
        return model, {"": adopt(model, *first.args, optimizer=optimizer, **first.kwargs)}


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _rule(nodes: Any, relations: Any, by: Any) -> PruneNodes | PruneWeakest:
    """Returns the rule for the whole model, its scope and its sparsity in numbers."""
    if (nodes is None) == (relations is None):
        raise EditError("say how much to prune, by one of nodes= and relations=")
    for rule in (nodes, relations):
        if isinstance(rule, PruneNodes | PruneWeakest):
            if by is not None:
                raise EditError(f"a {type(rule).__name__} has its own by=; set it there")
            if isinstance(rule, PruneNodes) != (rule is nodes):
                raise EditError("nodes= takes a PruneNodes, and relations= a PruneWeakest")
        elif rule is not None and not isinstance(rule, Real):
            kind = type(rule).__name__
            raise TypeError(f"nodes= and relations= take a share or a rule of theirs, got a {kind}")
    if isinstance(nodes, PruneNodes):
        return nodes
    if isinstance(relations, PruneWeakest):
        sparsity = relations.sparsity
        if isinstance(sparsity, GradualSchedule):
            # There are no steps along which it could rise.
            sparsity = sparsity.final
        return replace(relations, scope=relations._scope, sparsity=sparsity)
    if nodes is not None:
        return PruneNodes(fraction=nodes, by="elimination" if by is None else by, keep=1)
    rule = PruneWeakest(fraction=relations, by="alternating" if by is None else by)
    return replace(rule, scope=_scope_within(rule))


def _has_cost(rule: PruneNodes | PruneWeakest) -> bool:
    """Returns whether a rule prunes down to what a whole model costs."""
    return isinstance(rule, PruneNodes) and rule.fraction is None


def _ranking(rule: Any, shares_by: Any) -> Any:
    """Returns the rule that decides how much leaves of each layer.

    Raises:
        EditError: its criterion does not compare layers.
    """
    of_nodes = isinstance(rule, PruneNodes)
    if rule.scope != "model":
        # How much leaves does not depend on the scores then, and these need no data.
        if of_nodes:
            return replace(rule, by="norm")
        return replace(rule, by="magnitude")
    if shares_by is not None:
        return replace(rule, by=shares_by)
    criterion = rule.criterion
    if not hasattr(criterion, "score") or getattr(criterion, "is_local", False):
        name = "norm" if of_nodes else "magnitude"
        raise EditError(
            f"{_described(criterion)} looks at the error of one layer, which says nothing about how"
            ' much each layer should lose: with scope="model", name a criterion for that, such as'
            f' shares_by="{name}", or prune by one that compares layers'
        )
    return rule


def _node_steps(name: str, net: Graph, rule: PruneNodes) -> list[_Step]:
    found = []
    if _has_cost(rule):
        # What each layer loses of a budget is decided before the stages.
        rule = replace(rule, fraction=0.0, parameters=None, macs=None, latency=None)
    for layer in rule._candidates(net):
        own = replace(rule, spaces=(getattr(layer, "name", layer.index),), scope="space")
        label = _label(name, getattr(layer, "name", f"layer {layer.index}"))
        found.append(_Step(label, name, net, own, len(layer), layer.index, None, True))
    return found


def _relation_steps(name: str, net: Graph, rule: PruneWeakest) -> list[_Step]:
    found = []
    for t in chosen_transitions(net, rule.transitions):
        own = replace(rule, transitions=(t,), scope=_scope_within(rule))
        transition: Any = net.transitions[t]
        label = _label(name, getattr(transition, "name", f"transition {t}"))
        is_shared = rule.scope == "model"
        if is_shared:
            # What each transition loses of the whole is decided before the stages.
            own = replace(own, fraction=0.0, sparsity=None)
        found.append(_Step(label, name, net, own, transition.size, None, t, is_shared))
    return found


def _scope_within(rule: PruneWeakest) -> Any:
    """Returns what is ranked together within one transition."""
    return "transition" if rule._scope == "model" else rule._scope


def _label(net: str, part: str) -> str:
    return f"{net}: {part}" if net else part


def _bytes(net: Graph, is_refitted: bool) -> int:
    """Returns an upper estimate of what undo keeps if all of a net leaves or is assigned, and all
    is assigned once more if it is refitted.
    """
    values = 4 if is_refitted else 2
    total = 0
    for store in net._stores().values():
        parameter = store.parameter
        # values before and after, and positions and uids of both ends
        total += parameter.numel() * (values * parameter.element_size() + POSITIONS)
    for follower in net._followers._alive():
        optimizer = getattr(follower, "optimizer", None)
        if isinstance(optimizer, weakref.ref):
            optimizer = optimizer()
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    total += value.numel() * value.element_size()
    return total


def _described(settings: Any) -> str:
    """Returns settings as the journal keeps them, without addresses, which differ by process."""
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(settings))


def _remark_of(commit: Commit) -> dict[str, Any] | None:
    """Returns what a stage wrote into the journal; None for another commit."""
    for operation in commit.operations:
        if operation["operation"] == "remark" and operation.get("text") == REMARK:
            return operation
    return None


@dataclass(eq=False)
class _Run:
    """One call of `prune`: how its stages are carried out.

    Attributes:
        settings: the settings of the call, as the journal keeps them.
        is_repaired: whether a repair follows, unless the criterion turns out to assign weights.
        name: tells the stages of one run from those of another with the same settings.
        shares: how much leaves in each stage, where it was decided for all of them together.
        is_noted: whether the journal has the shares.
        aim: the unpruned model beside the present one, where readers are refitted.
    """

    model: nn.Module
    batches: Iterable[Any]
    settings: str
    budget: Budget
    is_repaired: bool
    rows: int | None
    most_cells: int | None
    loss: Callable[[nn.Module, Any], Tensor] | None
    allow_dead: bool | None
    generator: torch.Generator | None
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    shares: dict[str, int] | None = None
    is_noted: bool = False
    aim: Fitting | None = None

    def earlier(self, pruning: Pruning) -> dict[str, Stage]:
        """Returns the stages of the last run, which this one goes on with; none if there was none.

        Raises:
            EditError: the last run had other settings, or something was committed after it.
        """
        # of every net that was pruned, by its name, and when its last stage was
        pruned: dict[str, dict[str, Any]] = {}
        times: dict[str, float] = {}
        for name, net in pruning.nets.items():
            commits = list(net.journal.commits)
            remarks = [_remark_of(commit) for commit in commits]
            if not any(remarks):
                continue
            last = remarks[-1]
            if last is None:
                raise EditError(
                    f"version {commits[-1].version} ({commits[-1].reason!r}) was committed after"
                    " the last gn.prune, so that resume=True cannot go on with it"
                )
            pruned[name] = last
            times[name] = commits[-1].time
        if not pruned:
            return {}
        newest = pruned[max(times, key=lambda name: times[name])]
        if newest["settings"] != self.settings:
            raise EditError(
                f"the last gn.prune had other settings, {newest['settings']}, and not"
                f" {self.settings}, so that resume=True cannot go on with it"
            )
        self.name = newest["run"]
        found: dict[str, Stage] = {}
        for name, last in pruned.items():
            if last["run"] != self.name:
                # It was pruned by an earlier run, and this one has not come to it.
                continue
            pruning._limits[name] = last["undo_limit"]
            for commit in pruning.nets[name].journal.commits:
                remark = _remark_of(commit)
                if remark is not None and remark["run"] == self.name:
                    pruning._versions[name].append(commit.version)
                    if remark["shares"] is not None:
                        self.shares = json.loads(remark["shares"])
                        self.is_noted = True
                    assigned = commit.counts["coordinates_assigned"]
                    stage = remark["stage"]
                    found[stage] = Stage(stage, remark["leaving"], remark["present"], assigned, 0.0)
        return found

    def decided(self, ranking: Any, steps: list[_Step]) -> dict[str, int]:
        """Returns how much leaves in each stage: what a rule for all layers takes of them."""
        found: dict[str, int] = {}
        budget = self.budget
        if ranking.scope != "model":
            # Layers share the edits in proportion.
            budget = replace(budget, edits=None)
        by_net: dict[str, list[_Step]] = {}
        for step in steps:
            by_net.setdefault(step.net_name, []).append(step)
        for own in by_net.values():
            net = own[0].net
            if own[0].layer is None:
                rule = replace(ranking, transitions=tuple(step.transition for step in own))
            else:
                rule = replace(ranking, spaces=tuple(step.rule.spaces[0] for step in own))
            evidence = rule.recorders(net)
            for recorder in evidence.values():
                self._limit(net, recorder)
            self._record(net, evidence, "the ranking of all layers")
            # It is never committed.
            with net.edit(trial=True, generator=self.generator) as edit:
                rule(net, edit, RuleContext(budget=budget, evidence=evidence))
                for step in own:
                    found[step.name] = _leaving(edit, step)
        counts = shared_out(list(found.values()), self.budget.edits)
        return dict(zip(found, counts, strict=True))

    def _rule_of(self, step: _Step) -> tuple[Any, Budget]:
        """Returns the rule of a stage, and its budget."""
        rule = step.rule
        budget = self.budget
        if self.shares is not None:
            share = self.shares[step.name]
            budget = replace(budget, edits=share)
            if step.is_shared:
                rule = replace(rule, fraction=share / max(1, step.present))
        return rule, budget

    def recorders(self, step: _Step) -> dict[str, Any]:
        """Returns the recorders of the criterion of a stage, and of its repair."""
        found = dict(step.rule.recorders(step.net))
        if self.is_repaired:
            found |= self._gram_recorders(step)
        for recorder in found.values():
            self._limit(step.net, recorder)
        return found

    def _limit(self, net: Graph, recorder: Any) -> None:
        """Makes a recorder keep to `most_cells`.

        Raises:
            GrapNetError: one Gram matrix has more numbers.
        """
        if isinstance(recorder, GramRecorder):
            limit_matrices(net, recorder, self.most_cells)
        elif self.most_cells is not None and hasattr(recorder, "most_cells"):
            recorder.most_cells = self.most_cells

    def carry_out(self, step: _Step, pruning: Pruning) -> Stage:
        """Records what a stage needs, and commits it."""
        begin = time.perf_counter()
        net = step.net
        rule, budget = self._rule_of(step)
        if self.shares is not None and self.shares[step.name] == 0:
            return Stage(step.name, 0, step.present, 0, 0.0)
        evidence = self.recorders(step)
        self._record(net, evidence, step.name)
        with net.edit(
            f"prune {step.name}",
            by=REMARK,
            generator=self.generator,
            allow_dead=self.allow_dead,
        ) as edit:
            rule(net, edit, RuleContext(budget=budget, evidence=evidence))
            # A criterion of one's own may not know of limits.
            none = RelationSet(net, {})
            enforce(net, edit, budget, settled=none, cuts=budget.edits, connections=None)
            # A criterion of one's own may turn out to assign weights.
            is_assigned = any(one["operation"] == "assign" for one in edit._operations)
            if self.is_repaired and not is_assigned:
                repair_readers(net, edit, evidence)
            leaving = _leaving(edit, step)
            shares = None
            if self.shares is not None and not self.is_noted:
                shares = json.dumps(self.shares)
            edit.remark(
                REMARK,
                run=self.name,
                settings=self.settings,
                stage=step.name,
                leaving=leaving,
                present=step.present,
                # what a run that resumes goes by; the first stage has it
                shares=shares,
                # what a run that resumes gives back
                undo_limit=pruning._limits[step.net_name],
            )
        assigned = 0
        if edit.receipt is not None:
            assigned = edit.receipt.counts["coordinates_assigned"]
            pruning._versions[step.net_name].append(edit.receipt.version)
            self.is_noted = True
        seconds = time.perf_counter() - begin
        return Stage(step.name, leaving, step.present, assigned, seconds)

    def readers(self, pruning: Pruning) -> list[Reader]:
        """Returns the readers to refit, after a copy of the unpruned model.

        Raises:
            EditError: a run that resumes cannot undo the copy.
        """
        whole: Any = pruning.nets[""] if isinstance(pruning.nets.get(""), Adopted) else self.model
        original = copy.deepcopy(whole)
        for name, net in nets_of(original).items():
            # of a run that resumes
            for _ in pruning._versions[name]:
                try:
                    net.undo()
                except HistoryError as error:
                    raise EditError(
                        "refit=True aims at the unpruned model, to which a run that resumes undoes"
                        f" a copy: {error}"
                    ) from error
        self.aim = Fitting.of(whole, original, self.batches, None, self.rows, self.most_cells)
        return self.aim.readers()

    def refit(self, reader: Reader, pruning: Pruning) -> Stage:
        """Refits a reader, and commits it if it lacks anything."""
        begin = time.perf_counter()
        name = _refit_name(reader)
        present = len(matrix_of(reader.net, reader.key).weights)
        assert self.aim is not None
        solution = None
        try:
            solution = self.aim.solve(reader)
        except TooManyNumbers as error:
            pruning.skipped = (*pruning.skipped, Skipped(name, str(error)))
        assigned = 0
        if solution is not None:
            (net_name,) = [own for own, net in pruning.nets.items() if net is reader.net]
            with reader.net.edit(name, by=REMARK, allow_dead=self.allow_dead) as edit:
                solution.write(edit)
                edit.remark(
                    REMARK,
                    run=self.name,
                    settings=self.settings,
                    stage=name,
                    leaving=0,
                    present=present,
                    shares=None,
                    undo_limit=pruning._limits[net_name],
                )
            if edit.receipt is not None:
                assigned = edit.receipt.counts["coordinates_assigned"]
                pruning._versions[net_name].append(edit.receipt.version)
        return Stage(name, 0, present, assigned, time.perf_counter() - begin)

    def _gram_recorders(self, step: _Step) -> dict[str, Any]:
        """Returns the recorders that a repair needs."""
        if step.layer is not None:
            return dict(gram_recorders(step.net, [step.net.layers[step.layer]], rows=self.rows))
        assert step.transition is not None
        relations = RelationSet.of(step.net, [step.transition])
        return dict(matrix_recorders(step.net, relations, rows=self.rows))

    def _record(self, net: Graph, evidence: dict[str, Any], what: str) -> None:
        """Runs the batches while recorders watch, for a stage or another purpose.

        Raises:
            EditError: a recorder has seen nothing.
        """
        if not evidence:
            return
        try:
            for recorder in evidence.values():
                recorder.arm(net)
            with _gradients_kept(self.model), torch.set_grad_enabled(self.loss is not None):
                for batch in self.batches:
                    if self.loss is not None:
                        self.loss(self.model, batch).backward()
                    else:
                        args, kwargs = call_of(batch, _device(self.model))
                        self.model(*args, **kwargs)
        finally:
            for recorder in evidence.values():
                recorder.disarm()
        for name, recorder in evidence.items():
            if getattr(recorder, "count", 1) == 0:
                raise EditError(
                    f"the batches left no evidence {name!r} for {what}: they are empty, do not"
                    " reach it, or its criterion records gradients and needs loss="
                )


def _refit_name(reader: Reader) -> str:
    return f"refit {reader.name}"


def _leaving(edit: Any, step: _Step) -> int:
    """Returns how many nodes or relations of the layer of a stage an edit takes away."""
    if step.transition is None:
        return len(edit.removals._rows_by_layer().get(step.layer, ()))
    return len(edit.cuts._positions_by_transition().get(step.transition, ()))


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Restores the gradients of Parameters afterwards, which are None inside the block."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
