"""The execution manager: which backend runs which transition, and why."""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from grapnet._torch import (
    disable_current_modes,
    is_exporting,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from grapnet.core._commit import Draws
from grapnet.core._coordinates import Vector
from grapnet.core._errors import PlanError, StaleTopologyError
from grapnet.core._graph import Column, Graph, chain_ends
from grapnet.core._journal import Commit
from grapnet.core._layer import Layer, Roster
from grapnet.core._prepare import View
from grapnet.core._sets import NodeSet
from grapnet.core._transition import Topology, Transition

from . import _native
from ._costs import BATCHES, Shape, Why, batch_class, fastest, precision
from ._dense import MatrixPlan
from ._family import find_families
from ._plan import Backend, Plan, Policy
from ._policy import ColumnPlan, column_places, present_columns, start_columns
from ._registry import AUTO, BACKENDS, backend_called
from ._registry import register_backend as register_backend
from ._sparse import Sparse
from ._tiles import find_tiles
from ._traced import Tracing, trace


def fastest_that_runs(
    shape: Shape,
    dtype: torch.dtype,
    names: Sequence[str],
    *,
    precision: str,
    batch: int,
    training: bool,
) -> tuple[Backend, Why]:
    """Returns the backend to run among those that do not refuse, and the reason."""
    topology = shape.topology
    device = topology.child.device.type
    names = list(names)
    while True:
        name, why = fastest(
            shape, names, device=device, precision=precision, batch=batch, training=training
        )
        backend = BACKENDS[name]()
        if shape.full or not backend.refusals(topology, dtype):
            return backend, why
        if name == Sparse.name and _native.missing and device == "cpu":
            _native.warn_missing()
        names.remove(name)


class Step(NamedTuple):
    """One step of a forward pass: the plan of a transition, then the activations of the next
    layer.
    """

    transition: Transition
    layer: Layer
    ends: tuple[int, int]  # the numbers of the layers that the transition leads from and to
    plan: Plan
    values_shape: tuple[int, ...] | None  # None: the trainable values alone
    # of the version that the plan is for
    weights: Vector
    biases: Vector
    roster: Roster


@dataclass(eq=False)
class Line:
    """The steps of a forward pass, in order."""

    steps: list[Step]
    used: bool = False  # since the last commit
    traced: bool = False  # whether torch.compile has read it, or the one that it comes after


# a class of batch sizes, whether gradients are computed, and the precision of products
Key = tuple[int, bool, str]


@dataclass(eq=False)
class Plans:
    """The plans of one wiring, and the lines of plans that forward passes run."""

    chosen: Sequence[Backend | None]  # None: auto
    modules: Sequence[tuple[Transition, Layer]]  # every transition and the layer that it enters
    view: View  # what it is all made for
    dtype: torch.dtype
    # of every transition, by the names that its backend gives them
    columns: Sequence[Mapping[str, Column]]
    made: dict[tuple[int, Backend], Plan] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    lines: dict[Key, Line] = field(default_factory=dict)
    is_chain: bool = field(init=False)
    # whether another batch size or precision may run other plans
    is_by_batch: bool = field(init=False)
    device: str = field(init=False)  # its type

    def __post_init__(self) -> None:
        self.is_chain = list(self.view.ends) == chain_ends(len(self.view.rosters))
        self.is_by_batch = False
        for chosen, topology in zip(self.chosen, self.topologies, strict=True):
            if chosen is None and not topology.is_full:
                self.is_by_batch = True
        self.device = self.topologies[0].child.device.type

    @property
    def topologies(self) -> Sequence[Topology]:
        """The wiring of every transition."""
        return self.view.topologies

    def require(self) -> None:
        """Raises PlanError if a chosen backend cannot run its transition."""
        for t, reasons in self._unfit().items():
            name = self.chosen[t].name  # pyright: ignore[reportOptionalMemberAccess]
            raise PlanError(f"{name} cannot run transition {t}: {'; '.join(reasons)}")

    def _unfit(self) -> dict[int, list[str]]:
        """Returns the transitions that their chosen backends cannot run, and why."""
        found = {}
        for t, (backend, topology) in enumerate(zip(self.chosen, self.topologies, strict=True)):
            reasons = backend.refusals(topology, self.dtype) if backend else []
            if reasons:
                found[t] = reasons
        return found

    def refused(self, t: int) -> dict[str, list[str]]:
        """Returns the backends that cannot run a transition, and why."""
        backends = {name: known() for name, known in BACKENDS.items()}
        if (chosen := self.chosen[t]) is not None:
            backends[chosen.name] = chosen
        reasons = {
            name: backend.refusals(self.topologies[t], self.dtype)
            for name, backend in backends.items()
        }
        return {name: found for name, found in reasons.items() if found}

    def key(self, batch: int, training: bool, precise: str = "") -> Key:
        """Returns the key in `lines` of what runs a batch.

        Args:
            batch: the number of samples.
            training: whether gradients are computed.
            precise: the precision of products; the one that is set by default.
        """
        if not self.is_by_batch:
            return BATCHES[-1], training, ""
        return batch_class(batch), training, precise or precision(self.device, self.dtype)

    def backend(self, t: int, key: Key) -> tuple[Backend, Why]:
        """Returns the backend that runs a transition, and why."""
        if (chosen := self.chosen[t]) is not None:
            return chosen, Why("chosen")
        batch, training, precise = key
        return fastest_that_runs(
            self.shape(t),
            self.dtype,
            list(BACKENDS),
            precision=precise,
            batch=batch,
            training=training,
        )

    def kept_bytes(self, t: int) -> int:
        """Returns the memory of what the plans of a transition keep of the weights."""
        found = 0
        for (number, _), plan in list(self.made.items()):
            if number == t:
                found += getattr(plan, "kept_bytes", 0)
        return found

    def shape(self, t: int) -> Shape:
        """Returns the properties that determine the cost of a transition."""
        if t not in self.shapes:
            self.shapes[t] = Shape.of(self.topologies[t])
        return self.shapes[t]

    def line(self, key: Key) -> Line:
        """Makes what a forward pass runs; a result stays feature-major only where the next plan
        reads it so.
        """
        self.require()
        if self.view.weights[0].content.is_meta:
            raise PlanError(
                "this net is on the meta device, which holds no numbers. Move it to another one,"
                " net.to_empty(device=...), and load a state dict; or gn.load(path)"
            )
        if peek_interpreter_stack() is not None or torch.is_inference_mode_enabled():
            # as if called alone
            with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
                plans = self._plans_for(key)
        else:
            plans = self._plans_for(key)
        for t, plan in enumerate(plans):
            # a FeatureMajorPlan
            if hasattr(plan, "row_major") and not self._is_read_by_feature(t, plans):
                plans[t] = plan.row_major()  # pyright: ignore[reportAttributeAccessIssue]
        _, training, _ = key
        line = Line(self.steps(plans, training))
        self.lines[key] = line
        return line

    def _is_read_by_feature(self, t: int, plans: Sequence[Plan]) -> bool:
        """Says whether all that read the result of a transition are FeatureMajorPlans."""
        _, target = self.view.ends[t]
        readers = []
        for (source, _), plan in zip(self.view.ends, plans, strict=True):
            if source == target:
                readers.append(hasattr(plan, "row_major"))
        return bool(readers) and all(readers)

    def _plans_for(self, key: Key) -> list[Plan]:
        found = []
        for t in range(len(self.topologies)):
            backend, _ = self.backend(t, key)
            found.append(self._plan(t, backend))
        return found

    def steps(self, plans: Sequence[Plan], training: bool) -> list[Step]:
        """Returns the steps of a forward pass that runs these plans."""
        found = []
        for t, plan in enumerate(plans):
            if hasattr(plan, "reading"):  # it keeps something of the weights
                plan = plan.reading(self.modules[t][0], self.view.weights[t])  # pyright: ignore[reportAttributeAccessIssue]
            values_shape = getattr(plan, "values_shape", (-1,))
            if values_shape is not None:
                # of integers alone: a view of a torch.Size takes half as long again
                values_shape = tuple(values_shape)
            if self.columns[t]:
                version = self.view.columns
                if training:
                    version = None
                plan = ColumnPlan(plan, self.columns[t], version)
            store, layer = self.modules[t]
            ends = self.view.ends[t]
            biases = self.view.biases[ends[1]]
            assert biases is not None
            found.append(
                Step(
                    store,
                    layer,
                    ends,
                    plan,
                    values_shape,
                    self.view.weights[t],
                    biases,
                    self.view.rosters[ends[1]],
                )
            )
        return found

    def exported_steps(self) -> list[Step]:
        """Returns the steps of a forward pass that is being exported, whichever backends run the
        net.

        Raises:
            PlanError: the export is strict; torch then shows it inside an error of its own.
        """
        if torch.compiler.is_dynamo_compiling():
            raise PlanError(
                "a net cannot be exported with strict=True; omit it, or export a snapshot"
            )
        # The relations as they are, not as the trace shows them.
        with disable_current_modes():
            plans = [MatrixPlan(topology) for topology in self.topologies]
        return self.steps(plans, training=True)

    def after(self, commit: Commit) -> "Plans":
        """Returns the plans for the wiring after a commit; those in use are created or moved at
        once.
        """
        topologies = commit.view.topologies
        coming = Plans(self.chosen, self.modules, commit.view, self.dtype, self.columns)
        coming = coming._required(commit)
        for (t, backend), plan in self.made.items():
            if t not in commit.wirings:
                coming.made[t, backend] = plan
            elif hasattr(plan, "moved") and self._keeps_rows(commit, t):  # a MovablePlan
                moved = plan.moved(topologies[t], commit.relations[t])  # pyright: ignore[reportAttributeAccessIssue]
                coming.made |= {} if moved is None else {(t, backend): moved}
        coming.shapes = {t: shape for t, shape in self.shapes.items() if t not in commit.wirings}
        coming.make_lines(self)
        return coming

    def at_depth(
        self, commit: Commit, chosen: Sequence[Backend | None], origins: Sequence[int | None]
    ) -> "Plans":
        """Returns the plans after a commit that inserts or removes layers.

        Args:
            commit: the commit.
            chosen: the backends chosen for the transitions after it.
            origins: the number that each of these transitions has before it, None for one that
                comes.
        """
        build = commit.change.depth.after  # pyright: ignore[reportOptionalMemberAccess]
        modules = []
        for store, (_, target) in zip(build.transitions, build.ends, strict=True):
            modules.append((store, build.layers[target]))
        coming = Plans(chosen, modules, commit.view, self.dtype, [{} for _ in modules])
        coming = coming._required(commit)
        for t, origin in enumerate(origins):
            if origin is None or coming.topologies[t] is not self.topologies[origin]:
                continue
            for (number, backend), plan in self.made.items():
                if number == origin:
                    coming.made[t, backend] = plan
            if origin in self.shapes:
                coming.shapes[t] = self.shapes[origin]
        coming.make_lines(self)
        return coming

    def _required(self, commit: Commit) -> "Plans":
        """Returns the plans for a commit; raises PlanError if a chosen backend cannot run.

        The end of a trial happens whatever was chosen inside it: there "auto" takes over.
        """
        if commit.kind != "end":
            self.require()
            return self
        unfit = self._unfit()
        chosen = [None if t in unfit else backend for t, backend in enumerate(self.chosen)]
        columns = [{} if t in unfit else group for t, group in enumerate(self.columns)]
        return replace(self, chosen=chosen, columns=columns)

    def make_lines(self, before: "Plans", *, used: bool = True) -> None:
        """Makes the lines that compiled code reads, which would be compiled again without them, and
        those in use.

        Args:
            before: the plans that these come after.
            used: whether to make lines in use, or to leave them to the next forward pass.
        """
        for key, line in before.lines.items():
            if line.traced or (used and line.used):
                key = self.key(*key)
                made = self.lines.get(key) or self.line(key)
                made.traced |= line.traced

    def _keeps_rows(self, commit: Commit, t: int) -> bool:
        """Returns whether both layers of a transition keep all their rows."""
        return t in commit.relations and all(
            n not in commit.nodes or commit.nodes[n].is_identity for n in self.view.ends[t]
        )

    def _plan(self, t: int, backend: Backend) -> Plan:
        if (t, backend) not in self.made:
            self.made[t, backend] = backend.prepare(self.topologies[t])
        return self.made[t, backend]


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """A plan together with the relations it was made for; it refuses to run over others."""

    plan: Plan
    store: Transition
    topology: Topology

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Runs the plan; raises StaleTopologyError once the relations moved."""
        if self.store.topology is not self.topology:
            raise StaleTopologyError(
                "this plan was made before the transition was edited or moved; call"
                " net.execution.plan(t) again"
            )
        return self.plan(x, values, bias)


@dataclass(frozen=True, eq=False)
class FamilyReport:
    """One family of a transition: nodes that have the same children."""

    members: NodeSet
    children: NodeSet

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of its matrix."""
        return len(self.members), len(self.children)


@dataclass(frozen=True, eq=False)
class TileReport:
    """The tiles of a transition: blocks of nodes that are connected fully or not at all."""

    size: int  # nodes of a block; the last one of a layer may have fewer
    present: Tensor  # [blocks of parents, blocks of children] bool: which tiles exist


class Execution:
    """`net.execution`: chooses a backend for every transition and keeps its plan until relations
    move. A transition that comes with a layer runs with "auto".

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> net.execution.use("reference", transition=0)
        >>> net.execution.describe()[0]["runs"]
        'reference'
    """

    def __init__(self, graph: Graph) -> None:
        self._chosen: list[Backend | None] = [None] * len(graph.transitions)  # None: auto
        # by transition: the requested backend that is not registered
        self._unmet: dict[int, str] = {}
        self._bind(graph)

    def _bind(self, graph: Graph) -> None:
        """Sets the graph that the manager runs, held weakly."""
        self._graph_reference = weakref.ref(graph)
        self._tracing = Tracing(self._prepare_trace)
        self._recorders = 0
        self._is_recorded = False
        self._keeper = _Keeper(self)
        graph.follow(self._keeper)
        self._refresh()

    @property
    def _is_bound(self) -> bool:
        """True while the graph is alive."""
        return "_graph_reference" in self.__dict__ and self._graph_reference() is not None

    @property
    def _graph(self) -> Graph:
        """The graph."""
        graph = self._graph_reference()
        assert graph is not None, "the net is gone"
        return graph

    def _refresh(self) -> None:
        """Drops every plan, for example when the net moves to another device."""
        graph = self._graph
        modules = [(store, graph.layers[store.target]) for store in graph.transitions]
        dtype = graph.transitions[0].weight.dtype
        self._sensory = graph.layers[0]
        columns = [present_columns(graph, t, chosen) for t, chosen in enumerate(self._chosen)]
        before = self.__dict__.get("_plans")
        self._plans = Plans(self._chosen, modules, graph._view(), dtype, columns)
        if before is not None:
            # What cannot run here raises when it is asked to.
            with suppress(PlanError):
                self._plans.make_lines(before, used=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coordinates."""
        return self._plans.dtype

    def use(
        self,
        name: str,
        transition: int | None = None,
        *,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        """Selects the backend `name` for one transition or for all.

        Args:
            name: "auto", which picks the fastest backend according to measurements; a backend of
                the sum; or a policy such as "attention", which computes something else and brings
                Parameters of its own: `net.columns`, also in the group of an attached optimizer
                that holds the transition's weight. They leave with the next choice.
            transition: its number; all by default.
            generator: source of the random numbers that the Parameters of a policy start with.
            options: settings of the backend, such as `most_cells` of "dense". A policy takes values
                for its Parameters (`key` and `query` of "attention"), and `bound`: others, and
                those of nodes born later, are drawn from U(±bound), by default U(±1). With any
                of them, or a generator, the Parameters of a policy that runs already start afresh.

        Raises:
            PlanError: the backend does not exist or cannot run; nothing changes.
            EditError: an edit is open, and Parameters would be added or removed.
            OptimizerError: an attached optimizer cannot take the Parameters; nothing changes.
        """
        numbers = self._numbers(transition)
        backend, start = backend_called(name, options)
        before = self.choices()
        chosen = list(self._chosen)
        columns = list(self._plans.columns)
        draws = Draws()
        for t in numbers:
            chosen[t] = backend
            present = {own: (column.name, column.layer) for own, column in columns[t].items()}
            stays = before[t] == name and present == column_places(self._graph, t, backend)
            if start or generator is not None or not stays:
                columns[t] = start_columns(
                    self._graph, t, backend, draws, generator=generator, **start
                )
        unmet = {t: unmet for t, unmet in self._unmet.items() if t not in numbers}
        self._change(chosen, columns, unmet, draws)

    def policies(self) -> dict[int, Policy]:
        """Returns the chosen backends that compute something else than the sum, by transition."""
        found = {}
        for t, backend in enumerate(self._chosen):
            if hasattr(backend, "not_a_sum"):
                found[t] = cast("Policy", backend)
        return found

    def require_sum(self, what: str, transitions: Container[int] | None = None) -> None:
        """Raises PlanError when a policy runs one of the transitions.

        Args:
            what: what needs the sum, for the message.
            transitions: which to look at; all when left out.
        """
        for t, policy in self.policies().items():
            if transitions is None or t in transitions:
                raise PlanError(
                    f"transition {t} runs with {policy.name}, and {what} needs the sum:"
                    f" {policy.not_a_sum}. Choose a backend of the sum first:"
                    f' net.execution.use("auto", transition={t})'
                )

    def choices(self) -> list[str]:
        """Returns the name of the backend chosen for every transition, registered or not."""
        return [
            self._unmet.get(t, AUTO if backend is None else backend.name)
            for t, backend in enumerate(self._chosen)
        ]

    def _choose(self, names: Sequence[str]) -> None:
        """Adopts choices from a file or a copy; a backend that cannot run here is replaced by auto.

        A name that is not registered stays chosen, `describe` reports it, and auto runs instead.
        """
        chosen = list(self._chosen)
        columns = list(self._plans.columns)
        unmet = {}
        for t, name in enumerate(names[: len(chosen)]):
            chosen[t] = None
            if name in BACKENDS:
                places = column_places(self._graph, t, BACKENDS[name]).values()
                has_columns = all(column in self._graph.columns for column, _ in places)
                if has_columns and name not in self._plans.refused(t):
                    chosen[t] = BACKENDS[name]()
            elif name != AUTO:
                unmet[t] = name
            columns[t] = present_columns(self._graph, t, chosen[t])
        self._change(chosen, columns, unmet, Draws())

    def describe(self, batch: int = 256, *, training: bool = True) -> list[dict[str, Any]]:
        """Returns for every transition the backend that runs at a batch size, the reason, and the
        backends that cannot.

        `costs` is where the expected times come from: a table that comes with the library,
        measurements of this machine (`tune`), or none. They are those of the precision that is set,
        by autocast or `torch.set_float32_matmul_precision`.

        `tile` is the size of the tiles that the relations come in, or None. Where `finite_only` is
        True, an infinite or NaN activation also reaches nodes that have no relation from it: absent
        relations are multiplied by 0. `kept_bytes` is the memory that a transition keeps between
        forward passes beside its weights and wiring: the matrices of "dense" on CUDA, one for every
        dtype that it has run in.
        """
        plans = self._plans
        rows = []
        key = plans.key(batch, training)
        for t, chosen in enumerate(self.choices()):
            backend, reason = plans.backend(t, key)
            why = reason.in_words(batch_class(batch))
            if t in self._unmet:
                why = f"asked for {chosen!r}, which is not registered here; auto instead: {why}"
            topology = plans.topologies[t]
            finite_only = getattr(backend, "finite_only", False)
            tiling = find_tiles(topology)
            rows.append(
                {
                    "transition": t,
                    "relations": topology.n_relations,
                    "chosen": chosen,
                    "runs": backend.name,
                    "why": why,
                    "costs": reason.source,
                    "tile": None if tiling is None else tiling.size,
                    "finite_only": finite_only and not topology.is_full,
                    "kept_bytes": plans.kept_bytes(t),
                    "refused": plans.refused(t),
                }
            )
        return rows

    def tune(self, x: Tensor) -> list[dict[str, Any]]:
        """Measures every backend with the transitions of the net and lets "auto" choose by that.

        The measurements are for the batch size of x, with and without gradients, and for the
        precision that is set, by autocast or `torch.set_float32_matmul_precision`. They are kept in
        the cache folder of the system, or in `$GRAPNET_CACHE`, for this device and these versions
        of torch and of the kernels, and also hold for other nets with a transition of these sizes
        and about as many relations. They take a second or so for each transition.

        Args:
            x: an input of the net, [..., n_sensory].

        Returns:
            What `describe` returns for this batch size.

        Raises:
            OSError: the measurements cannot be written. They hold in this process.
        """
        from ._tune import tune_transitions

        batch = x.numel() // max(1, x.shape[-1])
        plans = self._plans
        topologies = []
        for chosen, topology in zip(plans.chosen, plans.topologies, strict=True):
            if not hasattr(chosen, "not_a_sum") and not topology.is_full:
                topologies.append(topology)
        try:
            tune_transitions(topologies, plans.dtype, batch)
        finally:
            plans.lines.clear()
        return self.describe(batch)

    def refresh(self) -> None:
        """Lets the next forward pass read the weights anew.

        On CUDA "dense" keeps the weights as a matrix. A pass with gradients always writes it; one
        without gradients does after changes that torch or an optimizer reports. Call this after
        others, which write through `parameter.data` or from kernels of your own.
        """
        for plan in list(self._plans.made.values()):
            if hasattr(plan, "refresh"):  # it keeps something of the weights
                plan.refresh()  # pyright: ignore[reportAttributeAccessIssue]

    def families(self, transition: int) -> list[FamilyReport]:
        """Returns the nodes of a transition that share their children, the largest families
        first.
        """
        (t,) = self._numbers(transition)
        found = []
        store = self._graph.transitions[t]
        for families in find_families(store.topology):
            for rows, children in zip(families.members, families.children, strict=True):
                members = self._nodes(store.source, rows)
                found.append(FamilyReport(members, self._nodes(store.target, children)))
        return sorted(found, key=lambda family: -family.block[0] * family.block[1])

    def tiles(self, transition: int) -> TileReport | None:
        """Returns the largest tiles that the relations of a transition come in, None if they do
        not.
        """
        (t,) = self._numbers(transition)
        tiling = find_tiles(self._graph.transitions[t].topology)
        if tiling is None:
            return None
        return TileReport(tiling.size, torch.from_numpy(tiling.present.copy()))

    def plan(self, transition: int, batch: int = 256, *, training: bool = True) -> BoundPlan:
        """Returns the plan that runs a transition at a batch size; it refuses to run after an
        edit.
        """
        (t,) = self._numbers(transition)
        store = self._graph.transitions[t]
        plan = self._steps(self._plans, batch, training=training)[t].plan
        return BoundPlan(plan, store, store.topology)

    def _steps(
        self, plans: Plans, batch: int, *, training: bool, compiled: bool = False
    ) -> list[Step]:
        """Returns the steps of a forward pass of one version, one per transition.

        Args:
            plans: the plans of the version.
            batch: the number of samples.
            training: whether gradients are computed.
            compiled: whether torch.compile traces the pass.
        """
        if is_exporting():
            self.require_sum("torch.export")
            return plans.exported_steps()
        if is_tracing():
            raise PlanError(
                "torch.jit.trace, which torch.onnx.export(dynamo=False) uses too, does not record"
                " everything that backends do. Trace a snapshot instead, gn.snapshot(model) or"
                " net.snapshot(), or use dynamo=True"
            )
        key = plans.key(batch, training)
        if compiled:
            trace(self._tracing.handle, *key)
        line = plans.lines.get(key)
        if line is None:
            line = plans.line(key)
        line.used = True  # only ever written here, so that torch.compile does not watch it
        return line.steps

    def _note_recorder(self) -> Callable[[], None]:
        """Notes that a recorder is armed; returns the function that ends this.

        While one is, compiled code leaves the net to eager execution, which calls all hooks.
        """
        self._count_recorders(1)
        return partial(_forget_recorder, weakref.ref(self))

    def _count_recorders(self, more: int) -> None:
        self._recorders += more
        # Compiled code has this one as a guard: the number would be one more reason to compile.
        self._is_recorded = self._recorders > 0

    def _prepare_trace(self, *key: Any) -> list[Any]:
        """Makes the line that a trace is going to read; returns all that it reads."""
        plans = self._plans
        line = plans.lines.get(key)
        if line is None:
            line = plans.line(key)
        line.traced = True
        return [line, plans.view.rosters[0]]

    def _prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Prepares the plans in use for the new relations; raises if a chosen backend refuses."""
        depth = commit.change.depth
        if depth is None:
            plans = self._plans.after(commit)
            return partial(self._install, list(plans.chosen), self._unmet, plans)
        numbers = {id(store): t for t, store in enumerate(graph.transitions)}
        origins = [numbers.get(id(store)) for store in depth.after.transitions]
        chosen: list[Backend | None] = []
        unmet = {}
        for t, origin in enumerate(origins):
            chosen.append(None if origin is None else self._chosen[origin])
            if origin in self._unmet:
                unmet[t] = self._unmet[origin]
        plans = self._plans.at_depth(commit, chosen, origins)
        return partial(self._install, list(plans.chosen), unmet, plans)

    def _change(
        self,
        chosen: list[Backend | None],
        columns: list[Mapping[str, Column]],
        unmet: dict[int, str],
        draws: Draws,
    ) -> None:
        """Applies choices with their columns; an error leaves everything unchanged."""
        before = self._plans
        wanted = [column for group in columns for column in group.values()]
        view = before.view._replace(columns={column.name: column.vector for column in wanted})
        made = dict(before.made)
        plans = Plans(chosen, before.modules, view, before.dtype, columns, made, before.shapes)
        plans.require()
        plans.make_lines(before, used=False)
        install = partial(self._install, chosen, unmet, plans)
        self._graph._set_columns(wanted, [*draws.installs(), install])

    def _install(self, chosen: list[Backend | None], unmet: dict[int, str], plans: Plans) -> None:
        self._chosen = chosen
        self._unmet = unmet
        self._plans = plans
        self._tracing.note_change()

    def _numbers(self, transition: int | None) -> range:
        count = len(self._chosen)
        if transition is None:
            return range(count)
        if not isinstance(transition, int) or not 0 <= transition < count:
            raise ValueError(f"the net has transitions 0 to {count - 1}, got {transition!r}")
        return range(transition, transition + 1)

    def _nodes(self, layer: int, rows: Tensor) -> NodeSet:
        return NodeSet(self._graph, {layer: self._graph.layers[layer].uid[rows.cpu()]})

    def __getstate__(self) -> dict[str, Any]:
        return {"_chosen": list(self._chosen), "_unmet": dict(self._unmet)}


class _Keeper:
    """The follower of a net that keeps the plans of its execution, which holds it."""

    follows_depth = True

    def __init__(self, execution: Execution) -> None:
        self._execution = weakref.ref(execution)

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Prepares the plans; see `Execution._prepare`."""
        execution = self._execution()
        assert execution is not None
        return execution._prepare(graph, commit)


def _forget_recorder(reference: "weakref.ref[Execution]") -> None:
    execution = reference()
    if execution is not None:
        execution._count_recorders(-1)
