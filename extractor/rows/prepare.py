"""Prepares rows: writes a prepared store in the output folder, or opens the one that is there.

The store is written under a temporary name and renamed when it is complete. So nothing is left on
disk unless the whole input is good or --bad-rows allows its bad rows. While the output folder does
not exist, the temporary folder stands in the nearest parent folder that does.
"""

import contextlib
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from extractor.config import DataConfig
from extractor.errors import RunError, UsageError
from extractor.files import sync_path
from extractor.model import ModelSpec
from extractor.output import run_json
from extractor.prepared import digest as identity
from extractor.prepared.pieces import Refusal
from extractor.prepared.store import INFO, Identity, PreparedStore, StoreWriter
from extractor.printable import printable
from extractor.rows.clock import NAME, Clock
from extractor.rows.converter import Rules
from extractor.rows.read import Source, open_sources, selected
from extractor.rows.records import FILTERS
from extractor.rows.tokenizer import load_rules, prints_date
from extractor.rows.work import outcomes

# This number goes up when a change of the code may give the same row other ids or another mask.
RULES_VERSION = "2"
FOLDER = "prepared"
TEMPORARY = ".preparing-"
SHOWN = 20  # bad rows, and unread keys, that a message lists
LONGEST_ID = 200  # characters of an id or a key that a message shows
Report = Callable[[str], None]
Progress = Callable[[int, int | None], None]


def prepare(
    config: DataConfig, model: ModelSpec, report: Report, progress: Progress | None = None
) -> PreparedStore:
    """Read, render, tokenize and mask every row, or open a store of the output with the same key.

    Args:
        report: is called with each line for the user.
        progress: is called with (rows done, all rows or None when their number is unknown).

    Raises:
        UsageError: the flags or the input cannot be used, there are no rows, or no row became a
            sample. With --bad-rows fail the message lists the first 20 bad rows and how many more
            there are. Nothing is left on disk.
        RunError: the disk failed, or a worker process died.
    """
    check(config, model)
    sources = open_sources(config.data)
    kept = stores_in(config.output)
    rules = load_rules(config, model, _clock(config.output, kept))
    try:
        inputs = identity.with_digests(
            [file for source in sources for file in source.files],
            [facts for store in kept for facts in store.inputs],
        )
    except OSError as error:
        raise UsageError(f"--data {printable(str(error.filename))}: {error.strerror}") from error
    parts = digest_parts(config, model, rules, inputs)
    key = identity.combined(parts)
    for store in kept:
        if store.digest == key:
            report(f"using the {len(store):,} samples prepared earlier in {store.path}")
            _refuse_bad_rows(config, _Tally.of(store))
            return store
    _refuse_other_run(config.output, kept, parts)
    with _temporary_folder(config.output) as folder:
        made_from = Identity(key, parts, str(model.path), inputs)
        tally = _fill(folder, config, sources, rules, made_from, progress)
        _report_unread(tally, report)
        _refuse_bad_rows(config, tally)
        # Tokenizing may take hours, so the files are synced before the store gets its name: a power
        # cut after the rename would otherwise leave a store of empty files.
        for file in (*folder.iterdir(), folder):
            sync_path(file)
        return _publish(folder, config.output / FOLDER / key[:16], report)


def check(config: DataConfig, model: ModelSpec) -> None:
    """Raises UsageError for flags that this model or this machine cannot satisfy."""
    if config.max_length is not None and config.max_length > model.context_length:
        raise UsageError(
            f"--max-length {config.max_length}: "
            f"the model's context is {model.context_length} tokens"
        )
    if config.output.exists() and not config.output.is_dir():
        raise UsageError(f"--output {config.output}: is a file, not a folder")


