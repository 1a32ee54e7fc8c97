"""Reads records, one at a time, from files, folders and hub datasets. Nothing holds a whole file.

| container | read as |
| --- | --- |
| .jsonl .ndjson, .gz and .zst of them | one record per line, split at \\n only, without blank lines |
| .json, .gz and .zst of it | an array, or one record per line |
| .parquet | one record per row |
| a folder with state.json or dataset_dict.json | a `save_to_disk` dataset (one split of a dict) |
| another folder | the files of these kinds in it, in name order |
| owner/name, owner/name:split | a dataset of the hub, through `datasets`; split: train |

Text must be UTF-8, with or without a byte order mark. A broken record becomes a RawRow whose data is
a BadRow. A container that cannot be read at all raises UsageError.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from extractor.errors import UsageError
from extractor.printable import printable
from extractor.rows.arrays import ArrayReader
from extractor.rows.bounds import ROW_BYTES, too_many_bytes
from extractor.rows.calls import without_nulls
from extractor.rows.compressed import BLOCK, UNREADABLE, broken, lines, opened, why
from extractor.rows.records import BadRow, RawRow

COMPRESSED = (".gz", ".zst")
LINE_FORMATS = (".jsonl", ".ndjson")
FORMATS = (*LINE_FORMATS, ".json", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]:%+-]+)?")

# The folders of an output folder, and the files by which an output folder or a store is recognized.
OUR_FOLDERS = ("samples", "journal", "prepared", "vocab")
OUR_FILES = ("run.json", "run-*-of-*.json", "store.json", "prepared/*/store.json")
ROWS = 256  # rows of a Parquet file or a dataset that are read at a time
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# (line from 1, record, approximate size in bytes of a parsed record, else 0)
Record = tuple[int, bytes | dict[str, Any] | BadRow, int]


class Source(Protocol):
    """One container.

    Attributes:
        name: what messages call it.
        files: the files whose bytes are its identity, in order.
    """

    @property
    def name(self) -> str: ...
    @property
    def files(self) -> tuple[Path, ...]: ...

    def records(self) -> Iterator[Record]:
        """(line, record, size); the line counts from 1."""
        ...

    def count(self) -> int | None:
        """How many records it has, or None when that is not known without reading them."""
        ...


def open_sources(data: Sequence[str]) -> list[Source]:
    """The sources that --data names, in the order given.

    Raises:
        UsageError: a name is missing, of an unknown format, or cannot be read.
    """
    check_names(data)
    sources: list[Source] = []
    for item in data:
        path = Path(item).expanduser()
        if path.is_dir():
            sources += _folder(path)
        elif path.exists():
            sources.append(_file(path))
        else:
            sources.append(HubSource.load(item))
    if not sources:
        raise UsageError("--data: nothing to read")
    return sources


def check_names(data: Sequence[str]) -> None:
    """Raises UsageError for a name in --data that cannot be a source of rows.

    It only looks for the names on disk. No rows are read, nothing is imported and no hub is asked,
    so that a mistyped name is reported at once.
    """
    for item in data:
        path = Path(item).expanduser()
        try:
            exists = path.exists()
        except (OSError, ValueError) as error:  # the name is too long, or holds a NUL
            raise _refused(item, str(error)) from None
        if not exists and not _looks_like_hub_id(item):
            raise _refused(item, "no such file or folder")
        if exists and not (path.is_file() or path.is_dir()):
            raise _refused(item, "not a file or a folder (a pipe or a device cannot be read twice)")
        if path.is_dir() and (ours := _our_folder(path)):
            raise _refused(
                item,
                f"{ours} is a folder that this program wrote: wanted rows, such as those it was "
                "made from",
            )


def _our_folder(path: Path) -> Path | None:
    """The output folder or prepared store that this path is, or lies in; None for any other path."""
    path = path.absolute()
    for folder in (path, path.parent, path.parent.parent):
        inside = folder == path or path.relative_to(folder).parts[0] in OUR_FOLDERS
        if inside and any(_is_ours(file) for name in OUR_FILES for file in folder.glob(name)):
            return folder
    return None


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as handle:
            start = handle.read(1 << 16)
    except OSError:
        return False
    return b'"fingerprint"' in start or b'"digest"' in start


def _refused(item: object, text: str) -> UsageError:
    return UsageError(f"--data {printable(str(item))}: {printable(text)}")


def read_rows(sources: Iterable[Source]) -> Iterator[RawRow]:
    """Every record of every source. The numbers count from 0 across all sources."""
    number = 0
    for source in sources:
        for line, data, size in source.records():
            yield RawRow(number, source.name, line, data, size)
            number += 1


def _looks_like_hub_id(item: str) -> bool:
    path = item.partition(":")[0]
    owner = path.partition("/")[0]
    return bool(HUB_ID.fullmatch(item)) and not _format(Path(path))[0] and not Path(owner).is_dir()


def _format(path: Path) -> tuple[str, str]:
    """(suffix of the format or "", suffix of the compression or "")."""
    compression = path.suffix if path.suffix in COMPRESSED else ""
    kind = path.with_suffix("").suffix if compression else path.suffix
    return (kind if kind in FORMATS else "", compression)


def _file(path: Path) -> Source:
    kind, compression = _format(path)
    if not kind or (kind == ".parquet" and compression):
        raise _refused(
            path,
            "unknown format; wanted .jsonl, .json, .jsonl.gz, .jsonl.zst, "
            ".parquet, a save_to_disk folder, a folder of these, or a hub id",
        )
    if path.stat().st_size == 0:
        raise _refused(path, "the file is empty")
    if kind == ".parquet":
        return ParquetSource(str(path), (path,))
    _refuse_utf16(path, compression)
    if kind == ".json":
        return JsonSource(str(path), (path,), compression)
    return LinesSource(str(path), (path,), compression)


def _folder(path: Path) -> list[Source]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return [_saved(path)]
    shards = (f for f in path.iterdir() if f.is_file() and not f.name.startswith("."))
    files = sorted(f for f in shards if _format(f)[0])
    if not files:
        raise _refused(path, "the folder holds no .jsonl, .json, .jsonl.gz, .jsonl.zst or .parquet")
    return [_file(file) for file in files]


def _refuse_utf16(path: Path, compression: str) -> None:
    try:
        with opened(path, compression) as handle:
            start = handle.read(64)
    except UNREADABLE as error:
        raise _refused(path, why(error)) from None
    if start.startswith(UTF16_MARKS) or b"\0" in start[:4]:
        raise _refused(path, "not UTF-8 (it is UTF-16 or UTF-32): convert it first")


@dataclass(frozen=True, slots=True)
class LinesSource:
    """A text file with one record per line."""

    name: str
    files: tuple[Path, ...]
    compression: str

    def count(self) -> int | None:
        return None

    def records(self) -> Iterator[Record]:
        try:
            with opened(self.files[0], self.compression) as handle:
                for number, line in lines(handle):
                    if number == 1 and isinstance(line, bytes):
                        line = line.removeprefix(codecs.BOM_UTF8)
                        if not line or line.isspace():
                            continue
                    yield number, line, 0
        except OSError as error:
            yield 1, broken(error), 0


@dataclass(frozen=True, slots=True)
class JsonSource:
    """A .json file: an array that is read element by element, or one record per line."""

    name: str
    files: tuple[Path, ...]
    compression: str

    def count(self) -> int | None:
        return None

    def records(self) -> Iterator[Record]:
        if self._is_array():
            yield from self._elements()
        else:
            yield from LinesSource(self.name, self.files, self.compression).records()

    def _is_array(self) -> bool:
        """Whether the file begins with [ and is read as an array.

        A file of lines that are arrays begins so too, but holds no record in any case.
        """
        with opened(self.files[0], self.compression) as handle:
            while block := handle.read(BLOCK):
                start = block.removeprefix(codecs.BOM_UTF8).lstrip()
                if start:
                    return start.startswith(b"[")
        return False

    def _elements(self) -> Iterator[Record]:
        reader = ArrayReader()
        try:
            with opened(self.files[0], self.compression) as handle:
                while block := handle.read(BLOCK):
                    for line, element in reader.feed(block):
                        yield line, element, 0
            for line, element in reader.close():
                yield line, element, 0
        except BadRow as bad:
            yield reader.line, bad, 0
        except UNREADABLE as error:
            yield reader.line, broken(error), 0


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A Parquet file with one record per row, read a few rows at a time."""

    name: str
    files: tuple[Path, ...]

    def count(self) -> int | None:
        return cast(int, self._open().metadata.num_rows)

    def records(self) -> Iterator[Record]:
        from pyarrow import ArrowException  # noqa: PLC0415

        line = 0
        try:
            for batch in self._batches():
                yield from _arrow_records(batch, line + 1)
                line += len(batch)
        except (ArrowException, OSError) as error:
            yield line + 1, broken(error), 0

    def _batches(self) -> Iterator[Any]:
        """Up to ROWS rows at a time, and fewer in a row group whose rows are large."""
        file = self._open()
        for group in range(file.metadata.num_row_groups):
            facts = file.metadata.row_group(group)
            rows = max(facts.num_rows * ROW_BYTES // max(facts.total_byte_size, 1), 1)
            yield from file.iter_batches(batch_size=min(rows, ROWS), row_groups=[group])

    def _open(self) -> Any:
        import pyarrow.parquet  # noqa: PLC0415  (costs a tenth of a second; other inputs skip it)
        from pyarrow import ArrowException  # noqa: PLC0415

        try:
            return pyarrow.parquet.ParquetFile(self.files[0])
        except (ArrowException, OSError) as error:
            raise _refused(self.name, f"not a readable Parquet file: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class HubSource:
    """A dataset of the `datasets` library, from the hub or from a `save_to_disk` folder."""

    name: str
    files: tuple[Path, ...]
    dataset: Any

    @classmethod
    def load(cls, item: str) -> "HubSource":
        """The hub's dataset owner/name or owner/name:split. Raises UsageError when there is none."""
        import datasets  # noqa: PLC0415  (costs seconds; other inputs skip it)

        path, _, split = item.partition(":")
        try:
            dataset = datasets.load_dataset(path, split=split or "train")
        except Exception as error:  # datasets and the hub raise many types, with readable messages
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise _refused(
                item, f"no such file or folder, and the hub did not give it: {first}"
            ) from None
        return cls(item, tuple(Path(f["filename"]) for f in dataset.cache_files), dataset)

    def count(self) -> int | None:
        return len(self.dataset)

    def records(self) -> Iterator[Record]:
        line = 0
        for batch in self.dataset.with_format("arrow").iter(batch_size=ROWS):
            yield from _arrow_records(batch, line + 1)
            line += len(batch)


def _arrow_records(batch: Any, line: int) -> Iterator[Record]:
    """The rows of a batch or a table as records, without nulls at any depth.

    An Arrow struct has the keys of all rows, so most of its nulls are keys that the row does not have.
    """
    for place in range(len(batch)):
        row = batch.slice(place, 1)
        if row.nbytes > ROW_BYTES:
            yield line + place, too_many_bytes("record"), 0
        else:
            (record,) = row.to_pylist()
            yield line + place, without_nulls(record), row.nbytes


def _saved(path: Path) -> Source:
    """A `save_to_disk` folder. Of a dict of splits it takes `train`, or the only split."""
    import datasets  # noqa: PLC0415

    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if "train" not in splits and len(splits) != 1:
            raise _refused(path, f"wanted one of its splits: {', '.join(splits)}")
        path = path / ("train" if "train" in splits else splits[0])
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _refused(path, f"not a readable save_to_disk folder: {error}") from None
    return HubSource(str(path), tuple(sorted(f for f in path.iterdir() if f.is_file())), dataset)


def chosen_rows(count: int, limit: int, seed: int) -> np.ndarray:
    """The numbers of the chosen rows, int64 [min(limit, count)], ascending.

    They are the rows with the smallest keys. A key is the row's number and the seed, mixed by the
    finalizer of splitmix64. It does not depend on a library's random generator, so the choice is the
    same on every machine and in every version.
    """
    with np.errstate(over="ignore"):
        key = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        key += np.uint64(seed % (1 << 64)) * np.uint64(0xD1342543DE82EF95)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key ^= key >> np.uint64(31)
    return np.sort(np.argsort(key, kind="stable")[:limit])


def selected(sources: Sequence[Source], limit: int | None, seed: int | None) -> Iterator[RawRow]:
    """The rows to use, in order. Each keeps the number that it has in the whole input.

    Args:
        limit: how many rows, or None for all.
        seed: None takes the first rows; a seed chooses rows from the whole input, which is read twice.
    """
    if limit is None:
        yield from read_rows(sources)
        return
    if seed is None:
        for _, row in zip(range(limit), read_rows(sources), strict=False):
            yield row
        return
    total = sum(1 for _ in read_rows(sources))
    wanted = iter(chosen_rows(total, limit, seed).tolist())
    following = next(wanted, None)
    for row in read_rows(sources):
        if row.number == following:
            yield row
            following = next(wanted, None)
            if following is None:
                return
