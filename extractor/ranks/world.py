"""How the ranks of a run talk to each other, apart from the collectives inside the model.

A world has tp x replicas ranks, as torchrun's environment says; one process without torchrun is a world
of one rank. Each replica has process groups of its own, so that replicas never wait for each other on
the GPU. Ranks of different replicas talk only through torchrun's key-value store.
"""

import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from extractor.errors import RunError
from extractor.progress import say
from extractor.ranks.place import Place
from extractor.ranks.signals import Stopped
from extractor.records import Batch
from extractor.torchrun import Launch

# The timeout of the gloo group that sends batches. Ranks may wait in it for hours while a disk is slow.
# A dead rank is noticed without it, because torchrun ends the others and gloo sees its socket close.
PATIENCE = timedelta(days=7)

# How long rank 0 waits for the other ranks at the end.
FAREWELL_SECONDS = 10.0

# How long a rank waits until rank 0, which may be on another node, answers its question in _life().
WELCOME_SECONDS = 600.0

# How long a rank waits for the store of torchrun's agent, how long for the store of rank 0 where no
# agent has one, and after how long it says that it waits.
AGENT_SECONDS, HOST_SECONDS = 30.0, 120.0
SAID_AFTER_SECONDS = 5.0
_STOP = -1


class World:
    """The store that all ranks share, and the process groups of this replica.

    A process makes one and calls leave() at the end. All methods that use the store raise RunError when
    it does not answer."""

    def __init__(self, place: Place, stopping: Callable[[], bool] = lambda: False) -> None:
        """Connect to the store.

        stopping: returns whether this rank was asked to stop, which shortens the waits.

        Raises RunError when the store, or rank 0, does not answer in time, and Stopped when this rank is
        asked to stop before the store is open."""
        self.place = place
        store = _open_store(place, stopping)
        with _store_errors():
            self._store = dist.PrefixStore(f"extractor/{_life(store, place, stopping)}", store)

    # Values that one rank publishes and the others read ---------------------------------------

    def tell(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key."""
        with _store_errors():
            self._store.set(key, json.dumps(value))

    def hear(self, key: str, while_waiting: Callable[[], None] = lambda: None) -> Any:
        """Wait without a time limit for the value that another rank publishes under a key.

        while_waiting is called at least every half second or so and may raise to end the wait."""
        pause = 0.01
        with _store_errors():
            while not self._store.check([key]):
                try:
                    while_waiting()
                except BaseException:
                    if self._store.check([key]):  # the value came in the same moment, so it counts
                        break
                    raise
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
            return json.loads(self._store.get(key))

    def next_number(self, key: str) -> int:
        """The next value of a shared counter: 0, 1, 2, ... over the calls of all ranks."""
        with _store_errors():
            return int(self._store.add(key, 1)) - 1

    # A replica's ranks go on together or not at all, whichever of them is stopped at which moment -

    def meet(self, what: str, while_waiting: Callable[[], None]) -> bool:
        """Wait until all ranks of this replica have called it. False when one has called it off.

        what: names the meeting point. while_waiting may raise (see hear); the caller then asks
        call_off() what the other ranks do."""
        key = f"{what}/{self.place.replica}"
        with _store_errors():
            if self._store.add(f"{key}/here", 1) == self.place.tp:
                self._decide(key, "go")
        return self.hear(key, while_waiting) == "go"

    def call_off(self, what: str, replica: int) -> bool:
        """Keep the ranks of a replica from going on at a meeting point.

        Returns whether it is called off: False when the ranks have met already."""
        with _store_errors():
            return self._decide(f"{what}/{replica}", "stop") == "stop"

    def _decide(self, key: str, wish: str) -> str:
        """Store a wish unless a rank has stored one before; returns the wish that holds for all."""
        return json.loads(self._store.compare_set(key, "", json.dumps(wish)))

    def board(self) -> "Board":
        """The same store for the watch thread. In a world of several ranks it has a connection of its
        own, so that its calls do not wait for those of other threads."""
        return Board(self._store if self.place.world_size == 1 else self._store.clone())

    # The replica's own groups ----------------------------------------------------------------

    def join_replica(self, device: torch.device) -> None:
        """Make the process groups of the replica's tp ranks.

        They are the default group, on which SGLang builds its own (NCCL on CUDA, else gloo), and a gloo
        group that sends batches."""
        place = self.place
        store = dist.PrefixStore(f"replica{place.replica}", self._store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.tp_rank,
            world_size=place.tp,
            timeout=timedelta(minutes=10),
        )
        self._control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def share_batch(self, batch: Batch | None) -> Batch | None:
        """Send the next batch, or None for the end, from the writer to the ranks of its replica.

        The writer passes the batch and gets it back. The other ranks pass None and get a batch with
        lengths and ids but without samples. There are two gloo broadcasts, both int64: a header [3] with
        number, sequences and tokens, and a body [sequences + tokens] with the lengths and the ids."""
        if self.place.tp == 1:
            return batch
        if self.place.is_writer:
            shape = [_STOP, 0, 0] if batch is None else [batch.number, len(batch.lengths), 0]
            if batch is not None:
                shape[2] = batch.num_tokens
            header = torch.tensor(shape, dtype=torch.int64)
        else:
            header = torch.empty(3, dtype=torch.int64)
        dist.broadcast(header, 0, self._control)
        number, sequences, tokens = header.tolist()
        if number == _STOP:
            return None
        if batch is not None:
            body = torch.cat([torch.tensor(batch.lengths, dtype=torch.int64), batch.input_ids])
        else:
            body = torch.empty(sequences + tokens, dtype=torch.int64)
        dist.broadcast(body, 0, self._control)
        if batch is not None:
            return batch
        return Batch(number, tuple(body[:sequences].tolist()), body[sequences:].clone())

    def least(self, value: int) -> int:
        """The smallest value among the ranks of the replica, so that all of them plan alike."""
        if self.place.tp == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, self._control)
        return int(tensor)

    def leave(self) -> None:
        """Destroy the process groups; rank 0 then waits until the other ranks have left."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.place.world_size > 1:
            with contextlib.suppress(RunError), _store_errors():
                self._leave_last()

    def _leave_last(self) -> None:
        """Count this rank as gone; rank 0 waits for the others, for at most FAREWELL_SECONDS.

        Rank 0 may host the store, and torchrun ends the ranks that are left as soon as one exits with a
        code other than 0."""
        if self.place.rank:
            self._store.add("left", 1)
            return
        end = time.monotonic() + FAREWELL_SECONDS
        while self._store.add("left", 0) < self.place.world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)


