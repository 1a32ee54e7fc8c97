"""An output folder as a whole: whether it is ours, what its run.json and journals say, and its
samples in any layout."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from extractor.errors import RunError, UsageError
from extractor.files import TEMPORARY
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.layouts.base import SAMPLES
from extractor.layouts.planes import DTYPES
from extractor.layouts.safetensors import check_bytes
from extractor.output import run_json
from extractor.output.journal import REJECTS, Ledger, read_ledger
from extractor.output.lock import LOCK
from extractor.output.run_json import Run, RunModel
from extractor.prepared.store import PreparedStore
from extractor.prepared.vocab import VOCAB
from extractor.printable import printable
from extractor.records import Entry, Sample
from extractor.regular import read_regular

CONVERTED = (
    "converted.i64"  # of a folder that convert wrote: (row, turn) of its samples, int64 [N, 2]
)

PREPARED = "prepared"

FOLDERS = (PREPARED, "journal", SAMPLES, VOCAB, "hidden_states")  # the last: speculators


@dataclass(frozen=True)
class Folder:
    """An output folder, to read from, in whatever layout it is.

    Attributes:
        path: where it is.
        run: the record that answers for it (run_file.newest).
        store: its prepared rows; None in a folder that convert wrote, or without them.
    """

    path: Path
    run: Run
    store: PreparedStore | None = field(repr=False)

    @classmethod
    def open(cls, path: Path, *, rows: bool = False) -> "Folder":
        """rows: it must have its prepared rows, unless convert wrote it; else they may be gone, as from
        a folder that was sent elsewhere.

        Raises UsageError for a folder that is not one of ours, has links inside, or whose run.json or
        prepared rows are damaged."""
        refuse_links(path)
        run = run_json.find(path)
        there = run.prepared is not None and (rows or (path / run.prepared).is_dir())
        try:
            store = PreparedStore.open(path / str(run.prepared)) if there else None
        except RunError as error:
            raise UsageError(f"{error}; run the same extract command again") from error
        return cls(path, run, store)

    @cached_property
    def ledger(self) -> Ledger:
        return read_ledger(self.path)

    @property
    def numbering(self) -> Numbering:
        """Of all samples that the folder has or is to have, in (row, turn) order."""
        return self._counted if self.store is None else Numbering(self.store.rows, self.store.turns)

    @cached_property
    def _counted(self) -> Numbering:
        pairs = read_converted(self.path)
        if pairs is None:  # its prepared rows are gone, or an older convert wrote it
            ledger = self.ledger
            known = sorted({*ledger.finished, *ledger.rejected})
            return numbered(known)
        return Numbering(pairs[:, 0], pairs[:, 1].astype(np.int16))

    @cached_property
    def layout(self) -> Layout:
        """Raises UsageError for one that this program does not know."""
        run = self.run
        return layout_of(
            run.layout, run.layers, run.dtype, run.model, self.numbering, run.topk_logits
        )

    @cached_property
    def entries(self) -> list[Entry]:
        """The last journal line of each finished sample, in (row, turn) order; lines of samples that
        the folder is not to have are passed over."""
        finished, numbering = self.ledger.finished, self.numbering
        pairs = zip(numbering.rows.tolist(), numbering.turns.tolist(), strict=True)
        return [finished[pair] for pair in pairs if pair in finished]

    def file(self, entry: Entry) -> Path:
        return self.path / self.layout.path(entry.row, entry.turn)

    def load(self, entry: Entry, *, verify: bool = False) -> tuple[Sample, dict[str, torch.Tensor]]:
        """A sample and its states by name, [T, H].

        Args:
            verify: read the whole file first and compare its checksum with the journal's.

        Raises RunError when the file is not as its journal line says."""
        path = self.file(entry)
        lines = self.ledger.lines_of(entry)
        if verify:
            check_bytes(path, lines)
        loaded = self.layout.load(path, None if verify else entry.size)
        if len(loaded.input_ids) != entry.tokens:
            raise RunError(
                f"{printable(str(path))}: holds {len(loaded.input_ids):,} tokens, and the journal "
                f"says {entry.tokens:,}"
            )
        sample = Sample(
            row=entry.row,
            turn=entry.turn,
            id=entry.id,
            source=str(path),
            input_ids=loaded.input_ids,
            loss_mask=loaded.loss_mask,
        )
        return sample, dict(loaded.states)


def numbered(pairs: Iterable[tuple[int, int]]) -> Numbering:
    """Of these (row, turn), which are in order."""
    both = np.array(list(pairs), np.int64).reshape(-1, 2)
    return Numbering(both[:, 0], both[:, 1].astype(np.int16))


def read_converted(output: Path) -> npt.NDArray[np.int64] | None:
    """The samples that convert was to write, int64 [N, 2] of (row, turn) in order, or None where it did
    not say. Raises RunError for a file that is none of convert's."""
    path = output / CONVERTED
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    if len(data) % 16:
        raise RunError(
            f"{printable(str(path))}: has {len(data):,} bytes; wanted 16 for each sample"
        )
    pairs = np.frombuffer(data, "<i8").reshape(-1, 2)
    rows, turns = pairs[:, 0], pairs[:, 1]
    keys = (rows << 15) + turns
    good = ((rows >= 0) & (rows < 1 << 47) & (turns >= 0) & (turns < 1 << 15)).all()
    if not good or not (np.diff(keys) > 0).all():
        raise RunError(f"{printable(str(path))}: is not a list of rows and turns in order")
    return pairs


