"""`extractor check OUT`: is every row accounted for, is every file whole, is nothing else there.

Fast by the journals: one line and one directory entry a sample. With --deep every file is read: its
header against what the run said it would write, its checksum, its numbers. --repair removes what is
bad, so that the next start of the same command writes it again.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
import xxhash

from extractor.config import parse
from extractor.data.store import PreparedStore
from extractor.errors import EXIT_FAILED, EXIT_OK, RunError, UsageError
from extractor.files import TEMPORARY
from extractor.journal import JOURNAL, REJECTS, RUN, Entry, read_entries, read_run
from extractor.layout import finite_rows
from extractor.layouts import LAYOUTS, Layout, Numbering
from extractor.lock import ALL_ROWS, LOCK, FolderLock
from extractor.progress import ProgressLine, say
from extractor.store import DTYPE_NAMES, SAMPLES, VOCAB
from extractor.values import AtLeastOne

SHOWN = 10
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SAMPLE_FOLDERS = (f"{SAMPLES}/", "hidden_states/")
KNOWN = {JOURNAL, REJECTS, LOCK, "prepared", VOCAB}
# Beside the files, the table that its reader opens.
DATASET = {"dataset_info.json", "state.json", "token_freq.pt"}


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
        repaired: how many files were removed.
    """

    samples: int = 0
    written: int = 0
    rejected: int = 0
    rows_rejected: int = 0
    missing: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    unjournalled: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    repaired: int = 0

    @property
    def complete(self) -> bool:
        return not (self.missing or self.bad or self.strays or self.unjournalled)


@dataclass(frozen=True)
class Facts:
    """What a run said of itself and its rows."""

    run: dict[str, Any]
    store: PreparedStore

    @property
    def native(self) -> bool:
        return self.run["layout"] == "native"

    @cached_property
    def layout(self) -> Layout:
        """Raises KeyError for a run.json that lacks something."""
        return LAYOUTS[self.run["layout"]](
            stored=tuple(self.run["layers"]),
            hidden=int(self.run["model"]["hidden_size"]),
            dtype=getattr(torch, self.run["dtype"]),
            model=Path(self.run["model"]["path"]).name,
            numbering=Numbering(self.store.rows, self.store.turns),
            topk=self.run.get("topk_logits", 0),
        )

    @cached_property
    def root(self) -> str:
        """The folder of all sample files, relative to the output folder."""
        first = int(self.store.rows[0]), int(self.store.turns[0])
        return self.layout.path(*first).partition("/")[0]


def check(argv: Sequence[str]) -> int:
    """The verb: returns the exit code. Raises UsageError for what is no folder of this program."""
    config = parse(CheckConfig, argv, "extractor check")
    if config.repair:
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
    """Look at a folder and change nothing. Raises UsageError when it is none of this program."""
    facts = _facts(output)
    threads = workers or 4 * len(os.sched_getaffinity(0))
    findings = Findings(samples=len(facts.store.rows), rows_rejected=len(facts.store.rejects))
    with ThreadPoolExecutor(threads) as pool:
        sizes = _sizes(output, facts.root, pool, findings)
        good = _by_journal(output, facts, sizes, findings)
        if deep:
            _read_all(output, facts, good, findings, pool)
    _other_strays(output, facts, findings)
    return findings


def repair(output: Path, findings: Findings) -> None:
    """Remove bad, unjournalled and stray files inside samples/; what else is strange, a person put
    there, and it stays."""
    for name in [*findings.bad, *findings.unjournalled, *findings.strays]:
        ours = name.startswith(SAMPLE_FOLDERS) or name.endswith(TEMPORARY)
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            if ours:
                (output / name).unlink()
                findings.repaired += 1


