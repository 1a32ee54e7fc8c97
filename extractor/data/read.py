"""Files, folders and hub datasets to records, one at a time: nothing here holds a whole file.

| container | read as |
| --- | --- |
| .jsonl .ndjson, .gz and .zst of them | a record a line, split at \\n alone; not the blank ones |
| .json, .gz and .zst of it | an array, or a record a line |
| .parquet | a record a row |
| a folder with state.json or dataset_dict.json | a `save_to_disk` dataset (one split of a dict) |
| another folder | the files above in it, in name order |
| owner/name, owner/name:split | a dataset of the hub, through `datasets`; split: train |

Text must be UTF-8, with or without a byte order mark. A broken record becomes a RawRow that says
so; a container that cannot be read at all raises UsageError.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import zstandard

from extractor.data.rows import BadRow, RawRow
from extractor.errors import UsageError

BLOCK = 1 << 20
COMPRESSED = (".gz", ".zst")
LINE_FORMATS = (".jsonl", ".ndjson")
FORMATS = (*LINE_FORMATS, ".json", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]:%+-]+)?|[\w-]+")
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Record = tuple[int, bytes | dict[str, Any] | BadRow]


class Source(Protocol):
    """One container.

    Attributes:
        name: how messages call it.
        files: what its identity is made of, in order.
    """

    @property
    def name(self) -> str: ...
    @property
    def files(self) -> tuple[Path, ...]: ...

    def records(self) -> Iterator[Record]:
        """(line, record); the line counts from 1."""
        ...

    def count(self) -> int | None:
        """How many records, where that is known without reading them."""
        ...


def open_sources(data: Sequence[str]) -> list[Source]:
    """What --data names, in the order given. Raises UsageError for what is missing or unknown."""
    sources: list[Source] = []
    for item in data:
        path = Path(item).expanduser()
        if path.is_dir():
            sources += _folder(path)
        elif path.exists():
            sources.append(_file(path))
        elif _looks_like_hub_id(item):
            sources.append(HubSource.load(item))
        else:
            raise UsageError(f"--data {item}: no such file or folder")
    if not sources:
        raise UsageError("--data: nothing to read")
    return sources


def read_rows(sources: Iterable[Source]) -> Iterator[RawRow]:
    """Every record of every source, numbered from 0 across them."""
    number = 0
    for source in sources:
        for line, data in source.records():
            yield RawRow(number, source.name, line, data)
            number += 1


def _looks_like_hub_id(item: str) -> bool:
    path = item.partition(":")[0]
    return bool(HUB_ID.fullmatch(item)) and not _format(Path(path))[0]


def _format(path: Path) -> tuple[str, str]:
    """(format's suffix or "", compression's suffix or "")."""
    compression = path.suffix if path.suffix in COMPRESSED else ""
    kind = path.with_suffix("").suffix if compression else path.suffix
    return (kind if kind in FORMATS else "", compression)


def _file(path: Path) -> Source:
    kind, compression = _format(path)
    if not kind or (kind == ".parquet" and compression):
        raise UsageError(
            f"--data {path}: unknown format; wanted .jsonl, .json, .jsonl.gz, .jsonl.zst, "
            ".parquet, a save_to_disk folder, a folder of these, or a hub id"
        )
    if path.stat().st_size == 0:
        raise UsageError(f"--data {path}: the file is empty")
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
        raise UsageError(
            f"--data {path}: the folder holds no .jsonl, .json, .jsonl.gz, .jsonl.zst or .parquet"
        )
    return [_file(file) for file in files]


def _refuse_utf16(path: Path, compression: str) -> None:
    try:
        with _opened(path, compression) as handle:
            start = handle.read(64)
    except UNREADABLE as error:
        raise UsageError(f"--data {path}: {_why(error)}") from None
    if start.startswith(UTF16_MARKS) or b"\0" in start[:4]:
        raise UsageError(f"--data {path}: not UTF-8 (it is UTF-16 or UTF-32): convert it first")


@dataclass(frozen=True, slots=True)
class LinesSource:
    """A record a line."""

    name: str
    files: tuple[Path, ...]
    compression: str

    def count(self) -> int | None:
        return None

    def records(self) -> Iterator[Record]:
        line = 0
        try:
            with _opened(self.files[0], self.compression) as handle:
                for line, text in enumerate(handle, 1):
                    if line == 1:
                        text = text.removeprefix(codecs.BOM_UTF8)
                    if not text.isspace() and text:
                        yield line, text.rstrip(b"\r\n")
        except UNREADABLE as error:
            yield line + 1, _broken_container(error)


@dataclass(frozen=True, slots=True)
class JsonSource:
    """A JSON array, read an element at a time, or a file of that name with a record a line."""

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
        """An array of records. (A file of lines that are arrays has no record in it anyway.)"""
        with _opened(self.files[0], self.compression) as handle:
            while block := handle.read(BLOCK):
                start = block.removeprefix(codecs.BOM_UTF8).lstrip()
                if start:
                    return start.startswith(b"[")
        return False

    def _elements(self) -> Iterator[Record]:
        reader = _ArrayReader()
        try:
            with _opened(self.files[0], self.compression) as handle:
                while block := handle.read(BLOCK):
                    yield from reader.feed(block)
            yield from reader.close()
        except BadRow as bad:
            yield reader.line, bad
        except UNREADABLE as error:
            yield reader.line, _broken_container(error)


class _ArrayReader:
    """Elements of a JSON array as its bytes arrive.

    Attributes:
        line: where the next element begins.
    """

    def __init__(self) -> None:
        self.line = 1
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._wanted = "["  # what must come before the next element: [ or , or, at the end, nothing
        self._tried = (
            0  # an element that was incomplete at this length is tried at twice the length
        )

    def feed(self, block: bytes) -> Iterator[Record]:
        try:
            self._text += self._decode.decode(block)
        except UnicodeDecodeError:
            raise BadRow("not_utf8", "not UTF-8; nothing after it can be read") from None
        if len(self._text) >= 2 * self._tried:
            yield from self._parse(final=False)

    def close(self) -> Iterator[Record]:
        yield from self._parse(final=True)
        if self._wanted != "":
            raise BadRow("not_json", "not JSON: the array is cut off; nothing after it can be read")

    def _parse(self, final: bool) -> Iterator[Record]:
        position = 0
        self._tried = 0
        while True:
            position = self._skip(position)
            if position >= len(self._text):
                break
            character = self._text[position]
            if self._wanted == "":
                raise BadRow("not_json", "not JSON: there is more text after the array")
            if self._wanted == "[" or (self._wanted == "," and character in ",]"):
                self._wanted = {"[": "first", ",": "element", "]": ""}.get(character, "?")
                if self._wanted == "?":
                    raise BadRow("not_json", "not JSON: wanted [")
                position += 1
                continue
            if self._wanted == "first" and character == "]":
                self._wanted, position = "", position + 1
                continue
            if self._wanted == ",":
                raise BadRow("not_json", f"not JSON: wanted , or ], not {character!r}")
            try:
                element, end = self._json.raw_decode(self._text, position)
            except (ValueError, RecursionError) as error:
                if not final and isinstance(error, ValueError):
                    self._tried = len(self._text) - position
                    break  # more of it may come
                raise BadRow(
                    "not_json", f"not JSON: {error}; nothing after it can be read"
                ) from None
            if self._skip(end, quiet=True) >= len(self._text) and not final:
                break  # a number may go on in the next block
            yield self.line, element if isinstance(element, dict) else _not_an_object(element)
            self.line += self._text.count("\n", position, end)
            position, self._wanted = end, ","
        self._text = self._text[position:]

    def _skip(self, position: int, quiet: bool = False) -> int:
        end = _SPACE.match(self._text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        if not quiet:
            self.line += self._text.count("\n", position, end)
        return end


_SPACE = re.compile(r"[ \t\r\n]*")


def _not_an_object(value: Any) -> BadRow:
    return BadRow("not_an_object", f"is a {type(value).__name__}: wanted an object")


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A record a row, a row group's worth at a time."""

    name: str
    files: tuple[Path, ...]

    def count(self) -> int | None:
        return cast(int, self._open().metadata.num_rows)

    def records(self) -> Iterator[Record]:
        from pyarrow import ArrowException  # noqa: PLC0415

        line = 0
        try:
            for batch in self._open().iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    line += 1
                    yield line, record
        except (ArrowException, OSError) as error:
            yield line + 1, _broken_container(error)

    def _open(self) -> Any:
        import pyarrow.parquet  # noqa: PLC0415  (a tenth of a second that other inputs need not pay)
        from pyarrow import ArrowException  # noqa: PLC0415

        try:
            return pyarrow.parquet.ParquetFile(self.files[0])
        except (ArrowException, OSError) as error:
            raise UsageError(f"--data {self.name}: not a readable Parquet file: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class HubSource:
    """A `datasets` dataset, from the hub or from `save_to_disk`."""

    name: str
    files: tuple[Path, ...]
    dataset: Any

    @classmethod
    def load(cls, item: str) -> "HubSource":
        """Raises UsageError when there is no such dataset."""
        import datasets  # noqa: PLC0415  (seconds that other inputs need not pay)

        path, _, split = item.partition(":")
        try:
            dataset = datasets.load_dataset(path, split=split or "train")
        except (
            Exception
        ) as error:  # datasets and the hub raise a dozen kinds, with readable messages
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"--data {item}: no such file or folder, and the hub did not give it: {first}"
            ) from None
        return cls(item, tuple(Path(f["filename"]) for f in dataset.cache_files), dataset)

    def count(self) -> int | None:
        return len(self.dataset)

    def records(self) -> Iterator[Record]:
        line = 0
        for batch in self.dataset.with_format("arrow").iter(batch_size=256):
            for record in batch.to_pylist():
                line += 1
                yield line, record


