"""`extractor report OUT`: one HTML page of what a folder holds and how it was made.

The page needs no network and no script: pictures are SVG in the page itself, drawn by matplotlib, and
take their colours from the page, light or dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from extractor.config import parse
from extractor.errors import EXIT_OK, UsageError
from extractor.files import write_whole
from extractor.progress import say
from extractor.regular import writing
from extractor.values import NotNegative

PAGE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Draw a page of what an output folder holds and how it was made."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder that extract or convert wrote; it may still be growing."""
    page: Path | None = None
    """File to write; default: report.html in the folder."""
    states_of: NotNegative = 64
    """How many samples' states to read, evenly spread over the rows."""


def report(argv: Sequence[str]) -> int:
    """The verb: returns the exit code, raises UsageError and RunError."""
    config = parse(ReportConfig, argv, "extractor report")
    if find_spec("matplotlib") is None:
        raise UsageError('report needs matplotlib: pip install "hidden-state-extractor[report]"')
    from extractor.verbs.report.facts import gather  # noqa: PLC0415
    from extractor.verbs.report.page import render  # noqa: PLC0415

    text = render(gather(config.folder, config.states_of))
    page = config.page or config.folder / PAGE
    with writing():
        write_whole(page, [text.encode("utf-8", "backslashreplace")], sync=False)
    say(f"{page} ({len(text) / 1024:,.0f} KiB)")
    return EXIT_OK
