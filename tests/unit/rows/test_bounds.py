"""What a row may cost: each one that costs more is rejected by name, and the others are not."""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

from extractor.errors import RunError
from extractor.rows import arrays, bounds, compressed, read, work
from extractor.rows import converter as sample
from extractor.rows.converter import Converter, Outcome
from extractor.rows.masks import render
from extractor.rows.read import open_sources, read_rows
from extractor.rows.records import BadRow, RawRow
from tests.support.data_kit import Make, chat, convert, reasons

GOOD = {"id": "good", "text": "x"}
CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
LOOP = (
    "{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{%- endfor %}{% endfor %}{% endfor -%}"
)
WHEN = "{%- if 'BOOM' in messages[0].content -%}DO{%- endif -%}" + CHATML


def bounded(converter: Make, source: str) -> Converter:
    return Converter(converter(source=source).rules, bounds.cpu_bounded)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "ROW_SECONDS", 0.3)
    monkeypatch.setattr(render, "PROBE_SECONDS", 0.3)


def talk(question: str) -> dict[str, Any]:
    return chat(("user", question), ("assistant", "Yo"))


@pytest.mark.usefixtures("quick")
def test_a_template_that_does_not_end_on_one_row(converter: Make) -> None:
    made = bounded(converter, WHEN.replace("DO", LOOP))
    outcome = convert(made, talk("Hi"), talk("BOOM"), talk("Hi"))
    assert [piece.row for piece in outcome.pieces] == [0, 2]
    assert [(r.row, r.reason) for r in outcome.refusals] == [(1, "too_slow")]


@pytest.mark.usefixtures("quick")
def test_a_template_that_never_ends_is_tried_once(converter: Make) -> None:
    made = bounded(converter, LOOP + CHATML)
    begun = time.process_time()
    outcome = convert(made, *[talk("Hi")] * 50)
    assert reasons(outcome) == ["too_slow"] * 50
    assert time.process_time() - begun < 3


@pytest.mark.usefixtures("quick")
def test_a_template_that_does_not_end_on_calls(converter: Make) -> None:
    """Rows without calls are none the worse for that."""
    made = bounded(
        converter, "{%- if messages[-1].tool_calls -%}" + LOOP + "{%- endif -%}" + CHATML
    )
    assert not convert(made, talk("Hi")).refusals


def test_text_that_a_template_prints_too_often(
    converter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "TEXT_BYTES", 2000)
    many = "{%- for a in range(50) %}{{ messages[0].content }}{% endfor -%}"
    made = converter(source=WHEN.replace("DO", many), context_length=100)
    outcome = convert(made, talk("Hi"), talk("BOOM " * 10), talk("ä" * 1000))
    assert [(r.row, r.reason) for r in outcome.refusals] == [(1, "too_large"), (2, "too_large")]
    made = converter(
        source=WHEN, context_length=300, max_length=300, supervise="all"
    )  # 8 bytes a token of the model's context
    assert not convert(made, talk("ä" * 1000)).refusals


# The most memory that a program held, in MiB; it begins anew with the program.
PEAK = """
print(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) >> 10)
"""
GROW = (
    """
from extractor.rows.bounds import bound_memory, cpu_bounded
from extractor.rows.records import BadRow
bound_memory(1 << 20)
for grow in ("text = text + text", "text = text * 10**9", "text = '%999999999d' % 1"):
    try:
        with cpu_bounded(20):
            text = "x" * 1000
            while True:
                exec(grow)
    except BadRow as bad:
        print(bad.reason)
"""
    + PEAK
)


def test_a_text_that_doubles_until_memory_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    *found, peak = done.stdout.split()
    assert found == ["too_large"] * 3
    assert int(peak) < 600


def test_code_that_cannot_be_interrupted_ends_with_its_process() -> None:
    code = "from extractor.rows.bounds import cpu_bounded\n"
    code += "with cpu_bounded(0.1):\n    sum(range(10**12))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -26  # SIGVTALRM


class Mortal:
    """A worker that dies of the row "BOOM"."""

    made = 0
    code = "signal 6"

    def __init__(self) -> None:
        self.rules: Any = None
        self.answers = True
        type(self).made += 1

    def convert(self, chunk: Sequence[RawRow]) -> Outcome:
        if any(b"BOOM" in row.data for row in chunk if isinstance(row.data, bytes)):
            if self.code == "killed":
                raise RunError("killed by signal 9")
            raise work._DiedError(self.code, at_rules=False)
        return Outcome(len(chunk), [], [])

    def close(self) -> None:
        """Nothing is left to close."""


