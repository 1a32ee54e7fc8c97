"""What torchrun tells a rank in environment variables, and what a rank tells torchrun in a file.

Nothing here imports PyTorch, so that a command line that cannot run is refused at once.
"""

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from extractor.errors import RunError, UsageError
from extractor.printable import printable
from extractor.terminal import readable

# torchrun sets all of these. A process that was started alone has none of the first four.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ADVICE = "start with torchrun, which sets them all, or unset them to run one process alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process among those that were started together.

    Attributes:
        rank, world_size: of this process, over all machines.
        local_rank, local_size: the same on this machine.
        restart: how often this machine's torchrun has restarted its ranks.
        nodes: torchrun agents of this world.
        host, port: where the store is that all ranks share; "" and 0 for one process alone.
        agent_has_store: torchrun itself hosts the store; otherwise rank 0 does.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restart: int = 0
    nodes: int = 1
    host: str = ""
    port: int = 0
    agent_has_store: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Launch":
        """Raises UsageError for variables that do not fit together."""
        env = os.environ if environment is None else environment
        if not any(name in env for name in RANKS):
            return cls()
        _check_present(env)
        alone = _number(env, "WORLD_SIZE", 1, 1) == 1 and "MASTER_ADDR" not in env
        launch = cls(
            rank=_number(env, "RANK", 0, 0),
            world_size=_number(env, "WORLD_SIZE", 1, 1),
            local_rank=_number(env, "LOCAL_RANK", 0, 0),
            local_size=_number(env, "LOCAL_WORLD_SIZE", 1, 1),
            restart=_number(env, "TORCHELASTIC_RESTART_COUNT", 0, 0),
            nodes=_number(env, "GROUP_WORLD_SIZE", 1, 1),
            host="" if alone else env["MASTER_ADDR"],
            port=0 if alone else _number(env, "MASTER_PORT", 0, 1, 65535),
            agent_has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        _check_order(launch)
        return launch


def _check_present(env: Mapping[str, str]) -> None:
    """One process needs to know its rank and the size of its world; one of several needs all."""
    several = env.get("WORLD_SIZE", "1") != "1"
    needed = (*RANKS, *ADDRESS) if several else RANKS[:2]
    if "MASTER_ADDR" in env:
        needed = (*needed, "MASTER_PORT")
    missing = [name for name in dict.fromkeys(needed) if not env.get(name)]
    if missing:
        given = ", ".join(f"{name}={printable(env[name])}" for name in RANKS if name in env)
        raise UsageError(f"{given} in the environment without {', '.join(missing)}: {ADVICE}")


def _check_order(launch: Launch) -> None:
    pairs = (
        ("RANK", launch.rank, "WORLD_SIZE", launch.world_size, False),
        ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.local_size, False),
        ("LOCAL_WORLD_SIZE", launch.local_size, "WORLD_SIZE", launch.world_size, True),
        ("GROUP_WORLD_SIZE", launch.nodes, "WORLD_SIZE", launch.world_size, True),
    )
    for name, value, limit_name, limit, may_be_equal in pairs:
        if value > limit or (value == limit and not may_be_equal):
            raise UsageError(
                f"{name}={value} does not fit {limit_name}={limit}: wanted "
                f"{'at most' if may_be_equal else 'less than'} {limit}; {ADVICE}"
            )


def _number(env: Mapping[str, str], name: str, default: int, least: int, most: int = 10**9) -> int:
    text = env.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise UsageError(
            f"{name}={printable(text)}: wanted a whole number, {least} or more; {ADVICE}"
        )
    return int(text)


def is_first_here() -> bool:
    """Whether this process speaks for its machine: torchrun's local rank 0, or one alone."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def record_error(error: BaseException) -> None:
    """Write torchrun's error file, so that its report ends with this error: the line that a person is
    to read, or a traceback when the error is nobody's mistake but this program's own."""
    if isinstance(error, UsageError | RunError):
        record_line(str(error))
    else:
        _write(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def record_line(text: str) -> None:
    """The same for a line. Without torchrun nothing is written."""
    _write(text, f"extractor: {text}")


def has_recorded() -> bool:
    """Whether this process's error file is written already."""
    return os.path.exists(os.environ.get(ERROR_FILE, ""))  # noqa: PTH110  ("" is no path)


def _write(message: str, shown: str) -> None:
    """torchrun prints `py_callstack` at the end of its report, and orders ranks by the time."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": readable(shown), "timestamp": str(int(time.time()))}
    content = {"message": {"message": readable(message), "extraInfo": extra}}
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(content, file)
    except OSError:
        return  # torchrun reports the exit code without it
