"""The wiring a net starts with: full, random, or given."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .relations import Topology, require_countable


def full_topology(n_parents: int, n_children: int, device: torch.device) -> Topology:
    """Returns the wiring that relates every parent to every child."""
    ptr = torch.arange(n_parents + 1, dtype=torch.int32, device=device) * n_children
    return Topology(
        ptr,
        torch.arange(n_children, dtype=torch.int32, device=device).repeat(n_parents),
        n_children,
    )


def random_topology(
    n_parents: int,
    n_children: int,
    density: float,
    device: torch.device,
    generator: torch.Generator | None,
) -> Topology:
    """Returns a uniformly random wiring with exactly round(density · parents · children)
    relations.
    """
    cells = n_parents * n_children
    count = round(density * cells)
    require_countable(
        count, f"a transition from {n_parents:,} to {n_children:,} nodes at density {density}"
    )
    if count == cells:
        return full_topology(n_parents, n_children, device)
    few = min(count, cells - count)
    source = torch.device("cpu") if generator is None else generator.device
    keys = torch.empty(0, dtype=torch.int64, device="cpu")
    while len(keys) < few:  # draw with repetition, keep the distinct ones, top up
        more = torch.randint(cells, (few - len(keys) + 16,), generator=generator, device=source)
        keys = torch.cat([keys, more.cpu()]).unique()
    if len(keys) > few:
        spare = torch.randperm(len(keys), generator=generator, device=source)[
            : len(keys) - few
        ].cpu()
        kept = torch.ones(len(keys), dtype=torch.bool, device="cpu")
        kept[spare] = False
        keys = keys[kept]
    if few < count:
        absent = torch.zeros(cells, dtype=torch.bool, device="cpu")
        absent[keys] = True
        keys = (~absent).nonzero().squeeze(1)
    return topology_from_pairs(
        keys // max(n_children, 1), keys % max(n_children, 1), n_parents, n_children, device
    )


def topology_from_pairs(
    parents: Tensor, children: Tensor, n_parents: int, n_children: int, device: torch.device
) -> Topology:
    """Returns the wiring of (parent, child) rows that are sorted by parent."""
    ptr = torch.zeros(n_parents + 1, dtype=torch.int32, device="cpu")
    ptr[1:] = torch.bincount(parents, minlength=n_parents).cumsum(0)
    return Topology(ptr.to(device), children.to(device, torch.int32), n_children)


def erk_densities(sizes: Sequence[int], density: float) -> list[float]:
    """Returns one density a transition, proportional to (parents + children) / (parents ·
    children).

    Small transitions come out denser than large ones (Erdős–Rényi); none exceeds 1, and all
    together keep `density`.
    """
    cells = [a * b for a, b in pairwise(sizes)]
    raw = [(a + b) / (a * b) if a * b else 0.0 for a, b in pairwise(sizes)]
    full: set[int] = set()
    while True:
        open_cells = [t for t in range(len(cells)) if t not in full and cells[t]]
        wanted = density * sum(cells) - sum(cells[t] for t in full)
        scale = wanted / sum(raw[t] * cells[t] for t in open_cells) if open_cells else 0.0
        over = {t for t in open_cells if scale * raw[t] > 1}
        if not over:
            return [1.0 if t in full else scale * raw[t] for t in range(len(cells))]
        full |= over
