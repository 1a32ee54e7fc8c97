"""torch.save files, for projects that read nothing else.

Written through torch.save itself, out of views of the staged buffer: their storage is exactly their
own bytes, so nothing of a neighbour gets into the file. Read with weights_only=True, which builds
tensors and plain containers and runs no code of the file's.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from extractor.errors import RunError
from extractor.layouts.base import Parts
from extractor.store import Blob


def as_tensor(blob: Blob, *shape: int) -> torch.Tensor:
    """A tensor over a blob's bytes, its storage no longer than they are; shape default: the blob's."""
    return torch.frombuffer(blob.data, dtype=blob.dtype).view(shape or blob.shape)


def save(content: Mapping[Any, Any]) -> Parts:
    """The bytes that torch.save writes: an uncompressed zip whose tensors can be mapped."""
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return [stream.getbuffer()]


def load(path: Path, size: int | None) -> dict[str, Any]:
    """Raises RunError for a file that is missing, cut, or not of this kind."""
    try:
        if size is not None and path.stat().st_size != size:
            raise RunError(
                f"{path}: {path.stat().st_size:,} bytes, and the journal says {size:,}; run the same "
                "extract command again, which writes it anew (docs/reliability.md)"
            )
        return torch.load(path, weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: {error}") from error
