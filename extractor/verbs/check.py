"""`extractor check OUT`: is every row accounted for, is every file whole, is nothing else there.

Fast by the journals: one line and one directory entry a sample. With --deep every file is read: its
header against what the run said it would write, its checksum, its numbers. --repair removes what is
bad, so that the next start of the same command writes it again.
"""

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from extractor.config import parse
from extractor.errors import EXIT_FAILED, EXIT_OK, RunError, UsageError
from extractor.files import TEMPORARY, made_for
from extractor.layouts import Layout
from extractor.layouts.base import Damaged, Loaded
from extractor.layouts.planes import finite_rows
from extractor.layouts.safetensors import hashed
from extractor.output import run_json
from extractor.output.folder import CONVERTED, PREPARED, Folder
from extractor.output.journal import JOURNAL, REJECTS
from extractor.output.lock import ALL_ROWS, LOCK, FolderLock
from extractor.prepared.vocab import VOCAB
from extractor.printable import printable
from extractor.progress import ProgressLine, say
from extractor.records import Entry, Sample
from extractor.regular import open_regular, reading, writing
from extractor.values import AtLeastOne

SHOWN = 10
PAGE = "report.html"
KNOWN = {JOURNAL, REJECTS, LOCK, PREPARED, VOCAB, CONVERTED, PAGE}

