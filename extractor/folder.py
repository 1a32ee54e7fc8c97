"""An output folder as a whole: whether it is ours, what its run.json and journals say, and its
samples in any layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extractor.data.store import PreparedStore
from extractor.errors import UsageError
from extractor.files import TEMPORARY
from extractor.journal import REJECTS, RUN, Entry, read_entries, read_run
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.lock import LOCK
from extractor.records import Sample
from extractor.store import PREPARED, VOCAB, refuse_links


@dataclass(frozen=True, slots=True)
class Folder:
    """An output folder, to read from, in whatever layout it is.

    Attributes:
        folder: where it is.
        run: its run.json.
        entries: the last journal line of each sample, in (row, turn) order.
        layout: as it was written.
        num_layers: of the model.
    """

    folder: Path
    run: dict[str, Any]
    entries: list[Entry]
    layout: Layout
    num_layers: int

    @classmethod
    def open(cls, folder: Path) -> "Folder":
        """Raises UsageError for a folder that is not one of ours."""
        runs = sorted(folder.glob("run*.json"))
        if not runs:
            raise UsageError(f"{folder}: no {RUN} there, so it is not a folder that extract wrote")
        run = read_run(runs[0])
        if run is None or "layers" not in run:
            raise UsageError(f"{folder}: its run stopped before it had anything to write")
        entries = _finished(folder)
        layout = layout_of(
            run.get("layout", "native"),
            tuple(run["layers"]),
            run["dtype"],
            run["model"],
            _numbering(folder, run, entries),
            run.get("topk_logits", 0),
        )
        return cls(folder, run, entries, layout, int(run["model"]["num_layers"]))

    def load(self, entry: Entry) -> tuple[Sample, dict[str, torch.Tensor]]:
        """Raises RunError when the file is not as its journal line says."""
        path = self.folder / self.layout.path(entry.row, entry.turn)
        loaded = self.layout.load(path, entry.size)
        sample = Sample(
            row=entry.row,
            turn=entry.turn,
            id=entry.id,
            source=str(path),
            input_ids=loaded.input_ids,
            loss_mask=loaded.loss_mask,
        )
        return sample, dict(loaded.states)


def _finished(folder: Path) -> list[Entry]:
    entries: dict[tuple[int, int], Entry] = {}
    for entry in read_entries(folder):
        if entry.reject is None:
            entries[entry.row, entry.turn] = entry
    return [entries[key] for key in sorted(entries)]


def _numbering(folder: Path, run: dict[str, Any], entries: Sequence[Entry]) -> Numbering:
    """How the folder's own files were counted: by the prepared store of a run, or, in a folder that
    convert wrote, by its samples."""
    prepared = run.get("prepared")
    if prepared and (folder / prepared).is_dir():
        store = PreparedStore.open(folder / prepared)
        return Numbering(store.rows, store.turns)
    return counted(entries)


def counted(entries: Sequence[Entry]) -> Numbering:
    rows = np.array([entry.row for entry in entries], np.int64)
    return Numbering(rows, np.array([entry.turn for entry in entries], np.int16))


def layout_of(
    name: str,
    stored: tuple[str, ...],
    dtype: str,
    model: dict[str, Any],
    numbering: Numbering,
    topk: int = 0,
) -> Layout:
    return LAYOUTS[name](
        stored=stored,
        hidden=int(model["hidden_size"]),
        dtype=getattr(torch, dtype),
        model=Path(model["path"]).name,
        numbering=numbering,
        topk=topk,
    )


def check_output(output: Path) -> dict[str, Any] | None:
    """What an earlier run wrote about itself there, or None for a new or empty folder.

    Raises UsageError for a folder that is somebody else's or holds links to other places."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output}: is a file; wanted a folder")
    if not output.exists():
        return None
    refuse_links(output)
    names = {entry.name for entry in output.iterdir()}
    runs = sorted(name for name in names if name == RUN or name.startswith("run-"))
    try:
        for before in (read_run(output / name) for name in runs):
            if before is not None and before["fingerprint"]:
                return before
    except ValueError as error:
        raise UsageError(f"--output {output}: {error}") from error
    strangers = names - {PREPARED, VOCAB, REJECTS, LOCK, *runs}
    strangers = {name for name in strangers if not name.endswith(TEMPORARY)}
    if strangers:
        raise UsageError(
            f"--output {output}: holds {sorted(strangers)[0]!r} and no run.json, so it is not a "
            "folder of this program: choose a new one"
        )
    return None
