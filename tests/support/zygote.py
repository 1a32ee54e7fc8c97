"""torchrun in miniature, by fork: ranks that start in milliseconds, because the process that they
are forked from has imported everything already.

The agent does what torchrun's does, as far as a rank can see: it hosts the store, gives each rank its
variables, ends the others with SIGTERM and 30 seconds later with SIGKILL when one fails, passes
SIGTERM on, starts all again up to max_restarts times, and exits 1 when that does not help. Ranks are
sessions of their own and outlive an agent that is killed, as torchrun's do.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.faults import Fault, from_json, to_json

REPOSITORY = Path(__file__).resolve().parent.parent.parent
KILL_AFTER = 30.0


@dataclass(slots=True)
class Run:
    """A run under way, or over."""

    zygote: "Zygote"
    agent: int
    folder: Path
    begun: float = field(default_factory=time.monotonic)
    code: int | None = None

    def wait(self, timeout: float = 90.0) -> int:
        """The agent's exit code, once it and every rank have ended. Fails when they do not."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not self.alive():
                return self.code or 0
            time.sleep(0.02)
        alive = self.pids()
        self.kill_all()
        raise AssertionError(f"hung for {timeout} s: ranks {alive}\n{self.output()}")

    def alive(self) -> bool:
        if self.code is None:
            self.code = self.zygote.ask({"poll": self.agent})
        return self.code is None or bool(self.pids())

    def pids(self) -> dict[int, int]:
        """Rank to process number, of those that live."""
        pids: dict[int, int] = {}
        for path in self.folder.glob("pid-*"):
            pid = int(path.read_text() or 0)
            if pid and _lives(pid):
                pids[int(path.name.split("-")[1])] = pid
        return pids

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self.pids().get(rank)
        if pid is not None:
            _kill(pid, number)

    def kill_agent(self, number: int = signal.SIGKILL) -> None:
        _kill(self.agent, number)

    def kill_all(self) -> None:
        self.kill_agent()
        for pid in self.pids().values():
            _kill(pid, signal.SIGKILL)

    def codes(self) -> dict[int, int]:
        """Rank to exit code, as far as the agent saw them (128 + n for a signal n)."""
        return {
            int(path.name.split("-")[1]): int(path.read_text())
            for path in self.folder.glob("code-*")
        }

    def output(self, rank: int | None = None) -> str:
        ranks = sorted(self.folder.glob("out-*" if rank is None else f"out-{rank}"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in ranks)

    def errors(self) -> dict[int, str]:
        """Rank to what it wrote into torchrun's error file."""
        return {
            int(path.name.split("-")[1]): json.loads(path.read_text())["message"]["message"]
            for path in self.folder.glob("error-*")
        }

    def error_times(self) -> dict[int, float]:
        """Rank to when it wrote its error file; torchrun shows the first as the root cause."""
        return {
            int(path.name.split("-")[1]): path.stat().st_mtime
            for path in self.folder.glob("error-*")
        }


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Zygote:
    """The process that ranks are forked from. Start one a test session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._runs = 0

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        ranks: int = 1,
        faults: Sequence[Fault] = (),
        max_restarts: int = 0,
        nodes: int = 1,
    ) -> Run:
        """
        folder: for what the ranks print and for their process numbers.
        nodes: as many torchrun agents as far as ranks can see; all but the last do not count
            restarts, as agents do not whose own ranks did not fail, and the store outlives them.
        """
        self._runs += 1
        here = folder / f"run-{self._runs:04d}"
        here.mkdir(parents=True)
        agent = self.ask(
            {
                "argv": list(argv),
                "ranks": ranks,
                "faults": to_json(faults),
                "folder": str(here),
                "max_restarts": max_restarts,
                "nodes": nodes,
            }
        )
        return Run(self, agent, here)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


# Inside the zygote --------------------------------------------------------------------------------


def _serve() -> None:
    # The imports that are paid once.
    from transformers import CONFIG_MAPPING

    from extractor.run import extract  # noqa: F401
    from tests.support import fake_engine, fake_extract, faulty_writer  # noqa: F401

    _ = CONFIG_MAPPING["qwen3"]  # the fake model's config class, which imports a second's worth

    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            if pid:
                ended[pid] = _code(status)
            answer = ended.get(request["poll"])
        else:
            if any(item.startswith("--sglang") for item in request["argv"]):
                import sglang.srt.server_args  # noqa: F401  (its fields are looked up; seconds, once)
            answer = os.fork()
            if answer == 0:
                sys.stdin.close()
                os._exit(_agent(request))
        print(json.dumps(answer), flush=True)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class _Asked(Exception):
    """The agent itself was asked to end."""


def _on_signal(number: int, _: object) -> None:
    raise _Asked(number)


def _agent(request: dict[str, Any]) -> int:
    folder, ranks = Path(request["folder"]), request["ranks"]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    import torch.distributed as dist

    store: dist.TCPStore | None = None
    for restart in range(request["max_restarts"] + 1):
        pids, write_port = _fork_ranks(request, folder, ranks, restart)
        if store is None or request["nodes"] == 1:
            store = dist.TCPStore(
                "localhost",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
            )
        for descriptor in write_port:
            os.write(descriptor, str(store.port).encode())
            os.close(descriptor)
        signal.signal(signal.SIGTERM, _on_signal)
        signal.signal(signal.SIGINT, _on_signal)
        try:
            good = _watch(pids, folder)
        except _Asked:
            _end(pids, folder)
            return 1
        if good:
            return 0
        _end(pids, folder)
    return 1


def _fork_ranks(
    request: dict[str, Any], folder: Path, ranks: int, restart: int
) -> tuple[dict[int, int], list[int]]:
    """Ranks are forked before the store exists, so that none holds a copy of its sockets."""
    pids: dict[int, int] = {}
    pipes: list[int] = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in pipes:
                os.close(other)
            os.close(write)
            os.setsid()
            port = os.read(read, 16).decode()
            os._exit(_rank(request, folder, rank, restart, port) if port else 1)
        os.close(read)
        pipes.append(write)
        pids[rank] = pid
        (folder / f"pid-{rank}").write_text(str(pid))
    return pids, pipes


def _rank(request: dict[str, Any], folder: Path, rank: int, restart: int, port: str) -> int:
    out = os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    nodes = request["nodes"]
    failing_node = rank * nodes // request["ranks"] == nodes - 1
    os.environ.update(
        GROUP_WORLD_SIZE=str(nodes),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["ranks"]),
        LOCAL_WORLD_SIZE=str(request["ranks"]),
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(restart if failing_node else 0),
        TORCHELASTIC_ERROR_FILE=str(folder / f"error-{rank}"),
    )
    from tests.support.fake_extract import run

    try:
        return run(request["argv"], from_json(request["faults"]), folder / "fsync.log")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1


def _watch(pids: dict[int, int], folder: Path) -> bool:
    """Until all have ended well (True) or one has not (False); pids keeps those that live."""
    while pids:
        for rank, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                (folder / f"code-{rank}").write_text(str(_code(status)))
                if status:
                    return False
        time.sleep(0.02)
    return True


def _end(pids: dict[int, int], folder: Path) -> None:
    for pid in pids.values():
        _kill(pid, signal.SIGTERM)
    end = time.monotonic() + KILL_AFTER
    while pids:
        for rank, pid in list(pids.items()):
            if time.monotonic() > end:
                _kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                (folder / f"code-{rank}").write_text(str(_code(status)))
        time.sleep(0.02)


if __name__ == "__main__":
    _serve()