# Beside the files, the table that speculators' reader opens, and its vocabularies.
DATASET = re.compile(
    r"dataset_info\.json|state\.json|token_freq\.pt|data-\d+-of-\d+\.arrow|(?:d2t|t2d)-\d+\.npy"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """Is every row accounted for, is every file whole; exit code 1 when not."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder that extract wrote."""
    deep: bool = False
    """Read every file: header, checksum, and that all numbers are finite."""
    repair: bool = False
    """Remove what is bad or was left behind; the next run writes it again."""
    json: bool = False
    """Print the result as one JSON object on stdout."""
    workers: AtLeastOne | None = None
    """Threads; default: four a CPU core, as much of it is waiting for the disk."""


@dataclass(slots=True)
class Findings:
    """What was found; a path is relative to the output folder.

    Attributes:
        samples: how many the input rows call for.
        written: whole ones, as far as was looked.
        rejected: left out by the run for a reason in rejects.jsonl; rows_rejected in preparation.
        missing: samples with neither file nor reject, as "row" or "row-turn".
        bad: path to what is wrong with a file.
        unjournalled: files with a final name and no line: not counted as done.
        strays: what nobody should have put there, and temporary files of killed writers.
        unreadable: places in the journals that hold no line; what they spoke of counts as not done.
        repaired: how many files were removed.
        kept: strays that --repair leaves alone, since this program makes no such names.
    """

    samples: int = 0
    written: int = 0
    rejected: int = 0
    rows_rejected: int = 0
    missing: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    unjournalled: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    repaired: int = 0
    kept: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not (self.missing or self.bad or self.strays or self.unjournalled)


def check(argv: Sequence[str]) -> int:
    """The verb: returns the exit code. Raises UsageError for what is no folder of this program, and
    RunError for one that cannot be read."""
    config = parse(CheckConfig, argv, "extractor check")
    if config.workers is not None and config.workers < 1:
        raise UsageError(f"--workers {config.workers}: wanted 1 or more")
    if config.repair:
        _facts(config.output)  # before anything is made in a folder that is not ours
        with writing():
            FolderLock(config.output, say).rows(0, ALL_ROWS)
    findings = examine(config.output, deep=config.deep, workers=config.workers)
    if config.repair:
        repair(config.output, findings)
    if config.json:
        value = {**asdict(findings), "complete": findings.complete}
        print(json.dumps(value), file=sys.stdout)  # noqa: T201
    else:
        for line in _lines(findings, config.output):
            say(line)
    return EXIT_OK if findings.complete else EXIT_FAILED


def examine(output: Path, *, deep: bool = False, workers: int | None = None) -> Findings:
    """Look at a folder and change nothing. Raises UsageError when it is none of this program, and
    RunError when it cannot be read."""
    with reading(output):
        facts = _facts(output)
        threads = workers or 4 * len(os.sched_getaffinity(0))
        findings = Findings(samples=len(facts.numbering.rows), rows_rejected=_not_prepared(facts))
        with ThreadPoolExecutor(threads) as pool:
            sizes = _sizes(output, facts.layout.root, pool, findings)
            good = _by_journal(output, facts, sizes, findings)
            if deep:
                _read_all(output, facts, good, findings, pool)
        _other_strays(output, facts, findings)
    return findings


def _not_prepared(facts: Folder) -> int:
    """Rows that were rejected in preparation."""
    if facts.store is not None:
        return len(facts.store.rejects)
    return (facts.run.counts or {}).get("rejected_in_preparation", 0)


def _facts(output: Path) -> Folder:
    return Folder.open(output, rows=True)


# Removing -----------------------------------------------------------------------------------------
def repair(output: Path, findings: Findings) -> None:
    """Remove bad, unjournalled and stray files that have a name which this program gives a sample, or a
    temporary file of its own; what else is strange, a person put there, and it stays.

    No link is followed, at any level below the output folder, even one that appears meanwhile. Raises
    RunError when a file cannot be removed."""
    layout = _facts(output).layout
    with writing(), _opened(output) as top:
        for name in [*findings.bad, *findings.unjournalled, *findings.strays]:
            if not is_ours(layout, name):
                findings.kept.append(name)
            elif _remove(top, name):
                findings.repaired += 1


def is_ours(layout: Layout, name: str) -> bool:
    """Whether this program makes files of this name, relative to the output folder: a sample of the
    layout, or a temporary file of a sample or of what lies beside the samples."""
    folder, _, base = name.rpartition("/")
    inner = made_for(base)
    if inner is None:
        return layout.is_sample(name)
    if not folder:
        return inner in KNOWN or run_json.is_name(inner) or bool(DATASET.fullmatch(inner))
    return layout.is_sample(f"{folder}/{inner}")


@contextlib.contextmanager
def _opened(folder: str | Path, inside: int | None = None) -> Generator[int]:
    """A folder's descriptor; inside another folder it must not be a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags if inside is None else flags | os.O_NOFOLLOW, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(top: int, name: str) -> bool:
    """Whether there was such a file, which is gone now; a folder of its name stays."""
    *folders, base = name.split("/")
    with contextlib.ExitStack() as stack:
        where = top
        try:
            for folder in folders:
                where = stack.enter_context(_opened(folder, where))
            if stat.S_ISDIR(os.stat(base, dir_fd=where, follow_symlinks=False).st_mode):
                return False
            os.unlink(base, dir_fd=where)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            error.filename = name
            raise
    return True


# Names and sizes ----------------------------------------------------------------------------------
def _sizes(output: Path, root: str, pool: ThreadPoolExecutor, findings: Findings) -> dict[str, int]:
    """Relative path to size, of all regular files under the samples' folder; the rest is stray."""
    if not (output / root).is_dir():
        return {}
    sizes, strays, folders = _scan(output, root)
    findings.strays += strays
    for found, strays, deeper in pool.map(lambda name: _scan(output, name), sorted(folders)):
        sizes.update(found)
        findings.strays += [*strays, *deeper]
    return sizes


def _scan(output: Path, folder: str) -> tuple[dict[str, int], list[str], list[str]]:
    """(files with their sizes, strays, folders) in one folder."""
    sizes: dict[str, int] = {}
    strays: list[str] = []
    folders: list[str] = []
    with os.scandir(output / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):  # a run that goes on has replaced it
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
            else:
                strays.append(name)
    return sizes, strays, folders


Good = dict[str, tuple[int, list[Entry]]]


def _by_journal(output: Path, facts: Folder, sizes: dict[str, int], findings: Findings) -> Good:
    """Path to (index among the samples, lines) of those whose file has the size of such a line."""
    ledger, layout, numbering = facts.ledger, facts.layout, facts.numbering
    findings.unreadable = ledger.unreadable
    good: Good = {}
    named: set[str] = set()
    pairs = zip(numbering.rows.tolist(), numbering.turns.tolist(), strict=True)
    for at, (row, turn) in enumerate(pairs):
        path = layout.path(row, turn)
        size, last = sizes.get(path), ledger.finished.get((row, turn))
        rejected = (row, turn) in ledger.rejected
        findings.rejected += rejected
        # Several journals may tell of a sample: the lines that are true of the file count.
        lines = [] if last is None else ledger.lines_of(last)
        alike = [line for line in lines if line.size == size]
        if alike:
            good[path] = (at, alike)
        elif rejected:
            continue
        elif size is None:
            findings.missing.append(f"{row}" if turn == 0 else f"{row}-{turn:02d}")
        elif last is None:
            findings.unjournalled.append(path)
        else:
            findings.bad[path] = f"has {size:,} bytes, its journal line says {last.size:,}"
        named.add(path)
    findings.strays += sorted(set(sizes) - named)
    findings.written = len(good)
    return good


def _other_strays(output: Path, facts: Folder, findings: Findings) -> None:
    known = {*KNOWN, facts.layout.root}
    for entry in os.scandir(output):
        named = run_json.is_name(entry.name) or entry.name in known
        if facts.layout.name == "speculators":
            named = named or DATASET.fullmatch(entry.name) is not None
        if entry.is_symlink() or not named:
            findings.strays.append(entry.name)
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(output / JOURNAL):
            if entry.is_symlink() or not entry.name.endswith(".jsonl"):
                findings.strays.append(f"{JOURNAL}/{entry.name}")


# Contents -----------------------------------------------------------------------------------------
def _read_all(
    output: Path, facts: Folder, good: Good, findings: Findings, pool: ThreadPoolExecutor
) -> None:
    line = ProgressLine("checking", len(good), "file")
    try:
        results = pool.map(lambda item: _wrong_with(output, facts, *item), good.items())
        for count, (path, wrong) in enumerate(zip(good, results, strict=True), 1):
            if wrong is not None:
                findings.bad[path] = wrong
                findings.written -= 1
            line.set(count)
    finally:
        line.close()


def _wrong_with(
    output: Path, facts: Folder, name: str, known: tuple[int, list[Entry]]
) -> str | None:
    """The first thing wrong with a file's content, or None."""
    at, lines = known
    path = output / name
    sample = None if facts.store is None else facts.store.sample(at)
    try:
        # The checksum last: a torn file is better told by what is missing from it.
        wrong = _wrong_content(facts.layout.load(path), sample, lines[0].tokens)
        if wrong is not None:
            return wrong
        with open_regular(path) as handle:
            digest = hashed(handle)
    except Damaged as error:
        return error.what
    except (RunError, OSError) as error:
        return str(error)
    if all(line.xxh3 != digest for line in lines):
        return "its checksum is not the one in its journal line"
    return None


def _wrong_content(loaded: Loaded, sample: Sample | None, tokens: int) -> str | None:
    """Ids and mask are those of the row, where the folder has its rows, and all numbers are finite."""
    if sample is not None:
        if not torch.equal(loaded.input_ids, sample.input_ids):
            return "input_ids are not the row's"
        if not torch.equal(loaded.loss_mask, sample.loss_mask):
            return "loss_mask is not the row's"
    elif len(loaded.input_ids) != tokens:
        return f"holds {len(loaded.input_ids):,} tokens, its journal line says {tokens:,}"
    for key, value in loaded.states.items():
        if value.dtype.is_floating_point and not bool(finite_rows(value).all()):
            return f"{key} has a value that is not finite"
    return None


# For a person -------------------------------------------------------------------------------------
def _lines(findings: Findings, output: Path) -> Iterator[str]:
    yield from _group("missing", findings.missing, str)
    bad = findings.bad
    yield from _group("bad", list(bad), lambda path: f"{printable(path)} {printable(bad[path])}")
    yield from _group("without a journal line", findings.unjournalled, printable)
    yield from _group("not ours, or left by a killed run", findings.strays, printable)
    yield from _group("no journal line", findings.unreadable, str)
    if findings.repaired:
        yield f"removed {findings.repaired:,} files: run the same extract command again"
    yield from _group("left alone, as this program makes no such name", findings.kept, printable)
    verdict = "complete" if findings.complete else "not complete"
    yield (
        f"{printable(str(output))}: {verdict}: "
        f"{findings.written:,} of {findings.samples:,} samples whole, "
        f"{findings.rejected:,} rejected in the run, {findings.rows_rejected:,} in preparation, "
        f"{len(findings.missing):,} missing, {len(findings.bad):,} bad, "
        f"{len(findings.unjournalled) + len(findings.strays):,} strays"
    )


def _group(what: str, items: Sequence[str], show: Callable[[str], str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - SHOWN:,} more" if len(items) > SHOWN else ""
        yield f"{what}: {', '.join(map(show, items[:SHOWN]))}{more}"