def test_the_row_that_a_process_died_of_is_found(
    converter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_Worker", Mortal)
    monkeypatch.setattr(work, "SPARE", [])
    monkeypatch.setattr(work, "KEEP_SPARE", False)
    lines = [json.dumps({"id": f"i{n}", **talk("BOOM" if n == 7 else "Hi")}) for n in range(20)]
    rows = [RawRow(n, "f", n + 1, line.encode()) for n, line in enumerate(lines)]
    (outcome,) = work.outcomes(iter(rows), converter().rules, 2)
    assert outcome.rows == 20
    assert [(r.row, r.id, r.reason) for r in outcome.refusals] == [(7, "i7", "process_died")]
    assert Mortal.made == 3
    monkeypatch.setattr(Mortal, "code", "killed")  # by a person, or for want of memory
    with pytest.raises(RunError, match="killed by signal 9"):
        list(work.outcomes(iter(rows), converter().rules, 2))


# ---- containers


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (arrays, compressed, read):
        monkeypatch.setattr(module, "ROW_BYTES", 5000)
    return 5000


def found(path: Path) -> list[str]:
    """The id of each row, or why it is none."""
    shown: list[str] = []
    for row in read_rows(open_sources([str(path)])):
        data = json.loads(row.data) if isinstance(row.data, bytes) else row.data
        shown.append(data.reason if isinstance(data, BadRow) else data["id"])
    return shown


ROWS = [GOOD, {"id": "big", "text": 'a"\\]}é' * 2000}, GOOD, {"id": "fits", "text": "a" * 4900}]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rows_that_are_too_large(kind: str, suffix: str, small: int, tmp_path: Path) -> None:
    text = "\n".join(map(json.dumps, ROWS)) if kind == "jsonl" else json.dumps(ROWS)
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(pack(text.encode()))
    if kind == "jsonl":
        assert found(path) == ["good", "too_large", "good", "fits"]
    else:  # the whole array was there before its bounds were looked at
        assert [name for name in found(path) if name != "big"][:3] == ["good", "good", "fits"]


def test_elements_of_an_array_that_arrive_in_pieces(
    small: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    for block in (7, 64, 1000, 4096):
        monkeypatch.setattr(read, "BLOCK", block)
        assert found(path) == ["good", "too_large", "good", "fits"], block


def test_a_last_line_that_is_too_large(small: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + "x" * 6000)
    assert found(path) == ["good", "too_large"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "too_deep"),
        ('{"id": ' + '{"a":' * 100_000 + "1" + "}" * 100_001, "too_deep"),
        ('{"id": 1' + "0" * 5000 + "}", "not_json"),
    ],
)
def test_an_element_that_cannot_be_parsed(bad: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"[{json.dumps(GOOD)}, {bad}, {json.dumps(GOOD)}]")
    assert found(path) == ["good", reason, "good"]


def test_lines_that_are_deep_or_hold_huge_numbers(converter: Make) -> None:
    deep = (
        b'{"id":"d","messages":[{"role":"user","content":' + b"[" * 99_999 + b"]" * 99_999 + b"}]}"
    )
    calls = '{"a":' * 600 + "1" + "}" * 600
    nested = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": calls}]}
    infinite = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1e999}'}]}
    user = {"role": "user", "content": "?"}
    outcome = convert(
        converter("qwen3"),
        deep,
        b'{"id": ' + b"9" * 5000 + b', "text": "x"}',
        {"messages": [user, nested]},
        {"messages": [user, infinite]},
        {"input_ids": [10**400], "loss_mask": [1]},
    )
    found = {refusal.row: refusal for refusal in outcome.refusals}
    assert found[0].reason == "too_deep" and found[1].reason == "not_json"
    assert found[2].reason in ("too_deep", "template_error", "bad_tool_calls")
    assert found[3].reason == "bad_tool_calls" and found[4].reason == "id_out_of_range"
    assert all(len(refusal.detail) < 500 for refusal in outcome.refusals)


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_rows_of_arrow_that_are_too_large(name: str, small: int, tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([GOOD, {"id": "big", "text": "a" * 6000}, *[GOOD] * 300])
    path = tmp_path / name
    data.to_parquet(path) if name == "a.parquet" else data.save_to_disk(str(path))
    assert found(path) == ["good", "too_large", *["good"] * 300]


BOMB = (
    """
import sys
from extractor.rows.read import open_sources, read_rows
rows = [row.data for row in read_rows(open_sources(sys.argv[1:]))]
print(rows[0], rows[1].reason, rows[2], len(rows))
"""
    + PEAK
)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("fill", [b"a", b"\n", b" "])
def test_a_small_file_that_is_a_huge_one_when_it_is_read(
    fill: bytes, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    packer: Any = zstandard.ZstdCompressor().compressobj() if suffix == "zst" else None
    if packer is None:
        import zlib

        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = fill * (1 << 20)
    parts = [packer.compress(b'"good"\n"')]
    parts += [packer.compress(block) for _ in range(200)]
    parts += [packer.compress(b'"\n"good"'), packer.flush()]
    path.write_bytes(b"".join(parts))
    assert path.stat().st_size < 2 << 20
    if fill == b"\n":
        assert [row.line for row in read_rows(open_sources([str(path)]))][:1] == [1]
        return
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True
    )
    shown, peak = done.stdout.splitlines()
    assert shown == "b'\"good\"' too_large b'\"good\"' 3"
    assert int(peak) < 120
