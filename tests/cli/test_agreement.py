"""Two computations agree up to rounding, also where both overflow; one that overflows alone does
not.
"""

import pytest
import torch

from grapnet.cli.agreement import largest_difference, require_agreement
from grapnet.cli.command import CommandError

NAN, INF = float("nan"), float("inf")


def difference(
    given: list[float], expected: list[float], dtype: torch.dtype = torch.float32
) -> float:
    output, wanted = torch.tensor(given, dtype=dtype), torch.tensor(expected, dtype=dtype)
    found = largest_difference(output, wanted)
    require_agreement(found, wanted, "the copy", "nothing was written")
    return found


def test_equal_places_that_are_no_numbers_agree():
    assert difference([], []) == 0
    assert difference([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0]) == 0
    assert difference([INF, 1.00001], [INF, 1.0]) == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1.0], [NAN]),
        ([NAN], [1.0]),
        ([1.0], [INF]),
        ([INF], [1.0]),
        ([INF], [-INF]),
        ([NAN], [INF]),
        ([INF], [NAN]),
    ],
)
def test_other_places_that_are_no_numbers_do_not(given, expected):
    with pytest.raises(CommandError, match="the copy is NaN or infinite where the net is not"):
        difference([*given, 0.0], [*expected, 0.0])


def test_an_infinity_allows_no_larger_differences():
    with pytest.raises(
        CommandError, match="differs from the net by 1, more than rounding explains; nothing was"
    ):
        difference([INF, 2.0], [INF, 1.0])
    with pytest.raises(CommandError, match=r"differs from the net by 1\.2e\+05"):
        difference([60000.0], [-60000.0], torch.float16)