def digest_parts(
    config: DataConfig, model: ModelSpec, rules: Rules, inputs: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Everything that decides ids and masks, under the name that a message uses for it."""
    files = [f"{Path(facts['path']).suffix}:{facts['digest']}" for facts in inputs]
    templates = "\n".join(f"{name}:{text}" for name, text in sorted(rules.templates.items()))
    code = identity.code_digest(model.path) if config.trust_remote_code else ""
    clock = rules.variables[NAME]
    return {
        **({"date": clock.day} if prints_date(rules) else {}),
        "input rows": identity.text_digest("\n".join(files)),
        "limit": str(config.limit),
        "shuffle_seed": str(config.shuffle_seed),
        "tokenizer": identity.tokenizer_digest(model.path),
        **({"remote code": code} if code else {}),
        "chat template": identity.text_digest(templates),
        "template arguments": " ".join(sorted(config.template_arg)),
        "supervise": config.supervise,
        "turns": config.turns,
        "max_length": str(config.max_length),
        "overlong": config.overlong if config.max_length is not None else "-",
        "min_length": str(config.min_length),
        "min_supervised": str(config.min_supervised),
        "vocab_size": str(model.vocab_size),
        "context_length": str(model.context_length),
        "rules": RULES_VERSION,
    }


def _clock(output: Path, kept: Sequence[PreparedStore]) -> Clock:
    """The date that the template prints: the one this output folder already has, else today.

    Kept stores are asked first. run.json has the date as well, for a folder whose prepared store was
    removed.
    """
    days = [store.parts.get("date") for store in kept]
    for path in run_json.paths(output):
        with contextlib.suppress(UsageError, RunError):  # the run itself reports a damaged run.json
            run = run_json.read(path)
            days.append(run.parts.get("data: date") if run else None)
    for day in filter(None, days):
        with contextlib.suppress(ValueError, TypeError):
            return Clock(day)
    return Clock.today()


def stores_in(output: Path) -> list[PreparedStore]:
    """The complete stores of an output folder, in name order."""
    found: list[PreparedStore] = []
    for info in sorted((output / FOLDER).glob(f"*/{INFO}")):
        if info.parent.name.startswith(TEMPORARY):
            continue
        try:
            found.append(PreparedStore.open(info.parent))
        except RunError:  # a store of another version, or a damaged one, counts as absent
            continue
    return found


def _refuse_other_run(
    output: Path, kept: Sequence[PreparedStore], parts: Mapping[str, str]
) -> None:
    """Raises UsageError when the output folder holds a run of other samples."""
    if not kept or not run_json.paths(output):
        return
    changes = min((changed_parts(store.parts, parts) for store in kept), key=len)
    raise UsageError(
        f"--output {output}: holds a run of other samples; what changed: {', '.join(changes)}"
    )


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The parts that differ between two digests, as words for a message."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name} ({before.get(name, 'absent')} -> {after.get(name, 'absent')})"
        for name in names
        if before.get(name) != after.get(name)
    ]


class _Tally:
    """Counts of rows, samples and rejections, and the text of the first SHOWN bad rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.samples = 0
        self.bad = 0
        self.shown: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()

    @classmethod
    def of(cls, store: PreparedStore) -> "_Tally":
        tally = cls()
        tally.rows, tally.samples = store.num_rows, len(store)
        for reject in store.rejects:
            tally.add(reject.source, reject.id, reject.turn, reject.reason, reject.detail)
        return tally

    def add(self, source: str, row_id: str, turn: int, reason: str, detail: str) -> None:
        self.reasons[reason] += 1
        if reason in FILTERS:
            return
        self.bad += 1
        if self.bad <= SHOWN:
            which = f", turn {turn}" if turn else ""
            place = f"{printable(source)}: id {printable(row_id[:LONGEST_ID])}"
            self.shown.append(f"  {place}{which}: {reason}: {printable(detail)}")

    def count(self, refusal: Refusal) -> None:
        source = f"{refusal.file}:{refusal.line}"
        self.add(source, refusal.id, refusal.turn, refusal.reason, refusal.detail)


def _report_unread(tally: _Tally, report: Report) -> None:
    """Report the remarks, and one line that lists all keys that nothing reads.

    The user can see there when such a key was meant to have an effect.
    """
    for remark in tally.remarks:
        report(remark)
    if tally.unread:
        named = [
            f"{printable(what[:LONGEST_ID])} ({count:,})"
            for what, count in sorted(tally.unread.items(), key=lambda i: (-i[1], i[0]))[:SHOWN]
        ]
        more = len(tally.unread) - len(named)
        report(
            f"read by nothing, with the number of rows: {', '.join(named)}"
            + (f", and {more:,} more" if more else "")
        )


def _refuse_bad_rows(config: DataConfig, tally: _Tally) -> None:
    """Raises UsageError for bad rows with --bad-rows fail, and when there is no sample at all."""
    if config.bad_rows == "fail" and tally.bad:
        more = [f"  ... and {tally.bad - SHOWN:,} more"] if tally.bad > SHOWN else []
        raise UsageError(
            "\n".join(
                [
                    f"{tally.bad:,} bad among {tally.rows:,} rows "
                    "(--bad-rows skip goes on without them; docs/data.md has the reasons):",
                    *tally.shown,
                    *more,
                ]
            )
        )
    if not tally.rows:
        raise UsageError(f"--data {printable(' '.join(config.data))}: no rows")
    if not tally.samples:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in tally.reasons.most_common())
        raise UsageError(
            "\n".join(
                [
                    f"not one of {tally.rows:,} rows can be used: {counts} (docs/data.md)",
                    *tally.shown,
                ]
            )
        )


