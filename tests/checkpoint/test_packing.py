"""Numbers packed into bits come back, whatever their limit and number."""

import pytest
import torch

from grapnet.checkpoint import _net as packing


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 255, 256, 257, 1024, 2**31 - 1])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_numbers_come_back_from_as_few_bits_as_they_need(
    limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_PIECE", 16)
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(limit, (count,), generator=generator, dtype=torch.int32)
    if count:
        numbers[-1] = limit - 1
    packed = packing.pack(numbers, limit)
    assert packed.dtype == torch.uint8
    assert len(packed) == packing.packed_size(count, limit)
    assert len(packed) == -(-count * (limit - 1).bit_length() // 8)
    assert torch.equal(packing.unpack(packed, count, limit), numbers)


def test_the_highest_bit_comes_first() -> None:
    packed = packing.pack(torch.tensor([1, 2, 3], dtype=torch.int32), 8)
    assert [f"{byte:08b}" for byte in packed.tolist()] == ["00101001", "10000000"]
