"""Files of plain weights: state dicts by torch or in safetensors, read without running code."""

import shlex
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .command import CommandError
from .files import TORCH_ENDINGS
from .layers import has_layers

_DEEPEST = 4  # dicts inside each other in which a state dict is looked for


class Weights(NamedTuple):
    """A state dict of a file.

    Attributes:
        tensors: by key.
        under: the key under which it stood, with dots where that is in several dicts; "" where it was all of the file.
        no_tensors: the keys of what stood among the tensors and is none.
        beside: where other dicts of tensors stood, outside of it, in which there is no linear layer.
    """

    tensors: dict[str, Tensor]
    under: str = ""
    no_tensors: Sequence[str] = ()
    beside: Sequence[str] = ()

    @property
    def before(self) -> str:
        """What stands before its keys in the whole file."""
        return f"{self.under}." if self.under else ""


def read_weights(path: Path, prefix: str) -> Weights:
    """Returns the state dict of a file; nothing in the file is run.

    Of several, those with keys that begin with `prefix` count, and of these the ones that hold linear layers.

    Args:
        path: the file.
        prefix: what keys of the whole file begin with, `model.` in `{"model": ...}`; where none does, it chooses none.

    Raises:
        CommandError: there is no such file, it is damaged, or it holds something else, or several such state dicts.
        OSError: the system does not let it be read.
    """
    if not path.exists():
        raise CommandError(f"{path}: no such file", "torch.save(model.state_dict(), path) writes one")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a file of weights", "name the file inside it")
    if not path.is_file():
        raise CommandError(f"{path} is no file of weights", "name a .safetensors or .pt file")
    path.open("rb").close()  # raises what the system says, of which the readers below make something else
    if path.suffix.lower() in TORCH_ENDINGS:
        return _chosen(_state_dicts(_read_torch(path)), path, prefix)
    return Weights(_read_safetensors(path))


def _read_torch(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:  # torch.load compares no checksum
                    raise ValueError("a checksum is wrong")
        with warnings.catch_warnings(action="ignore"):  # of kinds of tensors that are refused by name later
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever damage makes of a pickle
        raise CommandError(
            f"{path}: is damaged, or holds more than tensors and plain data, which would be code to run",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from None


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


def _state_dicts(found: Any, under: str = "", depth: int = 1) -> list[Weights]:
    """Returns every dict that holds tensors: something itself, and the dicts in it."""
    if not isinstance(found, dict) or depth > _DEEPEST or not all(isinstance(key, str) for key in found):
        return []
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in found.items() if key not in tensors}
    mine = Weights(tensors, under, list(others))
    inner = [_state_dicts(value, f"{mine.before}{key}", depth + 1) for key, value in others.items()]
    return [*([mine] if tensors else []), *(state for states in inner for state in states)]


def _chosen(states: Sequence[Weights], path: Path, prefix: str) -> Weights:
    """Returns the one state dict that is meant; raises CommandError when there is none, or several may be."""
    named = [
        state for state in states if any(f"{state.before}{key}".startswith(prefix) for key in state.tensors)
    ] or states
    meant = [state for state in named if has_layers(state.tensors)] or named
    if len(meant) == 1:
        (chosen,) = meant
        others = [state.under for state in named if state.under and state is not chosen]
        return chosen._replace(beside=[under for under in others if not under.startswith(chosen.before)])
    alone = "save one: torch.save(model.state_dict(), path)"
    if not meant:
        raise CommandError(f"{path} holds no state dict", alone)
    ways = [f"--prefix {shlex.quote(f'{state.under}.')}" for state in meant if state.under]
    raise CommandError(
        f"{path} holds several state dicts: {', '.join(repr(state.under) for state in meant)}",
        f"say {' or '.join(ways)}; or {alone}",
    )