def layout_of(
    name: str,
    stored: tuple[str, ...],
    dtype: str,
    model: RunModel,
    numbering: Numbering,
    topk: int = 0,
) -> Layout:
    """Raises UsageError for a name that is no layout's."""
    if name not in LAYOUTS:
        raise UsageError(
            f"layout {printable(repr(name))}: this program has {', '.join(LAYOUTS)}; the folder "
            "is damaged, or of a newer version"
        )
    return LAYOUTS[name](
        stored=stored,
        hidden=model.hidden_size,
        dtype=DTYPES[dtype],
        model=Path(model.path).name,
        numbering=numbering,
        topk=topk,
    )


def check_output(output: Path) -> Run | None:
    """What an earlier run wrote about itself there, or None for a new or empty folder.

    Raises UsageError for a folder that is somebody else's or holds links to other places."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output}: is a file; wanted a folder")
    if not output.exists():
        return None
    refuse_links(output)
    try:
        before = run_json.newest(output)
    except UsageError as error:
        raise UsageError(f"--output {error}") from error
    if before is not None:
        return before
    names = {entry.name for entry in output.iterdir() if not run_json.is_name(entry.name)}
    strangers = names - {PREPARED, VOCAB, REJECTS, LOCK}
    strangers = {name for name in strangers if not name.endswith(TEMPORARY)}
    if strangers:
        raise UsageError(
            f"--output {output}: holds {printable(sorted(strangers)[0])!r} and no run.json, so it is "
            "not a folder of this program: choose a new one"
        )
    return None


def refuse_links(output: Path) -> None:
    """Raises UsageError when a folder inside the output folder is a link: writing and removing would
    follow it out of there, and reading would take another folder's files for this one's. The output
    folder itself may be one."""
    inside = [output / name for name in FOLDERS]
    for name in (SAMPLES, PREPARED):
        with contextlib.suppress(OSError), os.scandir(output / name) as entries:
            inside += [Path(entry.path) for entry in entries if entry.is_symlink()]
    for path in inside:
        if path.is_symlink():
            raise UsageError(
                f"{printable(str(path))} is a link to {printable(str(path.readlink()))}: nothing is "
                "read or written outside the output folder; put the whole folder there and link to "
                "it, or remove the link"
            )
