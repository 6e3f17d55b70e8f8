"""Keeps computed tensors on the CPU or in a file until they are installed."""

import tempfile

import torch
from torch import Tensor

SMALL = 1 << 20  # bytes; smaller tensors stay where they are


def stage(tensor: Tensor) -> Tensor:
    """Returns a copy of a large tensor outside of the memory of its device: in that of the CPU, or
    in a file without a name if it is there already.
    """
    if tensor.numel() * tensor.element_size() < SMALL:
        return tensor
    if tensor.device.type != "cpu":
        return tensor.cpu()
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(tensor.numel() * tensor.element_size())
        size = tensor.numel()
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=tensor.dtype)
    # In the same memory format; the file goes with the last tensor over it.
    return mapped.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def unstage(staged: Tensor, device: torch.device) -> Tensor:
    """Returns a staged tensor in the memory of a device."""
    if staged.device == device and staged.numel() * staged.element_size() < SMALL:
        return staged
    return staged.to(device, copy=True)
