"""Plans: what runs one wiring of a graph, made when it is first needed."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from grapnet.core._commit import View
from grapnet.core._coordinates import Vector
from grapnet.core._errors import PlanError
from grapnet.core._journal import Commit
from grapnet.core._layer import Layer, Roster
from grapnet.core._transition import Topology, Transition

from . import native
from .attention import Attention, AttentionPlan
from .auto import Shape, fastest, in_words
from .dense import Dense
from .family import Family
from .plan import Backend, Plan, is_feature_major, is_movable
from .reference import Reference
from .sparse import Sparse

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Reference, Dense, Family, Sparse)}
AUTO = "auto"


class Step(NamedTuple):
    """What a forward pass does at one transition: run the plan, then the activations of the layer
    that it enters.
    """

    transition: Transition
    layer: Layer
    plan: Plan
    values_shape: tuple[int, ...]
    # of the version that the plan is for
    weights: Vector
    biases: Vector
    roster: Roster


@dataclass(eq=False)
class Line:
    """The steps of a forward pass, in order."""

    steps: list[Step]
    used: bool = False  # since the last commit


def register_backend(backend: type[Backend]) -> None:
    """Makes a backend known to `net.execution.use` under its `name`; `auto` does not pick it.

    A class that was defined again, as by running a cell of a notebook twice, takes the place of the
    one before; nets that have chosen that one keep it until they are told to `use` the name again.

    Args:
        backend: a frozen dataclass with a `name`, `refusals`, `prepare`, and a default for every
            field.

    Raises:
        TypeError: it is no such class; nothing was registered.
        ValueError: another backend has that name.
    """
    _require_backend(backend)
    present = BACKENDS.get(backend.name, backend)
    if backend.name in (AUTO, Attention.name) or _origin(present) != _origin(backend):
        raise ValueError(
            f"a backend called {backend.name!r} exists already; give this one another name"
        )
    BACKENDS[backend.name] = backend


@dataclass(eq=False)
class Plans:
    """The plans of one wiring, and the lines of plans that forward passes have asked for."""

    chosen: Sequence[Backend | None]  # None: auto
    modules: Sequence[tuple[Transition, Layer]]  # every transition and the layer that it enters
    view: View  # what it is all made for
    dtype: torch.dtype
    made: dict[tuple[int, Backend], Plan] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    lines: dict[tuple[int, bool], Line] = field(default_factory=dict)

    @property
    def topologies(self) -> Sequence[Topology]:
        """The wiring of every transition."""
        return self.view.topologies

    def require(self) -> None:
        """Raises PlanError when a chosen backend cannot run its transition."""
        for t, (backend, topology) in enumerate(zip(self.chosen, self.topologies, strict=True)):
            reasons = backend.refusals(topology, self.dtype) if backend else []
            if backend and reasons:
                raise PlanError(f"{backend.name} cannot run transition {t}: {'; '.join(reasons)}")

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

    def backend(self, t: int, batch: int, training: bool) -> tuple[Backend, str]:
        """Returns the backend that runs a transition at a batch size, and why."""
        backend, why = self._choice(t, batch, training)
        return backend, in_words(why, batch)

    def _choice(self, t: int, batch: int, training: bool) -> tuple[Backend, str | dict[str, float]]:
        if (chosen := self.chosen[t]) is not None:
            return chosen, "chosen"
        shape = self.shape(t)
        refused = {} if shape.full else self.refused(t)
        able = [name for name in BACKENDS if name not in refused]
        device = self.topologies[t].child.device.type
        name, why = fastest(shape, able, device=device, batch=batch, training=training)
        if native.missing and device == "cpu":
            wanted, _ = fastest(
                shape, [*able, Sparse.name], device=device, batch=batch, training=training
            )
            if wanted == Sparse.name:
                native.warn_missing()
        return BACKENDS[name](), why

    def shape(self, t: int) -> Shape:
        """Returns what the cost of running a transition depends on."""
        if t not in self.shapes:
            self.shapes[t] = Shape.of(self.topologies[t])
        return self.shapes[t]

    def line(self, batch: int, training: bool) -> Line:
        """Makes what a forward pass runs; a result stays feature-major only where the next plan
        reads it so.
        """
        self.require()
        if self.view.weights[0].content.is_meta:
            raise PlanError(
                "this net is on the meta device, which holds no numbers. Move it to another one,"
                " net.to_empty(device=...), and load a state dict; or gn.load(path)"
            )
        # as if called alone
        with (
            temporarily_clear_interpreter_stack(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            plans = [
                self._plan(t, self._choice(t, batch, training)[0])
                for t in range(len(self.topologies))
            ]
        for t, plan in enumerate(plans):
            reader = plans[t + 1] if t + 1 < len(plans) else None
            if is_feature_major(plan) and not is_feature_major(reader):
                plans[t] = plan.row_major()
        line = Line(self.steps(plans, training))
        self.lines[batch, training] = line
        return line

    def steps(self, plans: Sequence[Plan], training: bool) -> list[Step]:
        """Returns the steps of a forward pass that runs these plans."""
        found = []
        for t, plan in enumerate(plans):
            if not training and isinstance(plan, AttentionPlan):
                plan = plan.reading(self.view.columns)
            biases = self.view.biases[t + 1]
            assert biases is not None
            found.append(
                Step(
                    *self.modules[t],
                    plan,
                    getattr(plan, "values_shape", (-1,)),
                    self.view.weights[t],
                    biases,
                    self.view.rosters[t + 1],
                )
            )
        return found

    def after(self, commit: Commit) -> "Plans":
        """Returns the plans for the wiring that a commit brings: those in use are made, or moved,
        at once.
        """
        topologies = commit.view.topologies
        coming = Plans(self.chosen, self.modules, commit.view, self.dtype)
        coming.require()
        for (t, backend), plan in self.made.items():
            if t not in commit.wirings:
                coming.made[t, backend] = plan
            elif is_movable(plan) and _keeps_rows(commit, t):
                moved = plan.moved(topologies[t], commit.relations[t])
                coming.made |= {} if moved is None else {(t, backend): moved}
        coming.shapes = {t: shape for t, shape in self.shapes.items() if t not in commit.wirings}
        for key in [key for key, line in self.lines.items() if line.used]:
            coming.line(*key)
        return coming

    def _plan(self, t: int, backend: Backend) -> Plan:
        if (t, backend) not in self.made:
            self.made[t, backend] = backend.prepare(self.topologies[t])
        return self.made[t, backend]


def _keeps_rows(commit: Commit, t: int) -> bool:
    """Says whether both layers of a transition keep all their rows."""
    return t in commit.relations and all(
        n not in commit.nodes or commit.nodes[n].is_identity for n in (t, t + 1)
    )


def _require_backend(backend: Any) -> None:
    """Raises TypeError, naming what is missing, for anything but a class that the Backend protocol
    describes.
    """
    if not isinstance(backend, type):
        raise TypeError(f"a backend is registered as a class, got {backend!r}")
    missing = (
        []
        if isinstance(getattr(backend, "name", None), str)
        else ['a string `name: ClassVar[str] = "…"`']
    )
    signatures = ("refusals(self, topology, dtype)", "prepare(self, topology)")
    missing += [s for s in signatures if not callable(getattr(backend, s.partition("(")[0], None))]
    if missing:
        raise TypeError(f"the backend {backend.__name__} lacks {' and '.join(missing)}")
    if not is_dataclass(backend) or not backend.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError(
            f"the backend {backend.__name__} is no frozen dataclass; write @dataclass(frozen=True)"
            " above it"
        )
    bare = [
        f.name
        for f in fields(backend)
        if f.init and f.default is MISSING and f.default_factory is MISSING
    ]
    if bare:
        raise TypeError(
            f"options of a backend have defaults, and {backend.__name__} has none for"
            f" {', '.join(bare)}"
        )


def _origin(backend: type) -> tuple[str, str]:
    return backend.__module__, backend.__qualname__
