"""Options that all tests share."""

import json
import os
import platform
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ledger import Ledger

NOT_RUN = "NOT RUN: "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-ledger",
        default=None,
        help="file to append what was injected to; docs/make_reliability.py makes its table from it",
    )


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Ledger:
    path = request.config.getoption("--fault-ledger")
    return Ledger(None if path is None else Path(path), request.node.nodeid)


def pytest_sessionstart(session: pytest.Session) -> None:
    _note(
        session,
        {
            "command": shlex.join(["pytest", *session.config.invocation_params.args]),
            "machine": f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU",
            "date": time.strftime("%Y-%m-%d"),
        },
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _note(session, {"ended": int(exitstatus), "failed": session.testsfailed})


def _note(session: pytest.Session, line: dict[str, object]) -> None:
    path = session.config.getoption("--fault-ledger")
    if path is not None:
        with Path(path).open("a") as handle:
            handle.write(json.dumps(line) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a machine lacks must not look like success: tests that skip themselves for want of a
    browser or of another project's environment say so in the last lines."""
    said: set[str] = set()
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if NOT_RUN in reason:
            said.add(f"{report.nodeid.partition('::')[0]}: {reason.partition(NOT_RUN)[2]}")
    for line in sorted(said):
        terminalreporter.write_line(f"{NOT_RUN}{line}", yellow=True, bold=True)


@pytest.fixture(scope="session")
def build_model() -> Callable[[str], Path]:
    """A small model by name (tests/support/models.py), built into the user's cache the first time."""
    from tests.support.models import build, cache_folder

    return lambda name: build(name, cache_folder())
