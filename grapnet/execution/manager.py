"""The execution manager: which backend runs which transition, and why."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from grapnet.core._commit import Draws
from grapnet.core._errors import PlanError, StaleTopologyError
from grapnet.core._graph import Graph
from grapnet.core._journal import Commit
from grapnet.core._sets import NodeSet
from grapnet.core._transition import Topology, Transition

from .attention import Attention
from .auto import batch_class
from .exported import exported_steps, is_exporting
from .family import find_families
from .plan import Backend, Plan
from .plans import AUTO, BACKENDS, Line, Plans, Step
from .untraced import untraced


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
                "this plan was made before the transition was edited or moved; ask again:"
                " net.execution.plan(t)"
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


class Execution:
    """`net.execution`: chooses a backend for every transition and keeps its plan until relations
    move.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> net.execution.use("reference", transition=0)
        >>> net.execution.describe()[0]["runs"]
        'reference'
    """

    def __init__(self, graph: Graph) -> None:
        self._chosen: list[Backend | None] = [None] * len(graph.transitions)  # None: auto
        # by transition: the backend that was asked for and that nobody registered
        self._unmet: dict[int, str] = {}
        self.bind(graph)

    def bind(self, graph: Graph) -> None:
        """Tells the manager which graph it runs, without keeping that graph alive."""
        self._graph = weakref.ref(graph)
        graph.follow(self)
        self.refresh()

    @property
    def is_bound(self) -> bool:
        """True while the graph that the manager runs is alive."""
        return "_graph" in self.__dict__ and self._graph() is not None

    @property
    def graph(self) -> Graph:
        """The graph that is run."""
        graph = self._graph()
        assert graph is not None, "the net is gone"
        return graph

    def refresh(self) -> None:
        """Drops every plan, as when the net has moved to another device."""
        graph = self.graph
        modules = list(zip(graph.transitions, list(graph.layers)[1:], strict=True))
        dtype = graph.transitions[0].weight.dtype
        self.sensory = graph.layers[0]
        self._plans = Plans(self._chosen, modules, graph.view(), dtype)

    @property
    def plans(self) -> Plans:
        """The plans of the present version."""
        return self._plans

    def use(self, name: str, transition: int | None = None, **options: Any) -> None:
        """Runs one transition, or all of them, with the backend called `name` from now on.

        Args:
            name: "auto", which picks what measurements let expect to be fastest; a backend of the
                sum; or "attention", which computes something else and brings Parameters of its own:
                `net.columns`, also in the group of an attached optimizer that holds the
                transition's weight. They leave with the next choice.
            transition: which one; all when left out.
            options: what the backend can be told, such as `most_cells` of "dense", or `keys`,
                `queries`, `bound` and `generator` of "attention", where they start it afresh.

        Raises:
            PlanError: there is no such backend or it cannot run; all choices stay as they were.
            EditError: an edit is open, and Parameters would come or leave.
            OptimizerError: an attached optimizer cannot take the Parameters; nothing was changed.
        """
        _require_known(name, options)
        numbers, chosen = self._numbers(transition), list(self._chosen)
        draws = Draws()
        for t in numbers:
            chosen[t] = self._made(name, t, draws, options)
        unmet = {t: unmet for t, unmet in self._unmet.items() if t not in numbers}
        self._change(chosen, unmet, draws)

    def choices(self) -> list[str]:
        """Returns the name of the backend chosen for every transition, registered or not; see
        `unmet`.
        """
        return [
            self._unmet.get(t, AUTO if backend is None else backend.name)
            for t, backend in enumerate(self._chosen)
        ]

    @property
    def unmet(self) -> dict[int, str]:
        """Choices made elsewhere of backends that are not registered here, by transition; auto runs
        these.
        """
        return dict(self._unmet)

    def choose(self, names: Sequence[str]) -> None:
        """Takes over choices made elsewhere; what refuses or lacks its columns here is left to
        auto.

        A name that nobody registered stays the choice, is told by `unmet` and `describe`, and auto
        runs in its place.
        """
        chosen = list(self._chosen)
        draws = Draws()
        plans = self._plans
        for t, name in enumerate(names[: len(chosen)]):
            able = name in BACKENDS and name not in plans.refused(t)
            able |= name == Attention.name and all(
                column in self.graph.columns for column in Attention.names(t)
            )
            chosen[t] = self._made(name if able else AUTO, t, draws, {})
        known = {AUTO, Attention.name, *BACKENDS}
        unmet = {t: name for t, name in enumerate(names[: len(chosen)]) if name not in known}
        self._change(chosen, unmet, draws)

    def describe(self, batch: int = 256, *, training: bool = True) -> list[dict[str, Any]]:
        """Returns, for every transition, which backend runs it at a batch size, why, and which ones
        cannot.
        """
        plans = self._plans
        rows = []
        for t, chosen in enumerate(self.choices()):
            backend, why = plans.backend(t, batch_class(batch), training)
            if t in self._unmet:
                why = f"asked for {chosen!r}, which is not registered here; auto instead: {why}"
            relations, refused = plans.topologies[t].n_relations, plans.refused(t)
            rows.append(
                {
                    "transition": t,
                    "relations": relations,
                    "chosen": chosen,
                    "runs": backend.name,
                    "why": why,
                }
            )
            rows[-1]["refused"] = refused
        return rows

    def families(self, transition: int) -> list[FamilyReport]:
        """Returns the nodes of a transition that share their children, the largest families
        first.
        """
        (t,), found = self._numbers(transition), []
        for families in find_families(self.graph.transitions[t].topology):
            for members, children in zip(families.members, families.children, strict=True):
                found.append(FamilyReport(self._nodes(t, members), self._nodes(t + 1, children)))
        return sorted(found, key=lambda family: -family.block[0] * family.block[1])

    def plan(self, transition: int, batch: int = 256, *, training: bool = True) -> BoundPlan:
        """Returns the plan that runs a transition at a batch size; it refuses to run after an
        edit.
        """
        (t,) = self._numbers(transition)
        store = self.graph.transitions[t]
        plan = self.steps(self._plans, batch, training=training)[t].plan
        return BoundPlan(plan, store, store.topology)

    def steps(self, plans: Plans, batch: int, *, training: bool) -> list[Step]:
        """Returns what a forward pass of one version runs, one step a transition."""
        if is_exporting():
            return exported_steps(plans)
        if is_tracing():
            raise PlanError(
                "torch.jit.trace, which torch.onnx.export(dynamo=False) uses too, does not see all"
                " that backends do. Trace a snapshot instead: gn.snapshot(model) or net.snapshot();"
                " or say dynamo=True"
            )
        key = batch_class(batch), training
        line = plans.lines.get(key)
        if line is None:
            line = _make_line(plans, key)
        line.used = True  # only ever written here, so that torch.compile does not watch it
        return line.steps

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Makes again, for the relations to come, the plans that were in use; raises when a chosen
        backend refuses.
        """
        return partial(self._install, self._chosen, self._unmet, self._plans.after(commit))

    def _made(self, name: str, t: int, draws: Draws, options: dict[str, Any]) -> Backend | None:
        if name == Attention.name:
            return Attention.on(self.graph, t, draws, **options)
        return None if name == AUTO else BACKENDS[name](**options)

    def _change(self, chosen: list[Backend | None], unmet: dict[int, str], draws: Draws) -> None:
        """Puts choices into effect, and with them the columns that they need; an error leaves all
        as it was.
        """
        before = self._plans
        kept = {}
        for key, plan in before.made.items():
            if key[1] in chosen or not isinstance(key[1], Attention):
                kept[key] = plan
        columns = []
        for backend in chosen:
            if isinstance(backend, Attention):
                columns += backend.columns
        view = before.view._replace(columns={column.name: column.vector for column in columns})
        plans = Plans(chosen, before.modules, view, before.dtype, kept, before.shapes)
        plans.require()
        install = partial(self._install, chosen, unmet, plans)
        self.graph.set_columns(columns, [*draws.installs(), install])

    def _install(self, chosen: list[Backend | None], unmet: dict[int, str], plans: Plans) -> None:
        self._chosen = chosen
        self._unmet = unmet
        self._plans = plans

    def _numbers(self, transition: int | None) -> range:
        count = len(self._chosen)
        if transition is None:
            return range(count)
        if not isinstance(transition, int) or not 0 <= transition < count:
            raise ValueError(f"the net has transitions 0 to {count - 1}, got {transition!r}")
        return range(transition, transition + 1)

    def _nodes(self, layer: int, rows: Tensor) -> NodeSet:
        return NodeSet(self.graph, {layer: self.graph.layers[layer].uid[rows.cpu()]})

    def __getstate__(self) -> dict[str, Any]:
        return {"_chosen": list(self._chosen), "_unmet": dict(self._unmet)}


@untraced
def _make_line(plans: Plans, key: tuple[int, bool]) -> Line:
    """Makes plans outside of any trace: torch.compile sees them as given."""
    return plans.line(*key)


def _require_known(name: str, options: dict[str, Any]) -> None:
    """Raises PlanError for a name or an option that nothing has."""
    everyone = {AUTO: (), Attention.name: Attention.options}
    everyone |= {known: tuple(f.name for f in fields(b)) for known, b in BACKENDS.items()}  # pyright: ignore[reportArgumentType]
    if not isinstance(name, str) or name not in everyone:
        raise PlanError(f"no backend is called {name!r}; known are {', '.join(sorted(everyone))}")
    known = everyone[name]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise PlanError(
            f"{name} has no option {', '.join(unknown)}; its options are:"
            f" {', '.join(known) or 'none'}"
        )
