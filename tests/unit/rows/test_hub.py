"""Rows of a dataset on a hub: here a hub of one dataset, on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "1" * 40
ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "one"}]},
    {"id": "b", "messages": [{"role": "user", "content": "two\u2028lines"}]},
    {"id": "c", "messages": []},
]
FILE = "rows.jsonl"
CONTENT = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
READ = """
import json, sys
from extractor.rows.read import open_sources, read_rows
from extractor.errors import UsageError
try:
    sources = open_sources([sys.argv[1]])
    print(json.dumps([[row.number, row.file, row.line, row.data] for row in read_rows(sources)]))
except UsageError as error:
    print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as reading `owner/rows` asks for."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        oid = hashlib.sha1(CONTENT).hexdigest()
        if path.startswith("/api/datasets/owner/rows/tree/"):
            entry = {"type": "file", "path": FILE, "size": len(CONTENT), "oid": oid}
            self._answer(200, json.dumps([entry]).encode())
        elif path.startswith("/api/datasets/owner/rows"):
            info = {"id": "owner/rows", "sha": COMMIT, "private": False, "tags": []}
            self._answer(200, json.dumps({**info, "siblings": [{"rfilename": FILE}]}).encode())
        elif path.endswith(f"/resolve/{COMMIT}/{FILE}"):
            self._answer(200, CONTENT, ("ETag", f'"{oid}"'), ("X-Repo-Commit", COMMIT))
        else:
            known = path.startswith("/datasets/owner/rows/")
            code = "EntryNotFound" if known else "RepoNotFound"
            self._answer(404, b"", ("X-Error-Code", code))

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is not this server's."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def read(item: str, endpoint: str, cache: Path) -> Any:
    """What the program reads from it, in a process whose only hub is the one here."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", READ, item],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("item", ["owner/rows", "owner/rows:train"])
def test_rows_of_a_hub_dataset(item: str, endpoint: str, tmp_path: Path) -> None:
    found = read(item, endpoint, tmp_path)
    assert [(row, file, line) for row, file, line, _ in found] == [
        (n, item, n + 1) for n in range(3)
    ]
    assert [data for *_, data in found] == ROWS


def test_a_part_of_a_split(endpoint: str, tmp_path: Path) -> None:
    found = read("owner/rows:train[1:2]", endpoint, tmp_path)
    assert [data["id"] for *_, data in found] == ["b"]


@pytest.mark.parametrize("item", ["owner/nothing", "owner/rows:test"])
def test_what_the_hub_has_not_is_one_line(item: str, endpoint: str, tmp_path: Path) -> None:
    message = read(item, endpoint, tmp_path)
    assert message.startswith(f"--data {item}: no such file or folder, and the hub did not give it")
    assert "\n" not in message
