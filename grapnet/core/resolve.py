"""Resolving an edit: what was asked for becomes one Change, or an error, before anything is
touched.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .activation import activation_function
from .change import Change
from .drafts import LayerDraft, TransitionDraft, union
from .errors import EditError
from .remap import contains, flatnonzero
from .requests import Requests

if TYPE_CHECKING:
    from .graph import Graph

# relations to look at first for parents of outputs; four times as many each time after that
_FIRST_LOOK = 4096


def resolve(graph: "Graph", requests: Requests, generator: torch.Generator | None) -> Change:
    """Returns the Change that the requests amount to; raises EditError when they conflict. Touches
    nothing.
    """
    with torch.no_grad():
        drafts = [LayerDraft(graph, requests, number) for number in range(len(graph.layers))]
        wirings: list[TransitionDraft] = []
        folded: dict[int, Tensor | None] = {}
        for number, draft in enumerate(drafts):
            if number in requests.orphans:
                folded[number] = _remove_orphans(graph, requests, number, drafts, wirings[-1])
            if number < len(graph.transitions):
                wirings.append(TransitionDraft(graph, requests, number, draft, drafts[number + 1]))
        transitions = {
            t: w.change(drafts[t], drafts[t + 1], requests, generator)
            for t, w in enumerate(wirings)
            if w.is_touched
        }
        layers = {
            n: draft.change(requests, wirings[n - 1] if n else None, generator)
            for n, draft in enumerate(drafts)
            if draft.is_touched
        }
        return Change(
            {n: replace(c, folded=folded.get(n)) for n, c in layers.items() if not c.is_empty},
            {t: c for t, c in transitions.items() if not c.is_empty},
        )


def require_alive(graph: "Graph", change: Change) -> None:
    """Raises EditError when a change takes the last relation of a transition, or the last parent of
    an output that stays.

    It looks at the relations that leave, and at as many others as it takes to meet every output
    that lost a parent. An output that no path from the inputs led to before may lose its parents.
    """
    for t, part in change.transitions.items():
        is_emptied = part.index.old_size > 0 and part.index.new_size == 0
        if is_emptied and bool(_reached(graph).any()):
            raise _dead(f"this edit takes the last relation of transition {t}")
    last = len(graph.transitions) - 1
    part = change.transitions.get(last)
    if part is None or part.wiring is None or len(part.index.removed) == 0:
        return
    outputs = graph.layers[-1]
    child = part.wiring.child
    # outputs that lost a parent, [rows before], then [rows after]
    rows = graph.transitions[last].child.index_select(0, part.index.removed).long()
    without = torch.zeros(len(outputs), dtype=torch.bool, device=child.device)
    without[rows] = True
    index = None
    if last + 1 in change.layers:
        index = change.layers[last + 1].index
        without = index.carry(without.cpu(), False).to(child.device)
    # Most outputs have a parent among the first relations, so that few are read.
    start = 0
    stop = _FIRST_LOOK
    while start < len(child) and bool(without.any()):
        without[child[start:stop].long()] = False
        start = stop
        stop *= 4
    dead = flatnonzero(without).cpu()
    if len(dead) == 0:
        return
    if index is not None:
        dead = index.old_positions(dead)
    # An output that only parentless nodes led to is a constant already.
    dead = dead[_reached(graph)[dead.long()]]
    if len(dead) == 0:
        return
    uids = outputs.uid[dead.long()].tolist()
    names = ", ".join(str(uid) for uid in uids[:5])
    if len(uids) > 5:
        names += ", …"
    raise _dead(f"this edit takes the last parent of output nodes: {names}")


def _reached(graph: "Graph") -> Tensor:
    """Returns whether a path from the sensory layer leads to each output, [outputs] bool."""
    reached = torch.ones(len(graph.layers[0]), dtype=torch.bool, device=graph.device)
    for transition in graph.transitions:
        topology = transition.topology
        arriving = topology.child[reached[topology.parents().long()]]
        reached = torch.zeros(topology.n_children, dtype=torch.bool, device=graph.device)
        reached[arriving.long()] = True
    return reached.cpu()


def _dead(what: str) -> EditError:
    return EditError(
        f"{what}; an output would no longer depend on the input, and nothing was changed.\n"
        "Cut less, or say allow_dead=True"
    )


def _remove_orphans(
    graph: "Graph",
    requests: Requests,
    number: int,
    drafts: list[LayerDraft],
    incoming: TransitionDraft,
) -> Tensor | None:
    """Marks the parentless nodes of a hidden layer as gone and, if asked, leaves their constants to
    their children.

    Returns the positions of the relations over which they were left.
    """
    draft, topology = drafts[number], graph.transitions[number].topology
    orphans = (
        incoming.fan_in(torch.arange(len(draft.uids), device="cpu")).cpu() == 0
    ) & ~draft.gone
    draft.lose(orphans)
    rows = flatnonzero(orphans[: draft.n_present])
    if not requests.orphans[number] or len(rows) == 0:
        return None
    positions = topology.owned_by(rows.to(graph.device))
    positions = positions[~contains(union(requests.cuts.get(number, []), graph.device), positions)]
    drafts[number + 1].shift = folded_constants(graph, number, positions, draft.shift)
    return positions


def folded_constants(
    graph: "Graph", number: int, relations: Tensor, shift: Tensor | None
) -> Tensor:
    """Returns what parentless nodes of a layer send to each node of the next one, [rows of the next
    layer].

    Args:
        graph: whose weights and biases count.
        number: the layer of the parentless nodes.
        relations: the positions of the relations they send it over, in the order of their owners.
        shift: what their own biases are given in the same edit, [rows of the layer].
    """
    layer, transition = graph.layers[number], graph.transitions[number]
    topology = transition.topology
    rows, counts = topology.parents_at(relations).unique_consecutive(return_counts=True)
    constants = (layer.values() if shift is None else layer.values() + shift)[rows.long()]
    for kind, chosen in layer.activation_names.select(rows.cpu()).kinds():
        places = chosen.long().to(graph.device)
        constants[places] = activation_function(str(kind))(constants[places])
    sent = constants.repeat_interleave(counts) * transition.read(relations)
    return sent.new_zeros(topology.n_children).index_add_(0, topology.child[relations.long()], sent)
