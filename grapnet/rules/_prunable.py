"""Which spaces of an adopted model can be pruned, and down to which sizes."""

import math
from typing import Any
from weakref import WeakKeyDictionary

from grapnet.core._errors import EditError
from grapnet.spaces._adopted import Adopted
from grapnet.spaces._axes import ProductOf, SumOf, atoms_of
from grapnet.spaces._gates import kind_of
from grapnet.spaces._space import Space

# For every model the kinds of its spaces, and whether the model runs with fewer nodes in one.
_kinds: "WeakKeyDictionary[Adopted, dict[Any, bool]]" = WeakKeyDictionary()


def prunable(net: Adopted) -> list[Space]:
    """Returns the spaces of a model that are pruned by default."""
    free = {space._atom for space in net.spaces if not space.pins}
    runs = _kinds.setdefault(net, {})
    candidates = []
    for space in net.spaces:
        if space._atom not in free or len(space) < 2 or frozen_tensor(net, space) is not None:
            continue
        outermost = _outermost_of_products(space, free)
        if any(space._atom not in atoms for atoms in outermost):
            continue
        # A factor of an axis, as heads are, may need numbers of the model to follow, which are
        # looked for long if there are none. So one space of a kind is tried for all of them.
        if outermost and space.verdict == "unproved":
            kind = kind_of(net.model, space)
            if kind not in runs:
                runs[kind] = _runs_with_fewer(net, space)
            if not runs[kind]:
                continue
        candidates.append(space)
    net.prove(candidates)
    return [space for space in candidates if space.verdict in ("exact", "unproved")]


def _outermost_of_products(space: Space, free: set[int]) -> list[list[int]]:
    """Returns, for every product of which a space is a factor, the atoms of its outermost factor
    that can be edited.
    """
    found = []
    for axis in space._members.values():
        terms = axis.parts if isinstance(axis, SumOf) else (axis,)
        for term in terms:
            if isinstance(term, ProductOf) and space._atom in atoms_of(term):
                outermost = next(part for part in term.parts if free & set(atoms_of(part)))
                found.append(atoms_of(outermost))
    return found


def _runs_with_fewer(net: Adopted, space: Space) -> bool:
    """Returns whether the model runs with one node less in a space."""
    sizes = net._atom_sizes()
    fewer = list(sizes)
    fewer[space._atom] -= 1
    try:
        net._gates.foresee(net.model, [space], sizes, fewer)
    except EditError:
        return False
    return True


def size_at_adoption(space: Space) -> int:
    """Returns how many nodes a space had when the model was adopted."""
    net = space.graph
    assert isinstance(net, Adopted)
    return net._typed.sizes()[space._atom]


def frozen_tensor(net: Adopted, space: Space) -> str | None:
    """Returns the name of a Parameter of a space that does not require gradients."""
    stores = net._stores()
    for name, _ in space._members:
        if name in stores and not stores[name].parameter.requires_grad:
            return name
    return None


def multiple_of_nodes(space: Space, multiple: int) -> int:
    """Returns the smallest number of nodes whose entries are a multiple in every tensor."""
    needed = 1
    if multiple > 1:
        for at in space.places().values():
            needed = math.lcm(needed, multiple // math.gcd(multiple, at.shape[1]))
    return needed
