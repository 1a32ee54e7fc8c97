"""What formats have in common whose files can be written straight from a batch's buffer."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch

from extractor.layout import Plane
from extractor.layouts.base import Layout, Parts
from extractor.records import Sample
from extractor.store import Blob, header_entries, header_of


@dataclass(frozen=True, kw_only=True)
class Framed(Layout):
    """A safetensors file: header and ids, the planes' rows in the planes' order, the mask.

    The rows are the buffer's own bytes, so that whoever maps the buffer needs only to be told where
    they are, and what comes before and after them."""

    ids: ClassVar[str]
    """The ids' name in the file."""

    @abstractmethod
    def metadata(self, sample: Sample) -> dict[str, str]: ...

    def shape(self, plane: Plane, tokens: int) -> tuple[int, ...]:
        """Of a plane's tensor in the file."""
        return plane.shape(tokens)

    def frame(self, sample: Sample) -> tuple[bytes, bytes]:
        """The bytes before a sample's rows, and those after them."""
        header = header_of(self.metadata(sample), self._entries(len(sample)))
        return header + sample.input_ids.numpy().tobytes(), sample.loss_mask.numpy().tobytes()

    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        before, after = self.frame(sample)
        return [before, *(tensors[plane.key].data for plane in self.planes), after]

    @cached_property
    def _entries(self) -> Callable[[int], bytes]:
        """The header's entries, which are the same for all samples of a length."""

        @lru_cache(maxsize=4096)
        def entries(tokens: int) -> bytes:
            states = [(p.key, p.dtype, self.shape(p, tokens)) for p in self.planes]
            ids, mask = (self.ids, torch.int64, (tokens,)), ("loss_mask", torch.uint8, (tokens,))
            return header_entries([ids, *states, mask])  # bytes last: the rest stays aligned

        return entries
