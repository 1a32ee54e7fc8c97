"""Containers."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from extractor.errors import UsageError
from extractor.rows.read import check_names, open_sources, read_rows
from extractor.rows.records import BadRow, RawRow

ROWS = [{"id": n, "text": "a\u2028b\x85 \x0c" + "x" * n} for n in range(5)]
LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


def read(*paths: Path) -> list[RawRow]:
    return list(read_rows(open_sources([str(path) for path in paths])))


def parsed(rows: list[RawRow]) -> list[Any]:
    return [json.loads(row.data) if isinstance(row.data, bytes) else row.data for row in rows]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_lines_are_split_at_newlines_alone(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", LINES))
    assert parsed(rows) == ROWS
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]


def test_blank_lines_bom_and_carriage_returns(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"id": 0}\r\n\r\n  \n{"id": 1}\r\n\n{"id": 2}'
    rows = read(write(tmp_path / "a.jsonl", data))
    assert parsed(rows) == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert [(row.number, row.line) for row in rows] == [(0, 1), (1, 4), (2, 6)]


def test_gzip_and_zstd(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor()
    frames = compressor.compress(LINES[:100]) + compressor.compress(LINES[100:])
    streamed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(streamed, closefd=False) as writer:
        writer.write(LINES)
    for path, data in (
        (tmp_path / "a.jsonl.gz", gzip.compress(LINES)),
        (tmp_path / "a.jsonl.zst", frames),
        (tmp_path / "b.jsonl.zst", streamed.getvalue()),
        (tmp_path / "a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        (tmp_path / "a.json.zst", compressor.compress(json.dumps(ROWS).encode())),
    ):
        assert parsed(read(write(path, data))) == ROWS, path


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_cut_compressed_file_is_named(suffix: str, tmp_path: Path) -> None:
    data = b"".join(b'{"id": "%d"}\n' % (n * 7919**3) for n in range(20_000))
    whole = gzip.compress(data) if suffix == "gz" else zstandard.ZstdCompressor().compress(data)
    rows = read(write(tmp_path / f"a.jsonl.{suffix}", whole[: len(whole) * 3 // 4]))
    last = rows[-1].data
    assert isinstance(last, BadRow) and last.reason == "unreadable"


def test_long_lines_across_blocks_of_zstd(tmp_path: Path) -> None:
    rows = [{"id": n, "text": "y" * (900_000 * (n % 3))} for n in range(7)]
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    path = write(tmp_path / "a.jsonl.zst", zstandard.ZstdCompressor().compress(data))
    assert parsed(read(path)) == rows


@pytest.mark.parametrize("indent", [None, 2])
def test_arrays(indent: int | None, tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "big", "text": "z" * 3_000_000}, {"id": "after", "n": [1, {"a": "]"}]}]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    assert parsed(read(write(tmp_path / "a.json", text.encode()))) == rows
    assert parsed(read(write(tmp_path / "b.json", b"\xef\xbb\xbf " + text.encode()))) == rows


def test_array_lines_are_where_elements_begin(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.json", b'[\n{"id": 0},\n\n{"id":\n1}, {"id": 2}\n]\n'))
    assert [row.line for row in rows] == [2, 4, 5]


@pytest.mark.parametrize(
    ("data", "good", "reason"),
    [
        (b'[{"id": 0}, {"id": 1}, {"id": ', 2, "not_json"),
        (b'[{"id": 0}, {"id": 1}', 2, "not_json"),
        (b'[{"id": 0}, 7, {"id": 1}]', 2, "not_an_object"),
        (b'[{"id": 0}, {"id": 1}] x', 2, "not_json"),
        (b'[{"id": 0} {"id": 1}]', 1, "not_json"),
        (b'[{"id": 0}, {"id": "\xff"}]', 0, "not_utf8"),
    ],
)
def test_broken_arrays(data: bytes, good: int, reason: str, tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.json", data))
    bad = [row.data.reason for row in rows if isinstance(row.data, BadRow)]
    assert bad == [reason]
    assert len(rows) - 1 == good


def test_an_array_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever is lost, it is named."""
    data = json.dumps([{"a": 12}, {"b": "é"}], ensure_ascii=False).encode()
    for cut in range(1, len(data)):
        rows = read(write(tmp_path / "a.json", data[:cut]))
        assert isinstance(rows[-1].data, BadRow), data[:cut]


def test_json_with_a_record_a_line(tmp_path: Path) -> None:
    assert parsed(read(write(tmp_path / "a.json", LINES))) == ROWS


def test_parquet_and_save_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "dict"))
    for name in ("a.parquet", "saved", "dict"):
        sources = open_sources([str(tmp_path / name)])
        assert parsed(list(read_rows(sources))) == ROWS
        assert sources[0].count() == 5 and all(path.is_file() for path in sources[0].files)


