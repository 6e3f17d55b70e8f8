"""The execution manager: which backend runs which transition, and the plans they made."""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from grapnet.core.errors import PlanError
from grapnet.core.graph import Graph
from grapnet.core.values import Token

from .plan import Backend, Plan
from .reference import Reference

BACKENDS: dict[str, Backend] = {"reference": Reference()}


class _Kept(NamedTuple):
    structure: Token
    child: Tensor  # a net that moves to another device has another one
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
        """Tells the manager which graph it runs, without keeping that graph alive, and forgets all plans."""
        self._graph = weakref.ref(graph)
        self._plans: dict[int, _Kept] = {}

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
        for t in chosen:
            self._prepared(name, t)
        for t in chosen:
            self._chosen[t] = name
            self._plans.pop(t, None)

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
        sizes = [transition.size for transition in self.graph.transitions]
        return [
            {"transition": t, "backend": name, "relations": size}
            for t, (name, size) in enumerate(zip(self._chosen, sizes, strict=True))
        ]

    def plan(self, t: int) -> Plan:
        """Returns the plan of a transition, made again when relations have moved or the net changed device."""
        store = self.graph.transitions[t]
        kept = self._plans.get(t)
        if kept is None or kept.structure is not store.structure or kept.child is not store.child:
            kept = self._plans[t] = _Kept(store.structure, store.child, self._prepared(self._chosen[t], t))
        return kept.plan

    def _prepared(self, name: str, t: int) -> Plan:
        backend, topology = BACKENDS[name], self.graph.transitions[t].topology
        refusals = backend.refusals(topology)
        if refusals:
            raise PlanError(f"{name} cannot run transition {t}: {'; '.join(refusals)}")
        return backend.prepare(topology)

    def __getstate__(self) -> dict[str, Any]:
        return {"_chosen": list(self._chosen)}