def _fill(
    folder: Path,
    config: DataConfig,
    sources: Sequence[Source],
    rules: Rules,
    made_from: Identity,
    progress: Progress | None,
) -> _Tally:
    """Convert every row into the folder's files."""
    total = _expected_rows(config, sources, made_from.inputs)
    workers = config.workers or len(os.sched_getaffinity(0))
    writer = StoreWriter(folder)
    tally = _Tally()
    try:
        rows = selected(sources, config.limit, config.shuffle_seed)
        for outcome in outcomes(rows, rules, workers):
            for piece in outcome.pieces:
                writer.add(piece)
            for refusal in outcome.refusals:
                writer.refuse(refusal)
                tally.count(refusal)
            tally.rows += outcome.rows
            tally.unread += outcome.unread
            tally.remarks += outcome.remarks
            if progress is not None:
                progress(tally.rows, None if total is None else max(total, tally.rows))
        tally.samples = writer.samples
        writer.close(tally.rows, made_from)
    except OSError as error:
        raise RunError(f"{error.filename or folder}: {error.strerror or error}") from error
    finally:
        writer.abandon()
    return tally


def _expected_rows(
    config: DataConfig, sources: Sequence[Source], inputs: Sequence[Mapping[str, Any]]
) -> int | None:
    """How many rows there are, for the progress bar; None when unknown. Blank lines count as rows."""
    newlines = {facts["path"]: facts["newlines"] for facts in inputs}
    total = 0
    for source in sources:
        count = source.count()
        if count is None and source.files[0].suffix in (".jsonl", ".ndjson"):
            count = newlines[str(source.files[0].resolve())]
        if count is None:
            return config.limit
        total += count
    return total if config.limit is None else min(total, config.limit)


@contextmanager
def _temporary_folder(output: Path) -> Generator[Path]:
    """A folder near the output, so that it can be renamed into it.

    At the end it is removed unless it was renamed, and so is a parent folder made for it that is
    empty.

    Raises:
        UsageError: the folder cannot be made.
    """
    output = output.expanduser().absolute()
    place = output / FOLDER if output.is_dir() else next(p for p in output.parents if p.is_dir())
    prefix = TEMPORARY if output.is_dir() else f".{output.name}{TEMPORARY}"
    made = not place.exists()
    try:
        place.mkdir(exist_ok=True)
        _remove_leftovers(place, prefix)
        folder = place / f"{prefix}{socket.gethostname()}-{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made and not any(place.iterdir()):
            place.rmdir()


def _remove_leftovers(place: Path, prefix: str) -> None:
    """Remove the temporary folders of processes on this machine that do not run any more."""
    mine = f"{prefix}{socket.gethostname()}-"
    for folder in place.glob(f"{mine}*"):
        pid = folder.name.removeprefix(mine)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path, report: Report) -> PreparedStore:
    """Rename the complete store into place and open it.

    When another job has put a store there first, that one is used: the name is the digest, so both
    hold the same samples.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not _is_whole(target):
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    except OSError as error:
        if not _is_whole(target):
            raise UsageError(f"--output {target}: cannot be written: {error.strerror}") from error
    store = PreparedStore.open(target)
    report(describe(store))
    return store


def _is_whole(folder: Path) -> bool:
    try:
        PreparedStore.open(folder)
    except RunError:
        return False
    return True


def describe(store: PreparedStore) -> str:
    """One line for the user: counts of rows, samples and tokens, and of rejections by reason."""
    counts = store.summary()
    text = (
        f"{counts['rows']:,} rows read = {counts['rows_sampled']:,} used + "
        f"{counts['rows_rejected']:,} rejected; {counts['samples']:,} samples, "
        f"{counts['tokens']:,} tokens, {counts['supervised']:,} supervised"
    )
    if counts["truncated"]:
        text += f"; {counts['truncated']:,} truncated"
    reasons = [
        f"{count:,} {name.removeprefix('rejected.')}"
        for name, count in counts.items()
        if name.startswith("rejected.")
    ]
    return text + (f"; rejected: {', '.join(reasons)}" if reasons else "")
