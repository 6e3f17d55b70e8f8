"""Files of plain weights: state dicts by torch or in safetensors, read without running code."""

import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .command import CommandError
from .files import TORCH_ENDINGS


class Weights(NamedTuple):
    """The tensors of a state dict by key, and the key under which it stood in its file; "" where it was all of it."""

    tensors: dict[str, Tensor]
    under: str


def read_weights(path: Path) -> Weights:
    """Returns the tensors of a state dict; nothing in the file is run.

    Raises:
        CommandError: there is no such file, it is damaged, or it holds something else.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file", "torch.save(model.state_dict(), path) writes one")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a file of weights", "name the file inside it")
    if not path.is_file():
        raise CommandError(f"{path} is no file of weights", "name a .safetensors or .pt file")
    return _read_torch(path) if path.suffix.lower() in TORCH_ENDINGS else Weights(_read_safetensors(path), "")


def _read_torch(path: Path) -> Weights:
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
    states = {"": found} if _is_state_dict(found) else _state_dicts(found)
    if len(states) != 1:
        several = f"several state dicts: {', '.join(map(repr, states))}" if states else "no state dict"
        raise CommandError(f"{path} holds {several}", "save one: torch.save(model.state_dict(), path)")
    ((under, state),) = states.items()
    return Weights(dict(state), under)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            if "grapnet" in (file.metadata() or {}):
                raise CommandError(f"{path} is a GrapNet checkpoint already", "grapnet inspect looks at it")
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError:
        raise CommandError(
            f"{path} is not a whole safetensors file: it is cut off or damaged, or something else",
            f"if torch.save wrote it, its name has to end in {', '.join(TORCH_ENDINGS)}",
        ) from None


def _state_dicts(found: Any) -> dict[str, dict[str, Tensor]]:
    """Returns the state dicts among the entries of something."""
    return {str(key): value for key, value in found.items() if _is_state_dict(value)} if isinstance(found, dict) else {}


def _is_state_dict(found: Any) -> bool:
    is_dict = isinstance(found, dict) and bool(found)
    return is_dict and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items())
