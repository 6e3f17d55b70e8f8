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
        under: the key under which it stood, with dots where that is in several dicts; "" where it
            was all of the file.
        no_tensors: the keys of what stood among the tensors and is none, or has a key that is no
            text.
        beside: where other dicts of tensors stood, outside of it, in which there is no linear
            layer.
    """

    tensors: dict[str, Tensor]
    under: str = ""
    no_tensors: Sequence[str] = ()
    beside: Sequence[str] = ()

    @property
    def before(self) -> str:
        """What stands before its keys in the whole file."""
        return f"{self.under}." if self.under else ""

    @property
    def layers(self) -> list[str]:
        """The names of its linear layers, as `--keys` takes them."""
        names = [key for key, tensor in self.tensors.items() if has_layers({key: tensor})]
        return [name.removesuffix("_orig").removesuffix(".weight") for name in names]

    def prefix_inside(self, prefix: str) -> str:
        """Returns what its keys begin with, of what they begin with here or in the whole file."""
        if any(key.startswith(prefix) for key in self.tensors):
            return prefix
        return "" if self.before.startswith(prefix) else prefix.removeprefix(self.before)

    def keys_inside(self, keys: Sequence[str], prefix: str) -> list[str]:
        """Returns `--keys` behind `prefix_inside`, of layers that they name here or in the whole
        file.
        """
        if self.holds(keys, prefix) or not self.holds(keys, prefix, whole=True):
            return list(keys)
        return [
            f"{prefix}{key}".removeprefix(f"{self.before}{self.prefix_inside(prefix)}")
            for key in keys
        ]

    def holds(self, keys: Sequence[str], prefix: str, *, whole: bool = False) -> bool:
        """Says whether all `keys` are layers of it, by their names behind a prefix here or in the
        `whole` file.
        """
        before, begin = (self.before, prefix) if whole else ("", self.prefix_inside(prefix))
        return {f"{begin}{key}" for key in keys} <= {f"{before}{layer}" for layer in self.layers}


def read_weights(path: Path, prefix: str, keys: Sequence[str] | None) -> Weights:
    """Returns the state dict of a file; nothing in the file is run.

    Of several, those with keys that begin with `prefix` count, and of these the ones that hold
    linear layers; of these in turn the one whose place is `prefix`, and those that hold all `keys`.

    Args:
        path: the file.
        prefix: what keys of the whole file begin with, `model.` in `{"model": ...}`; where none
            does, it chooses none.
        keys: names of layers in the whole file, or else in their state dict; where none holds them,
            they choose none.

    Raises:
        CommandError: there is no such file, it is damaged, or it holds something else, or several
            such state dicts.
        OSError: the system does not let it be read.
    """
    if not path.exists():
        raise CommandError(
            f"{path}: no such file", "torch.save(model.state_dict(), path) writes one"
        )
    if path.is_dir():
        raise CommandError(f"{path} is a folder, not a file of weights", "name the file inside it")
    if not path.is_file():
        raise CommandError(f"{path} is no file of weights", "name a .safetensors or .pt file")
    # raises what the system says, of which the readers below make something else
    path.open("rb").close()
    if path.suffix.lower() in TORCH_ENDINGS:
        return _chosen(_state_dicts(_read_torch(path)), path, prefix, keys or ())
    return Weights(_read_safetensors(path))


def _read_torch(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:  # torch.load compares no checksum
                    raise ValueError("a checksum is wrong")
        # of kinds of tensors that are refused by name later
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever damage makes of a pickle
        raise CommandError(
            f"{path}: is damaged, or holds more than tensors and plain data, which would be code"
            " to run",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            if "grapnet" in (file.metadata() or {}):
                raise CommandError(
                    f"{path} is a GrapNet checkpoint already", "grapnet inspect looks at it"
                )
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError:
        raise CommandError(
            f"{path} is not a whole safetensors file: it is cut off or damaged, or something else",
            f"if torch.save wrote it, its name has to end in {', '.join(TORCH_ENDINGS)}",
        ) from None


def _state_dicts(found: Any, under: str = "", depth: int = 1) -> list[Weights]:
    """Returns every dict that holds tensors: something itself, and the dicts in it."""
    if not isinstance(found, dict) or depth > _DEEPEST:
        return []
    tensors = {
        key: value
        for key, value in found.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }
    others = {key: value for key, value in found.items() if key not in tensors}
    mine = Weights(tensors, under, list(map(str, others)))
    inner = [
        state
        for key, value in others.items()
        for state in _state_dicts(value, f"{mine.before}{key}", depth + 1)
        if isinstance(key, str)
        or state.layers  # an optimizer has a dict of tensors under the number of a Parameter
    ]
    return [*([mine] if tensors else []), *inner]


def _chosen(states: Sequence[Weights], path: Path, prefix: str, keys: Sequence[str]) -> Weights:
    """Returns the one state dict that is meant; raises CommandError when there is none, or several
    may be.
    """
    meant = _meant(states, prefix, keys)
    if len(meant) == 1:
        (chosen,) = meant
        others = [
            state for state in _named(states, prefix) if state is not chosen and not state.layers
        ]
        places = [
            state.under
            for state in others
            if state.under and not state.under.startswith(chosen.before)
        ]
        return chosen._replace(beside=places)
    alone = "save one: torch.save(model.state_dict(), path)"
    if not meant:
        raise CommandError(f"{path} holds no state dict", alone)
    ways = [way for state in meant for way in _ways(state, states)]
    raise CommandError(
        f"{path} holds several state dicts: {', '.join(repr(state.under) for state in meant)}",
        f"say {' or '.join(ways)}; or {alone}" if ways else alone,
    )


def _named(states: Sequence[Weights], prefix: str) -> Sequence[Weights]:
    """Returns the state dicts with keys that begin so in the whole file, or all where there is
    none.
    """
    found = [
        state
        for state in states
        if any(f"{state.before}{key}".startswith(prefix) for key in state.tensors)
    ]
    return found or states


def _meant(states: Sequence[Weights], prefix: str, keys: Sequence[str]) -> Sequence[Weights]:
    """Returns the state dicts that may be meant."""
    named = _named(states, prefix)
    meant = [state for state in named if state.layers] or named
    meant = [state for state in meant if prefix and state.before == prefix] or meant
    if not keys:
        return meant
    whole = [state for state in meant if state.holds(keys, prefix, whole=True)]
    return whole or [state for state in meant if state.holds(keys, prefix)] or meant


def _ways(state: Weights, states: Sequence[Weights]) -> list[str]:
    """Returns the option that chooses a state dict, or nothing where none tells it from the
    others.
    """
    option, value = (
        ("--prefix", state.before) if state.under else ("--keys", ",".join(state.layers))
    )
    meant = _meant(states, value, ()) if state.under else _meant(states, "", value.split(","))
    return [f"{option} {shlex.quote(value)}"] if len(meant) == 1 and meant[0] is state else []
