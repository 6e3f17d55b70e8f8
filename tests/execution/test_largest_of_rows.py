"""The largest values of every row, from the compiled kernels and from sorting, in every variant."""

from functools import cache

import pytest
import torch
from torch import Tensor

from grapnet.core._errors import PlanError
from grapnet.execution import native

pytestmark = pytest.mark.sparse


def largest_by_sorting(values: Tensor, ptr: Tensor, wanted: Tensor, least: float) -> Tensor:
    """Returns what `native.largest_of_rows` should, one row after the other."""
    found = []
    for first, last, count in zip(
        ptr[:-1].tolist(), ptr[1:].tolist(), wanted.tolist(), strict=True
    ):
        order = values[first:last].nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[values[first:last][order] >= least]
        found.append(first + order[: max(0, count)].sort().values)
    return torch.cat([torch.empty(0), *found]).int()


@cache
def ranked_rows(
    kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[tuple[Tensor, float, Tensor]]]:
    """Draws rows of several lengths, and finds the largest for some numbers that are wanted."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0, 1, 2, 700, 0, 33, 900, 64, 1, 300] * 8)
    ptr = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    values = torch.randn(int(ptr[-1]), dtype=torch.float64, generator=draw)
    if kind == "extreme":
        special = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-310, 1e-45, 3e38], dtype=torch.float64
        )
        values[::3] = special[torch.randint(0, 8, values[::3].shape, generator=draw)]
    values = {
        "tied": (values * 2).round(),
        "zeros": values * (values > 1),
        "equal": values * 0 + 3,
    }.get(kind, values)
    values = (values if kind in ("signed", "extreme") else values.abs()).to(dtype)
    # stands where a relation is present
    values[torch.rand(values.shape, generator=draw) < 0.2] = -1
    counts = [
        sizes // 3,
        sizes // 30,
        sizes * 0,
        sizes * 0 + 1,
        sizes - 1,
        sizes + 5,
        sizes * 0 + 40,
    ]
    asked = [(wanted, least) for wanted in counts for least in (0.0, 1.0, -torch.inf)]
    return (
        values,
        ptr,
        [(*question, largest_by_sorting(values, ptr, *question)) for question in asked],
    )


@pytest.mark.parametrize("kind", ["distinct", "tied", "zeros", "equal", "signed", "extreme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("variant")
def test_the_largest_of_every_row_are_found(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, ptr, asked = ranked_rows(kind, dtype)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for wanted, least, expected in asked:
            assert torch.equal(native.largest_of_rows(values, ptr, wanted, least), expected)


def test_the_largest_of_no_rows_are_none() -> None:
    nothing, ptr = torch.empty(0), torch.zeros(1).int()
    assert len(native.largest_of_rows(nothing, ptr, nothing.long(), 0)) == 0
    assert len(native.largest_of_rows(nothing, torch.zeros(4).int(), torch.ones(3).long(), 0)) == 0
    for wrong in (nothing.half(), torch.zeros(1), torch.zeros(0, device="meta")):
        with pytest.raises(PlanError, match="values is"):
            native.largest_of_rows(wrong, ptr, nothing.long(), 0)
    with pytest.raises(PlanError, match="wanted is"):
        native.largest_of_rows(nothing, ptr, torch.ones(1).long(), 0)
    with pytest.raises(PlanError, match="ptr is"):
        native.largest_of_rows(nothing, ptr[:0], nothing.long(), 0)
