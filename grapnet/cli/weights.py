"""Files of plain weights: state dicts by torch or in safetensors, read without running code."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .command import CommandError

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by key; nothing in the file is run.

    Raises:
        CommandError: there is no such file, it is damaged, or it holds something else.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file", "torch.save(model.state_dict(), path) writes one")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a file of weights", "name the file inside it")
    if not path.is_file():
        raise CommandError(f"{path} is no file of weights", "name a .safetensors or .pt file")
    return _read_torch(path) if path.suffix.lower() in _TORCH_ENDINGS else _read_safetensors(path)


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:  # torch.load compares no checksum
                    raise ValueError("a checksum is wrong")
        with warnings.catch_warnings(action="ignore"):  # of kinds of tensors that are refused by name later
            found = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception:  # whatever damage makes of a pickle
        raise CommandError(
            f"{path}: is damaged, or holds more than tensors and plain data, which would be code to run",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from None
    state = _state_dict(found)
    if state is None:
        raise CommandError(f"{path} holds no state dict", "save one: torch.save(model.state_dict(), path)")
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            if "grapnet" in (file.metadata() or {}):
                raise CommandError(f"{path} is a GrapNet checkpoint already", "grapnet inspect looks at it")
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise CommandError(
            f"{path} is not a whole safetensors file ({str(error).splitlines()[0][:150]})",
            f"if torch.save wrote it, its name has to end in {', '.join(_TORCH_ENDINGS)}",
        ) from None


def _state_dict(found: Any) -> dict[str, Tensor] | None:
    """Returns the state dict that something is, or the only one among its entries."""
    if not isinstance(found, dict):
        return None
    inside = [found] if _is_state_dict(found) else [value for value in found.values() if _is_state_dict(value)]
    return dict(inside[0]) if len(inside) == 1 else None


def _is_state_dict(found: Any) -> bool:
    is_dict = isinstance(found, dict) and bool(found)
    return is_dict and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items())
