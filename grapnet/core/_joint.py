"""One transaction over several nets: all of them change, or none does."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ._commit import Verb, commit, next_reversed, undo
from ._edit import Block, Edit, Leave
from ._errors import EditError, HistoryError
from ._graph import Graph
from ._journal import Commit, Joint


def edit_together(
    *nets: Graph,
    reason: str = "",
    by: str | None = None,
    trial: bool = False,
    generator: torch.Generator | None = None,
    allow_dead: bool | None = None,
) -> "_Together":
    """Opens one transaction over several nets: `with gn.edit_together(gate, up, down) as (g, u,
    d):`.

    Leaving the block validates and prepares everything in every net, followers included, and only
    then swaps; an error anywhere leaves all of them, and the random numbers, as they were. A net
    whose edit turns out empty commits nothing. The commits of the others are parts of one
    transaction (`commit.joint`), which `undo_together` takes back.

    Args:
        nets: the nets; each has its own edit, in this order.
        reason: why; it stands in every net's journal.
        by: which rule or person edits.
        trial: take all edits back when the block ends, as `net.edit(trial=True)` does. `commit()`
            of any one of the edits lets all of them take effect.
        generator: source of the random numbers for newborn weights; each device's own by default.
        allow_dead: as for `net.edit`.

    Raises:
        EditError: a net is named twice or has an edit open, or what was asked for is impossible;
            nothing was changed.

    Examples:
        >>> import grapnet as gn
        >>> up, down = gn.GrapNet([4, 8]), gn.GrapNet([8, 4])
        >>> with gn.edit_together(up, down, reason="remove three hidden units") as (first, second):
        ...     first.remove_nodes(up.layers[1][:3], interface=True)
        ...     second.remove_nodes(down.layers[0][:3], interface=True)
        >>> up.sizes, down.sizes
        ([4, 5], [5, 4])
        >>> receipts = gn.undo_together(up, down)
        >>> up.sizes, down.sizes
        ([4, 8], [8, 4])
    """
    _require_nets(nets, "edit_together")
    edits = tuple(
        net.edit(reason, by=by, trial=trial, generator=generator, allow_dead=allow_dead)
        for net in nets
    )
    return _Together(edits)


class _Together:
    """The `with` statement of `edit_together`."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.block = Block(edits)
        for edit in edits:
            edit.block = self.block

    def __enter__(self) -> tuple[Edit, ...]:
        self.block.enter()
        return self.block.edits

    __exit__ = Leave()


def undo_together(*nets: Graph) -> tuple[Commit, ...]:
    """Takes the last transaction over these nets back, in all of them or in none; see `net.undo()`.

    The nets are all that the transaction changed, in any order; one whose edit was empty is not
    among them.

    Returns:
        The receipt of every net; they are parts of one transaction again, which `redo_together`
        takes back.

    Raises:
        HistoryError: the last commits of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse_together(nets, "undo")


def redo_together(*nets: Graph) -> tuple[Commit, ...]:
    """Takes the last `undo_together` of these nets back, in all of them or in none; see
    `net.redo()`.

    Returns:
        The receipt of every net.

    Raises:
        HistoryError: the last undos of the nets are not all the parts of one transaction; nothing
            was changed.
    """
    return _reverse_together(nets, "redo")


def _reverse_together(nets: Sequence[Graph], verb: Verb) -> tuple[Commit, ...]:
    _require_nets(nets, f"{verb}_together")
    for net in nets:
        net.require_no_edit(verb)
    intents = []
    for net, joint in zip(nets, _parts_of_one(nets, verb), strict=True):
        intent = undo(net, verb)
        intents.append(replace(intent, receipt=replace(intent.receipt, joint=joint)))
    return tuple(receipt for receipt in commit(intents) if receipt is not None)


def _parts_of_one(nets: Sequence[Graph], verb: Verb) -> list[Joint | None]:
    """Returns what the receipts of undo or redo carry; raises HistoryError unless they take one
    transaction back.
    """
    told, joints = [], []
    for n, net in enumerate(nets):
        try:
            commit = next_reversed(net.journal, verb)
        except HistoryError as error:
            raise HistoryError(
                f"net {n + 1} of {len(nets)}: {error}; nothing was changed"
            ) from None
        told.append(f"  net {n + 1}: {commit!r}")
        joints.append(commit.joint)
    whole = Joint.of(len(nets), joints[0] and joints[0].name)
    if set(joints) != set(whole):
        raise HistoryError(
            f"what {verb}_together would take back is not the whole of one transaction, and nothing"
            " was changed:\n"
            + "\n".join(told)
            + "\nGive exactly the nets that it changed, or take each back by itself:"
            f" net.{verb}(alone=True)"
        )
    fresh = Joint.of(len(nets))
    return [fresh[joint.part] if joint else None for joint in joints]


def _require_nets(nets: Sequence[Graph], verb: str) -> None:
    """Raises unless there are nets, and each of them once."""
    if not nets:
        raise EditError(f"{verb} takes the nets one by one, got none: gn.{verb}(first, second)")
    for n, net in enumerate(nets):
        if not isinstance(net, Graph):
            raise TypeError(
                f"{verb} takes the nets one by one, gn.{verb}(*nets), got {type(net).__name__}"
            )
        again = next(m for m, other in enumerate(nets) if other is net)
        if again < n:
            raise EditError(
                f"{verb} was given one net twice, as number {again + 1} and {n + 1}; name each net"
                " once"
            )
