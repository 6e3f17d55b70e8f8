"""The execution manager: which backend runs which transition, and the plans they made."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from grapnet.core.errors import PlanError
from grapnet.core.graph import Graph
from grapnet.core.journal import Commit
from grapnet.core.relations import Topology, Transition
from grapnet.core.values import Token

from .plan import Backend, Plan
from .reference import Reference

BACKENDS: dict[str, Backend] = {"reference": Reference()}


class _Kept(NamedTuple):
    """A plan and what it was made for: the relations, and where they are."""

    structure: Token
    child: Tensor
    plan: Plan


class Execution:
    """`net.execution`: chooses a backend for every transition and keeps its plan until relations move.

    Examples:
        >>> import grapnet as gn
        >>> net = gn.GrapNet([4, 3])
        >>> net.execution.use("reference", transition=0)
        >>> net.execution.describe()
        [{'transition': 0, 'backend': 'reference', 'relations': 12}]
    """

    def __init__(self, graph: Graph) -> None:
        self._chosen = ["reference"] * len(graph.transitions)
        self.bind(graph)

    def bind(self, graph: Graph) -> None:
        """Tells the manager which graph it runs, without keeping that graph alive, and makes all plans."""
        self._graph = weakref.ref(graph)
        graph.follow(self)
        self.refresh()

    @property
    def is_bound(self) -> bool:
        """True while the graph that the manager runs is alive."""
        return "_graph" in self.__dict__ and self._graph() is not None

    def refresh(self) -> None:
        """Makes every plan again, as when the net has moved to another device."""
        self._plans = {t: self._kept(t, self._made(name, t, store.topology)) for t, (name, store) in self._pairs()}

    def prepare(self, graph: Graph, commit: Commit) -> Callable[[], None]:
        """Makes the plans of the transitions that a commit moves, so that a forward pass only reads them."""
        plans = {t: self._made(self._chosen[t], t, topology) for t, topology in commit.wirings.items()}

        def install() -> None:
            for t, plan in plans.items():
                self._plans[t] = self._kept(t, plan)

        return install

    @property
    def graph(self) -> Graph:
        """The graph that is run."""
        graph = self._graph()
        assert graph is not None, "the net is gone"
        return graph

    def use(self, name: str, transition: int | None = None) -> None:
        """Runs one transition, or all of them, with the backend called `name` from now on."""
        if name not in BACKENDS:
            raise PlanError(f"no backend is called {name!r}; known are {', '.join(sorted(BACKENDS))}")
        count = len(self._chosen)
        if transition is not None and not 0 <= transition < count:
            raise ValueError(f"the net has transitions 0 to {count - 1}, got {transition}")
        chosen = range(count) if transition is None else [transition]
        plans = {t: self._made(name, t, self.graph.transitions[t].topology) for t in chosen}
        for t, plan in plans.items():
            self._chosen[t], self._plans[t] = name, self._kept(t, plan)

    def choices(self) -> list[str]:
        """Returns the name of the backend chosen for every transition."""
        return list(self._chosen)

    def choose(self, names: list[str]) -> None:
        """Takes over choices made elsewhere; a backend that is unknown or refuses here is left out."""
        for t, name in enumerate(names[: len(self._chosen)]):
            if name in BACKENDS and not BACKENDS[name].refusals(self.graph.transitions[t].topology):
                self.use(name, t)

    def describe(self) -> list[dict[str, Any]]:
        """Returns, for every transition, which backend runs it."""
        return [{"transition": t, "backend": name, "relations": store.size} for t, (name, store) in self._pairs()]

    def plan(self, t: int) -> Plan:
        """Returns the plan of a transition; one that was made for other relations is never used."""
        store, kept = self.graph.transitions[t], self._plans[t]
        if kept.structure is not store.structure or kept.child is not store.child:
            kept = self._plans[t] = self._kept(t, self._made(self._chosen[t], t, store.topology))
        return kept.plan

    def _kept(self, t: int, plan: Plan) -> _Kept:
        store = self.graph.transitions[t]
        return _Kept(store.structure, store.child, plan)

    def _pairs(self) -> list[tuple[int, tuple[str, Transition]]]:
        return list(enumerate(zip(self._chosen, self.graph.transitions, strict=True)))

    def _made(self, name: str, t: int, topology: Topology) -> Plan:
        refusals = BACKENDS[name].refusals(topology)
        if refusals:
            raise PlanError(f"{name} cannot run transition {t}: {'; '.join(refusals)}")
        return BACKENDS[name].prepare(topology)

    def __getstate__(self) -> dict[str, Any]:
        return {"_chosen": list(self._chosen)}
