"""State dicts: a graph checks the wiring and adopts the frozen bits before its stores read
values.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._coordinates import Coordinates
from ._errors import TopologyError
from ._resolve import Requests, resolve

if TYPE_CHECKING:
    from ._graph import Graph


def prepare_to_load(graph: "Graph", state: Mapping[str, Any], prefix: str) -> None:
    """Raises TopologyError if the state has another wiring; freezes what is frozen in the state, in
    a commit.
    """
    graph._require_no_edit("load a state dict")
    if not any(name.startswith(prefix) for name in state):
        return
    _require_as_many_transitions(graph, state, f"{prefix}transitions.")
    requests = Requests()
    for number, layer in enumerate(graph.layers):
        name = f"{prefix}layers.{number}."
        if not layer.is_sensory:
            _ask(
                layer, state, name, requests.freeze_biases[number], requests.unfreeze_biases[number]
            )
    for t, transition in enumerate(graph.transitions):
        name = f"{prefix}transitions.{t}."
        _ask(transition, state, name, requests.freeze_relations[t], requests.unfreeze_relations[t])
    for column in graph.columns.values():
        _require_fit(column, state, f"{prefix}columns.{column.name}.")
    change = resolve(graph, requests, None)
    if not change.is_empty:
        graph._commit_change(change, "load_state_dict")


def _require_as_many_transitions(graph: "Graph", state: Mapping[str, Any], prefix: str) -> None:
    """Raises TopologyError if layers came or left between graph and state."""
    held = {name for name in state if name.startswith(prefix) and name.endswith(".ptr")}
    expected = {f"{prefix}{t}.ptr" for t in range(len(graph.transitions))}
    # Without any wiring it is a part of a state dict.
    if held and held != expected:
        raise _mismatch(f"it has {len(held)} transitions where this graph has {len(expected)}")


def _ask(
    store: Coordinates, state: Mapping[str, Any], name: str, freeze: list[Any], unfreeze: list[Any]
) -> None:
    _require_fit(store, state, name)
    held = state.get(name + "frozen")
    if held is None:
        return
    held = held.to(store.frozen_at)
    if len(held) and (
        int(held[0]) < 0 or int(held[-1]) >= store.size or bool((held[1:] <= held[:-1]).any())
    ):
        raise TopologyError(
            f"{name}frozen must be ascending positions below {store.size}; nothing was loaded"
        )
    freeze.append(held)
    unfreeze.append(store.frozen_at)


def _require_fit(store: Coordinates, state: Mapping[str, Any], name: str) -> None:
    difference = store._differs_from(state, name)
    if difference:
        raise _mismatch(difference)


def _mismatch(difference: str) -> TopologyError:
    return TopologyError(
        f"{difference}; the state dict belongs to a graph with another wiring, and nothing was"
        " loaded. Files of gn.save include the wiring, for gn.load(path) or"
        " gn.restore(path, into=model); Lightning's do with RulesCallback, or with load_nets"
        " in on_load_checkpoint"
    )
