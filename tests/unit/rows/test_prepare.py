"""From files to a store: what is kept, what is refused, and what is left on disk."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.config import DataConfig
from extractor.errors import RunError, UsageError
from extractor.model import ModelSpec
from extractor.prepared.store import PreparedStore
from extractor.prepared.vocab import TokenCounts, draft_vocabulary, write_vocab
from extractor.rows import work
from extractor.rows.prepare import changed_parts, prepare
from extractor.rows.read import chosen_rows
from extractor.verbs.show import show_row
from tests.support.data_kit import chat


def rows(count: int, path: Path, seed: int = 0) -> Path:
    chance = random.Random(seed)
    words = [
        "Hello",
        "there",
        "how",
        "are",
        "you",
        "today",
        "quick",
        "brown",
        "fox",
        "12345",
        "世界",
    ]
    with path.open("w") as file:
        for number in range(count):
            said = " ".join(chance.choices(words, k=chance.randint(1, 30)))
            turns = (("user", f"question {number}"), ("assistant", said))
            file.write(json.dumps(chat(*turns, id=f"r{number}"), ensure_ascii=False) + "\n")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Run:
    """prepare() in a temporary folder, with what it reported."""

    def __init__(self, model: ModelSpec, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.output = folder / "out"
        self.lines: list[str] = []
        self.progress: list[tuple[int, int | None]] = []

    def config(self, *data: Path, **settings: Any) -> DataConfig:
        settings = {"output": self.output, **settings}
        return DataConfig(model=str(self.model.path), data=tuple(map(str, data)), **settings)

    def __call__(self, *data: Path, **settings: Any) -> PreparedStore:
        self.progress.clear()
        return prepare(
            self.config(*data, **settings),
            self.model,
            self.lines.append,
            lambda done, total: self.progress.append((done, total)),
        )


@pytest.fixture
def run(toy_model: ModelSpec, tmp_path: Path) -> Run:
    return Run(toy_model, tmp_path)


BAD = b'{"id": "x", "messages": []}\n'
GOOD = json.dumps(chat(("user", "q"), ("assistant", "a"), id="g")).encode() + b"\n"


def test_a_store_holds_what_was_said(run: Run, tmp_path: Path) -> None:
    store = run(rows(30, tmp_path / "a.jsonl"))
    assert len(store) == store.num_rows == 30
    assert store.lengths.dtype == np.int32 and store.rows.dtype == np.int64
    assert store.turns.dtype == np.int16 and not store.turns.any()
    assert store.path.parent == tmp_path / "out" / "prepared"
    sample = store.sample(7)
    assert (sample.row, sample.id, sample.source) == (7, "r7", f"{tmp_path}/a.jsonl:8")
    assert len(sample) == store.lengths[7]
    summary = store.summary()
    assert summary["tokens"] == store.lengths.sum()
    assert summary["supervised"] == sum(int(store.sample(n).loss_mask.sum()) for n in range(30))
    assert run.lines == [
        "30 rows read = 30 used + 0 rejected; 30 samples, "
        f"{summary['tokens']:,} tokens, {summary['supervised']:,} supervised"
    ]
    assert run.progress[-1] == (30, 30)
    with pytest.raises(IndexError):
        store.sample(30)


def test_processes_give_what_one_process_gives(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(300, tmp_path / "a.jsonl")
    alone = run(data, workers=1, output=tmp_path / "one")
    monkeypatch.setattr(work, "FEW_ROWS", 100)
    many = run(data, workers=2, output=tmp_path / "two")
    assert alone.digest == many.digest
    files = sorted(path.name for path in alone.path.iterdir())
    assert files == sorted(path.name for path in many.path.iterdir())
    for name in files:
        assert (alone.path / name).read_bytes() == (many.path / name).read_bytes(), name


def test_a_worker_that_dies_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FEW_ROWS", 10)
    monkeypatch.setattr(work, "SPARE", [])
    monkeypatch.setattr(work.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="a process that tokenizes died"):
        run(rows(100, tmp_path / "a.jsonl"), workers=2)
    assert names(tmp_path) == ["a.jsonl"]


def test_bad_rows_leave_nothing(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(GOOD + BAD * 25 + b"{\n")
    with pytest.raises(UsageError) as stopped:
        run(data)
    text = str(stopped.value)
    assert "26 bad among 27 rows" in text and "... and 6 more" in text
    assert "a.jsonl:2: id x: empty: messages is empty" in text
    assert text.count("a.jsonl:") == 20
    assert names(tmp_path) == ["a.jsonl"]


def test_bad_rows_are_skipped_when_that_is_allowed(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(GOOD + BAD + b"\n{\n" + GOOD)
    store = run(data, bad_rows="skip")
    assert store.rows.tolist() == [0, 3]
    assert [(r.row, r.id, r.source[-9:], r.reason) for r in store.rejects] == [
        (1, "x", "a.jsonl:2", "empty"),
        (2, "2", "a.jsonl:4", "not_json"),
    ]
    assert store.rejects[0].reason == "empty" and len(store.rejects) == 2
    assert store.summary()["rows_rejected"] == 2
    with pytest.raises(UsageError, match="2 bad among 4 rows"):  # the store is there, and known
        run(data)


def test_nothing_to_do_is_an_error(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(b"\n \n")
    with pytest.raises(UsageError, match="no rows"):
        run(data)
    data.write_bytes(BAD + GOOD)
    with pytest.raises(UsageError, match="not one of 2 rows can be used: 1 empty, 1 too_short"):
        run(data, bad_rows="skip", min_length=400)
    assert names(tmp_path) == ["a.jsonl"]


def test_filters_are_not_bad_rows(run: Run, tmp_path: Path) -> None:
    data = rows(50, tmp_path / "a.jsonl")
    store = run(data, min_supervised=20, max_length=45, overlong="skip")
    reasons = {reject.reason for reject in store.rejects}
    assert reasons == {"too_few_supervised", "too_long"}
    assert len(store) + len(store.rejects) == 50


def test_the_store_is_found_again(run: Run, tmp_path: Path) -> None:
    data = rows(20, tmp_path / "a.jsonl")
    first = run(data)
    stamp = (first.path / "store.json").stat().st_mtime_ns
    again = run(data)
    assert again.path == first.path and "using the 20 samples" in run.lines[-1]
    assert (again.path / "store.json").stat().st_mtime_ns == stamp
    data.write_bytes(data.read_bytes() + GOOD)
    more = run(data)
    assert len(more) == 21
    assert [c.partition(" (")[0] for c in changed_parts(first.parts, more.parts)] == ["input rows"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"supervise": "last"}, "supervise"),
        ({"turns": "each"}, "turns"),
        ({"max_length": 100}, "max_length"),
        ({"min_length": 3}, "min_length"),
        ({"limit": 7}, "limit"),
        ({"template_arg": ("x=1",)}, "template arguments"),
        (
            {"chat_template": Path(__file__).parents[2] / "data/templates/qwen3.jinja"},
            "chat template",
        ),
    ],
)
def test_what_changes_is_named(
    settings: dict[str, Any], name: str, run: Run, tmp_path: Path
) -> None:
    data = rows(10, tmp_path / "a.jsonl")
    first = run(data)
    (tmp_path / "out" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=f"holds a run of other samples; what changed: {name} "):
        run(data, **settings)
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]


@pytest.mark.parametrize(
    ("file", "trust", "name"),
    [
        ("tool_declaration.py", True, "remote code"),
        ("tool_declaration.py", False, None),  # it does not run
        ("vocab.bpe", False, "tokenizer"),
        ("source.spm", False, "tokenizer"),
    ],
)
def test_files_that_decide_ids_are_in(
    file: str, trust: bool, name: str | None, run: Run, tmp_path: Path
) -> None:
    """Also those that only the tokenizer's own code reads, or imports."""
    model = tmp_path / "model"
    shutil.copytree(run.model.path, model)
    run.model = dataclasses.replace(run.model, path=model)
    data = rows(10, tmp_path / "a.jsonl")
    settings = {"trust_remote_code": trust}
    (model / file).write_text("x = 1\n")
    first = run(data, **settings)
    (model / file).write_text("x = 2\n")
    second = run(data, **settings)
    found = [each.partition(" (")[0] for each in changed_parts(first.parts, second.parts)]
    assert found == ([name] if name else [])