class Board:
    """Notes of ranks to each other: the part of the store that the watch uses.

    The methods raise RunError when the store does not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("watch", store)

    def post(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key."""
        with _store_errors():
            self._store.set(key, json.dumps(value))

    def look(self, key: str) -> Any | None:
        """The value under a key, or None when there is none; it does not wait for one."""
        with _store_errors():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def first(self, key: str) -> bool:
        """True for the first call with this key over all ranks, False for the others."""
        with _store_errors():
            return self._store.add(key, 1) == 1


@contextlib.contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RunError(
            "torchrun's store does not answer: torchrun, or the node that it began on, is gone"
        ) from error


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone. The cause is then the error of that
    rank, and not this one."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _open_store(place: Place, stopping: Callable[[], bool]) -> dist.Store:
    """Connect to torchrun's own store, at the address in its variables.

    No rank opens a port of its own, except rank 0 in a world where torchrun's agent has no store: there
    rank 0 hosts it. One process without torchrun gets a store in memory.

    Raises RunError when no store answers in time, and Stopped when this rank is asked to stop before."""
    launch = Launch.from_environment()
    if not launch.host:
        return dist.HashStore()
    # An agent opens its store before it starts its ranks, so a short wait is enough: when the store does
    # not answer, the agent has died. Rank 0 may still have to start.
    patience = AGENT_SECONDS if launch.agent_has_store else HOST_SECONDS
    opened: queue.Queue[dist.Store | Exception] = queue.Queue()
    # A thread connects, because the connection is made in C code where no signal handler runs.
    threading.Thread(target=_connect, args=(launch, patience, opened), daemon=True).start()
    where = f"{launch.host}:{launch.port}"
    whose = "torchrun's store" if launch.agent_has_store else "the store of rank 0"
    begun, said = time.monotonic(), False
    while (waited := time.monotonic() - begun) < patience:
        with contextlib.suppress(queue.Empty):
            store = opened.get(timeout=0.2)
            if isinstance(store, Exception):
                raise RunError(f"cannot reach {whose} at {where}: {_first_line(store)}") from store
            store.set_timeout(timedelta(seconds=patience))
            return store
        if stopping():
            raise Stopped("while connecting")
        if waited > SAID_AFTER_SECONDS and not said:
            say(f"rank {place.rank} waits for {whose} at {where}, for at most {patience:.0f} s")
            said = True
    raise RunError(
        f"rank {place.rank} has not reached {whose} at {where} in {patience:.0f} s: "
        "start all ranks, rank 0 among them, as torchrun does"
    )


