"""What counts as done: a journal line and a file of that size, whatever else the journals hold."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.layouts.base import sample_path
from extractor.output.done import find_done
from extractor.output.journal import JOURNAL, reject_line
from extractor.records import Reject

SAMPLES = [(0, 0), (1, 1), (1, 2), (5, 0), (1000, 0), (1001, 3)]
STRANGERS = [(2, 0), (1, 3), (5, 1), (-1, 0), (2000, 0)]
# Numbers that no sample has, and that must not come to look like one's.
HUGE = [
    f'{{"row": {1 << 48}, "turn": 0, "bytes": 1}}',
    f'{{"row": {10**30}, "turn": 0, "bytes": 1}}',
]
HUGE += ['{"row": 0, "turn": 65536, "bytes": 1}', f'{{"row": 0, "turn": 0, "bytes": {10**30}}}']
GARBAGE = [
    *HUGE,
    "",
    "{",
    "[]",
    "null",
    '{"row": 0}',
    '{"row": "0", "turn": 0, "bytes": 3}',
    '{"row": 0.5}',
]


def reject(row: int, turn: int) -> Reject:
    return Reject(row=row, turn=turn, id="\ud800", source="f:1", reason="non_finite", detail="d")


def line(event: tuple[str, tuple[int, int], int] | str) -> str:
    if isinstance(event, str):
        return event
    kind, (row, turn), size = event
    if kind == "reject":
        return json.dumps({"row": row, "turn": turn, "reject": reject_line(reject(row, turn))})
    return json.dumps({"row": row, "turn": turn, "id": "\ud800", "bytes": size, "xxh3": "0"})


events = st.lists(
    st.one_of(
        st.sampled_from(GARBAGE),
        st.tuples(
            st.sampled_from(["done", "reject"]),
            st.sampled_from(SAMPLES + STRANGERS),
            st.integers(0, 3),
        ),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=300)
@given(
    journals=st.lists(events, min_size=1, max_size=3),
    sizes=st.dictionaries(st.sampled_from(SAMPLES), st.integers(0, 3)),
)
def test_a_line_and_a_file_of_that_size(
    tmp_path_factory: pytest.TempPathFactory,
    journals: list[list[tuple[str, tuple[int, int], int] | str]],
    sizes: dict[tuple[int, int], int],
) -> None:
    output = tmp_path_factory.mktemp("done")
    (output / JOURNAL).mkdir()
    for number, lines in enumerate(journals):
        text = "".join(line(event) + "\n" for event in lines)
        (output / JOURNAL / f"{number:04d}.jsonl").write_text(text)
    for (row, turn), size in sizes.items():
        path = output / sample_path(row, turn)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    # By the definition, an event at a time.
    finished: set[tuple[int, int]] = set()
    seen: set[tuple[int, int]] = set()
    rejected: set[tuple[int, int]] = set()
    for event in (event for lines in journals for event in lines):
        if isinstance(event, str) or event[1] not in SAMPLES:
            continue
        if event[0] == "reject":
            rejected.add(event[1])
            continue
        seen.add(event[1])
        rejected.discard(event[1])
        if sizes.get(event[1]) == event[2]:
            finished.add(event[1])
    rows, turns = (np.array(column) for column in zip(*SAMPLES, strict=True))
    done = find_done(output, rows, turns.astype(np.int16))
    assert {SAMPLES[i] for i in done.finished.nonzero()[0]} == finished
    assert {SAMPLES[i]: value for i, value in done.rejected.items()} == {
        key: reject(*key) for key in rejected
    }
    assert done.damaged == len(seen - finished)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_slow_and_quick_filesystems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Asked by several threads or by one: the same answer, in the same order."""
    monkeypatch.setattr("extractor.output.done.LOCAL_STAT_SECONDS", seconds)
    monkeypatch.setattr("extractor.output.done.STATS_AT_A_TIME", 7)
    (tmp_path / JOURNAL).mkdir()
    with (tmp_path / JOURNAL / "0000.jsonl").open("w") as journal:
        for row in range(50):
            journal.write(line(("done", (row, 0), 1)) + "\n")
            path = tmp_path / sample_path(row, 0)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * (row % 3))
    done = find_done(tmp_path, np.arange(50), np.zeros(50, np.int16))
    assert done.finished.tolist() == [row % 3 == 1 for row in range(50)]


def test_nothing_prepared(tmp_path: Path) -> None:
    done = find_done(tmp_path, np.zeros(0, np.int64), np.zeros(0, np.int16))
    assert (len(done.finished), done.rejected, done.damaged) == (0, {}, 0)