def test_leftovers_of_a_killed_run_are_removed(run: Run, tmp_path: Path) -> None:
    import socket

    dead = tmp_path / f".out.preparing-{socket.gethostname()}-99999999"
    dead.mkdir()
    (dead / "ids.i32").write_bytes(b"half")
    run(rows(3, tmp_path / "a.jsonl"))
    assert names(tmp_path) == ["a.jsonl", "out"]
    assert names(tmp_path / "out") == ["prepared"]


def test_a_damaged_store_is_made_again(run: Run, tmp_path: Path) -> None:
    data = rows(5, tmp_path / "a.jsonl")
    first = run(data)
    (first.path / "ids.i32").write_bytes(b"1234")
    assert len(run(data)) == 5
    assert PreparedStore.open(first.path).sample(0).id == "r0"
    with pytest.raises(RunError, match="not a prepared store"):
        PreparedStore.open(tmp_path)


def test_outputs_that_cannot_be(run: Run, tmp_path: Path) -> None:
    data = rows(3, tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        run(data, output=data)
    with pytest.raises(UsageError, match="cannot be written"):
        run(data, output=Path("/proc/nowhere/out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 501}, "--max-length 501: the model's context is 500"),
        ({"max_length": 0}, "--max-length 0"),
        ({"max_length": 5, "min_length": 6}, "--min-length 6 is more than"),
        ({"shuffle_seed": 1}, "give --limit too"),
        ({"template_arg": ("messages=[]",)}, "comes from the row"),
        ({"template_arg": ("messages",)}, "wanted KEY=VALUE"),
        ({"chat_template": Path("/nowhere.jinja")}, "--chat-template"),
    ],
)
def test_flags(settings: dict[str, Any], message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run(rows(3, tmp_path / "a.jsonl"), **settings)


def test_a_template_that_is_no_jinja(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for %}")
    with pytest.raises(UsageError, match="the chat template, line 1"):
        run(rows(3, tmp_path / "a.jsonl"), chat_template=template)


def test_limit_and_seed(run: Run, tmp_path: Path) -> None:
    data = rows(40, tmp_path / "a.jsonl")
    assert run(data, limit=3).rows.tolist() == [0, 1, 2]
    one = run(data, limit=5, shuffle_seed=1)
    assert one.rows.tolist() == chosen_rows(40, 5, 1).tolist() == [5, 6, 11, 18, 25]
    assert one.sample(2).source.endswith(":12")
    other = run(data, limit=5, shuffle_seed=2)
    assert other.rows.tolist() != one.rows.tolist()
    # A larger limit keeps the rows of a smaller one.
    assert set(one.rows.tolist()) <= set(chosen_rows(40, 9, 1).tolist())
    assert chosen_rows(3, 9, 1).tolist() == [0, 1, 2]


def test_odd_ids_survive(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    odd = ["../../etc", "é\n", "\ud800", "", 3.5, "x" * 5000]
    lines = [json.dumps(chat(("user", "q"), ("assistant", "a"), id=name)) for name in odd]
    data.write_text("\n".join(lines))
    store = run(data)
    found = [store.sample(index).id for index in range(len(store))]
    assert found == ["../../etc", "é\n", "\\ud800", "3", "3.5", "x" * 5000]


# ---- vocabulary


def specforge_rule(counter: Any, size: int, vocab: int) -> list[int]:
    """Its published rule: Counter.most_common, ties in the order of insertion, padded from 0."""
    for token in sorted(set(range(size)) - set(counter)):
        if len(counter) >= size:
            break
        counter[token] = 0
    return sorted(token for token, _ in counter.most_common(size))


def speculators_rule(counter: Any, size: int, vocab: int) -> list[int]:
    """Its published rule: most frequent first, ties by id, padded from 0."""
    chosen = sorted(counter, key=lambda token: (-counter[token], token))[:size]
    missing = [token for token in range(size) if token not in chosen]
    return sorted([*chosen, *missing[: size - len(chosen)]])


@pytest.mark.parametrize("size", [1, 5, 20, 60, 500, 1999, 2000])
def test_draft_vocabulary(size: int, run: Run, tmp_path: Path) -> None:
    from collections import Counter

    store = run(rows(60, tmp_path / "a.jsonl"))
    counter: Counter[int] = Counter()
    for index in range(len(store)):
        sample = store.sample(index)
        kept = sample.input_ids[sample.loss_mask.bool()]
        tokens, counts = kept.unique(return_counts=True)
        counter.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
    counted = TokenCounts.of(store, 2000)
    assert {t: int(n) for t, n in enumerate(counted.counts) if n} == dict(counter)
    for ties, rule in (("id", speculators_rule), ("first_seen", specforge_rule)):
        made = draft_vocabulary(counted, size, ties)  # type: ignore[arg-type]
        want = rule(Counter(counter), size, 2000)
        assert (made.d2t + np.arange(size)).tolist() == want
        assert np.flatnonzero(made.t2d).tolist() == want
    again = TokenCounts.of_samples((store.sample(i) for i in range(len(store))), 2000)
    assert (again.counts == counted.counts).all()
    assert (again.first_seen == counted.first_seen).all()
    with pytest.raises(UsageError, match="--draft-vocab-size 2001"):
        draft_vocabulary(counted, 2001)


def test_vocabulary_files(run: Run, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    counted = TokenCounts.of(run(rows(5, tmp_path / "a.jsonl")), 2000)
    write_vocab(tmp_path / "vocab", counted, draft_vocabulary(counted, 50))
    assert load_file(tmp_path / "vocab" / "token_freq.safetensors")["token_freq"].sum() == (
        counted.counts.sum()
    )
    mapping = load_file(tmp_path / "vocab" / "draft_vocab.safetensors")
    assert mapping["d2t"].dtype == np.int64 and mapping["t2d"].dtype == bool
    assert sorted(path.name for path in (tmp_path / "vocab").iterdir()) == [
        "draft_vocab.safetensors",
        "token_freq.safetensors",
    ]


# ---- show


def test_show(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(GOOD + BAD)
    run(data, bad_rows="skip")
    lines: list[str] = []
    assert show_row(run.output, 0, write=lines.append, colour=False, ids=True) == 0
    assert lines[0].startswith(f"row 0, id g, {data}:1: ")
    assert "<|im_start|>assistant\n[[a<|im_end|>]]\n" in lines[1]
    assert sum(" * " in line for line in lines[2:]) == 2
    lines.clear()
    assert show_row(run.output, 1, write=lines.append) == 1
    assert lines == [
        f"row 1, id x, {data}:2: rejected",
        "empty: messages is empty",
    ]
    with pytest.raises(UsageError, match="has 2 rows"):
        show_row(run.output, 2, write=lines.append)
    with pytest.raises(UsageError, match="give --model"):
        show_row(data, 0, write=lines.append)


def test_show_what_the_run_rejected(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(GOOD)
    run(data)
    entry = {
        "row": 0,
        "turn": 0,
        "id": "g",
        "source": "a.jsonl:1",
        "reason": "non_finite",
        "detail": "NaN",
    }
    (run.output / "rejects.jsonl").write_text(json.dumps(entry) + "\n")
    lines: list[str] = []
    show_row(run.output, 0, write=lines.append)
    assert lines[-1] == "non_finite: NaN"


def test_show_a_data_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(BAD + GOOD)
    monkeypatch.setattr(ModelSpec, "read", lambda _: run.model)
    lines: list[str] = []
    config = run.config(data)
    assert show_row(data, 1, write=lines.append, config=config, colour=False) == 0
    assert "[[a<|im_end|>]]" in lines[1]
    assert show_row(data, 0, write=lines.append, config=config) == 1
    with pytest.raises(UsageError, match="fewer rows"):
        show_row(data, 2, write=lines.append, config=config)


EVIL = "\x1b[2J\nextractor: done\u202e\ud800\x9b"


def test_what_a_row_says_moves_no_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In messages, in rejects and in the text itself, where newlines stay."""
    data = tmp_path / "a.jsonl"
    evil = EVIL.replace("\ud800", "")
    good = chat(("user", evil), ("assistant", f"a{evil}"), id=EVIL)
    bad = {"id": EVIL, "messages": [{"role": EVIL, "content": "x"}]}
    data.write_text("".join(json.dumps(row) + "\n" for row in (good, bad)))
    with pytest.raises(UsageError) as stopped:
        run(data)
    assert all(line.isprintable() for line in str(stopped.value).splitlines())
    assert len(str(stopped.value).splitlines()) == 2
    run(data, bad_rows="skip")
    for row in (0, 1):
        lines: list[str] = []
        show_row(run.output, row, write=lines.append, colour=False, ids=True)
        for line in lines:
            assert line.replace("\n", "").isprintable(), line
        assert lines[0].count("\n") == 0
        assert any("\\x1b[2J" in line for line in lines)
    monkeypatch.setattr(ModelSpec, "read", lambda _: run.model)
    shown: list[str] = []
    show_row(data, 1, write=shown.append, config=run.config(data))
    assert all(line.isprintable() for line in shown)


def test_keys_that_nothing_reads_are_named_once(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    row = json.dumps(chat(("user", "q"), ("assistant", "a"), train_on="all", **{"a\nb": 1}))
    data.write_text(f"{row}\n" * 100)
    run(data)
    assert run.lines[0] == (
        "read by nothing, with the number of rows: row key a\\nb (100), row key train_on (100)"
    )
    run(data)
    assert len(run.lines) == 3


def test_rows_that_are_switched_off_are_no_bad_rows(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    off = json.dumps(chat(("user", "q"), ("assistant", "a"), train=False)).encode() + b"\n"
    data.write_bytes(GOOD + off)
    store = run(data)
    assert store.rows.tolist() == [0] and store.rejects[0].reason == "switched_off"


def test_the_process_that_runs_templates_is_bounded(run: Run, tmp_path: Path) -> None:
    """The memory that this one asks for is never given, so that the test takes none either."""
    grow = (
        "{%- if 'BOOM' in messages[0].content %}{{ 'x' * (messages|length * 10**9) }}{% endif -%}"
    )
    template = tmp_path / "grow.jinja"
    chatml = Path(__file__).parents[2] / "data/templates/chatml.jinja"
    template.write_text(grow + chatml.read_text())
    data = tmp_path / "a.jsonl"
    boom = json.dumps(chat(("user", "BOOM"), ("assistant", "a"), id="b")).encode() + b"\n"
    data.write_bytes(GOOD + boom + GOOD)
    store = run(data, bad_rows="skip", chat_template=template)
    assert store.rows.tolist() == [0, 2]
    (reject,) = store.rejects
    assert (reject.id, reject.reason) == ("b", "too_large") and "more memory" in reject.detail
