"""Which of an optimizer's saved states belong to which Parameter of a net, when the optimizer is
not there to ask.
"""

import grapnet as gn
from grapnet.checkpoint.extras import Extra

from .command import CommandError


def places_of(name: str, extra: Extra, net: gn.GrapNet, prefix: str) -> dict[str, int]:
    """Returns the places of the net's Parameters among all of a saved optimizer's, by their names
    in the net.

    Args:
        name: of the extra.
        extra: what the file says about the optimizer.
        net: the net.
        prefix: of its Parameters' names in the model.

    Raises:
        CommandError: the file does not tell them, or they are of the net as it was at another
            version.
    """
    shapes = [tuple(shape) for shape in extra.shapes or ()]
    groups = extra.content.get("param_groups") if isinstance(extra.content, dict) else None
    if (
        groups is None
        or "state" not in extra.content
        or sum(len(group["params"]) for group in groups) != len(shapes)
    ):
        raise _unclear(name, extra, "its state is not that of an optimizer of torch")
    if not extra.knows_owners:
        raise _unclear(
            name, extra, "this file is older, and does not say which of its states are the net's"
        )
    mine = {n: tuple(p.shape) for n, p in net.named_parameters()}
    found = {n: extra.owners[prefix + n] for n in mine if prefix + n in extra.owners}
    if any(shapes[place] != mine[n] for n, place in found.items()):
        raise _unclear(name, extra, "it holds state of the net as it was before another edit")
    return found


def _unclear(name: str, extra: Extra, reason: str) -> CommandError:
    return CommandError(
        f"{name!r} ({extra.made_by[:60]}) cannot follow an edit: {reason}",
        f"save it again with gn.save, which keeps the names; --drop {name} leaves it out",
    )
