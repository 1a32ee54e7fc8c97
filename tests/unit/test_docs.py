"""Pages that messages and other pages send a reader to are there, and so are the flags they speak of."""

import dataclasses
import re
from pathlib import Path

import pytest

from extractor.config import ExtractConfig
from extractor.verbs.convert import ConvertConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bdocs/[\w/.-]+\.(?:md|py|svg|png)", text))


def test_messages_name_pages_that_exist() -> None:
    sources = sorted((ROOT / "extractor").rglob("*.py"))
    named = {name for path in sources for name in named_in(path.read_text())}
    assert {"docs/formats.md", "docs/data.md", "docs/families.md", "docs/reliability.md"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named_in(text) if not (ROOT / name).is_file()]
    assert missing == []


def test_flags_in_the_right_hand_columns_of_the_migration_page() -> None:
    """Those of ours; what the others call theirs is theirs to say."""
    fields = {f.name for kind in (ExtractConfig, ConvertConfig) for f in dataclasses.fields(kind)}
    ours = fields | {f"no_{name}" for name in fields} | {"nproc_per_node", "nnodes"}
    rows = re.findall(r"^\|[^|]+\|([^|]+)\|$", (ROOT / "docs/migration.md").read_text(), re.M)
    used = {flag for row in rows for flag in re.findall(r"--([a-z][a-z0-9-]+)", row)}
    assert len(used) > 15
    assert [flag for flag in sorted(used) if flag.replace("-", "_") not in ours] == []