def test_a_folder_in_name_order_and_numbers_across_files(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    write(tmp_path / "f" / "b.jsonl", b'{"id": 2}\n')
    write(tmp_path / "f" / "a.json", b'[{"id": 0}, {"id": 1}]')
    write(tmp_path / "f" / "README.md", b"no rows")
    write(tmp_path / "f" / ".hidden.jsonl", b"no rows")
    write(tmp_path / "z.jsonl", b'{"id": 3}\n')
    rows = read(tmp_path / "f", tmp_path / "z.jsonl")
    assert parsed(rows) == [{"id": n} for n in range(4)]
    assert [row.number for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", '{"id": 1}'.encode("utf-16"), "not UTF-8"),
        ("a.jsonl", '{"id": 1}'.encode("utf-16-le"), "not UTF-8"),
        ("a.jsonl.gz", gzip.compress('{"id": 1}'.encode("utf-16")), "not UTF-8"),
        ("a.jsonl.gz", b"no gzip", "Not a gzipped file"),
        ("a.jsonl.zst", b"no zstd", "frame header|[Uu]nknown"),
        ("a.parquet", b"no parquet", "not a readable Parquet file"),
        ("a.csv", b"a,b", "unknown format"),
        ("a.pkl", b"\x80\x04.", "unknown format"),
    ],
)
def test_refused(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name}: .*({message})"):
        read(write(tmp_path / name, data))


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_sources([str(tmp_path / "no.jsonl")])
    with pytest.raises(UsageError, match="no such file"):
        open_sources(["data/train.jsonl"])
    with pytest.raises(UsageError, match="the folder holds no"):
        open_sources([str(tmp_path)])


@pytest.mark.parametrize(
    "name", ["nosuchfile", "no/such/file", "data/train.jsonl", "x" * 5000, "\0"]
)
def test_a_name_that_cannot_be_rows_is_told_at_once(name: str) -> None:
    """Nothing is imported that takes time, and no hub is asked."""
    code = (
        "import sys\nfrom extractor.rows.read import open_sources\nfrom extractor.errors import "
        "UsageError\ntry:\n    open_sources([sys.stdin.read()])\nexcept UsageError as error:\n"
        "    print(error)\nprint(sorted({'datasets', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=name, capture_output=True, text=True, check=True
    )
    said, imported = done.stdout.splitlines()
    assert said.startswith("--data ") and imported == "[]"


def test_a_folder_that_is_there_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"mine/rows: no such file or folder$"):
        check_names(["mine/rows"])
    check_names(["owner/rows", "owner/rows:train[:10]"])


def test_a_folder_of_this_program_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("samples/00000", "journal", "prepared/0123"):
        (out / name).mkdir(parents=True)
    write(out / "rejects.jsonl", b"{}\n")
    write(out / "journal" / "0000.jsonl", b"{}\n")
    write(out / "prepared" / "0123" / "store.json", b'{"schema": 1, "digest": "x"}')
    for run in (b"", b'{"schema": 1, "fingerprint": "x"}'):
        if run:
            write(out / "run.json", run)
        for path in (out, out / "samples", out / "samples" / "00000", out / "journal"):
            with pytest.raises(UsageError, match=f"{out} is a folder that this program wrote"):
                check_names([str(path)])
    write(tmp_path / "a.jsonl", b'{"id": 1}\n')  # rows may stand beside it
    write(tmp_path / "run.json", b'{"id": 1}')  # or be called so
    assert len(read(tmp_path)) == 2


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="not a file or a folder"):
        read(tmp_path / "a.jsonl")


def test_names_are_shown_without_their_control_characters(tmp_path: Path) -> None:
    name = "a\n\x1b[31mextractor: done"
    for missing in (name, f"{name}.jsonl"):
        with pytest.raises(UsageError) as refused:
            read(tmp_path / missing)
        assert str(refused.value).isprintable() and "\\x1b[31m" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        read(write(tmp_path / f"{name}.csv", b"x"))
    assert str(refused.value).isprintable()


def test_nulls_of_arrow_are_missing_keys(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"id": "a", "calls": [{"name": "f", "arguments": {"x": 1}}], "note": None},
        {"id": "b", "calls": [{"name": "g", "arguments": {"y": ["z", None], "deep": {"n": 2}}}]},
        {"id": "c", "calls": [{"name": "h", "arguments": {}}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    del rows[0]["note"]
    assert parsed(read(tmp_path / "a.parquet")) == rows


@pytest.mark.parametrize("verb", ["extract", "prepare", "show"])
def test_a_verb_that_is_given_a_wrong_name_answers_before_it_imports(
    verb: str, tmp_path: Path
) -> None:
    flags = ["nosuchfile"] if verb == "show" else ["--data=nosuchfile", f"--output={tmp_path}/out"]
    code = (
        "import sys\nfrom extractor import cli\ntry:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, verb, "--model=nowhere", *flags],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr == "extractor: --data nosuchfile: no such file or folder\n"
