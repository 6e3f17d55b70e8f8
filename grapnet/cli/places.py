"""Which of an optimizer's saved states belong to which Parameter of a net, when the optimizer is not there to ask."""

from collections import Counter

import grapnet as gn
from grapnet.checkpoint.extras import Extra

from .command import CommandError

Shape = tuple[int, ...]


def places_of(name: str, extra: Extra, net: gn.GrapNet, prefix: str) -> dict[str, int]:
    """Returns the places of the net's Parameters among all of a saved optimizer's, by their names in the net.

    A file knows them by name when it was saved with `undo=True` or when the optimizer was made from named parameters.
    Otherwise the shapes tell: the net's own in a row, as `net.parameters()` and `model.parameters()` give them; or the
    same ones in another order, such as one group that decays and one that does not, where equal shapes are all in one
    group.

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
    for named in (extra.owners, _named(groups)):
        found = {n: named[prefix + n] for n in mine if prefix + n in named}
        if found and all(shapes[place] == mine[n] for n, place in found.items()):
            return found
    starts = [at for at in range(len(shapes)) if shapes[at : at + len(mine)] == list(mine.values())]
    if len(starts) == 1:
        return {n: starts[0] + offset for offset, n in enumerate(mine)}
    if not set(shapes) & set(mine.values()):
        return {}
    found = None if starts else _reordered(mine, shapes, [len(group["params"]) for group in groups])
    if found is None:
        raise _unclear(name, extra, "its shapes do not tell which of its states are the net's")
    return found


def _named(groups: list[dict[str, list[str]]]) -> dict[str, int]:
    """Returns places by the names that the optimizer was made with; nothing without names."""
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    return {name: place for place, name in enumerate(names) if name is not None}


def _reordered(mine: dict[str, Shape], shapes: list[Shape], lengths: list[int]) -> dict[str, int] | None:
    """Returns places in the net's order among equal shapes; None when they stand in several groups, or do not match."""
    if Counter(shapes) != Counter(mine.values()):
        return None
    group_of = [n for n, length in enumerate(lengths) for _ in range(length)]
    places: dict[Shape, list[int]] = {}
    for place, shape in enumerate(shapes):
        places.setdefault(shape, []).append(place)
    if any(len({group_of[place] for place in equal}) > 1 for equal in places.values()):
        return None
    return {n: places[shape].pop(0) for n, shape in mine.items()}


def _unclear(name: str, extra: Extra, reason: str) -> CommandError:
    return CommandError(
        f"{name!r} ({extra.made_by[:60]}) cannot follow an edit: {reason}",
        f"save it with gn.save(..., undo=True), which keeps the names; --drop {name} leaves it out",
    )
