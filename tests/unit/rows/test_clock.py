"""A template that prints the date prints one date in a folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extractor.config import DataConfig
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.prepared.store import PreparedStore
from extractor.rows.clock import Clock
from extractor.rows.prepare import prepare
from tests.support.data_kit import TEMPLATES, chat

DATED = (
    "{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif -%}"
    "{{- '<|im_start|>system\\n' + date_string + '<|im_end|>\\n' -}}"
) + (TEMPLATES / "chatml.jinja").read_text()


class Folder:
    """One output, prepared on one day after another."""

    def __init__(self, model: ModelSpec, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.path, self._patch = model, path, monkeypatch
        self.output = path / "out"
        (path / "dated.jinja").write_text(DATED)

    def prepare(self, day: str, rows: int, **settings: Any) -> PreparedStore:
        self._patch.setattr(Clock, "today", classmethod(lambda cls: cls(day)))
        data = self.path / "rows.jsonl"
        row = chat(("user", "q"), ("assistant", "a"))
        data.write_text(f"{json.dumps(row)}\n" * rows)
        values: dict[str, Any] = {"chat_template": self.path / "dated.jinja", **settings}
        config = DataConfig(
            model=str(self.model.path), data=(str(data),), output=self.output, **values
        )
        return prepare(config, self.model, lambda _: None)


@pytest.fixture
def folder(toy_model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(toy_model, tmp_path, monkeypatch)


Texts = Callable[[PreparedStore], set[str]]


@pytest.fixture
def texts(tokenizer: Any) -> Texts:
    def decoded(store: PreparedStore) -> set[str]:
        samples = map(store.sample, range(len(store)))
        return {tokenizer.decode(s.input_ids.tolist()).strip()[:18] for s in samples}

    return decoded


def test_the_first_days_date_stays(folder: Folder, texts: Texts) -> None:
    first = folder.prepare("2026-11-30", 2)
    again = folder.prepare("2026-12-01", 2)
    assert again.path == first.path
    more = folder.prepare("2026-12-02", 3)
    assert len(more) == 3 and more.parts["date"] == "2026-11-30"
    (text,) = texts(first) | texts(more)
    assert "30 Nov 2026" in text
    shutil.rmtree(folder.output)
    (text,) = texts(folder.prepare("2026-12-02", 2))
    assert "02 Dec 2026" in text


def test_a_run_remembers_it_when_what_was_prepared_is_gone(folder: Folder, texts: Texts) -> None:
    first = folder.prepare("2026-11-30", 2)
    shutil.rmtree(folder.output / "prepared")
    for name in ("run.json", "run-0-of-2.json"):
        (folder.output / name).write_text("{no")
    parts = {f"data: {name}": value for name, value in first.parts.items()}
    run = {"fingerprint": "x", "parts": parts}
    (folder.output / "run-1-of-2.json").write_text(json.dumps(run))
    again = folder.prepare("2026-12-01", 2)
    assert again.digest == first.digest and "30 Nov 2026" in texts(again).pop()


def test_a_date_that_is_given(folder: Folder, texts: Texts) -> None:
    for given in ("strftime_now=2024-07-26", 'date_string="26 Jul 2024"'):
        store = folder.prepare("2026-12-01", 2, template_arg=(given,))
        assert "26 Jul 2024" in texts(store).pop()
    (folder.output / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"what changed: .*template arguments"):
        folder.prepare("2026-12-01", 2, template_arg=("strftime_now=2025-01-01",))
    with pytest.raises(UsageError, match="strftime_now=soon: wanted the day to print"):
        folder.prepare("2026-12-01", 2, template_arg=("strftime_now=soon",))


def test_a_template_without_a_date_has_none(folder: Folder) -> None:
    store = folder.prepare("2026-12-01", 2, chat_template=TEMPLATES / "chatml.jinja")
    assert "date" not in store.parts
