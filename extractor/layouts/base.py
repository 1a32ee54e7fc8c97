"""What every layout answers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from extractor.errors import RunError, UsageError
from extractor.layouts.planes import FP8, Blob, Plane
from extractor.prepared.vocab import TokenCounts
from extractor.printable import printable
from extractor.records import IDS, LOGPROBS, Sample
from extractor.states import FINAL, States

Parts = list[bytes | memoryview]

SAMPLES = "samples"

_SAMPLE = re.compile(rf"{SAMPLES}/\d{{5,15}}/(?P<row>\d{{9,15}})(?:-(?P<turn>\d{{2,5}}))?")

SUFFIX = ".safetensors"
ROWS_A_FOLDER = 1000

AGAIN = "run the same extract command again, which writes it anew (docs/reliability.md)"


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
    root: ClassVar[str] = SAMPLES
    """The folder of all samples, relative to the output folder."""
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
        """Read a file back: every state of `captured`, and top-k logits where there are any. size: the
        one that the journal gives.

        Raises RunError, with the path, when the file is missing, not whole, or holds other tensors
        than this layout's."""

    def loaded(
        self, path: Path, ids: torch.Tensor, mask: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> Loaded:
        """What a file holds, checked: ids and mask of the same length, each state [T, hidden]. Raises
        RunError."""
        check_ids(path, ids)
        if mask.dtype not in (torch.uint8, torch.int64) or mask.shape != ids.shape:
            raise Damaged(path, f"has a mask {mask.dtype} {list(mask.shape)} for {len(ids):,} ids")
        if bool((mask > 1).any()) or bool((mask < 0).any()):
            raise Damaged(path, "has a mask with values other than 0 and 1")
        widths = {name: self.topk if name in (LOGPROBS, IDS) else self.hidden for name in states}
        for name, state in states.items():
            wanted = (len(ids), widths[name])
            if tuple(state.shape) != wanted:
                raise Damaged(path, f"{name} is {list(state.shape)}, wanted {list(wanted)}")
        return Loaded(ids, mask.to(torch.uint8), states)

    def is_sample(self, name: str) -> bool:
        """Whether a path, relative to the output folder, is one that this layout gives a sample."""
        found = _SAMPLE.fullmatch(name.removesuffix(self.suffix))
        if found is None:
            return False
        return sample_path(int(found["row"]), int(found["turn"] or 0), self.suffix) == name

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


def split(
    value: torch.Tensor, names: Sequence[str], hidden: int, path: Path
) -> dict[str, torch.Tensor]:
    """States side by side in the last dimension, [T, names * hidden], apart again; of a name that comes
    twice, one. Raises RunError for a value of another width."""
    if value.dim() != 2 or value.shape[1] != hidden * len(names):
        wanted = f"[T, {hidden * len(names)}]"
        raise Damaged(path, f"states {', '.join(names)} are {list(value.shape)}, wanted {wanted}")
    return dict(zip(names, value.split(hidden, dim=-1), strict=True))


def check_plane(path: Path, value: torch.Tensor, plane: Plane, shape: tuple[int, ...]) -> None:
    """Raises RunError for a tensor of a file that is not as the layout writes this plane."""
    if value.dtype != plane.dtype or tuple(value.shape) != shape:
        raise Damaged(
            path,
            f"{plane.key} is {value.dtype} {list(value.shape)}, wanted {plane.dtype} {list(shape)}",
        )


def check_ids(path: Path, ids: torch.Tensor) -> int:
    """How many tokens they are. Raises RunError unless they are int64 [T] with T >= 1."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
        raise Damaged(path, f"has ids {ids.dtype} {list(ids.shape)}, wanted int64 [T], T >= 1")
    return len(ids)


def sample_path(row: int, turn: int, suffix: str = SUFFIX) -> str:
    """Relative to the output folder; from numbers only, never from a record's id."""
    stem = f"{row:09d}" if turn == 0 else f"{row:09d}-{turn:02d}"
    return f"{SAMPLES}/{row // ROWS_A_FOLDER:05d}/{stem}{suffix}"


class Damaged(RunError):
    """A sample's file that is not as it was written. what: the same without the path."""

    def __init__(self, path: Path, what: str) -> None:
        self.what = printable(what)
        super().__init__(f"{printable(str(path))}: {self.what}; {AGAIN}")
