"""`extractor show`: one row in the terminal, its samples with the supervised text coloured, or why it
has none.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from extractor.config import DataConfig, ShowConfig
from extractor.errors import EXIT_FAILED, EXIT_OK, UsageError
from extractor.model import ModelSpec
from extractor.output import run_json
from extractor.output.folder import Folder, refuse_links
from extractor.output.journal import read_rejects
from extractor.prepared.store import INFO, PreparedStore, as_reject, as_sample
from extractor.printable import printable
from extractor.records import Reject, Sample
from extractor.rows.prepare import FOLDER
from extractor.rows.read import open_sources, read_rows
from extractor.rows.tokenizer import load_rules
from extractor.rows.work import outcomes

COLOUR, PLAIN = "\033[30;42m", "\033[0m"
Write = Callable[[str], None]


def show(config: ShowConfig) -> int:
    """Returns 0, or 1 for a rejected row; raises UsageError."""
    data = None
    if config.model is not None:
        same = {f.name for f in dataclasses.fields(DataConfig)} & {
            f.name for f in dataclasses.fields(ShowConfig)
        }
        values = {name: getattr(config, name) for name in same}
        data = DataConfig(**values, data=(config.target,), output=Path("unused"), bad_rows="skip")
    return show_row(
        config.target,
        config.row,
        write=lambda text: print(text),  # noqa: T201
        config=data,
        ids=config.ids,
        colour=sys.stdout.isatty(),
    )


def show_row(
    target: Path | str,
    row: int,
    *,
    write: Write,
    config: DataConfig | None = None,
    ids: bool = False,
    colour: bool = True,
) -> int:
    """Show a row of an output folder, of a prepared store, or of a data file.

    Args:
        target: an output folder or a prepared store; or rows, which are prepared as config says.
        config: model and settings; needed for rows only. For an output folder its model, when
            given, is where the tokenizer comes from instead of the path that the store remembers.
        ids: a line a token too.
        colour: mark supervised text by colour; otherwise by brackets.

    Returns:
        0, or 1 when the row was rejected.

    Raises:
        UsageError: there is no such row, or nothing to show it from.
    """
    path = Path(target).expanduser()
    kept = _kept(path, row)
    if kept is not None:
        found, rejects, rows = kept.samples, kept.rejects, kept.rows
        model = config.model if config is not None else kept.model
        if row >= rows and not found and not rejects:
            raise UsageError(f"--row {row}: {printable(str(target))} has {rows:,} rows")
    elif config is not None:
        found, rejects = _converted(str(target), row, config)
        model = config.model
    else:
        raise UsageError(
            f"{printable(str(target))}: no prepared samples in it; to show a data file give --model"
        )
    if not found and not rejects:
        raise UsageError(f"--row {row}: not among the rows that were used (--limit)")
    if found:
        decode = _decoder(model, config is not None and config.trust_remote_code)
        for sample in found:
            write(_heading(sample))
            write(_coloured(sample, decode, colour))
            if ids:
                for line in _token_lines(sample, decode):
                    write(line)
    for reject in rejects:
        turn = f", turn {reject.turn}" if reject.turn else ""
        write(
            f"row {reject.row}{turn}, id {printable(reject.id)}, {printable(reject.source)}: rejected"
        )
        write(f"{printable(reject.reason)}: {printable(reject.detail)}")
    return EXIT_OK if found else EXIT_FAILED


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a folder says of a row: its samples and rejects, how many rows there are, the model."""

    samples: list[Sample]
    rejects: list[Reject]
    rows: int
    model: str


def _kept(path: Path, row: int) -> _Kept | None:
    """None for what is no folder of ours. Raises UsageError and RunError when it is damaged."""
    if not path.is_dir():
        return None
    refuse_links(path)
    store = _store(path)
    if store is not None:
        samples = [store.sample(index) for index in store.find(row)]
        rejects = [reject for reject in store.rejects if reject.row == row]
        if store.path != path:
            rejects += [reject for reject in _run_rejects(path, row) if reject not in rejects]
        return _Kept(samples, rejects, store.num_rows, store.model)
    if run_json.newest(path) is None:
        return None
    folder = Folder.open(path)
    samples = [folder.load(entry)[0] for entry in folder.entries if entry.row == row]
    rows = folder.numbering.rows
    end = int(rows[-1]) + 1 if len(rows) else 0
    return _Kept(samples, list(_run_rejects(path, row)), end, folder.run.model.path)


def _store(path: Path) -> PreparedStore | None:
    """The prepared store itself, that of the folder's run, or the newest one of a folder that has no
    run yet; None where there is none."""
    if (path / INFO).exists():
        return PreparedStore.open(path)
    run = run_json.newest(path)
    if run is not None:
        there = run.prepared is not None and (path / run.prepared).is_dir()
        return PreparedStore.open(path / str(run.prepared)) if there else None
    infos = list((path / FOLDER).glob(f"*/{INFO}"))
    if not infos:
        return None
    return PreparedStore.open(max(infos, key=lambda info: info.lstat().st_mtime).parent)


def _run_rejects(path: Path, row: int) -> Iterator[Reject]:
    """What the run itself rejected, such as states that are not finite."""
    return (reject for reject in read_rejects(path) if reject.row == row)


def _converted(target: str, row: int, config: DataConfig) -> tuple[list[Sample], list[Reject]]:
    """Convert one row of a data file, now."""
    rules = load_rules(config, ModelSpec.read(config.model))
    for raw in read_rows(open_sources([target])):
        if raw.number == row:
            (outcome,) = outcomes(iter([raw]), rules, 1)
            return [as_sample(piece) for piece in outcome.pieces], [
                as_reject(refusal) for refusal in outcome.refusals
            ]
    raise UsageError(f"--row {row}: {printable(target)} has fewer rows")


def _decoder(model: str, trust_remote_code: bool) -> Callable[[list[int]], str]:
    from transformers import AutoTokenizer  # noqa: PLC0415  (a rejected row needs no tokenizer)

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"--model {printable(model)}: the tokenizer cannot be loaded: {printable(str(error))}"
        ) from error

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


def _heading(sample: Sample) -> str:
    turn = f", turn {sample.turn}" if sample.turn else ""
    return (
        f"row {sample.row}{turn}, id {printable(sample.id)}, {printable(sample.source)}: "
        f"{len(sample):,} tokens, "
        f"{int(sample.loss_mask.sum()):,} supervised"
    )


def _coloured(sample: Sample, decode: Callable[[list[int]], str], colour: bool) -> str:
    """The whole text; a run of tokens is decoded at once, for a character can be several tokens."""
    before, after = (COLOUR, PLAIN) if colour else ("[[", "]]")
    edges = torch.nonzero(torch.diff(sample.loss_mask.int())).flatten() + 1
    pieces: list[str] = []
    for ids, mask in zip(
        torch.tensor_split(sample.input_ids, edges),
        torch.tensor_split(sample.loss_mask, edges),
        strict=True,
    ):
        text = printable(decode(ids.tolist()), keep="\n\t")
        pieces.append(f"{before}{text}{after}" if mask[0] else text)
    return "".join(pieces)


def _token_lines(sample: Sample, decode: Callable[[list[int]], str]) -> Iterator[str]:
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for position, (token, mark) in enumerate(pairs):
        yield f"{position:>7} {token:>7} {'*' if mark else ' '} {decode([token])!r}"
