"""Reads and writes torch.save files, for projects that read no other format.

They are written by torch.save itself, from views of the staging buffer. The storage of such a view is
exactly its own bytes, so that no bytes of another sample get into the file. They are read with
weights_only=True, which builds tensors and plain containers and runs no code from the file.
"""

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from extractor.layouts.base import Damaged, Parts
from extractor.layouts.planes import Blob
from extractor.regular import open_regular


def as_tensor(blob: Blob, *shape: int) -> torch.Tensor:
    """A tensor over the bytes of a blob; its storage is these bytes only.

    Args:
        shape: the shape of the tensor; without it, the shape of the blob.
    """
    return torch.frombuffer(blob.data, dtype=blob.dtype).view(shape or blob.shape)


def save(content: Mapping[Any, Any]) -> Parts:
    """The bytes that torch.save writes: an uncompressed zip whose tensors can be mapped."""
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return [stream.getbuffer()]


def load(path: Path, size: int | None) -> dict[str, Any]:
    """The dictionary in a file.

    Args:
        size: the file's size in bytes that the journal gives, or None to skip that check.

    Raises:
        RunError: the file is missing, of another size, or not a torch.save file of a dictionary.
    """
    try:
        with open_regular(path) as handle:
            there = os.fstat(handle.fileno()).st_size
            if size is not None and there != size:
                raise Damaged(path, f"has {there:,} bytes, and the journal says {size:,}")
            # The file is loaded through its descriptor, which is known to be a regular file. The
            # name may lead to another file meanwhile.
            content = _load(f"/proc/self/fd/{handle.fileno()}", path)
    except FileNotFoundError as error:
        raise Damaged(path, "is not there") from error
    if not isinstance(content, dict):
        raise Damaged(path, f"holds a {type(content).__name__}; wanted a dictionary")
    return content


def _load(name: str, path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about damage that the error reports
            return torch.load(name, weights_only=True, mmap=True)
    except Exception as error:  # for a damaged file torch raises many types
        text = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(path, f"is not a torch.save file of tensors: {text}") from error


def tensor(content: Mapping[str, Any], key: str, path: Path) -> torch.Tensor:
    """The tensor of this name in a loaded file. Raises RunError when there is none."""
    value = content.get(key)
    if not isinstance(value, torch.Tensor):
        raise Damaged(path, f"has no tensor {key}")
    return value