def _connect(
    launch: Launch, patience: float, opened: "queue.Queue[dist.Store | Exception]"
) -> None:
    try:
        store = dist.TCPStore(
            launch.host,
            launch.port,
            world_size=launch.world_size,
            is_master=launch.rank == 0 and not launch.agent_has_store,
            # Longer than _open_store waits, so that its message is shown and not this timeout's.
            timeout=timedelta(seconds=2 * patience),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError, ValueError) as error:
        opened.put(error)
    else:
        opened.put(store)


def _first_line(error: Exception) -> str:
    """The first line of an error's text, without the C++ stack that PyTorch adds."""
    return str(error).partition("\n")[0]


def _life(store: dist.Store, place: Place, stopping: Callable[[], bool]) -> str:
    """A name for this start of the ranks, the same on all of them.

    It is part of every key, so that values that the ranks left in the store before torchrun restarted
    them are not read again.

    With one node it is the agent's count of restarts. The counts of several nodes do not agree, because
    a node whose ranks are restarted after a failure on another node does not count that restart. There
    rank 0 makes a random name and sends it to each rank that asks. Raises RunError when it does not
    answer in time."""
    if place.nodes == 1:
        return str(place.restart)
    if place.rank == 0:
        life = uuid.uuid4().hex
        keeper = threading.Thread(
            target=_welcome, args=(store.clone(), place.world_size, life), daemon=True
        )
        keeper.start()
        return life
    # The question is random, so that an answer to an earlier start's question cannot be taken for its
    # own.
    question = uuid.uuid4().hex
    store.set(f"extractor/question/{place.rank}", question)
    begun = time.monotonic()
    while not store.check([f"extractor/answer/{question}"]):
        patience = FAREWELL_SECONDS if stopping() else WELCOME_SECONDS
        if time.monotonic() - begun > patience:
            raise RunError(f"rank 0 has not come in {patience:.0f} s")
        time.sleep(0.1)
    life = store.get(f"extractor/answer/{question}").decode()
    store.set(f"extractor/{life}/here/{place.rank}", "")
    return life


def _welcome(store: dist.Store, ranks: int, life: str) -> None:
    """Answer each rank's question until all ranks have read the name.

    A question of a rank that has died may be answered too, which does no harm."""
    missing = set(range(1, ranks))
    with contextlib.suppress(dist.DistError):  # the watch reports that the store does not answer
        while missing:
            for rank in sorted(missing):
                if store.check([f"extractor/{life}/here/{rank}"]):
                    missing.discard(rank)
                elif store.check([f"extractor/question/{rank}"]):
                    question = store.get(f"extractor/question/{rank}").decode()
                    store.set(f"extractor/answer/{question}", life)
            time.sleep(0.1)
