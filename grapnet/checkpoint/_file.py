"""The file: one safetensors container with a digest, written atomically."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from grapnet._atomic import atomic_write
from grapnet.core._errors import CheckpointError

FORMAT = 1
_LONGEST = 100_000_000  # bytes of names and metadata that safetensors reads
_WAY_ON = (
    "Plain weights become a net by gn.from_module(module) of the module they belong to, or by"
    " `grapnet convert FILE`"
)
_STORABLE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
)


def write(
    path: str | os.PathLike[str],
    document: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    replace: bool = True,
) -> None:
    """Writes a checkpoint atomically; raises FileExistsError if it must not replace a file."""
    tensors, metadata = _content(document, tensors)
    try:
        with atomic_write(path, replace=replace) as partial:
            save_file(tensors, os.fspath(partial), metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{os.fspath(path)!r} could not be written ({_first_line(error)})") from error


def to_bytes(document: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Returns what `write` would write."""
    tensors, metadata = _content(document, tensors)
    return save(tensors, metadata=metadata)


def _content(
    document: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors as plain memory, and the metadata of the container."""
    try:
        text = json.dumps(document, separators=(",", ":"))
    except ValueError as error:  # a number of thousands of digits
        raise CheckpointError(
            f"extras: cannot be written as JSON ({_first_line(error)})"
        ) from error
    size = len(json.dumps(text)) + sum(len(name) + 100 for name in tensors)
    if size > _LONGEST:
        raise CheckpointError(
            f"metadata: {size:,} bytes of plain data, and a file holds {_LONGEST:,}; give long"
            " lists as tensors"
        )
    tensors = _separate({name: _storable(name, tensor) for name, tensor in tensors.items()})
    return tensors, {"grapnet": text, "sha256": digest(text, tensors)}


def read(source: str | os.PathLike[str] | bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the document and the tensors of a checkpoint, a file or its bytes, after checking the
    digest.
    """
    if isinstance(source, bytes):
        metadata, tensors = _read_bytes(source)
    else:
        metadata, tensors = _read_file(Path(source))
    if "grapnet" not in metadata or "sha256" not in metadata:
        raise CheckpointError(
            f"metadata: this safetensors file was not written by gn.save. {_WAY_ON}"
        )
    if digest(metadata["grapnet"], tensors) != metadata["sha256"]:
        raise CheckpointError(
            "sha256: the content differs from what was saved; the file is damaged"
        )
    try:
        document = json.loads(metadata["grapnet"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"metadata: the document is not JSON ({_first_line(error)})"
        ) from error
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT:
        raise CheckpointError(
            f"format: this GrapNet reads format {FORMAT}, the file says {repr(found)[:30]}"
        )
    return document, tensors


def _read_bytes(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        tensors = load(data)
        # a container begins with the length of its header
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
    except Exception as error:  # whatever the parser trips over
        raise CheckpointError("container: not a whole safetensors file") from error
    return header.get("__metadata__") or {}, tensors


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}")
    if not path.is_file():
        raise CheckpointError(f"container: {str(path)!r} is not a file")
    with path.open("rb") as handle:  # an unreadable file raises the error of the system
        # The container opens its file by name twice, and a save may rename another file into place
        # in between; the open handle's own name stays with one file.
        name = f"/dev/fd/{handle.fileno()}" if os.path.exists("/dev/fd") else os.fspath(path)
        try:
            with safe_open(name, framework="pt") as file:
                # The container hands out views of the mapped file, which change with it; a copy is
                # ours alone.
                names = list(file.keys())
                tensors = {name: file.get_tensor(name).clone() for name in names}
                return file.metadata() or {}, tensors
        except Exception as error:  # whatever the parser trips over
            raise CheckpointError(
                f"container: {str(path)!r} is not a whole safetensors file. {_WAY_ON}"
            ) from error


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 over the document and every tensor's name, type, shape and bytes."""
    total = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(
            f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8", "surrogatepass")
        )
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _storable(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor as plain memory on the CPU; raises CheckpointError for one that has no
    such form.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _STORABLE:
        raise CheckpointError(
            f"{name}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be saved"
        )
    tensor = tensor.detach().cpu().resolve_neg().contiguous()
    # one entry may keep any stride
    return tensor.reshape(()).reshape(tensor.shape) if tensor.numel() == 1 else tensor


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share memory, which the container refuses."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensors[name] = tensor.clone()
        seen.add(place)
    return tensors


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
