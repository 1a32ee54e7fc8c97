"""Turn a finished folder into another layout, or back: `extractor convert OUT NEW --layout X`.

Files are read and written one by one, under the same journal as a run's: started again, it goes on
where it was. Numbers are copied; they are rounded only where --dtype asks for it.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from extractor.config import LayoutName, StoredDtype, parse
from extractor.errors import EXIT_OK, EXIT_REJECTS, UsageError
from extractor.files import write_whole
from extractor.layouts import LAYOUTS, Layout
from extractor.layouts.planes import Blob, encode, finite_rows
from extractor.layouts.safetensors import map_sample
from extractor.output import run_json
from extractor.output.done import find_done
from extractor.output.folder import CONVERTED, Folder, layout_of, numbered, refuse_links
from extractor.output.journal import JOURNAL, Journal, read_ledger, read_rejects, write_rejects
from extractor.output.run_json import RUN, Origin, Run
from extractor.plan import fingerprint
from extractor.prepared.vocab import MAPPING, VOCAB, TokenCounts
from extractor.printable import printable
from extractor.progress import ProgressLine, say
from extractor.records import Entry, Reject, Sample
from extractor.regular import read_regular, reading, writing
from extractor.states import FINAL, States
from extractor.values import AtLeastOne

NON_FINITE = "non_finite"
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Write the samples of an output folder again in another file format."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder that extract or convert wrote."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """Folder to write; made if missing."""
    layout: LayoutName = "native"
    """Whose file format to write."""
    layers: str | None = None
    """Which of the folder's states, and in what order; default: all of them, as they are."""
    dtype: StoredDtype = "auto"
    """Stored dtype; auto keeps the folder's own."""
    workers: AtLeastOne | None = None
    """Threads; default: from the CPU cores."""


def convert(argv: Sequence[str]) -> int:
    """The verb: returns the exit code, raises UsageError and RunError."""
    config = parse(ConvertConfig, argv, "extractor convert")
    source = Folder.open(config.source)
    target = _target(config, source)
    before = _refuse_others(config, source, target)
    run = _describe(config, source, target)
    left = _left(config, source, target)
    say(
        f"{len(source.entries):,} samples of {source.layout.name} to {target.name}: "
        f"states {', '.join(target.stored)}, {len(left):,} to do"
    )
    for where in source.ledger.unreadable[:SHOWN]:
        say(f"{where} of {source.path} is no journal line; a sample that it spoke of is left out")
    with writing():
        if before is None:
            _begin(config, target, run)
        rejected = _write(config, source, target, left)
        _finish(config, source, target, run)
    say(f"complete: {len(source.entries) - rejected:,} samples; {config.output}")
    return EXIT_REJECTS if rejected else EXIT_OK


def _target(config: ConvertConfig, source: Folder) -> Layout:
    """The layout to write. Raises UsageError when the folder lacks a state that it needs."""
    there = source.layout.captured
    asked = States.resolve(
        config.layers or ",".join(there), FINAL in there, source.run.model.num_layers
    )
    stored = LAYOUTS[config.layout].stored_for(asked)
    for name in stored:
        if name not in there:
            raise UsageError(
                f"--layout {config.layout} needs state {name}, and {source.path} has "
                f"{', '.join(there)}: extract again with --layers {','.join((*there, name))}, or "
                f"with --layout {config.layout} (docs/formats.md)"
            )
    dropped = [name for name in there if name not in stored]
    if dropped:
        say(f"--layout {config.layout} does not keep state {', '.join(dropped)}")
    topk = source.layout.topk
    if topk and not LAYOUTS[config.layout].holds_topk:
        say(f"--layout {config.layout} does not keep the top-k logits")
        topk = 0
    dtype = source.run.dtype if config.dtype == "auto" else config.dtype
    numbering = numbered(entry.key for entry in source.entries)
    return layout_of(config.layout, stored, dtype, source.run.model, numbering, topk)


def _parts(source: Folder, target: Layout) -> dict[str, str]:
    """What a run that had written the folder in this layout would call itself."""
    changed = {
        "layers": ",".join(target.stored),
        "dtype": str(target.dtype).removeprefix("torch."),
        "layout": target.name,
    }
    kept = {k: v for k, v in source.run.parts.items() if k != "topk_logits" or target.topk}
    return {**kept, **changed}


def _refuse_others(config: ConvertConfig, source: Folder, target: Layout) -> Run | None:
    """The record that convert left in the folder before, if it did. Raises UsageError for a folder that
    holds something else."""
    output, resolved = config.output, config.output.resolve()
    if config.source.resolve() in (resolved, *resolved.parents):
        raise UsageError(f"{output} is the source itself, or inside it: choose a new folder")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: choose a new folder")
    refuse_links(output)
    before = run_json.newest(output)
    if before is None:
        with reading(output):
            if output.exists() and any(output.iterdir()):
                raise UsageError(f"{output} is not empty and has no {RUN}: choose a new folder")
        return None
    if before.converted_from is None:
        raise UsageError(f"{output} is what extract wrote: choose a new folder")
    if changed := fingerprint.changes(before.parts, _parts(source, target)):
        raise UsageError(f"{output} holds something else; {printable('; '.join(changed))}")
    return before


