"""The interface of every layout, and what their implementations share."""

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
    """Numbers the samples without gaps, for formats that find a file by its row in a table.

    Attributes:
        rows, turns: int64 [N] and int16 [N], for all samples of the run in (row, turn) order. A run
            takes them from the prepared store, so that every job of an array and every resumed run
            counts alike.
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
    """The content of a file that is read back.

    Attributes:
        input_ids: int64 [T].
        loss_mask: uint8 [T].
        states: each state [T, H] by name; float8 is unscaled to float32. A file with top-k logits
            also has topk_logprobs and topk_ids [T, K] here.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """A file format, for one run.

    Attributes:
        stored: the states of a file in its order. A name may appear twice: the format has a slot
            for the last layer, and the user asked for that layer as well.
        hidden: width of a state, in values.
        dtype: the stored dtype of states.
        model: the model's name, for formats that have a field for it.
        numbering: numbers of the run's samples, for formats whose `path` uses them.
        topk: for how many of the likeliest tokens a file holds log-probabilities and ids; 0 for none.
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
        """The states of a file when the user asks for these. The format may need others too.

        Raises:
            UsageError: the format cannot hold them.
        """

    @property
    def captured(self) -> tuple[str, ...]:
        """The states that the model must give: `stored` without duplicates."""
        return tuple(dict.fromkeys(self.stored))

    @cached_property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]: ...

    @property
    def row_bytes(self) -> int:
        """Bytes per token that all planes of a file take."""
        return sum(plane.row_bytes for plane in self.planes)

    def path(self, row: int, turn: int) -> str:
        """The path of a sample's file, relative to the output folder."""
        return sample_path(row, turn, self.suffix)

    @abstractmethod
    def parts(self, sample: Sample, tensors: Mapping[str, Blob]) -> Parts:
        """The bytes of a file.

        Args:
            tensors: the rows of each plane, under the plane's key.
        """

    @abstractmethod
    def load(self, path: Path, size: int | None = None) -> Loaded:
        """Read a file back: every state of `captured`, and top-k logits where the file has them.

        Args:
            size: the file's size in bytes that the journal gives, or None to skip that check.

        Raises:
            RunError: the file is missing or damaged, or its tensors are not those of this layout. The
                message has the path.
        """

    def loaded(
        self, path: Path, ids: torch.Tensor, mask: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> Loaded:
        """The content of a file after a check of its shapes and of the values of its mask.

        Raises:
            RunError: ids and mask differ in length, the mask holds other values than 0 and 1, or a
                state is not [T, hidden].
        """
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
        """Whether this layout can give a sample this path, relative to the output folder."""
        found = _SAMPLE.fullmatch(name.removesuffix(self.suffix))
        if found is None:
            return False
        return sample_path(int(found["row"]), int(found["turn"] or 0), self.suffix) == name

    def finish(self, output: Path, samples: Iterable[Sample]) -> None:
        """Write what the output folder needs beside the files, when all of them are there.

        Args:
            samples: all samples of the run, in (row, turn) order.
        """
        return

    def vocabulary(self, counted: TokenCounts, size: int) -> dict[str, Parts]:
        """The files of a draft vocabulary of `size` tokens, as the trainer's own tools write them.

        Each path, relative to the output folder, has its content. The result is empty for a layout
        that has no such file.
        """
        return {}


def aux_and_final(asked: States) -> tuple[str, ...]:
    """The layers asked for, then `final`, even when it is not asked for.

    It serves formats whose trainer computes the target's logits from the state after the final norm.

    Raises:
        UsageError: no layer besides `final` is asked for.
    """
    aux = tuple(name for name in asked.names if name != FINAL)
    if not aux:
        raise UsageError("this layout needs at least one layer besides final: give --layers")
    return (*aux, FINAL)


def split(
    value: torch.Tensor, names: Sequence[str], hidden: int, path: Path
) -> dict[str, torch.Tensor]:
    """Split a tensor [T, len(names) * hidden] into its states [T, hidden], by name.

    A name that appears twice has one entry, the last.

    Raises:
        RunError: the tensor has another width.
    """
    if value.dim() != 2 or value.shape[1] != hidden * len(names):
        wanted = f"[T, {hidden * len(names)}]"
        raise Damaged(path, f"states {', '.join(names)} are {list(value.shape)}, wanted {wanted}")
    return dict(zip(names, value.split(hidden, dim=-1), strict=True))


def check_plane(path: Path, value: torch.Tensor, plane: Plane, shape: tuple[int, ...]) -> None:
    """Raises RunError when a tensor of a file does not have the dtype and shape of its plane."""
    if value.dtype != plane.dtype or tuple(value.shape) != shape:
        raise Damaged(
            path,
            f"{plane.key} is {value.dtype} {list(value.shape)}, wanted {plane.dtype} {list(shape)}",
        )


def check_ids(path: Path, ids: torch.Tensor) -> int:
    """The number of tokens. Raises RunError unless the ids are int64 [T] with T >= 1."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
        raise Damaged(path, f"has ids {ids.dtype} {list(ids.shape)}, wanted int64 [T], T >= 1")
    return len(ids)


def sample_path(row: int, turn: int, suffix: str = SUFFIX) -> str:
    """The path of a sample's file, relative to the output folder.

    It is made of numbers only, never of a record's id, which may hold any text.
    """
    stem = f"{row:09d}" if turn == 0 else f"{row:09d}-{turn:02d}"
    return f"{SAMPLES}/{row // ROWS_A_FOLDER:05d}/{stem}{suffix}"


class Damaged(RunError):
    """A sample's file is missing or damaged.

    Attributes:
        what: the description of the damage, without the path.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.what = printable(what)
        super().__init__(f"{printable(str(path))}: {self.what}; {AGAIN}")
