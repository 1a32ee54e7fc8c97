"""Reads a file, decompressed, in blocks and in lines of a bounded length.

So a small file that decompresses to a huge one, or to one huge line, takes no more memory than any
other file.
"""

import gzip
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from extractor.rows.bounds import ROW_BYTES, too_many_bytes
from extractor.rows.records import BadRow

BLOCK = 1 << 20
# Compressed bytes that zstd is given at a time: 256 can become 8 MB, and 1 MiB can become 32 GB.
SLICE = 256
UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError)


@contextmanager
def opened(path: Path, compression: str) -> Generator[Any]:
    """A binary file, opened for reading and decompressed.

    Args:
        compression: ".gz", ".zst" or "".
    """
    with gzip.open(path) if compression == ".gz" else path.open("rb") as handle:
        yield io.BufferedReader(_ZstdReader(handle), BLOCK) if compression == ".zst" else handle


def lines(handle: Any) -> Iterator[tuple[int, bytes | BadRow]]:
    """(number from 1, line) of each line that is not blank. Only a newline ends a line.

    Instead of the line, a BadRow stands for a line that is too long, and for the place from which
    the file cannot be read.
    """
    number, parts, size = 1, list[bytes](), 0
    try:
        while block := handle.read(BLOCK):
            if not size and block.isspace():  # fast path: a file may hold millions of blank lines
                number += block.count(b"\n")
                continue
            *ends, rest = block.split(b"\n")
            for end in ends:
                if size + len(end) > ROW_BYTES:
                    yield number, too_many_bytes("line")
                elif (line := b"".join([*parts, end]).rstrip(b"\r")) and not line.isspace():
                    yield number, line
                number, parts, size = number + 1, [], 0
            size += len(rest)
            parts = [*parts, rest] if size <= ROW_BYTES else []
        if size > ROW_BYTES:
            yield number, too_many_bytes("line")
        elif (line := b"".join(parts)) and not line.isspace():
            yield number, line.rstrip(b"\r")
    except UNREADABLE as error:
        yield number, broken(error)


def broken(error: BaseException) -> BadRow:
    return BadRow("unreadable", f"cannot be read on: {why(error)}")


def why(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a .zst file. Raises EOFError for a file that is cut off.

    zstandard's own stream reader takes a file that is cut off for a complete one.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._block, self._at = b"", 0
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._ready:
            self._ready = memoryview(self._more())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bytes:
        """The next decompressed bytes; empty at the end of the file. Raises EOFError, ZstdError."""
        # A .zst file may hold several frames. Bytes that follow the end of one begin the next.
        while True:
            piece = self._stream.unused_data if self._stream.eof else b""
            piece = piece or self._next_slice()
            if not piece:
                if self._begun and not self._stream.eof:
                    raise EOFError("the compressed file is cut off")
                return b""
            if self._stream.eof:
                self._stream = zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            if data := self._stream.decompress(piece):
                return data

    def _next_slice(self) -> bytes:
        if self._at >= len(self._block):
            self._block, self._at = self._raw.read(BLOCK), 0
        piece = self._block[self._at : self._at + SLICE]
        self._at += len(piece)
        return piece