def _facts(output: Path) -> Facts:
    if not output.is_dir():
        raise UsageError(f"{output}: not a folder")
    for path in [output / RUN, *sorted(output.glob("run-*.json"))]:
        try:
            run = read_run(path)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if run is not None and run["fingerprint"]:
            try:
                return Facts(run, PreparedStore.open(output / run["prepared"]))
            except RunError as error:
                raise UsageError(f"{error}; run the same extract command again") from error
    raise UsageError(f"{output}: no run.json, so nothing has been written there by this program")


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
                sizes[name] = entry.stat(follow_symlinks=False).st_size
            else:
                strays.append(name)
    return sizes, strays, folders


def _by_journal(
    output: Path, facts: Facts, sizes: dict[str, int], findings: Findings
) -> dict[str, tuple[int, Entry]]:
    """Path to (index in the store, line) of the samples whose file has its line's size."""
    store = facts.store
    index = _index(store)
    lines: dict[int, Entry] = {}
    rejected: set[int] = set()
    for entry in read_entries(output):
        at = index.get((entry.row, entry.turn))
        if at is None:
            continue
        if entry.reject is not None:
            rejected.add(at)
            continue
        rejected.discard(at)
        # Several journals may tell of a sample: the line that is true of the file counts.
        if at not in lines or sizes.get(facts.layout.path(entry.row, entry.turn)) == entry.size:
            lines[at] = entry
    findings.rejected = len(rejected)
    good: dict[str, tuple[int, Entry]] = {}
    named: set[str] = set()
    for at, (row, turn) in enumerate(zip(store.rows.tolist(), store.turns.tolist(), strict=True)):
        path = facts.layout.path(row, turn)
        named.add(path)
        size, entry = sizes.get(path), lines.get(at)
        if entry is not None and size == entry.size:
            good[path] = (at, entry)
        elif at in rejected:
            named.discard(path)
        elif size is None:
            findings.missing.append(f"{row}" if turn == 0 else f"{row}-{turn:02d}")
        elif entry is None:
            findings.unjournalled.append(path)
        else:
            findings.bad[path] = f"has {size:,} bytes, its journal line says {entry.size:,}"
    findings.strays += sorted(set(sizes) - named)
    findings.written = len(good)
    return good


def _index(store: PreparedStore) -> dict[tuple[int, int], int]:
    pairs = zip(store.rows.tolist(), store.turns.tolist(), strict=True)
    return {pair: at for at, pair in enumerate(pairs)}


def _other_strays(output: Path, facts: Facts, findings: Findings) -> None:
    known = {*KNOWN, facts.root, *(DATASET if facts.run["layout"] == "speculators" else ())}
    for entry in os.scandir(output):
        run = entry.name == RUN or (entry.name.startswith("run-") and entry.name.endswith(".json"))
        if entry.is_symlink() or not (
            run or entry.name in known or entry.name.endswith((".arrow", ".npy"))
        ):
            findings.strays.append(entry.name)
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(output / JOURNAL):
            if entry.is_symlink() or not entry.name.endswith(".jsonl"):
                findings.strays.append(f"{JOURNAL}/{entry.name}")


# Contents -----------------------------------------------------------------------------------------


