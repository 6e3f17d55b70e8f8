"""Which of an optimizer's saved states belong to which Parameter of a net, when the optimizer is not there to ask."""

from typing import Any

import grapnet as gn
from grapnet.checkpoint.extras import Extra

from .command import CommandError


def places_of(name: str, extra: Extra, net: gn.GrapNet, prefix: str) -> dict[str, int]:
    """Returns the places of the net's Parameters among all of a saved optimizer's, by their names in the net.

    The file knows them by name. One that was written before files did, without `undo=True`, knows them when the
    optimizer was made from named parameters; otherwise the shapes tell, in the order of `net.parameters()`, or in any
    order where no two are equal.

    Args:
        name: of the extra.
        extra: what the file says about the optimizer.
        net: the net.
        prefix: of its Parameters' names in the model.

    Raises:
        CommandError: some shapes are the net's and nothing says which is which.
    """
    mine = {n: tuple(p.shape) for n, p in net.named_parameters()}
    shapes = [tuple(shape) for shape in extra.shapes or ()]
    groups = extra.content.get("param_groups") if isinstance(extra.content, dict) else None
    if groups is None or "state" not in extra.content or sum(len(group["params"]) for group in groups) != len(shapes):
        raise _unclear(name, extra, "its state is not that of an optimizer of torch")
    named = extra.owners if extra.owners or extra.knows_owners else _named(groups)
    found = {n: named[prefix + n] for n in mine if prefix + n in named}
    if any(shapes[place] != mine[n] for n, place in found.items()):
        raise _unclear(name, extra, "it holds state of the net as it was before another edit")
    if found or extra.knows_owners or not set(shapes) & set(mine.values()):
        return found
    starts = [at for at in range(len(shapes)) if shapes[at : at + len(mine)] == list(mine.values())]
    if len(starts) == 1:
        return {n: starts[0] + offset for offset, n in enumerate(mine)}
    if starts or any(shapes.count(shape) != 1 for shape in mine.values()):
        raise _unclear(name, extra, "its shapes do not tell which of its states are the net's")
    return {n: shapes.index(shape) for n, shape in mine.items()}


def _named(groups: list[dict[str, Any]]) -> dict[str, int]:
    """Returns places by the names that the optimizer was made with; nothing without names."""
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    return {name: place for place, name in enumerate(names) if name is not None}


def _unclear(name: str, extra: Extra, reason: str) -> CommandError:
    return CommandError(
        f"{name!r} ({extra.made_by[:60]}) cannot follow an edit: {reason}",
        f"save it again with gn.save, which keeps the names; --drop {name} leaves it out",
    )
