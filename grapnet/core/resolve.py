"""Resolving an edit: what was asked for becomes one Change, or an error, before anything is touched."""

from typing import TYPE_CHECKING

import torch

from .activation import activation_function
from .change import Change
from .drafts import LayerDraft, TransitionDraft, union
from .remap import contains, flatnonzero
from .requests import Requests

if TYPE_CHECKING:
    from .graph import Graph


def resolve(graph: "Graph", requests: Requests, generator: torch.Generator | None) -> Change:
    """Returns the Change that the requests amount to; raises EditError when they conflict. Touches nothing."""
    with torch.no_grad():
        drafts = [LayerDraft(graph, requests, number) for number in range(len(graph.layers))]
        wirings: list[TransitionDraft] = []
        for number, draft in enumerate(drafts):
            if number in requests.orphans:
                _remove_orphans(graph, requests, number, drafts, wirings[-1])
            if number < len(graph.transitions):
                wirings.append(TransitionDraft(graph, requests, number, draft, drafts[number + 1]))
        transitions = {
            t: w.change(drafts[t], drafts[t + 1], requests, generator) for t, w in enumerate(wirings) if w.is_touched
        }
        layers = {
            n: draft.change(requests, wirings[n - 1] if n else None, generator)
            for n, draft in enumerate(drafts)
            if draft.is_touched
        }
        return Change(
            {n: c for n, c in layers.items() if not c.is_empty},
            {t: c for t, c in transitions.items() if not c.is_empty},
        )


def _remove_orphans(
    graph: "Graph", requests: Requests, number: int, drafts: list[LayerDraft], incoming: TransitionDraft
) -> None:
    """Marks the parentless nodes of a hidden layer as gone and, if asked, leaves their constants to their children."""
    draft, below, layer, transition = (
        drafts[number],
        drafts[number + 1],
        graph.layers[number],
        graph.transitions[number],
    )
    orphans = (incoming.fan_in(torch.arange(len(draft.uids), device="cpu")).cpu() == 0) & ~draft.gone
    draft.gone |= orphans
    rows = flatnonzero(orphans[: draft.n_present])
    if not requests.orphans[number] or len(rows) == 0:
        return
    biases = layer.values() if draft.shift is None else layer.values() + draft.shift
    kinds = layer.activation_names.select(rows)
    rows = rows.to(graph.device)
    constants = biases[rows.long()]
    for kind, chosen in kinds.kinds():
        places = chosen.long().to(graph.device)
        constants[places] = activation_function(str(kind))(constants[places])
    topology = transition.topology
    positions = topology.owned_by(rows)
    kept = ~contains(union(requests.cuts.get(number, []), graph.device), positions)
    constants = constants.repeat_interleave(topology.degrees[rows.long()].long())[kept]
    positions = positions[kept]
    if below.shift is None:
        below.shift = torch.zeros(below.n_present, dtype=constants.dtype, device=constants.device)
    below.shift.index_add_(0, topology.child[positions.long()], constants * transition.read(positions))