def _read_all(
    output: Path,
    facts: Facts,
    good: dict[str, tuple[int, Entry]],
    findings: Findings,
    pool: ThreadPoolExecutor,
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


def _wrong_with(output: Path, facts: Facts, name: str, known: tuple[int, Entry]) -> str | None:
    """The first thing wrong with a file's content, or None."""
    at, entry = known
    try:
        descriptor = os.open(output / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as handle:  # noqa: PTH123  (there is no Path of a descriptor)
            content = handle.read()
    except OSError as error:
        return f"cannot be read: {error.strerror} (errno {error.errno})"
    # The checksum last: a torn file is better told by what is missing from it.
    if facts.native:
        wrong = _wrong_tensors(memoryview(content), facts, at)
    else:
        wrong = _wrong_elsewhere(output / name, facts, at)
    if wrong is None and xxhash.xxh3_64(content).hexdigest() != entry.xxh3:
        return "its checksum is not the one in its journal line"
    return wrong


def _wrong_elsewhere(path: Path, facts: Facts, at: int) -> str | None:
    """The same of another project's format, by the layout's own reader."""
    try:
        loaded = facts.layout.load(path)
    except (RunError, OSError) as error:
        return str(error)
    sample = facts.store.sample(at)
    if not torch.equal(loaded.input_ids.long(), sample.input_ids):
        return "input_ids are not the row's"
    for key, value in loaded.states.items():
        if not bool(torch.isfinite(value.float()).all()):
            return f"{key} has a value that is not finite"
    return None


def _wrong_tensors(content: memoryview, facts: Facts, at: int) -> str | None:
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8 : 8 + length]))
        metadata = header.pop("__metadata__")
        wanted = dict(_wanted_tensors(facts, int(facts.store.lengths[at])))
        if set(header) != set(wanted):
            return f"holds {', '.join(sorted(header))}; wanted {', '.join(sorted(wanted))}"
        end = 0
        for key, value in header.items():
            dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
            if (dtype, shape) != wanted[key]:
                return f"{key} is {dtype} {list(shape)}, wanted {wanted[key][0]} {wanted[key][1]}"
            begin, stop = value["data_offsets"]
            if begin != end or stop - begin != int(np.prod(shape)) * dtype.itemsize:
                return f"{key} lies at {begin} to {stop}, which is not its place"
            end = stop
        if 8 + length + end != len(content):
            return f"has {len(content):,} bytes, its header calls for {8 + length + end:,}"
        if int(metadata["row"]) != int(facts.store.rows[at]):
            return f"is row {metadata['row']}'s"
        return _wrong_numbers(content[8 + length :], header, facts, at)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has no readable header: {type(error).__name__} {error}"


def _wanted_tensors(facts: Facts, tokens: int) -> Iterator[tuple[str, tuple[torch.dtype, Any]]]:
    yield "input_ids", (torch.int64, (tokens,))
    yield "loss_mask", (torch.uint8, (tokens,))
    for plane in facts.layout.planes:
        yield plane.key, (plane.dtype, plane.shape(tokens))


def _wrong_numbers(data: memoryview, header: dict[str, Any], facts: Facts, at: int) -> str | None:
    def tensor(key: str) -> torch.Tensor:
        begin, end = header[key]["data_offsets"]
        # A copy, since torch wants to be able to write.
        flat = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8)
        return flat.view(DTYPES[header[key]["dtype"]]).view(header[key]["shape"])

    sample = facts.store.sample(at)
    if not torch.equal(tensor("input_ids"), sample.input_ids):
        return "input_ids are not the row's"
    if not torch.equal(tensor("loss_mask"), sample.loss_mask):
        return "loss_mask is not the row's"
    for key in header:
        value = tensor(key)
        if value.dtype.is_floating_point and not bool(finite_rows(value).all()):
            return f"{key} has a value that is not finite"
    return None


# For a person -------------------------------------------------------------------------------------


def _lines(findings: Findings, output: Path) -> Iterator[str]:
    yield from _group("missing", findings.missing, str)
    yield from _group("bad", list(findings.bad), lambda path: f"{path} {findings.bad[path]}")
    yield from _group("without a journal line", findings.unjournalled, str)
    yield from _group("not ours, or left by a killed run", findings.strays, str)
    if findings.repaired:
        yield f"removed {findings.repaired:,} files: run the same extract command again"
    verdict = "complete" if findings.complete else "not complete"
    yield (
        f"{output}: {verdict}: {findings.written:,} of {findings.samples:,} samples whole, "
        f"{findings.rejected:,} rejected in the run, {findings.rows_rejected:,} in preparation, "
        f"{len(findings.missing):,} missing, {len(findings.bad):,} bad, "
        f"{len(findings.unjournalled) + len(findings.strays):,} strays"
    )


def _group(what: str, items: Sequence[str], show: Callable[[str], str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - SHOWN:,} more" if len(items) > SHOWN else ""
        yield f"{what}: {', '.join(map(show, items[:SHOWN]))}{more}"
