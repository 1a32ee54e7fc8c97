"""The page: what it says, that it needs nothing else, and how a real browser shows it."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from extractor.errors import UsageError
from extractor.layouts import LAYOUTS
from extractor.verbs.report import report
from extractor.verbs.report.facts import gather, spread
from extractor.verbs.report.page import render
from tests.support.written import make_layout, make_samples, write_folder

VOID = {"meta", "link", "br", "img", "path", "use", "rect"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rejects, an id that is markup, and two replicas' timelines."""
    output = tmp_path / "out"
    samples = make_samples()
    write_folder(output, make_layout(asked="embed,1,3,5", samples=samples), samples)
    rejects = [
        {
            "row": 1,
            "turn": 0,
            "source": "rows.jsonl:2",
            "id": "<script>alert(1)</script>",
            "reason": "not_json",
            "detail": "</pre><b>bold</b>",
        }
    ]
    (output / "rejects.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rejects))
    run = json.loads((output / "run.json").read_text())
    times = np.arange(1, 80)
    points = [[float(t), 900 * int(t), 9000 * int(t), 0.0, 0.1 * t, 0.9 * t] for t in times]
    replica = {"seconds": 79.0, "tokens": 900 * 79, "timeline": points}
    run["replicas"] = [replica, {**replica, "timeline": points[:60]}]
    run["stages"] = {"prepare": 3.0, "load": 12.0, "run": 79.0}
    run["argv"] = ["extract", "--model", "/models/tiny & co"]
    (output / "run.json").write_text(json.dumps(run))
    return output


class Balanced(HTMLParser):
    """Every element is closed in order; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, tag


def test_the_page_is_complete_in_itself(folder: Path):
    text = render(gather(folder, 64))
    page = Balanced()
    page.feed(text)
    assert page.open == [] and page.fetched == []
    assert not page.tags & {"script", "img", "link", "iframe"}
    assert "@import" not in text and "url(http" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "pictures share ids"
    assert not re.search(r"#0[ab]000\d", text), "a colour that the page does not replace"
    for words in ("not_json", "What it waited for", "tokens/s", "&lt;script&gt;", "tiny &amp; co"):
        assert words in text, words
    assert len(text) < 400_000


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_has_a_page(tmp_path: Path, name: str):
    samples = make_samples()
    write_folder(tmp_path, make_layout(name, samples=samples), samples)
    assert report([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert f"layout {name}" in text and "Throughput" not in text


def test_facts_are_counted_over_all_samples(folder: Path):
    facts = gather(folder, 3)
    samples = make_samples()
    assert facts.tokens == sum(map(len, samples))
    assert facts.supervised_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    assert [state.name for state in facts.states] == ["embed", "1", "3", "5", "final"]
    assert len(facts.shown) == 4
    assert sum(facts.planes.values()) == int(facts.bytes.sum())


def test_spread():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(100, 4) == [0, 33, 66, 99]
    assert spread(100, 1) == [0]


def test_a_folder_without_samples_is_refused(folder: Path, tmp_path: Path):
    shutil.rmtree(folder / "journal")
    with pytest.raises(UsageError, match="no sample is finished"):
        report([str(folder)])
    with pytest.raises(UsageError, match="not a folder"):
        report([str(tmp_path)])


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    message = "NOT RUN: no Chromium: apt-get install chromium"
    if os.environ.get("EXTRACTOR_REQUIRE_BROWSER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1180, 420])
def test_a_browser_shows_it(folder: Path, tmp_path: Path, scheme: str, width: int):
    report([str(folder)])
    picture = tmp_path / f"{scheme}.png"
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--hide-scrollbars",
        f"--window-size={width},2400",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        f"--screenshot={picture}",
        (folder / "report.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert picture.is_file(), done.stderr
    pixels = matplotlib.image.imread(picture)[..., :3]
    page = pixels[5, 5]  # the page's own colour, in the corner
    assert (page.mean() < 0.2) == (scheme == "dark")
    # Cards from edge to edge and ink of both kinds, and nothing that runs past the right edge.
    assert np.abs(pixels[:, -4:] - page).max() < 0.02, "wider than the window"
    ink = np.abs(pixels.mean(axis=-1) - page.mean()) > 0.5
    assert 0.004 < ink.mean() < 0.4
    blue = (pixels[..., 2] - pixels[..., 0]) > 0.3
    assert blue.mean() > 0.004, "no picture was drawn"
