"""The file: one safetensors container with a digest, written so that a crash loses nothing."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grapnet.core.errors import CheckpointError

FORMAT = 1


def write(path: str | os.PathLike[str], document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint next to `path` and renames it into place once it is safely on disk.

    Until the rename the previous file is untouched; after this returns the new one survives a crash or power cut.
    """
    path = Path(path)
    text = json.dumps(document, separators=(",", ":"))
    tensors = _separate({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        os.close(handle)
        save_file(tensors, partial, metadata={"grapnet": text, "sha256": digest(text, tensors)})
        os.chmod(partial, 0o666 & ~_umask())
        _sync(partial)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of a checkpoint whose digest is right."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (
        SafetensorError,
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise CheckpointError(
            f"container: {os.fspath(path)!r} is not a whole safetensors file ({_first_line(error)})"
        ) from error
    if "grapnet" not in metadata or "sha256" not in metadata:
        raise CheckpointError("metadata: this safetensors file was not written by gn.save")
    if digest(metadata["grapnet"], tensors) != metadata["sha256"]:
        raise CheckpointError("sha256: the content differs from what was saved; the file is damaged")
    try:
        document = json.loads(metadata["grapnet"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"metadata: the document is not JSON ({_first_line(error)})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise CheckpointError(f"format: this GrapNet reads format {FORMAT}, the file says {found!r}")
    return document, tensors


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 over the document and every tensor's name, type, shape and bytes."""
    total = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8", "surrogatepass"))
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share memory, which the container refuses."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensors[name] = tensor.clone()
        seen.add(place)
    return tensors


def _sync(path: str | os.PathLike[str]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
