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


@pytest.fixture(scope="session")
def build_model() -> Callable[[str], Path]:
    """A small model by name (tests/support/models.py), built into the user's cache the first time."""
    from tests.support.models import build, cache_folder

    return lambda name: build(name, cache_folder())
