"""Turn a finished folder into another layout, or back: `extractor convert OUT NEW --layout X`.

Files are read and written one by one, under the same journal as a run's: started again, it goes on
where it was. Numbers are copied; they are rounded only where --dtype asks for it.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from extractor import fingerprint
from extractor.config import LayoutName, StoredDtype, parse
from extractor.data.vocab import MAPPING, TokenCounts
from extractor.errors import EXIT_OK, EXIT_REJECTS, RunError, UsageError
from extractor.files import write_whole
from extractor.folder import Folder, counted, layout_of
from extractor.journal import JOURNAL, REJECTS, RUN, Entry, Journal, find_done, read_run, write_run
from extractor.layout import encode, finite_rows
from extractor.layouts import LAYOUTS, Layout
from extractor.progress import ProgressLine, say
from extractor.reader import map_sample
from extractor.records import Reject, Sample
from extractor.states import FINAL, States
from extractor.store import VOCAB, Blob
from extractor.values import AtLeastOne

NON_FINITE = "non_finite"


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
    if before is None:
        write_run(config.output / RUN, run)
    rejected = _write(config, source, target, left)
    _finish(config, source, target, run)
    say(f"complete: {len(source.entries) - rejected:,} samples; {config.output}")
    return EXIT_REJECTS if rejected else EXIT_OK


def _target(config: ConvertConfig, source: Folder) -> Layout:
    """The layout to write. Raises UsageError when the folder lacks a state that it needs."""
    there = source.layout.captured
    asked = States.resolve(config.layers or ",".join(there), FINAL in there, source.num_layers)
    stored = LAYOUTS[config.layout].stored_for(asked)
    for name in stored:
        if name not in there:
            raise UsageError(
                f"--layout {config.layout} needs state {name}, and {source.folder} has "
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
    dtype = source.run["dtype"] if config.dtype == "auto" else config.dtype
    numbering = counted(source.entries)
    return layout_of(config.layout, stored, dtype, source.run["model"], numbering, topk)


def _parts(source: Folder, target: Layout) -> dict[str, str]:
    """What a run that had written the folder in this layout would call itself."""
    changed = {
        "layers": ",".join(target.stored),
        "dtype": str(target.dtype).removeprefix("torch."),
        "layout": target.name,
    }
    kept = {k: v for k, v in source.run["parts"].items() if k != "topk_logits" or target.topk}
    return {**kept, **changed}


def _refuse_others(config: ConvertConfig, source: Folder, target: Layout) -> dict[str, Any] | None:
    if config.output.resolve() == config.source.resolve():
        raise UsageError(f"{config.output} is the source itself: choose a new folder")
    before = read_run(config.output / RUN)
    if before is None:
        if config.output.exists() and any(config.output.iterdir()):
            raise UsageError(f"{config.output} is not empty and has no {RUN}: choose a new folder")
        return None
    if changed := fingerprint.changes(before["parts"], _parts(source, target)):
        raise UsageError(f"{config.output} holds something else; {'; '.join(changed)}")
    return before


def _describe(config: ConvertConfig, source: Folder, target: Layout) -> dict[str, Any]:
    parts = _parts(source, target)
    kept = {key: value for key, value in source.run.items() if key != "prepared"}
    return {
        **kept,
        "status": "running",
        "fingerprint": fingerprint.digest(parts),
        "parts": parts,
        "layers": list(target.stored),
        "dtype": parts["dtype"],
        "layout": target.name,
        "topk_logits": target.topk,
        "converted_from": {"folder": str(config.source), "layout": source.layout.name},
    }


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
    except OSError as error:
        raise RunError(f"cannot write {error.filename}: {error.strerror}") from error
    finally:
        line.close()
        journal.close()
    return rejected


def _convert_one(
    config: ConvertConfig, source: Folder, target: Layout, journal: Journal, entry: Entry
) -> bool:
    sample, states = source.load(entry)
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
            say(f"rejected {source_name} ({entry.id}): {detail}")
            return False
    blobs = {key: Blob.of(value) for key, value in encoded.items()}
    path = config.output / target.path(entry.row, entry.turn)
    journal.finished(sample, write_whole(path, target.parts(sample, blobs), sync=False))
    return True


def _finish(config: ConvertConfig, source: Folder, target: Layout, run: dict[str, Any]) -> None:
    def samples() -> Iterator[Sample]:
        return (source.load(entry)[0] for entry in source.entries)

    target.finish(config.output, samples())
    if (rejects := source.folder / REJECTS).is_file():
        write_whole(config.output / REJECTS, [rejects.read_bytes()], sync=False)
    _write_vocabulary(config, source, target, samples())
    write_run(config.output / RUN, {**run, "status": "complete"})


def _write_vocabulary(
    config: ConvertConfig, source: Folder, target: Layout, samples: Iterator[Sample]
) -> None:
    """The folder's own vocab/, and a draft vocabulary also as the layout's project wants it."""
    files = sorted((source.folder / VOCAB).glob("*.safetensors"))
    for file in files:
        write_whole(config.output / VOCAB / file.name, [file.read_bytes()], sync=False)
    if (mapping := source.folder / VOCAB / MAPPING) in files:
        size = len(map_sample(mapping).tensors["d2t"])
        counted = TokenCounts.of_samples(samples, int(source.run["model"]["vocab_size"]))
        for name, parts in target.vocabulary(counted, size).items():
            write_whole(config.output / name, parts, sync=False)