def _describe(config: ConvertConfig, source: Folder, target: Layout) -> Run:
    parts = _parts(source, target)
    there = source.run.counts or {}
    counts = {
        **there,
        "samples": len(source.entries),
        "written": 0,
        "rejected_in_run": len(source.ledger.rejected),
    }
    return run_json.replace(
        source.run,
        status="running",
        error=None,
        prepared=None,
        fingerprint=fingerprint.digest(parts),
        parts=parts,
        layers=target.stored,
        dtype=parts["dtype"],
        layout=target.name,
        topk_logits=target.topk,
        counts=counts,
        converted_from=Origin(folder=str(config.source), layout=source.layout.name),
    )


def _begin(config: ConvertConfig, target: Layout, run: Run) -> None:
    """Write what the folder is to hold: the list of its samples, then the record that says so."""
    assert target.numbering is not None
    pairs = np.stack([target.numbering.rows, target.numbering.turns.astype(np.int64)], axis=1)
    write_whole(config.output / CONVERTED, [pairs.astype("<i8").tobytes()], sync=True)
    run_json.write(config.output / RUN, run)


def _left(config: ConvertConfig, source: Folder, target: Layout) -> list[Entry]:
    assert target.numbering is not None
    rows, turns = target.numbering.rows, target.numbering.turns
    done = find_done(config.output, rows, turns, target.path)
    return [e for e, there in zip(source.entries, done.finished, strict=True) if not there]


def _write(config: ConvertConfig, source: Folder, target: Layout, left: Sequence[Entry]) -> int:
    """Returns how many could not be written because a number has no place in the new dtype."""
    journal = Journal(config.output / JOURNAL / "0000.jsonl")
    threads = config.workers or max(len(os.sched_getaffinity(0)), 2)
    line = ProgressLine("converting", sum(entry.tokens for entry in left), "token")
    rejected = tokens = 0

    def one(entry: Entry) -> tuple[int, bool]:
        return entry.tokens, _convert_one(config, source, target, journal, entry)

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
            for count, written in pool.map(one, left):
                tokens, rejected = tokens + count, rejected + (not written)
                line.set(tokens)
    finally:
        line.close()
        journal.close()
    return rejected


def _convert_one(
    config: ConvertConfig, source: Folder, target: Layout, journal: Journal, entry: Entry
) -> bool:
    # The checksum first: a copy of corrupt bytes would get a checksum of its own.
    sample, states = source.load(entry, verify=True)
    encoded = encode(target.planes, states)
    for plane in target.planes:
        good = finite_rows(encoded[plane.key])
        if not bool(good.all()):
            token = int((~good).nonzero()[0, 0])
            detail = f"{plane.key} is not finite at token {token} when stored as {plane.dtype}"
            source_name = f"row {entry.row}"
            journal.rejected(
                Reject(
                    row=entry.row,
                    turn=entry.turn,
                    id=entry.id,
                    source=source_name,
                    reason=NON_FINITE,
                    detail=detail,
                )
            )
            say(f"rejected {source_name} ({printable(entry.id)}): {detail}")
            return False
    blobs = {key: Blob.of(value) for key, value in encoded.items()}
    path = config.output / target.path(entry.row, entry.turn)
    journal.finished(sample, write_whole(path, target.parts(sample, blobs), sync=False))
    return True


def _finish(config: ConvertConfig, source: Folder, target: Layout, run: Run) -> None:
    def samples() -> Iterator[Sample]:
        return (source.load(entry)[0] for entry in source.entries)

    target.finish(config.output, samples())
    _write_rejects(config, source)
    _write_vocabulary(config, source, target, samples())
    written = len(Folder.open(config.output).entries)
    counts = {**(run.counts or {}), "written": written}
    done = run_json.replace(run, status="complete", counts=counts)
    run_json.write(config.output / RUN, done)


def _write_rejects(config: ConvertConfig, source: Folder) -> None:
    """The folder's own, and those of the conversion."""
    own = read_ledger(config.output).rejected
    write_rejects(config.output, [*read_rejects(source.path), *own.values()])


def _write_vocabulary(
    config: ConvertConfig, source: Folder, target: Layout, samples: Iterator[Sample]
) -> None:
    """The folder's own vocab/, and a draft vocabulary also as the layout's project wants it."""
    files = sorted((source.path / VOCAB).glob("*.safetensors"))
    for file in files:
        map_sample(file)  # one that is damaged is not copied
        write_whole(config.output / VOCAB / file.name, [read_regular(file)], sync=False)
    if (mapping := source.path / VOCAB / MAPPING) in files:
        size = len(map_sample(mapping).tensor("d2t").flatten())
        counted = TokenCounts.of_samples(samples, source.run.model.vocab_size)
        for name, parts in target.vocabulary(counted, size).items():
            write_whole(config.output / name, parts, sync=False)
