"""What every layout answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from extractor.data.vocab import TokenCounts
from extractor.errors import UsageError
from extractor.layout import FP8, Plane
from extractor.records import Sample
from extractor.states import FINAL, States
from extractor.store import Blob, sample_path

Parts = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Numbering:
    """Samples counted without gaps, for formats that find a file by its place in a table.

    Attributes:
        rows, turns: of all samples of the run, in (row, turn) order: the prepared store's, so that
            every job of an array and every resumed run counts alike.
    """

    rows: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int16]

    def index(self, row: int, turn: int) -> int:
        begin, end = np.searchsorted(self.rows, [row, row + 1])
        at = int(begin + np.searchsorted(self.turns[begin:end], turn))
        assert self.rows[at] == row and self.turns[at] == turn, (row, turn)
        return at


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file read back.

    Attributes:
        input_ids: int64 [T].
        loss_mask: uint8 [T].
        states: by name, [T, H]; float8 is unscaled to float32. Where the file has them, also
            topk_logprobs and topk_ids [T, K].
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """A file format, for one run.

    Attributes:
        stored: the states of a file in its order; a name may appear twice, where the format has a
            slot for the last layer and the user asked for that layer as well.
        hidden: width of a state.
        dtype: as stored.
        model: the model's name, for formats that can say it.
        numbering: of the run's samples; needed where `path` counts.
        topk: how many of the likeliest tokens' log-probabilities and ids a file holds; 0 for none.
    """

    stored: tuple[str, ...]
    hidden: int
    dtype: torch.dtype
    model: str
    numbering: Numbering | None = None
    topk: int = 0

    name: ClassVar[str]
    suffix: ClassVar[str]
    float8: ClassVar[bool] = False
    holds_topk: ClassVar[bool] = False
    reader: ClassVar[str] = ""
    """What reads it, for messages and docs."""

    def __post_init__(self) -> None:
        if self.dtype == FP8 and not self.float8:
            raise UsageError(
                f"--layout {self.name} --dtype float8_e4m3fn: {self.reader} knows no scales; "
                "use bfloat16, or the layouts native or speculators (docs/formats.md)"
            )
        if self.topk and not self.holds_topk:
            raise UsageError(
                f"--layout {self.name} --topk-logits {self.topk}: {self.reader} reads no logits; "
                "use --layout native (docs/formats.md)"
            )

    @classmethod
    @abstractmethod
    def stored_for(cls, asked: States) -> tuple[str, ...]:
        """The states of a file when the user asked for these: the format may need others too.

        Raises UsageError when the format cannot hold them."""

    @property
    def captured(self) -> tuple[str, ...]:
        """What the model must hand out: `stored`, each once."""
        return tuple(dict.fromkeys(self.stored))

    @cached_property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]: ...

    @property
    def row_bytes(self) -> int:
        """States of one token in a file."""
        return sum(plane.row_bytes for plane in self.planes)

    def path(self, row: int, turn: int) -> str:
        """Relative to the output folder."""
        return sample_path(row, turn, self.suffix)

    @abstractmethod
    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        """A file's bytes, from its sample and each plane's rows under the plane's key."""

    @abstractmethod
    def load(self, path: Path, size: int | None = None) -> Loaded:
        """Read a file back. Raises RunError when it is not whole."""

    def finish(self, output: Path, samples: Iterable[Sample]) -> None:
        """What the folder needs beside the files, once all of them are there. samples: all of the
        run's, in (row, turn) order."""
        return

    def vocabulary(self, counted: TokenCounts, size: int) -> dict[str, Parts]:
        """A drafter's vocabulary of `size` tokens as this project's own tools write it: path,
        relative to the output folder, to content. None where it has no such file."""
        return {}


def aux_and_final(asked: States) -> tuple[str, ...]:
    """Those asked for, then `final`, whether asked for or not: formats whose trainer computes the
    target's logits from the state after the final norm."""
    aux = tuple(name for name in asked.names if name != FINAL)
    if not aux:
        raise UsageError("this layout needs at least one layer besides final: give --layers")
    return (*aux, FINAL)


def split(value: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """States side by side in the last dimension, apart again; of a name that comes twice, one."""
    return dict(zip(names, value.chunk(len(names), dim=-1), strict=True))