def _saved(path: Path) -> Source:
    """A `save_to_disk` folder; of a dict of splits, train or the only one."""
    import datasets  # noqa: PLC0415

    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if "train" not in splits and len(splits) != 1:
            raise UsageError(f"--data {path}: wanted one of its splits: {', '.join(splits)}")
        path = path / ("train" if "train" in splits else splits[0])
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UsageError(f"--data {path}: not a readable save_to_disk folder: {error}") from None
    return HubSource(str(path), tuple(sorted(f for f in path.iterdir() if f.is_file())), dataset)


# ---- compression

UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError)


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _broken_container(error: BaseException) -> BadRow:
    return BadRow("unreadable", f"cannot be read on: {_why(error)}")


class _ZstdReader:
    """Lines and blocks of a .zst file. zstandard's own stream reader takes a cut file for a whole
    one; this one raises EOFError."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._buffer = b""
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False

    def _more(self) -> bytes:
        """The next decompressed bytes; empty at the end of the file. Raises EOFError, ZstdError."""
        while True:
            rest = self._stream.unused_data if self._stream.eof else b""
            block = rest or self._raw.read(BLOCK)
            if not block:
                if self._begun and not self._stream.eof:
                    raise EOFError("the compressed file is cut off")
                return b""
            if self._stream.eof:
                self._stream = zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            if data := self._stream.decompress(block):
                return data

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and (more := self._more()):
            self._buffer += more
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def __iter__(self) -> Iterator[bytes]:
        while True:
            lines = self._buffer.split(b"\n")
            self._buffer = lines.pop()
            for line in lines:
                yield line + b"\n"
            parts = [self._buffer]
            while more := self._more():
                parts.append(more)
                if b"\n" in more:
                    break
            self._buffer = b"".join(parts)
            if b"\n" not in self._buffer:
                if self._buffer:
                    yield self._buffer
                return


@contextmanager
def _opened(path: Path, compression: str) -> Generator[Any]:
    """A binary file to read or to iterate over lines, decompressed."""
    with gzip.open(path) if compression == ".gz" else path.open("rb") as handle:
        yield _ZstdReader(handle) if compression == ".zst" else handle
