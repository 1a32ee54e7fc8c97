"""torch.save files, for projects that read nothing else.

Written through torch.save itself, out of views of the staged buffer: their storage is exactly their
own bytes, so nothing of a neighbour gets into the file. Read with weights_only=True, which builds
tensors and plain containers and runs no code of the file's.
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
    """A tensor over a blob's bytes, its storage no longer than they are; shape default: the blob's."""
    return torch.frombuffer(blob.data, dtype=blob.dtype).view(shape or blob.shape)


def save(content: Mapping[Any, Any]) -> Parts:
    """The bytes that torch.save writes: an uncompressed zip whose tensors can be mapped."""
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return [stream.getbuffer()]


def load(path: Path, size: int | None) -> dict[str, Any]:
    """The dictionary of a file. Raises RunError for a file that is missing, cut, or not of this kind."""
    try:
        with open_regular(path) as handle:
            there = os.fstat(handle.fileno()).st_size
            if size is not None and there != size:
                raise Damaged(path, f"has {there:,} bytes, and the journal says {size:,}")
            # By its descriptor: what was opened is a regular file, whatever the name leads to by now.
            content = _load(f"/proc/self/fd/{handle.fileno()}", path)
    except FileNotFoundError as error:
        raise Damaged(path, "is not there") from error
    if not isinstance(content, dict):
        raise Damaged(path, f"holds a {type(content).__name__}; wanted a dictionary")
    return content


def _load(name: str, path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the damage, which the error tells
            return torch.load(name, weights_only=True, mmap=True)
    except Exception as error:  # of a damaged file torch raises nearly all there are
        text = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(path, f"is not a torch.save file of tensors: {text}") from error


def tensor(content: Mapping[str, Any], key: str, path: Path) -> torch.Tensor:
    """Raises RunError when the file has no tensor of this name."""
    value = content.get(key)
    if not isinstance(value, torch.Tensor):
        raise Damaged(path, f"has no tensor {key}")
    return value
