"""Options that all tests share."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ledger import Ledger


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-ledger",
        default=None,
        help="file to append what was injected to; docs/reliability.py makes its table from it",
    )


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Ledger:
    path = request.config.getoption("--fault-ledger")
    return Ledger(None if path is None else Path(path), request.node.nodeid)


def pytest_sessionstart(session: pytest.Session) -> None:
    path = session.config.getoption("--fault-ledger")
    if path is not None:
        line = {"command": " ".join(["pytest", *session.config.invocation_params.args])}
        with Path(path).open("a") as handle:
            handle.write(json.dumps(line) + "\n")


@pytest.fixture(scope="session")
def build_model() -> Callable[[str], Path]:
    """A small model by name (tests/support/models.py), built into the user's cache the first time."""
    from tests.support.models import build, cache_folder

    return lambda name: build(name, cache_folder())
